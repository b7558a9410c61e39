"""Runs ubatches of a Mamba-1 on the rows that a cache's C table names, and keeps graphs for steps of the same shape."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any

import numpy as np

from ...capi.client import Slot, TableClient
from ...cells.ubatch import Float32Array, Int32Array, UBatch
from ...errors import ClosedError, CorruptTable, InvalidArgument
from .graph import Graph, GraphShape
from .memory import Allocator, Backend, Inputs
from .weights import MambaParams, Weights, cpu_buft, load_ggml, tensor_pointer

_GRAPHS_KEPT = 8  # shapes that alternate in practice: pieces of a prompt, single steps, steps with moved bystanders
# Types that ggml gathers into F32 and writes from F32: F32, F16, BF16 and the 32-element blocks.
_STATE_TYPES = (0, 1, 30, 2, 3, 6, 7, 8)


class Runner:
    """Everything that ggml needs to compute ubatches of at most `n_ubatch` tokens on the states behind `table`.

    `n_graph_builds` and `n_graph_reuses` count steps. Raises `InvalidArgument` (the cache's rows are not this model's,
    or not in this ggml's CPU memory), `Unsupported` (it has no rows), `BackendError`, `AllocationError`. `close` frees
    all of it, any number of times.
    """

    n_graph_builds = 0
    n_graph_reuses = 0

    def __init__(
        self, params: MambaParams, weights: Weights, table: TableClient, n_ubatch: int, n_threads: int
    ) -> None:
        self._params, self._weights, self._table = params, weights, table
        self._n_ubatch = n_ubatch
        self._graphs: OrderedDict[GraphShape, tuple[Graph, Float32Array | None]] = OrderedDict()
        self._states: list[tuple[Any, Any]] = []
        self._signature: tuple[int, ...] = ()
        self._owned = contextlib.ExitStack()
        self._bound = contextlib.ExitStack()
        try:
            self._backend = Backend(n_threads)
            self._owned.callback(self._backend.close)
            self._allocator = Allocator()
            self._owned.callback(self._allocator.close)
            self._owned.callback(self._unbind)
            self.bind()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees graphs, inputs, the compute buffer and the backend, in this order."""
        self._owned.close()

    # tensors

    def bind(self) -> None:
        """Takes up the state tensors of the cache, again if they have changed (a resize makes new ones).

        Raises as the constructor does, and `ClosedError`.
        """
        signature = self._look()
        if signature == self._signature:
            return
        self._unbind()
        n_cells = self._table.info().size
        self._states = [self._state_tensors(il, n_cells) for il in range(self._params.n_layer)]
        self._inputs = Inputs(self._n_ubatch, n_cells, self._params.n_embd)
        self._bound.callback(self._inputs.close)
        self._n_cells = n_cells
        # The most that can be asked for, one long sequence or many short ones: later graphs find their room made.
        for n_seqs in {1, min(self._n_ubatch, n_cells)}:
            n_seq_tokens = self._n_ubatch // n_seqs
            graph = self._build(GraphShape(n_seqs, n_seq_tokens, 0, n_seqs * n_seq_tokens, False))
            with contextlib.closing(graph):
                self._allocator.reserve(graph.cgraph)
        self._signature = signature

    def _unbind(self) -> None:
        self._drop_graphs()
        self._bound.close()
        self._states = []
        self._signature = ()

    def _look(self) -> tuple[int, ...]:
        """What changes whenever the cache has other tensors: the last one's address, where its data is, its rows."""
        address = self._table.s_tensor(self._params.n_layer - 1)
        if address is None:
            raise InvalidArgument("the cache has no state tensors (it was made without buffers or for other layers)")
        tensor = tensor_pointer(address).contents
        return address, tensor.data or 0, tensor.ne[1]

    def _state_tensors(self, il: int, n_cells: int) -> tuple[Any, Any]:
        p = self._params
        found = []
        for name, address, n_embd in (
            ("r", self._table.r_tensor(il), (p.d_conv - 1) * p.d_inner),
            ("s", self._table.s_tensor(il), p.d_state * p.d_inner),
        ):
            if address is None:
                raise InvalidArgument(f"the cache keeps no {name} in layer {il}")
            tensor = tensor_pointer(address)
            shape = tuple(tensor.contents.ne)
            if shape != (n_embd, n_cells, 1, 1):
                raise InvalidArgument(f"{name} of layer {il} has shape {shape[:2]}, expected {(n_embd, n_cells)}")
            kind = tensor.contents.type
            if kind not in _STATE_TYPES:
                raise InvalidArgument(f"{name} of layer {il} is of ggml type {kind}, not one of {_STATE_TYPES}")
            buffer = tensor.contents.buffer
            # A device's memory, or that of another copy of ggml in this process, whose structs may differ.
            if not buffer or load_ggml().ggml_backend_buffer_get_type(buffer) != cpu_buft():
                raise InvalidArgument(
                    f"{name} of layer {il} is not in the CPU memory of ggml-python's ggml, which computes the graphs"
                )
            found.append(tensor)
        return found[0], found[1]

    # steps

    def run(self, ubatch: UBatch, slot: Slot, s_copy: Int32Array) -> Float32Array | None:
        """Computes a ubatch on its committed slot.

        Returns the logits of its outputs, float32 [n_outputs, n_vocab], on memory that the next step overwrites; None
        without outputs. Raises `BackendError`, `AllocationError`, and `CorruptTable` for a slot that can't be.
        """
        n_seqs, head, n = ubatch.n_seqs, slot.head, slot.n
        sources = s_copy.tolist()
        if not (
            0 <= head <= head + n_seqs <= head + n <= self._n_cells
            and 0 <= min(sources) <= max(sources) < self._n_cells
        ):
            raise CorruptTable(f"the cache's slot can't be: {slot} of {self._n_cells} cells, read from {s_copy}")
        inputs = self._inputs
        inputs.src[:n_seqs] = s_copy[:n_seqs]
        inputs.dst[:n_seqs] = range(head, head + n_seqs)
        # bystanders that stay where they are need no copy
        moved = [i for i in range(n_seqs, n) if sources[i] != head + i]
        n_moved = len(moved)
        for k, i in enumerate(moved, n_seqs):
            inputs.src[k], inputs.dst[k] = sources[i], head + i
        if ubatch.embd is not None:
            inputs.embd[: ubatch.n_tokens] = ubatch.embd
        elif ubatch.token is not None:
            inputs.token[: ubatch.n_tokens] = ubatch.token
        else:
            raise InvalidArgument("the ubatch has neither tokens nor embeddings")
        n_outputs = ubatch.n_outputs
        if ubatch.output is not None and 0 < n_outputs < ubatch.n_tokens:
            inputs.out_ids[:n_outputs] = np.flatnonzero(ubatch.output)
        graph, logits = self._graph(
            GraphShape(n_seqs, ubatch.n_seq_tokens, n_moved, n_outputs, ubatch.embd is not None)
        )
        self._backend.compute(graph.cgraph)
        return logits

    def _graph(self, shape: GraphShape) -> tuple[Graph, Float32Array | None]:
        earlier = self._graphs.get(shape)
        if earlier is not None:
            self._graphs.move_to_end(shape)
            self.n_graph_reuses += 1
            return earlier
        graph = self._build(shape)
        try:
            moved = self._allocator.place(graph.cgraph)
        except BaseException:
            # ggml has given the old buffer back before it asked for the new one
            graph.close()
            self._drop_graphs()
            raise
        if moved:
            self._drop_graphs()
        while len(self._graphs) >= _GRAPHS_KEPT:
            self._graphs.popitem(last=False)[1][0].close()
        entry = graph, graph.values() if shape.n_outputs else None
        self._graphs[shape] = entry
        self.n_graph_builds += 1
        return entry

    def _build(self, shape: GraphShape) -> Graph:
        if not self._weights.tensors:
            raise ClosedError("the model is closed")
        return Graph(self._params, self._weights.tensors, self._inputs, self._states, shape)

    def _drop_graphs(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1][0].close()
