"""What can go wrong while the adapter for llama-cpp-python is made; each message says what can be done."""

from __future__ import annotations

from collections.abc import Iterable

from ....errors import RcacheError


class LlamaBuildError(RcacheError):
    """The adapter for llama-cpp-python could not be had; the message says why, and what can be done."""


class PlatformNotSupported(LlamaBuildError):
    """This operating system's linker does not let one library replace another's class as the adapter needs it."""


class LlamaNotInstalled(LlamaBuildError):
    """No llama-cpp-python, or one without its libllama."""


class UnknownLlamaVersion(LlamaBuildError):
    """A version of llama-cpp-python that the adapter was not written for."""


class CompilerNotFound(LlamaBuildError):
    """No C++ compiler that runs."""


class HeadersNotFound(LlamaBuildError):
    """The source distribution with llama.cpp's internal headers could not be had, or it is not the right one."""


class CompileFailed(LlamaBuildError):
    """The compiler rejected the adapter; the message has its first lines, `output` all of them."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class SymbolsDiffer(LlamaBuildError):
    """Adapter and libllama do not define the same class.

    `missing` are the mangled names that only libllama has, `extra` those that only the adapter has.
    """

    def __init__(self, message: str, missing: Iterable[str] = (), extra: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(sorted(missing))
        self.extra = tuple(sorted(extra))


class NotInterposable(LlamaBuildError):
    """This build of libllama calls its own class directly, so it would never call the adapter."""


class CacheFolderError(LlamaBuildError):
    """The folder for what is built cannot be used."""
