"""Many checks in one child process: what costs is the process and the model, not the check.

A test module makes a `Scenarios`, registers functions with it, and ends with ``if __name__ == "__main__":
sys.exit(SCENARIOS.main())``. Its tests ask `outcome` for what a function of the module said in the child of that
group: "" or the traceback. The child stops at no failure, and says where it was if it crashes.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import children

QUIET = {"GGML_NO_BACKTRACE": "1"}  # an abort of ggml would start a debugger otherwise
_MARK = "scenario outcome: "

Check = Callable[[Any], None]


class Scenarios:
    """The checks of one test module, by name. `groups`: what each group of checks shares, one child each.

    `set_up(group, argument)` runs in the child and gives what each check is called with.
    """

    def __init__(self, path: str, groups: Sequence[str], set_up: Callable[[str, str], Any]) -> None:
        self.path = path
        self.groups = tuple(groups)
        self._set_up = set_up
        self._checks: dict[str, tuple[Check, Sequence[str]]] = {}
        self._outcomes: dict[str, dict[str, str]] = {}

    def __call__(self, *groups: str) -> Callable[[Check], Check]:
        """Registers a check for these groups, for all without any."""

        def register(check: Check) -> Check:
            self._checks[check.__name__] = check, groups or self.groups
            return check

        return register

    def cases(self) -> list[tuple[str, str]]:
        """(group, name) of all, for `pytest.mark.parametrize`."""
        return [(group, name) for group in self.groups for name, (_, of) in self._checks.items() if group in of]

    def outcome(
        self, group: str, name: str, argument: Callable[[], str], command: Sequence[str] = (sys.executable,)
    ) -> str:
        """What the check said; runs the group's child when it has not run yet. Raises `children.ChildFailed`."""
        if group not in self._outcomes:
            done = children.run([*command, self.path, group, argument()], env=QUIET, timeout=300)
            found = [row[len(_MARK) :] for row in done.stdout.splitlines() if row.startswith(_MARK)]
            self._outcomes[group] = dict(map(json.loads, found))
        return self._outcomes[group].get(name, "never ran")

    def main(self) -> int:
        """``python FILE GROUP ARGUMENT [NAME...]``: runs the group's checks, or those named, and says how it went."""
        _, group, argument, *names = sys.argv
        shared = self._set_up(group, argument)
        for name, (check, groups) in self._checks.items():
            if group in groups and (not names or name in names):
                print(f"scenario: {name}", file=sys.stderr, flush=True)  # where a crash happened
                start = time.perf_counter()
                try:
                    check(shared)
                    said = ""
                except Exception:
                    said = traceback.format_exc()
                print(_MARK + json.dumps([name, said]), flush=True)
                print(f"took {time.perf_counter() - start:.2f} s", file=sys.stderr)
                if said and names:
                    print(said, file=sys.stderr)
        return 0


def path_of(file: str) -> str:
    """For ``Scenarios(path_of(__file__), ...)``."""
    return str(Path(file).resolve())


class Interrupted:
    """Stands in for the context of a Llama: the `nth` decode succeeds, and is interrupted before it is counted."""

    def __init__(self, context: Any, nth: int) -> None:
        self._context = context
        self._left = nth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def decode(self, batch: Any) -> None:
        self._context.decode(batch)
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
