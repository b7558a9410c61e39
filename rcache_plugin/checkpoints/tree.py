"""A radix tree from token prefixes to opaque values: finds the longest one stored. Needs neither ggml nor cffi.

The idea is that of D. R. Morrison, "PATRICIA - Practical Algorithm To Retrieve Information Coded in Alphanumeric",
Journal of the ACM 15(4), 1968: a trie in which a run of nodes that neither branch nor hold a value is one edge. Two
keys share the nodes of what they begin with alike, so that the tree has at most two nodes per value, and each part of a
key that others share is stored once.

A node's edge is a run of whole tokens, as bytes of int32 in the machine's order: a step down is one dictionary look-up
by the next token and one memcmp of the whole edge; NumPy finds where an edge that does not fit differs. Python works
per node, never per token. The tree knows nothing of what its values are, nor of who may be dropped.

        (root) --[1 2]-- o --[3 4]-- A          insert([1, 2, 3, 4], A); insert([1, 2, 7], B)
                         |
                         +---[7]---- B          longest([1, 2, 7, 7]) is Match(3, B)
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import CorruptTable, InvalidArgument, counted

V = TypeVar("V")

TokensLike: TypeAlias = npt.ArrayLike
"""Token ids, any int32, flat. A buffer of single bytes (bytes, bytearray, of cffi) holds int32 in the machine's order;
arrays, other buffers and lists hold the ids themselves. Converting a list takes far longer than finding it."""

_TOKEN_BYTES = 4
_INT32 = np.dtype(np.int32)


class _Absent(enum.Enum):
    ABSENT = enum.auto()


_ABSENT: Literal[_Absent.ABSENT] = _Absent.ABSENT
"""No value here; None is a value like any other."""


@dataclass(frozen=True)
class Match(Generic[V]):
    """A stored prefix."""

    n_tokens: int
    """Its length in tokens, at least 1."""
    value: V


class _Node(Generic[V]):
    __slots__ = ("children", "edge", "value")

    def __init__(self, edge: bytes, value: V | Literal[_Absent.ABSENT]) -> None:
        self.edge = edge  # int32 [>= 1] as bytes: the tokens between the parent and here; empty at the root
        self.value = value
        self.children: dict[bytes, _Node[V]] = {}  # by the first token of their edges

    def adopt(self, child: _Node[V]) -> None:
        self.children[child.edge[:_TOKEN_BYTES]] = child


class PrefixTree(Generic[V]):
    """Values under keys of at least one token each. All lengths are in tokens. Not to be shared by threads.

    Tokens that cannot be, as `TokensLike` says, raise `InvalidArgument` in every method, with nothing changed.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drops everything."""
        self._root: _Node[V] = _Node(b"", _ABSENT)
        self._n_values = self._n_nodes = self._n_tokens = 0

    def __len__(self) -> int:
        """Values stored."""
        return self._n_values

    @property
    def n_tokens(self) -> int:
        """Tokens held in all edges, 4 bytes each: what the tree's memory grows with, next to `n_nodes`."""
        return self._n_tokens

    @property
    def n_nodes(self) -> int:
        """Nodes below the root, at most two per value."""
        return self._n_nodes

    def insert(self, tokens: TokensLike, value: V) -> V | None:
        """Stores `value` under exactly these tokens, copied; returns the value it replaced, None for none.

        Raises `InvalidArgument` for no tokens.
        """
        key = _key(tokens)
        if not key:
            raise InvalidArgument("a value needs a key of at least one token")
        node, end = self._deepest(key)
        n_common, child = _common_child(node, key, end)
        if child is not None:
            node, end = self._split(node, child, n_common), end + n_common
        if end < len(key):
            parent, node = node, _Node(key[end:], _ABSENT)
            parent.adopt(node)
            self._n_nodes += 1
            self._n_tokens += len(node.edge) // _TOKEN_BYTES
        before, node.value = node.value, value
        self._n_values += before is _ABSENT
        return None if before is _ABSENT else before

    def remove(self, tokens: TokensLike) -> V:
        """Takes out what is stored under exactly these tokens and returns it; nodes that nothing needs go with it.

        Raises `InvalidArgument` when nothing is stored there.
        """
        key = _key(tokens)
        path = list(self._steps(key))
        node, end = path[-1]
        value = node.value
        if end != len(key) or value is _ABSENT:
            raise InvalidArgument(f"nothing is stored under this key of {counted(len(key) // _TOKEN_BYTES, 'token')}")
        parent = path[-2][0]  # the root holds no value, so there is one
        node.value = _ABSENT
        self._n_values -= 1
        if not node.children:
            del parent.children[node.edge[:_TOKEN_BYTES]]
            self._n_nodes -= 1
            self._n_tokens -= len(node.edge) // _TOKEN_BYTES
            if len(path) > 2:
                self._join(path[-3][0], parent)
        else:
            self._join(parent, node)
        return value

    def get(self, tokens: TokensLike) -> V | None:
        """What is stored under exactly these tokens; None for nothing."""
        value = self._find(_key(tokens))
        return None if value is _ABSENT else value

    def longest(self, tokens: TokensLike, most: int | None = None) -> Match[V] | None:
        """The longest stored prefix of the first `most` tokens, of all when that is None; None without any.

        Raises `InvalidArgument` for a negative `most`.
        """
        if most is not None and most < 0:
            raise InvalidArgument(f"a prefix of at most {most} tokens: that must not be negative")
        n_bytes, value = 0, self._root.value
        for node, end in self._steps(_key(tokens, most)):
            if node.value is not _ABSENT:
                n_bytes, value = end, node.value
        return None if value is _ABSENT else Match(n_bytes // _TOKEN_BYTES, value)

    def above(self, tokens: TokensLike) -> Match[V] | None:
        """The longest stored prefix that is shorter than these tokens, stored or not; None if there is none."""
        return self.longest(_key(tokens)[:-_TOKEN_BYTES])

    def below(self, tokens: TokensLike) -> list[tuple[int, V]]:
        """(length, value) of the stored keys that begin with these tokens and are longer, without another in between.

        The shortest first. All keys that have no stored prefix when there are no tokens.
        """
        key = _key(tokens)
        node, end = self._deepest(key)
        n_common, inside = _common_child(node, key, end)
        if end + n_common < len(key):
            return []
        # the key ends at the node, or inside the edge to a child
        todo = [(child, end) for child in ([inside] if inside else node.children.values())]
        found: list[tuple[int, V]] = []
        while todo:
            node, end = todo.pop()
            end += len(node.edge)
            if node.value is not _ABSENT:
                found.append((end // _TOKEN_BYTES, node.value))
            else:
                todo.extend([(child, end) for child in node.children.values()])
        return sorted(found, key=lambda pair: pair[0])

    def shared(self, tokens: TokensLike) -> int:
        """Length of the longest prefix of these tokens that any stored key begins with; 0 for none."""
        key = _key(tokens)
        node, end = self._deepest(key)
        return (end + _common_child(node, key, end)[0]) // _TOKEN_BYTES

    def items(self) -> Iterator[tuple[npt.NDArray[np.int32], V]]:
        """Every (read-only int32 [>= 1], value), a prefix before its extensions. Not to be changed meanwhile."""
        todo = [(self._root, b"")]
        while todo:
            node, before = todo.pop()
            key = before + node.edge
            if node.value is not _ABSENT:
                yield np.frombuffer(key, _INT32), node.value
            todo.extend([(child, key) for child in node.children.values()])

    __iter__ = items

    def __contains__(self, tokens: TokensLike) -> bool:
        return self._find(_key(tokens)) is not _ABSENT

    def check(self) -> None:
        """Verifies every invariant of the tree. Raises `CorruptTable` with the first that does not hold."""
        for problem in self._problems():
            raise CorruptTable(problem)

    def _problems(self) -> Iterator[str]:
        if self._root.edge or self._root.value is not _ABSENT:
            yield "the root has an edge or a value"
        n_values = n_nodes = n_bytes = 0
        todo, seen = [self._root], {id(self._root)}
        while todo:
            for first, child in todo.pop().children.items():
                name = f"the node under {first.hex()}"
                if id(child) in seen:
                    yield f"{name} has two parents"
                if not child.edge or len(child.edge) % _TOKEN_BYTES or first != child.edge[:_TOKEN_BYTES]:
                    yield f"{name} has an edge of {counted(len(child.edge), 'byte')}, {child.edge[:8].hex()}"
                if child.value is _ABSENT and len(child.children) < 2:
                    yield f"{name} has no value and {len(child.children)} children"
                seen.add(id(child))
                todo.append(child)
                n_values += child.value is not _ABSENT
                n_nodes += 1
                n_bytes += len(child.edge)
        found, noted = (n_values, n_nodes, n_bytes // _TOKEN_BYTES), (self._n_values, self._n_nodes, self._n_tokens)
        if found != noted:
            yield f"values, nodes and tokens are {noted}, counted {found}"

    # nodes; ends and lengths are in bytes

    def _steps(self, key: bytes) -> Iterator[tuple[_Node[V], int]]:
        """The nodes whose edges `key` begins with, from the root down, each with where it ends."""
        node, end = self._root, 0
        while True:
            yield node, end
            child = node.children.get(key[end : end + _TOKEN_BYTES])
            if child is None or not key.startswith(child.edge, end):
                return
            node, end = child, end + len(child.edge)

    def _deepest(self, key: bytes) -> tuple[_Node[V], int]:
        last = self._root, 0
        for last in self._steps(key):  # noqa: B007
            pass
        return last

    def _find(self, key: bytes) -> V | Literal[_Absent.ABSENT]:
        node, end = self._deepest(key)
        return node.value if end == len(key) else _ABSENT

    def _split(self, parent: _Node[V], child: _Node[V], n_bytes: int) -> _Node[V]:
        """A new node without a value after the first bytes of the child's edge; the child hangs on it."""
        middle: _Node[V] = _Node(child.edge[:n_bytes], _ABSENT)
        child.edge = child.edge[n_bytes:]
        middle.adopt(child)
        parent.adopt(middle)
        self._n_nodes += 1
        return middle

    def _join(self, parent: _Node[V], node: _Node[V]) -> None:
        """Makes one edge of a node and its child, where it has one child and no value."""
        if node.value is _ABSENT and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge = node.edge + child.edge
            parent.adopt(child)
            self._n_nodes -= 1


def _common_child(node: _Node[V], key: bytes, end: int) -> tuple[int, _Node[V] | None]:
    """How many bytes a child's edge and ``key[end:]`` have in common, and the child; (0, None) if there is none."""
    child = node.children.get(key[end : end + _TOKEN_BYTES])
    if child is None:
        return 0, None
    n = min(len(child.edge), len(key) - end) // _TOKEN_BYTES
    differ = np.frombuffer(child.edge, _INT32, n) != np.frombuffer(key, _INT32, n, end)
    first = int(differ.argmax())
    return (first if differ[first] else n) * _TOKEN_BYTES, child


def _key(tokens: Any, most: int | None = None) -> bytes:
    """The first `most` tokens as bytes of int32. Raises `InvalidArgument`: not flat, not whole, outside int32."""
    if type(tokens) is array and tokens.typecode == "i":  # a record of the cache's own, looked up in each rollback
        return (tokens if most is None else tokens[:most]).tobytes()
    try:
        given = tokens if isinstance(tokens, np.ndarray) else memoryview(tokens)
    except TypeError:  # no buffer
        given = tokens
    try:
        raw = isinstance(given, memoryview) and given.itemsize == 1
        ids = np.frombuffer(given, _INT32) if raw else np.asarray(given)
    except (ValueError, BufferError) as error:  # rows of unequal length, gaps, an end inside a token
        raise InvalidArgument(f"these are no tokens: {error}") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidArgument(f"tokens must be a flat list of whole numbers, not {ids.dtype} {list(ids.shape)}")
    ids = ids[:most]
    if ids.size and ids.dtype != _INT32:
        least, greatest = int(ids.min()), int(ids.max())
        if not -(2**31) <= least <= greatest < 2**31:
            raise InvalidArgument(f"tokens are int32, found {least} .. {greatest}")
    return ids.astype(_INT32, copy=False).tobytes()
