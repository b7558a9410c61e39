"""`Llama`, a drop-in for `llama_cpp.Llama` that reads no prompt twice. Imported after `hosts.llama.install` only."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Sequence
from dataclasses import fields
from typing import Any

import llama_cpp

from ..cache import RecurrentCache
from ..history import common_prefix, token_array
from ..vtable import AwaitErrors, take_pending
from .llama import PROMPT_TAIL_FROM, Options, context_options

log = logging.getLogger(__name__)

LEAST_PART = 32
"""A prompt is read up to a place worth a checkpoint, and then on, when that place is at least so many tokens away."""
_OPTIONS = tuple(field.name for field in fields(Options))


class Llama(llama_cpp.Llama):  # type: ignore[misc]
    """`llama_cpp.Llama` on this package's cache: the same arguments, and the fields of `hosts.llama.Options` besides.

    `rcache` is the `RecurrentCache` of its context; None for a model without recurrent layers. With cells for
    checkpoints (the default) prompts go on from whatever state of an earlier one fits, also after `reset`, and from
    another conversation; hybrid models go on from the last conversation only, because their attention half does.
    """

    rcache: RecurrentCache | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in _OPTIONS if kwargs.get(name) is not None}
        for name in _OPTIONS:
            kwargs.pop(name, None)
        self._borders: list[int] = []  # of the messages in the coming prompt, in tokens
        with context_options(**given) as made:
            super().__init__(*args, **kwargs)
        self.rcache = made[-1] if made else None

    # what is there

    @property
    def _keeps(self) -> bool:
        return self.rcache is not None and self.rcache.checkpoint_cells > 0 and not self.rcache.closed

    @property
    def _crosses(self) -> bool:
        """Whether a state of any conversation will do."""
        return self._keeps and self.rcache is not None and not self.rcache.own_lineage

    # llama_cpp.Llama's own

    def reset(self) -> None:
        """As `llama_cpp.Llama.reset`. Checkpoints stay, unless the model is a hybrid."""
        if not self._crosses:
            super().reset()
            return
        self.n_tokens = 0
        self._requires_eval = True
        llama_cpp.llama_memory_clear(self._ctx.memory, False)

    def eval(self, tokens: Sequence[int]) -> None:
        """As `llama_cpp.Llama.eval`. In a hybrid model the last token of a prompt is read by itself."""
        if self._keeps and not self._crosses and len(tokens) >= PROMPT_TAIL_FROM:
            self._eval(tokens[:-1])
            self._eval(tokens[-1:])
        else:
            self._eval(tokens)

    def _eval(self, tokens: Sequence[int]) -> None:
        """As `llama_cpp.Llama.eval`; what an error of the cache was stands as the ``__cause__`` of its `RuntimeError`.

        An interrupt that hit the cache's code is raised as itself.
        """
        if self.rcache is None:
            super().eval(tokens)
            return
        try:
            with AwaitErrors():
                super().eval(tokens)
        except RuntimeError as error:
            cause = take_pending(self.rcache)
            if cause is not None and not isinstance(cause, Exception):
                raise cause from None
            raise error from cause
        cause = take_pending(self.rcache)
        if cause is not None:  # llama.cpp went on all the same
            log.error("a call of llama.cpp's failed: %s", cause, exc_info=cause)

    def load_state(self, state: Any) -> None:
        """As `llama_cpp.Llama.load_state`; the cache is told what the state has read."""
        super().load_state(state)
        cache = self.rcache
        if cache is not None and self._keeps and cache.seq_pos_max(0) == self.n_tokens - 1:
            cache.set_tokens(0, self.input_ids[: self.n_tokens])

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        """As `llama_cpp.Llama.generate`, from the longest part of `tokens` that any state has read."""
        prompt = list(tokens)
        reset = args[6] if len(args) > 6 else kwargs.get("reset", True)
        borders, self._borders = self._borders, []
        cache = self.rcache
        if cache is None or not self._keeps or not prompt:
            yield from super().generate(prompt, *args, **kwargs)
            return
        before = cache.stats()
        if reset:
            self._prepare(cache, prompt, borders)
        n_asked = len(prompt)
        steps = super().generate(prompt, *args, **kwargs)
        try:
            token = next(steps)
        except StopIteration:
            return
        finally:
            self._report(cache, n_asked, before)
        sent = yield token
        while True:
            try:
                token = steps.send(sent)
            except StopIteration:
                return
            sent = yield token

    def create_chat_completion(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        """As `llama_cpp.Llama.create_chat_completion`; the borders of the messages are places to come back to."""
        if self._keeps:
            self._borders = self._find_borders(list(messages), args, kwargs)
        try:
            return super().create_chat_completion(messages, *args, **kwargs)
        finally:
            if not kwargs.get("stream"):
                self._borders = []

    # reading no prompt twice

    def _prepare(self, cache: RecurrentCache, prompt: list[int], borders: list[int]) -> None:
        """Brings the context to the longest known part of the prompt, and on to places worth a checkpoint."""
        most = len(prompt) - 1  # the last token has to be read for its logits
        live = min(common_prefix(self._input_ids, token_array(prompt)), most)
        known = cache.resume(0, prompt[:most])
        if known > live:
            self.input_ids[:known] = prompt[:known]
            self.n_tokens = known
            self._requires_eval = True
        parts = [*borders, cache.known_prefix(prompt[:most]) if self._crosses else 0]
        at = max(live, known)
        parts = sorted({part for part in parts if at + LEAST_PART <= part < most})
        if not parts:
            return
        if self.n_tokens != at:
            if at and self._ctx.kv_cache_seq_rm(-1, at, -1):
                self.n_tokens = at
            else:
                self.reset()
                at = 0
        for part in parts:
            self._eval(prompt[at:part])
            cache.mark(0)
            at = part

    def _report(self, cache: RecurrentCache, n_asked: int, before: Any) -> None:
        after = cache.stats()
        read = after.tokens_read - before.tokens_read
        replayed = after.tokens_replayed - before.tokens_replayed
        reused = max(n_asked - read - replayed, 0)
        cache.count_prompt(n_asked, reused)
        if self.verbose:
            print(
                f"rcache: prompt of {n_asked} tokens: {reused} reused, {replayed} replayed, {read} read; "
                f"{after.checkpoints} checkpoints in {after.bytes / 2**20:.1f} MiB",
                file=sys.stderr,
            )

    def _find_borders(self, messages: list[Any], args: Any, kwargs: Any) -> list[int]:
        """Tokens before the last message and after a leading system message, as the chat template renders them."""
        starts = {len(messages) - 1}
        if messages and messages[0].get("role") == "system":
            starts.add(1)
        rendered = [self._render(messages[:n], args, kwargs) for n in sorted(starts | {len(messages)}) if n > 0]
        whole = rendered.pop() if rendered else None
        if whole is None:
            return []
        shared = {common_prefix(token_array(part), token_array(whole)) for part in rendered if part}
        return sorted(shared - {0})

    def _render(self, messages: list[Any], args: Any, kwargs: Any) -> list[int] | None:
        """The prompt that a chat handler makes of `messages`; None when it makes none of these alone."""
        handler = (
            self.chat_handler
            or self._chat_handlers.get(self.chat_format)
            or llama_cpp.llama_chat_format.get_chat_completion_handler(self.chat_format)
        )
        try:
            handler(llama=_Listener(self), messages=messages, **{**kwargs, "stream": False})
        except _Prompt as found:
            return found.tokens
        except Exception as error:  # templates may refuse a part of a conversation, in their own ways
            log.debug("the chat template makes no prompt of the first %d messages: %s", len(messages), error)
        return None


class _Prompt(BaseException):
    """The prompt that a chat handler was about to complete; no error, so that no handler catches it."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.tokens = tokens


class _Listener:
    """Stands in for a `Llama` before a chat handler, to learn what prompt it makes."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def create_completion(self, prompt: Any, **_: Any) -> Any:
        """Tells the prompt instead of completing it."""
        if isinstance(prompt, str):
            prompt = self._llama.tokenize(prompt.encode("utf-8"), add_bos=True, special=True)
        raise _Prompt(list(prompt))
