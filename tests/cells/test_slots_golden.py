"""Proves find_slot's special cases by literal tables (cells, order, sources), on the table and on the naive model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from naive_cache import NaiveBadId, NaiveCache

from rcache_plugin.cells import slots
from rcache_plugin.cells.slots import SlotPlan, commit, discard, plan_slots
from rcache_plugin.cells.table import CellTable
from rcache_plugin.cells.ubatch import UBatch
from rcache_plugin.errors import InvalidArgument, SeqIdError, StalePlan

Sets = Sequence[Sequence[int]]


def ubatch(sets: Sets, last: Sequence[int], n_tokens: int = 1) -> UBatch:
    """Each set with `n_tokens` tokens up to its last position."""
    return UBatch(sets, [pos for end in last for pos in range(end - n_tokens + 1, end + 1)])


class Real:
    """The table, planned and committed in one go."""

    def __init__(self, size: int, n_seq_max: int | None = None) -> None:
        self.table = CellTable(size, n_seq_max)

    def step(self, sets: Sets, last: Sequence[int], n_tokens: int = 1) -> SlotPlan | None:
        plans = plan_slots(self.table, [ubatch(sets, last, n_tokens)])
        if plans is None:
            return None
        commit(self.table, plans[0])
        return plans[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)

    def dump(self) -> dict[str, Any]:
        self.table.check()
        pos, src, tail, seq_ids = self.table.columns()
        return {
            "head": self.head, "n": self.n, "used": self.used, "rs_z": self.rs_z,
            "pos": pos.tolist(), "src": src.tolist(), "tail": tail.tolist(), "seq_ids": list(seq_ids),
        }


class Naive(NaiveCache):
    """The naive model with the same words."""

    def step(self, sets: Sets, last: Sequence[int], n_tokens: int = 1) -> Any:
        return self.find_slot(sets, last, n_tokens)


@pytest.fixture(params=[Real, Naive], ids=["table", "naive"])
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def slot(plan: Any) -> tuple[int, int, int, list[int], list[int], list[float]]:
    """(head, n, rs_z, src, s_copy, s_mask)"""
    return plan.head, plan.n, plan.rs_z, list(plan.src), list(plan.s_copy), list(plan.s_mask)


def state(cache: Any, *names: str) -> Any:
    found = cache.dump()
    return tuple(found[name] for name in names) if len(names) > 1 else found[names[0]]


# ---- places


def test_first_step_takes_the_first_cell_and_starts_from_zero(make: Any) -> None:
    cache = make(4)
    assert slot(cache.step([(2,)], [0])) == (0, 1, 0, [-1], [0], [0.0])
    assert cache.dump() == {
        "head": 0, "n": 1, "used": 1, "rs_z": 0,
        "pos": [0, -1, -1, -1], "src": [0, -1, -1, -1], "tail": [-1, -1, 0, -1], "seq_ids": [(2,), (), (), ()],
    }  # fmt: skip


def test_second_step_stays_in_its_own_cell(make: Any) -> None:
    cache = make(4)
    cache.step([(2,)], [0])
    assert slot(cache.step([(2,)], [3], 3)) == (0, 1, -1, [0], [0], [1.0])
    assert state(cache, "pos", "tail") == ([3, -1, -1, -1], [-1, -1, 0, -1])


def test_sets_stand_in_the_order_of_the_ubatch(make: Any) -> None:
    cache = make(4)
    assert slot(cache.step([(3,), (0,), (1,)], [0, 4, 2])) == (0, 3, 0, [-1] * 3, [0] * 3, [0.0] * 3)
    assert state(cache, "pos", "tail", "used") == ([0, 4, 2, -1], [1, 2, -1, 0], 3)


def test_own_cells_in_another_order_are_gathered(make: Any) -> None:
    cache = make(4)
    cache.step([(0,), (1,), (2,)], [0, 0, 0])
    assert slot(cache.step([(2,), (0,), (1,)], [1, 1, 1])) == (0, 3, -1, [2, 0, 1], [2, 0, 1], [1.0] * 3)
    assert state(cache, "pos", "src", "tail") == ([1, 1, 1, -1], [0, 1, 2, -1], [1, 2, 0, -1])


def test_a_bystander_between_two_sets_changes_places_with_one(make: Any) -> None:
    cache = make(4)
    cache.step([(0,), (1,), (2,)], [0, 0, 0])
    assert slot(cache.step([(0,), (2,)], [1, 1])) == (0, 3, -1, [0, 2, 1], [0, 2, 1], [1.0] * 3)
    assert state(cache, "pos", "tail", "used") == ([1, 1, 0, -1], [0, 2, 1, -1], 3)
    assert slot(cache.step([(0,), (2,)], [2, 2])) == (0, 2, -1, [0, 1], [0, 1], [1.0] * 2)


def test_sets_in_reverse_order_around_a_bystander(make: Any) -> None:
    cache = make(4)
    cache.step([(0,), (1,), (2,)], [0, 0, 0])
    assert slot(cache.step([(2,), (0,)], [1, 1])) == (0, 3, -1, [2, 0, 1], [2, 0, 1], [1.0] * 3)
    assert state(cache, "pos", "tail") == ([1, 1, 0, -1], [1, 2, 0, -1])


def test_a_new_sequence_follows_when_its_empty_cell_is_swapped(make: Any) -> None:
    """Sequence 3 is given cell 1, then sequence 0 comes there from cell 2: 3 must continue in cell 2."""
    cache = make(5)
    cache.step([(1,), (2,), (0,)], [0, 0, 0])
    cache.seq_rm(2, -1, -1)
    assert slot(cache.step([(0,), (3,)], [1, 0])) == (1, 2, 1, [2, -1], [2, 1], [1.0, 0.0])
    assert state(cache, "pos", "tail") == ([0, 1, 0, -1, -1], [1, 0, -1, 2, -1])


def test_an_empty_cell_in_the_window_reads_zeros_and_keeps_them(make: Any) -> None:
    cache = make(4)
    cache.step([(0,), (1,), (2,)], [0, 0, 0])
    cache.seq_rm(1, -1, -1)
    assert slot(cache.step([(0,), (2,)], [1, 1])) == (0, 3, 1, [0, 2, -1], [0, 2, 1], [1.0, 1.0, 0.0])
    assert state(cache, "src", "seq_ids") == ([0, 1, 2, -1], [(0,), (2,), (), ()])
    # its row was written as zeros, so the next owner may read it
    assert slot(cache.step([(3,)], [0])) == (2, 1, -1, [2], [2], [1.0])


@pytest.mark.parametrize(("removed", "place"), [((1, 2, 3), 8), ((1, 2, 3, 4), 1)])
def test_head_returns_to_0_when_enough_is_free_before_it(make: Any, removed: tuple[int, ...], place: int) -> None:
    """The head is 7: with 5 cells in use, 7 > 5 + 2 * 1 does not hold, with 4 it does. Tokens do not count."""
    cache = make(12)
    cache.step([(i,) for i in range(8)], [0] * 8)
    for seq_id in removed:
        cache.seq_rm(seq_id, -1, -1)
    cache.step([(7,)], [1])
    assert state(cache, "head", "used") == (7, 8 - len(removed))
    plan = cache.step([(9,)], [4], n_tokens=5)
    assert slot(plan) == (place, 1, place, [-1], [place], [0.0])


def test_head_reset_counts_the_sets_of_the_ubatch(make: Any) -> None:
    cache = make(12)
    cache.step([(i,) for i in range(8)], [0] * 8)
    for seq_id in (1, 2, 3, 4):
        cache.seq_rm(seq_id, -1, -1)
    cache.step([(7,)], [1])  # head 7, used 4: 7 > 4 + 2 * 2 does not hold
    assert slot(cache.step([(9,), (10,)], [0, 0]))[:2] == (8, 2)


def test_search_for_an_empty_cell_wraps_around(make: Any) -> None:
    cache = make(4)
    cache.step([(0,), (1,), (2,), (3,)], [0] * 4)
    cache.seq_rm(1, -1, -1)
    assert state(cache, "head") == 0
    cache.step([(3,)], [1])
    assert state(cache, "head", "n") == (3, 1)
    assert slot(cache.step([(1,)], [0])) == (1, 1, 1, [-1], [1], [0.0])


def test_each_new_set_takes_the_next_empty_cell_from_the_head_on(make: Any) -> None:
    cache = make(6)
    cache.step([(0,), (1,), (2,), (3,)], [0] * 4)
    cache.step([(2,)], [1])
    cache.seq_cp(3, 1)  # leaves cell 1 empty and the head at 2
    assert state(cache, "head", "seq_ids") == (2, [(0,), (), (2,), (1, 3), (), ()])
    assert slot(cache.step([(4,), (5,)], [0, 0]))[:4] == (4, 2, 4, [-1, -1])
    assert state(cache, "tail") == [0, 3, 2, 3, 4, 5]


# ---- shared states


def test_leaving_a_shared_cell_copies_it_and_the_other_stays(make: Any) -> None:
    cache = make(4)
    cache.step([(0,)], [2], 3)
    cache.seq_cp(0, 1)
    plan = cache.step([(1,)], [3])
    assert slot(plan) == (1, 1, 1, [0], [0], [1.0])
    assert list(plan.gaps) == []
    assert state(cache, "pos", "src", "tail") == ([2, 3, -1, -1], [0, 1, -1, -1], [0, 1, -1, -1])
    assert slot(cache.step([(1,)], [4])) == (1, 1, -1, [1], [1], [1.0])


def test_the_last_one_in_a_shared_cell_owns_it(make: Any) -> None:
    cache = make(3)
    cache.step([(0,)], [0])
    cache.seq_cp(0, 1)
    assert slot(cache.step([(0,), (1,)], [1, 1])) == (0, 2, 1, [0, 0], [0, 0], [1.0, 1.0])
    assert state(cache, "tail", "used") == ([0, 1, -1], 2)


def test_sequences_that_become_shared_leave_their_cells(make: Any) -> None:
    cache = make(4)
    cache.step([(0,), (1,), (2,)], [0, 7, 0])
    plan = cache.step([(0, 1)], [1])
    assert slot(plan) == (0, 1, -1, [0], [0], [1.0])
    assert list(plan.gaps) == []
    assert state(cache, "pos", "src", "tail", "used", "seq_ids") == (
        [1, -1, 0, -1], [0, -1, 2, -1], [0, 0, 2, -1], 2, [(0, 1), (), (2,), ()],
    )  # fmt: skip


def test_a_new_first_id_does_not_inherit_from_those_that_join_it(make: Any) -> None:
    cache = make(4)
    cache.step([(0,), (1,), (2,)], [0, 7, 0])
    assert slot(cache.step([(3, 1)], [0])) == (1, 1, 1, [-1], [1], [0.0])
    assert state(cache, "tail", "used") == ([0, 1, 2, 1], 3)


def test_the_first_id_carries_the_state_out_of_a_larger_group(make: Any) -> None:
    cache = make(4)
    cache.step([(0,)], [0])
    for dst in (1, 2):
        cache.seq_cp(0, dst)
    assert slot(cache.step([(1, 0)], [1])) == (1, 1, 1, [0], [0], [1.0])
    assert state(cache, "pos", "seq_ids") == ([0, 1, -1, -1], [(2,), (0, 1), (), ()])


def test_all_who_share_follow_when_their_cell_changes_places(make: Any) -> None:
    cache = make(4)
    cache.step([(0, 1), (2,)], [0, 0])
    assert slot(cache.step([(2,), (1, 0)], [1, 1])) == (0, 2, -1, [1, 0], [1, 0], [1.0, 1.0])
    assert state(cache, "tail", "seq_ids", "pos") == ([1, 1, 0, -1], [(2,), (0, 1), (), ()], [1, 1, -1, -1])


# ---- what does not fit, what cannot be


def test_none_when_no_cell_is_left_and_nothing_has_changed(make: Any) -> None:
    cache = make(2, 5)
    cache.step([(0,), (1,)], [0, 0])
    before = cache.dump()
    assert cache.step([(2,)], [0]) is None
    assert cache.step([(2, 0)], [0]) is not None  # 0 joins, so its cell is free
    assert before["tail"] == [0, 1, -1, -1, -1]
    assert state(cache, "tail") == [0, 1, 0, -1, -1]


def test_two_new_sequences_do_not_fit_into_one_cell(make: Any) -> None:
    cache = make(2, 5)
    cache.step([(0,)], [0])
    before = cache.dump()
    assert cache.step([(1,), (2,)], [0, 0]) is None
    assert cache.step([(1,), (0,), (2,)], [0, 1, 0]) is None
    assert cache.dump() == before
    assert slot(cache.step([(1,), (0,)], [0, 1])) == (0, 2, 1, [-1, 0], [1, 0], [0.0, 1.0])


def test_a_shared_cell_without_room_for_a_copy_does_not_fit(make: Any) -> None:
    cache = make(2, 4)
    cache.step([(0,), (1,)], [0, 0])
    cache.seq_cp(0, 2)
    before = cache.dump()
    assert cache.step([(2,)], [1]) is None
    assert cache.step([(1,), (0,)], [1, 1]) is None
    assert cache.dump() == before
    assert slot(cache.step([(0, 2)], [1])) == (0, 1, -1, [0], [0], [1.0])


def test_too_large_a_sequence_id_is_named_with_the_limit() -> None:
    table = CellTable(4)
    with pytest.raises(SeqIdError, match=r"\b4\b.*n_seq_max=4") as caught:
        plan_slots(table, [ubatch([(0,), (4,)], [0, 0])])
    assert (caught.value.seq_id, caught.value.n_seq_max) == (4, 4)
    assert table.used == 0


@pytest.mark.parametrize("sets", [[(7,)], [(0, 7)], [(7, 0)], [(0,), (1, 7)]])
def test_n_seq_max_is_the_limit_not_the_number_of_cells(make: Any, sets: Sets) -> None:
    small, large = make(12, 7), make(2, 8)
    with pytest.raises((SeqIdError, NaiveBadId)):
        small.step(sets, [0] * len(sets))
    assert state(small, "used") == 0
    assert large.step(sets, [0] * len(sets)) is not None


def test_unknown_placement_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="tight"):
        plan_slots(CellTable(2), [ubatch([(0,)], [0])], "tight")


# ---- positions


@pytest.mark.parametrize("last", [3, 9, 2, 0])
def test_non_consecutive_positions_are_warned_about_and_stored(last: int, caplog: pytest.LogCaptureFixture) -> None:
    cache = Real(4)
    cache.step([(0,), (1,)], [2, 0])
    with caplog.at_level(logging.WARNING, logger="rcache_plugin"):
        plan = cache.step([(1,), (0,)], [1, last])
    assert plan is not None
    assert cache.table.seq_pos_max(0) == last
    if last == 3:
        assert plan.gaps == ()
        assert not caplog.records
    else:
        assert plan.gaps == ((0, 2, last),)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert [int(word) for word in record.getMessage().replace(":", " ").split() if word.isdigit()] == [0, 2, last]


def test_planning_alone_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    cache = Real(2)
    cache.step([(0,)], [0])
    with caplog.at_level(logging.WARNING, logger="rcache_plugin"):
        assert plan_slots(cache.table, [ubatch([(0,)], [5])]) is not None
    assert not caplog.records


def test_gaps_count_the_tokens_of_the_ubatch(make: Any) -> None:
    cache = make(4)
    cache.step([(0,), (1,)], [2, 2], 3)
    plan = cache.step([(0,), (1,)], [5, 6], 3)
    assert [tuple(gap) for gap in plan.gaps] == [(1, 2, 6)]
    # the same when a new sequence stands beside them
    plan = cache.step([(2,), (0,), (1,)], [2, 8, 7], 3)
    assert [tuple(gap) for gap in plan.gaps] == [(1, 6, 7)]


def test_a_state_copied_from_a_shared_cell_keeps_its_position_for_the_check(make: Any) -> None:
    cache = make(4)
    cache.step([(0,)], [2], 3)
    cache.seq_cp(0, 1)
    assert [tuple(gap) for gap in cache.step([(1,)], [9]).gaps] == [(1, 2, 9)]


# ---- plans are values


def test_a_plan_cannot_be_changed_and_answers_twice_the_same() -> None:
    cache = Real(4)
    cache.step([(0,)], [0])
    plan = cache.step([(1,), (0,)], [0, 1])
    assert plan is not None
    first = slot(plan)
    assert slot(plan) == first == (0, 2, 1, [-1, 0], [1, 0], [0.0, 1.0])
    assert (plan.src.dtype, plan.s_copy.dtype, plan.s_mask.dtype) == (np.int32, np.int32, np.float32)
    for array in (plan.src, plan.s_copy, plan.s_mask):
        assert array.shape == (2,)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(AttributeError):
        plan.head = 1  # type: ignore[misc]


def test_a_plan_keeps_its_answer_when_the_table_changes() -> None:
    cache = Real(4)
    plan = cache.step([(0,), (1,)], [0, 0])
    answer = slot(plan)
    cache.step([(1,), (0,)], [1, 1])
    cache.seq_rm(-1, -1, -1)
    assert slot(plan) == answer


def test_preparing_leaves_no_trace_and_the_plans_commit_in_order() -> None:
    table = CellTable(4)
    ubatches = [ubatch([(0,), (1,)], [0, 0]), ubatch([(1,), (0,)], [1, 1]), ubatch([(1, 2)], [2])]
    epoch = table.epoch
    plans = plan_slots(table, ubatches)
    assert plans is not None
    assert (table.epoch, table.used, table.head, table.n, table.rs_z) == (epoch, 0, 0, 0, -1)
    assert [slot(plan)[:4] for plan in plans] == [(0, 2, 0, [-1, -1]), (0, 2, -1, [1, 0]), (0, 1, -1, [0])]
    for plan in plans:
        commit(table, plan)
    assert table.columns().seq_ids == ((1, 2), (0,), (), ())
    assert table.columns().pos.tolist() == [2, 1, -1, -1]


def test_preparing_fails_as_a_whole_and_leaves_no_trace() -> None:
    cache = Real(2, 4)
    cache.step([(0,)], [0])
    before, epoch = cache.dump(), cache.table.epoch
    assert plan_slots(cache.table, [ubatch([(0,), (1,)], [1, 0]), ubatch([(2,)], [0])]) is None
    with pytest.raises(SeqIdError):
        plan_slots(cache.table, [ubatch([(1,)], [0]), ubatch([(4,)], [0])])
    assert (cache.dump(), cache.table.epoch) == (before, epoch)


def test_preparing_leaves_cells_outside_the_slots_alone_too() -> None:
    cache = Real(5)
    cache.step([(0,)], [0])
    for dst in (1, 2):
        cache.seq_cp(0, dst)
    cache.step([(4,)], [0])
    before = cache.dump()
    ubatches = [ubatch([(1,)], [1]), ubatch([(0, 4)], [1]), ubatch([(2,)], [1])]
    plans = plan_slots(cache.table, ubatches)
    assert plans is not None
    assert cache.dump() == before
    for plan in plans:
        commit(cache.table, plan)
    assert state(cache, "used", "seq_ids") == (3, [(2,), (), (1,), (0, 4), ()])


def test_preparing_nothing_fits() -> None:
    assert plan_slots(CellTable(1), []) == ()


def test_stale_plans_are_refused() -> None:
    table = CellTable(4)
    plans = [plan_slots(table, [ubatch([(seq_id,)], [0])]) for seq_id in (0, 1)]
    assert plans[0] is not None and plans[1] is not None
    commit(table, plans[0][0])
    for plan in (plans[0][0], plans[1][0]):
        with pytest.raises(StalePlan):
            commit(table, plan)
    assert table.columns().tail.tolist() == [0, -1, -1, -1]


def test_a_plan_fits_no_other_table() -> None:
    one, other = CellTable(2), CellTable(2)
    plans = plan_slots(one, [ubatch([(0,)], [0])])
    assert plans is not None
    with pytest.raises(StalePlan):
        commit(other, plans[0])


def test_discard_removes_the_ubatch_and_bystanders_that_were_to_move() -> None:
    cache = Real(6)
    cache.step([(0,), (1,), (2,), (3,), (4,)], [0] * 5)
    plan = cache.step([(0,), (2,), (4,)], [1, 1, 1])
    assert plan is not None
    assert slot(plan)[:4] == (0, 5, -1, [0, 2, 4, 3, 1])  # 3 stays, 1 moves
    discard(cache.table, plan)
    assert state(cache, "tail", "pos", "src") == (
        [-1, -1, -1, 3, -1, -1], [-1, -1, -1, 0, -1, -1], [-1, -1, -1, 3, -1, -1],
    )  # fmt: skip
    with pytest.raises(StalePlan):
        discard(cache.table, plan)


def test_discard_keeps_those_who_share_the_source() -> None:
    cache = Real(4)
    cache.step([(0,)], [0])
    cache.seq_cp(0, 1)
    plan = cache.step([(1,)], [1])
    assert plan is not None
    discard(cache.table, plan)
    assert state(cache, "tail", "used", "head") == ([0, -1, -1, -1], 1, 1)
    assert slot(cache.step([(0,)], [1]))[:4] == (0, 1, -1, [0])


# ---- compact placement


def compact(table: CellTable, sets: Sets, last: Sequence[int]) -> SlotPlan:
    plans = plan_slots(table, [ubatch(sets, last)], "compact")
    assert plans is not None
    commit(table, plans[0])
    table.check()
    return plans[0]


def test_compact_moves_scattered_sequences_to_a_free_run() -> None:
    table = CellTable(8)
    compact(table, [(0,), (1,), (2,), (3,)], [0] * 4)
    plan = compact(table, [(0,), (2,)], [1, 1])
    assert slot(plan) == (4, 2, -1, [0, 2], [0, 2], [1.0, 1.0])
    assert table.columns().seq_ids == ((), (1,), (), (3,), (0,), (2,), (), ())
    assert slot(compact(table, [(0,), (2,)], [2, 2])) == (4, 2, -1, [4, 5], [4, 5], [1.0, 1.0])


def test_compact_uses_own_and_free_cells_together() -> None:
    table = CellTable(4)
    compact(table, [(0,), (1,), (2,)], [0] * 3)
    table.seq_rm(1, -1, -1)
    plan = compact(table, [(2,), (0,)], [1, 1])
    assert slot(plan)[:2] == (0, 2)
    assert list(plan.src) == [2, 0]
    assert table.columns().seq_ids == ((2,), (0,), (), ())


def test_compact_gives_a_new_sequence_zeros_from_a_row_that_nobody_needs() -> None:
    table = CellTable(2)
    compact(table, [(0,)], [0])
    assert slot(compact(table, [(1,), (0,)], [0, 1])) == (0, 2, 1, [-1, 0], [1, 0], [0.0, 1.0])


def test_compact_does_as_classic_when_no_run_is_left() -> None:
    table = CellTable(4)
    compact(table, [(0,), (1,), (2,), (3,)], [0] * 4)
    assert slot(compact(table, [(0,), (2,)], [1, 1])) == (0, 3, -1, [0, 2, 1], [0, 2, 1], [1.0] * 3)


def test_compact_counts_a_shared_cell_as_own_when_all_who_share_it_go_on() -> None:
    """After a fork the trunk's cell has no other user, so no bystander needs to be copied."""
    table = CellTable(5, 8)
    compact(table, [(0,), (4,), (2,), (3,)], [0] * 4)
    table.seq_cp(0, 1)
    table.seq_rm(4, -1, -1)
    compact(table, [(3,)], [1])
    assert table.columns().seq_ids == ((0, 1), (), (2,), (3,), ())
    plan = compact(table, [(0,), (1,)], [1, 1])
    assert (plan.head, plan.n, list(plan.src)) == (0, 2, [0, 0])


# ---- compact placement that may have rows moved


def moving(table: CellTable, sets: Sets, last: Sequence[int]) -> SlotPlan:
    plans = plan_slots(table, [ubatch(sets, last)], "compact", moves=True)
    assert plans is not None
    commit(table, plans[0])
    table.check()
    return plans[0]


def filled(size: int, n_seqs: int) -> CellTable:
    table = CellTable(size, 8)
    moving(table, [(i,) for i in range(n_seqs)], [0] * n_seqs)
    return table


def test_a_bystander_is_exchanged_for_a_sequence_of_the_step_when_no_cell_is_empty() -> None:
    table = filled(5, 5)
    plan = moving(table, [(4,), (0,), (2,)], [1, 1, 1])
    assert plan.moves == ((1, 4, True),)
    assert slot(plan) == (0, 3, -1, [1, 0, 2], [1, 0, 2], [1.0] * 3)
    assert table.columns().seq_ids == ((4,), (0,), (2,), (3,), (1,))
    assert table.columns().pos.tolist() == [1, 1, 1, 0, 0]
    assert moving(table, [(4,), (0,), (2,)], [2, 2, 2]).moves == ()


def test_a_bystander_goes_to_an_empty_cell_if_there_is_one() -> None:
    table = filled(5, 4)
    plan = moving(table, [(0,), (2,)], [1, 1])
    assert plan.moves == ((1, 4, False),)
    assert slot(plan) == (0, 2, -1, [0, 2], [0, 2], [1.0, 1.0])
    assert table.columns().seq_ids == ((0,), (2,), (), (3,), (1,))


def test_a_new_sequence_is_given_room_between_bystanders() -> None:
    """The row of zeros is one that a bystander was moved out of: it is cleared after the move."""
    table = filled(4, 3)
    moving(table, [(2,)], [1])
    table.seq_rm(1, -1, -1)
    moving(table, [(3,)], [0])
    assert table.columns().seq_ids == ((0,), (3,), (2,), ())
    plan = moving(table, [(4,), (0,)], [0, 1])
    assert plan.moves == ((1, 3, False),)
    assert slot(plan) == (0, 2, 1, [-1, 0], [1, 0], [0.0, 1.0])


def test_all_who_share_a_state_are_moved_as_one_and_read_from_where_it_went() -> None:
    table = filled(4, 3)
    table.seq_cp(1, 5)
    table.seq_cp(1, 6)
    plan = moving(table, [(0,), (2,), (5,)], [1, 1, 1])  # 5 leaves 1 and 6
    assert plan.moves == ((1, 3, False),)
    assert list(plan.src) == [0, 2, 3]
    assert table.columns().seq_ids == ((0,), (2,), (5,), (1, 6))
    assert table.columns().tail.tolist() == [0, 3, 1, -1, -1, 2, 3, -1]


def test_the_window_with_the_fewest_copies_is_taken() -> None:
    table = filled(8, 8)
    assert moving(table.copy(), [(0,), (3,), (4,), (6,)], [1] * 4).moves == ((5, 0, True),)
    table.seq_rm(0, -1, -1)
    # with cell 0 empty, one copy clears the cells 1 to 3, where 0 to 2 would need an exchange
    assert moving(table, [(1,), (3,), (6,)], [1] * 3).moves == ((2, 0, False),)


def test_no_row_is_moved_where_a_run_is_left() -> None:
    table = filled(7, 7)
    for seq_id in (2, 4, 6):
        table.seq_rm(seq_id, -1, -1)
    plan = moving(table, [(0,), (1,), (3,), (5,)], [1] * 4)
    assert (plan.head, plan.n, plan.moves) == (0, 4, ())


def test_states_with_snapshots_are_not_moved() -> None:
    table = CellTable(3, 3, n_rs_seq=2)
    moving(table, [(0,), (1,), (2,)], [0] * 3)
    plan = moving(table, [(0,), (2,)], [1, 1])
    assert (plan.n, plan.moves) == (3, ())


def test_moves_of_several_plans_follow_each_other() -> None:
    table = filled(4, 4)
    steps = [ubatch([(0,), (2,)], [1, 1]), ubatch([(1,), (3,)], [1, 1]), ubatch([(3,), (0,)], [2, 2])]
    plans = plan_slots(table, steps, "compact", moves=True)
    assert plans is not None
    assert table.columns().seq_ids == ((0,), (1,), (2,), (3,))
    assert [plan.moves for plan in plans] == [((1, 2, True),), (), ((1, 3, True),)]
    for plan in plans:
        commit(table, plan)
    table.check()
    assert table.columns().seq_ids == ((3,), (0,), (1,), (2,))


def test_a_moved_bystander_survives_a_failed_computation() -> None:
    table = filled(3, 3)
    discard(table, moving(table, [(0,), (2,)], [1, 1]))
    assert table.columns().seq_ids == ((), (), (1,))


# ---- the next step of the same sequences


def following(last: SlotPlan, pos: Sequence[int], n_seq_tokens: int = 1) -> UBatch:
    data = np.array(pos, np.int32).tobytes()
    return last.ubatch.next(data, data, n_seq_tokens, list(pos[n_seq_tokens - 1 :: n_seq_tokens]))


@pytest.mark.parametrize("sets", [[(3,)], [(1,), (0,)], [(2, 0), (3,)]])
@pytest.mark.parametrize("n_rs_seq", [0, 2])
def test_the_next_step_is_planned_as_ever(sets: Sets, n_rs_seq: int) -> None:
    table = CellTable(5, 4, n_rs_seq)
    moving(table, [(0,), (1,), (2,), (3,)], [0] * 4)
    last = moving(table, sets, [1] * len(sets))
    for pos, n_seq_tokens in (([2], 1), ([3, 4], 2), ([4], 1), ([9], 1), ([10, 11, 12], 3)):
        step = following(last, pos * len(sets), n_seq_tokens)
        plans = plan_slots(table, [UBatch(sets, pos * len(sets))])
        plan = slots.plan_next(table, last, step)
        assert plans is not None and plan is not None and plan.ubatch is step
        assert plan_values(plan) == plan_values(plans[0])
        assert (plan.gaps == ()) == (pos[0] not in (4, 9))
        commit(table, plan)
        table.check()
        last = plan


def test_the_next_step_is_not_guessed() -> None:
    table = filled(4, 2)
    last = moving(table, [(0,), (1,)], [1, 1])
    assert slots.plan_next(table, last, ubatch([(0,), (1,)], [2, 2])) is None, "equal sets, but not known to be"
    step = following(last, [2, 2])
    assert slots.plan_next(table, last, step) is not None
    for change in (lambda: table.seq_cp(0, 5), lambda: table.seq_add(0, -1, -1, 1), lambda: table.seq_rm(0, -1, -1)):
        last = moving(table, [(0,), (1,)], [9, 9])
        change()
        assert slots.plan_next(table, last, following(last, [10, 10])) is None


def plan_values(plan: SlotPlan) -> list[Any]:
    return [*slot(plan), plan.n_seqs, plan.gaps, plan.moves, plan.delta]


# ---- situations of users


def test_one_cell_is_not_cleared_for_the_second_batch(make: Any) -> None:
    cache = make(1)
    assert slot(cache.step([(0,)], [1], 2)) == (0, 1, 0, [-1], [0], [0.0])
    assert state(cache, "used") == 1
    assert slot(cache.step([(0,)], [2])) == (0, 1, -1, [0], [0], [1.0])
    assert state(cache, "used", "rs_z") == (1, -1)


def test_sequences_in_turn_get_plans_that_differ(make: Any) -> None:
    cache = make(2)
    cache.step([(0,), (1,)], [4, 4], 5)
    seen = [slot(cache.step([(seq_id,)], [5 + turn])) for turn in range(2) for seq_id in (0, 1)]
    assert seen == [(0, 1, -1, [0], [0], [1.0]), (1, 1, -1, [1], [1], [1.0])] * 2


def test_a_removed_sequence_id_starts_again_without_its_old_position(make: Any) -> None:
    cache = make(4)
    cache.step([(0,)], [0])
    cache.step([(1,)], [335], 336)
    assert cache.seq_rm(1, -1, -1) is True
    assert cache.seq_pos_max(1) == -1
    plan = cache.step([(1,)], [9], 10)
    assert list(plan.gaps) == []
    assert slot(plan) == (1, 1, 1, [-1], [1], [0.0])


def test_a_common_prefix_of_four_sequences_is_forked_by_their_endings(make: Any) -> None:
    cache = make(4)
    assert slot(cache.step([(0, 1, 2, 3)], [9], 10)) == (0, 1, 0, [-1], [0], [0.0])
    assert state(cache, "used", "tail") == (1, [0, 0, 0, 0])
    plan = cache.step([(0,), (1,), (2,), (3,)], [10] * 4)
    assert slot(plan) == (0, 4, 1, [0] * 4, [0] * 4, [1.0] * 4)
    assert list(plan.gaps) == []
    assert state(cache, "tail", "pos") == ([0, 1, 2, 3], [10] * 4)


def test_any_sequence_means_all_of_them_or_nothing(make: Any) -> None:
    cache = make(4)
    cache.step([(0,), (1,)], [5, 3])
    before = cache.dump()
    for span in ((0, 3), (2, -1), (3, 6), (0, 6)):
        assert cache.seq_rm(-1, *span) is False
    assert cache.seq_rm(-1, 2, 2) is True
    assert cache.dump() == before
    assert cache.seq_rm(-1, 0, -1) is True
    assert state(cache, "used", "tail", "pos") == (0, [-1] * 4, [-1] * 4)


def test_a_warm_sequence_is_cloned_into_branches(make: Any) -> None:
    cache = make(6)
    cache.step([(5,)], [0])
    cache.step([(0,)], [6], 7)
    for branch in (1, 2, 3):
        cache.seq_cp(0, branch)
    assert state(cache, "used", "tail") == (2, [1, 1, 1, 1, -1, 0])
    plan = cache.step([(0,), (1,), (2,), (3,)], [7] * 4)
    assert slot(plan) == (1, 4, 2, [1] * 4, [1] * 4, [1.0] * 4)
    assert state(cache, "tail") == [1, 2, 3, 4, -1, 0]
    assert slot(cache.step([(2,)], [8])) == (3, 1, -1, [3], [3], [1.0])  # continues without the others


@pytest.mark.parametrize("how", ["rm from 0", "rm all", "rm any", "clear", "keep another"])
@pytest.mark.parametrize("placement", ["classic", "compact"])
def test_nobody_inherits_a_removed_state(how: str, placement: str) -> None:
    table = CellTable(2)

    def step(sets: Sets, last: Sequence[int]) -> SlotPlan:
        plans = plan_slots(table, [ubatch(sets, last)], placement)
        assert plans is not None
        commit(table, plans[0])
        return plans[0]

    step([(0,)], [0])
    step([(0,)], [1])
    if how == "rm from 0":
        assert table.seq_rm(0, 0, -1)
    elif how == "rm all":
        assert table.seq_rm(0, -1, -1)
    elif how == "rm any":
        assert table.seq_rm(-1, -1, -1)
    elif how == "clear":
        table.clear()
    else:
        table.seq_keep(1)
    assert table.used == 0
    assert slot(step([(0,)], [0])) == (0, 1, 0, [-1], [0], [0.0])
