"""A caller's batch and how it is split into equal-length ubatches. Needs neither ggml nor cffi.

A token is *ready* when each of its sequences has no earlier token left. Only ready tokens enter a ubatch, so the order
within a sequence is kept whatever the sets look like; llama.cpp's split gives the same ubatches for batches whose sets
do not overlap in part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgument, counted
from .ubatch import BoolArray, Float32Array, Int32Array, UBatch, int32_positions, int32_tokens, seq_id_set


class Batch:
    """The tokens of one decode, in any order of sequences. Read-only by convention.

    `tokens` int32 [n_tokens] or `embd` float32 [n_tokens, n_embd]; `pos` int32 [n_tokens] (default: each sequence
    counts from 0); `seq_ids`: per token one id or several (default: all tokens are of sequence 0); `output` bool
    [n_tokens]: whose output is wanted (default: the last token of each sequence set).

    Raises `InvalidArgument`: empty, both or neither of tokens and embd, lengths differ, ids negative or repeated,
    positions negative.
    """

    __slots__ = ("embd", "n_tokens", "output", "pos", "seq_ids", "tokens")

    tokens: Int32Array | None
    embd: Float32Array | None
    pos: Int32Array
    seq_ids: tuple[tuple[int, ...], ...]
    output: BoolArray
    n_tokens: int

    def __init__(
        self,
        tokens: npt.ArrayLike | None = None,
        pos: npt.ArrayLike | None = None,
        seq_ids: Sequence[int | Sequence[int]] | None = None,
        output: npt.ArrayLike | None = None,
        embd: npt.ArrayLike | None = None,
    ) -> None:
        if (tokens is None) == (embd is None):
            raise InvalidArgument("a batch needs either tokens or embd")
        self.tokens = None if tokens is None else int32_tokens(tokens)
        self.embd = None if embd is None else np.array(embd, dtype=np.float32)
        if self.embd is not None and self.embd.ndim != 2:
            raise InvalidArgument(f"embd has shape {self.embd.shape}, expected [n_tokens, n_embd]")
        self.n_tokens = len(self.tokens if self.tokens is not None else self.embd)  # type: ignore[arg-type]
        if not self.n_tokens:
            raise InvalidArgument("the batch is empty")
        if seq_ids is None:
            self.seq_ids = ((0,),) * self.n_tokens
        else:
            self.seq_ids = tuple(
                seq_id_set((ids,) if isinstance(ids, (int, np.integer)) else ids) for ids in seq_ids
            )
        if pos is None:
            pos = _counted_positions(self.seq_ids)
        self.pos = int32_positions(pos)
        wanted = _last_of_each_set(self.seq_ids) if output is None else np.array(output, dtype=np.bool_)
        for what, length in (("seq_ids", len(self.seq_ids)), ("pos", self.pos.size), ("output", wanted.size)):
            if length != self.n_tokens:
                raise InvalidArgument(f"{what} has length {length} for {counted(self.n_tokens, 'token')}")
        self.output = wanted

    def ubatch(self, sets: Sequence[Sequence[int]]) -> UBatch:
        """The ubatch of the tokens with these indices, [n_seqs][n_seq_tokens]."""
        index = np.array(sets, dtype=np.int32).reshape(-1)
        return UBatch(
            [self.seq_ids[tokens[0]] for tokens in sets],
            self.pos[index],
            None if self.tokens is None else self.tokens[index],
            None if self.embd is None else self.embd[index],
            self.output[index],
            index,
        )


def _counted_positions(seq_ids: Sequence[tuple[int, ...]]) -> list[int]:
    after: dict[int, int] = {}
    positions = []
    for ids in seq_ids:
        here = max(after.get(seq_id, 0) for seq_id in ids)
        positions.append(here)
        after.update(dict.fromkeys(ids, here + 1))
    return positions


def _last_of_each_set(seq_ids: Sequence[tuple[int, ...]]) -> BoolArray:
    output = np.zeros(len(seq_ids), dtype=np.bool_)
    output[list({ids: i for i, ids in enumerate(seq_ids)}.values())] = True
    return output


class _Queue:
    """The tokens of a batch that are not in a ubatch yet, with their order within each sequence."""

    def __init__(self, batch: Batch) -> None:
        self.seq_ids = batch.seq_ids
        self.left: dict[int, None] = dict.fromkeys(range(batch.n_tokens))
        self.of_seq: dict[int, deque[int]] = {}
        for i, ids in enumerate(batch.seq_ids):
            for seq_id in ids:
                self.of_seq.setdefault(seq_id, deque()).append(i)

    def ready(self, i: int) -> bool:
        return all(self.of_seq[seq_id][0] == i for seq_id in self.seq_ids[i])

    def next_of(self, ids: tuple[int, ...]) -> int | None:
        """The next ready token of exactly this set."""
        queue = self.of_seq[ids[0]]
        if not queue:
            return None
        i = queue[0]
        return i if self.seq_ids[i] == ids and self.ready(i) else None

    def take(self, i: int) -> None:
        del self.left[i]
        for seq_id in self.seq_ids[i]:
            self.of_seq[seq_id].popleft()

    def sets(self, most: int, consecutive: bool) -> list[tuple[int, ...]]:
        """Sets with a ready token, in batch order, no id in two of them, at most `most`."""
        found: list[tuple[int, ...]] = []
        taken: set[int] = set()
        n_open = sum(1 for queue in self.of_seq.values() if queue)
        for i in self.left:
            ids = self.seq_ids[i]
            if taken.isdisjoint(ids) and self.ready(i) and not (consecutive and found and ids[0] != found[-1][0] + 1):
                found.append(ids)
                taken.update(ids)
                if len(found) == most or len(taken) == n_open:
                    break
        return found


def _check_n_ubatch(n_ubatch: int) -> None:
    if n_ubatch < 1:
        raise InvalidArgument(f"n_ubatch is {n_ubatch}, it must be at least 1")


def split_equal(batch: Batch, n_ubatch: int, consecutive_seq_ids: bool = True) -> list[UBatch]:
    """Ubatches of several sequences side by side, the same number of tokens of each, at most `n_ubatch` in all.

    With `consecutive_seq_ids` a ubatch holds sets whose first ids are k, k + 1, k + 2, ... in batch order, as llama.cpp
    does it today; without, any sets, so that scattered sequences need fewer ubatches. Raises `InvalidArgument` for
    ``n_ubatch < 1``.
    """
    _check_n_ubatch(n_ubatch)
    queue = _Queue(batch)
    ubatches = []
    while queue.left:
        sets = queue.sets(n_ubatch, consecutive_seq_ids)
        taken: list[list[int]] = [[] for _ in sets]
        while (len(taken[0]) + 1) * len(sets) <= n_ubatch:
            step = [i for ids in sets if (i := queue.next_of(ids)) is not None]
            if len(step) < len(sets):
                break
            for tokens, i in zip(taken, step, strict=True):
                queue.take(i)
                tokens.append(i)
        ubatches.append(batch.ubatch(taken))
    return ubatches


def split_seq(batch: Batch, n_ubatch: int) -> list[UBatch]:
    """Ubatches of one sequence set each, at most `n_ubatch` tokens (pooled embeddings need a sequence by itself).

    Raises `InvalidArgument` for ``n_ubatch < 1``.
    """
    _check_n_ubatch(n_ubatch)
    queue = _Queue(batch)
    ubatches = []
    while queue.left:
        (ids,) = queue.sets(1, consecutive=False)
        tokens: list[int] = []
        while len(tokens) < n_ubatch and (i := queue.next_of(ids)) is not None:
            queue.take(i)
            tokens.append(i)
        ubatches.append(batch.ubatch([tokens]))
    return ubatches


def out_ids(ubatches: Sequence[UBatch]) -> npt.NDArray[np.int64]:
    """Where each output row belongs: batch index of every output in the order the ubatches produce them, [n_outputs].

    Raises `InvalidArgument` for ubatches that were not split from a batch.
    """
    rows: list[npt.NDArray[np.int32]] = []
    for ubatch in ubatches:
        if ubatch.batch_index is None or ubatch.output is None:
            raise InvalidArgument("the ubatch does not know its batch")
        rows.append(ubatch.batch_index[ubatch.output])
    return np.concatenate(rows).astype(np.int64) if rows else np.empty(0, dtype=np.int64)
