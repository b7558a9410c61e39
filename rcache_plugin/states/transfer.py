"""States of a cache to and from streams and files: what `RecurrentCache` does for `state_write`, `state_read`, `save`
and `load`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..cells.spec import CacheSpec
from ..cells.table import CellTable
from ..cells.ubatch import SEQ_ANY
from ..checkpoints.history import token_array
from ..checkpoints.rollback import Rollback
from ..errors import InvalidArgument, Unsupported
from .file import Header, Saving, Tokens, check_spec, checked_tokens, read_header, read_payload, spec_fields
from .image import (
    Column,
    StateImage,
    most_bytes,
    read_cells,
    read_columns,
    read_image,
    read_rows,
    state_bytes,
    write_state,
)
from .restore import find_room, set_rows, take_rows
from .streams import FLAG_ON_DEVICE, MemoryReader, reader_from, writer_to

if TYPE_CHECKING:
    from ..memory.buffers import StateBuffers


class StateTransfer:
    """The states of `table`; `placement` decides where a restored one goes, `rollback` learns of it."""

    def __init__(self, table: CellTable, spec: CacheSpec, placement: str, rollback: Rollback) -> None:
        self._table = table
        self._spec = spec
        self._placement = placement
        self._rollback = rollback

    def size(self, seq_id: int) -> int:
        """Bytes of the state of one sequence, or of all with `SEQ_ANY`. Raises `SeqIdError`."""
        return state_bytes(self._table, self._spec, seq_id)

    def write(self, buffers: StateBuffers, writer: Any, seq_id: int) -> None:
        """As `RecurrentCache.state_write`."""
        write_state(writer_to(writer, buffers, self.size(seq_id)), self._table, self._spec, seq_id)

    def read(self, buffers: StateBuffers, reader: Any, seq_id: int, flags: int = 0) -> None:
        """As `RecurrentCache.state_read`."""
        table, source, on_device = self._table, reader_from(reader), bool(flags & FLAG_ON_DEVICE)
        if on_device and not hasattr(source, "read_rows"):
            raise Unsupported("states on a device need a reader of rows")
        cells = read_cells(source, table, seq_id)
        cell_ids, after = find_room(table, self._placement, cells, seq_id, self._rollback.evict)
        waits = bool(getattr(source, "rows_wait", False))
        taken = [cell_id for cell_id in cell_ids if table.cell(cell_id).seq_ids]
        fill: Callable[[], None]
        if on_device:
            columns: list[Column] = []
            read_columns(source, self._spec, columns.append)
            fill = partial(take_rows, source, columns, cell_ids)
        elif getattr(source, "streams_rows", False) and (waits or not taken):
            fill = partial(read_columns, source, self._spec, lambda column: take_rows(source, (column,), cell_ids))
        else:
            fill = partial(set_rows, read_rows(source, self._spec, cells), buffers, cell_ids)
        if isinstance(source, MemoryReader):
            source.check_end()
        try:
            fill()
        except BaseException:
            if taken and not waits:  # written over in part
                self._rollback.drop_states(lambda: table.drop_cells(taken))
            raise
        table.become(after)
        self._rollback.replaced(seq_id)

    def save(
        self,
        buffers: StateBuffers,
        path: str | os.PathLike[str],
        seq_id: int,
        tokens: Tokens | Sequence[int] | None,
        checkpoints: bool,
    ) -> None:
        """As `RecurrentCache.save`."""
        table, store = self._table, self._rollback.checkpoints
        size = self.size(seq_id)
        saved = [seq for seq, pos in enumerate(table.positions()) if pos >= 0 and seq_id in (SEQ_ANY, seq)]
        if tokens is None and store is not None:
            tokens = {seq: store.histories[seq].tokens for seq in saved if store.histories[seq].whole}
        pinned = store.to_save(saved) if store is not None and checkpoints else []
        states = table.of_pins([each.pin for each in pinned])
        header = Header(
            spec_fields(self._spec), seq_id, size, checked_tokens(tokens, seq_id, saved),
            checkpoints=tuple(tuple(each.tokens or ()) for each in pinned),
            checkpoint_bytes=state_bytes(states, self._spec, 0) if pinned else 0,
        )
        with Saving(path, header) as file:
            writer = writer_to(file, buffers, size + header.following_bytes)
            write_state(writer, table, self._spec, seq_id)
            for i in range(len(pinned)):
                write_state(writer, states, self._spec, i)

    def load(self, buffers: StateBuffers, path: str | os.PathLike[str], seq_id: int) -> dict[int, list[int]]:
        """As `RecurrentCache.load`."""
        with open(path, "rb", buffering=0) as file:
            table, store = self._table, self._rollback.checkpoints
            header = read_header(file)
            check_spec(header, self._spec)
            if (header.seq_id == SEQ_ANY) != (seq_id == SEQ_ANY):
                holds = "a whole cache" if header.seq_id == SEQ_ANY else f"sequence {header.seq_id} alone"
                how = "without a seq_id" if header.seq_id == SEQ_ANY else "with the seq_id that is to have it"
                raise InvalidArgument(f"the file holds {holds}: load it {how}")
            one = CellTable(1, 1)
            payload, states = read_payload(
                file, header, most_bytes(table, self._spec, seq_id),
                0 if store is None or store.hybrid else store.n_cells, most_bytes(one, self._spec, 0),
            )
        images = [read_image(state, one, self._spec, 0) for state in states]
        self.read(buffers, payload, seq_id)
        whole = header.seq_id == SEQ_ANY
        tokens = {saved if whole else seq_id: list(ids) for saved, ids in header.tokens.items()}
        self._adopt(buffers, tokens, header, images)
        return tokens

    def _adopt(
        self, buffers: StateBuffers, tokens: Mapping[int, Sequence[int]], header: Header, images: Sequence[StateImage]
    ) -> None:
        """What a file tells beside the states: the tokens that they have read, and the checkpoints."""
        store = self._rollback.checkpoints
        if store is None:
            return
        for seq_id, ids in tokens.items():
            if len(ids) == self._table.seq_pos_max(seq_id) + 1:
                store.set_tokens(seq_id, token_array(ids))
        for ids, image in zip(header.checkpoints, images, strict=False):
            if len(image.cells) == 1 and image.cells[0].pos == len(ids) - 1:
                if not store.adopt(token_array(ids), lambda cell_id: set_rows(image, buffers, [cell_id])):  # noqa: B023 - called here
                    return
