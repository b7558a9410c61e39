"""Proves, with random conversations on the bundled model, that the greedy text is always that of a fresh Llama.

RCACHE_CONVERSATIONS conversations (200, and a quarter as many with stock `llama_cpp.Llama` under ``exec``), seeded by
number; ``make test-conversations`` runs 5,000. All share a few Llamas, so that each begins with what others left. To
repeat one: ``python tests/hosts/llama/test_llama_conversations.py ours MODEL FIRST COUNT``, with those before it if it
needs them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import children
import pytest
from scenarios import QUIET, Interrupted

CONVERSATIONS = int(os.environ.get("RCACHE_CONVERSATIONS", "200"))
TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep. And God said, Let there be light: and there was light. Blessed are the poor in spirit: "
    "for theirs is the kingdom of heaven. And the LORD spake unto Moses, saying, Speak unto the children of Israel. "
)
KINDS = {"extend": 6, "edit": 6, "again": 4, "switch": 4, "shorter": 2, "reset": 2, "save": 2, "load": 2, "new": 2,
         "break": 2, "interrupt": 1, "abort": 2}  # fmt: skip
OPTIONS: Sequence[dict[str, Any]] = (
    {},
    {"checkpoint_interval": 16},
    {"checkpoint_cells": 1},
    {"checkpoint_cells": 2, "checkpoint_interval": 8},
    {"checkpoint_cells": 5, "checkpoint_interval": 24, "max_replay": 6},
)


class Partner:
    """A Llama under test, with the conversations it has had."""

    def __init__(self, llm: Any, cache: Any) -> None:
        self.llm = llm
        self.cache = cache
        self.histories: list[list[int]] = []
        self.saved: list[tuple[list[int], Any]] = []


class Conversations:
    """Some Llamas that hold conversations, and one without checkpoints that is reset before each prompt."""

    def __init__(self, how: str, path: str) -> None:
        import rcache_plugin.hosts.llama as host

        kind: Any = host.Llama if how == "ours" else None
        import llama_cpp

        self.lib = llama_cpp
        self.n_ties = 0
        self.stock = how == "exec"
        arguments = {"n_ctx": 256, "n_batch": 48, "n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1}
        with host.context_options(checkpoint_cells=0):
            self.plain = llama_cpp.Llama(path, verbose=False, **{**arguments, "n_batch": 256, "n_ubatch": 256})
        self.partners = []
        for options in OPTIONS:
            if how == "ours":
                llm = kind(path, verbose=False, **arguments, **options)
                self.partners.append(Partner(llm, llm.rcache))
            else:
                with host.context_options(**options) as made:
                    self.partners.append(Partner(llama_cpp.Llama(path, verbose=False, **arguments), made[-1]))
        self.words = self.plain.tokenize(TEXT.encode(), add_bos=False)
        self.bos = self.plain.token_bos()
        self.fresh_texts: dict[tuple[int, ...], list[int]] = {}
        self._callbacks: dict[int, Any] = {}  # of each Llama: it holds on to the address

    def piece(self, rng: random.Random) -> list[int]:
        """Some tokens, the same ones often."""
        first = rng.choice((0, 0, 10, 40, rng.randrange(len(self.words) - 40)))
        return self.words[first : first + rng.choice((1, 2, 5, 9, 14, 34))]

    def fresh(self, prompt: Sequence[int], n: int) -> list[int]:
        """The greedy answer of a Llama that has read nothing else, int [n]."""
        known = self.fresh_texts.get(tuple(prompt), [])
        if len(known) < n:
            self.plain.reset()
            self.fresh_texts[tuple(prompt)] = known = answer(self.plain, prompt, n)
        return known[:n]

    def is_tie(self, prompt: Sequence[int], found: Sequence[int], wanted: Sequence[int]) -> bool:
        """Whether two answers part at tokens that rounding decides between: stock's own choice there depends on how the
        prompt is split. Their logits differ by less than 1e-4 of the largest then."""
        same = next(i for i, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other)
        self.plain.reset()
        self.plain.eval([*prompt, *wanted[:same]])
        row = self.lib.llama_get_logits_ith(self.plain.ctx, -1)
        gap = abs(row[wanted[same]] - row[found[same]])
        return bool(gap < 1e-4 * max(row[i] for i in range(self.plain.n_vocab())))

    def hold(self, seed: int) -> None:
        """One conversation. Raises `AssertionError` with the seed and what was done."""
        rng = random.Random(seed)
        partner = self.partners[seed % len(self.partners)]
        history = [self.bos, *self.piece(rng)]
        done: list[str] = []
        for _ in range(rng.randint(2, 5)):
            (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
            done.append(kind)
            n = rng.choice((1, 2, 4))
            history = self.change(rng, partner, kind, history)[:100]
            found = answer(partner.llm, history, n)
            wanted = self.fresh(history, n)
            if found != wanted:
                assert self.is_tie(history, found, wanted), (seed, done, history, found, wanted)
                self.n_ties += 1
            assert partner.cache.seq_pos_max(0) == partner.llm.n_tokens - 1, (seed, done)
            if rng.random() < 0.7:
                history = [*history, *found]
        partner.cache.table.check()
        partner.histories = [*partner.histories[-5:], history]

    def change(self, rng: random.Random, partner: Partner, kind: str, history: list[int]) -> list[int]:
        """What happens before the next prompt, and that prompt."""
        llm = partner.llm
        if kind == "extend":
            return history + self.piece(rng)
        if kind == "edit":
            return history[: rng.randint(1, len(history))] + self.piece(rng)
        if kind == "shorter":
            return history[: rng.randint(1, len(history))]
        if kind == "switch" and partner.histories:
            return list(rng.choice(partner.histories))
        if kind == "new":
            return [self.bos, *self.piece(rng), *self.piece(rng)]
        if kind == "reset":
            llm.reset()
        elif kind == "save":
            partner.saved = [*partner.saved[-3:], (list(llm._input_ids), llm.save_state())]
        elif kind == "load" and partner.saved:
            ids, state = rng.choice(partner.saved)
            llm.load_state(state)
            return [int(each) for each in ids[: rng.randint(1, max(len(ids), 1))]] or history
        elif kind in ("break", "interrupt", "abort"):
            self.fail(rng, partner, kind, history + self.piece(rng))
        return history

    def fail(self, rng: random.Random, partner: Partner, kind: str, prompt: list[int]) -> None:
        """A generation that ends in the middle of it."""
        llm, n = partner.llm, rng.randint(1, 4)
        if kind == "break":
            answer(llm, prompt, n)
            return
        context = llm._ctx
        if kind == "interrupt":
            llm._ctx = Interrupted(context, n)
        else:
            self.abort_after(llm, rng.randrange(1500))
        with contextlib.suppress(KeyboardInterrupt, RuntimeError):
            answer(llm, prompt, 3)
        llm._ctx = context
        self.abort_after(llm, None)
        if self.stock:
            llm._requires_eval = True  # it takes the logits for those of the last token that it has counted

    def abort_after(self, llm: Any, n_nodes: int | None) -> None:
        """Decodes end after so many nodes of their graphs; None: no more."""
        asked = [0]

        def stop(_: Any) -> bool:
            asked[0] += 1
            return n_nodes is not None and asked[0] > n_nodes

        callback = self.lib.ggml_abort_callback(stop)
        self.lib.llama_set_abort_callback(llm.ctx, callback, ctypes.c_void_p(0))
        self._callbacks[id(llm)] = callback


def answer(llm: Any, prompt: Sequence[int], n: int) -> list[int]:
    """The next `n` tokens, greedily."""
    steps = llm.generate(list(prompt), temp=0.0)
    with contextlib.closing(steps):
        return [next(steps) for _ in range(n)]


def main(how: str, path: str, first: str, count: str) -> None:
    """Holds the conversations, and prints what was read."""
    conversations = Conversations(how, path)
    for seed in range(int(first), int(first) + int(count)):
        conversations.hold(seed)
    stats = [partner.cache.stats() for partner in conversations.partners]
    names = ("asked", "reused", "replayed", "read")
    totals = [*(f"tokens_{name}" for name in names), "checkpoints_used", "checkpoints_evicted"]
    counts = (f"{name} {sum(getattr(each, name) for each in stats)}" for name in totals)
    print("conversations", count, "ties", conversations.n_ties, *counts)


@pytest.mark.parametrize(("how", "n_conversations"), [("ours", CONVERSATIONS), ("exec", CONVERSATIONS // 4)])
def test_conversations(how: str, n_conversations: int) -> None:
    from rcache_plugin.hosts.mamba import bundled_model

    command = [sys.executable, *(["-m", "rcache_plugin", "exec"] if how == "exec" else []), __file__]
    arguments = [how, str(bundled_model()), "0", str(n_conversations)]
    done = children.run([*command, *arguments], env=QUIET, timeout=max(300, 5 * n_conversations))
    words = done.stdout.split()
    counts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert counts["conversations"] == n_conversations and counts["checkpoints_used"] > n_conversations
    assert how == "exec" or counts["tokens_reused"] > counts["tokens_asked"] / 3
    assert counts["ties"] <= n_conversations / 1000 + 1


if __name__ == "__main__":
    main(*sys.argv[1:])
