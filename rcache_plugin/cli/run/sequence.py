"""One continuation of the prompt, and the figures of all."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...errors import counted

if TYPE_CHECKING:
    from ...hosts.mamba.tokenizer import StreamDecoder


@dataclass
class Sequence:
    """One continuation of the prompt."""

    seq_id: int
    seed: int
    decoder: StreamDecoder
    token: int = 0
    """Sampled last, not decoded yet."""
    text: str = ""
    ended: bool = False
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def take(self, token: int, stop_ids: Container[int]) -> str:
        """Continues with `token`, or ends with it; returns the text that it makes whole."""
        self.token = token
        self.ended = token in stop_ids
        return "" if self.ended else self.decoder.push(token)


@dataclass
class Figures:
    """Tokens and seconds of the two phases."""

    n_prompt: int = 0
    prompt_seconds: float = 0.0
    n_decoded: int = 0
    decode_seconds: float = 0.0

    def lines(self, n_seqs: int) -> Iterator[str]:
        """The lines for stderr."""
        yield f"prefill: {counted(self.n_prompt, 'token')}, {_rate(self.n_prompt, self.prompt_seconds)}"
        rate = _rate(self.n_decoded, self.decode_seconds)
        yield f"decode:  {counted(self.n_decoded, 'token')}, {rate}" + (f" in {n_seqs} sequences" if n_seqs > 1 else "")


def _rate(n_tokens: int, seconds: float) -> str:
    return f"{n_tokens / seconds:.1f} tokens/s" if n_tokens and seconds > 0 else "- tokens/s"
