"""Proves each operation of the cell table by literal values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rcache_plugin.cells.slots import commit, plan_slots
from rcache_plugin.cells.table import Cell, CellTable
from rcache_plugin.cells.ubatch import CELL_NONE, POS_NONE, SEQ_ANY, UBatch
from rcache_plugin.errors import CorruptTable, InvalidArgument, SeqIdError, StalePlan

POS_MAX = 2**31 - 1


def step(table: CellTable, sets: Sequence[Sequence[int]], last: Sequence[int]) -> None:
    plans = plan_slots(table, [UBatch(sets, last)])
    assert plans is not None
    commit(table, plans[0])


def filled(size: int, last: Sequence[int], n_seq_max: int | None = None) -> CellTable:
    """Sequence i is in cell i at position ``last[i]``."""
    table = CellTable(size, n_seq_max)
    step(table, [(seq_id,) for seq_id in range(len(last))], last)
    return table


def dump(table: CellTable) -> tuple[Any, ...]:
    table.check()
    pos, src, tail, seq_ids = table.columns()
    return pos.tolist(), src.tolist(), tail.tolist(), seq_ids, table.head, table.n, table.used, table.rs_z


def unchanged(table: CellTable, call: Callable[[], Any]) -> Any:
    """The call's answer; it must leave the table and its epoch as they were."""
    before, epoch = dump(table), table.epoch
    answer = call()
    assert dump(table) == before
    assert table.epoch == epoch
    return answer


def refused(table: CellTable, error: type[Exception], call: Callable[[], Any], match: str | None = None) -> None:
    def expect() -> None:
        with pytest.raises(error, match=match):
            call()

    unchanged(table, expect)


# ---- a new table


def test_a_new_table_is_empty() -> None:
    table = CellTable(3)
    assert dump(table) == ([-1] * 3, [-1] * 3, [-1] * 3, ((), (), ()), 0, 0, 0, -1)
    assert (table.size, table.n_seq_max) == (3, 3)
    assert table.cell(2) == Cell(POS_NONE, CELL_NONE, ())
    assert table.can_shift is True
    assert (POS_NONE, CELL_NONE, SEQ_ANY) == (-1, -1, -1)


def test_the_number_of_ids_may_differ_from_the_number_of_cells() -> None:
    assert CellTable(2, 9).columns().tail.tolist() == [-1] * 9
    assert CellTable(9, 2).columns().tail.tolist() == [-1] * 2


@pytest.mark.parametrize("args", [(0,), (-1,), (4, 0), (4, -2)])
def test_a_table_needs_a_cell_and_an_id(args: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument):
        CellTable(*args)


def test_cells_and_tails_are_read_one_by_one() -> None:
    table = filled(3, [4, 0])
    table.seq_cp(0, 2)
    assert table.cell(0) == Cell(4, 0, (0, 2))
    assert table.cell(2) == Cell(-1, -1, ())
    assert [table.tail(seq_id) for seq_id in range(3)] == [0, 1, 0]
    for outside in (-1, 3):
        with pytest.raises(InvalidArgument):
            table.cell(outside)
        with pytest.raises(SeqIdError):
            table.tail(outside)


def test_columns_are_copies() -> None:
    table = filled(3, [4, 0])
    columns = table.columns()
    columns.pos[0] = columns.src[0] = columns.tail[0] = 77
    assert dump(table)[:3] == ([4, 0, -1], [0, 1, -1], [0, 1, -1])
    table.seq_rm(1, -1, -1)
    assert columns.seq_ids == ((0,), (1,), ())


# ---- seq_rm


@pytest.mark.parametrize("span", [(-1, -1), (0, -1), (0, 10), (-5, 11), (0, POS_MAX), (-1, POS_MAX)])
def test_rm_of_the_whole_state(span: tuple[int, int]) -> None:
    table = filled(4, [9, 9, 9])
    epoch = table.epoch
    assert table.seq_rm(1, *span) is True
    assert dump(table) == ([9, -1, 9, -1], [0, -1, 2, -1], [0, -1, 2, -1], ((0,), (), (2,), ()), 0, 3, 2, 0)
    assert table.epoch != epoch


@pytest.mark.parametrize("span", [(0, 1), (0, 9), (-1, 5), (1, -1), (9, -1), (9, 10), (3, 6), (8, POS_MAX)])
def test_rm_of_a_part_is_refused(span: tuple[int, int]) -> None:
    table = filled(4, [9, 9, 9])
    assert unchanged(table, lambda: table.seq_rm(1, *span)) is False


@pytest.mark.parametrize("span", [(10, -1), (10, 20), (POS_MAX, -1), (0, 0), (5, 5), (7, 2), (20, 3)])
def test_rm_of_nothing_succeeds(span: tuple[int, int]) -> None:
    table = filled(4, [9, 9, 9])
    assert unchanged(table, lambda: table.seq_rm(1, *span)) is True


@pytest.mark.parametrize("span", [(-1, -1), (3, 5), (0, 2)])
def test_rm_of_an_empty_sequence_succeeds(span: tuple[int, int]) -> None:
    table = filled(4, [9, 9])
    assert unchanged(table, lambda: table.seq_rm(3, *span)) is True


@pytest.mark.parametrize("seq_id", [4, 5, 1000])
def test_rm_of_an_id_that_cannot_be_is_refused(seq_id: int) -> None:
    table = filled(4, [9])
    assert unchanged(table, lambda: table.seq_rm(seq_id, -1, -1)) is False


def test_rm_takes_one_of_several_out_of_a_shared_cell() -> None:
    table = filled(4, [9, 9])
    table.seq_cp(0, 3)
    assert table.seq_rm(0, -1, -1) is True
    assert dump(table) == ([9, 9, -1, -1], [0, 1, -1, -1], [-1, 1, -1, 0], ((3,), (1,), (), ()), 0, 2, 2, 0)
    assert table.seq_rm(3, -1, -1) is True
    assert table.cell(0) == Cell(-1, -1, ())


def test_rm_moves_the_head_back_to_the_freed_cell_never_forward() -> None:
    table = filled(6, [0, 0, 0, 0])
    step(table, [(2,)], [1])
    assert (table.head, table.n) == (2, 1)
    table.seq_rm(3, -1, -1)
    assert table.head == 2
    table.seq_rm(1, -1, -1)
    assert table.head == 1
    table.seq_rm(2, -1, -1)
    assert table.head == 1


def test_rm_from_a_shared_cell_makes_no_room_and_leaves_the_head() -> None:
    table = filled(6, [0, 0, 0])
    table.seq_cp(0, 4)
    step(table, [(2,)], [1])
    table.seq_rm(0, -1, -1)
    assert table.head == 2


def test_rm_any_takes_everything_and_moves_the_head_to_the_first_used_cell() -> None:
    table = filled(5, [0, 3, 7])
    table.seq_rm(0, -1, -1)
    step(table, [(2,)], [8])
    assert table.head == 2
    assert table.seq_rm(SEQ_ANY, -1, -1) is True
    assert dump(table)[:4] == ([-1] * 5, [-1] * 5, [-1] * 5, ((),) * 5)
    assert (table.head, table.used) == (1, 0)


@pytest.mark.parametrize("seq_id", [-1, -9])
@pytest.mark.parametrize("span", [(1, -1), (0, 100), (-1, 8), (3, 5)])
def test_rm_any_of_a_part_is_refused(seq_id: int, span: tuple[int, int]) -> None:
    table = filled(5, [0, 3, 7])
    assert unchanged(table, lambda: table.seq_rm(seq_id, *span)) is False


def test_rm_any_of_nothing_succeeds() -> None:
    table = filled(5, [0, 3, 7])
    assert unchanged(table, lambda: table.seq_rm(-1, 4, 4)) is True
    assert unchanged(table, lambda: table.seq_rm(-1, 0, 0)) is True


def test_the_largest_position_can_be_removed() -> None:
    table = filled(2, [POS_MAX])
    assert unchanged(table, lambda: table.seq_rm(0, 0, POS_MAX - 1)) is False
    assert table.seq_rm(0, -1, -1) is True
    assert table.seq_pos_max(0) == -1


# ---- seq_cp


def test_cp_shares_the_cell() -> None:
    table = filled(4, [9, 9])
    table.seq_cp(1, 3)
    table.seq_cp(3, 2)
    assert dump(table) == ([9, 9, -1, -1], [0, 1, -1, -1], [0, 1, 1, 1], ((0,), (1, 2, 3), (), ()), 0, 2, 2, 0)


def test_cp_drops_what_the_destination_had_and_leaves_the_head() -> None:
    table = filled(4, [9, 5, 0])
    step(table, [(2,)], [1])
    table.seq_cp(1, 0)
    assert dump(table) == ([-1, 5, 1, -1], [-1, 1, 2, -1], [1, 1, 2, -1], ((), (0, 1), (2,), ()), 2, 1, 2, -1)


def test_cp_of_an_empty_sequence_empties_the_destination() -> None:
    table = filled(4, [9, 5])
    table.seq_cp(3, 0)
    assert dump(table)[:4] == ([-1, 5, -1, -1], [-1, 1, -1, -1], [-1, 1, -1, -1], ((), (1,), (), ()))
    table.seq_cp(3, 0)  # both are empty now
    assert table.used == 1


def test_cp_onto_itself_or_onto_one_who_shares_already() -> None:
    table = filled(4, [9])
    unchanged(table, lambda: table.seq_cp(0, 0))
    table.seq_cp(0, 1)
    before = dump(table)
    table.seq_cp(1, 0)
    table.seq_cp(0, 1)
    assert dump(table) == before


@pytest.mark.parametrize("span", [(0, 10), (-1, 10), (0, POS_MAX), (-3, -3)])
def test_cp_with_a_range_that_covers_the_state(span: tuple[int, int]) -> None:
    table = filled(4, [9])
    table.seq_cp(0, 1, *span)
    assert table.tail(1) == 0


@pytest.mark.parametrize("span", [(1, -1), (0, 9), (4, 5), (0, 0), (10, 20)])
def test_cp_of_a_part_is_refused(span: tuple[int, int]) -> None:
    table = filled(4, [9, 3])
    refused(table, InvalidArgument, lambda: table.seq_cp(0, 1, *span))


@pytest.mark.parametrize(("src", "dst"), [(4, 0), (0, 4), (-1, 0), (0, -1), (9, 9)])
def test_cp_with_an_id_that_cannot_be(src: int, dst: int) -> None:
    table = filled(4, [9])
    bad = str(src if src not in range(4) else dst)
    refused(table, SeqIdError, lambda: table.seq_cp(src, dst), match=rf"{bad}\b.*n_seq_max=4")


# ---- seq_keep


def test_keep_drops_all_others() -> None:
    table = filled(5, [9, 5, 3])
    table.seq_cp(1, 3)
    table.seq_keep(1)
    assert dump(table)[:4] == ([-1, 5, -1, -1, -1], [-1, 1, -1, -1, -1], [-1, 1, -1, -1, -1], ((), (1,), (), (), ()))
    assert (table.head, table.used) == (0, 1)


@pytest.mark.parametrize(("kept", "head"), [(0, 1), (1, 0), (2, 0), (4, 0)])
def test_keep_sets_the_head_to_the_first_cell_without_it(kept: int, head: int) -> None:
    table = filled(5, [0, 0, 0])
    step(table, [(2,)], [1])
    assert table.head == 2
    table.seq_keep(kept)
    assert table.head == head
    assert table.used == (kept < 3)


def test_keep_of_the_only_cell_leaves_the_head() -> None:
    table = filled(1, [0])
    table.seq_keep(0)
    assert dump(table) == ([0], [0], [0], ((0,),), 0, 1, 1, 0)


@pytest.mark.parametrize("seq_id", [-1, 5])
def test_keep_of_an_id_that_cannot_be(seq_id: int) -> None:
    table = filled(5, [0, 0])
    refused(table, SeqIdError, lambda: table.seq_keep(seq_id), match="n_seq_max=5")


# ---- seq_add, seq_div, positions


@pytest.mark.parametrize(
    ("span", "shift", "after"),
    [
        ((-1, -1), 5, 14),
        ((9, 10), -3, 6),
        ((0, 9), 5, 9),
        ((10, -1), 5, 9),
        ((4, 4), 5, 9),
        ((-1, -1), 0, 9),
        ((-1, -1), -9, 0),
        ((-1, -1), POS_MAX - 9, POS_MAX),
    ],
)
def test_add_shifts_a_position_in_the_range(span: tuple[int, int], shift: int, after: int) -> None:
    table = filled(4, [2, 9])
    table.seq_add(1, *span, shift)
    assert dump(table)[:3] == ([2, after, -1, -1], [0, 1, -1, -1], [0, 1, -1, -1])


@pytest.mark.parametrize("shift", [-10, POS_MAX - 8, -(2**31), POS_MAX])
def test_add_out_of_what_a_position_can_be(shift: int) -> None:
    table = filled(4, [2, 9])
    refused(table, InvalidArgument, lambda: table.seq_add(1, -1, -1, shift), match=r"\b9\b")


def test_add_and_div_shift_all_who_share_the_cell() -> None:
    table = filled(4, [2, 9])
    table.seq_cp(1, 3)
    table.seq_add(3, -1, -1, 6)
    assert [table.seq_pos_max(seq_id) for seq_id in range(4)] == [2, 15, -1, 15]
    table.seq_div(1, -1, -1, 2)
    assert [table.seq_pos_max(seq_id) for seq_id in range(4)] == [2, 7, -1, 7]


@pytest.mark.parametrize(
    ("span", "d", "after"),
    [((-1, -1), 2, 4), ((0, 9), 2, 9), ((9, -1), 3, 3), ((0, 0), 2, 9), ((0, -1), 1, 9), ((0, -1), 99, 0)],
)
def test_div_rounds_down(span: tuple[int, int], d: int, after: int) -> None:
    table = filled(4, [2, 9])
    table.seq_div(1, *span, d)
    assert dump(table)[0] == [2, after, -1, -1]


@pytest.mark.parametrize("d", [0, -1, -2])
def test_div_by_less_than_1_is_refused(d: int) -> None:
    table = filled(4, [2, 9])
    refused(table, InvalidArgument, lambda: table.seq_div(1, -1, -1, d))
    refused(table, InvalidArgument, lambda: table.seq_div(3, -1, -1, d))


def test_add_and_div_of_an_empty_sequence_do_nothing() -> None:
    table = filled(4, [2, 9])
    unchanged(table, lambda: table.seq_add(3, -1, -1, 5))
    unchanged(table, lambda: table.seq_div(3, -1, -1, 5))


@pytest.mark.parametrize("seq_id", [-1, 4])
def test_positions_of_an_id_that_cannot_be(seq_id: int) -> None:
    table = filled(4, [2, 9])
    refused(table, SeqIdError, lambda: table.seq_add(seq_id, -1, -1, 5), match="n_seq_max=4")
    refused(table, SeqIdError, lambda: table.seq_div(seq_id, -1, -1, 5), match="n_seq_max=4")
    refused(table, SeqIdError, lambda: table.seq_pos_min(seq_id), match="n_seq_max=4")
    refused(table, SeqIdError, lambda: table.seq_pos_max(seq_id), match="n_seq_max=4")


def test_smallest_and_largest_position_are_the_state_s() -> None:
    table = filled(4, [2, 9])
    table.seq_cp(1, 3)
    assert [table.seq_pos_min(seq_id) for seq_id in range(4)] == [2, 9, -1, 9]
    assert [table.seq_pos_max(seq_id) for seq_id in range(4)] == [2, 9, -1, 9]


# ---- clear, resize, copy


def test_clear_forgets_all() -> None:
    table = filled(4, [2, 9, 3])
    step(table, [(2,)], [4])
    epoch = table.epoch
    table.clear()
    assert dump(table)[:5] == ([-1] * 4, [-1] * 4, [-1] * 4, ((),) * 4, 0)
    assert table.used == 0
    assert table.epoch != epoch


def test_growing_keeps_everything_in_place() -> None:
    table = filled(2, [2, 9])
    epoch = table.epoch
    assert table.resize(4) == ()
    assert dump(table)[:4] == ([2, 9, -1, -1], [0, 1, -1, -1], [0, 1, -1, -1], ((0,), (1,), (), ()))
    assert (table.size, table.n_seq_max, table.used) == (4, 4, 2)
    assert table.epoch != epoch
    step(table, [(3,), (2,)], [0, 0])
    assert table.used == 4


def test_shrinking_moves_states_from_beyond_the_end_to_the_first_empty_cells() -> None:
    table = filled(6, [0, 1, 2, 3, 4, 5])
    for seq_id in (0, 2, 4):
        table.seq_rm(seq_id, -1, -1)
    table.seq_cp(5, 2)
    assert table.resize(3) == ((3, 0), (5, 2))
    assert dump(table)[:4] == ([3, 1, 5], [0, 1, 2], [-1, 1, 2, 0, -1, 2], ((3,), (1,), (2, 5)))
    assert (table.size, table.n_seq_max) == (3, 6)


@pytest.mark.parametrize("n_cells", [2, 1, 0, -4])
def test_shrinking_below_what_is_in_use_is_refused(n_cells: int) -> None:
    table = filled(6, [0, 1, 2])
    refused(table, InvalidArgument, lambda: table.resize(n_cells), match="3")


def test_the_number_of_ids_can_be_changed_with_the_cells_or_alone() -> None:
    table = filled(4, [0, 1])
    assert table.resize(4, 2) == ()
    assert (table.size, table.n_seq_max) == (4, 2)
    table.resize(4, 9)
    assert table.columns().tail.tolist() == [0, 1] + [-1] * 7
    table.resize(2)
    assert (table.size, table.n_seq_max) == (2, 9)
    refused(table, InvalidArgument, lambda: table.resize(2, 1), match="sequence 1")
    table.clear()
    refused(table, InvalidArgument, lambda: table.resize(0))
    refused(table, InvalidArgument, lambda: table.resize(2, 0))


def test_the_head_stays_inside_after_shrinking() -> None:
    table = filled(8, [0] * 8)
    step(table, [(7,)], [1])
    for seq_id in range(1, 7):
        table.seq_rm(seq_id, -1, -1)
    step(table, [(7,)], [2])
    assert table.head == 7
    assert table.resize(2) == ((7, 1),)
    assert 0 <= table.head < 2
    step(table, [(7,), (0,)], [3, 1])
    assert table.columns().tail.tolist() == [1, -1, -1, -1, -1, -1, -1, 0]


def test_a_fork_continues_by_itself() -> None:
    table = filled(4, [2, 9])
    other = table.copy()
    assert dump(other) == dump(table)
    before = dump(table)
    other.seq_cp(0, 3)
    step(other, [(1,)], [10])
    other.seq_rm(0, -1, -1)
    assert dump(table) == before
    third = table.copy()
    table.clear()
    assert dump(third) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.seq_rm(0, -1, -1),
        lambda table: table.seq_rm(-1, -1, -1),
        lambda table: table.seq_cp(0, 2),
        lambda table: table.seq_keep(0),
        lambda table: table.seq_add(0, -1, -1, 1),
        lambda table: table.seq_div(0, -1, -1, 2),
        lambda table: table.clear(),
        lambda table: table.resize(5),
        lambda table: step(table, [(1,)], [10]),
    ],
    ids=["rm", "rm any", "cp", "keep", "add", "div", "clear", "resize", "step"],
)
def test_every_change_makes_plans_stale(change: Callable[[CellTable], Any]) -> None:
    table = filled(4, [2, 9])
    plans = plan_slots(table, [UBatch([(0,)], [3])])
    assert plans is not None
    change(table)
    after = dump(table)
    with pytest.raises(StalePlan):
        commit(table, plans[0])
    assert dump(table) == after


# ---- check


@pytest.mark.parametrize(
    ("corrupt", "found"),
    [
        (lambda table: setattr(table, "head", 4), "head"),
        (lambda table: setattr(table, "head", -1), "head"),
        (lambda table: setattr(table, "n", 5), "n is"),
        (lambda table: setattr(table, "rs_z", 4), "rs_z"),
        (lambda table: table.raw()[0].__setitem__(0, -1), "position"),
        (lambda table: table.raw()[0].__setitem__(3, 8), "position"),
        (lambda table: table.raw()[0].append(0), "entries"),
        (lambda table: table.raw()[1].__setitem__(1, 0), "source"),
        (lambda table: table.raw()[1].__setitem__(1, -1), "state"),
        (lambda table: table.raw()[2].__setitem__(3, (3,)), "empty"),
        (lambda table: table.raw()[2].__setitem__(0, (0, 1)), "sequence 1"),
        (lambda table: table.raw()[2].__setitem__(0, (2,)), "tail"),
        (lambda table: table.raw()[2].__setitem__(0, (0, 9)), "n_seq_max"),
        (lambda table: table.raw()[2].__setitem__(0, (3, 0)), "order"),
        (lambda table: table.raw()[3].__setitem__(0, -1), "tail"),
        (lambda table: table.raw()[3].__setitem__(2, 1), "tail"),
        (lambda table: table.raw()[3].pop(), "entries"),
    ],
)
def test_check_finds_every_broken_invariant(corrupt: Callable[[CellTable], Any], found: str) -> None:
    table = filled(4, [2, 9])
    table.check()
    corrupt(table)
    with pytest.raises(CorruptTable, match=found):
        table.check()
