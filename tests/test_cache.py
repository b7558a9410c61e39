"""Proves that table, planner and buffers work together as `RecurrentCache`, on real ggml buffers."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tables import same_columns

import rcache_plugin.cells.slots
from rcache_plugin import CacheSpec, HostVTable, RecurrentCache, TableClient, UBatch
from rcache_plugin.errors import (
    AllocationError,
    ClosedError,
    InvalidArgument,
    SeqIdError,
    StalePlan,
    StateError,
    Unsupported,
)

SPEC = CacheSpec.make([6, 0, 3], [10, 0, 5])


def write_row(cache: RecurrentCache, cell: int, value: float) -> None:
    assert cache.buffers is not None
    for il in SPEC.layers:
        for which, n in (("r", SPEC.n_embd_r[il]), ("s", SPEC.n_embd_s[il])):
            cache.buffers.set_row(which, il, cell, np.full(n, value, dtype=np.float32).tobytes())


def read_row(cache: RecurrentCache, cell: int) -> set[float]:
    assert cache.buffers is not None
    values: set[float] = set()
    for il in SPEC.layers:
        for which in ("r", "s"):
            values |= set(np.frombuffer(cache.buffers.get_row(which, il, cell), dtype=np.float32).tolist())
    return values


def test_sizes_and_tensors() -> None:
    with RecurrentCache(SPEC, 5) as cache:
        assert cache.table.size == 5 == cache.table.n_seq_max and cache.table.used == 0
        assert cache.buffers.size_r_bytes == 5 * 9 * 4 and cache.buffers.size_s_bytes == 5 * 15 * 4
        assert cache.buffers.total_size >= cache.buffers.size_r_bytes + cache.buffers.size_s_bytes
        assert sum(cache.buffers.memory_breakdown().values()) == cache.buffers.total_size
        assert cache.buffers.tensor("r", 0) and cache.buffers.tensor("s", 2) and cache.buffers.tensor("r", 1) is None
        for il in (-1, 3):
            with pytest.raises(InvalidArgument, match="layer"):
                cache.buffers.tensor("r", il)


def test_new_sequence_finds_zeros_whatever_the_row_held() -> None:
    """CASES 39: nothing of an earlier user, and no NaN, gets into a new sequence."""
    with RecurrentCache(SPEC, 3) as cache:
        for cell in range(3):
            write_row(cache, cell, float("nan"))
        plan = cache.find_slot(UBatch([(0,), (2,)], [0, 0]))
        assert plan is not None and plan.rs_z >= 0
        assert plan.s_copy.tolist() == [plan.rs_z] * 2 and read_row(cache, plan.rs_z) == {0.0}


def test_a_step_that_starts_nothing_clears_nothing() -> None:
    with RecurrentCache(SPEC, 3) as cache:
        cache.find_slot(UBatch.single(0, 0))
        write_row(cache, 0, 7.0)
        plan = cache.find_slot(UBatch.single(0, 1))
        assert plan is not None and plan.rs_z == -1 and read_row(cache, 0) == {7.0}
        cache.seq_cp(0, 1)
        fork = cache.find_slot(UBatch.single(1, 2))
        assert fork is not None and fork.s_copy.tolist() == [0] and read_row(cache, 0) == {7.0}


def busy(cache: RecurrentCache) -> None:
    """A sequence in each cell, with a row of its own number."""
    cache.find_slot(UBatch([(i,) for i in range(cache.table.size)], [0] * cache.table.size))
    for cell in range(cache.table.size):
        write_row(cache, cell, float(cell))


def test_rows_of_bystanders_move_with_their_sequences() -> None:
    with RecurrentCache(SPEC, 6, placement="compact") as cache:
        busy(cache)
        first = UBatch([(5,), (1,), (3,)], [1, 1, 1])
        assert cache.prepare([first, UBatch([(0,), (2,), (4,)], [1, 1, 1])])
        assert [read_row(cache, cell) for cell in range(6)] == [{float(cell)} for cell in range(6)], "only planned"
        plan = cache.find_slot(first)
        assert plan is not None and plan.n == 3 and len(plan.moves) == 1
        rows = [read_row(cache, row) for row in plan.s_copy.tolist()]
        assert rows == [{5.0}, {1.0}, {3.0}], "what the graph gathers"
        for seq_id in (0, 2, 4):
            assert read_row(cache, cache.table.tail(seq_id)) == {float(seq_id)}


def test_a_row_is_moved_before_it_is_cleared() -> None:
    with RecurrentCache(SPEC, 5, n_seq_max=8, placement="compact") as cache:
        busy(cache)
        cache.seq_rm(3)
        plan = cache.find_slot(UBatch([(0,), (7,)], [1, 0]))
        assert plan is not None and (plan.moves, plan.rs_z) == (((1, 3, False),), 1)
        assert [read_row(cache, row) for row in plan.s_copy.tolist()] == [{0.0}, {0.0}]
        assert read_row(cache, cache.table.tail(1)) == {1.0}


def test_an_interrupted_move_loses_the_states_it_may_have_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with RecurrentCache(SPEC, 6, placement="compact") as cache:
        busy(cache)
        assert cache.buffers is not None

        def interrupted(moves: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(cache.buffers, "move_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.find_slot(UBatch([(0,), (2,)], [1, 1]))
        cache.table.check()
        assert [cache.seq_pos_max(seq_id) for seq_id in range(6)] == [0, -1, -1, 0, 0, 0]
        assert cache.plan is None


def test_a_host_that_keeps_the_rows_itself_is_asked_for_no_moves() -> None:
    with RecurrentCache(SPEC, 3, placement="compact", allocate=False) as cache:
        cache.find_slot(UBatch([(0,), (1,), (2,)], [0, 0, 0]))
        plan = cache.find_slot(UBatch([(0,), (2,)], [1, 1]))
        assert plan is not None and (plan.n, plan.moves) == (3, ())


def test_prepared_plans_are_not_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = rcache_plugin.cells.slots.plan_slots

    def counted(*args: object) -> object:
        made.append(args)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("rcache_plugin.cells.planner.plan_slots", counted)
    with RecurrentCache(SPEC, 4, allocate=False) as cache:
        ubatches = [UBatch([(0,), (1,)], [0, 0]), UBatch.single(1, 1), UBatch.single(2, 0)]
        assert cache.prepare(ubatches)
        assert len(made) == 1 and cache.table.used == 0
        for ubatch in ubatches:
            assert cache.find_slot(ubatch) is not None
        assert len(made) == 1 and cache.table.used == 3

        # a change in between, or another ubatch than announced: planned anew, and right
        assert cache.prepare([UBatch.single(0, 1)])
        cache.seq_rm(0)
        plan = cache.find_slot(UBatch.single(0, 0))
        assert plan is not None and len(made) == 3 and plan.src.tolist() == [-1]
        assert cache.prepare([UBatch.single(0, 1), UBatch.single(1, 2)])
        assert cache.find_slot(UBatch.single(2, 1)) is not None and cache.seq_pos_max(2) == 1
        assert cache.find_slot(UBatch.single(1, 2)) is not None and cache.seq_pos_max(1) == 2


def test_prepare_that_does_not_fit() -> None:
    with RecurrentCache(SPEC, 1, n_seq_max=2, allocate=False) as cache:
        assert cache.prepare([UBatch.single(0, 0), UBatch.single(1, 0)]) is False
        assert cache.table.used == 0 and cache.find_slot(UBatch.single(1, 0)) is not None
        with pytest.raises(SeqIdError, match="n_seq_max=2"):
            cache.prepare([UBatch.single(2, 0)])


def test_reading_the_plan() -> None:
    with RecurrentCache(SPEC, 4, allocate=False) as cache:
        with pytest.raises(InvalidArgument):
            cache.s_copy(0)
        cache.find_slot(UBatch([(0,), (1,)], [0, 0]))
        for _ in range(2):
            assert [cache.s_copy(i) for i in range(2)] == [0, 0] and [cache.s_mask(i) for i in range(2)] == [0.0, 0.0]
        with pytest.raises(InvalidArgument, match="row 2"):
            cache.s_mask(2)


@pytest.mark.parametrize("n_cells", [3, 6, 12])
def test_resize_keeps_every_state(n_cells: int) -> None:
    with RecurrentCache(SPEC, 6) as cache:
        cache.find_slot(UBatch([(i,) for i in range(6)], [0] * 6))
        for cell in range(6):
            write_row(cache, cell, 10.0 + cell)
        for seq_id in (0, 2, 3):
            cache.seq_rm(seq_id)
        cache.seq_cp(5, 0)
        before = cache.buffers.tensor("r", 0)
        cache.resize(n_cells)
        cache.table.check()
        assert cache.table.size == n_cells and cache.table.used == 3 and cache.buffers.tensor("r", 0) != before
        assert {s: read_row(cache, cache.table.tail(s)) for s in (0, 1, 4, 5)} == {
            0: {15.0}, 1: {11.0}, 4: {14.0}, 5: {15.0},
        }
        assert cache.plan is None
        plan = cache.find_slot(UBatch([(4,), (1,)], [1, 1]))
        assert plan is not None and plan.src[:2].min() >= 0


def test_resize_that_cannot_be_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object, **kwargs: object) -> None:
        raise AllocationError("no room")

    with RecurrentCache(SPEC, 4) as cache:
        cache.find_slot(UBatch([(0,), (1,), (3,)], [0, 0, 0]))
        write_row(cache, 2, 5.0)
        columns, tensor = cache.table.columns(), cache.buffers.tensor("r", 0)
        for bad in ({"n_cells": 2}, {"n_cells": 8, "n_seq_max": 3}, {"n_cells": 0}, {"n_cells": 1 << 50}):
            with pytest.raises(InvalidArgument):
                cache.resize(**bad)
        monkeypatch.setattr("rcache_plugin.memory.buffers.StateBuffers", no_memory)
        with pytest.raises(AllocationError):
            cache.resize(8)
        assert same_columns(cache.table.columns(), columns)
        assert cache.buffers.tensor("r", 0) == tensor and read_row(cache, 2) == {5.0}


def test_clear_with_and_without_data() -> None:
    with RecurrentCache(SPEC, 2) as cache:
        cache.find_slot(UBatch([(0,), (1,)], [0, 0]))
        write_row(cache, 1, 3.0)
        cache.clear(data=False)
        assert cache.table.used == 0 and read_row(cache, 1) == {3.0}
        plan = cache.find_slot(UBatch([(0,), (1,)], [0, 0]))
        assert plan is not None and plan.src.tolist() == [-1, -1] and read_row(cache, plan.rs_z) == {0.0}
        cache.clear()
        assert read_row(cache, 0) == read_row(cache, 1) == {0.0}


def test_discarded_slot() -> None:
    with RecurrentCache(SPEC, 4, allocate=False) as cache:
        cache.find_slot(UBatch([(i,) for i in range(3)], [0] * 3))
        cache.find_slot(UBatch([(2,), (0,)], [1, 1]))  # 1 is moved along
        cache.discard_slot()
        assert [cache.seq_pos_max(s) for s in range(3)] == [-1, -1, -1]
        cache.find_slot(UBatch([(0,), (1,), (2,)], [0, 0, 0]))
        cache.find_slot(UBatch([(0,), (2,)], [1, 1]))
        assert cache.table.n == 3
        cache.discard_slot()
        assert cache.table.used == 0, "row 1 and 2 were exchanged"
        cache.find_slot(UBatch([(0,), (1,), (2,)], [0, 0, 0]))
        cache.find_slot(UBatch([(1,)], [1]))
        cache.discard_slot()
        assert [cache.seq_pos_max(s) for s in range(3)] == [0, -1, 0]
        with pytest.raises(InvalidArgument, match="no slot"):
            cache.discard_slot()
        cache.find_slot(UBatch([(1,)], [0]))
        cache.seq_add(0, 0, -1, 1)
        with pytest.raises(StalePlan):
            cache.discard_slot()


def test_closed() -> None:
    cache = RecurrentCache(SPEC, 2)
    cache.close()
    cache.close()
    calls = (
        lambda: cache.find_slot(UBatch.single(0, 0)), lambda: cache.prepare([]), lambda: cache.seq_rm(0),
        lambda: cache.seq_cp(0, 1), lambda: cache.seq_keep(0), lambda: cache.seq_add(0, 0, -1, 1),
        lambda: cache.seq_div(0, 0, -1, 2), lambda: cache.seq_pos_max(0), lambda: cache.seq_pos_min(0),
        lambda: cache.clear(), lambda: cache.resize(3), lambda: cache.buffers.tensor("r", 0),
        lambda: cache.buffers.tensor("s", 0), lambda: cache.s_copy(0), lambda: cache.s_mask(0),
        lambda: cache.discard_slot(), lambda: cache.positions(), lambda: cache.state_size(),
        lambda: cache.buffers.total_size, lambda: cache.buffers.memory_breakdown(), lambda: cache.checkpoints.all(),
    )
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_without_buffers() -> None:
    with RecurrentCache(SPEC, 2, allocate=False) as cache:
        assert cache.buffers is None
        with pytest.raises(Unsupported):
            cache.with_buffers()
        cache.resize(4)
        assert cache.table.size == 4


def test_threads_take_turns() -> None:
    with RecurrentCache(SPEC, 8, allocate=False) as cache:
        errors: list[BaseException] = []

        def work(seq_id: int) -> None:
            try:
                for pos in range(200):
                    assert cache.prepare([UBatch.single(seq_id, pos)])
                    assert cache.find_slot(UBatch.single(seq_id, pos)) is not None
                    assert cache.seq_pos_max(seq_id) == pos
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seq_id,)) for seq_id in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        cache.table.check()


def test_second_conv_history() -> None:
    """Few models keep p beside r; it is cleared, copied, written and read with the others."""
    import io

    spec = CacheSpec.make([6, 0], [10, 0], n_embd_p=[4, 0])
    with RecurrentCache(spec, 2) as cache:
        assert cache.buffers.tensor("p", 0) and cache.buffers.tensor("p", 1) is None
        assert cache.buffers.total_size >= 2 * spec.cell_bytes == 2 * 80
        cache.find_slot(UBatch.single(0, 4))
        assert cache.buffers is not None
        cache.buffers.set_row("p", 0, 0, np.arange(4, dtype=np.float32).tobytes())
        file = io.BytesIO()
        cache.state_write(file)
        file.seek(0)
        cache.clear()
        cache.state_read(file)
        assert cache.seq_pos_max(0) == 4
        assert cache.buffers.get_row("p", 0, 0) == np.arange(4, dtype=np.float32).tobytes()


def test_state_of_one_sequence_and_of_all() -> None:
    import io

    with RecurrentCache(SPEC, 4) as cache:
        cache.find_slot(UBatch([(0,), (1, 3)], [7, 9]))
        write_row(cache, 0, 1.5)
        write_row(cache, 1, 2.5)
        whole, one = io.BytesIO(), io.BytesIO()
        cache.state_write(whole)
        cache.state_write(one, seq_id=3)
        assert len(whole.getvalue()) == 4 + (8 + 4) + (8 + 8) + 8 + 4 * 12 + 2 * SPEC.cell_bytes
        write_row(cache, 1, 9.0)
        one.seek(0)
        cache.state_read(one, seq_id=0)
        cache.table.check()
        assert cache.seq_pos_max(0) == 9 and read_row(cache, cache.table.tail(0)) == {2.5}
        assert read_row(cache, cache.table.tail(1)) == {9.0}
        whole.seek(0)
        cache.state_read(whole)
        cache.table.check()
        assert [cache.seq_pos_max(s) for s in range(4)] == [7, 9, -1, 9]
        assert [read_row(cache, cache.table.tail(s)) for s in (0, 1, 3)] == [{1.5}, {2.5}, {2.5}]


def test_every_cut_of_a_state_is_refused_and_nothing_changes() -> None:
    import io

    with RecurrentCache(SPEC, 3) as cache:
        cache.find_slot(UBatch([(0,), (2,)], [3, 4]))
        write_row(cache, 0, 1.0)
        write_row(cache, 1, 2.0)
        for seq_id in (-1, 2):
            file = io.BytesIO()
            cache.state_write(file, seq_id)
            blob = file.getvalue()
            columns = cache.table.columns()
            for length in range(len(blob)):
                with pytest.raises(StateError, match=r"ends after|room for"):
                    cache.state_read(io.BytesIO(blob[:length]), seq_id)
            assert same_columns(cache.table.columns(), columns)
            assert read_row(cache, 0) == {1.0} and read_row(cache, 1) == {2.0}


# --- checkpoints, with rows ------------------------------------------------------------------------------------------


def with_checkpoint(cache: RecurrentCache) -> int:
    """Sequence 0 continues from a checkpoint; returns the cell of that. The rows of each cell hold its number."""
    cache.find_slot(UBatch.single(0, 0, 3, [5, 6, 7]))
    made = cache.checkpoints.make(0)
    cache.find_slot(UBatch.single(0, 3, 1, [8]))
    cache.find_slot(UBatch.single(1, 0, 2, [1, 2]))
    for cell in range(cache.table.size):
        write_row(cache, cell, cell + 1.0)
    assert made is not None
    return cache.table.pin_cell(made.pin)


def test_a_state_is_written_without_checkpoints_and_restored_around_them() -> None:
    import io

    with RecurrentCache(SPEC, 2, checkpoint_cells=2) as cache, RecurrentCache(SPEC, 2) as plain:
        cell = with_checkpoint(cache)
        file = io.BytesIO()
        cache.state_write(file)
        assert len(file.getvalue()) == 4 + 2 * 12 + 8 + 4 * 12 + 2 * SPEC.cell_bytes
        rows = [read_row(cache, cache.table.tail(seq)) for seq in (0, 1)]
        for target in (cache, plain):
            for seq_id in (-1, 0):
                one = io.BytesIO()
                cache.state_write(one, seq_id)
                target.state_read(io.BytesIO(one.getvalue()), seq_id)
                target.table.check()
                assert read_row(target, target.table.tail(0)) == rows[0]
        assert [plain.seq_pos_max(seq) for seq in (0, 1)] == [3, 1] and read_row(plain, plain.table.tail(1)) == rows[1]
        assert read_row(cache, cell) == {cell + 1.0} and len(cache.checkpoints.all()) == 1
        assert cache.checkpoints.tokens(0).tolist() == []  # what came in by bytes is not known by its tokens
        cache.checkpoints.set_tokens(0, [5, 6, 7, 8])
        assert cache.seq_rm(0, 3, -1) and cache.table.tail(0) == cell


def test_more_states_than_cells_take_those_of_checkpoints() -> None:
    import io

    with RecurrentCache(SPEC, 4) as larger, RecurrentCache(SPEC, 2, n_seq_max=4, checkpoint_cells=2) as cache:
        for seq in range(4):
            larger.find_slot(UBatch.single(seq, seq))
        file = io.BytesIO()
        larger.state_write(file)
        with_checkpoint(cache)
        cache.state_read(io.BytesIO(file.getvalue()))
        assert cache.positions() == [0, 1, 2, 3] and cache.checkpoints.all() == []
        assert cache.stats().checkpoints_evicted == 1
        cache.table.check()


def test_clearing_with_data_zeroes_the_rows_of_checkpoints_too() -> None:
    with RecurrentCache(SPEC, 2, checkpoint_cells=2) as cache:
        with_checkpoint(cache)
        cache.clear(data=False)
        assert len(cache.checkpoints.all()) == 1 and cache.table.used == 1
        cache.clear(data=True)
        assert cache.table.used == 0 and all(read_row(cache, cell) == {0.0} for cell in range(cache.table.size))


def test_resizing_moves_the_rows_of_checkpoints() -> None:
    with RecurrentCache(SPEC, 3, checkpoint_cells=2) as cache:
        cell = with_checkpoint(cache)
        (checkpoint,) = cache.checkpoints.all()
        for n_cells in (6, 2):
            cache.resize(n_cells)
            assert cache.table.size == n_cells + 2 and checkpoint.valid
            assert read_row(cache, cache.table.pin_cell(checkpoint.pin)) == {cell + 1.0}


def test_a_plan_is_published_before_another_thread_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else C could be left with an older plan than the table's."""
    got_in: list[bool] = []

    def try_to_get_in() -> None:
        got_in.append(cache._access.lock.acquire(blocking=False))
        if got_in[-1]:
            cache._access.lock.release()

    def publish(plan: object) -> None:
        if plan is not None:
            other = threading.Thread(target=try_to_get_in)
            other.start()
            other.join()

    with RecurrentCache(SPEC, 2, allocate=False) as cache, HostVTable(cache) as table:
        monkeypatch.setattr(table, "publish", publish)
        assert TableClient(table.address).find_slot(UBatch.single(0, 0)) is not None
        assert got_in == [False]
