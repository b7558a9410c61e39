"""`RecurrentCache`: the cell table, the planner and the buffers put together. Orchestration only, no algorithm."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from .cells import CellTable
from .errors import ClosedError, InvalidArgument, StateError, Unsupported
from .slots import CLASSIC, PLACEMENTS, SlotPlan, commit, discard, plan_slots
from .spec import CacheSpec, Which
from .state_file import (
    Header,
    Saving,
    Tokens,
    check_spec,
    checked_tokens,
    read_header,
    read_payload,
    spec_fields,
)
from .state_io import (
    FLAG_ON_DEVICE,
    CellImage,
    Column,
    MemoryReader,
    StateImage,
    columns_of,
    most_bytes,
    read_cells,
    read_columns,
    read_rows,
    reader_from,
    runs_of,
    state_bytes,
    write_state,
    writer_to,
)
from .ubatch import CELL_NONE, SEQ_ANY, UBatch

if TYPE_CHECKING:
    from .buffers import StateBuffers
    from .ggml_lib import GgmlLib


class PlanObserver(Protocol):
    """What wants to know of each new plan, as the C tables do."""

    def publish(self, plan: SlotPlan | None) -> None:
        """Called after each slot, and with None when there is no slot any more."""

    def changed(self) -> None:
        """Called after any other change of the table."""


class RecurrentCache:
    """One fixed-size state a sequence, in ggml buffers, for the sequences ``0 .. n_seq_max - 1``.

    `spec`: what a cell holds. `n_cells`: room for that many states. `n_seq_max`: default `n_cells`. `placement`:
    ``"classic"`` places as llama.cpp does, ``"compact"`` avoids copying bystanders; what the sequences compute is the
    same. `ggml`: the library to allocate with (default: `GgmlLib.find`). `devices`: name of the device of each layer,
    [n_layer], or one for all, None is the CPU; or `bufts`, addresses of ggml buffer types, [n_layer]. With
    ``allocate=False`` there are no buffers: the table only, for hosts that keep the rows themselves.

    Calls may come from several threads, one at a time goes on. Raises `InvalidArgument`, `GgmlNotFound`,
    `AllocationError`. After `close` every call raises `ClosedError`.
    """

    _closed = True  # until __init__ has succeeded

    def __init__(
        self,
        spec: CacheSpec,
        n_cells: int,
        *,
        n_seq_max: int | None = None,
        placement: str = CLASSIC,
        ggml: GgmlLib | None = None,
        devices: str | Sequence[str | None] | None = None,
        bufts: Sequence[int | None] | None = None,
        allocate: bool = True,
        n_rs_seq: int = 0,
        empty_tensors: bool = False,
    ) -> None:
        if placement not in PLACEMENTS:
            raise InvalidArgument(f"placement {placement!r} is not one of {', '.join(PLACEMENTS)}")
        self.spec = spec
        self.placement = placement
        self.table = CellTable(n_cells, n_seq_max, n_rs_seq)
        self.buffers: StateBuffers | None = None
        self._where: dict[str, Any] = {"devices": devices, "bufts": bufts, "empty_tensors": empty_tensors}
        self._lock = threading.RLock()
        self._prepared: deque[tuple[UBatch, SlotPlan]] = deque()
        self._plan: SlotPlan | None = None
        self.observers: weakref.WeakSet[PlanObserver] = weakref.WeakSet()
        if allocate:
            from .buffers import StateBuffers
            from .ggml_lib import GgmlLib

            self._ggml = ggml if ggml is not None else GgmlLib.find()
            self.buffers = StateBuffers(self._ggml, spec, n_cells * (1 + n_rs_seq), **self._where)
        self._closed = False

    # life

    def close(self) -> None:
        """Frees the buffers. Idempotent. Tensor addresses and views are void from here on."""
        if self._closed:
            return
        with self._lock:
            self._closed = True
            self._prepared.clear()
            self._publish(None)
            if self.buffers is not None:
                self.buffers.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __enter__(self) -> RecurrentCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> CellTable:
        if self._closed:
            raise ClosedError("the cache is closed")
        return self.table

    # what is where

    @property
    def size(self) -> int:
        """Cells; also the rows of each tensor."""
        return self._open().size

    @property
    def used(self) -> int:
        """Cells with at least one sequence."""
        return self._open().used

    @property
    def n_seq_max(self) -> int:
        """Sequence ids run from 0 to this, exclusive."""
        return self._open().n_seq_max

    @property
    def head(self) -> int:
        """First cell of the last slot, or where the next search starts."""
        return self._open().head

    @property
    def n(self) -> int:
        """Cells of the last slot."""
        return self._open().n

    @property
    def rs_z(self) -> int:
        """Zero row of the last slot; -1 if none."""
        return self._open().rs_z

    @property
    def plan(self) -> SlotPlan | None:
        """The plan of the last slot; None before the first, and after `clear`, `resize` and `discard_slot`."""
        return self._plan

    # steps

    def prepare(self, ubatches: Sequence[UBatch]) -> bool:
        """Whether the ubatches fit, one after the other. Nothing changes; the plans are kept for `find_slot`.

        Raises `SeqIdError` for an id that cannot be.
        """
        with self._lock:
            self._prepared.clear()
            plans = plan_slots(self._open(), ubatches, self.placement)
            if plans is None:
                return False
            self._prepared.extend(zip(ubatches, plans, strict=True))
            return True

    def find_slot(self, ubatch: UBatch) -> SlotPlan | None:
        """Finds a slot and commits it; None, with nothing changed, when there is no room.

        A ubatch that `prepare` has planned on this very state is not planned again. Row `rs_z` is cleared when a
        sequence starts from it. Raises `SeqIdError` for an id that cannot be.
        """
        with self._lock:
            plan = self._take_prepared(ubatch)
            if plan is None:
                plans = plan_slots(self._open(), (ubatch,), self.placement)
                if plans is None:
                    return None
                (plan,) = plans
            if plan.rs_z != CELL_NONE and self.buffers is not None and plan.s_copy is not plan.src:
                self.buffers.clear_rows((plan.rs_z,))  # whatever the row held, NaN included
            commit(self.table, plan)
            try:
                self._publish(plan)
            except BaseException:  # a host that can't read the plan can't compute on the slot
                discard(self.table, plan)
                self._publish(None)
                raise
            return plan

    def _publish(self, plan: SlotPlan | None) -> None:
        self._plan = plan
        for observer in self.observers:
            observer.publish(plan)

    @property
    def next_prepared(self) -> UBatch | None:
        """The ubatch that `prepare` has planned next, if its plan still holds."""
        prepared = self._prepared
        return prepared[0][0] if prepared and prepared[0][1].epoch == self.table.epoch else None

    def _changed(self) -> None:
        for observer in self.observers:
            observer.changed()

    def _take_prepared(self, ubatch: UBatch) -> SlotPlan | None:
        table = self._open()
        if self._prepared:
            planned, plan = self._prepared.popleft()
            if plan.epoch == table.epoch and planned.same_as(ubatch):
                return plan
            self._prepared.clear()
        return None

    def s_copy(self, i: int) -> int:
        """The row that row ``head + i`` of the last slot reads from. Raises `InvalidArgument`: no slot, i outside."""
        return int(self._planned(i).s_copy[i])

    def s_mask(self, i: int) -> float:
        """1.0: row ``head + i`` of the last slot keeps what it reads; 0.0: it starts from zero. Raises as `s_copy`."""
        return float(self._planned(i).src[i] >= 0)

    def _planned(self, i: int) -> SlotPlan:
        self._open()
        plan = self._plan
        if plan is None or not 0 <= i < plan.n:
            raise InvalidArgument(f"row {i} is outside the last slot of {0 if plan is None else plan.n} rows")
        return plan

    def discard_slot(self) -> None:
        """The computation on the last slot failed: removes the sequences whose rows may be half written.

        Raises `StalePlan` when the table has changed since, and `InvalidArgument` when there is no slot.
        """
        with self._lock:
            table = self._open()
            if self._plan is None:
                raise InvalidArgument("there is no slot to discard")
            discard(table, self._plan)
            self._publish(None)

    # sequences

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """As `CellTable.seq_rm`."""
        with self._lock:
            done = self._open().seq_rm(seq_id, p0, p1)
            self._changed()
            return done

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int = -1, p1: int = -1) -> None:
        """As `CellTable.seq_cp`."""
        with self._lock:
            self._open().seq_cp(seq_id_src, seq_id_dst, p0, p1)
            self._changed()

    def seq_keep(self, seq_id: int) -> None:
        """As `CellTable.seq_keep`."""
        with self._lock:
            self._open().seq_keep(seq_id)
            self._changed()

    def seq_add(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """As `CellTable.seq_add`."""
        with self._lock:
            self._open().seq_add(seq_id, p0, p1, shift)
            self._changed()

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """As `CellTable.seq_div`."""
        with self._lock:
            self._open().seq_div(seq_id, p0, p1, d)
            self._changed()

    def seq_pos_min(self, seq_id: int) -> int:
        """As `CellTable.seq_pos_min`."""
        return self._open().seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int:
        """As `CellTable.seq_pos_max`."""
        return self._open().seq_pos_max(seq_id)

    def positions(self) -> list[int]:
        """`seq_pos_max` of every sequence, [n_seq_max]."""
        with self._lock:
            return self._open().positions()

    @property
    def can_shift(self) -> bool:
        """Whether positions may be shifted."""
        return self._open().can_shift

    def clear(self, data: bool = True) -> None:
        """Forgets every sequence; with `data` every row becomes zero too."""
        with self._lock:
            self._open().clear()
            self._publish(None)
            if data and self.buffers is not None:
                self.buffers.clear()

    def resize(self, n_cells: int, n_seq_max: int | None = None) -> None:
        """Changes the number of cells; every state is kept, its row copied into new buffers.

        Tensor addresses change, so a host builds its graphs anew. Raises as `CellTable.resize`, and `AllocationError`;
        then nothing has changed. Both sets of buffers exist while the rows are copied.
        """
        with self._lock:
            target = self._open().copy()
            moves = dict(target.resize(n_cells, n_seq_max))
            if self.buffers is not None:
                from .buffers import StateBuffers

                n_rows = n_cells * (1 + self.table.n_rs_seq)
                larger = StateBuffers(self._ggml, self.spec, n_rows, **self._where)
                old, row_of = self.table.used_cells(), self.table.row_of
                try:
                    larger.copy_rows_from(self.buffers, ((row_of(c), moves.get(c, c)) for c in old))
                except BaseException:
                    larger.close()
                    raise
                self.buffers.close()
                self.buffers = larger
            self.table = target
            self._prepared.clear()
            self._publish(None)

    # states

    def state_size(self, seq_id: int = SEQ_ANY) -> int:
        """Bytes of the state of one sequence, or of the whole cache. Raises `SeqIdError`."""
        with self._lock:
            return state_bytes(self._open(), self.spec, seq_id)

    def state_write(self, writer: Any, seq_id: int = SEQ_ANY, flags: int = 0) -> None:
        """Writes the state of one sequence, or of the whole cache, in llama.cpp's format (see `state_io`).

        `writer` has ``write(bytes)``, as a binary file has, or is memory of at least `state_size` bytes; one that also
        has ``write_rows`` is given the rows' places instead of their bytes. `flags` are llama.cpp's; none of them
        changes what a recurrent state writes. Raises `SeqIdError`, `Unsupported` without buffers, and
        `InvalidArgument` for memory that is too small.
        """
        with self._lock:
            table, buffers = self._open(), self._with_buffers()
            write_state(writer_to(writer, buffers, self.state_size(seq_id)), table, self.spec, seq_id)

    def state_read(self, reader: Any, seq_id: int = SEQ_ANY, flags: int = 0) -> None:
        """Restores one sequence, or the whole cache, from what `state_write` or llama.cpp wrote.

        `reader` has ``read(n_bytes)``, as a binary file has, or is memory that holds the state and nothing else. A
        sequence goes to an empty cell or to one that is its own alone; the whole cache to cells 0, 1, ...

        All is read and checked before anything changes: when it raises `StateError`, the cache is what it was. Only
        rows of cells that hold no state may have changed, where `reader` takes rows from its stream to their places
        itself and at once (see `DeviceReader`). With `FLAG_ON_DEVICE` it does so after the rest has been checked;
        should that fail, what was to be restored is lost.
        """
        with self._lock:
            table, buffers = self._open(), self._with_buffers()
            source, on_device = reader_from(reader), bool(flags & FLAG_ON_DEVICE)
            if on_device and not hasattr(source, "read_rows"):
                raise Unsupported("states on a device need a reader of rows")
            cells = read_cells(source, table, seq_id)
            cell_ids, restore = self._room(cells, seq_id)
            waits = bool(getattr(source, "rows_wait", False))

            def taken(cell_id: int) -> bool:
                return bool(table.cell(cell_id).seq_ids)

            fill: Callable[[], None]
            if on_device:
                columns: list[Column] = []
                read_columns(source, self.spec, columns.append)
                fill = partial(self._read_rows, source, columns, cell_ids)
            elif getattr(source, "streams_rows", False) and (waits or not any(map(taken, cell_ids))):
                fill = partial(read_columns, source, self.spec, partial(self._read_row, source, cell_ids))
            else:
                fill = partial(self._set_rows, read_rows(source, self.spec, cells), buffers, cell_ids)
            if isinstance(source, MemoryReader):
                source.check_end()
            try:
                fill()
            except BaseException:
                lost = [] if waits else list(filter(taken, cell_ids))  # written over in part
                if lost:
                    table.drop_cells(lost)
                    self._publish(None)
                raise
            restore()
            self._publish(None)

    def save(
        self, path: str | os.PathLike[str], seq_id: int = SEQ_ANY, tokens: Tokens | Sequence[int] | None = None
    ) -> None:
        """Saves the state of one sequence, or of the whole cache, in a file of our own (see `state_file`).

        `tokens` are kept with it: those of the sequence, or by sequence, ``{seq_id: [token, ...]}``. The file replaces
        an older one when it is complete and on the disk; a save that fails or is killed leaves the old one. Raises
        `SeqIdError`, `InvalidArgument` for tokens that cannot be, `Unsupported` without buffers, `OSError`.
        """
        with self._lock:
            table, buffers = self._open(), self._with_buffers()
            size = self.state_size(seq_id)
            saved = [seq for seq, pos in enumerate(table.positions()) if pos >= 0 and seq_id in (SEQ_ANY, seq)]
            header = Header(spec_fields(self.spec), seq_id, size, checked_tokens(tokens, seq_id, saved))
            with Saving(path, header) as file:
                write_state(writer_to(file, buffers, size), table, self.spec, seq_id)

    def load(self, path: str | os.PathLike[str], seq_id: int = SEQ_ANY) -> dict[int, list[int]]:
        """Restores what `save` wrote; returns the tokens that were saved with it, by sequence.

        A file of one sequence goes to `seq_id`, any one; a file of a whole cache is loaded without it, and may be of a
        larger or smaller cache if the states in it fit. Raises `StateError`, with nothing changed, for a file that is
        not whole, not intact, of another model (naming the fields), or does not fit; and `InvalidArgument`, `OSError`.
        """
        with self._lock, open(path, "rb", buffering=0) as file:
            table = self._open()
            header = read_header(file)
            check_spec(header, self.spec)
            if (header.seq_id == SEQ_ANY) != (seq_id == SEQ_ANY):
                holds = "a whole cache" if header.seq_id == SEQ_ANY else f"sequence {header.seq_id} alone"
                how = "without a seq_id" if header.seq_id == SEQ_ANY else "with the seq_id that is to have it"
                raise InvalidArgument(f"the file holds {holds}: load it {how}")
            self.state_read(read_payload(file, header, most_bytes(table, self.spec, seq_id)), seq_id)
            whole = header.seq_id == SEQ_ANY
            return {saved if whole else seq_id: list(ids) for saved, ids in header.tokens.items()}

    def _room(self, cells: tuple[CellImage, ...], seq_id: int) -> tuple[list[int], Callable[[], object]]:
        """Where the states of `cells` are to go, and what changes the table when their rows are there."""
        if seq_id == SEQ_ANY:
            return list(range(len(cells))), partial(self.table.restore, cells)
        if not cells:
            return [], partial(self.table.seq_rm, seq_id, -1, -1)
        after = self.table.copy()
        after.seq_rm(seq_id, -1, -1)
        plans = plan_slots(after, (UBatch.single(seq_id, cells[0].pos),), self.placement)
        if plans is None:
            raise StateError(f"all {after.size} cells are taken, there is no room for sequence {seq_id}")
        (plan,) = plans

        def restore() -> None:
            commit(after, plan)
            self.table = after

        return [plan.head], restore

    def _read_rows(self, reader: Any, columns: Sequence[Column], cell_ids: Sequence[int]) -> None:
        for column in columns:
            self._read_row(reader, cell_ids, column)

    def _read_row(self, reader: Any, cell_ids: Sequence[int], column: Column) -> None:
        for _, first, n_rows in runs_of(cell_ids) if column.row_bytes else ():
            reader.read_rows(column.which, column.il, first, n_rows)

    def _set_rows(self, image: StateImage, buffers: StateBuffers, cell_ids: Sequence[int]) -> None:
        runs = list(runs_of(cell_ids))
        for column in columns_of(self.spec):
            for i, first, n_rows in runs if column.row_bytes else ():
                buffers.set_rows(column.which, column.il, first, n_rows, image.cell_rows(column, i, n_rows))

    def _with_buffers(self) -> StateBuffers:
        if self.buffers is None:
            raise Unsupported("this cache was made without buffers")
        return self.buffers

    # memory

    def r_tensor(self, il: int) -> int | None:
        """Address of layer `il`'s ``ggml_tensor`` r, [n_embd_r, size]; None: no state there. Raises `InvalidArgument`
        for a layer that is not."""
        return self._tensor(il, "r")

    def s_tensor(self, il: int) -> int | None:
        """As `r_tensor`, of s."""
        return self._tensor(il, "s")

    def p_tensor(self, il: int) -> int | None:
        """As `r_tensor`, of p."""
        return self._tensor(il, "p")

    def _tensor(self, il: int, which: Which) -> int | None:
        self._open()
        if not 0 <= il < self.spec.n_layer:
            raise InvalidArgument(f"layer {il} is outside the model's {self.spec.n_layer} layers")
        return self._with_buffers().tensors(which)[il]

    @property
    def size_r_bytes(self) -> int:
        """Bytes of all r tensors; 0 without buffers."""
        self._open()
        return 0 if self.buffers is None else self.buffers.size_r_bytes

    @property
    def size_s_bytes(self) -> int:
        """Bytes of all s tensors; 0 without buffers."""
        self._open()
        return 0 if self.buffers is None else self.buffers.size_s_bytes

    @property
    def total_size(self) -> int:
        """Bytes of all buffers, padding included; 0 without buffers."""
        self._open()
        return 0 if self.buffers is None else self.buffers.total_size

    def memory_breakdown(self) -> dict[str, int]:
        """Bytes by device."""
        self._open()
        return {} if self.buffers is None else self.buffers.memory_breakdown()
