"""The plans of one table: prepared ones, the last one, and the next. Needs neither ggml nor cffi."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from .slots import SlotPlan, plan_next, plan_slots
from .table import CellTable
from .ubatch import UBatch


class Planner:
    """Finds plans for the ubatches of `table`; `evict` frees a cell where there is no room, false: it can't.

    `can_move` tells whether the caller carries out `SlotPlan.moves`.
    """

    def __init__(self, table: CellTable, placement: str, evict: Callable[[], bool]) -> None:
        self._table = table
        self._placement = placement
        self._evict = evict
        self._prepared: deque[tuple[UBatch, SlotPlan]] = deque()
        self.last: SlotPlan | None = None
        """The plan of the last slot; None when there is none any more."""
        self.batch = 0
        """Number of the batch under way."""

    def prepare(self, ubatches: Sequence[UBatch], can_move: Callable[[], bool]) -> bool:
        """Plans the ubatches of a new batch, one after the other, for `plan`; whether they fit. Nothing changes."""
        self._prepared.clear()
        plans = self._find(ubatches, can_move)
        if plans is None:
            return False
        self.batch += 1
        self._prepared.extend(zip(ubatches, plans, strict=True))
        return True

    def enter_batch(self, number: int) -> int:
        """The number of the batch that the next ubatch belongs to: `number` if the host knows it, else (0) as prepared;
        a host that does not prepare has batches of one ubatch."""
        if number:
            self.batch = number
        elif not self._prepared:
            self.batch += 1
        return self.batch

    def plan(self, ubatch: UBatch, can_move: Callable[[], bool]) -> SlotPlan | None:
        """The plan of `ubatch`, to be committed at once; None: there is no room.

        It is not planned again if it was prepared on this very state of the table, or if it continues the last slot.
        """
        if self._prepared:
            planned, plan = self._prepared.popleft()
            if not (planned is ubatch or planned.same_as(ubatch)):
                self._prepared.clear()
            elif plan.epoch == self._table.epoch:
                return plan if planned is ubatch else plan._replace(ubatch=ubatch)  # the tokens may differ
        if self.last is not None:
            following = plan_next(self._table, self.last, ubatch)
            if following is not None:
                return following
        plans = self._find((ubatch,), can_move)
        return None if plans is None else plans[0]

    def forget_prepared(self) -> None:
        """What was prepared is void."""
        self._prepared.clear()

    def _find(self, ubatches: Sequence[UBatch], can_move: Callable[[], bool]) -> tuple[SlotPlan, ...] | None:
        moves = can_move()
        while True:
            plans = plan_slots(self._table, ubatches, self._placement, moves)
            if plans is not None or not self._evict():
                return plans
