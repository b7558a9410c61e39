"""The layout of a cache's tensors: which layers lie in which buffer type, and what that takes in bytes.

Nothing is allocated here but descriptions of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..cells.spec import WHICH, CacheSpec, StateType, Which
from ..errors import BackendError, InvalidArgument, counted
from .ggml import GgmlLib

_MAX_BYTES = 1 << 62
_RPC_MAX_ROW = 1 << 32  # the RPC protocol has row strides of 32 bits
_NAMES: dict[Which, str] = {"r": "cache_r_l{}", "s": "cache_s_l{}", "p": "cache_ple_r_l{}"}  # as in llama.cpp


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a cache's tensors and buffers."""

    r_bytes: int
    """All r tensors."""
    s_bytes: int
    """All s tensors."""
    total_bytes: int
    """All buffers, padding included."""
    by_device: dict[str, int]
    """Buffers by device; a buffer type that is not its device's default one stands under its own name."""
    p_bytes: int = 0
    """All p tensors."""


def sizes_of(spec: CacheSpec, n_cells: int, by_device: dict[str, int]) -> Sizes:
    """The sizes of `n_cells` cells whose buffers have `by_device` bytes."""
    of_cell = (spec.r_cell_bytes, spec.s_cell_bytes, spec.p_cell_bytes)
    r_bytes, s_bytes, p_bytes = (n_bytes * n_cells for n_bytes in of_cell)
    return Sizes(r_bytes, s_bytes, sum(by_device.values()), by_device, p_bytes)


def placement_of(
    lib: GgmlLib, spec: CacheSpec, devices: str | Sequence[str | None] | None, bufts: Sequence[int | None] | None
) -> dict[Any, list[int]]:
    """The layers of each buffer type, for the arguments of `StateBuffers`. Raises as it does."""
    if devices is not None and bufts is not None:
        raise InvalidArgument("give devices or bufts, not both")
    by_layer: list[str | int | None]
    if bufts is not None:
        by_layer = [buft or None for buft in bufts]
    elif isinstance(devices, str):
        by_layer = [devices] * spec.n_layer
    else:
        by_layer = [None] * spec.n_layer if devices is None else list(devices)
    if len(by_layer) != spec.n_layer:
        raise InvalidArgument(
            f"expected a device or buffer type for each layer: {spec.n_layer}, found {len(by_layer)}"
        )
    layers_of: dict[str | int | None, list[int]] = {}
    for il in spec.layers:
        layers_of.setdefault(by_layer[il], []).append(il)
    placement: dict[Any, list[int]] = {}
    for where, layers in layers_of.items():
        buft = lib.buft_at(where) if isinstance(where, int) else lib.buft_of(where)
        placement.setdefault(buft, []).extend(layers)
    return placement


def describe(
    lib: GgmlLib, spec: CacheSpec, n_cells: int, buft: Any, layers: Sequence[int], empty: bool = False
) -> tuple[Any, list[tuple[Which, int, Any]]]:
    """A context with the tensors of `layers`, without data: (context, [(which, il, tensor)]).

    With `empty` there are tensors of width 0 too. Raises `InvalidArgument` and `BackendError`.
    """
    total = spec.cell_bytes * n_cells
    if total > _MAX_BYTES:
        raise InvalidArgument(f"{counted(n_cells, 'cell')} of {spec.cell_bytes} bytes: more than can be addressed")
    wanted: list[tuple[Which, int, StateType, int, int]] = [
        (which, il, spec.type_of(which), spec.n_embd(which, il), spec.row_bytes(which, il))
        for il in layers
        for which in WHICH
    ]
    wanted = [entry for entry in wanted if entry[3] or (empty and entry[0] != "p")]
    on_rpc = lib.endpoint_of_buft(buft) is not None
    for which, il, state_type, n_embd, row_bytes in wanted:
        if on_rpc and row_bytes >= _RPC_MAX_ROW:
            raise InvalidArgument(f"a row {which} of layer {il} has {row_bytes} bytes, more than RPC can carry")
        if lib.row_size(state_type.type_id, n_embd) != row_bytes:
            raise BackendError(f"{lib!r} sizes type {state_type.name} otherwise than this package")
    ctx = lib.new_context(len(wanted))
    try:
        return ctx, [
            (which, il, lib.new_tensor_2d(ctx, state_type.type_id, n_embd, n_cells, _NAMES[which].format(il)))
            for which, il, state_type, n_embd, _ in wanted
        ]
    except BaseException:
        lib.free_context(ctx)
        raise


def padded_size(lib: GgmlLib, buft: Any, tensors: Iterable[Any]) -> int:
    """Bytes that `tensors` take in a buffer of this type, padding included."""
    alignment = lib.alignment(buft)
    return sum(-(-lib.alloc_size(buft, tensor) // alignment) * alignment for tensor in tensors)


def human(n_bytes: int) -> str:
    """`n_bytes` as people read it: ``1.50 MiB``."""
    size = float(n_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return counted(n_bytes, "byte") if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
