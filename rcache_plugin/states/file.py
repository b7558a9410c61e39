"""State files of our own: the bytes of llama.cpp's format between a header and a checksum.

Needs neither ggml nor cffi. A file is::

    8 bytes   b"RCACHE\\0\\1", the last byte being the version
    u32       length of the header
    header    JSON in UTF-8 without spaces, keys in order: see `Header`; keys that a reader does not know are ignored
    payload   what `image.write_state` writes
    states    of checkpoints, one after the other, each as `image.write_state` writes that of one sequence
    32 bytes  sha256 of everything before

Numbers are little endian. Equal states of equal models give equal files. A file appears under its name when it is
complete and on the disk, or not at all (`Saving`).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO

from ..cells.spec import WHICH, CacheSpec
from ..cells.ubatch import SEQ_ANY
from ..errors import InvalidArgument, StateError, counted
from .atomic import AtomicFile

MAGIC = b"RCACHE\0"
VERSION = 1
_PREFIX = struct.Struct("<7sBI")
_DIGEST_BYTES = 32
_MOST_HEADER_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 20
_TOKEN_MAX = 2**31 - 1
_ID_MAX = 2**31 - 1

Tokens = Mapping[int, Sequence[int]]
"""Token ids by sequence."""


@dataclass(frozen=True)
class Header:
    """What stands before the payload."""

    spec: Mapping[str, Any]
    """`spec_fields` of the cache that was saved."""
    seq_id: int
    """The sequence that was saved; `SEQ_ANY`: all."""
    payload_bytes: int
    tokens: Mapping[int, tuple[int, ...]]
    """Token ids that the state of a sequence was computed from, as the caller gave them."""
    fingerprint: str = ""
    """sha256 of `spec`, in hexadecimal."""
    checkpoints: tuple[tuple[int, ...], ...] = ()
    """Token ids of each checkpoint whose state follows the payload, the most useful first."""
    checkpoint_bytes: int = 0
    """Bytes of each of these states."""

    @property
    def following_bytes(self) -> int:
        """Bytes between the payload and the checksum."""
        return len(self.checkpoints) * self.checkpoint_bytes

    def to_bytes(self) -> bytes:
        """Prefix and header as they stand in the file."""
        fields = {
            "fingerprint": fingerprint(self.spec),
            "payload_bytes": self.payload_bytes,
            "seq_id": self.seq_id,
            "spec": self.spec,
            "tokens": {str(seq_id): list(ids) for seq_id, ids in sorted(self.tokens.items())},
        }
        if self.checkpoints:
            fields["checkpoints"] = [list(ids) for ids in self.checkpoints]
            fields["checkpoint_bytes"] = self.checkpoint_bytes
        text = _canonical(fields)
        if len(text) > _MOST_HEADER_BYTES:
            raise InvalidArgument(f"the header would have {len(text)} bytes, at most {_MOST_HEADER_BYTES} are allowed")
        return _PREFIX.pack(MAGIC, VERSION, len(text)) + text


def spec_fields(spec: CacheSpec) -> dict[str, Any]:
    """What has to be equal for a state to fit, by name."""
    fields: dict[str, Any] = {"n_layer": spec.n_layer, "type_r": spec.type_r.name, "type_s": spec.type_s.name}
    for which in WHICH:
        fields[f"n_embd_{which}"] = [spec.n_embd(which, il) for il in range(spec.n_layer)]
    return fields


def spec_of(header: Header) -> CacheSpec:
    """The spec of the cache that was saved. Raises `StateError`."""
    try:
        fields = header.spec
        rows = [fields[f"n_embd_{which}"] for which in WHICH]
        return CacheSpec.make(rows[0], rows[1], fields["type_r"], fields["type_s"], rows[2])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"spec: it is none: {type(error).__name__}: {error}") from error


def fingerprint(fields: Mapping[str, Any]) -> str:
    """sha256 of `spec_fields`, in hexadecimal."""
    return hashlib.sha256(_canonical(fields)).hexdigest()


def checked_tokens(
    tokens: Tokens | Sequence[int] | None, seq_id: int, saved: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """`tokens` by sequence, which is one of `saved`; of one sequence `seq_id` its tokens will do.

    Raises `InvalidArgument`.
    """
    if tokens is None:
        return {}
    if not isinstance(tokens, Mapping):
        if seq_id == SEQ_ANY:
            raise InvalidArgument("tokens of a whole cache are given by sequence, {seq_id: [token, ...]}")
        tokens = {seq_id: tokens}
    checked = {}
    for seq, ids in tokens.items():
        if seq not in saved:
            raise InvalidArgument(f"tokens are given for sequence {seq}, which is not saved or has no state")
        checked[int(seq)] = tuple(int(token) for token in ids)
        if not all(0 <= token <= _TOKEN_MAX for token in checked[seq]):
            raise InvalidArgument(f"tokens of sequence {seq}: not all are from 0 to {_TOKEN_MAX}")
    return checked


def _canonical(what: Any) -> bytes:
    return json.dumps(what, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


# writing


class Saving:
    """A file being saved, for use in a ``with``; it takes the bytes of the payload and of the checkpoints' states.

    When the block ends, the checksum is added and the file takes its name; if the block raises, the older file stays
    (see `AtomicFile`). Raises `OSError`.
    """

    borrows = True  # does not keep what `write` is given

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        self._path = path
        self._header = header
        self._hash = hashlib.sha256()

    def __enter__(self) -> Saving:
        self._file = AtomicFile(self._path)
        try:
            self.write(self._header.to_bytes())
        except BaseException:
            self._file.discard()
            raise
        return self

    def write(self, data: Any) -> int:
        """Takes the next bytes."""
        self._hash.update(data)
        return self._file.write(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._file.discard()
            return
        try:
            self._file.write(self._hash.digest())
        except BaseException:
            self._file.discard()
            raise
        self._file.commit()


# reading


def read_header(file: BinaryIO) -> Header:
    """The header of `file`, which stands at its beginning; the file stands at the payload then.

    Reads no more than the file holds. Raises `StateError` naming the field.
    """
    start = file.read(_PREFIX.size)
    if len(start) < _PREFIX.size or start[: len(MAGIC)] != MAGIC:
        raise StateError(f"magic: expected {MAGIC!r}, found {start[: len(MAGIC)]!r}")
    _, version, n_bytes = _PREFIX.unpack(start)
    if version != VERSION:
        raise StateError(f"version: expected {VERSION}, found {version}")
    left = _size_of(file) - _PREFIX.size - _DIGEST_BYTES
    if n_bytes > min(left, _MOST_HEADER_BYTES):
        raise StateError(f"header length: {n_bytes}, but the file has {counted(max(left, 0), 'byte')} left for it")
    text = file.read(n_bytes)
    try:
        header = _parsed(json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise StateError(f"header: it can't be read: {type(error).__name__}: {error}") from error
    left -= n_bytes
    told = header.payload_bytes + header.following_bytes
    if told != left:
        raise StateError(f"length: the header tells of a payload of {counted(told, 'byte')}, the file has {left}")
    return header


def _parsed(fields: Any) -> Header:
    spec = dict(fields["spec"])
    header = Header(
        spec=spec,
        seq_id=_integer(fields, "seq_id", SEQ_ANY),
        payload_bytes=_integer(fields, "payload_bytes", 0, 1 << 62),
        tokens={_key(key): tuple(map(_token, ids)) for key, ids in fields.get("tokens", {}).items()},
        fingerprint=fingerprint(spec),
        checkpoints=tuple(tuple(map(_token, ids)) for ids in fields.get("checkpoints", ())),
        checkpoint_bytes=_integer(fields, "checkpoint_bytes", 1, 1 << 62) if fields.get("checkpoints") else 0,
    )
    if fields["fingerprint"] != header.fingerprint:
        raise ValueError(f"fingerprint is {fields['fingerprint']}, but that of the spec is {header.fingerprint}")
    if header.seq_id != SEQ_ANY and not header.tokens.keys() <= {header.seq_id}:
        raise ValueError(f"tokens are given for other sequences than {header.seq_id}")
    return header


def _integer(fields: Any, name: str, least: int, most: int = _ID_MAX) -> int:
    value = fields[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}")
    return value


def _key(text: str) -> int:
    if not text.isascii() or not text.isdigit() or str(int(text)) != text or int(text) > _ID_MAX:
        raise ValueError(f"tokens are given for {text!r}")
    return int(text)


def _token(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _TOKEN_MAX:
        raise ValueError(f"a token is {value!r}")
    return value


def read_payload(
    file: BinaryIO, header: Header, most_bytes: int, most_checkpoints: int = 0, most_checkpoint_bytes: int = 0
) -> tuple[bytearray, list[memoryview]]:
    """The payload of `file`, which `read_header` has read, and the states of its first checkpoints; checksum compared.

    `most_bytes`: of the largest payload that can be of use; no more is allocated. Checkpoints beyond
    `most_checkpoints`, and states larger than `most_checkpoint_bytes`, are skipped. Raises `StateError`.
    """
    if header.payload_bytes > most_bytes:
        raise StateError(f"payload: expected at most {counted(most_bytes, 'byte')}, found {header.payload_bytes}")
    n_checkpoints = min(len(header.checkpoints), most_checkpoints)
    if header.checkpoint_bytes > most_checkpoint_bytes:
        n_checkpoints = 0
    wanted = n_checkpoints * header.checkpoint_bytes
    file.seek(0)
    digest = hashlib.sha256()
    _hash_part(file, digest, _size_of(file) - _DIGEST_BYTES - header.payload_bytes - header.following_bytes)
    payload, states = bytearray(header.payload_bytes), bytearray(wanted)
    for view in (memoryview(payload), memoryview(states)):
        at = 0
        while at < len(view):
            n_bytes = _read_into(file, view[at : at + _CHUNK_BYTES])
            digest.update(view[at : at + n_bytes])
            at += n_bytes
    _hash_part(file, digest, header.following_bytes - wanted)
    _compare(file, digest)
    size = header.checkpoint_bytes
    return payload, [memoryview(states)[i * size : (i + 1) * size] for i in range(n_checkpoints)]


def check_sum(file: BinaryIO) -> None:
    """Reads `file` from its beginning, in pieces. Raises `StateError` when it does not have the checksum it tells."""
    file.seek(0)
    digest = hashlib.sha256()
    _hash_part(file, digest, _size_of(file) - _DIGEST_BYTES)
    _compare(file, digest)


def check_spec(header: Header, spec: CacheSpec) -> None:
    """Raises `StateError` naming the fields in which the file's model differs from `spec`."""
    expected = spec_fields(spec)
    if header.spec != expected:
        names = sorted(expected.keys() | header.spec.keys())
        differing = [name for name in names if header.spec.get(name) != expected.get(name)]
        told = (_difference(name, expected.get(name), header.spec.get(name)) for name in differing)
        raise StateError(f"the state is of another model: {'; '.join(told)}")


def _difference(name: str, expected: Any, found: Any) -> str:
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        il = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
        return f"{name} of layer {il}: expected {expected[il]}, found {found[il]!r:.40}"
    if isinstance(expected, list) and isinstance(found, list):
        return f"{name}: expected {counted(len(expected), 'layer')}, found {len(found)}"
    return f"{name}: expected {expected!r:.40}, found {found!r:.40}"


def _size_of(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _read_into(file: BinaryIO, view: memoryview) -> int:
    n_bytes: int = file.readinto(view)  # type: ignore[attr-defined]
    if not n_bytes:
        raise StateError("length: the file ended while it was read")
    return n_bytes


def _hash_part(file: BinaryIO, digest: Any, n_bytes: int) -> None:
    buffer = memoryview(bytearray(min(max(n_bytes, 0), _CHUNK_BYTES)))
    while n_bytes > 0:
        n_read = _read_into(file, buffer[: min(n_bytes, len(buffer))])
        digest.update(buffer[:n_read])
        n_bytes -= n_read


def _compare(file: BinaryIO, digest: Any) -> None:
    expected = file.read(_DIGEST_BYTES)
    if expected != digest.digest():
        raise StateError(f"sha256: the file tells of {expected.hex()}, its content has {digest.hexdigest()}")
