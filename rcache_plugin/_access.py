"""One thread at a time, and only while something is open."""

from __future__ import annotations

import threading

from .errors import ClosedError


class Access:
    """For use in a ``with``: inside, no other thread is, and `closed` is false. May be entered again by its thread.

    Raises `ClosedError` on entering when `closed` is set. What each step goes through takes `lock` itself and looks at
    `closed`, which costs less.
    """

    __slots__ = ("_what", "closed", "lock")

    def __init__(self, what: str, *, closed: bool = False) -> None:
        self.lock = threading.RLock()
        self._what = what
        self.closed = closed

    def check(self) -> None:
        """Raises `ClosedError` when `closed` is set."""
        if self.closed:
            raise ClosedError(f"the {self._what} is closed")

    def close(self) -> bool:
        """Sets `closed`, once no other thread is inside; whether it was not set before."""
        with self.lock:
            was, self.closed = self.closed, True
            return not was

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.closed:
            self.lock.release()
            self.check()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
