"""The weights of a Mamba-1 GGUF and its tokenizer. ggml-python is imported when the first model is loaded."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ...cells.spec import CacheSpec
from ...errors import ModelError
from .gguf import GgufFile
from .tokenizer import Tokenizer
from .weights import MambaParams, Weights, checked_tensors

if TYPE_CHECKING:
    from .context import MambaContext

BUNDLED = Path(__file__).with_name("models") / "tiny-mamba.gguf"


def bundled_model() -> Path:
    """The small model that comes with the package. Raises `ModelError` when the installation lacks it."""
    if not BUNDLED.is_file():
        raise ModelError(f"{BUNDLED}: the bundled model is missing from this installation")
    return BUNDLED


class MambaModel:
    """The weights of a Mamba-1 in memory, and its tokenizer.

    `progress` is called with the fraction that is loaded, 0 to 1; an exception from it ends the loading. Raises
    `ModelError`: a file that can't be read, is no GGUF, is truncated, is of another architecture, or lacks or
    misshapes a field or tensor, which the message names; `AllocationError`; `GgmlNotFound` without ggml-python.

    `close` closes the contexts that still use the model, then frees the weights.
    """

    path: Path
    params: MambaParams
    spec: CacheSpec
    """What a cell of a cache for this model holds."""

    def __init__(self, path: str | os.PathLike[str], progress: Callable[[float], None] | None = None) -> None:
        file = GgufFile(path)
        self.path = file.path
        self.params = p = MambaParams.of(file)
        infos = checked_tensors(file, p)
        self.spec = CacheSpec.mamba(p.n_layer, p.d_inner, p.d_state, p.d_conv)
        self._fields = {key: value for key, value in file.fields.items() if key.startswith("tokenizer.")}
        self._tokenizer: Tokenizer | None = None
        self._contexts: weakref.WeakSet[MambaContext] = weakref.WeakSet()
        self._weights = Weights(file, infos, progress)
        self._release = weakref.finalize(self, self._weights.close)

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary; also the width of logits."""
        return self.params.n_vocab

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""
        return self.params.n_embd

    @property
    def n_layer(self) -> int:
        """Layers; each keeps a state."""
        return self.params.n_layer

    @property
    def d_inner(self) -> int:
        """Channels of a layer."""
        return self.params.d_inner

    @property
    def d_state(self) -> int:
        """State elements of a channel."""
        return self.params.d_state

    @property
    def d_conv(self) -> int:
        """Width of the convolution."""
        return self.params.d_conv

    @property
    def dt_rank(self) -> int:
        """Rank of the projection that makes the time step."""
        return self.params.dt_rank

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return self._weights.n_bytes

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file, made on first use. Raises `ModelError`: none in the file, or one that can't be."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._fields, self.n_vocab, str(self.path))
        return self._tokenizer

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._release.alive

    def close(self) -> None:
        """Closes the contexts that use the model, then frees the weights. Idempotent."""
        for context in list(self._contexts):
            context.close()
        self._release()

    def __enter__(self) -> MambaModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
