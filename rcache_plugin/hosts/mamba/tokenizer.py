"""Byte-level BPE from a GGUF's vocabulary, by way of the package ``tokenizers`` (imported when one is made)."""

from __future__ import annotations

import codecs
import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...errors import InvalidArgument, ModelError, counted

_MODEL = "gpt2"
# Names of tokenizer.ggml.pre whose words are split as GPT-2 does it. "mpt" and "olmo" stand in converted GPT-NeoX
# vocabularies, which is what Mamba models use. Old files without the field have such a vocabulary too.
_GPT2_LIKE = frozenset(
    {"", "default", "gpt-2", "gpt2", "gpt-neox", "mpt", "olmo", "phi-2", "jais", "trillion"}
    | {"jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v2-code", "roberta-bpe"}
)
_FALCON = "falcon"
PRE_TOKENIZERS = tuple(sorted(_GPT2_LIKE - {""} | {_FALCON}))
"""Values of ``tokenizer.ggml.pre`` that are understood."""

# Token types of the format.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a vocabulary, str [256].

    Printable Latin-1 stands for itself; the other bytes take the code points from 256 on, in order.
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in itself else chr(next(others)) for byte in range(256)]


class Tokenizer:
    """Text to token ids and back.

    `fields`: metadata of the file, those under ``tokenizer.``. `n_vocab`: width of the model's logits; ids from the
    vocabulary's end up to there have no text. `where`: named in errors.

    Raises `ModelError`: no tokenizer in the file, another kind than byte-level BPE, an unknown pre-tokenizer, or a
    vocabulary that can't be; the message names the field.
    """

    n_vocab: int
    bos_id: int | None
    """Token that begins a text; None when the file names none."""
    eos_id: int | None
    """Token that ends a text."""
    eot_id: int | None
    """Token that ends a turn, when it is another one."""
    adds_bos: bool
    """Whether `encode` puts `bos_id` in front unless told otherwise."""
    adds_eos: bool
    """Whether `encode` puts `eos_id` behind unless told otherwise."""

    def __init__(self, fields: Mapping[str, Any], n_vocab: int, where: str) -> None:
        self._where = where
        self.n_vocab = n_vocab
        self._fields = fields
        kind = fields.get("tokenizer.ggml.model")
        if kind is None or kind in ("none", "no_vocab"):
            raise self._error("the file has no tokenizer (tokenizer.ggml.model); give token ids instead of text")
        if kind != _MODEL:
            raise self._error(f"tokenizer.ggml.model is {kind!r}, supported is {_MODEL!r} (byte-level BPE)")
        self._tokens = self._strings("tokenizer.ggml.tokens")
        if len(self._tokens) > n_vocab:
            raise self._error(f"tokenizer.ggml.tokens has {counted(len(self._tokens), 'token')}, the model {n_vocab}")
        types = fields.get("tokenizer.ggml.token_type")
        if types is None:
            types = np.full(len(self._tokens), _NORMAL)
        if not isinstance(types, np.ndarray) or len(types) != len(self._tokens):
            raise self._error("tokenizer.ggml.token_type does not go with tokenizer.ggml.tokens")
        self._types: list[int] = types.tolist()
        self.bos_id = self._id("bos_token_id")
        self.eos_id = self._id("eos_token_id")
        self.eot_id = self._id("eot_token_id")
        self.adds_bos = self._flag("add_bos_token")
        self.adds_eos = self._flag("add_eos_token")
        self._byte_of = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
        self._bpe = self._make_bpe()
        self._always = _splitter(self._literals(_USER_DEFINED))
        self._special = _splitter(self._literals(_USER_DEFINED, _CONTROL, _UNKNOWN))
        self._id_of_literal = {self._tokens[i]: i for i in self._literals(_CONTROL, _UNKNOWN, _USER_DEFINED).values()}
        have = set(self._tokens)
        self._bytes_missing = {byte for symbol, byte in self._byte_of.items() if symbol not in have}

    def _error(self, text: str) -> ModelError:
        return ModelError(f"{self._where}: {text}")

    def _strings(self, key: str) -> list[str]:
        value = self._fields.get(key)
        if not isinstance(value, list) or not value:
            raise self._error(f"{key} is missing or not a list of strings")
        return value

    def _id(self, name: str) -> int | None:
        value = self._fields.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < self.n_vocab:
            raise self._error(f"tokenizer.ggml.{name} is {value!r}, ids run from 0 to {self.n_vocab - 1}")
        return value

    def _flag(self, name: str) -> bool:
        value = self._fields.get(f"tokenizer.ggml.{name}", False)
        if not isinstance(value, bool):
            raise self._error(f"tokenizer.ggml.{name} is {value!r}, not a truth value")
        return value

    def _literals(self, *types: int) -> dict[str, int]:
        """Text -> id of the tokens of these types: they stand for their text as it is, not in byte symbols."""
        return {self._tokens[i]: i for i, kind in enumerate(self._types) if kind in types and self._tokens[i]}

    def _make_bpe(self) -> Any:
        lib = importlib.import_module("tokenizers")
        merges = []
        for i, merge in enumerate(self._strings("tokenizer.ggml.merges")):
            left, _, right = merge.partition(" ")
            if not left or not right or " " in right:
                raise self._error(f"tokenizer.ggml.merges[{i}] is {merge!r}, not two symbols")
            merges.append((left, right))
        vocab = {token: i for i, token in enumerate(self._tokens)}
        try:
            bpe = lib.Tokenizer(lib.models.BPE(vocab=vocab, merges=merges))
        except Exception as error:  # the library raises nothing narrower
            raise self._error(f"tokenizer.ggml.merges do not go with tokenizer.ggml.tokens: {error}") from error
        bpe.pre_tokenizer = self._make_pre_tokenizer(lib)
        return bpe

    def _make_pre_tokenizer(self, lib: Any) -> Any:
        name = self._fields.get("tokenizer.ggml.pre", "")
        words = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if name in _GPT2_LIKE:
            return words
        if name != _FALCON:
            raise self._error(f"tokenizer.ggml.pre is {name!r}; known are {', '.join(PRE_TOKENIZERS)}")
        split = lib.pre_tokenizers.Split
        return lib.pre_tokenizers.Sequence(
            [
                split(lib.Regex(r"[\p{P}$+<=>^~|`]+"), "isolated"),
                words,
                split(lib.Regex("[0-9]{3}"), "isolated"),
            ]
        )

    # text to ids

    def encode(
        self, text: str, add_bos: bool | None = None, *, add_eos: bool | None = None, special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        `add_bos`, `add_eos`: None does what the file says. `special`: whether the names of control tokens in the text,
        ``<|endoftext|>`` say, stand for these tokens; by default they are plain text, so that text of unknown origin
        can't give orders. Raises `InvalidArgument`: a token asked for that the file does not name, text that is not
        encodable as UTF-8, or that has a byte which the vocabulary lacks.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"the text is not encodable as UTF-8: {error}") from error
        missing = self._bytes_missing.intersection(data) if self._bytes_missing else None
        if missing:
            raise InvalidArgument(f"the vocabulary has no token for byte {min(missing):#04x} of the text")
        ids = self._end(add_bos, self.adds_bos, self.bos_id, "bos")
        splitter = self._special if special else self._always
        for i, piece in enumerate(splitter.split(text) if splitter is not None else [text]):
            if i % 2:
                ids.append(self._id_of_literal[piece])
            elif piece:
                ids += self._bpe.encode(piece, add_special_tokens=False).ids
        return ids + self._end(add_eos, self.adds_eos, self.eos_id, "eos")

    @staticmethod
    def _end(asked: bool | None, default: bool, token: int | None, name: str) -> list[int]:
        if not (default if asked is None else asked):
            return []
        if token is None:
            raise InvalidArgument(f"the file names no {name} token")
        return [token]

    # ids to text

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token stands for, maybe a part of a character. Control tokens: empty, or their name with
        `special`. Raises `InvalidArgument` for an id that is none."""
        if not 0 <= token < self.n_vocab:
            raise InvalidArgument(f"token {token} is not in the vocabulary, ids run from 0 to {self.n_vocab - 1}")
        if token >= len(self._tokens) or self._types[token] == _UNUSED:
            return b""
        text, kind = self._tokens[token], self._types[token]
        if kind in (_CONTROL, _UNKNOWN):
            return text.encode() if special else b""
        if kind == _USER_DEFINED:
            return text.encode()
        # a character that is no byte symbol is itself, as in vocabularies with tokens added by hand
        byte_of = self._byte_of
        return b"".join(bytes((byte_of[char],)) if char in byte_of else char.encode() for char in text)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. `special`: as `piece`."""
        return b"".join(self.piece(int(token), special=special) for token in ids).decode("utf-8", "replace")

    def stream_decoder(self, *, special: bool = False) -> StreamDecoder:
        """For text that appears token by token."""
        return StreamDecoder(self, special)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens after which generation ends: `eos_id` and `eot_id`, those that there are."""
        return frozenset(token for token in (self.eos_id, self.eot_id) if token is not None)


class StreamDecoder:
    """Turns ids into text one by one; the bytes of a character that is not complete wait for the rest."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_special = special

    def push(self, token: int) -> str:
        """The text that is complete with `token`, often empty. Raises `InvalidArgument` for an id that is none."""
        return self._utf8.decode(self._tokenizer.piece(token, special=self._is_special))

    def finish(self) -> str:
        """What still waits: U+FFFD for an incomplete character, else nothing. The decoder can be used anew then."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def _splitter(literals: Mapping[str, int]) -> re.Pattern[str] | None:
    """Splits text so that every second piece is one of `literals`, the longest that fits."""
    if not literals:
        return None
    return re.compile("(" + "|".join(re.escape(text) for text in sorted(literals, key=len, reverse=True)) + ")")
