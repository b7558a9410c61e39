"""The equal-length micro-batch that a slot is found for, and the only sentinels. Needs neither ggml nor cffi."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgument, counted

POS_NONE = -1
"""Position of a cell that holds nothing."""
CELL_NONE = -1
"""No cell: the tail of an empty sequence, the source of a state that starts from zero."""
SEQ_ANY = -1
"""Every sequence; only where a docstring allows it."""
POS_MAX = 2**31 - 1
"""Largest position that the C interface can carry."""

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


def _frozen(values: Any, dtype: Any, what: str, n_rows: int) -> npt.NDArray[Any]:
    """A private, read-only array of `n_rows` rows."""
    array = np.array(values, dtype=dtype)
    if array.ndim == 0 or array.shape[0] != n_rows:
        raise InvalidArgument(f"{what} has shape {array.shape}, expected {counted(n_rows, 'row')}")
    array.setflags(write=False)
    return array


_INT32 = np.dtype(np.int32)


def _int32(values: npt.ArrayLike, what: str, lowest: int) -> Int32Array:
    """A private, read-only copy. Raises `InvalidArgument`: not flat, not whole numbers, outside [lowest, POS_MAX]."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(f"{what} must be a flat list of whole numbers, not {array.dtype} {list(array.shape)}")
    if array.size and (array.dtype != _INT32 or lowest > -POS_MAX):
        if array.size <= 64:  # a short list is looked through more quickly in Python
            numbers = array.tolist()
            least, most = min(numbers), max(numbers)
        else:
            least, most = int(array.min()), int(array.max())
        if not lowest <= least <= most <= POS_MAX:
            raise InvalidArgument(f"{what} run from {lowest} to {POS_MAX}, found {least} .. {most}")
    copy = array.astype(_INT32)
    copy.flags.writeable = False
    return copy


def int32_tokens(tokens: npt.ArrayLike) -> Int32Array:
    """A private, read-only copy of token ids. Raises `InvalidArgument`: not flat, not whole, outside int32."""
    return _int32(tokens, "tokens", -POS_MAX - 1)


def int32_positions(pos: npt.ArrayLike) -> Int32Array:
    """A private, read-only copy of token positions. Raises `InvalidArgument`: not flat, negative, above `POS_MAX`."""
    return _int32(pos, "positions", 0)


def seq_id_set(seq_ids: Iterable[int]) -> tuple[int, ...]:
    """A set of sequence ids as a tuple, order kept. Raises `InvalidArgument`: empty, negative or repeated ids."""
    ids = tuple([int(seq_id) for seq_id in seq_ids])
    if not ids:
        raise InvalidArgument("a token needs at least one sequence id")
    if min(ids) < 0:
        raise InvalidArgument(f"sequence ids must not be negative: {ids}")
    if len(ids) > 1 and len(set(ids)) != len(ids):
        raise InvalidArgument(f"a sequence id is repeated: {ids}")
    return ids


class UBatch:
    """`n_seqs` sequence sets with `n_seq_tokens` tokens each, set after set. Read-only.

    Raises `InvalidArgument` when it is empty, a length does not fit, a sequence id is negative or stands in two sets
    (their states would have to be in two cells), or a position is negative.
    """

    __slots__ = (
        "batch_index",
        "embd",
        "n_seq_tokens",
        "n_seqs",
        "n_tokens",
        "output",
        "owners",
        "pos",
        "pos_last",
        "primary",
        "seq_ids",
        "shared",
        "token",
    )

    n_seqs: int
    n_seq_tokens: int
    n_tokens: int
    """``n_seqs * n_seq_tokens``."""
    seq_ids: tuple[tuple[int, ...], ...]
    """Ids of each set, [n_seqs][>= 1]; the first names the set."""
    primary: list[int]
    """First id of each set, [n_seqs]."""
    owners: list[tuple[int, ...]]
    """Ids of each set in ascending order, [n_seqs]: what a cell remembers."""
    shared: bool
    """Whether any set has more than one id."""
    pos: Int32Array
    """Token positions, int32 [n_tokens]."""
    pos_last: list[int]
    """Position of each set's last token, [n_seqs]."""
    token: Int32Array | None
    """Token ids, int32 [n_tokens]; None when the input is embeddings or unknown."""
    embd: Float32Array | None
    """Embeddings, float32 [n_tokens, n_embd]."""
    output: BoolArray | None
    """Whether a token's output is wanted, bool [n_tokens]."""
    batch_index: Int32Array | None
    """Where each token stands in the caller's batch, int32 [n_tokens]."""

    def __init__(
        self,
        seq_ids: Sequence[Sequence[int]],
        pos: npt.ArrayLike,
        token: npt.ArrayLike | None = None,
        embd: npt.ArrayLike | None = None,
        output: npt.ArrayLike | None = None,
        batch_index: npt.ArrayLike | None = None,
    ) -> None:
        sets = tuple([seq_id_set(ids) for ids in seq_ids])
        flat = [seq_id for ids in sets for seq_id in ids]
        if len(set(flat)) != len(flat):
            raise InvalidArgument(f"a sequence id stands in two sets of one ubatch: {sets}")
        if token is not None and embd is not None:
            raise InvalidArgument("the input is tokens or embeddings, not both")
        shared = len(flat) > len(sets)
        owners = [tuple(sorted(ids)) for ids in sets] if shared else list(sets)
        self._fill(sets, [ids[0] for ids in sets], owners, shared, pos, token)
        put = object.__setattr__
        put(self, "embd", None if embd is None else _frozen(embd, np.float32, "embd", self.n_tokens))
        put(self, "output", None if output is None else _frozen(output, np.bool_, "output", self.n_tokens))
        index = None if batch_index is None else _frozen(batch_index, np.int32, "batch_index", self.n_tokens)
        put(self, "batch_index", index)

    def _fill(
        self,
        sets: tuple[tuple[int, ...], ...],
        primary: list[int],
        owners: list[tuple[int, ...]],
        shared: bool,
        pos: npt.ArrayLike,
        token: npt.ArrayLike | None,
    ) -> None:
        n_seqs = len(sets)
        if not n_seqs:
            raise InvalidArgument("a ubatch needs at least one sequence")
        positions = int32_positions(pos)
        n_tokens = len(positions)
        if n_tokens == 0 or n_tokens % n_seqs:
            shape = f"{counted(n_tokens, 'position')} for {counted(n_seqs, 'sequence')}"
            raise InvalidArgument(f"{shape}: each sequence needs the same number, at least 1")
        n_seq_tokens = n_tokens // n_seqs
        put = object.__setattr__
        put(self, "seq_ids", sets)
        put(self, "n_seqs", n_seqs)
        put(self, "n_seq_tokens", n_seq_tokens)
        put(self, "n_tokens", n_tokens)
        put(self, "primary", primary)
        put(self, "owners", owners)
        put(self, "shared", shared)
        put(self, "pos", positions)
        put(self, "pos_last", positions[n_seq_tokens - 1 :: n_seq_tokens].tolist())
        tokens = None if token is None else int32_tokens(token)
        if tokens is not None and len(tokens) != n_tokens:
            raise InvalidArgument(f"token has length {len(tokens)} for {counted(n_tokens, 'position')}")
        put(self, "token", tokens)
        put(self, "embd", None)
        put(self, "output", None)
        put(self, "batch_index", None)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a UBatch is read-only ({name})")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"UBatch(seq_ids={self.seq_ids}, n_seq_tokens={self.n_seq_tokens}, pos_last={self.pos_last})"

    @classmethod
    def single(cls, seq_id: int, pos0: int, n_tokens: int = 1, token: npt.ArrayLike | None = None) -> UBatch:
        """`n_tokens` tokens of one sequence from position `pos0` on."""
        return cls([(seq_id,)], np.arange(pos0, pos0 + n_tokens), token)

    @classmethod
    def of_ids(cls, ids: list[int], pos: npt.ArrayLike, token: npt.ArrayLike | None = None) -> UBatch:
        """Sets of one sequence each, named by `ids`. The same as the constructor, cheaper; raises as it does."""
        if ids and min(ids) < 0:
            raise InvalidArgument(f"sequence ids must not be negative: {ids}")
        if len(set(ids)) != len(ids):
            raise InvalidArgument(f"a sequence id stands in two sets of one ubatch: {ids}")
        self = cls.__new__(cls)
        sets = tuple([(seq_id,) for seq_id in ids])
        self._fill(sets, ids, list(sets), False, pos, token)
        return self

    def next(self, pos: bytes, token: bytes | None, n_seq_tokens: int, pos_last: list[int]) -> UBatch:
        """The same sets with other tokens, unchecked: for whoever knows that the positions are not negative.

        `pos` and `token` are int32 [n_seqs * n_seq_tokens], `pos_last` is [n_seqs]. The sets are shared, so ``a.next(
        ...).seq_ids is a.seq_ids``.
        """
        new = UBatch.__new__(UBatch)
        put = object.__setattr__
        put(new, "seq_ids", self.seq_ids)
        put(new, "n_seqs", self.n_seqs)
        put(new, "n_seq_tokens", n_seq_tokens)
        put(new, "n_tokens", self.n_seqs * n_seq_tokens)
        put(new, "primary", self.primary)
        put(new, "owners", self.owners)
        put(new, "shared", self.shared)
        put(new, "pos", np.frombuffer(pos, _INT32))
        put(new, "pos_last", pos_last)
        put(new, "token", None if token is None else np.frombuffer(token, _INT32))
        put(new, "embd", None)
        put(new, "output", None)
        put(new, "batch_index", None)
        return new

    @property
    def n_outputs(self) -> int:
        """Tokens whose output is wanted."""
        return 0 if self.output is None else int(np.count_nonzero(self.output))

    def same_as(self, other: UBatch) -> bool:
        """Whether both ask for the same slot: the same sets, in the same order, at the same positions."""
        return self is other or (
            self.n_seq_tokens == other.n_seq_tokens
            and self.seq_ids == other.seq_ids
            and self.pos_last == other.pos_last
        )
