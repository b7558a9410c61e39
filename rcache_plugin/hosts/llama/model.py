"""`Llama`, a drop-in for `llama_cpp.Llama` with a prefix cache. Imported after `hosts.llama.install` only."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Generator, Sequence
from dataclasses import fields
from typing import Any

import llama_cpp
import numpy as np

from ...cache import RecurrentCache
from ...capi.vtable import AwaitErrors, take_pending
from ...checkpoints.history import common_prefix
from ...errors import counted
from .host import context_options
from .options import PROMPT_TAIL_FROM, Options

log = logging.getLogger(__name__)

LEAST_PART = 32
"""The prefill of a prompt stops at a place worth a checkpoint when that is at least so many tokens away."""
_OPTIONS = tuple(field.name for field in fields(Options))


class Llama(llama_cpp.Llama):  # type: ignore[misc]
    """`llama_cpp.Llama` on this package's cache: the same arguments, and the fields of `hosts.llama.Options` besides.

    `rcache` is the `RecurrentCache` of its context; None for a model without recurrent layers. With cells for
    checkpoints (the default) a prompt continues from its longest prefix that any state has read, also after `reset`
    and from another conversation. Hybrid models continue the last conversation only, because their attention half does.
    """

    rcache: RecurrentCache | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in _OPTIONS if kwargs.get(name) is not None}
        for name in _OPTIONS:
            kwargs.pop(name, None)
        self._given = given
        self._borders: tuple[list[int], list[int]] = [], []  # between messages of the next prompt, and that prompt
        with context_options(**given) as made:
            super().__init__(*args, **kwargs)
        self.rcache = made[-1] if made else None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **self._given}

    # checkpoints

    @property
    def _has_checkpoints(self) -> bool:
        return self.rcache is not None and self.rcache.checkpoints.n_cells > 0 and not self.rcache.closed

    @property
    def _shares_checkpoints(self) -> bool:
        """Whether a checkpoint serves every conversation, not only its own."""
        return self._has_checkpoints and self.rcache is not None and not self.rcache.checkpoints.hybrid

    # methods of llama_cpp.Llama

    def reset(self) -> None:
        """As `llama_cpp.Llama.reset`. Checkpoints stay, unless the model is a hybrid."""
        if not self._shares_checkpoints:
            super().reset()
            return
        self.n_tokens = 0
        self._requires_eval = True
        llama_cpp.llama_memory_clear(self._ctx.memory, False)

    def eval(self, tokens: Sequence[int]) -> None:
        """As `llama_cpp.Llama.eval`. The last token of a prompt has a step of its own.

        After a step that failed or was interrupted, the context is first synchronised with `n_tokens`. An error of the
        cache is the ``__cause__`` of the `RuntimeError`.
        """
        self._sync_context()
        # in pure models the adapter does it too, for batches that are long enough
        split = not self._shares_checkpoints or len(tokens) % self.n_batch < PROMPT_TAIL_FROM
        if self._has_checkpoints and len(tokens) >= PROMPT_TAIL_FROM and split:
            self._eval(tokens[:-1])
            self._eval(tokens[-1:])
        else:
            self._eval(tokens)

    def _eval(self, tokens: Sequence[int]) -> None:
        """As `llama_cpp.Llama.eval`; an error of the cache is the ``__cause__`` of its `RuntimeError`.

        An interrupt in the cache's code is raised as itself.
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
        if cause is not None:  # llama.cpp has ignored it
            log.error("a call by llama.cpp failed: %s", cause, exc_info=cause)

    def save_state(self) -> Any:
        """As `llama_cpp.Llama.save_state`."""
        self._sync_context()
        return super().save_state()

    def load_state(self, state: Any) -> None:
        """As `llama_cpp.Llama.load_state`; the cache is told what the state has read."""
        super().load_state(state)
        cache = self.rcache
        if cache is not None and self._has_checkpoints and cache.seq_pos_max(0) == self.n_tokens - 1:
            cache.checkpoints.set_tokens(0, self.input_ids[: self.n_tokens])

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        """As `llama_cpp.Llama.generate`, from the longest prefix of `tokens` that any state has read."""
        prompt = list(tokens)
        reset = args[6] if len(args) > 6 else kwargs.get("reset", True)
        (borders, bordered), self._borders = self._borders, ([], [])
        cache = self.rcache
        if cache is None or not self._has_checkpoints or not prompt:
            yield from super().generate(prompt, *args, **kwargs)
            return
        before = cache.stats()
        if reset:
            self._prepare(cache, prompt, borders if bordered == prompt else [])
        n_asked = len(prompt)
        with contextlib.closing(super().generate(prompt, *args, **kwargs)) as steps:
            try:
                token = next(steps)
            except StopIteration:
                return
            finally:
                self._report(cache, n_asked, before)
            while True:
                sent = yield token
                try:
                    token = steps.send(sent)
                except StopIteration:
                    return

    def create_chat_completion(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        """As `llama_cpp.Llama.create_chat_completion`; there are checkpoints at the borders of messages."""
        if self._has_checkpoints:
            self._borders = self._find_borders(list(messages), kwargs)
        return super().create_chat_completion(messages, *args, **kwargs)

    # synchronisation

    def _sync_context(self) -> None:
        """Lets the context have read what `n_tokens` counts: a step may have failed, or ended before it was counted."""
        cache = self.rcache
        if cache is None or not self._has_checkpoints or cache.seq_pos_max(0) == self.n_tokens - 1:
            return
        wanted = self.input_ids[: self.n_tokens].copy()
        known, at = cache.checkpoints.tokens(0), cache.seq_pos_max(0) + 1
        self._ctx.kv_cache_seq_rm(0, self.n_tokens, -1)
        if len(known) < at or (at == 0 and 0 < len(known) < self.n_tokens):
            return  # it has read more than text (an image), which can't be replayed from here
        at = cache.seq_pos_max(0) + 1
        if at != self.n_tokens:
            log.debug("no rollback to %s: prefilling", counted(self.n_tokens, "token"))
            if 0 < at < len(wanted) and np.array_equal(cache.checkpoints.tokens(0), wanted[:at]):
                self.n_tokens = at
            else:
                self.reset()
            super().eval(wanted[self.n_tokens :].tolist())
            self._requires_eval = True

    # prefix cache

    def _prepare(self, cache: RecurrentCache, prompt: list[int], borders: list[int]) -> None:
        """Restores the longest known prefix of the prompt; prefills from there to places worth a checkpoint."""
        most = len(prompt) - 1  # the last token has to be read for its logits
        at = cache.seq_pos_max(0) + 1
        if at > self.n_tokens or at == 0:
            self._requires_eval = True  # the last logits may be of a token that was never counted
        live = common_prefix(self._input_ids, prompt)
        if live == len(prompt) == self.n_tokens and not self._requires_eval:
            return  # read whole already
        at = cache.checkpoints.resume(0, prompt[:most])
        if not at:
            # the context may have read more than this object has seen: a state that was loaded
            at = self._roll_back(cache, min(max(live, common_prefix(cache.checkpoints.tokens(0), prompt)), most))
        if at:
            self.input_ids[:at] = prompt[:at]
            self.n_tokens = at
            self._requires_eval = True
        places = [*borders, cache.checkpoints.known_prefix(prompt[:most]) if self._shares_checkpoints else 0]
        for place in sorted({each for each in places if at + LEAST_PART <= each < most}):
            if not at:
                self.reset()
            self._eval(prompt[at:place])
            cache.checkpoints.mark(0)
            at = place

    def _roll_back(self, cache: RecurrentCache, n_tokens: int) -> int:
        """Rolls back to at most the first `n_tokens` tokens; returns how many are left, 0 if that is not possible."""
        if n_tokens and self._ctx.kv_cache_seq_rm(0, n_tokens, -1):
            return n_tokens if cache.seq_pos_max(0) == n_tokens - 1 else 0
        nearest = cache.checkpoints.nearest(seq_id=0, pos=n_tokens - 1) if n_tokens else None
        if nearest is not None and self._ctx.kv_cache_seq_rm(0, nearest.n_tokens, -1):
            return nearest.n_tokens
        return 0

    def _report(self, cache: RecurrentCache, n_asked: int, before: Any) -> None:
        after = cache.stats()
        read = after.tokens_read - before.tokens_read
        replayed = after.tokens_replayed - before.tokens_replayed
        reused = max(n_asked - read - replayed, 0)
        cache.checkpoints.count_prompt(n_asked, reused)
        if self.verbose:
            print(
                f"rcache: prompt of {counted(n_asked, 'token')}: {reused} reused, {replayed} replayed, {read} read; "
                f"{counted(after.checkpoints, 'checkpoint')} in {after.bytes / 2**20:.1f} MiB",
                file=sys.stderr,
            )

    def _find_borders(self, messages: list[Any], kwargs: Any) -> tuple[list[int], list[int]]:
        """Tokens before the last message and after a leading system message, as the chat template renders them, and
        the prompt that it makes of all.
        """
        starts = {len(messages) - 1}
        if messages and messages[0].get("role") == "system":
            starts.add(1)
        rendered = [self._render(messages[:n], kwargs) for n in sorted(starts | {len(messages)}) if n > 0]
        whole = rendered.pop() if rendered else None
        if whole is None:
            return [], []
        shared = {common_prefix(part, whole) for part in rendered if part}
        return sorted(shared - {0}), whole

    def _render(self, messages: list[Any], kwargs: Any) -> list[int] | None:
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
            log.debug("the chat template makes no prompt of %s: %s", counted(len(messages), "message"), error)
        return None


class _Prompt(BaseException):
    """The prompt that a chat handler was about to complete; no error, so that no handler catches it."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.tokens = tokens


class _Listener:
    """Stands in for a `Llama` before a chat handler, to learn what prompt it makes."""

    _REFUSED = frozenset(("_batch", "_ctx", "ctx", "eval", "generate", "load_state", "reset", "sample", "set_cache"))
    """Handlers of images decode them while they make the prompt; nothing is decoded here."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama

    def __getattr__(self, name: str) -> Any:
        if name in self._REFUSED:
            raise AttributeError(f"the prompt is only asked for: no {name} here")
        return getattr(self._llama, name)

    def create_completion(self, prompt: Any, **_: Any) -> Any:
        """Raises `_Prompt` instead of completing it."""
        if isinstance(prompt, str):
            prompt = self._llama.tokenize(prompt.encode("utf-8"), add_bos=True, special=True)
        raise _Prompt(list(prompt))
