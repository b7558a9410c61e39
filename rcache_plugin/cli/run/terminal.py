"""What a running command does with its terminal: Ctrl-C between two steps, and progress bars."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any


class Stop:
    """Turns the first Ctrl-C into a request that is met between two steps, so that none is left half done; the second
    interrupts at once."""

    asked = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def installed(self) -> Iterator[Stop]:
        """Takes SIGINT meanwhile."""
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


class Bars:
    """Progress bars on stderr while the model loads and the prompt is read; nothing where stderr is no terminal."""

    def __init__(self, owned: ExitStack) -> None:
        self._tasks: dict[str, Any] = {}
        self._progress: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._progress = owned.enter_context(Progress(console=Console(stderr=True), transient=True))

    def show(self, what: str, fraction: float) -> None:
        """Sets the bar called `what` to `fraction`, 0 to 1."""
        if self._progress is not None:
            if what not in self._tasks:
                self._tasks[what] = self._progress.add_task(what, total=1.0)
            self._progress.update(self._tasks[what], completed=fraction)
