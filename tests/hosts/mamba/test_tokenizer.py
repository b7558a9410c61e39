"""Proves that the tokenizer agrees with a plain BPE written here, and that wrong vocabularies are refused."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_mamba import byte_vocab

from rcache_plugin.errors import InvalidArgument, ModelError
from rcache_plugin.hosts.mamba.tokenizer import PRE_TOKENIZERS, Tokenizer

FIELDS = byte_vocab(300)
FIELDS["tokenizer.ggml.token_type"] = np.array(FIELDS["tokenizer.ggml.token_type"], np.int32)
TOKENS: list[str] = FIELDS["tokenizer.ggml.tokens"]
MERGES: list[str] = FIELDS["tokenizer.ggml.merges"]
END, TURN = TOKENS.index("<|endoftext|>"), TOKENS.index("<|end|>")
FOUR, TWO = TOKENS.index("    "), TOKENS.index("  ")


def make(n_vocab: int = 300, without: tuple[str, ...] = (), **changes: Any) -> Tokenizer:
    fields = FIELDS | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return Tokenizer({k: v for k, v in fields.items() if k.rsplit(".", 1)[1] not in without}, n_vocab, "some.gguf")


TOKENIZER = make()
SYMBOL = {byte: TOKENS[byte] for byte in range(256)}


def plain_bpe(word: str) -> list[int]:
    """The merge of lowest rank first, wherever it stands, until none is left."""
    parts = [SYMBOL[byte] for byte in word.encode()]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
        if not pairs:
            return [TOKENS.index(part) for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


# GPT-2's words for ASCII text
WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


@given(st.text(st.sampled_from("the lr123 \n\t'sx!?-"), max_size=40).filter(lambda text: "  " not in text))
def test_words_are_split_as_gpt2_does_and_merged_by_rank(text: str) -> None:
    assert TOKENIZER.encode(text) == [token for word in WORDS.findall(text) for token in plain_bpe(word)]


@given(st.text(max_size=60))
def test_decode_gives_back_any_encoded_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert TOKENIZER.decode(TOKENIZER.encode(text, special=True), special=True) == text


@given(st.text(max_size=30), st.booleans())
def test_streaming_gives_the_same_text(text: str, special: bool) -> None:
    ids = TOKENIZER.encode(text)
    decoder = TOKENIZER.stream_decoder()
    assert "".join(map(decoder.push, ids)) + decoder.finish() == text


@given(st.lists(st.integers(0, 299), max_size=30), st.booleans())
def test_any_ids_give_the_same_text_streamed(ids: list[int], special: bool) -> None:
    decoder = TOKENIZER.stream_decoder(special=special)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == TOKENIZER.decode(ids, special=special)


def test_incomplete_characters_wait() -> None:
    ids = TOKENIZER.encode("a€😀")  # no merges for these: a token a byte
    assert len(ids) == 8
    decoder = TOKENIZER.stream_decoder()
    assert [decoder.push(token) for token in ids] == ["a", "", "", "€", "", "", "", "😀"]
    assert decoder.finish() == ""
    assert [decoder.push(token) for token in ids[1:3]] == ["", ""]
    assert decoder.finish() == "\ufffd"
    assert decoder.push(ids[0]) == "a"


def test_a_merged_two_byte_character_is_one_token() -> None:
    assert len(TOKENIZER.encode("é")) == 1 and TOKENIZER.decode(TOKENIZER.encode("é")) == "é"


def test_control_tokens_in_text_are_text_unless_asked_for() -> None:
    text = "a<|endoftext|>b<|end|>"
    ids = TOKENIZER.encode(text)
    assert END not in ids and TURN not in ids and TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode(text, special=True) == [97, END, 98, TURN]
    assert TOKENIZER.encode("<|endoftext|>", special=True) == [END]


def test_control_tokens_have_no_text_unless_asked_for() -> None:
    assert TOKENIZER.decode([97, END, 98]) == "ab"
    assert TOKENIZER.decode([97, END, 98], special=True) == "a<|endoftext|>b"
    assert TOKENIZER.piece(END) == b"" and TOKENIZER.piece(END, special=True) == b"<|endoftext|>"


def test_tokens_defined_by_the_user_always_count_the_longest_first() -> None:
    assert TOKENIZER.encode("      a") == [FOUR, TWO, 97]
    assert TOKENIZER.decode([FOUR, TWO, 97]) == "      a"


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("asked", [True, False, None])
def test_begin_and_end(flag: bool | None, asked: bool | None) -> None:
    changes = {} if flag is None else {"add_bos_token": flag, "add_eos_token": flag}
    tokenizer = make(bos_token_id=TURN, **changes)
    wanted = bool(flag) if asked is None else asked
    assert tokenizer.adds_bos is bool(flag) and tokenizer.adds_eos is bool(flag)
    assert tokenizer.encode("a", asked, add_eos=asked) == ([TURN, 97, END] if wanted else [97])
    assert tokenizer.encode("", asked, add_eos=False) == ([TURN] if wanted else [])


def test_an_end_that_the_file_does_not_name() -> None:
    tokenizer = make(without=("bos_token_id", "eos_token_id", "eot_token_id"))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eot_id) == (None, None, None)
    assert tokenizer.stop_ids == frozenset()
    with pytest.raises(InvalidArgument, match="bos"):
        tokenizer.encode("a", True)
    with pytest.raises(InvalidArgument, match="eos"):
        tokenizer.encode("a", add_eos=True)


def test_ids_of_the_file() -> None:
    assert (TOKENIZER.n_vocab, TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.eot_id) == (300, END, END, TURN)
    assert TOKENIZER.stop_ids == {END, TURN}


def test_ids_without_text() -> None:
    larger = make(n_vocab=320)
    assert larger.decode([299, 310, 97]) == "a"  # an unused one, one behind the vocabulary
    for token in (-1, 320):
        with pytest.raises(InvalidArgument, match=f"token {token} .* 0 to 319"):
            larger.decode([token])


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_known_pre_tokenizer_keeps_the_text(pre: str) -> None:
    tokenizer = make(pre=pre)
    text = "It's 12345 things, isn't it?\n\n  \tñ $x^2 + 'quoted' — ١٢٣"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_falcon_splits_numbers_and_punctuation() -> None:
    """Numbers in threes and punctuation by itself: the merges 1 2 and 12 3 meet other neighbours."""
    falcon, gpt2 = make(pre="falcon"), make(pre="gpt-2")
    merged = TOKENS.index("123")
    assert falcon.encode("123123") == [merged, merged] == gpt2.encode("123123")
    assert gpt2.encode("4123") == [ord("4"), merged]
    assert falcon.encode("4123") == [ord("4"), TOKENS.index("12"), ord("3")]
    he = TOKENS.index("he")
    space = TOKENS.index(SYMBOL[0x20])
    assert gpt2.encode(" !he") == [space, ord("!"), he] and falcon.encode(" !he") == [space, ord("!"), he]


def test_without_a_name_words_are_split_as_gpt2_does() -> None:
    assert make(without=("pre",)).encode("4123 the") == TOKENIZER.encode("4123 the")


BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({"without": ("model",)}, "no tokenizer"),
    "none": ({"model": "none"}, "no tokenizer"),
    "another kind": ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
    "unknown pre": ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'; known are .*gpt-2"),
    "pre not text": ({"pre": 7}, "tokenizer.ggml.pre is 7"),
    "no tokens": ({"without": ("tokens",)}, "tokenizer.ggml.tokens"),
    "tokens not text": ({"tokens": np.arange(300)}, "tokenizer.ggml.tokens"),
    "more tokens than logits": ({"n_vocab": 299}, "has 300 tokens, the model 299"),
    "types of another length": ({"token_type": np.ones(5, np.int32)}, "tokenizer.ggml.token_type"),
    "types not numbers": ({"token_type": ["a"] * 300}, "tokenizer.ggml.token_type"),
    "no merges": ({"without": ("merges",)}, "tokenizer.ggml.merges"),
    "merge of one": ({"merges": ["ab"]}, r"merges\[0\] is 'ab'"),
    "merge of three": ({"merges": ["h e", "a b c"]}, r"merges\[1\] is 'a b c'"),
    "merge to nothing known": ({"merges": ["x y"]}, "tokenizer.ggml.merges do not go with"),
    "bos outside": ({"bos_token_id": 300}, "tokenizer.ggml.bos_token_id is 300"),
    "eos not a number": ({"eos_token_id": "x"}, "tokenizer.ggml.eos_token_id is 'x'"),
    "flag not a truth value": ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1"),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_a_vocabulary_that_cannot_be_is_refused_by_name(case: str) -> None:
    options, text = BAD_FIELDS[case]
    with pytest.raises(ModelError, match=f"some.gguf: .*{text}"):
        make(**options)


def test_types_may_be_missing() -> None:
    tokenizer = make(without=("token_type",))
    assert tokenizer.decode(tokenizer.encode("the <|end|>")) == "the <|end|>"


def test_bytes_that_the_vocabulary_lacks() -> None:
    tokens = list(TOKENS)
    tokens[0xE2] = "[gone]"
    tokenizer = make(tokens=tokens)
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    with pytest.raises(InvalidArgument, match="byte 0xe2"):
        tokenizer.encode("5 €")


def test_text_that_is_no_unicode() -> None:
    with pytest.raises(InvalidArgument, match="UTF-8"):
        TOKENIZER.encode("a\ud800")
