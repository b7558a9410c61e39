"""Checkpoints: states that stay, without copying a row. Needs neither ggml nor cffi.

A step reads a sequence's state from one cell and may write the new state to another; the host's graph does that gather
in any case. So a checkpoint is made by pinning the cell in which the state lies: at its next step the sequence takes a
free cell, and the old one stays as it is. A rollback lets the sequence share the pinned cell again. Neither copies
anything.

`CheckpointStore` holds the checkpoints of one cache: which there are, which is the nearest to some tokens, and which is
evicted when there are too many. When one is due is asked of a `policy.CheckpointPolicy`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..cells.table import CellTable
from ..cells.ubatch import CELL_NONE, UBatch
from ..errors import InvalidArgument, StaleCheckpoint, counted
from .history import Histories
from .policy import CheckpointPolicy, Step
from .tree import PrefixTree


class Checkpoint:
    """A receipt for a state that stays. It is valid until it is released or evicted; then it is stale.

    Only the cache makes them. The state in the cell never changes while the checkpoint is valid.
    """

    __slots__ = ("_gone", "held", "n_tokens", "pin", "seq_ids", "tokens", "used")

    def __init__(self, pin: int, n_tokens: int, tokens: array[int] | None, held: bool) -> None:
        self.pin = pin
        """Of the cell table."""
        self.n_tokens = n_tokens
        """Tokens that the state has read: the sequence's position is one less."""
        self.tokens = tokens
        """These tokens, [n_tokens]; None when they are not known."""
        self.held = held
        """Made on request, or marked by the host: evicted after what the cache makes by itself."""
        self.seq_ids: set[int] = set()
        """Sequences that may roll back to it, where that matters (see `CheckpointStore`)."""
        self.used = 0
        self._gone = ""

    @property
    def valid(self) -> bool:
        """Whether the state is still there."""
        return not self._gone

    def check(self) -> Checkpoint:
        """Itself. Raises `StaleCheckpoint` when the state is gone, saying why."""
        if self._gone:
            raise StaleCheckpoint(f"the checkpoint of {counted(self.n_tokens, 'token')} is gone: {self._gone}")
        return self

    def end(self, why: str) -> None:
        """Makes it stale."""
        self._gone = why

    def __repr__(self) -> str:
        return f"<Checkpoint of {counted(self.n_tokens, 'token')}{', gone: ' + self._gone if self._gone else ''}>"


@dataclass(slots=True)
class Stats:
    """Counts since the cache was made; checkpoints and bytes as of now."""

    tokens_asked: int = 0
    """Tokens of all prompts; 0 unless the host tells (`Checkpoints.count_prompt`)."""
    tokens_reused: int = 0
    """Of these, tokens that some state had read already."""
    tokens_replayed: int = 0
    """Tokens replayed by rollbacks, from a checkpoint to the position asked for."""
    tokens_read: int = 0
    """All other tokens, prompts and answers."""
    checkpoints_made: int = 0
    checkpoints_used: int = 0
    """Times that a sequence went to one."""
    checkpoints_evicted: int = 0
    """Gone because the cell was needed."""
    checkpoints_skipped: int = 0
    """Not made because every cell for checkpoints is held."""
    refused: int = 0
    """Rollbacks that were not possible."""
    checkpoints: int = 0
    """How many there are now."""
    bytes: int = 0
    """What the cells for checkpoints take, used or not."""


@dataclass(slots=True)
class _Steady:
    """Steps of single tokens of the same sequences, one after the other: nothing is due for some time."""

    seq_ids: tuple[tuple[int, ...], ...]
    """The sets of these steps, the very object."""
    appends: list[Callable[[int], None]]
    """Takes a token into the record of each."""
    left: int
    """Steps before the policy has to be asked."""
    epoch: int
    """Of the table as the last of these steps has left it: anything else that happens to a sequence changes it."""
    batch: int


class CheckpointStore:
    """The checkpoints of the sequences of `table`, in at most `n_cells` of its cells.

    With `hybrid` a sequence rolls back to checkpoints of its own past only, because the host keeps an attention half
    beside the state that has no other past. Without, any sequence may go to any checkpoint whose tokens begin its own,
    across conversations.
    """

    def __init__(self, table: CellTable, n_cells: int, policy: CheckpointPolicy, hybrid: bool) -> None:
        self.table = table
        self.n_cells = n_cells
        self.policy = policy
        self.hybrid = hybrid
        self.stats = Stats()
        self.histories = Histories(table.n_seq_max)
        self._tree: PrefixTree[Checkpoint] = PrefixTree()  # of those that any sequence may go to
        self._all: dict[int, Checkpoint] = {}  # by pin
        self._clock = 0
        self._steady: _Steady | None = None
        self._is_steady = False  # the step under way

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(list(self._all.values()))

    # steps

    def before_step(self, ubatch: UBatch, batch: int) -> None:
        """Makes what is due before `ubatch`, a part of batch `batch`, is given its slot."""
        steady, table = self._steady, self.table
        self._is_steady = (
            steady is not None and ubatch.seq_ids is steady.seq_ids and ubatch.n_seq_tokens == 1 and steady.left > 0
            and steady.epoch == table.epoch and steady.batch != batch
        )
        if self._is_steady:
            return
        n_next, quiet = ubatch.n_seq_tokens, self.policy.quiet_tokens
        seqs, tails = self.histories.seqs, table.raw()[3]
        for seq_id in ubatch.primary:
            history = seqs[seq_id]
            if tails[seq_id] == CELL_NONE:
                self.emptied(seq_id)
                continue
            n_tokens = len(history.tokens)
            since = n_tokens - history.since
            if not history.whole or (n_next == 1 == history.batch_tokens and since < quiet and not history.branch):
                continue
            step = Step(n_tokens, since, n_next, history.batch == batch, history.batch_tokens, history.branch)
            if self.policy.due(step):
                self.make(seq_id)

    def after_step(self, ubatch: UBatch, batch: int, *, gaps: bool, replayed: bool) -> None:
        """`ubatch` has its slot, and nothing has happened since: its tokens count as read.

        `gaps`: some positions do not follow those before.
        """
        steady = self._steady
        if steady is not None and self._is_steady and ubatch.token is not None and not gaps:
            for append, token in zip(steady.appends, ubatch.token.tolist(), strict=True):
                append(token)
            steady.left -= 1
            steady.epoch, steady.batch = self.table.epoch, batch
        else:
            self.histories.read(ubatch, batch)
            self._steady = self._begin_steady(ubatch, batch)
        if replayed:
            self.stats.tokens_replayed += ubatch.n_tokens
        else:
            self.stats.tokens_read += ubatch.n_tokens

    def _begin_steady(self, ubatch: UBatch, batch: int) -> _Steady | None:
        if ubatch.n_seq_tokens != 1 or ubatch.shared:
            return None
        records = [self.histories.seqs[seq_id] for seq_id in ubatch.primary]
        if not all(each.whole and each.batch_tokens == 1 for each in records):
            return None
        left = self.policy.quiet_tokens - max(len(each.tokens) - each.since for each in records)
        return _Steady(ubatch.seq_ids, [each.tokens.append for each in records], left, self.table.epoch, batch)

    # making and evicting

    def make(self, seq_id: int, *, held: bool = False, spare: Checkpoint | None = None) -> Checkpoint | None:
        """Makes a checkpoint of a sequence as it is. None: it is empty, or every cell is held, which is counted.

        There is one checkpoint a state at most. What the cache makes by itself must be known by its tokens; `held` ones
        may be without. `spare` is not evicted for it.
        """
        table = self.table
        cell_id = table.tail(seq_id)
        if cell_id == CELL_NONE:
            return None
        history = self.histories[seq_id]
        tokens = history.tokens[:] if history.whole else None
        if tokens is not None:
            known = self._known(seq_id, tokens)
            if known is not None:
                known.held |= held
                self._touch(known)
                history.since, history.last = len(tokens), known
                return known
        if tokens is None and not held:
            return None
        if not self.room_for(cell_id, spare):
            self.stats.checkpoints_skipped += 1
            return None
        pin = table.pin(seq_id)
        made = Checkpoint(pin, table.seq_pos_max(seq_id) + 1, tokens, held)
        made.seq_ids.add(seq_id)
        self._enter(made)
        history.since, history.last = len(history.tokens), made
        return made

    def _enter(self, made: Checkpoint) -> None:
        self._all[made.pin] = made
        if made.tokens is not None and not self.hybrid:
            self._tree.insert(made.tokens, made)
        self._touch(made)
        self.stats.checkpoints_made += 1

    def to_save(self, seq_ids: Iterable[int]) -> list[Checkpoint]:
        """The checkpoints whose states go with those of `seq_ids`, the most useful first; each in a cell of its own.

        None with `hybrid`: a state alone is of no use there.
        """
        found = {} if self.hybrid else {each.pin: each for seq_id in seq_ids for each in self.of(seq_id)}
        by_cell = {self.table.pin_cell(each.pin): each for each in found.values()}
        return sorted(by_cell.values(), key=self._usefulness, reverse=True)

    def adopt(self, tokens: array[int], put: Callable[[int], None]) -> bool:
        """Makes a checkpoint of `tokens` whose rows `put` puts into the cell that it is given; false: there is no room.

        Known tokens are left as they are. Nothing is evicted.
        """
        if self.hybrid or not tokens or self._tree.get(tokens) is not None:
            return True
        cell_id = self.table.next_empty(0)
        if cell_id == CELL_NONE or len(self._cells()) >= self.n_cells:
            return False
        put(cell_id)
        self._enter(Checkpoint(self.table.pin_empty(cell_id, len(tokens) - 1), len(tokens), tokens, False))
        return True

    def _known(self, seq_id: int, tokens: array[int]) -> Checkpoint | None:
        if not self.hybrid:
            return self._tree.get(tokens) if tokens else None
        own = (each for each in self._all.values() if seq_id in each.seq_ids and each.n_tokens == len(tokens))
        return next(own, None)

    def _cells(self) -> set[int]:
        return {self.table.pin_cell(pin) for pin in self._all}

    def room_for(self, cell_id: int, spare: Checkpoint | None) -> bool:
        """Whether `cell_id` can be pinned beside what is pinned; evicts for it if need be, but never `spare`."""
        while True:
            cells = self._cells()
            if cell_id in cells or len(cells) < self.n_cells:
                return True
            if not self.evict(not_held=True, spare=spare, why="evicted for a newer one"):
                return False

    def evict(
        self, *, not_held: bool = False, spare: Checkpoint | None = None, why: str = "evicted for a sequence"
    ) -> bool:
        """Evicts the least useful checkpoint; False when there is none (with `not_held`, none that is not held).

        Least useful: the fewest tokens to replay without it, for how long nobody has asked for it. Held ones, and those
        that have no other checkpoint before them in their lineage, go last.
        """
        candidates = [each for each in self._all.values() if each is not spare and not (not_held and each.held)]
        if not candidates:
            return False
        self._end(min(candidates, key=self._usefulness), why)
        self.stats.checkpoints_evicted += 1
        return True

    def _usefulness(self, one: Checkpoint) -> tuple[bool, bool, float]:
        before = self._before(one)
        n_replay = one.n_tokens - before
        return one.held, before == 0, n_replay / (1 + self._clock - one.used)

    def _before(self, one: Checkpoint) -> int:
        """Tokens of the checkpoint that comes before it in its lineage; 0 if none does."""
        if self.hybrid:
            return max((each.n_tokens for each in self._all.values()
                        if each.n_tokens < one.n_tokens and one.seq_ids <= each.seq_ids), default=0)
        above = self._tree.above(one.tokens) if one.tokens is not None else None
        return 0 if above is None else above.n_tokens

    def release(self, one: Checkpoint) -> None:
        """Ends a checkpoint on request. Raises `StaleCheckpoint`."""
        self._end(self.check(one), "released")

    def check(self, one: Checkpoint) -> Checkpoint:
        """`one`, if it is a valid checkpoint of this cache. Raises `StaleCheckpoint`, `InvalidArgument`."""
        if self._all.get(one.check().pin) is not one:
            raise InvalidArgument("the checkpoint is another cache's")
        return one

    def _end(self, one: Checkpoint, why: str) -> None:
        del self._all[one.pin]
        if one.tokens is not None and not self.hybrid and self._tree.get(one.tokens) is one:
            self._tree.remove(one.tokens)
        one.end(why)
        if self.table.is_pin(one.pin):
            self.table.unpin(one.pin)

    def end_all(self, why: str) -> None:
        """Ends every checkpoint."""
        for each in self:
            self._end(each, why)

    def end_dropped(self) -> None:
        """Ends the checkpoints whose cells the table has dropped."""
        for each in self:
            if not self.table.is_pin(each.pin):
                self._end(each, "the step that moved its cell failed")

    def _touch(self, one: Checkpoint) -> None:
        self._clock += 1
        one.used = self._clock

    # finding

    def of(self, seq_id: int) -> list[Checkpoint]:
        """The checkpoints that a sequence may roll back to, the shortest first."""
        history = self.histories[seq_id]
        if self.hybrid:
            found = [each for each in self._all.values() if seq_id in each.seq_ids]
        else:
            found = []
            most = len(history.tokens)
            while most > 0:
                match = self._tree.longest(history.tokens, most)
                if match is None:
                    break
                found.append(match.value)
                most = match.n_tokens - 1
        return sorted(found, key=lambda each: each.n_tokens)

    def nearest(self, seq_id: int, n_tokens: int) -> Checkpoint | None:
        """The last checkpoint before a sequence has read more than `n_tokens` tokens; None if there is none."""
        if not self.hybrid:
            return self.longest(self.histories[seq_id].tokens, n_tokens)
        own = [each for each in self._all.values() if seq_id in each.seq_ids and each.n_tokens <= n_tokens]
        return max(own, key=lambda each: each.n_tokens, default=None)

    def longest(self, tokens: array[int], most: int | None = None) -> Checkpoint | None:
        """The checkpoint that has read the most of ``tokens[:most]``, and nothing else. None with `hybrid`."""
        match = self._tree.longest(tokens, most) if len(tokens) else None
        return None if match is None else match.value

    def shared(self, tokens: array[int]) -> int:
        """Tokens at the start of `tokens` that some checkpoint's tokens start with too."""
        return self._tree.shared(tokens) if len(tokens) else 0

    # sequence operations

    def used(self, one: Checkpoint, seq_id: int) -> None:
        """A sequence has gone to `one`: its record is that checkpoint's now."""
        history = self.histories[seq_id]
        if one.tokens is None:
            history.forget()
        else:
            history.set(one.tokens)
        history.since, history.last = len(history.tokens), one
        self._touch(one)
        self.stats.checkpoints_used += 1

    def roll_back_to_last(self, seq_id: int, n_tokens: int) -> bool:
        """Rolls a sequence back to its last checkpoint, if that has read exactly `n_tokens`; else false.

        What is done most often, right after a step, when no code is in the processor's caches: so nothing is looked up.
        """
        history = self.histories[seq_id]
        last: Checkpoint | None = history.last
        if last is None or not last.valid or not last.n_tokens == n_tokens == history.since or not history.whole:
            return False
        if len(history.tokens) <= n_tokens:
            return False
        self.abandon(seq_id, to=last)
        self.table.go_to_pin(seq_id, last.pin)
        self.cut(seq_id, n_tokens)
        history.since, history.last = n_tokens, last  # the abandoned state may be one too, but not in this lineage
        self._touch(last)
        self.stats.checkpoints_used += 1
        return True

    def abandon(self, seq_id: int, to: Checkpoint | None = None) -> None:
        """A sequence is about to abandon its state for that of `to`: makes a checkpoint if the policy wants one."""
        history = self.histories[seq_id]
        if self.hybrid or not history.whole or not history.tokens:
            return  # the attention half can't be restored
        if self.policy.keep_abandoned(len(history.tokens) - history.since):
            self.make(seq_id, spare=to)

    def cut(self, seq_id: int, n_tokens: int) -> None:
        """A sequence was rolled back to its first `n_tokens` tokens, of what its record says."""
        self.histories[seq_id].cut(n_tokens)
        self.cut_lineage(seq_id, n_tokens)

    def cut_lineage(self, seq_id: int, n_tokens: int = 0) -> None:
        """With `hybrid`: checkpoints of more than `n_tokens` tokens are no longer in the lineage of a sequence."""
        if not self.hybrid:
            return
        for each in self:
            if seq_id in each.seq_ids and each.n_tokens > n_tokens:
                each.seq_ids.discard(seq_id)
                if not each.seq_ids:
                    self._end(each, f"sequence {seq_id} was rolled back beyond it")

    def emptied(self, seq_id: int) -> None:
        """A sequence has no state any more."""
        self.histories[seq_id].start()
        self.cut_lineage(seq_id)

    def forget(self, seq_id: int) -> None:
        """A sequence has a state that nothing is known of."""
        self.histories[seq_id].forget()
        self.cut_lineage(seq_id)

    def copied(self, source: int, target: int) -> None:
        """`target` is a fork of `source` now: it shares its state and its lineage."""
        if source == target:
            return
        self.cut_lineage(target)
        self.histories[target].copy_from(self.histories[source])
        if self.hybrid:
            for each in self._all.values():
                if source in each.seq_ids:
                    each.seq_ids.add(target)

    def shifted(self, seq_id: int) -> None:
        """The positions of a sequence, and of every one that shares its cell, have been shifted."""
        cell = self.table.tail(seq_id)
        if cell == CELL_NONE:
            return
        owners = self.table.cell(cell)
        for pin in owners.pins:
            if pin in self._all:
                self._end(self._all[pin], "the positions of its sequence were shifted")
        for owner in owners.seq_ids:
            self.forget(owner)

    def set_tokens(self, seq_id: int, tokens: array[int]) -> None:
        """A sequence has read exactly `tokens`, as the host tells."""
        self.histories[seq_id].set(tokens)
        self._steady = None
