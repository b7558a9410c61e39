"""Which tokens each sequence's state has read. Needs neither ggml nor cffi.

A state can't be asked what it has read, so the cache listens: every ubatch brings its token ids. What cannot be known
(embeddings, shifted positions, a state that came from elsewhere) ends the record, and nothing is guessed beyond it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cells.ubatch import Int32Array, UBatch, int32_tokens


class SeqHistory:
    """The record of one sequence."""

    __slots__ = ("batch", "batch_tokens", "branch", "last", "since", "tokens", "whole")

    def __init__(self) -> None:
        self.tokens = array("i")
        """The first tokens that the state has read: those of the positions 0, 1, ..."""
        self.whole = True
        """Whether that is all that the state has read."""
        self.since = 0
        """Tokens that the last checkpoint of this lineage has read; 0 if there is none."""
        self.last: Any = None
        """The checkpoint at `since`, if it is still valid."""
        self.batch = 0
        """Number of the batch that the last tokens came in."""
        self.batch_tokens = 0
        """How many came in that batch so far."""
        self.branch = False
        """Whether other tokens than these have followed here before: a branch point."""

    def start(self) -> None:
        """The sequence is empty."""
        self.tokens = array("i")
        self.whole = True
        self.since = self.batch_tokens = self.batch = 0
        self.last = None
        self.branch = False

    def forget(self) -> None:
        """Nothing is known of the state."""
        self.start()
        self.whole = False

    def cut(self, n_tokens: int) -> None:
        """The state has read exactly the first `n_tokens` of the record."""
        del self.tokens[n_tokens:]
        self.whole = True
        if n_tokens < self.since:
            self.since, self.last = n_tokens, None
        self.batch = self.batch_tokens = 0
        self.branch = False

    def copy_from(self, other: SeqHistory) -> None:
        """The same state, the same record."""
        self.tokens = other.tokens[:]
        self.whole, self.since, self.last, self.branch = other.whole, other.since, other.last, other.branch
        self.batch, self.batch_tokens = other.batch, other.batch_tokens

    def set(self, tokens: array[int]) -> None:
        """The state has read exactly `tokens`."""
        self.start()
        self.tokens = tokens[:]

    def shared(self, tokens: Sequence[int] | Int32Array) -> int:
        """Length of the longest common prefix of the record and `tokens`."""
        return common_prefix(self.tokens, tokens)


class Histories:
    """The records of the sequences ``0 .. n_seq_max - 1``."""

    def __init__(self, n_seq_max: int) -> None:
        self.seqs = [SeqHistory() for _ in range(n_seq_max)]

    def __getitem__(self, seq_id: int) -> SeqHistory:
        return self.seqs[seq_id]

    def resize(self, n_seq_max: int) -> None:
        """Sequences beyond are gone; new ones are empty."""
        del self.seqs[n_seq_max:]
        self.seqs += [SeqHistory() for _ in range(n_seq_max - len(self.seqs))]

    def read(self, ubatch: UBatch, batch: int) -> None:
        """The states of the ubatch's sets have read its tokens, as a part of batch `batch`."""
        n = ubatch.n_seq_tokens
        token = None if ubatch.token is None else ubatch.token.tolist()
        for s, (ids, last) in enumerate(zip(ubatch.seq_ids, ubatch.pos_last, strict=True)):
            history = self.seqs[ids[0]]
            if history.batch != batch:
                history.batch, history.batch_tokens = batch, 0
            history.batch_tokens += n
            history.branch = False
            if history.whole:
                first = len(history.tokens)
                if token is None or last != first + n - 1 or (n > 1 and not _consecutive(ubatch.pos, s * n, first, n)):
                    history.whole = False
                elif n == 1:
                    history.tokens.append(token[s])
                else:
                    history.tokens.extend(token[s * n : (s + 1) * n])
            for other in ids[1:]:
                self.seqs[other].copy_from(history)


def _consecutive(pos: Int32Array, start: int, first: int, n: int) -> bool:
    return bool((pos[start : start + n] == np.arange(first, first + n)).all())


def token_array(tokens: Sequence[int] | Int32Array) -> array[int]:
    """Token ids as an array of int32 [n]. Raises `InvalidArgument`: not flat, not whole, outside int32."""
    return array("i", int32_tokens(tokens).tobytes())


def common_prefix(one: npt.ArrayLike, other: npt.ArrayLike) -> int:
    """Length of the longest common prefix of two rows of token ids, int32 [n] and [m]."""
    left, right = np.asarray(one, np.int32), np.asarray(other, np.int32)
    n = min(len(left), len(right))
    different = np.flatnonzero(left[:n] != right[:n])
    return int(different[0]) if len(different) else n
