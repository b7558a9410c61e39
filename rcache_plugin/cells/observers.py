"""Who is told of new plans and of changes of the table."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Protocol

from .slots import SlotPlan


class PlanObserver(Protocol):
    """What wants to know of each new plan, as the C tables do."""

    def publish(self, plan: SlotPlan | None) -> None:
        """Called after each slot, and with None when there is no slot any more."""

    def changed(self) -> None:
        """Called after any other change of the table, and of what its next steps need: until then a step of the same
        sequences as the last one counts as one that fits."""


class Observers:
    """The observers that are alive. A `weakref.WeakSet` costs too much where each step goes through it."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[PlanObserver]] = []

    def add(self, observer: PlanObserver) -> None:
        """From now on `observer` is told."""
        self._refs.append(weakref.ref(observer, self._refs.remove))

    def __iter__(self) -> Iterator[PlanObserver]:
        for ref in self._refs[:]:
            observer = ref()
            if observer is not None:
                yield observer

    def publish(self, plan: SlotPlan | None) -> None:
        """Tells all of a plan."""
        for observer in self:
            observer.publish(plan)

    def changed(self) -> None:
        """Tells all of a change."""
        for observer in self:
            observer.changed()
