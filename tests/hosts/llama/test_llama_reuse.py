"""Proves that a prompt continues from its longest known prefix, in stock `llama_cpp.Llama` under ``exec`` and in ours.

Every text is compared with that of a `Llama` without checkpoints that is reset before each prompt ("fresh"), in one
process. How much was read is what the cache counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import llama_models
import pytest
from scenarios import Interrupted, Scenarios, path_of

STOCK = ("exec bundled", "exec granite-hybrid")
OURS = ("ours bundled", "ours granite-hybrid", "ours qwen35")
LINES = (
    "In the beginning God created the heaven and the earth.",
    "And the LORD spake unto Moses, saying, Speak unto the children of Israel.",
    "Blessed are the poor in spirit: for theirs is the kingdom of heaven.",
    "Now these are the names of the kings that came up against the city.",
)


class Conversation:
    """Makes Llamas, speaks to them and counts."""

    def __init__(self, group: str, path: str) -> None:
        import rcache_plugin.hosts.llama as host

        how, self.model = group.split()
        self.host = host
        self.pure = self.model == "bundled"
        self.path = path
        self.cache: Any = None
        if how == "ours":
            self.Llama = host.Llama
        import llama_cpp

        self.lib = llama_cpp
        if how == "exec":
            assert host.installed()  # before this file was read
            self.Llama = llama_cpp.Llama
        self.plain = self._make({"checkpoint_cells": 0}, llama_cpp.Llama)
        self._texts: dict[tuple[tuple[int, ...], int], str] = {}
        self._callbacks: list[Any] = []  # llama.cpp holds on to their addresses

    def _make(self, options: dict[str, Any], kind: Any, **arguments: Any) -> Any:
        given = {"n_ctx": 1024, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **arguments}
        if kind is not self.lib.Llama:
            llm = kind(self.path, **given, **options)
            self.cache = llm.rcache
        else:
            with self.host.context_options(**options) as made:
                llm = kind(self.path, **given)
            (self.cache,) = made
        return llm

    def new(self, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
        """A Llama under test; its cache is `cache` now."""
        return self._make(options or {}, self.Llama, **arguments)

    def ids(self, *texts: str) -> list[int]:
        """Tokens of texts, one after the other."""
        return [
            token for i, text in enumerate(texts) for token in self.plain.tokenize(text.encode(), add_bos=i == 0)
        ]

    def say(self, llm: Any, prompt: Sequence[int], n: int = 12) -> tuple[str, int, int]:
        """The greedy answer, and how many tokens were read and replayed for the prompt. It is that of a fresh Llama."""
        before = self.cache.stats()
        text, answered = self.answer(llm, prompt, n)
        after = self.cache.stats()
        assert text == self.fresh(prompt, n), (text, self.fresh(prompt, n))
        assert self.cache.seq_pos_max(0) == llm.n_tokens - 1
        read = after.tokens_read - before.tokens_read - max(answered - 1, 0)
        return text, read, after.tokens_replayed - before.tokens_replayed

    def answer(self, llm: Any, prompt: Sequence[int], n: int = 12) -> tuple[str, int]:
        """Text and number of its tokens."""
        tokens = []
        for token in llm.generate(list(prompt), temp=0.0):
            tokens.append(token)
            if len(tokens) == n:
                break
        return self.plain.detokenize(tokens).decode(errors="replace"), len(tokens)

    def fresh(self, prompt: Sequence[int], n: int = 12) -> str:
        """The greedy answer of a Llama that has read nothing else."""
        key = tuple(prompt), n
        if key not in self._texts:
            self.plain.reset()
            self._texts[key], _ = self.answer(self.plain, prompt, n)
        return self._texts[key]

    @contextlib.contextmanager
    def aborting(self, llm: Any, after: int) -> Iterator[None]:
        """Inside, decodes are aborted after so many nodes."""
        asked = [0]

        def stop(_: Any) -> bool:
            asked[0] += 1
            return asked[0] > after

        def set_to(function: Any) -> None:
            self._callbacks.append(self.lib.ggml_abort_callback(function))
            self.lib.llama_set_abort_callback(llm.ctx, self._callbacks[-1], ctypes.c_void_p(0))

        set_to(stop)
        try:
            yield
        finally:
            set_to(lambda _: False)


scenario = Scenarios(path_of(__file__), (*STOCK, *OURS), Conversation)


# --- turns -----------------------------------------------------------------------------------------------------------


@scenario()
def a_second_turn_reads_what_is_new(conversation: Conversation) -> None:
    llm = conversation.new()
    history = conversation.ids(LINES[0] * 3)
    for line in (*LINES[1:], LINES[0]):
        text, read, replayed = conversation.say(llm, history)
        history = history + conversation.ids(text)[1:] + conversation.ids("", line)[1:]
    assert replayed <= 13
    assert read <= len(history) - len(conversation.ids(LINES[0] * 3)) and read < 80


@scenario()
def an_edited_prompt_reads_from_where_it_differs(conversation: Conversation) -> None:
    llm = conversation.new({"checkpoint_interval": 64}, n_batch=64)
    head = conversation.ids(LINES[0] * 6)
    conversation.say(llm, [*head, *conversation.ids("", LINES[1])])
    edited = [*head, *conversation.ids("", LINES[2])]
    _, read, replayed = conversation.say(llm, edited)
    assert read + replayed < 64 + len(edited) - len(head) + 2, (read, replayed)


@scenario()
def the_same_prompt_again_gives_the_same_text(conversation: Conversation) -> None:
    llm = conversation.new()
    prompt = conversation.ids(LINES[0] * 4)
    first, *_ = conversation.say(llm, prompt)
    for i, n in enumerate((12, 5, 30, 1)):
        text, read, replayed = conversation.say(llm, prompt, n)
        assert text[:1] == first[:1] and read <= 1
        # under exec the last token of a prompt has a step of its own in pure models only, the others replay it once
        stock = conversation.Llama is conversation.lib.Llama
        assert replayed == 0 or (i == 0 and not conversation.pure and stock), (n, replayed)


@scenario()
def one_token_prompts_and_the_same_prompt_without_an_answer(conversation: Conversation) -> None:
    llm = conversation.new()
    prompt = conversation.ids(LINES[1])
    for cut in (1, 2, 1, len(prompt), 1, len(prompt)):
        conversation.say(llm, prompt[:cut], 3)
    llm.reset()
    llm.eval(prompt)
    conversation.say(llm, prompt)


@scenario()
def a_shorter_prompt_rolls_back(conversation: Conversation) -> None:
    llm = conversation.new({"checkpoint_interval": 32}, n_batch=32)
    prompt = conversation.ids(LINES[0] * 5)
    conversation.say(llm, prompt)
    for n in (len(prompt) - 1, 100, 40, 3):
        _, read, replayed = conversation.say(llm, prompt[:n])
        assert read + replayed <= 34, (n, read, replayed)


@scenario()
def a_prompt_that_shares_nothing(conversation: Conversation) -> None:
    llm = conversation.new()
    for line in LINES:
        prompt = conversation.ids(line)[1:]  # not even the first token
        _, read, _ = conversation.say(llm, prompt)
        assert read <= len(prompt)


@scenario()
def prompts_longer_than_a_batch(conversation: Conversation) -> None:
    llm = conversation.new(n_batch=32, n_ubatch=16)
    prompt = conversation.ids(" ".join(LINES * 3))
    conversation.say(llm, prompt)
    _, read, replayed = conversation.say(llm, [*prompt[:200], *conversation.ids("", LINES[2])[1:]])
    assert read + replayed < len(prompt)
    conversation.say(llm, prompt)


@scenario()
def one_token_or_none_is_different(conversation: Conversation) -> None:
    llm = conversation.new()
    prompt = conversation.ids(LINES[0] * 2)
    conversation.say(llm, prompt)
    for i in (len(prompt) - 1, len(prompt) - 2, 1, 20):
        conversation.say(llm, [*prompt[:i], prompt[3], *prompt[i + 1 :]])
        conversation.say(llm, [*prompt, prompt[i]])
    conversation.say(llm, prompt)


@scenario()
def a_budget_of_replayed_tokens_changes_no_text(conversation: Conversation) -> None:
    llm = conversation.new({"max_replay": 0, "checkpoint_interval": 32}, n_batch=32)
    prompt = conversation.ids(LINES[0] * 4)
    conversation.say(llm, prompt)
    for n in (100, 70, 71, 9):
        conversation.say(llm, [*prompt[:n], *conversation.ids("", LINES[3])[1:]])
    assert conversation.cache.stats().tokens_replayed == 0


@scenario()
def few_checkpoints_change_no_text(conversation: Conversation) -> None:
    for cells in (1, 2):
        llm = conversation.new({"checkpoint_cells": cells, "checkpoint_interval": 16}, n_batch=32)
        for line in (LINES[0], LINES[1], LINES[0] + LINES[2], LINES[0] + LINES[1]):
            conversation.say(llm, conversation.ids(line), 33)
            conversation.say(llm, conversation.ids(line[:40]), 2)


# --- states ----------------------------------------------------------------------------------------------------------


@scenario()
def states_saved_and_loaded_in_between(conversation: Conversation) -> None:
    llm = conversation.new()
    one, other = conversation.ids(LINES[0] * 2), conversation.ids(LINES[1] * 2)
    conversation.say(llm, one)
    state = llm.save_state()
    conversation.say(llm, other)
    llm.load_state(state)
    new = conversation.ids("", LINES[2])[1:]
    _, read, replayed = conversation.say(llm, [*one, *new])
    if conversation.pure and conversation.Llama is not conversation.lib.Llama:
        assert read + replayed <= len(new) + 1, (read, replayed)
    conversation.say(llm, one)
    llm.load_state(state)
    conversation.say(llm, one[:20])
    llm.reset()
    llm.load_state(state)
    conversation.say(llm, one)
    conversation.say(llm, other)
    llm.load_state(state)
    llm.eval(conversation.ids("", LINES[2]))
    conversation.say(llm, one)


@scenario()
def with_a_cache_of_states(conversation: Conversation) -> None:
    """`LlamaRAMCache`, by way of `create_completion`."""
    llm = conversation.new()
    llm.set_cache(conversation.lib.LlamaRAMCache())
    history = LINES[0]
    for text in (LINES[0], LINES[1], LINES[0], LINES[0] + LINES[2], LINES[1], LINES[0] + LINES[2] + LINES[3]):
        history = text
        for _ in range(2):
            said = llm.create_completion(conversation.ids(history), max_tokens=8, temperature=0)["choices"][0]["text"]
            conversation.plain.reset()
            plain = conversation.plain.create_completion(conversation.ids(history), max_tokens=8, temperature=0)
            assert said == plain["choices"][0]["text"]


# --- chat, streams, drafts -------------------------------------------------------------------------------------------


def _chat(llm: Any, messages: list[dict[str, str]], stream: bool = False) -> str:
    said = llm.create_chat_completion(messages, max_tokens=6, temperature=0, stream=stream)
    if not stream:
        return said["choices"][0]["message"]["content"]
    return "".join(part["choices"][0]["delta"].get("content", "") for part in said)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@scenario()
def a_chat_of_many_turns(conversation: Conversation) -> None:
    llm = conversation.new(chat_format="chatml")
    plain = conversation.plain
    plain.chat_format = "chatml"
    messages = [_message("system", LINES[0] * 2)]
    for i in range(6):
        if i == 3:
            del messages[-2:]  # the last turn anew
        messages.append(_message("user", LINES[i % 4][: 30 + i]))
        plain.reset()
        said = _chat(llm, messages, stream=i % 2 == 1)
        assert said == _chat(plain, messages, stream=i % 2 == 1)
        messages.append(_message("assistant", said))
    before = conversation.cache.stats()
    messages[-2] = _message("user", "Another question?")
    del messages[-1]
    plain.reset()
    assert _chat(llm, messages) == _chat(plain, messages)
    after = conversation.cache.stats()
    read = after.tokens_read - before.tokens_read + after.tokens_replayed - before.tokens_replayed
    assert read < 120, read


@scenario()
def streams_give_the_same_text_also_when_closed(conversation: Conversation) -> None:
    llm = conversation.new()
    prompt = conversation.ids(LINES[0] * 2)
    conversation.plain.reset()
    # A stream of stock's too: llama-cpp-python leaves characters of several tokens out of streams.
    pieces = conversation.plain.create_completion(prompt, max_tokens=16, temperature=0, stream=True)
    whole = "".join(piece["choices"][0]["text"] for piece in pieces)
    for n in (1, 5, 100):
        stream = llm.create_completion(prompt, max_tokens=16, temperature=0, stream=True)
        parts = [part["choices"][0]["text"] for part, _ in zip(stream, range(n), strict=False)]
        stream.close()
        assert whole.startswith("".join(parts)) and (n < 100 or whole == "".join(parts))
    conversation.say(llm, prompt)


@scenario()
def drafts_give_the_greedy_text(conversation: Conversation) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    for options in ({}, {"checkpoint_cells": 2}, {"max_replay": 3}):
        if "max_replay" in options and conversation.Llama is conversation.lib.Llama:
            continue  # stock continues after a refusal, and llama_decode stops it
        llm = conversation.new(options, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=6), logits_all=True)
        for line in (LINES[1] * 2, LINES[0] * 2, LINES[1] * 2):
            prompt = conversation.ids(line)
            text, _ = conversation.answer(llm, prompt, 24)
            assert text == conversation.fresh(prompt, 24), (options, text, conversation.fresh(prompt, 24))
    stats = conversation.cache.stats()
    assert stats.checkpoints_used > 0


# --- failures --------------------------------------------------------------------------------------------------------


@scenario()
def a_generation_that_was_closed_or_broken_off(conversation: Conversation) -> None:
    llm = conversation.new()
    prompt = conversation.ids(LINES[0] * 2)
    for n in (1, 3):
        steps = llm.generate(prompt, temp=0.0)
        for _ in range(n):
            next(steps)
        steps.close()
        conversation.say(llm, prompt)
        steps = llm.generate([*prompt, prompt[n]], temp=0.0)
        next(steps)
        with contextlib.suppress(ZeroDivisionError):
            steps.throw(ZeroDivisionError)
        conversation.say(llm, [*prompt, prompt[n]])

    def broken(_ids: Any, _scores: Any) -> Any:
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        list(llm.generate(prompt, temp=0.0, stopping_criteria=broken))
    conversation.say(llm, prompt)


@scenario()
def an_interrupt_between_the_decode_and_the_count(conversation: Conversation) -> None:
    prompt = conversation.ids(" ".join(LINES[:2]))
    for nth in (1, 2, 4, 6, 7, 8):
        llm = conversation.new(n_batch=32)
        conversation.say(llm, conversation.ids(LINES[3]))
        context, llm._ctx = llm._ctx, Interrupted(llm._ctx, nth)
        try:
            conversation.answer(llm, prompt)
        except KeyboardInterrupt:
            pass
        finally:
            llm._ctx = context
        if conversation.Llama is conversation.lib.Llama and llm.n_tokens == len(prompt):
            continue  # stock samples the next token from the logits of one that it has not counted
        conversation.say(llm, prompt, 4)
        conversation.say(llm, [*prompt[:40], prompt[2]], 4)


@scenario()
def a_decode_that_is_aborted_at_any_node(conversation: Conversation) -> None:
    rng = random.Random(7)
    llm = conversation.new(n_batch=32)
    prompt = conversation.ids(" ".join(LINES[:3]))
    n_failed = 0
    for i in range(10):
        wanted = [*prompt[: 20 + 5 * i], *conversation.ids("", LINES[i % 4])[1:]]
        try:
            with conversation.aborting(llm, rng.randrange(100 * (1 + i % 5))):
                conversation.answer(llm, wanted)
        except RuntimeError as error:
            n_failed += 1
            if conversation.Llama is conversation.lib.Llama and llm.n_tokens == len(wanted):
                llm.reset()  # as above: stock does not know that the logits have gone
            assert "llama_decode returned" in str(error)
        _, read, replayed = conversation.say(llm, wanted if i % 2 else [*wanted, 5], 4)
        assert read + replayed <= len(wanted) + 64
    assert n_failed > 3


@scenario()
def a_callback_that_raises(conversation: Conversation) -> None:
    from rcache_plugin.cache import RecurrentCache

    prompt = conversation.ids(" ".join(LINES[:2]))
    for method in ("prepare", "find_slot", "seq_rm"):
        for nth in (1, 3):
            llm = conversation.new(n_batch=32)
            conversation.say(llm, prompt)
            original, calls = getattr(RecurrentCache, method), [0]

            def failing(self: Any, *arguments: Any, call: Any = original, calls: Any = calls, nth: int = nth) -> Any:
                calls[0] += 1
                if calls[0] == nth:
                    raise OSError("no luck")
                return call(self, *arguments)

            setattr(RecurrentCache, method, failing)
            try:
                conversation.answer(llm, [*prompt[:50], *conversation.ids("", LINES[3])[1:]])
            except RuntimeError:
                pass
            finally:
                setattr(RecurrentCache, method, original)
            conversation.say(llm, [*prompt[:50], *conversation.ids("", LINES[3])[1:]], 3)
            conversation.say(llm, prompt, 3)


@scenario()
def a_context_that_is_full(conversation: Conversation) -> None:
    llm = conversation.new(n_ctx=128, n_batch=32)
    long = conversation.ids(LINES[0] * 16)[:150]  # llama.cpp rounds n_ctx up, llama-cpp-python's own arrays end at 128
    prompt = long[:108]
    for _ in range(2):
        for wanted in (prompt, long):
            with contextlib.suppress(ValueError, RuntimeError, IndexError):
                conversation.answer(llm, wanted, 40)  # more than there is room for
            conversation.say(llm, prompt)
        conversation.say(llm, prompt[:50], 20)
    said = llm.create_completion(prompt, max_tokens=-1, temperature=0)["choices"][0]
    assert said["finish_reason"] in ("length", "stop")
    conversation.say(llm, prompt)


@scenario()
def two_llamas_at_once(conversation: Conversation) -> None:
    one = conversation.new()
    first = conversation.cache
    other = conversation.new(n_batch=32)
    a, b = conversation.ids(LINES[0] * 2), conversation.ids(LINES[1] * 2)
    steps = one.generate(a, temp=0.0), other.generate(b, temp=0.0)
    tokens: tuple[list[int], list[int]] = ([], [])
    for _ in range(12):
        for stream, found in zip(steps, tokens, strict=True):
            found.append(next(stream))
    texts = [conversation.plain.detokenize(each).decode(errors="replace") for each in tokens]
    assert texts == [conversation.fresh(a), conversation.fresh(b)]
    for stream in steps:
        stream.close()
    conversation.say(other, a)
    other.close()
    conversation.cache = first
    conversation.say(one, a[:30])
    conversation.say(one, b)
    one.close()
    assert first.closed


# --- our Llama -------------------------------------------------------------------------------------------------------


@scenario(*OURS)
def a_reset_costs_nothing_in_a_pure_model(conversation: Conversation) -> None:
    llm = conversation.new()
    prompt = conversation.ids(LINES[0] * 5)
    conversation.say(llm, prompt)
    llm.reset()
    assert llm.n_tokens == 0
    _, read, replayed = conversation.say(llm, prompt)
    checkpoints = conversation.cache.checkpoints.all()
    assert read + replayed <= (1 if conversation.pure else len(prompt)), (read, replayed, checkpoints)
    llm.reset()
    conversation.say(llm, conversation.ids(LINES[1]))
    llm.reset()
    _, read, replayed = conversation.say(llm, [*prompt, *conversation.ids("", LINES[2])[1:]])
    assert read + replayed < len(conversation.ids(LINES[2])) + (2 if conversation.pure else len(prompt))


@scenario(*OURS)
def conversations_in_turn_need_no_second_prefill(conversation: Conversation) -> None:
    llm = conversation.new()
    texts = {i: conversation.ids(LINES[i] * 4) for i in range(3)}
    for turn in range(4):
        for i in range(3):
            if i != turn % 3:
                before = len(texts[i])
                text, read, replayed = conversation.say(llm, texts[i])
                new = len(texts[i]) - before
                if turn > 1 and conversation.pure:
                    assert read + replayed <= 60, (turn, i, read, replayed, new)
                texts[i] = [*texts[i], *conversation.ids("", text + LINES[turn])[1:]]
    stats = conversation.cache.stats()
    if conversation.pure:
        assert stats.tokens_reused > stats.tokens_asked / 2


@scenario(*OURS)
def known_beginnings_become_checkpoints(conversation: Conversation) -> None:
    """Two prompts part somewhere; the third that parts there reads only what is its own, also after a reset."""
    if not conversation.pure:
        return
    llm = conversation.new(n_batch=512)
    head = conversation.ids(LINES[0] * 6)
    reads = []
    for line in (*LINES[1:], "Of the sons of Levi, these are the names."):
        prompt = [*head, *conversation.ids("", line)[1:]]
        reads.append(conversation.say(llm, prompt)[1] - (len(prompt) - len(head)))
        llm.reset()
    assert reads[2] <= 0 and reads[3] <= 0, reads


@scenario(*OURS)
def the_borders_of_messages_are_marked(conversation: Conversation) -> None:
    """So a chat with another last message, or another first one after the system's, reads little."""
    llm = conversation.new({"checkpoint_interval": 10_000}, chat_format="chatml", n_ctx=2048, n_batch=512)
    plain = conversation.plain
    plain.chat_format = "chatml"
    system = _message("system", LINES[0] * 4)
    turn = [_message("user", LINES[1] * 2), _message("assistant", LINES[2] * 2)]
    seen = []
    for messages in (
        [system, *turn, _message("user", "What of the sea?")],
        [system, *turn, _message("user", "Why is it so?")],
        [system, _message("user", "Who art thou?")],
        [system, *turn, _message("user", "Is it not written?")],
    ):
        before = conversation.cache.stats()
        plain.reset()
        assert _chat(llm, messages) == _chat(plain, messages)
        after = conversation.cache.stats()
        seen.append(after.tokens_read - before.tokens_read + after.tokens_replayed - before.tokens_replayed)
    assert seen[1] < seen[0] / 4, seen
    assert seen[2] < seen[0] / 4, seen
    assert not conversation.pure or seen[3] < seen[0] / 4, seen
    # a stream that is never begun leaves its borders to nobody
    llm.create_chat_completion([system, *turn], stream=True)
    conversation.say(llm, conversation.ids(LINES[3] * 2))


@scenario(*OURS)
def looking_for_borders_reads_nothing(conversation: Conversation) -> None:
    """A handler of images reads them while it makes the prompt; one that refuses a part of a chat is no error."""
    llm = conversation.new()
    llm.eval(conversation.ids(LINES[0]))
    n_tokens, asked = llm.n_tokens, []

    def handler(llama: Any, messages: Any, **_: Any) -> Any:
        asked.append(len(messages))
        if len(messages) == 1:
            raise ValueError("a chat begins with two messages")
        llama.reset()
        llama.eval([5, 6, 7])
        return llama.create_completion(llama.input_ids[: llama.n_tokens].tolist(), max_tokens=2, temperature=0)

    llm.chat_handler = handler
    assert llm._find_borders([_message("user", "a"), _message("user", "b")], {}) == ([], [])
    assert llm.n_tokens == n_tokens and asked == [1, 2]
    said = llm.create_chat_completion([_message("user", "a"), _message("user", "b")])
    assert said["usage"]["prompt_tokens"] == 3


def _look(conversation: Conversation, llm: Any, ids: Sequence[int]) -> None:
    """Reads rows of numbers, as of an image, which the Llama counts as tokens `ids`."""
    n_embd = llm.n_embd()
    batch = conversation.lib.llama_batch_init(len(ids), n_embd, 1)
    batch.n_tokens = len(ids)
    for i in range(len(ids)):
        for j in range(n_embd):
            batch.embd[i * n_embd + j] = ((i + 2) * (j + 3) % 11 - 5) / 4
        batch.pos[i], batch.n_seq_id[i], batch.logits[i] = llm.n_tokens + i, 1, i == len(ids) - 1
        batch.seq_id[i][0] = 0
    assert conversation.lib.llama_decode(llm.ctx, batch) == 0
    conversation.lib.llama_batch_free(batch)
    llm.input_ids[llm.n_tokens : llm.n_tokens + len(ids)] = ids
    llm.n_tokens += len(ids)


@scenario("ours bundled", "ours granite-hybrid")
def what_was_no_text_is_not_read_as_text(conversation: Conversation) -> None:
    """The ids that stand for an image may be those of an earlier prompt, of which there are checkpoints."""
    llm = conversation.new()
    prompt, tail = conversation.ids(LINES[0] * 2)[:50], conversation.ids("", LINES[1])[1:]
    conversation.say(llm, [*prompt, *tail])
    found = []
    for each in (llm, conversation.plain):
        each.reset()
        each.eval(prompt[:20])
        _look(conversation, each, prompt[20:])
        each.eval(tail)
        before = conversation.cache.stats()
        found.append(conversation.answer(each, each._input_ids.tolist())[0])
        if each is llm:
            assert conversation.cache.stats().tokens_read - before.tokens_read == 11  # the answer
    assert found[0] == found[1] != conversation.fresh([*prompt, *tail])
    llm._ctx.kv_cache_seq_rm(0, 0, -1)
    with contextlib.suppress(RuntimeError):
        llm.n_tokens = 30
        llm.eval(tail)
    conversation.say(llm, [*prompt, *tail])


@scenario(*OURS)
def counts_and_one_line_a_prompt(conversation: Conversation) -> None:
    err = io.StringIO()
    llm = conversation.new(verbose=False)
    llm.verbose = True
    prompt = conversation.ids(LINES[0] * 3)
    with contextlib.redirect_stderr(err):
        conversation.answer(llm, prompt)
        conversation.answer(llm, prompt)
    stats = llm.rcache.stats()
    assert stats.tokens_asked == 2 * len(prompt)
    assert stats.tokens_reused == len(prompt) - 1
    assert stats.tokens_read == len(prompt) + 1 + 2 * 11 and stats.tokens_replayed == 0
    assert stats.checkpoints_made >= 1 and stats.checkpoints_used == 1, stats
    assert stats.checkpoints == len(llm.rcache.checkpoints.all())
    assert stats.bytes == llm.rcache.checkpoints.n_cells * llm.rcache.spec.cell_bytes > 0
    lines = [line for line in err.getvalue().splitlines() if line.startswith("rcache:")]
    assert len(lines) == 2, lines
    n = len(prompt)
    assert lines[0].startswith(f"rcache: prompt of {n} tokens: 0 reused, 0 replayed, {n} read; "), lines
    assert lines[1].startswith(f"rcache: prompt of {n} tokens: {n - 1} reused, 0 replayed, 1 read; "), lines


@scenario(*OURS)
def a_context_that_others_changed(conversation: Conversation) -> None:
    """What `n_tokens` counts is replayed if it must be."""
    llm = conversation.new()
    prompt = conversation.ids(LINES[0] * 2)
    for change in (
        lambda: llm._ctx.kv_cache_clear(),
        lambda: llm._ctx.kv_cache_seq_rm(0, 20, -1),
        lambda: llm._ctx.kv_cache_seq_rm(0, -1, -1),
        lambda: conversation.cache.clear(),
    ):
        llm.reset()
        llm.eval(prompt)
        change()
        llm.eval(conversation.ids("", LINES[1])[1:])
        conversation.say(llm, [*prompt, *conversation.ids("", LINES[1])[1:]])
        change()
        conversation.say(llm, prompt)
        change()
        state = llm.save_state()
        llm.reset()
        llm.load_state(state)
        conversation.say(llm, prompt)


@scenario(*OURS)
def its_options_outlive_pickling(conversation: Conversation) -> None:
    import pickle

    with contextlib.redirect_stderr(io.StringIO()):
        options = {"checkpoint_cells": 3, "max_replay": 7}
        llm = conversation.Llama(conversation.path, n_ctx=64, n_threads=1, verbose=False, **options)
        again = pickle.loads(pickle.dumps(llm))
    assert (again.rcache.checkpoints.n_cells, again.rcache.checkpoints.max_replay) == (3, 7)


@scenario(*OURS)
def without_checkpoints_it_is_stocks(conversation: Conversation) -> None:
    llm = conversation.new({"checkpoint_cells": 0})
    for line in (LINES[0], LINES[0] + LINES[1], LINES[2], LINES[0]):
        prompt = conversation.ids(line)
        assert conversation.answer(llm, prompt)[0] == conversation.fresh(prompt)


@pytest.mark.parametrize(("group", "name"), scenario.cases())
def test_reuse(group: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    command = [sys.executable, "-m", "rcache_plugin", "exec"] if group in STOCK else [sys.executable]
    said = scenario.outcome(group, name, lambda: _model(group.split()[1], tmp_path_factory), command)
    assert not said, said


def _model(name: str, folders: pytest.TempPathFactory) -> str:
    from rcache_plugin.hosts.mamba import bundled_model

    return str(bundled_model() if name == "bundled" else llama_models.write(name, folders.mktemp("models")))


if __name__ == "__main__":
    sys.exit(scenario.main())
