"""Going back: sequences return to a checkpoint, and on from there by reading again. Needs neither ggml nor cffi.

`Rewind` stands between a cache's table and its `CheckpointStore`: whatever happens to a sequence is told to both. It
also knows the sequences that have lost their states in a failed step, and what the host has registered for reading
again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from ..cells.table import CellTable
from ..cells.ubatch import CELL_NONE, SEQ_ANY, Int32Array, UBatch
from ..errors import StateError
from .store import Checkpoint, CheckpointStore

Replay = Callable[[int, int, Int32Array], bool]
"""``replay(seq_id, pos0, tokens)`` has the tokens, int32 [n], read into a sequence from `pos0` on; false: it failed.

Called by `RecurrentCache.seq_rm` while the sequence ends at ``pos0 - 1``; the reading comes back to `find_slot`.
"""


class ChangeObserver(Protocol):
    """What wants to know when positions have changed."""

    def changed(self) -> None:
        """They have."""


class Rewind:
    """The ways back of one cache's sequences; `kept` is None for a cache without cells for checkpoints.

    `observers` are told of new positions before anything is read again; of all others the cache tells them. Every call
    takes the table as it stands: the cache may exchange it between calls.
    """

    def __init__(
        self, kept: CheckpointStore | None, observers: Iterable[ChangeObserver], max_replay: int | None
    ) -> None:
        self.kept = kept
        self.replay: Replay | None = None
        self.max_replay = max_replay
        self._observers = observers
        self._lost: set[int] = set()  # sequences whose last step failed, and which have not been removed since
        self._replaying = False

    # steps

    def check(self, ubatches: Sequence[UBatch]) -> None:
        """Raises `StateError` when a sequence without its state is to go on as if it had it."""
        if not self._lost:
            return
        seen: set[int] = set()
        for ubatch in ubatches:
            for s, ids in enumerate(ubatch.seq_ids):
                pos = ubatch.pos[s * ubatch.n_seq_tokens]
                if ids[0] in self._lost and ids[0] not in seen and pos > 0:
                    raise StateError(
                        f"sequence {ids[0]} lost its state when a step failed, it can't go on at position {pos}: "
                        f"remove it, or go back with seq_rm"
                    )
                seen.update(ids)

    def before_step(self, table: CellTable, ubatch: UBatch, batch: int) -> None:
        """A slot is to be found for `ubatch`, a part of batch `batch`. Makes the checkpoints that are due."""
        if self.kept is not None:
            self.kept.before_step(table, ubatch, batch)

    def after_step(self, table: CellTable, ubatch: UBatch, batch: int, gaps: bool) -> None:
        """The slot is taken; `gaps`: some positions do not follow those before."""
        if self.kept is not None:
            self.kept.after_step(table, ubatch, batch, gaps=gaps, replayed=self._replaying)
        if self._lost:
            self._lost.difference_update(*ubatch.seq_ids)

    def make_room(self, table: CellTable) -> bool:
        """Lets the least useful checkpoint go for a sequence; false when there is none."""
        return self.kept is not None and self.kept.evict(table)

    def lose(self, table: CellTable, drop: Callable[[], None]) -> None:
        """Has the table drop states that may be half written; their sequences count as lost, checkpoints as gone."""
        before = table.positions()
        drop()
        now = table.positions()
        self._lost.update(seq_id for seq_id, pos in enumerate(before) if pos > now[seq_id])
        if self.kept is not None:
            self.kept.drop_lost(table)

    # removing

    def remove(self, table: CellTable, seq_id: int, p0: int, p1: int) -> bool:
        """As `RecurrentCache.seq_rm`."""
        kept = self.kept
        if kept is not None and p0 > 0 and p1 < 0 <= seq_id < table.n_seq_max and seq_id not in self._lost:
            if kept.go_to_last(table, seq_id, p0):
                return True
        one = 0 <= seq_id < table.n_seq_max
        # how long a sequence was that has lost its state is nobody's knowledge, so only -1 is its end
        to_end = one and (p1 < 0 or (seq_id not in self._lost and p1 > table.seq_pos_max(seq_id)))
        if one and p0 <= 0 and p1 < 0:
            self._lost.discard(seq_id)
        if seq_id < 0 and p0 <= 0 and p1 < 0:
            self.drop_sequences(table)
            return True
        if kept is None or not one:
            return table.seq_rm(seq_id, p0, p1)
        before = table.seq_pos_max(seq_id)
        if p0 <= 0 and to_end:
            kept.leaves(table, seq_id)
        if seq_id not in self._lost and table.seq_rm(seq_id, p0, p1):
            after = table.seq_pos_max(seq_id)
            if after < 0 and (before >= 0 or p0 <= 0):  # it may be empty because it had lost its state
                kept.emptied(table, seq_id)
            elif after != before:
                kept.cut(table, seq_id, after + 1)
            return True
        return p0 > 0 and to_end and self._go_back(table, kept, seq_id, p0)

    def drop_sequences(self, table: CellTable) -> None:
        """Removes every sequence; checkpoints stay where they can."""
        self._lost.clear()
        kept = self.kept
        if kept is None:
            table.drop_sequences()
            return
        for seq_id, pos in enumerate(table.positions()):
            if pos >= 0:
                kept.leaves(table, seq_id)
        table.drop_sequences()
        for seq_id in range(table.n_seq_max):
            kept.emptied(table, seq_id)

    def _go_back(self, table: CellTable, kept: CheckpointStore, seq_id: int, n_tokens: int) -> bool:
        """Lets the state of a sequence be that after its first `n_tokens` tokens, if there is a way."""
        history = kept.histories[seq_id]
        base = kept.nearest(seq_id, n_tokens)
        start = 0 if base is None else base.n_tokens
        missing = n_tokens - start
        if (
            n_tokens > len(history.tokens)
            or (missing and self.replay is None)
            or (self.max_replay is not None and missing > self.max_replay)
        ):
            kept.stats.refused += 1
            return False
        tokens = history.tokens[:n_tokens] if missing else history.tokens
        if seq_id not in self._lost:
            kept.leaves(table, seq_id, to=base)
        hold = self._hold(table, kept, seq_id, base) if missing else None  # else nothing can fail
        was, whole = history.tokens, history.whole
        done = False
        try:
            self._go_to(table, kept, seq_id, base)
            done = not missing or self._read_again(table, seq_id, start, tokens)
        finally:
            self._arrive(table, seq_id, done, hold)
            if done:
                history.branch = bool(missing)
            else:
                history.start()
                history.tokens, history.whole = was, whole and hold is not None
            # what a hybrid's other half had behind `start` may be gone, and with it the use of later checkpoints
            kept.part(table, seq_id, n_tokens if done else start)
        return done

    def _hold(self, table: CellTable, kept: CheckpointStore, seq_id: int, base: Checkpoint | None) -> int | None:
        """A pin on the state that a sequence is about to leave, so that it can be had back; None if it can't."""
        if kept.own_lineage or table.tail(seq_id) == CELL_NONE:
            return None
        return table.pin(seq_id) if kept.room_for(table, table.tail(seq_id), base) else None

    def _arrive(self, table: CellTable, seq_id: int, done: bool, hold: int | None) -> None:
        """A sequence is where it was to go back to; else it returns to `hold`, or has lost its state."""
        if not done and hold is not None:
            table.go_to_pin(seq_id, hold)
        elif not done:
            table.seq_rm(seq_id, -1, -1)
        (self._lost.discard if done or hold is not None else self._lost.add)(seq_id)
        if hold is not None:
            table.unpin(hold)

    def _go_to(self, table: CellTable, kept: CheckpointStore, seq_id: int, one: Checkpoint | None) -> None:
        """The state of a sequence is that of a checkpoint from here on; without one, it is empty."""
        if one is None:
            table.seq_rm(seq_id, -1, -1)
            kept.histories[seq_id].start()
        else:
            table.go_to_pin(seq_id, one.pin)
            kept.used(one, seq_id)
        self._lost.discard(seq_id)

    def _read_again(self, table: CellTable, seq_id: int, start: int, tokens: array[int]) -> bool:
        replay = self.replay
        if replay is None or self._replaying:
            return False
        self._replaying = True
        for observer in self._observers:  # the host may ask for positions
            observer.changed()
        try:
            done = replay(seq_id, start, np.array(tokens[start:], np.int32))
        finally:
            self._replaying = False
        return done and table.seq_pos_max(seq_id) == len(tokens) - 1

    # what else happens to sequences

    def switch(self, table: CellTable, kept: CheckpointStore, seq_id: int, one: Checkpoint) -> None:
        """A sequence leaves its state for that of a checkpoint."""
        kept.leaves(table, seq_id, to=one)
        self._go_to(table, kept, seq_id, one)

    def copied(self, table: CellTable, source: int, target: int) -> None:
        """`target` shares the state of `source` now."""
        if self._lost:
            (self._lost.add if source in self._lost else self._lost.discard)(target)
        if self.kept is not None:
            self.kept.copied(table, source, target)

    def only(self, table: CellTable, seq_id: int) -> None:
        """Every other sequence has been dropped."""
        self._lost &= {seq_id}
        if self.kept is not None:
            for other in range(table.n_seq_max):
                if other != seq_id:
                    self.kept.emptied(table, other)

    def shifted(self, table: CellTable, seq_id: int) -> None:
        """The positions of a sequence have been shifted."""
        if self.kept is not None:
            self.kept.moved(table, seq_id)

    def replaced(self, table: CellTable, seq_id: int) -> None:
        """The state of a sequence, or of all with `SEQ_ANY`, has come from elsewhere."""
        for each in range(table.n_seq_max) if seq_id == SEQ_ANY else (seq_id,):
            self._lost.discard(each)
            if self.kept is not None:
                empty = table.tail(each) == CELL_NONE
                (self.kept.emptied if empty else self.kept.forget)(table, each)

    def cleared(self, table: CellTable) -> None:
        """The table has been cleared, pins and all."""
        self._lost.clear()
        if self.kept is not None:
            self.kept.end_all(table, "the cache was cleared")
            for seq_id in range(table.n_seq_max):
                self.kept.emptied(table, seq_id)
