"""Proves the radix tree of prefixes by literal cases, a state machine against a plain dictionary, and long keys."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rcache_plugin.checkpoints.tree import Match, PrefixTree
from rcache_plugin.errors import CorruptTable, InvalidArgument

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def tree_of(*keys: str) -> PrefixTree[str]:
    """Each word is stored under its letters' numbers."""
    tree: PrefixTree[str] = PrefixTree()
    for key in keys:
        assert tree.insert(ids(key), key) is None
    tree.check()
    return tree


def ids(word: str) -> list[int]:
    return [ord(letter) for letter in word]


def shape(tree: PrefixTree[Any]) -> tuple[int, int, int]:
    tree.check()
    return len(tree), tree.n_nodes, tree.n_tokens


def stored(tree: PrefixTree[Any]) -> dict[tuple[int, ...], Any]:
    pairs = [(tuple(tokens.tolist()), value) for tokens, value in tree.items()]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


# ---- insert, get, remove: which nodes there are


def test_a_new_tree_is_empty() -> None:
    tree: PrefixTree[str] = PrefixTree()
    assert shape(tree) == (0, 0, 0)
    assert list(tree.items()) == []
    assert (tree.get([1]), tree.longest([1]), tree.above([1])) == (None, None, None)
    assert (tree.shared([1]), tree.below([1]), tree.below([])) == (0, [], [])


def test_a_key_is_one_node_whatever_its_length() -> None:
    assert shape(tree_of("abcdefgh")) == (1, 1, 8)


def test_a_longer_key_hangs_on_its_prefix() -> None:
    assert shape(tree_of("abc", "abcde")) == (2, 2, 5)


def test_a_shorter_key_splits_an_edge() -> None:
    tree = tree_of("abcde", "abc")
    assert shape(tree) == (2, 2, 5)
    assert (tree.get(ids("abc")), tree.get(ids("abcde"))) == ("abc", "abcde")


def test_keys_that_part_ways_share_a_node_without_a_value() -> None:
    tree = tree_of("abcd", "abxyz")
    assert shape(tree) == (2, 3, 2 + 2 + 3)
    assert tree.get(ids("ab")) is None
    assert tree.insert(ids("ab"), "ab") is None
    assert shape(tree) == (3, 3, 7)


def test_keys_that_share_nothing_are_apart() -> None:
    assert shape(tree_of("abc", "bca", "cab")) == (3, 3, 9)


def test_insert_returns_what_it_replaces() -> None:
    tree = tree_of("ab", "abc")
    assert tree.insert(ids("ab"), "new") == "ab"
    assert tree.insert(ids("ab"), "newer") == "new"
    assert shape(tree) == (2, 2, 3)
    assert stored(tree) == {tuple(ids("ab")): "newer", tuple(ids("abc")): "abc"}


def test_get_is_for_exactly_these_tokens() -> None:
    tree = tree_of("abc")
    assert tree.get(ids("abc")) == "abc"
    assert [tree.get(ids(word)) for word in ("", "a", "ab", "abcd", "abd", "b")] == [None] * 6
    assert [ids(word) in tree for word in ("", "ab", "abc", "abcd")] == [False, False, True, False]


def test_remove_of_a_leaf_makes_one_edge_of_the_fork_s_rest() -> None:
    tree = tree_of("abcd", "abxyz")
    assert tree.remove(ids("abcd")) == "abcd"
    assert shape(tree) == (1, 1, 5)
    assert tree.longest(ids("abxyzz")) == Match(5, "abxyz")


def test_remove_of_a_prefix_makes_one_edge() -> None:
    tree = tree_of("ab", "abcd")
    assert tree.remove(ids("ab")) == "ab"
    assert shape(tree) == (1, 1, 4)
    assert tree.longest(ids("abcde")) == Match(4, "abcd")


def test_remove_leaves_a_fork_of_three_and_a_prefix_with_a_value() -> None:
    tree = tree_of("ab", "abc", "abd", "abe")
    tree.remove(ids("abd"))
    assert shape(tree) == (3, 3, 4)
    tree.remove(ids("ab"))
    assert shape(tree) == (2, 3, 4)
    tree.insert(ids("ab"), "ab")
    tree.remove(ids("abc"))
    tree.remove(ids("abe"))
    assert shape(tree) == (1, 1, 2)


def test_remove_below_the_root_does_not_join_the_root() -> None:
    tree = tree_of("ab", "cd")
    tree.remove(ids("ab"))
    assert shape(tree) == (1, 1, 2)
    assert tree.get(ids("cd")) == "cd"


@pytest.mark.parametrize("word", ["", "a", "ab", "abx", "abcdd", "abcde", "z"])
def test_remove_of_what_is_not_stored_is_refused(word: str) -> None:
    tree = tree_of("abcd", "abxy")
    before = shape(tree), stored(tree)
    with pytest.raises(InvalidArgument, match=f"key of {len(word)} token"):
        tree.remove(ids(word))
    assert (shape(tree), stored(tree)) == before


def test_nothing_is_left_after_all_was_removed() -> None:
    words = ["abcd", "ab", "abxy", "a", "abxyz", "q", "abx"]
    for order in (words, words[::-1], sorted(words), sorted(words)[::-1]):
        tree = tree_of(*words)
        for word in order:
            assert tree.remove(ids(word)) == word
        assert shape(tree) == (0, 0, 0)
        assert tree.shared(ids("abcd")) == 0


def test_clear_drops_everything() -> None:
    tree = tree_of("ab", "abc", "x")
    tree.clear()
    assert shape(tree) == (0, 0, 0)
    assert tree.longest(ids("abc")) is None
    assert tree.insert(ids("ab"), "ab") is None


def test_none_is_a_value_like_any_other() -> None:
    tree: PrefixTree[str | None] = PrefixTree()
    tree.insert([1, 2], None)
    assert tree.longest([1, 2, 3]) == Match(2, None)
    assert [1, 2] in tree
    assert tree.remove([1, 2]) is None
    assert shape(tree) == (0, 0, 0)


def test_values_are_kept_not_compared() -> None:
    tree: PrefixTree[Any] = PrefixTree()
    value = np.arange(3)  # an == of arrays has no truth
    tree.insert([1], value)
    found = tree.longest([1, 2])
    assert found is not None
    assert found.value is value
    assert tree.insert([1], 0) is value


# ---- longest, shared, above, below


@pytest.mark.parametrize(
    ("word", "most", "found"),
    [
        ("abcdef", None, "abcd"),
        ("abcd", None, "abcd"),
        ("abc", None, "ab"),
        ("abcx", None, "ab"),
        ("abz", None, "ab"),
        ("a", None, None),
        ("", None, None),
        ("xab", None, None),
        ("abcdef", 4, "abcd"),
        ("abcdef", 3, "ab"),
        ("abcdef", 2, "ab"),
        ("abcdef", 1, None),
        ("abcdef", 0, None),
        ("abcdef", 99, "abcd"),
        ("abq", None, "ab"),
        ("abqr", None, "abqr"),
    ],
)
def test_longest_stored_prefix(word: str, most: int | None, found: str | None) -> None:
    tree = tree_of("abcd", "ab", "abqr", "zz")
    expected = None if found is None else Match(len(found), found)
    assert tree.longest(ids(word), most) == expected
    assert tree.longest(np.array(ids(word), np.int32), most) == expected


@pytest.mark.parametrize("most", [-1, -100])
def test_longest_of_a_negative_length_is_refused(most: int) -> None:
    with pytest.raises(InvalidArgument, match=str(most)):
        tree_of("abcd").longest(ids("abcd"), most)


@pytest.mark.parametrize(
    ("word", "length"),
    [("abcdef", 4), ("abcd", 4), ("abc", 3), ("abz", 2), ("abqz", 3), ("a", 1), ("", 0), ("xab", 0), ("zzz", 2)],
)
def test_shared_counts_tokens_of_keys_stored_or_not(word: str, length: int) -> None:
    assert tree_of("abcd", "abqr", "zz").shared(ids(word)) == length


@pytest.mark.parametrize(
    ("word", "found"),
    [("abcdef", "abcd"), ("abcde", "abcd"), ("abcd", "ab"), ("abc", "ab"), ("ab", None), ("a", None), ("", None)],
)
def test_above_is_the_nearest_shorter_one(word: str, found: str | None) -> None:
    assert tree_of("abcd", "ab", "abqr").above(ids(word)) == (None if found is None else Match(len(found), found))


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("", ["zz", "abc"]),
        ("a", ["abc"]),
        ("ab", ["abc"]),
        ("abc", ["abcq", "abcdef", "abcdeg12"]),
        ("abcd", ["abcdef", "abcdeg12"]),
        ("abcde", ["abcdef", "abcdeg12"]),
        ("abcdeg", ["abcdeg12"]),
        ("abcdef", ["abcdef3"]),
        ("abcdef3", []),
        ("abcdef34", []),
        ("abcx", []),
        ("abcdegg", []),
        ("x", []),
    ],
)
def test_below_are_the_nearest_longer_ones(word: str, found: list[str]) -> None:
    tree = tree_of("abcdeg12", "abcdef", "abc", "abcdef3", "abcq", "zz")
    assert tree.below(ids(word)) == [(len(key), key) for key in found]


def test_items_have_a_prefix_before_its_extensions() -> None:
    words = ["abcd", "ab", "abxy", "q", "abxyz"]
    tree = tree_of(*words)
    found = [value for _, value in tree.items()]
    assert sorted(found) == sorted(words)
    assert [value for _, value in tree] == found
    assert found.index("ab") < found.index("abxy") < found.index("abxyz")
    for tokens, value in tree:
        assert tokens.dtype == np.int32
        assert tokens.tolist() == ids(value)
        with pytest.raises(ValueError, match="read-only"):
            tokens[0] = 1


# ---- what tokens can be


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda t: array("i", t),
        lambda t: array("q", t),
        lambda t: memoryview(array("i", t)),
        lambda t: memoryview(array("q", t)),
        lambda t: np.array(t, np.int32),
        lambda t: np.array(t, np.int64),
        lambda t: np.array(t, ">i4"),
        lambda t: np.repeat(np.array(t, np.int32), 2)[::2],
        lambda t: np.array(t, np.int32).tobytes(),
        lambda t: bytearray(np.array(t, np.int32).tobytes()),
        lambda t: memoryview(np.array(t, np.int32).tobytes()),
        lambda t: [np.int32(i) for i in t],
    ],
)
def test_tokens_in_any_form_are_the_same_key(form: Callable[[list[int]], Any]) -> None:
    key = [0, 1, -1, INT32_MIN, INT32_MAX, 256, 65536]
    tree: PrefixTree[str] = PrefixTree()
    tree.insert(form(key), "it")
    assert stored(tree) == {tuple(key): "it"}
    assert tree.get(form(key)) == "it"
    assert tree.longest(form([*key, 5])) == Match(7, "it")
    assert tree.longest(form(key), 6) is None
    assert tree.shared(form([0, 1, -1, 3])) == 3
    assert tree.longest(form([])) is None
    assert tree.remove(form(key)) == "it"


def test_an_array_of_bytes_holds_ids() -> None:
    tree: PrefixTree[str] = PrefixTree()
    tree.insert(np.array([1, 2, 3, 4], np.uint8), "it")
    assert stored(tree) == {(1, 2, 3, 4): "it"}


def test_the_tree_has_its_own_copy() -> None:
    tree: PrefixTree[str] = PrefixTree()
    for key in (np.array([1, 2, 3], np.int32), bytearray(np.array([4, 5], np.int32).tobytes())):
        tree.insert(key, "it")
        key[0] = 99
    assert set(stored(tree)) == {(1, 2, 3), (4, 5)}


def test_tokens_that_differ_in_any_byte_are_different() -> None:
    tree: PrefixTree[int] = PrefixTree()
    # a match of bytes that is not one of tokens: the bytes of 256 are those of 1, one place further
    firsts = [0, 1, 256, 65536, 1 << 24, -1, -256, INT32_MIN, INT32_MAX]
    for token in firsts:
        tree.insert([token, 7, 0], token)
        tree.insert([7, 7, token], token)
    for token in firsts:
        assert tree.longest([token, 7, 0, 1]) == Match(3, token)
        assert tree.longest([7, 7, token, 1]) == Match(3, token)
    assert tree.shared([7, 7, 2]) == 2


@pytest.mark.parametrize("empty", [[], (), b"", np.empty(0, np.int32), np.empty(0), array("i")])
def test_a_value_needs_a_token(empty: Any) -> None:
    tree = tree_of("ab")
    with pytest.raises(InvalidArgument, match="at least one"):
        tree.insert(empty, "no")
    assert shape(tree) == (1, 1, 2)


@pytest.mark.parametrize(
    "bad",
    [
        [1.0, 2.0],
        [1, 2**31],
        [INT32_MIN - 1],
        [2**70],
        np.array([2**32 + 1]),
        np.array([2**63], np.uint64),
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        5,
        "ab",
        ["a"],
        [None],
        None,
        [True],
        b"12345",
        bytearray(3),
        memoryview(b"12345678")[::2],
        np.int32(4),
    ],
    ids=str,
)
def test_what_cannot_be_tokens_is_refused_everywhere(bad: Any) -> None:
    tree = tree_of("ab", "abc")
    calls: list[Callable[[], Any]] = [
        lambda: tree.insert(bad, "no"), lambda: tree.remove(bad), lambda: tree.get(bad), lambda: tree.longest(bad),
        lambda: tree.shared(bad), lambda: tree.above(bad), lambda: tree.below(bad), lambda: bad in tree,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidArgument, match=r"tokens|int32"):
            call()
    assert shape(tree) == (2, 2, 3)


# ---- check


def first_node(above: Any) -> Any:
    """The first child of a node, or of a tree's root."""
    return next(iter(getattr(above, "_root", above).children.values()))


def with_two_parents(tree: PrefixTree[Any]) -> None:
    child = first_node(first_node(tree))
    tree._root.children[child.edge[:4]] = child


@pytest.mark.parametrize(
    ("corrupt", "found"),
    [
        (lambda tree: setattr(tree, "_n_values", 9), "counted"),
        (lambda tree: setattr(tree, "_n_nodes", 9), "counted"),
        (lambda tree: setattr(tree, "_n_tokens", 9), "counted"),
        (lambda tree: setattr(tree._root, "edge", b"1234"), "root"),
        (lambda tree: setattr(tree._root, "value", "x"), "root"),
        (lambda tree: setattr(first_node(tree), "edge", b""), "edge of 0 bytes"),
        (lambda tree: setattr(first_node(tree), "edge", first_node(tree).edge + b"1"), "edge of 9 bytes"),
        (lambda tree: setattr(first_node(tree), "edge", b"12345678"), "edge of 8 bytes"),
        (lambda tree: first_node(tree).children.popitem(), "no value and 1 children"),
        (lambda tree: first_node(tree).children.clear(), "no value and 0 children"),
        (with_two_parents, "two parents"),
        (lambda tree: first_node(tree).adopt(first_node(tree)), "two parents"),
    ],
)
def test_check_finds_every_broken_invariant(corrupt: Callable[[Any], Any], found: str) -> None:
    tree = tree_of("abcd", "abxy", "q")
    corrupt(tree)
    with pytest.raises(CorruptTable, match=found):
        tree.check()


# ---- against a dictionary

Key = tuple[int, ...]

letters = st.sampled_from([0, 1, 1, 256, -1])
keys = st.lists(letters, max_size=7).map(tuple)


class TreeMachine(RuleBasedStateMachine):
    """The tree and a dictionary of tuples that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: PrefixTree[int] = PrefixTree()
        self.model: dict[Key, int] = {}
        self.next_value = 0

    @initialize(some=st.lists(keys.filter(len), max_size=6))
    def begin(self, some: list[Key]) -> None:
        for key in some:
            self.insert(key)

    @rule(key=keys.filter(len))
    def insert(self, key: Key) -> None:
        self.next_value += 1
        assert self.tree.insert(key, self.next_value) == self.model.get(key)
        self.model[key] = self.next_value

    @rule(key=keys)
    def remove(self, key: Key) -> None:
        if key in self.model:
            assert self.tree.remove(key) == self.model.pop(key)
        else:
            with pytest.raises(InvalidArgument):
                self.tree.remove(key)

    @rule(number=st.integers(0, 99))
    def remove_a_stored_one(self, number: int) -> None:
        if self.model:
            self.remove(list(self.model)[number % len(self.model)])

    @rule(number=st.integers(0, 99), more=keys.filter(len))
    def insert_an_extension(self, number: int, more: Key) -> None:
        if self.model:
            self.insert(list(self.model)[number % len(self.model)] + more)

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.model.clear()

    @rule()
    def remove_all(self) -> None:
        for key in list(self.model):
            self.remove(key)
            self.tree.check()
        assert (len(self.tree), self.tree.n_nodes, self.tree.n_tokens) == (0, 0, 0)

    def longest_in_model(self, key: Key, most: int) -> Match[int] | None:
        for n in range(min(most, len(key)), 0, -1):
            if key[:n] in self.model:
                return Match(n, self.model[key[:n]])
        return None

    @rule(key=keys, most=st.integers(0, 8))
    def ask(self, key: Key, most: int) -> None:
        tree, model = self.tree, self.model
        assert tree.get(key) == model.get(key)
        assert (key in tree) == (key in model)
        assert tree.longest(key) == self.longest_in_model(key, len(key))
        assert tree.longest(key, most) == self.longest_in_model(key, most)
        assert tree.above(key) == self.longest_in_model(key, len(key) - 1)
        prefixes = {stored[:n] for stored in model for n in range(len(stored) + 1)}
        assert tree.shared(key) == max((n for n in range(len(key) + 1) if key[:n] in prefixes), default=0)
        longer = [k for k in model if len(k) > len(key) and k[: len(key)] == key]
        nearest = [k for k in longer if not any(k[:n] in model for n in range(len(key) + 1, len(k)))]
        below = tree.below(key)
        assert sorted(below) == sorted((len(k), model[k]) for k in nearest)
        assert [n for n, _ in below] == sorted(n for n, _ in below)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        self.tree.check()
        assert stored(self.tree) == self.model
        assert len(self.tree) == len(self.model)
        # every distinct non-empty prefix is one token of one edge: the least that a tree can hold
        assert self.tree.n_tokens == len({key[:n] for key in self.model for n in range(1, len(key) + 1)})
        assert self.tree.n_nodes <= max(2 * len(self.model) - 1, 0)


def test_the_tree_equals_a_dictionary() -> None:
    run_state_machine_as_test(
        TreeMachine, settings=settings(max_examples=300, stateful_step_count=25, deadline=None, print_blob=True)
    )


# ---- long keys

N_LONG = 100_000


def long_key(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 150_000, N_LONG, dtype=np.int32)


def takes_less_than(ms: float, call: Callable[[], Any], times: int = 200) -> bool:
    """Whether any of some calls needs less time of the processor: what else the machine does must not count."""
    for _ in range(times):
        start = time.thread_time()
        call()
        if time.thread_time() - start < ms / 1e3:
            return True
    return False


def test_a_prompt_of_100_000_tokens_with_a_value_each_512() -> None:
    tree: PrefixTree[int] = PrefixTree()
    key = long_key()
    for n in range(512, N_LONG + 1, 512):
        tree.insert(key[:n], n)
    assert shape(tree) == (195, 195, 195 * 512)
    assert tree.longest(key) == Match(195 * 512, 195 * 512)
    assert tree.longest(key, 70_000) == Match(136 * 512, 136 * 512)
    assert tree.above(key[:1024]) == Match(512, 512)
    assert tree.below(key[:1025]) == [(1536, 1536)]
    other = key.copy()
    other[50_000] += 1
    assert tree.longest(other) == Match(97 * 512, 97 * 512)
    assert tree.shared(other) == 50_000
    tree.insert(other, -1)
    assert shape(tree) == (196, 197, 195 * 512 + 50_000)
    for n in range(512, N_LONG + 1, 512):
        assert tree.remove(key[:n]) == n
    assert shape(tree) == (1, 1, N_LONG)
    assert tree.remove(other) == -1
    assert shape(tree) == (0, 0, 0)


@pytest.mark.parametrize("differs_at", [1, 50_000, N_LONG - 1])
def test_long_keys_that_differ_in_one_token(differs_at: int) -> None:
    tree: PrefixTree[str] = PrefixTree()
    key = long_key()
    other = key.copy()
    other[differs_at] ^= 1 << 30
    tree.insert(key, "key")
    assert tree.shared(other) == differs_at
    tree.insert(other, "other")
    assert shape(tree) == (2, 3, 2 * N_LONG - differs_at)
    assert (tree.get(key), tree.get(other)) == ("key", "other")


def test_a_match_of_100_000_tokens_takes_no_time_per_token() -> None:
    tree: PrefixTree[int] = PrefixTree()
    key = long_key()
    for n in range(512, N_LONG + 1, 512):
        tree.insert(key[:n], n)
    tree.insert(long_key(1), 1)
    other = key.copy()
    other[N_LONG - 700] += 1
    # Some 0.1 ms when the machine is free; one look at each token in Python would take more than 3.
    for call in (tree.longest, tree.get, tree.shared, tree.above, tree.below):
        for tokens in (key, other, long_key(1)):
            assert takes_less_than(1.0, lambda call=call, tokens=tokens: call(tokens))


def test_a_chain_deeper_than_the_recursion_limit() -> None:
    tree: PrefixTree[int] = PrefixTree()
    depth = 5 * sys.getrecursionlimit()
    key = long_key()[:depth]
    for n in range(depth, 0, -1):
        tree.insert(key[:n], n)
    assert shape(tree) == (depth, depth, depth)
    assert tree.longest(key) == Match(depth, depth)
    assert tree.below(key[:1]) == [(2, 2)]
    assert sum(1 for _ in tree.items()) == depth
    for n in range(1, depth):
        tree.remove(key[:n])
    assert shape(tree) == (1, 1, depth)
    for n in range(depth - 1, 0, -1):
        tree.insert(key[:n], n)
    tree.clear()  # the whole chain is freed at once
    assert shape(tree) == (0, 0, 0)


def test_many_extensions_of_one_long_prompt_share_it() -> None:
    tree: PrefixTree[int] = PrefixTree()
    key = long_key()
    for i in range(300):
        tree.insert(np.concatenate((key, np.array([i, i], np.int32))), i)
    assert shape(tree) == (300, 301, N_LONG + 600)
    assert sorted(value for _, value in tree.below(key)) == list(range(300))
    for i in range(300):
        tree.remove(np.concatenate((key, np.array([i, i], np.int32))))
    assert shape(tree) == (0, 0, 0)
