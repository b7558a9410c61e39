"""Mamba-1 in PyTorch, with its scan over time compiled or in plain PyTorch."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from mamba_gguf import MambaShape
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------------------- scan
#
# h[t] = exp(dt[t] * A) * h[t-1] + dt[t] * u[t] * B[t],  y[t] = <C[t], h[t]> + D * u[t]
#
# with one independent recurrence for each channel and each of the d_state decay rates of that channel (Gu and Dao 2023,
# section 3).

SCAN_SOURCE = Path(__file__).with_name("scan.cpp")

_native = None


def load_native_scan(build_dir: Path) -> None:
    """Compile (or find already compiled in ``build_dir``) the scan. Raises RuntimeError or OSError where it cannot."""
    global _native
    from torch.utils.cpp_extension import load_inline

    build_dir.mkdir(parents=True, exist_ok=True)
    # venvs keep ninja beside the interpreter, which need not be on the PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    _native = load_inline(
        name="selective_scan",
        cpp_sources=SCAN_SOURCE.read_text(encoding="utf-8"),
        functions=["scan_forward", "scan_backward"],
        extra_cflags=["-O3", "-march=native", "-ffast-math"],
        build_directory=str(build_dir),
    )


def native_scan_loaded() -> bool:
    """Whether :func:`selective_scan` is the compiled one."""
    return _native is not None


class _NativeScan(torch.autograd.Function):
    """The compiled scan; arguments and results as :func:`selective_scan` has them."""

    @staticmethod
    def forward(ctx, u, dt, A, B, C, D, h0):
        # The compiled code wants channels innermost everywhere: 16 of them are worked on at once.
        inputs = [x.contiguous() for x in (u, dt, A.t(), B, C, D, h0.transpose(1, 2))]
        y, state, marks = _native.scan_forward(inputs)
        ctx.save_for_backward(*inputs, marks)
        return y, state.transpose(1, 2)

    @staticmethod
    def backward(ctx, dy, dh):
        *inputs, marks = ctx.saved_tensors
        gradients = _native.scan_backward(inputs, marks, dy.contiguous(), dh.transpose(1, 2).contiguous())
        gradients[2], gradients[6] = gradients[2].t(), gradients[6].transpose(1, 2)
        return tuple(gradients)


def torch_scan(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, h0: Tensor, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """The same scan in plain PyTorch: log2(chunk) doubling steps inside chunks of time (Hillis and Steele 1986), one
    step in Python per chunk. Works with factors in (0, 1] only, never with their inverses, so it cannot overflow.
    """
    outputs, h = [], h0
    for start in range(0, u.shape[1], chunk):
        span = slice(start, start + chunk)
        decay = torch.exp(dt[:, span, :, None] * A)  # [n_seq, chunk, d_inner, d_state]
        value = (dt[:, span] * u[:, span])[..., None] * B[:, span, None, :]
        shift = 1
        while shift < decay.shape[1]:
            value = torch.cat([value[:, :shift], value[:, shift:] + decay[:, shift:] * value[:, :-shift]], dim=1)
            decay = torch.cat([decay[:, :shift], decay[:, shift:] * decay[:, :-shift]], dim=1)
            shift *= 2
        states = value + decay * h[:, None]
        outputs.append(torch.einsum("btcn,btn->btc", states, C[:, span]))
        h = states[:, -1]
    return torch.cat(outputs, dim=1) + D * u, h


def selective_scan(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, h0: Tensor
) -> tuple[Tensor, Tensor]:
    """(y [n_seq, n_time, d_inner], last state [n_seq, d_inner, d_state]) of the recurrence above.

    u and dt are [n_seq, n_time, d_inner] (dt positive), A [d_inner, d_state] negative,
    B and C [n_seq, n_time, d_state], D [d_inner], h0 [n_seq, d_inner, d_state]; float32 or float64.
    """
    if _native is None:
        return torch_scan(u, dt, A, B, C, D, h0)
    return _NativeScan.apply(u, dt, A, B, C, D, h0)


def self_check() -> None:
    """Both scans against finite differences and against each other; raises when one is wrong.

    Finite differences are taken along random directions (``fast_mode``), since one for each input would take minutes;
    the comparison of the two scans covers every gradient.
    """
    torch.manual_seed(0)
    b, t, c, n = 2, 35, 32, 16  # two groups of lanes; one full chunk of time and one that is not
    u, dt = torch.randn(b, t, c), torch.rand(b, t, c)
    A, B, C = -torch.rand(c, n) * 4, torch.randn(b, t, n), torch.randn(b, t, n)
    inputs = [x.double().requires_grad_() for x in (u, dt, A, B, C, torch.randn(c), torch.randn(b, c, n))]
    torch.autograd.gradcheck(torch_scan, inputs, fast_mode=True)
    print("scan in PyTorch: gradients agree with finite differences")
    if _native is None:
        print("no compiled scan to check")
        return
    torch.autograd.gradcheck(_NativeScan.apply, inputs, fast_mode=True)
    print("compiled scan: gradients agree with finite differences")
    # In float32 the two sum in different orders, up to some hundred numbers of order one.
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        same = [x.detach().to(dtype).requires_grad_() for x in inputs]
        results = []
        for scan in (torch_scan, _NativeScan.apply):
            y, h = scan(*same)
            results.append((y, h, *torch.autograd.grad(y.sin().sum() + h.cos().sum(), same)))
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)
        print(f"both scans give the same values and gradients in {dtype}")


# --------------------------------------------------------------------------------------------------------------- model


class MambaBlock(nn.Module):
    """One residual block; the parameters carry the GGUF names, ``ssm_a_log`` excepted."""

    def __init__(self, shape: MambaShape) -> None:
        super().__init__()
        d, di, n, r = shape.n_embd, shape.d_inner, shape.d_state, shape.dt_rank
        self.shape = shape
        self.attn_norm = nn.Parameter(torch.ones(d))
        self.ssm_in = nn.Parameter(torch.randn(2 * di, d) * d**-0.5)
        self.ssm_conv1d = nn.Parameter((torch.rand(di, shape.d_conv) * 2 - 1) * shape.d_conv**-0.5)
        self.ssm_conv1d_bias = nn.Parameter(torch.zeros(di))
        self.ssm_x = nn.Parameter(torch.randn(r + 2 * n, di) * di**-0.5)
        self.ssm_dt = nn.Parameter((torch.rand(di, r) * 2 - 1) * r**-0.5)
        # Time steps start log-uniform in 1e-3 .. 1e-1; the bias is what softplus turns into them.
        dt = torch.exp(torch.rand(di) * math.log(100) + math.log(1e-3))
        self.ssm_dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.ssm_a_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(di, 1))
        self.ssm_d = nn.Parameter(torch.ones(di))
        self.ssm_out = nn.Parameter(torch.randn(d, di) * (di * 2 * shape.n_layer) ** -0.5)

    def forward(self, x: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [n_seq, n_time, n_embd], conv_state [n_seq, d_conv-1, d_inner], ssm_state [n_seq, d_inner, d_state]."""
        s = self.shape
        n_time = x.shape[1]
        hidden = F.rms_norm(x, (s.n_embd,), self.attn_norm, s.rms_eps)
        u, gate = F.linear(hidden, self.ssm_in).chunk(2, dim=-1)
        padded = torch.cat([conv_state, u], dim=1)
        conv = self.ssm_conv1d_bias.expand_as(u)
        for k in range(s.d_conv):
            conv = torch.addcmul(conv, padded[:, k : k + n_time], self.ssm_conv1d[:, k])
        u = F.silu(conv)
        dt, B, C = F.linear(u, self.ssm_x).split([s.dt_rank, s.d_state, s.d_state], dim=-1)
        dt = F.softplus(F.linear(dt, self.ssm_dt, self.ssm_dt_bias))
        y, ssm_state = selective_scan(u, dt, -torch.exp(self.ssm_a_log), B, C, self.ssm_d, ssm_state)
        return F.linear(y * F.silu(gate), self.ssm_out), padded[:, n_time:], ssm_state


State = list[tuple[Tensor, Tensor]]


class Mamba(nn.Module):
    """Mamba-1 with tied embeddings."""

    def __init__(self, shape: MambaShape, dropout: float) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.token_embd = nn.Parameter(torch.randn(shape.n_vocab, shape.n_embd) * 0.02)
        self.output_norm = nn.Parameter(torch.ones(shape.n_embd))
        self.blk = nn.ModuleList(MambaBlock(shape) for _ in range(shape.n_layer))

    def zero_state(self, n_seq: int) -> State:
        s = self.shape
        return [
            (torch.zeros(n_seq, s.d_conv - 1, s.d_inner), torch.zeros(n_seq, s.d_inner, s.d_state)) for _ in self.blk
        ]

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """(logits [n_seq, n_time, n_vocab], state after the last token) for tokens int64 [n_seq, n_time]."""
        x = F.dropout(F.embedding(tokens, self.token_embd), self.dropout, self.training)
        after: State = []
        for block, (conv_state, ssm_state) in zip(self.blk, state, strict=True):
            y, conv_state, ssm_state = block(x, conv_state, ssm_state)
            x = x + F.dropout(y, self.dropout, self.training)
            after.append((conv_state, ssm_state))
        x = F.rms_norm(x, (self.shape.n_embd,), self.output_norm, self.shape.rms_eps)
        return F.linear(x, self.token_embd), after


def gguf_tensor(weights: dict[str, Tensor], name: str) -> np.ndarray:
    """The values of one GGUF tensor, float32, from a state dict of :class:`Mamba`."""
    if name.endswith("ssm_a"):
        return -np.exp(weights[f"{name}_log"].numpy())
    key = name.removesuffix(".weight").replace(".bias", "_bias")
    return weights[key].numpy()
