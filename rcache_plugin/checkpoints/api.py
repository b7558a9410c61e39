"""`Checkpoints`: what a host may ask of a cache's checkpoints, ``cache.checkpoints``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .._access import Access
from ..cells.spec import CacheSpec
from ..cells.ubatch import CELL_NONE, Int32Array
from ..errors import InvalidArgument, Unsupported, counted
from .history import token_array
from .rollback import Replay, Rollback
from .store import Checkpoint, Stats


class Checkpoints:
    """The checkpoints of one cache. Calls raise `Unsupported` for a cache without cells for them, where no other answer
    is told, and `ClosedError` for a closed one.

    `changed` is called after whatever changes what the next step needs.
    """

    def __init__(self, rollback: Rollback, spec: CacheSpec, access: Access, changed: Callable[[], None]) -> None:
        self._rollback = rollback
        self._spec = spec
        self._access = access
        self._changed = changed

    # size

    @property
    def n_cells(self) -> int:
        """Cells for checkpoints; 0: none are made."""
        store = self._rollback.checkpoints
        return 0 if store is None else store.n_cells

    @property
    def n_bytes(self) -> int:
        """Bytes that these cells take, used or not."""
        return self.n_cells * (1 + self._rollback.table.n_rs_seq) * self._spec.cell_bytes

    @property
    def hybrid(self) -> bool:
        """Whether sequences roll back to their own past only."""
        store = self._rollback.checkpoints
        return store is not None and store.hybrid

    def all(self) -> list[Checkpoint]:
        """All there are, the shortest first."""
        with self._access:
            return sorted(self._rollback.store, key=lambda each: each.n_tokens)

    def of(self, seq_id: int) -> list[Checkpoint]:
        """The checkpoints that a sequence may roll back to, the shortest first. Raises `SeqIdError`."""
        with self._access:
            return self._rollback.store.of(self._rollback.table.check_seq_id(seq_id))

    # making and releasing

    def make(self, seq_id: int) -> Checkpoint | None:
        """Makes a checkpoint of a sequence as it is now, without a copy; the receipt is for `restore` and `release`.

        What the cache makes by itself is evicted for it. None when the sequence is empty, or all cells for checkpoints
        are held by such receipts. Raises `SeqIdError`.
        """
        return self._make(seq_id, held=True)

    def mark(self, seq_id: int) -> bool:
        """Tells that this is a place to roll back to later, such as the border between two messages of a chat.

        Whether there is a checkpoint of it now. False without cells for checkpoints. Raises `SeqIdError`.
        """
        return self.n_cells > 0 and self._make(seq_id, held=False) is not None

    def _make(self, seq_id: int, held: bool) -> Checkpoint | None:
        with self._access:
            self._rollback.table.check_seq_id(seq_id)
            made = self._rollback.store.make(seq_id, held=held)
            self._changed()  # the next step needs a cell more
            return made

    def release(self, checkpoint: Checkpoint) -> None:
        """Ends a checkpoint. Raises `StaleCheckpoint` when it has ended already."""
        with self._access:
            self._rollback.store.release(checkpoint)

    # finding

    def nearest(
        self, tokens: Sequence[int] | Int32Array | None = None, *, seq_id: int | None = None, pos: int | None = None
    ) -> Checkpoint | None:
        """The checkpoint that has read the most of `tokens` and nothing else; or, by `seq_id`, the last in the lineage
        of a sequence up to position `pos` (default: where it is). None if there is none, or `tokens` with `hybrid`.

        Raises `InvalidArgument` unless exactly one of `tokens` and `seq_id` is given.
        """
        with self._access:
            store, table = self._rollback.store, self._rollback.table
            if tokens is not None and seq_id is None:
                return store.longest(token_array(tokens))
            if tokens is not None or seq_id is None:
                raise InvalidArgument("nearest takes tokens or a seq_id")
            last = table.seq_pos_max(seq_id)
            return store.nearest(seq_id, (last if pos is None else pos) + 1)

    def known_prefix(self, tokens: Sequence[int] | Int32Array) -> int:
        """Tokens at the start of `tokens`, int32 [n], that the tokens of some checkpoint start with too.

        Where they differ is a branch point, worth a `mark`. 0 with `hybrid`.
        """
        with self._access:
            return self._rollback.store.shared(token_array(tokens))

    # rollback

    def restore(self, checkpoint: Checkpoint, seq_id: int) -> None:
        """Lets the state of a sequence be that of the checkpoint; what it had is dropped. No row is copied.

        Raises `StaleCheckpoint`, `SeqIdError`, and `Unsupported` with `hybrid`: there the host has to roll back both
        halves (`seq_rm`).
        """
        with self._access:
            store = self._rollback.store
            self._rollback.table.check_seq_id(seq_id)
            store.check(checkpoint)
            if store.hybrid:
                raise Unsupported("the host keeps more of a sequence than its state: roll back with its seq_rm")
            self._rollback.switch(seq_id, checkpoint)
            self._changed()

    def resume(self, seq_id: int, tokens: Sequence[int] | Int32Array) -> int:
        """Lets a sequence have read as much of `tokens`, int32 [n], as any known state has, and nothing else.

        Returns how many that are; they need no prefill. The sequence keeps its own state when that is as good, and is
        not changed when nothing is better than what its own tokens share with `tokens`: then `seq_rm` rolls it back,
        and the result is 0 unless the sequence has read nothing else. With `hybrid` never changed.
        """
        with self._access:
            store, table = self._rollback.store, self._rollback.table
            wanted = token_array(tokens)
            history = store.histories[table.check_seq_id(seq_id)]
            own = history.shared(wanted) if table.tail(seq_id) != CELL_NONE else 0
            best = store.longest(wanted)
            if not store.hybrid and best is not None and best.n_tokens > own:
                self._rollback.switch(seq_id, best)
                self._changed()
                return best.n_tokens
            return own if history.whole and own == len(history.tokens) else 0

    @property
    def replay(self) -> Replay | None:
        """What the host has registered for replays; see `rollback.Replay`."""
        return self._rollback.replay

    @replay.setter
    def replay(self, replay: Replay | None) -> None:
        self._rollback.replay = replay

    @property
    def max_replay(self) -> int | None:
        """The most tokens that `seq_rm` has replayed; None: no limit."""
        return self._rollback.max_replay

    # tokens

    def tokens(self, seq_id: int) -> Int32Array:
        """The tokens that a sequence is known to have read, from position 0 on, int32 [n <= position + 1]; a copy.

        Raises `SeqIdError`.
        """
        with self._access:
            histories = self._rollback.store.histories
            return np.array(histories[self._rollback.table.check_seq_id(seq_id)].tokens, np.int32)

    def set_tokens(self, seq_id: int, tokens: Sequence[int] | Int32Array) -> None:
        """Tells what the state of a sequence has read, int32 [n], when it came from elsewhere (`state_read`).

        Raises `InvalidArgument` unless there is one for each position, `SeqIdError`. Nothing happens without cells for
        checkpoints.
        """
        with self._access:
            n_tokens = self._rollback.table.seq_pos_max(seq_id) + 1
            if len(tokens) != n_tokens:
                positions = counted(n_tokens, "position")
                raise InvalidArgument(f"{counted(len(tokens), 'token')} for a sequence of {positions}")
            if self._rollback.checkpoints is not None:
                self._rollback.checkpoints.set_tokens(seq_id, token_array(tokens))

    # counts

    def count_prompt(self, n_asked: int, n_reused: int) -> None:
        """The host has read a prompt of `n_asked` tokens, of which `n_reused` needed no prefill: for `stats`."""
        with self._access:
            stats = self._rollback.store.stats
            stats.tokens_asked += n_asked
            stats.tokens_reused += n_reused

    def stats(self) -> Stats:
        """Counts of tokens and checkpoints up to now."""
        with self._access:
            store = self._rollback.store
            return replace(store.stats, checkpoints=len(store), bytes=self.n_bytes)
