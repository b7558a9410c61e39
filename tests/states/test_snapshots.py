"""Proves rollback of the last tokens by the snapshots that a host's graphs keep (n_rs_seq > 0).

The rows are a running hash of the tokens, written and gathered as llama.cpp's graphs do it: snapshot k of a set is the
state k tokens before its last one, and only as many are written as the set has tokens in the step.
"""

from __future__ import annotations

import random

import pytest

from rcache_plugin.cells.slots import commit, discard, plan_slots
from rcache_plugin.cells.table import CellTable
from rcache_plugin.cells.ubatch import UBatch

N_RS_SEQ = 3


def fold(state: int, token: int) -> int:
    return hash((state, token))


class Model:
    """A table, its rows, and the tokens that each sequence should have."""

    def __init__(self, size: int, placement: str, n_seq_max: int | None = None) -> None:
        self.table = CellTable(size, n_seq_max, N_RS_SEQ)
        self.placement = placement
        self.rows: list[object] = [f"dirt {i}" for i in range(size * (1 + N_RS_SEQ))]
        self.tokens: dict[int, list[int]] = {}
        self.next_token = 0

    def decode(self, seq_ids: list[int], n_tokens: int) -> bool:
        table, size = self.table, self.table.size
        pos = [table.seq_pos_max(s) + 1 + j for s in seq_ids for j in range(n_tokens)]
        plans = plan_slots(table, (UBatch([(s,) for s in seq_ids], pos),), self.placement)
        if plans is None:
            return False
        (plan,) = plans
        commit(table, plan)
        if plan.rs_z >= 0:
            self.rows[plan.rs_z] = 0
        gathered = [self.rows[row] for row in plan.s_copy.tolist()]
        for i, state in enumerate(gathered):
            history = [state]
            if i < len(seq_ids):
                for _ in range(n_tokens):
                    self.next_token += 1
                    history.append(fold(history[-1], self.next_token))  # type: ignore[arg-type]
                    self.tokens.setdefault(seq_ids[i], []).append(self.next_token)
            n_written = min(n_tokens, N_RS_SEQ + 1) if i < len(seq_ids) else 1
            for k in range(n_written):
                self.rows[k * size + plan.head + i] = history[-1 - k]
        return True

    def verify(self) -> None:
        self.table.check()
        for seq_id in range(self.table.n_seq_max):
            tokens = self.tokens.get(seq_id, [])
            assert self.table.seq_pos_max(seq_id) == len(tokens) - 1
            if tokens:
                state = 0
                for token in tokens:
                    state = fold(state, token)
                assert self.rows[self.table.row_of(self.table.tail(seq_id))] == state, f"sequence {seq_id}"

    def rm(self, seq_id: int, p0: int) -> bool:
        done = self.table.seq_rm(seq_id, p0, -1)
        if done:
            self.tokens[seq_id] = self.tokens.get(seq_id, [])[:p0]
        return done


def test_as_far_as_the_last_step_and_once() -> None:
    model = Model(2, "classic")
    model.decode([0], 3)
    assert model.table.snapshots(0) == (2, 0)
    before = model.table.epoch
    assert not model.table.seq_rm(0, 1, 2), "a hole in the middle"
    assert model.table.epoch == before
    assert model.rm(0, 2) and model.table.row_of(0) == 2
    model.verify()
    assert not model.rm(0, 1), "only once"
    model.verify()
    model.decode([0], 1)
    model.verify()
    assert not model.rm(0, 2), "a step of one token keeps nothing"
    model.decode([0], 2)
    assert not model.rm(0, 3), "not into the step before the last (CASES 1)"
    assert model.rm(0, 4)
    model.verify()
    assert model.rm(0, 0)
    model.verify()


def test_every_number_of_accepted_tokens() -> None:
    """CASES 42: for each j the state continues as if only j of the drafted tokens had ever been seen."""
    for j in range(N_RS_SEQ + 1):
        model = Model(3, "classic")
        model.decode([0, 1], 5)
        model.decode([1, 0], N_RS_SEQ + 1)
        assert model.rm(1, 5 + N_RS_SEQ + 1 - j)
        model.verify()
        model.decode([0, 1], 1)
        model.verify()


def test_shared_state_is_not_rolled_back_for_the_other() -> None:
    model = Model(3, "classic")
    model.decode([0], 4)
    model.table.seq_cp(0, 1)
    model.tokens[1] = list(model.tokens[0])
    assert not model.rm(0, 3)
    model.verify()
    model.rm(1, 0)
    assert model.rm(0, 3)
    model.table.seq_cp(0, 1)  # shares what was rolled back
    model.tokens[1] = list(model.tokens[0])
    model.verify()
    model.decode([1], 1)
    model.verify()
    model.decode([0], 1)
    model.verify()


def test_planning_leaves_no_trace_of_snapshots() -> None:
    model = Model(3, "classic")
    model.decode([0, 1], 3)
    model.rm(0, 2)
    table = model.table
    before = [table.snapshots(i) for i in range(3)], table.epoch
    steps = [UBatch([(1,), (0,)], [3, 2]), UBatch([(0,), (2,)], [3, 0]), UBatch([(2,), (1,)], [1, 4])]
    assert plan_slots(table, steps) is not None
    assert ([table.snapshots(i) for i in range(3)], table.epoch) == before
    model.verify()


def test_discard_of_a_slot_read_from_a_snapshot() -> None:
    model = Model(2, "classic")
    model.decode([0, 1], 3)
    model.rm(0, 2)
    (plan,) = plan_slots(model.table, (UBatch([(1,), (0,)], [3, 2]),)) or ()
    commit(model.table, plan)
    discard(model.table, plan)
    assert model.table.used == 0
    model.table.check()


@pytest.mark.parametrize("placement", ["classic", "compact"])
def test_any_history(placement: str) -> None:
    rolled_back = 0
    for seed in range(150):
        rng = random.Random(seed)
        model = Model(rng.randint(2, 6), placement)
        n_seqs = model.table.n_seq_max
        for _ in range(25):
            action = rng.choice(["decode", "decode", "decode", "back", "back", "rm", "cp", "keep"])
            seq_id = rng.randrange(n_seqs)
            length = len(model.tokens.get(seq_id, []))
            if action == "decode":
                model.decode(rng.sample(range(n_seqs), rng.randint(1, n_seqs)), rng.randint(1, 5))
            elif action == "back" and length > 1:
                rolled_back += model.rm(seq_id, rng.randint(max(1, length - 4), length - 1))
            elif action == "rm":
                model.rm(seq_id, 0)
            elif action == "cp":
                other = rng.randrange(n_seqs)
                model.table.seq_cp(seq_id, other)
                model.tokens[other] = list(model.tokens.get(seq_id, []))
            elif action == "keep" and rng.random() < 0.2:
                model.table.seq_keep(seq_id)
                model.tokens = {seq_id: model.tokens.get(seq_id, [])}
            model.verify()
    assert rolled_back > 50
