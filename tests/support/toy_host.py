"""A host with a toy recurrence for tests of the cache: a row holds the running hash of the tokens that it has read.

`ToyHost` does what a real one does: it splits, prepares, finds slots, gathers rows by the plan's `s_copy` and writes
the window back. Beside the rows it may keep an "attention half", the tokens of each sequence, which has to be cut to
match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rcache_plugin import CacheSpec, RecurrentCache, UBatch

SPEC = CacheSpec.make([4], [4])
ZERO = 0


def fold(state: int, token: int) -> int:
    """The recurrence."""
    return (state * 1_000_003 + token + 7) % (1 << 61)


def state_of(tokens: Sequence[int]) -> int:
    """The state after `tokens`."""
    state = ZERO
    for token in tokens:
        state = fold(state, token)
    return state


class ToyBuffers:
    """Stands in for `StateBuffers` of a cache: the rows are the host's list."""

    on_host = True

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def move_rows(self, moves: Sequence[tuple[int, int, bool]]) -> None:
        for src, dst, swap in moves:
            self.rows[src], self.rows[dst] = self.rows[dst] if swap else self.rows[src], self.rows[src]

    def clear_rows(self, cell_ids: Sequence[int]) -> None:
        for cell_id in cell_ids:
            self.rows[cell_id] = ZERO

    def make_ready(self, moves: Sequence[tuple[int, int, bool]], cleared: Sequence[int]) -> None:
        self.move_rows(moves)
        self.clear_rows(cleared)

    def clear(self) -> None:
        self.clear_rows(range(len(self.rows)))

    def close(self) -> None:
        """There is nothing to free."""


class ToyHost:
    """Computes on a cache made with `options`, in ubatches of at most `n_ubatch` tokens of a sequence."""

    def __init__(
        self, n_seq: int, *, n_ubatch: int = 4, attention: bool = False, moves: bool = False, **options: object
    ) -> None:
        """With `moves` the cache holds the rows, as in host memory, and may move them; else it only plans."""
        self.cache = RecurrentCache(SPEC, n_seq, allocate=False, hybrid=attention, **options)  # type: ignore[arg-type]
        self.cache.checkpoints.replay = self.replay
        self.n_ubatch = n_ubatch
        self.attention: dict[int, list[int]] | None = {} if attention else None
        self.rows: list[int] = [-1] * self.cache.table.size
        if moves:
            self.cache.buffers = ToyBuffers(self.rows)  # type: ignore[assignment]
        self.rows_moved = 0
        """Rows that went from one cell to another, or were kept, for a sequence that had no part in the step."""
        self.windows: list[tuple[int, int, int]] = []
        """(head, n, rs_z) of each slot."""
        self.n_replays = 0
        self.fail_at: int | None = None
        """The ubatch, counted from now on, whose computation fails; its rows are half written then."""

    def read(self, tokens: Mapping[int, Sequence[int]]) -> bool:
        """Reads tokens into sequences, where they end. False when there is no room or a step fails."""
        return self._read({seq_id: (self.cache.seq_pos_max(seq_id) + 1, ids) for seq_id, ids in tokens.items()})

    def _read(self, tokens: Mapping[int, tuple[int, Sequence[int]]]) -> bool:
        ubatches = list(self._split(tokens))
        if not self.cache.prepare(ubatches):
            return False
        return all(self._compute(ubatch) for ubatch in ubatches)

    def _split(self, tokens: Mapping[int, tuple[int, Sequence[int]]]) -> list[UBatch]:
        left = {seq_id: (pos, list(ids)) for seq_id, (pos, ids) in tokens.items() if ids}
        ubatches = []
        while left:
            n = min([self.n_ubatch, *(len(ids) for _, ids in left.values())])
            pos = np.concatenate([np.arange(first, first + n) for first, _ in left.values()])
            token = np.concatenate([ids[:n] for _, ids in left.values()])
            ubatches.append(UBatch([(seq_id,) for seq_id in left], pos, token))
            left = {seq_id: (first + n, ids[n:]) for seq_id, (first, ids) in left.items() if ids[n:]}
        return ubatches

    def _compute(self, ubatch: UBatch) -> bool:
        plan = self.cache.find_slot(ubatch)
        if plan is None:
            return False
        if self.cache.buffers is None and plan.rs_z >= 0 and any(src < 0 for src in plan.src):
            self.rows[plan.rs_z] = ZERO
        gathered = [self.rows[row] for row in plan.s_copy]
        self.windows.append((plan.head, plan.n, plan.rs_z))
        self.rows_moved += plan.n - plan.n_seqs
        n = ubatch.n_seq_tokens
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                for i in range(plan.n):
                    self.rows[plan.head + i] = -1
                self.cache.discard_slot()
                return False
        assert ubatch.token is not None
        for s, ids in enumerate(ubatch.seq_ids):
            for token in ubatch.token[s * n : (s + 1) * n].tolist():
                gathered[s] = fold(gathered[s], token)
                if self.attention is not None:
                    for seq_id in ids:
                        self.attention.setdefault(seq_id, []).append(token)
        self.rows[plan.head : plan.head + plan.n] = gathered
        return True

    def replay(self, seq_id: int, pos0: int, tokens: Sequence[int]) -> bool:
        """What the cache calls."""
        self.n_replays += 1
        if self.attention is not None:
            assert self.cache.seq_rm(seq_id, pos0, -1)
            del self.attention.setdefault(seq_id, [])[pos0:]
        return self._read({seq_id: (pos0, list(tokens))})

    def rm(self, seq_id: int, p0: int = -1) -> bool:
        """Removes the end of a sequence in both halves, as a hybrid memory does."""
        done = self.cache.seq_rm(seq_id, p0, -1)
        if done and self.attention is not None:
            del self.attention.setdefault(seq_id, [])[max(p0, 0) :]
        return done

    def cp(self, source: int, target: int) -> None:
        """Copies a sequence in both halves."""
        self.cache.seq_cp(source, target)
        if self.attention is not None:
            self.attention[target] = list(self.attention.get(source, []))

    def state(self, seq_id: int) -> int:
        """What the row of a sequence holds; `ZERO` when it is empty."""
        table = self.cache.table
        cell_id = table.tail(seq_id)
        return ZERO if cell_id < 0 else self.rows[table.row_of(cell_id)]

    def pinned(self, pin: int) -> int:
        """What the row of a pin holds."""
        return self.rows[self.cache.table.row_of(self.cache.table.pin_cell(pin))]
