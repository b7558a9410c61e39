"""ggml graphs of a Mamba-1 step on states that a recurrent-state cache owns.

What changes from step to step - tokens, rows to read and to write, which outputs are wanted - is input data that lives
in one buffer of its own, so a graph stays valid as long as the *numbers* of sequences, tokens, moved rows and outputs
stay the same, wherever in the cache the slot lies.

The state rows of one layer, for a slot of ``n`` cells from ``head`` on::

    row       head .. head + n_seqs - 1     head + n_seqs .. head + n - 1
    holds     the new states                 bystanders
    comes of  s_copy[i], then a step         s_copy[i], moved only when it is not the row itself

All rows that a layer reads are gathered before the first of its rows is written: a row may be the source of one
sequence and the destination of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .memory import Inputs, array_on, new_context
from .weights import MambaParams, load_ggml

_NODES_PER_LAYER = 64
_NODES_BESIDES = 64
_F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class GraphShape:
    """All that a graph's topology depends on."""

    n_seqs: int
    n_seq_tokens: int
    n_moved: int
    """Bystander rows that change their place."""
    n_outputs: int
    embd: bool
    """Whether the input is embeddings instead of tokens."""

    @property
    def n_tokens(self) -> int:
        """``n_seqs * n_seq_tokens``."""
        return self.n_seqs * self.n_seq_tokens


class Graph:
    """One built graph: `cgraph`, and `logits`, the ``ggml_tensor *`` [n_vocab, n_outputs] (None without outputs).

    Building allocates nothing but the description; an allocator has to place it before it is computed. Raises
    `AllocationError`.
    """

    cgraph: Any
    logits: Any = None

    _context: Any = None

    def __init__(
        self,
        params: MambaParams,
        weights: dict[str, Any],
        inputs: Inputs,
        states: list[tuple[Any, Any]],
        shape: GraphShape,
    ) -> None:
        """`states`: the r and s tensors of each layer, [n_layer]."""
        self.shape = shape
        self._ggml = g = load_ggml()
        n_nodes = _NODES_BESIDES + _NODES_PER_LAYER * params.n_layer
        # Twice: views are nodes, and leafs (inputs, weights) are views into buffers of others.
        mem_size = 2 * n_nodes * g.ggml_tensor_overhead() + g.ggml_graph_overhead_custom(n_nodes, False)
        self._context = new_context(g, mem_size)
        try:
            self.cgraph = g.ggml_new_graph_custom(self._context, n_nodes, False)
            _Builder(self, params, weights, inputs).build(states)
        except BaseException:
            self.close()
            raise

    def values(self) -> npt.NDArray[np.float32]:
        """The logits on the graph's own memory, float32 [n_outputs, n_vocab]; valid until the next compute."""
        n_vocab, n_outputs = self.logits.contents.ne[0], self.shape.n_outputs
        return array_on(self.logits, np.float32, (n_outputs, n_vocab))

    def close(self) -> None:
        """Frees the description; any number of times."""
        if self._context:
            self._ggml.ggml_free(self._context)
            self._context = None


class _Builder:
    """Adds one step to a graph's context."""

    def __init__(self, graph: Graph, params: MambaParams, weights: dict[str, Any], inputs: Inputs) -> None:
        self.g = load_ggml()
        self.graph = graph
        self.ctx = graph._context
        self.shape = graph.shape
        self.params = params
        self.weights = weights
        shape, view = graph.shape, self._input_view
        self.inputs = inputs
        self.src = view("src", shape.n_seqs)
        self.dst = view("dst", shape.n_seqs)
        self.iota = view("iota", shape.n_seqs)
        self.src_moved = view("src", shape.n_moved, shape.n_seqs) if shape.n_moved else None
        self.dst_moved = view("dst", shape.n_moved, shape.n_seqs) if shape.n_moved else None

    def _input_view(self, name: str, n: int, start: int = 0) -> Any:
        tensor = self.inputs.tensors[name]
        return self.g.ggml_view_1d(self.ctx, tensor, n, start * tensor.contents.nb[0])

    def _expand(self, tensor: Any) -> Any:
        """Puts a tensor in the order of computation here, not where something happens to need it."""
        self.g.ggml_build_forward_expand(self.graph.cgraph, tensor)
        return tensor

    def _norm(self, x: Any, weight: Any = None) -> Any:
        x = self.g.ggml_rms_norm(self.ctx, x, self.params.rms_eps)
        return x if weight is None else self.g.ggml_mul(self.ctx, x, weight)

    def build(self, states: list[tuple[Any, Any]]) -> None:
        g, ctx, shape = self.g, self.ctx, self.shape
        if shape.embd:
            embd = self.inputs.tensors["embd"]
            n_embd = self.params.n_embd
            x = g.ggml_view_2d(ctx, embd, n_embd, shape.n_tokens, n_embd * _F32_BYTES, 0)
        else:
            x = g.ggml_get_rows(ctx, self.weights["token_embd.weight"], self._input_view("token", shape.n_tokens))
        out_ids = None
        if shape.n_outputs < shape.n_tokens:
            out_ids = self._input_view("out_ids", max(shape.n_outputs, 1))
        for il, (r, s) in enumerate(states):
            last = il == len(states) - 1
            y = self._mixer(il, x, r, s)
            if last and shape.n_outputs == 0:
                return
            if last and out_ids is not None:
                # nobody needs the other tokens from here on
                y = g.ggml_get_rows(ctx, y, out_ids)
                x = g.ggml_get_rows(ctx, x, out_ids)
            x = g.ggml_add(ctx, g.ggml_mul_mat(ctx, self.weights[f"blk.{il}.ssm_out.weight"], y), x)
        x = self._norm(x, self.weights["output_norm.weight"])
        output = self.weights.get("output.weight", self.weights["token_embd.weight"])
        self.graph.logits = g.ggml_mul_mat(ctx, output, x)
        g.ggml_set_name(self.graph.logits, b"logits")
        g.ggml_set_output(self.graph.logits)
        self._expand(self.graph.logits)

    def _mixer(self, il: int, x: Any, r: Any, s: Any) -> Any:
        """Norm, in-projection, convolution, scan and gate of a layer: [n_embd, n_tokens] -> [d_inner, n_tokens]."""
        g, ctx, p = self.g, self.ctx, self.params
        n_t, n_s = self.shape.n_seq_tokens, self.shape.n_seqs
        w = {name: self.weights[f"blk.{il}.{name}"] for name in p.layer_shapes()}

        x_z = g.ggml_mul_mat(ctx, w["ssm_in.weight"], self._norm(x, w["attn_norm.weight"]))
        row, half = x_z.contents.nb[1], p.d_inner * _F32_BYTES
        u = g.ggml_view_3d(ctx, x_z, p.d_inner, n_t, n_s, row, row * n_t, 0)
        z = g.ggml_view_2d(ctx, x_z, p.d_inner, n_t * n_s, row, half)

        u = g.ggml_add(ctx, g.ggml_ssm_conv(ctx, self._conv_input(u, r), w["ssm_conv1d.weight"]), w["ssm_conv1d.bias"])
        u = g.ggml_silu(ctx, u)

        dt, b, c = self._dt_b_c(g.ggml_mul_mat(ctx, w["ssm_x.weight"], u))
        dt = g.ggml_add(ctx, g.ggml_mul_mat(ctx, w["ssm_dt.weight"], dt), w["ssm_dt.bias"])
        y = self._scan(u, dt, w["ssm_a"], b, c, s)
        y = g.ggml_add(ctx, y, g.ggml_mul(ctx, u, w["ssm_d"]))
        y = g.ggml_reshape_2d(ctx, y, p.d_inner, n_t * n_s)
        return g.ggml_swiglu_split(ctx, z, y)

    def _conv_input(self, u: Any, r: Any) -> Any:
        """The last d_conv - 1 inputs of each sequence, then its new ones: [d_conv - 1 + n_seq_tokens, d_inner, n_seqs].

        The last d_conv - 1 of these go back to the rows of r.
        """
        g, ctx, p = self.g, self.ctx, self.params
        n_t, n_s, n_kept = self.shape.n_seq_tokens, self.shape.n_seqs, p.d_conv - 1
        history = self._expand(g.ggml_get_rows(ctx, r, self.src))
        moved = self._gather_moved(r)
        history = g.ggml_reshape_3d(ctx, history, n_kept, p.d_inner, n_s)
        seen = g.ggml_concat(ctx, history, g.ggml_transpose(ctx, u), 0)
        nb = seen.contents.nb
        tail = g.ggml_view_3d(ctx, seen, n_kept, p.d_inner, n_s, nb[1], nb[2], n_t * nb[0])
        tail = g.ggml_cont_2d(ctx, tail, n_kept * p.d_inner, n_s)
        self._expand(g.ggml_set_rows(ctx, r, tail, self.dst))
        self._put_moved(r, moved)
        return seen

    def _dt_b_c(self, x_dbc: Any) -> tuple[Any, Any, Any]:
        """Splits [dt_rank + 2 * d_state, n_seq_tokens, n_seqs] and normalises the parts if the model wants it."""
        g, ctx, p = self.g, self.ctx, self.params
        n_t, n_s = self.shape.n_seq_tokens, self.shape.n_seqs
        nb0, nb1, nb2 = x_dbc.contents.nb[:3]
        dt = g.ggml_view_3d(ctx, x_dbc, p.dt_rank, n_t, n_s, nb1, nb2, 0)
        state = p.d_state * nb0
        b = g.ggml_view_4d(ctx, x_dbc, p.d_state, 1, n_t, n_s, state, nb1, nb2, p.dt_rank * nb0)
        c = g.ggml_view_4d(ctx, x_dbc, p.d_state, 1, n_t, n_s, state, nb1, nb2, p.dt_rank * nb0 + state)
        if p.dt_b_c_rms:
            return self._norm(dt), self._norm(b), self._norm(c)
        return dt, b, c

    def _scan(self, u: Any, dt: Any, a: Any, b: Any, c: Any, s: Any) -> Any:
        """The selective scan, [d_inner, n_seq_tokens, n_seqs]; the new states go to the rows of s.

        ``ggml_ssm_scan`` takes the softplus of dt by itself, and returns the outputs with the states behind them.
        """
        g, ctx, p = self.g, self.ctx, self.params
        n_t, n_s = self.shape.n_seq_tokens, self.shape.n_seqs
        if s.contents.type == g.GGML_TYPE_F32:
            states, ids = s, self.src
        else:  # the scan reads F32 only; get_rows converts
            states, ids = g.ggml_get_rows(ctx, s, self.src), self.iota
        states = g.ggml_reshape_4d(ctx, states, p.d_state, 1, p.d_inner, states.contents.ne[1])
        u = g.ggml_reshape_4d(ctx, u, 1, p.d_inner, n_t, n_s)
        both = self._expand(g.ggml_ssm_scan(ctx, states, u, dt, a, b, c, ids))
        moved = self._gather_moved(s)
        row = p.d_inner * _F32_BYTES
        y = g.ggml_view_3d(ctx, both, p.d_inner, n_t, n_s, row, row * n_t, 0)
        new = g.ggml_view_2d(ctx, both, p.d_state * p.d_inner, n_s, p.d_state * row, row * n_t * n_s)
        self._expand(g.ggml_set_rows(ctx, s, new, self.dst))
        self._put_moved(s, moved)
        return y

    def _gather_moved(self, rows: Any) -> Any:
        if self.src_moved is None:
            return None
        return self._expand(self.g.ggml_get_rows(self.ctx, rows, self.src_moved))

    def _put_moved(self, rows: Any, moved: Any) -> None:
        if moved is not None:
            self._expand(self.g.ggml_set_rows(self.ctx, rows, moved, self.dst_moved))
