"""What `rcache doctor` has found: parts, each with a state and facts, and problems, each with what mends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "missing", "broken", "unknown"]
"""Works; is not there; is there and does not work; could not be told."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong."""

    what: str
    mend: str | None
    """The one command that mends it; None where there is none."""
    needed: bool
    """Whether `rcache run` needs what is missing."""


@dataclass
class Part:
    """One thing that was looked at."""

    state: State
    lines: list[str]
    """For a reader; at least one."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For a program; the same keys whatever was found."""
    problems: list[Problem] = field(default_factory=list)

    def problem(self, what: str, mend: str | None, *, needed: bool = False) -> None:
        """Adds a problem."""
        self.problems.append(Problem(what, mend, needed))


@dataclass(frozen=True)
class Report:
    """All parts, by name, in the order in which they were looked at."""

    parts: Mapping[str, Part]

    @property
    def ready(self) -> bool:
        """Whether `rcache run` works here: a token was decoded, and nothing that it needs is missing."""
        return self.parts["run"].state == "ok" and not any(problem.needed for _, problem in self.problems())

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """(name of the part, problem) of all; those that `rcache run` is kept from by first."""
        found = [(name, problem) for name, part in self.parts.items() for problem in part.problems]
        yield from sorted(found, key=lambda pair: not pair[1].needed)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are those of docs/doctor.md."""
        return {
            "ready": self.ready,
            "parts": {name: {"state": part.state, **part.facts} for name, part in self.parts.items()},
            "problems": [
                {"part": name, "what": problem.what, "mend": problem.mend, "needed": problem.needed}
                for name, problem in self.problems()
            ],
        }
