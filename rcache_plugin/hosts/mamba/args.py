"""What callers of the Mamba host may hand in, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cells.batch import Batch
from ...cells.ubatch import BoolArray
from ...errors import InvalidArgument


def token_ids(tokens: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`tokens` as an array of whole numbers [n_tokens]. Raises `InvalidArgument`."""
    token = np.asarray(tokens)
    if token.size == 0:
        return np.empty(0, dtype=np.int32)
    if token.ndim != 1 or token.dtype.kind not in "iu":
        raise InvalidArgument(f"tokens must be a flat list of whole numbers, not {token.dtype} of shape {token.shape}")
    return token


def flags_of(output: str | npt.ArrayLike | None, n_tokens: int) -> BoolArray | None:
    """`output` as bool [n_tokens]; None stands for the last of each sequence set. Raises `InvalidArgument`."""
    if output is None or (isinstance(output, str) and output == "last"):
        return None
    if isinstance(output, str):
        if output != "all":
            raise InvalidArgument(f'output is {output!r}, it must be "last", "all" or {n_tokens} flags')
        return np.ones(n_tokens, dtype=np.bool_)
    flags = np.asarray(output)
    if flags.dtype != np.bool_ or flags.shape != (n_tokens,):
        raise InvalidArgument(f"output has shape {flags.shape} of {flags.dtype}, expected {n_tokens} flags")
    return flags


def flags_of_batch(batch: Batch, output: str | npt.ArrayLike | None) -> BoolArray:
    """`output` for a batch, bool [n_tokens]; None stands for the batch's own flags. Raises `InvalidArgument`."""
    if output is None:
        return batch.output
    flags = flags_of(output, batch.n_tokens)
    # a Batch without flags asks for the last token of each set
    return Batch(batch.tokens, batch.pos, batch.seq_ids, embd=batch.embd).output if flags is None else flags


def check_tokens(token: npt.NDArray[Any], n_vocab: int) -> None:
    """Raises `InvalidArgument` for an id that is not in the vocabulary."""
    if token.size and not (0 <= token.min() and token.max() < n_vocab):
        bad = token[(token < 0) | (token >= n_vocab)][0]
        raise InvalidArgument(f"token {bad} is not in the vocabulary, ids run from 0 to {n_vocab - 1}")


def check_embd(embd: npt.NDArray[Any], n_embd: int) -> None:
    """Raises `InvalidArgument` for embeddings of another width."""
    if embd.shape[1] != n_embd:
        raise InvalidArgument(f"embeddings have shape {embd.shape}, expected [n_tokens, {n_embd}]")
