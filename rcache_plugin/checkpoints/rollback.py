"""Rollback: sequences return to a checkpoint and replay the tokens from there. Needs neither ggml nor cffi.

`Rollback` stands between a cache's table and its `CheckpointStore`: whatever happens to a sequence is told to both. It
also knows the sequences that have lost their states in a failed step, and what the host has registered for replays.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from ..cells.table import CellTable
from ..cells.ubatch import CELL_NONE, SEQ_ANY, Int32Array, UBatch
from ..errors import StateError, Unsupported
from .store import Checkpoint, CheckpointStore

Replay = Callable[[int, int, Int32Array], bool]
"""``replay(seq_id, pos0, tokens)`` has the tokens, int32 [n], read into a sequence from `pos0` on; false: it failed.

Called by `RecurrentCache.seq_rm` while the sequence ends at ``pos0 - 1``; `replay` calls `find_slot` for the tokens.
"""


class ChangeObserver(Protocol):
    """What wants to know when positions have changed."""

    def changed(self) -> None:
        """They have."""


class Rollback:
    """The sequences of `table` and how they roll back; `checkpoints` is None for a cache without cells for them.

    `observers` are told of new positions before anything is replayed; of all others the cache tells them.
    """

    def __init__(
        self,
        table: CellTable,
        checkpoints: CheckpointStore | None,
        observers: Iterable[ChangeObserver],
        max_replay: int | None,
    ) -> None:
        self.table = table
        self.checkpoints = checkpoints
        self.replay: Replay | None = None
        self.max_replay = max_replay
        self._observers = observers
        self._lost: set[int] = set()  # sequences whose last step failed, and which have not been removed since
        self._replaying = False

    @property
    def store(self) -> CheckpointStore:
        """The checkpoints. Raises `Unsupported` for a cache without cells for them."""
        if self.checkpoints is None:
            raise Unsupported("this cache was made without checkpoint_cells")
        return self.checkpoints

    # steps

    def check(self, ubatches: Sequence[UBatch]) -> None:
        """Raises `StateError` when a sequence without its state is to continue as if it had it."""
        if not self._lost:
            return
        seen: set[int] = set()
        for ubatch in ubatches:
            for s, ids in enumerate(ubatch.seq_ids):
                pos = ubatch.pos[s * ubatch.n_seq_tokens]
                if ids[0] in self._lost and ids[0] not in seen and pos > 0:
                    raise StateError(
                        f"sequence {ids[0]} lost its state when a step failed, it can't continue at position {pos}: "
                        f"remove it, or roll it back with seq_rm"
                    )
                seen.update(ids)

    def before_step(self, ubatch: UBatch, batch: int) -> None:
        """A slot is to be found for `ubatch`, a part of batch `batch`: makes the checkpoints that are due.

        Raises `StateError` as `check`.
        """
        if self._lost:
            self.check((ubatch,))
        if self.checkpoints is not None:
            self.checkpoints.before_step(ubatch, batch)

    def after_step(self, ubatch: UBatch, batch: int, gaps: bool) -> None:
        """The slot is taken; `gaps`: some positions do not follow those before."""
        if self.checkpoints is not None:
            self.checkpoints.after_step(ubatch, batch, gaps=gaps, replayed=self._replaying)
        if self._lost:
            self._lost.difference_update(*ubatch.seq_ids)

    def evict(self) -> bool:
        """Evicts the least useful checkpoint for a sequence; false when there is none."""
        return self.checkpoints is not None and self.checkpoints.evict()

    def drop_states(self, drop: Callable[[], None]) -> None:
        """Has the table drop states that may be half written; their sequences count as lost, checkpoints end."""
        before = self.table.positions()
        drop()
        now = self.table.positions()
        self._lost.update(seq_id for seq_id, pos in enumerate(before) if pos > now[seq_id])
        if self.checkpoints is not None:
            self.checkpoints.end_dropped()

    # removing

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """As `RecurrentCache.seq_rm`."""
        table, store = self.table, self.checkpoints
        if store is not None and p0 > 0 and p1 < 0 <= seq_id < table.n_seq_max and seq_id not in self._lost:
            if store.roll_back_to_last(seq_id, p0):
                return True
        one = 0 <= seq_id < table.n_seq_max
        # how long a sequence was that has lost its state is not known, so only -1 is its end
        to_end = one and (p1 < 0 or (seq_id not in self._lost and p1 > table.seq_pos_max(seq_id)))
        if one and p0 <= 0 and p1 < 0:
            self._lost.discard(seq_id)
        if seq_id < 0 and p0 <= 0 and p1 < 0:
            self.drop_sequences()
            return True
        if store is None or not one:
            return table.seq_rm(seq_id, p0, p1)
        before = table.seq_pos_max(seq_id)
        if p0 <= 0 and to_end:
            store.abandon(seq_id)
        if seq_id not in self._lost and table.seq_rm(seq_id, p0, p1):
            after = table.seq_pos_max(seq_id)
            if after < 0 and (before >= 0 or p0 <= 0):  # it may be empty because it had lost its state
                store.emptied(seq_id)
            elif after != before:
                store.cut(seq_id, after + 1)
            return True
        return p0 > 0 and to_end and self._roll_back(store, seq_id, p0)

    def drop_sequences(self) -> None:
        """Removes every sequence; checkpoints stay where they can."""
        self._lost.clear()
        store = self.checkpoints
        if store is None:
            self.table.drop_sequences()
            return
        for seq_id, pos in enumerate(self.table.positions()):
            if pos >= 0:
                store.abandon(seq_id)
        self.table.drop_sequences()
        for seq_id in range(self.table.n_seq_max):
            store.emptied(seq_id)

    def _roll_back(self, store: CheckpointStore, seq_id: int, n_tokens: int) -> bool:
        """Rolls a sequence back to its first `n_tokens` tokens, if its tokens are known and the host replays."""
        history = store.histories[seq_id]
        base = store.nearest(seq_id, n_tokens)
        start = 0 if base is None else base.n_tokens
        missing = n_tokens - start
        if (
            n_tokens > len(history.tokens)
            or (missing and self.replay is None)
            or (self.max_replay is not None and missing > self.max_replay)
        ):
            store.stats.refused += 1
            return False
        tokens = history.tokens[:n_tokens] if missing else history.tokens
        if seq_id not in self._lost:
            store.abandon(seq_id, to=base)
        hold = self._hold(store, seq_id, base) if missing else None  # else nothing can fail
        was, whole = history.tokens, history.whole
        done = False
        try:
            self._go_to(store, seq_id, base)
            done = not missing or self._replay(seq_id, start, tokens)
        finally:
            self._arrive(seq_id, done, hold)
            if done:
                history.branch = bool(missing)
            else:
                history.start()
                history.tokens, history.whole = was, whole and hold is not None
            # what a hybrid's attention half had behind `start` may be gone, and with it the use of later checkpoints
            store.cut_lineage(seq_id, n_tokens if done else start)
        return done

    def _hold(self, store: CheckpointStore, seq_id: int, base: Checkpoint | None) -> int | None:
        """A pin on the state that a sequence is about to abandon, so that it can be restored; None if it can't."""
        table = self.table
        if store.hybrid or table.tail(seq_id) == CELL_NONE:
            return None
        return table.pin(seq_id) if store.room_for(table.tail(seq_id), base) else None

    def _arrive(self, seq_id: int, done: bool, hold: int | None) -> None:
        """A sequence is rolled back; else it returns to `hold`, or has lost its state."""
        if not done and hold is not None:
            self.table.go_to_pin(seq_id, hold)
        elif not done:
            self.table.seq_rm(seq_id, -1, -1)
        (self._lost.discard if done or hold is not None else self._lost.add)(seq_id)
        if hold is not None:
            self.table.unpin(hold)

    def _go_to(self, store: CheckpointStore, seq_id: int, one: Checkpoint | None) -> None:
        """The state of a sequence is that of a checkpoint from here on; without one, it is empty."""
        if one is None:
            self.table.seq_rm(seq_id, -1, -1)
            store.histories[seq_id].start()
        else:
            self.table.go_to_pin(seq_id, one.pin)
            store.used(one, seq_id)
        self._lost.discard(seq_id)

    def _replay(self, seq_id: int, start: int, tokens: array[int]) -> bool:
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
        return done and self.table.seq_pos_max(seq_id) == len(tokens) - 1

    # other sequence operations

    def switch(self, seq_id: int, one: Checkpoint) -> None:
        """A sequence abandons its state for that of a checkpoint."""
        self.store.abandon(seq_id, to=one)
        self._go_to(self.store, seq_id, one)

    def copied(self, source: int, target: int) -> None:
        """`target` is a fork of `source` now."""
        if self._lost:
            (self._lost.add if source in self._lost else self._lost.discard)(target)
        if self.checkpoints is not None:
            self.checkpoints.copied(source, target)

    def only(self, seq_id: int) -> None:
        """Every other sequence has been dropped."""
        self._lost &= {seq_id}
        if self.checkpoints is not None:
            for other in range(self.table.n_seq_max):
                if other != seq_id:
                    self.checkpoints.emptied(other)

    def shifted(self, seq_id: int) -> None:
        """The positions of a sequence have been shifted."""
        if self.checkpoints is not None:
            self.checkpoints.shifted(seq_id)

    def replaced(self, seq_id: int) -> None:
        """The state of a sequence, or of all with `SEQ_ANY`, has come from elsewhere."""
        for each in range(self.table.n_seq_max) if seq_id == SEQ_ANY else (seq_id,):
            self._lost.discard(each)
            if self.checkpoints is not None:
                empty = self.table.tail(each) == CELL_NONE
                (self.checkpoints.emptied if empty else self.checkpoints.forget)(each)

    def resized(self) -> None:
        """The table has another number of cells or sequences."""
        if self.checkpoints is not None:
            self.checkpoints.histories.resize(self.table.n_seq_max)

    def cleared(self) -> None:
        """The table has been cleared, pins and all."""
        self._lost.clear()
        if self.checkpoints is not None:
            self.checkpoints.end_all("the cache was cleared")
            for seq_id in range(self.table.n_seq_max):
                self.checkpoints.emptied(seq_id)
