"""What the property tests draw: plain values that fit any table, and the functions that fit them to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
from naive_cache import POS_MAX

from rcache_plugin.cells.ubatch import UBatch


@dataclass(frozen=True)
class Draft:
    """A ubatch that is not fitted to a table yet."""

    ids: list[int]
    joins: list[bool]  # whether an id joins the set before it
    n_seq_tokens: int
    jumps: list[int]  # what each set's position is off by, in turn; mostly 0


@dataclass(frozen=True)
class Stride:
    """Many sequences at regular distances: a wide window for little drawing."""

    start: int
    stride: int
    count: int


def _ids_in(number: int) -> list[int]:
    """Up to six ids, the digits of a number to base 16; 14 and above end the list."""
    ids = [number % 14]
    while (number := number // 16) and number % 16 < 14:
        ids.append(number % 16)
    return ids


# Drawing is what the machines spend their time on, so a draft costs two draws: ids, and one of these shapes.
_SHAPES = [
    (joins, n_seq_tokens, jumps)
    for joins in (0b0, 0b0, 0b0, 0b10, 0b100, 0b110, 0b11010, 0b111110)
    for n_seq_tokens in (1, 1, 2, 5)
    for jumps in ([0], [0], [0], [0], [1], [0, -1], [3, 0, 0], [-4])
]

drafts = st.builds(
    lambda number, shape: Draft(_ids_in(number), [bool(shape[0] >> i & 1) for i in range(6)], *shape[1:]),
    st.integers(0, 16**6 - 1),
    st.sampled_from(_SHAPES),
)
strides = st.builds(
    Stride, start=st.integers(0, 4095), stride=st.sampled_from([1, 1, 2, 3, 7, 129]), count=st.integers(1, 256)
)

# Positions in the tests are small, so that most ranges end near one.
_WHOLE = [(-1, -1), (0, -1), (0, POS_MAX), (-1, POS_MAX), (-7, -2)]
_BOUNDS = [-1, 0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 20, -3, POS_MAX - 1, POS_MAX]
whole_ranges = st.sampled_from(_WHOLE)
ranges = st.sampled_from(_WHOLE * 30 + [(p0, p1) for p0 in _BOUNDS for p1 in _BOUNDS])


def sets_of(draft: Draft | Stride, n_seq_max: int) -> list[list[int]]:
    """Sequence sets with ids below `n_seq_max`, none twice."""
    if isinstance(draft, Stride):
        ids = [(draft.start + i * draft.stride) % n_seq_max for i in range(draft.count)]
        return [[seq_id] for seq_id in dict.fromkeys(ids)]
    sets: list[list[int]] = []
    for i, seq_id in enumerate(dict.fromkeys(seq_id % n_seq_max for seq_id in draft.ids)):
        if sets and draft.joins[i]:
            sets[-1].append(seq_id)
        else:
            sets.append([seq_id])
    return sets


def ubatch_of(draft: Draft | Stride, n_seq_max: int, pos_of: Callable[[int], int], first_token: int) -> UBatch:
    """The ubatch that continues at ``pos_of(seq_id)`` (-1: empty), with tokens `first_token`, `first_token + 1`, ..."""
    sets = sets_of(draft, n_seq_max)
    n_seq_tokens, jumps = (1, [0]) if isinstance(draft, Stride) else (draft.n_seq_tokens, draft.jumps)
    pos = []
    for s, ids in enumerate(sets):
        first = max(pos_of(ids[0]) + 1 + jumps[s % len(jumps)], 0)
        pos += range(first, first + n_seq_tokens)
    return UBatch(sets, pos, range(first_token, first_token + len(pos)))


def tokens_by_set(ubatch: UBatch) -> list[list[int]]:
    """Tokens of each set, [n_seqs][n_seq_tokens]."""
    assert ubatch.token is not None
    return [[int(token) for token in row] for row in ubatch.token.reshape(ubatch.n_seqs, ubatch.n_seq_tokens)]


# A batch for the splitters: (sets of its tokens, whether each is an output, n_ubatch).
_token_sets = st.one_of(
    st.integers(0, 6).map(lambda seq_id: (seq_id,)),
    st.integers(0, 6).map(lambda seq_id: (seq_id,)),
    st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True).map(tuple),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[bool], int]:
    """Runs of tokens with one set each, sequences in any order, sets that overlap in any way."""
    runs: Sequence[tuple[tuple[int, ...], int]] = draw(
        st.lists(st.tuples(_token_sets, st.integers(1, 4)), min_size=1, max_size=12)
    )
    sets = [ids for ids, length in runs for _ in range(length)]
    outputs = draw(st.lists(st.booleans(), min_size=len(sets), max_size=len(sets)))
    return sets, outputs, draw(st.integers(1, 12))
