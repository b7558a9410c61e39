"""What one cell of a cache holds: the layers, their element counts and types. Needs neither ggml nor cffi.

The only place where sizes are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import InvalidArgument, counted

Which = Literal["r", "s", "p"]
"""The conv-like state, the ssm state, or the second conv-like state that few models have."""

WHICH: tuple[Which, ...] = ("r", "s", "p")

# (id in enum ggml_type, elements in a block, bytes of a block); the numbers are part of the GGUF format.
_TYPES: dict[str, tuple[int, int, int]] = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q4_1": (3, 32, 20),
    "q5_0": (6, 32, 22),
    "q5_1": (7, 32, 24),
    "q8_0": (8, 32, 34),
    "f64": (28, 1, 8),
    "bf16": (30, 1, 2),
}
_NAME_BY_ID = {type_id: name for name, (type_id, _, _) in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class StateType:
    """A ggml element type as a cache can use it."""

    name: str
    type_id: int
    """Number in ``enum ggml_type``."""
    block: int
    """Elements in a block."""
    block_bytes: int
    """Bytes of a block."""

    @classmethod
    def of(cls, what: str | int | StateType) -> StateType:
        """From a name (``"f32"``), a number of ``enum ggml_type``, or itself. Raises `InvalidArgument`."""
        if isinstance(what, StateType):
            return what
        name = what.lower() if isinstance(what, str) else _NAME_BY_ID.get(what)
        if name not in _TYPES:
            raise InvalidArgument(f"state type {what!r} is not one of {', '.join(_TYPES)}")
        return cls(name, *_TYPES[name])

    def row_bytes(self, n_elements: int) -> int:
        """Bytes of `n_elements` elements. Raises `InvalidArgument` when they do not fill whole blocks."""
        if n_elements % self.block:
            raise InvalidArgument(f"{counted(n_elements, 'element')} {self.name}: not in whole blocks of {self.block}")
        return n_elements // self.block * self.block_bytes


F32 = StateType.of("f32")


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The state that one cell keeps, layer by layer.

    Raises `InvalidArgument` when counts are negative, the two lists differ in length, no layer keeps a state, or a
    row does not fill whole blocks of its type.
    """

    n_embd_r: tuple[int, ...]
    """Elements of r (conv-like state) of each layer, [n_layer]; a layer with 0 in both lists keeps no state."""
    n_embd_s: tuple[int, ...]
    """Elements of s (ssm state) of each layer, [n_layer]."""
    type_r: StateType = field(default=F32)
    """Type of r and p."""
    type_s: StateType = field(default=F32)
    n_embd_p: tuple[int, ...] = ()
    """Elements of p, a second conv-like state that few models have, of each layer, [n_layer]; empty: none."""

    def __post_init__(self) -> None:
        for name, counts in (("n_embd_s", self.n_embd_s), ("n_embd_p", self.n_embd_p or self.n_embd_r)):
            if len(self.n_embd_r) != len(counts):
                raise InvalidArgument(f"n_embd_r has {counted(len(self.n_embd_r), 'layer')}, {name} {len(counts)}")
        if any(n < 0 for n in (*self.n_embd_r, *self.n_embd_s, *self.n_embd_p)):
            raise InvalidArgument("n_embd_r, n_embd_s and n_embd_p must not be negative")
        if not self.layers:
            raise InvalidArgument("no layer keeps a state")
        for il in self.layers:  # raises for rows that do not fill whole blocks
            self.r_row_bytes(il)
            self.s_row_bytes(il)
            self.p_row_bytes(il)

    @classmethod
    def make(
        cls,
        n_embd_r: Sequence[int],
        n_embd_s: Sequence[int],
        type_r: str | int | StateType = "f32",
        type_s: str | int | StateType = "f32",
        n_embd_p: Sequence[int] = (),
    ) -> CacheSpec:
        """From any sequences and any way to name the types."""
        return cls(
            tuple(int(n) for n in n_embd_r),
            tuple(int(n) for n in n_embd_s),
            StateType.of(type_r),
            StateType.of(type_s),
            tuple(int(n) for n in n_embd_p),
        )

    @classmethod
    def mamba(
        cls,
        n_layer: int,
        d_inner: int,
        d_state: int,
        d_conv: int,
        type_r: str | int | StateType = "f32",
        type_s: str | int | StateType = "f32",
    ) -> CacheSpec:
        """Of a Mamba-1: r keeps the last ``d_conv - 1`` inputs of the convolution, s the ssm state."""
        return cls.make([(d_conv - 1) * d_inner] * n_layer, [d_state * d_inner] * n_layer, type_r, type_s)

    @property
    def n_layer(self) -> int:
        """Layers of the model, those without state included."""
        return len(self.n_embd_r)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that keep a state."""
        counts = zip(self.n_embd_r, self.n_embd_s, self.n_embd_p or self.n_embd_r, strict=True)
        return tuple(il for il, layer in enumerate(counts) if any(layer))

    def type_of(self, which: Which) -> StateType:
        """Type of the r, s or p tensors."""
        return self.type_s if which == "s" else self.type_r

    def n_embd(self, which: Which, il: int) -> int:
        """Elements of one cell's r, s or p in layer `il`; 0 when the layer keeps none."""
        counts = {"r": self.n_embd_r, "s": self.n_embd_s, "p": self.n_embd_p}[which]
        return counts[il] if counts else 0

    def row_bytes(self, which: Which, il: int) -> int:
        """Bytes of one cell's r, s or p in layer `il`; 0 when the layer keeps none."""
        return self.type_of(which).row_bytes(self.n_embd(which, il))

    def r_row_bytes(self, il: int) -> int:
        """Bytes of one cell's r in layer `il`; 0 when the layer keeps none."""
        return self.row_bytes("r", il)

    def s_row_bytes(self, il: int) -> int:
        """Bytes of one cell's s in layer `il`; 0 when the layer keeps none."""
        return self.row_bytes("s", il)

    def p_row_bytes(self, il: int) -> int:
        """Bytes of one cell's p in layer `il`; 0 when the layer keeps none."""
        return self.row_bytes("p", il)

    @property
    def p_cell_bytes(self) -> int:
        """Bytes of one cell's p over all layers."""
        return sum(self.p_row_bytes(il) for il in self.layers)

    @property
    def r_cell_bytes(self) -> int:
        """Bytes of one cell's r over all layers."""
        return sum(self.r_row_bytes(il) for il in self.layers)

    @property
    def s_cell_bytes(self) -> int:
        """Bytes of one cell's s over all layers."""
        return sum(self.s_row_bytes(il) for il in self.layers)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell: what one sequence costs."""
        return self.r_cell_bytes + self.s_cell_bytes + self.p_cell_bytes
