"""Writes tiny models with random weights for the architectures of llama.cpp that keep a recurrent state.

All are F32 with the same byte vocabulary, two to four layers deep, and drawn so that logits are of order one and the
state matters. They are as small as `granularity` allows; it has the reasons. Shapes stand in ggml's order: the
contiguous dimension first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import granularity
import numpy as np
from tiny_mamba import byte_vocab

N_VOCAB = 288
Shapes = dict[str, tuple[int, ...]]
Fields = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model to write: metadata below ``<architecture>.`` and shapes of its tensors."""

    name: str
    architecture: str
    kind: str
    """``recurrent`` or ``hybrid``."""
    fields: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    shifts: bool = True
    """False where llama.cpp itself aborts when it shifts positions of this model."""

    def write(self, path: Path, seed: int = 0, chat_template: str | None = None) -> Path:
        """Writes the model to `path` and returns it; equal seeds give equal files. Raises `granularity.OddSize`."""
        granularity.check(self.architecture, self.fields, self.shapes)
        rng = np.random.default_rng([seed, *self.name.encode()])
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.fields.items():
            _add(writer, f"{self.architecture}.{key}", value)
        for key, value in byte_vocab(N_VOCAB).items():
            _add(writer, key, value)
        if chat_template is not None:
            writer.add_chat_template(chat_template)
        for name, shape in self.shapes.items():
            writer.add_tensor(name, _values(name, shape, rng))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, (list, tuple)):
        writer.add_array(key, list(value))
    else:
        kind = {bool: kinds.BOOL, str: kinds.STRING, float: kinds.FLOAT32}.get(type(value), kinds.UINT32)
        writer.add_key_value(key, value, kind)


Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

# By the end of a tensor's name; the first that fits. Anything else is a matrix, scaled by its number of inputs.
DRAWS: tuple[tuple[tuple[str, ...], Draw], ...] = (
    (("norm.weight", "norm_2.weight", "time_mix_ln.weight"), lambda rng, n: 1 + 0.1 * rng.standard_normal(n)),
    (("ssm_a",), lambda rng, n: -np.exp(rng.uniform(-2, 1, n))),
    (("ssm_d",), lambda rng, n: 1 + 0.2 * rng.standard_normal(n)),
    (("ssm_dt.bias",), lambda rng, n: rng.uniform(-3, 0.5, n)),
    (("conv1d.weight", "shortconv.conv.weight"), lambda rng, n: 0.5 * rng.standard_normal(n)),
    (("time_mix_lerp_fused.weight", "lerp_x.weight", "lerp_k.weight", "lerp_r.weight"), lambda rng, n: rng.random(n)),
    (("time_mix_decay.weight", "time_mix_w0.weight"), lambda rng, n: rng.uniform(-3, 0, n)),
    (("time_mix_k_k.weight", "time_mix_k_a.weight"), lambda rng, n: rng.uniform(0.5, 1, n)),
    (("bias", "time_mix_a0.weight", "time_mix_v0.weight"), lambda rng, n: 0.1 * rng.standard_normal(n)),
    (("time_mix_first.weight", "time_mix_r_k.weight"), lambda rng, n: 0.3 * rng.standard_normal(n)),
    (("",), lambda rng, n: rng.standard_normal(n) * (1.5 / np.sqrt(n[-1]))),
)


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    draw = next(draw for ends, draw in DRAWS if name.endswith(ends))
    return draw(rng, shape[::-1]).astype(np.float32)


def _common(n_embd: int, n_layer: int, n_ff: int | list[int], n_head: int, n_head_kv: int | list[int]) -> Fields:
    return {
        "context_length": 1 << 16,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }


def _ends(n_embd: int, norm: str = "output_norm", output: bool = True) -> Shapes:
    shapes: Shapes = {"token_embd.weight": (n_embd, N_VOCAB), f"{norm}.weight": (n_embd,)}
    return shapes | ({"output.weight": (n_embd, N_VOCAB)} if output else {})


def _layer(il: int, shapes: Shapes) -> Shapes:
    return {f"blk.{il}.{name}": shape for name, shape in shapes.items()}


def _ffn(n_embd: int, n_ff: int) -> Shapes:
    return {
        "ffn_norm.weight": (n_embd,),
        "ffn_gate.weight": (n_embd, n_ff),
        "ffn_up.weight": (n_embd, n_ff),
        "ffn_down.weight": (n_ff, n_embd),
    }


def _attention(
    n_embd: int, head: int, n_head: int, n_head_kv: int, q_norms: bool = False, gated: bool = False
) -> Shapes:
    shapes: Shapes = {
        "attn_q.weight": (n_embd, head * n_head * (2 if gated else 1)),
        "attn_k.weight": (n_embd, head * n_head_kv),
        "attn_v.weight": (n_embd, head * n_head_kv),
        "attn_output.weight": (head * n_head, n_embd),
    }
    return shapes | ({"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)} if q_norms else {})


def _mamba1(n_embd: int, d_state: int, d_conv: int, dt_rank: int, norms: bool = False) -> Shapes:
    d_inner = 2 * n_embd
    shapes: Shapes = {
        "attn_norm.weight": (n_embd,),
        "ssm_in.weight": (n_embd, 2 * d_inner),
        "ssm_conv1d.weight": (d_conv, d_inner),
        "ssm_conv1d.bias": (d_inner,),
        "ssm_x.weight": (d_inner, dt_rank + 2 * d_state),
        "ssm_dt.weight": (dt_rank, d_inner),
        "ssm_dt.bias": (d_inner,),
        "ssm_a": (d_state, d_inner),
        "ssm_d": (d_inner,),
        "ssm_out.weight": (d_inner, n_embd),
    }
    if norms:
        shapes |= {
            "ssm_dt_norm.weight": (dt_rank,),
            "ssm_b_norm.weight": (d_state,),
            "ssm_c_norm.weight": (d_state,),
        }
    return shapes


def _mamba2(n_embd: int, d_state: int, d_conv: int, n_head: int, n_group: int) -> Shapes:
    d_inner = 2 * n_embd
    d_mixed = d_inner + 2 * n_group * d_state
    return {
        "attn_norm.weight": (n_embd,),
        "ssm_in.weight": (n_embd, d_inner + d_mixed + n_head),
        "ssm_conv1d.weight": (d_conv, d_mixed),
        "ssm_conv1d.bias": (d_mixed,),
        "ssm_dt.bias": (n_head,),
        "ssm_a": (1, n_head),
        "ssm_d": (1, n_head),
        "ssm_norm.weight": (d_inner // n_group, n_group),
        "ssm_out.weight": (d_inner, n_embd),
    }


def _ssm(d_inner: int, d_state: int, d_conv: int, rank: int, n_group: int | None = None) -> Fields:
    fields: Fields = {
        "ssm.inner_size": d_inner,
        "ssm.state_size": d_state,
        "ssm.conv_kernel": d_conv,
        "ssm.time_step_rank": rank,
    }
    return fields | ({"ssm.group_count": n_group} if n_group is not None else {})


def _mamba(norms: bool) -> tuple[Fields, Shapes]:
    d, n_layer, d_state, d_conv, rank = 256, 3, 16, 4, 16
    fields = _common(d, n_layer, 0, 0, 0) | _ssm(2 * d, d_state, d_conv, rank)
    shapes = _ends(d, output=norms)
    for il in range(n_layer):
        shapes |= _layer(il, _mamba1(d, d_state, d_conv, rank))
    return fields | ({"ssm.dt_b_c_rms": True} if norms else {}), shapes


def _mamba_2() -> tuple[Fields, Shapes]:
    d, n_layer, d_state, d_conv, n_head, n_group = 256, 3, 64, 4, 8, 2
    fields = _common(d, n_layer, 0, 0, 0) | _ssm(2 * d, d_state, d_conv, n_head, n_group)
    shapes = _ends(d)
    for il in range(n_layer):
        shapes |= _layer(il, _mamba2(d, d_state, d_conv, n_head, n_group))
    return fields, shapes


def _rwkv_common(d: int, n_layer: int, n_ff: int, n_head: int, token_shift: int) -> Fields:
    return _common(d, n_layer, n_ff, n_head, n_head) | {
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": granularity.HEAD,
        "token_shift_count": token_shift,
    }


def _rwkv_6() -> tuple[Fields, Shapes]:
    d, n_layer, n_ff, head, extra, decay = 256, 2, 512, 64, 32, 64
    fields = _rwkv_common(d, n_layer, n_ff, 0, 2) | {
        "time_mix_extra_dim": extra,
        "time_decay_extra_dim": decay,
        "rescale_every_n_layers": 6,
    }
    shapes = _ends(d) | {"output_norm.bias": (d,), "token_embd_norm.weight": (d,), "token_embd_norm.bias": (d,)}
    for il in range(n_layer):
        shapes |= _layer(
            il,
            {
                **_norm_pair(d),
                **_rwkv6_mix(d, extra, decay),
                "time_mix_first.weight": (head, d // head),
                "time_mix_ln.weight": (d,),
                "time_mix_ln.bias": (d,),
                "time_mix_key.weight": (d, d),
                "time_mix_value.weight": (d, d),
                "channel_mix_lerp_k.weight": (d, 1, 1),
                "channel_mix_lerp_r.weight": (d, 1, 1),
                "channel_mix_key.weight": (d, n_ff),
                "channel_mix_value.weight": (n_ff, d),
                "channel_mix_receptance.weight": (d, d),
            },
        )
    return fields, shapes


def _norm_pair(d: int) -> Shapes:
    return {"attn_norm.weight": (d,), "attn_norm.bias": (d,), "attn_norm_2.weight": (d,), "attn_norm_2.bias": (d,)}


def _rwkv6_mix(d: int, extra: int, decay: int) -> Shapes:
    return {
        "time_mix_w1.weight": (d, extra * 5),
        "time_mix_w2.weight": (extra, d, 5),
        "time_mix_lerp_x.weight": (d, 1, 1),
        "time_mix_lerp_fused.weight": (d, 1, 1, 5),
        "time_mix_decay.weight": (d,),
        "time_mix_decay_w1.weight": (d, decay),
        "time_mix_decay_w2.weight": (decay, d),
        "time_mix_receptance.weight": (d, d),
        "time_mix_gate.weight": (d, d),
        "time_mix_output.weight": (d, d),
    }


def _rwkv_6_qwen2() -> tuple[Fields, Shapes]:
    d, n_layer, n_ff, n_head, n_head_kv, extra, decay = 256, 2, 512, 4, 2, 32, 64
    head = d // n_head
    fields = _rwkv_common(d, n_layer, n_ff, n_head, 1) | {
        "attention.head_count_kv": n_head_kv,
        "time_mix_extra_dim": extra,
        "time_decay_extra_dim": decay,
    }
    shapes = _ends(d)
    for il in range(n_layer):
        shapes |= _layer(
            il,
            {
                "attn_norm.weight": (d,),
                **_rwkv6_mix(d, extra, decay),
                "time_mix_key.weight": (d, head * n_head_kv),
                "time_mix_value.weight": (d, head * n_head_kv),
                "time_mix_key.bias": (head * n_head_kv,),
                "time_mix_value.bias": (head * n_head_kv,),
                "time_mix_receptance.bias": (d,),
                **_ffn(d, n_ff),
            },
        )
    return fields, shapes


def _rwkv7_mix(d: int, il: int, decay: int, iclr: int, value: int, gate: int) -> Shapes:
    mix = iclr if il == 0 else value  # the first layer has no residual value; the loader wants these sizes for it
    shapes: Shapes = {
        "time_mix_w0.weight": (d,),
        "time_mix_w1.weight": (d, decay),
        "time_mix_w2.weight": (decay, d),
        "time_mix_a0.weight": (d,),
        "time_mix_a1.weight": (d, iclr),
        "time_mix_a2.weight": (iclr, d),
        "time_mix_v0.weight": (d,),
        "time_mix_v1.weight": (d, mix),
        "time_mix_v2.weight": (mix, d),
        "time_mix_lerp_fused.weight": (d, 1, 1, 6 if gate else 5),
        "time_mix_k_k.weight": (d,),
        "time_mix_k_a.weight": (d,),
        "time_mix_r_k.weight": (d,),
        "time_mix_key.weight": (d, d),
        "time_mix_value.weight": (d, d),
        "time_mix_receptance.weight": (d, d),
        "time_mix_output.weight": (d, d),
    }
    return shapes | ({"time_mix_g1.weight": (d, gate), "time_mix_g2.weight": (gate, d)} if gate else {})


def _rwkv7_ranks(decay: int, iclr: int, value: int, gate: int) -> Fields:
    return {
        "attention.decay_lora_rank": decay,
        "attention.iclr_lora_rank": iclr,
        "attention.value_residual_mix_lora_rank": value,
        "attention.gate_lora_rank": gate,
    }


def _rwkv_7() -> tuple[Fields, Shapes]:
    d, n_layer, n_ff, ranks = 256, 2, 512, (64, 96, 32, 128)
    fields = _rwkv_common(d, n_layer, n_ff, 0, 2) | _rwkv7_ranks(*ranks)
    shapes = _ends(d) | {"output_norm.bias": (d,), "token_embd_norm.weight": (d,), "token_embd_norm.bias": (d,)}
    for il in range(n_layer):
        shapes |= _layer(
            il,
            {
                **_norm_pair(d),
                **_rwkv7_mix(d, il, *ranks),
                "time_mix_ln.weight": (d,),
                "time_mix_ln.bias": (d,),
                "channel_mix_lerp_k.weight": (d, 1, 1),
                "channel_mix_key.weight": (d, n_ff),
                "channel_mix_value.weight": (n_ff, d),
            },
        )
    return fields, shapes


def _arwkv_7() -> tuple[Fields, Shapes]:
    d, n_layer, n_ff, ranks = 256, 2, 512, (64, 96, 32, 0)
    fields = _rwkv_common(d, n_layer, n_ff, 0, 1) | _rwkv7_ranks(*ranks)
    shapes = _ends(d)
    for il in range(n_layer):
        shapes |= _layer(il, {"attn_norm.weight": (d,), **_rwkv7_mix(d, il, *ranks), **_ffn(d, n_ff)})
    return fields, shapes


def _granite_hybrid() -> tuple[Fields, Shapes]:
    d, n_ff, n_head, d_state, d_conv, n_ssm_head, n_group = 256, 512, 4, 64, 4, 8, 1
    kv = [0, 2, 0]
    fields = _common(d, len(kv), n_ff, n_head, kv) | _ssm(2 * d, d_state, d_conv, n_ssm_head, n_group)
    shapes = _ends(d, output=False)
    for il, n_head_kv in enumerate(kv):
        if n_head_kv:
            layer = {"attn_norm.weight": (d,), **_attention(d, d // n_head, n_head, n_head_kv)}
        else:
            layer = _mamba2(d, d_state, d_conv, n_ssm_head, n_group)
        shapes |= _layer(il, {**layer, **_ffn(d, n_ff)})
    return fields, shapes


def _jamba() -> tuple[Fields, Shapes]:
    d, n_ff, n_head, d_state, d_conv, rank = 256, 512, 4, 16, 4, 16
    kv = [0, 2, 0]
    fields = _common(d, len(kv), n_ff, n_head, kv) | _ssm(2 * d, d_state, d_conv, rank)
    shapes = _ends(d)
    for il, n_head_kv in enumerate(kv):
        if n_head_kv:
            layer = {"attn_norm.weight": (d,), **_attention(d, d // n_head, n_head, n_head_kv)}
        else:
            layer = _mamba1(d, d_state, d_conv, rank, norms=True)
        shapes |= _layer(il, {**layer, **_ffn(d, n_ff)})
    return fields, shapes


def _lfm2() -> tuple[Fields, Shapes]:
    """With a sliding window, so that the hybrid memory with two attention halves is used; its s rows are empty.

    All its attention layers slide. The other attention half thus has no tensors, and llama.cpp aborts on a shift.
    """
    d, n_ff, n_head, d_conv = 256, 512, 4, 3
    kv = [0, 2, 0]
    fields = _common(d, len(kv), n_ff, n_head, kv) | {"shortconv.l_cache": d_conv, "attention.sliding_window": 24}
    shapes = _ends(d, norm="token_embd_norm", output=False)
    for il, n_head_kv in enumerate(kv):
        if n_head_kv:
            layer = _attention(d, d // n_head, n_head, n_head_kv, q_norms=True)
        else:
            layer = {
                "shortconv.conv.weight": (d_conv, d),
                "shortconv.in_proj.weight": (d, 3 * d),
                "shortconv.out_proj.weight": (d, d),
            }
        shapes |= _layer(il, {"attn_norm.weight": (d,), **layer, **_ffn(d, n_ff)})
    return fields, shapes


def _qwen35() -> tuple[Fields, Shapes]:
    d, n_ff, n_head, n_head_kv, head = 256, 512, 4, 2, 64
    d_state, d_conv, n_k, n_v = 64, 4, 2, 4
    attention_layers = (1, 3)
    mixed = d_state * (2 * n_k + n_v)
    fields = _common(d, 4, n_ff, n_head, n_head_kv) | _ssm(d_state * n_v, d_state, d_conv, n_v, n_k)
    fields |= {
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 2,
    }
    shapes = _ends(d)
    for il in range(4):
        if il in attention_layers:
            layer = _attention(d, head, n_head, n_head_kv, q_norms=True, gated=True)
        else:
            layer = {
                "attn_qkv.weight": (d, mixed),
                "attn_gate.weight": (d, d_state * n_v),
                "ssm_conv1d.weight": (d_conv, mixed),
                "ssm_dt.bias": (n_v,),
                "ssm_a": (n_v,),
                "ssm_beta.weight": (d, n_v),
                "ssm_alpha.weight": (d, n_v),
                "ssm_norm.weight": (d_state,),
                "ssm_out.weight": (d_state * n_v, d),
            }
        ffn = _ffn(d, n_ff)
        del ffn["ffn_norm.weight"]
        shapes |= _layer(il, {"attn_norm.weight": (d,), "post_attention_norm.weight": (d,), **layer, **ffn})
    return fields, shapes


@cache
def models() -> dict[str, Model]:
    """All models that can be written, by name."""
    drawn: dict[str, tuple[str, str, tuple[Fields, Shapes]]] = {
        "mamba": ("mamba", "recurrent", _mamba(norms=False)),
        "falcon-mamba": ("mamba", "recurrent", _mamba(norms=True)),
        "mamba2": ("mamba2", "recurrent", _mamba_2()),
        "rwkv6": ("rwkv6", "recurrent", _rwkv_6()),
        "rwkv7": ("rwkv7", "recurrent", _rwkv_7()),
        "rwkv6qwen2": ("rwkv6qwen2", "recurrent", _rwkv_6_qwen2()),
        "arwkv7": ("arwkv7", "recurrent", _arwkv_7()),
        "granite-hybrid": ("granitehybrid", "hybrid", _granite_hybrid()),
        "jamba": ("jamba", "hybrid", _jamba()),
        "lfm2-swa": ("lfm2", "hybrid", _lfm2()),
        "qwen35": ("qwen35", "hybrid", _qwen35()),
    }
    return {
        name: Model(name, architecture, kind, fields, shapes, shifts=name != "lfm2-swa")
        for name, (architecture, kind, (fields, shapes)) in drawn.items()
    }


def write(name: str, folder: Path) -> Path:
    """The file of model `name` in `folder`, written if it is not there yet."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        models()[name].write(path)
    return path
