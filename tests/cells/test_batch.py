"""Proves what a ubatch may be, and how a batch is split into ubatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from strategies import batches

from rcache_plugin.cells.batch import Batch, out_ids, split_equal, split_seq
from rcache_plugin.cells.ubatch import UBatch
from rcache_plugin.errors import InvalidArgument

Sets = Sequence[tuple[int, ...]]


def shape(ubatches: Sequence[UBatch]) -> list[tuple[list[tuple[int, ...]], list[int]]]:
    """(sets, indices in the batch) of each ubatch."""
    return [(list(u.seq_ids), u.batch_index.tolist()) for u in ubatches if u.batch_index is not None]


def of_sets(sets: Sequence[int | tuple[int, ...]], **more: Any) -> Batch:
    """A batch whose token i is 100 + i."""
    return Batch(tokens=range(100, 100 + len(sets)), seq_ids=sets, **more)


# ---- UBatch


def test_ubatch_knows_its_shape() -> None:
    ubatch = UBatch([(3, 1), (0,)], [4, 5, 6, 0, 1, 2], token=[9, 8, 7, 6, 5, 4])
    assert (ubatch.n_seqs, ubatch.n_seq_tokens, ubatch.n_tokens) == (2, 3, 6)
    assert tuple(ubatch.seq_ids) == ((3, 1), (0,))
    assert list(ubatch.primary) == [3, 0]
    assert list(ubatch.pos_last) == [6, 2]
    assert ubatch.token is not None
    assert (ubatch.pos.dtype, ubatch.token.dtype) == (np.int32, np.int32)
    assert ubatch.pos.tolist() == [4, 5, 6, 0, 1, 2]
    assert ubatch.embd is None and ubatch.output is None and ubatch.batch_index is None


def test_single_is_one_sequence() -> None:
    ubatch = UBatch.single(2, 7, 3, token=[1, 2, 3])
    assert (ubatch.n_seqs, ubatch.n_seq_tokens, list(ubatch.primary), list(ubatch.pos_last)) == (1, 3, [2], [9])
    assert UBatch.single(0, 5).pos.tolist() == [5]


def test_ubatch_cannot_be_changed() -> None:
    given = np.array([0, 1], dtype=np.int32)
    ubatch = UBatch([(0,)], given, token=given)
    given[:] = 77
    assert ubatch.pos.tolist() == [0, 1]
    assert ubatch.token is not None and ubatch.token.tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        ubatch.pos[0] = 3
    with pytest.raises(AttributeError):
        ubatch.n_seqs = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    "make",
    [
        lambda: UBatch([], []),
        lambda: UBatch([(0,)], []),
        lambda: UBatch([()], [0]),
        lambda: UBatch([(0,), (1,)], [0, 1, 2]),
        lambda: UBatch([(0,)], [0, 1], token=[5]),
        lambda: UBatch([(0,)], [0, 1], token=[[5, 6]]),
        lambda: UBatch([(0,)], [0], token=[5], embd=[[1.0]]),
        lambda: UBatch([(0,)], [0, 1], embd=[[1.0]]),
        lambda: UBatch([(0,)], [0, 1], output=[True]),
        lambda: UBatch([(0,)], [0, 1], batch_index=[1]),
        lambda: UBatch([(0,)], [-1]),
        lambda: UBatch([(0,)], [2**31]),
        lambda: UBatch([(-1,)], [0]),
        lambda: UBatch([(0, -1)], [0]),
        lambda: UBatch([(0, 0)], [0]),
        lambda: UBatch([(0, 1), (1,)], [0, 0]),
        lambda: UBatch([(1,), (0, 1)], [0, 0]),
        lambda: UBatch([(1,), (1,)], [0, 0]),
    ],
)
def test_impossible_ubatches_are_refused(make: Callable[[], UBatch]) -> None:
    with pytest.raises(InvalidArgument):
        make()


# ---- Batch


def test_defaults_of_a_batch() -> None:
    batch = Batch(tokens=[5, 6, 7])
    assert (batch.n_tokens, batch.pos.tolist(), list(batch.seq_ids)) == (3, [0, 1, 2], [(0,)] * 3)
    assert batch.output.tolist() == [False, False, True]


def test_positions_are_counted_for_each_sequence() -> None:
    batch = of_sets([0, 1, 0, (0, 1), 1, 2])
    assert batch.pos.tolist() == [0, 0, 1, 2, 3, 0]


def test_by_default_the_last_token_of_each_set_is_an_output() -> None:
    assert of_sets([0, 1, 0, 1, 1, 2]).output.tolist() == [False, False, True, False, True, True]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Batch(),
        lambda: Batch(tokens=[]),
        lambda: Batch(embd=np.zeros((0, 4))),
        lambda: Batch(tokens=[1], embd=[[1.0]]),
        lambda: Batch(tokens=[[1, 2]]),
        lambda: Batch(embd=[1.0, 2.0]),
        lambda: Batch(tokens=[1, 2], pos=[0]),
        lambda: Batch(tokens=[1, 2], pos=[0, 1, 2]),
        lambda: Batch(tokens=[1, 2], seq_ids=[0]),
        lambda: Batch(tokens=[1, 2], seq_ids=[0, 0, 0]),
        lambda: Batch(tokens=[1, 2], output=[True]),
        lambda: Batch(tokens=[1, 2], pos=[0, -1]),
        lambda: Batch(tokens=[1, 2], pos=[0, 2**31]),
        lambda: Batch(tokens=[1], seq_ids=[-1]),
        lambda: Batch(tokens=[1], seq_ids=[()]),
        lambda: Batch(tokens=[1], seq_ids=[(0, -2)]),
        lambda: Batch(tokens=[1], seq_ids=[(3, 3)]),
    ],
)
def test_impossible_batches_are_refused(make: Callable[[], Batch]) -> None:
    with pytest.raises(InvalidArgument):
        make()


@pytest.mark.parametrize("split", [split_equal, split_seq])
@pytest.mark.parametrize("n_ubatch", [0, -1])
def test_a_ubatch_holds_at_least_one_token(split: Callable[..., Any], n_ubatch: int) -> None:
    with pytest.raises(InvalidArgument, match=str(n_ubatch)):
        split(Batch(tokens=[1]), n_ubatch)


# ---- split_equal


def test_one_long_sequence_is_cut_at_n_ubatch() -> None:
    parts = split_equal(Batch(tokens=range(7)), 3)
    assert shape(parts) == [([(0,)], [0, 1, 2]), ([(0,)], [3, 4, 5]), ([(0,)], [6])]
    assert [part.pos.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [part.token.tolist() for part in parts if part.token is not None] == [[0, 1, 2], [3, 4, 5], [6]]


def test_sequences_stand_side_by_side_as_long_as_the_shortest() -> None:
    parts = split_equal(of_sets([0, 0, 0, 1, 1, 2, 2, 2]), 100)
    assert shape(parts) == [([(0,), (1,), (2,)], [0, 1, 3, 4, 5, 6]), ([(0,)], [2]), ([(2,)], [7])]
    together = split_equal(of_sets([0, 0, 0, 1, 1, 2, 2, 2]), 100, consecutive_seq_ids=False)
    assert shape(together) == [([(0,), (1,), (2,)], [0, 1, 3, 4, 5, 6]), ([(0,), (2,)], [2, 7])]


def test_side_by_side_never_more_than_n_ubatch_tokens() -> None:
    parts = split_equal(of_sets([0, 0, 0, 1, 1, 1]), 5)
    assert shape(parts) == [([(0,), (1,)], [0, 1, 3, 4]), ([(0,), (1,)], [2, 5])]


def test_more_sequences_than_n_ubatch() -> None:
    """A known fault of others is n_ubatch + 1 sequences here."""
    parts = split_equal(of_sets([0, 1, 2, 3, 4]), 2)
    assert shape(parts) == [([(0,), (1,)], [0, 1]), ([(2,), (3,)], [2, 3]), ([(4,)], [4])]
    assert [len(u.seq_ids) for u in split_equal(of_sets([0, 1, 2]), 1)] == [1, 1, 1]


def test_tokens_of_sequences_mixed_in_any_way() -> None:
    parts = split_equal(of_sets([1, 0, 0, 1]), 8, consecutive_seq_ids=False)
    assert shape(parts) == [([(1,), (0,)], [0, 3, 1, 2])]


def test_consecutive_ids_only() -> None:
    sets = [4, 5, 7, 6, 8, 0]
    assert [list(u.primary) for u in split_equal(of_sets(sets), 8)] == [[4, 5, 6], [7, 8], [0]]
    assert [list(u.primary) for u in split_equal(of_sets(sets), 8, consecutive_seq_ids=False)] == [sets]


def test_descending_ids_are_never_consecutive() -> None:
    assert [list(u.primary) for u in split_equal(of_sets([2, 1, 0]), 8)] == [[2], [1], [0]]


def test_a_shared_set_stands_beside_sequences_outside_it() -> None:
    parts = split_equal(of_sets([(0, 1), (0, 1), 2, 2, 0, 1]), 8, consecutive_seq_ids=False)
    assert shape(parts) == [([(0, 1), (2,)], [0, 1, 2, 3]), ([(0,), (1,)], [4, 5])]


def test_sets_that_overlap_keep_the_order_of_each_sequence() -> None:
    """Token 2 of sequence 0 may not overtake token 1, which is of 0 and 1."""
    parts = split_equal(of_sets([0, (0, 1), 0, 1]), 8, consecutive_seq_ids=False)
    assert shape(parts) == [([(0,)], [0]), ([(0, 1)], [1]), ([(0,), (1,)], [2, 3])]


def test_a_common_prefix_and_four_endings() -> None:
    parts = split_equal(of_sets([(0, 1, 2, 3)] * 2 + [0, 1, 2, 3]), 8)
    assert shape(parts) == [([(0, 1, 2, 3)], [0, 1]), ([(0,), (1,), (2,), (3,)], [2, 3, 4, 5])]


# ---- split_seq


def test_split_by_sequence() -> None:
    parts = split_seq(of_sets([1, 0, 1, 0, 1, 0]), 2)
    assert shape(parts) == [([(1,)], [0, 2]), ([(0,)], [1, 3]), ([(1,)], [4]), ([(0,)], [5])]
    assert shape(split_seq(of_sets([1, 0, 1]), 8)) == [([(1,)], [0, 2]), ([(0,)], [1])]


# ---- inputs and outputs


def test_embeddings_go_with_their_tokens() -> None:
    embd = np.arange(12, dtype=np.float32).reshape(4, 3)
    parts = split_equal(Batch(embd=embd, seq_ids=[1, 0, 1, 0], pos=[5, 9, 6, 10]), 2, consecutive_seq_ids=False)
    assert shape(parts) == [([(1,), (0,)], [0, 1]), ([(1,), (0,)], [2, 3])]
    for part in parts:
        assert part.token is None and part.embd is not None and part.batch_index is not None
        assert part.embd.dtype == np.float32
        assert np.array_equal(part.embd, embd[part.batch_index])
    assert [part.pos.tolist() for part in parts] == [[5, 9], [6, 10]]


def test_out_ids_lead_back_to_the_batch() -> None:
    batch = of_sets([1, 1, 0, 0, 2], output=[True, True, False, True, True])
    parts = split_equal(batch, 4, consecutive_seq_ids=False)
    assert shape(parts) == [([(1,), (0,), (2,)], [0, 2, 4]), ([(1,), (0,)], [1, 3])]
    ids = out_ids(parts)
    assert ids.dtype == np.int64
    assert ids.tolist() == [0, 4, 1, 3]
    assert [part.n_outputs for part in parts] == [2, 2]


def test_no_outputs() -> None:
    parts = split_equal(Batch(tokens=[1, 2], output=[False, False]), 1)
    assert out_ids(parts).tolist() == []
    assert out_ids([]).tolist() == []
    assert out_ids([]).dtype == np.int64


def test_out_ids_need_ubatches_of_a_batch() -> None:
    with pytest.raises(InvalidArgument):
        out_ids([UBatch.single(0, 0)])


SPLITS: dict[str, Callable[[Batch, int], list[UBatch]]] = {
    "equal, consecutive": lambda batch, n_ubatch: split_equal(batch, n_ubatch),
    "equal, any": lambda batch, n_ubatch: split_equal(batch, n_ubatch, consecutive_seq_ids=False),
    "by sequence": split_seq,
}


@pytest.mark.parametrize("how", SPLITS)
@settings(max_examples=150, deadline=None)
@given(drawn=batches())
@example(drawn=([(0,), (0, 1), (0,), (1,)], [True] * 4, 8))
@example(drawn=([(0, 1), (1, 2), (2, 0)] * 3, [True] * 9, 2))
def test_what_holds_for_every_split(how: str, drawn: tuple[list[tuple[int, ...]], list[bool], int]) -> None:
    sets, outputs, n_ubatch = drawn
    n = len(sets)
    parts = SPLITS[how](Batch(tokens=range(n), pos=range(1000, 1000 + n), seq_ids=sets, output=outputs), n_ubatch)
    order: list[int] = []
    for part in parts:
        assert part.token is not None and part.output is not None and part.batch_index is not None
        index = part.batch_index.tolist()
        assert 1 <= part.n_tokens <= n_ubatch
        assert part.n_tokens == part.n_seqs * part.n_seq_tokens == len(index)
        ids = [seq_id for one in part.seq_ids for seq_id in one]
        assert len(set(ids)) == len(ids), "a sequence stands in two sets"
        for s, one in enumerate(part.seq_ids):
            assert all(sets[i] == one for i in index[s * part.n_seq_tokens : (s + 1) * part.n_seq_tokens])
        assert part.token.tolist() == index
        assert part.pos.tolist() == [1000 + i for i in index]
        assert part.output.tolist() == [outputs[i] for i in index]
        if how == "equal, consecutive":
            assert list(part.primary) == list(range(part.primary[0], part.primary[0] + part.n_seqs))
        if how == "by sequence":
            assert part.n_seqs == 1
        order += index
    assert sorted(order) == list(range(n)), "every token exactly once"
    for seq_id in {seq_id for ids in sets for seq_id in ids}:
        of_seq = [i for i in order if seq_id in sets[i]]
        assert of_seq == sorted(of_seq), f"tokens of sequence {seq_id} changed their order"
    ids_of_outputs = out_ids(parts).tolist()
    assert sorted(ids_of_outputs) == [i for i in range(n) if outputs[i]]
    # gathering the rows that the ubatches produce with out_ids restores the batch's order
    produced = [i for i in order if outputs[i]]
    back = np.full(n, -1)
    back[ids_of_outputs] = produced
    assert back[back >= 0].tolist() == [i for i in range(n) if outputs[i]]


@settings(max_examples=100, deadline=None)
@given(drawn=batches())
def test_dropping_the_consecutive_rule_needs_no_more_ubatches_for_single_tokens(
    drawn: tuple[list[tuple[int, ...]], list[bool], int],
) -> None:
    seq_ids = list(dict.fromkeys(ids[0] for ids in drawn[0]))
    batch = of_sets(seq_ids)
    free = split_equal(batch, drawn[2], consecutive_seq_ids=False)
    assert len(free) == -(-len(seq_ids) // drawn[2])
    assert len(free) <= len(split_equal(batch, drawn[2]))


def test_256_sequences_in_any_order_fit_into_one_ubatch() -> None:
    order = np.random.default_rng(0).permutation(256).tolist()
    (part,) = split_equal(of_sets(order), 256, consecutive_seq_ids=False)
    assert list(part.primary) == order
