"""How the caches of llama-cpp-python's contexts work: what `install` and `Llama` take."""

from __future__ import annotations

from dataclasses import dataclass

from ...cells.slots import COMPACT
from ...checkpoints.policy import cells_within, default_checkpoint_cells

PROMPT_TAIL, PROMPT_TAIL_FROM = 1, 32
"""With checkpoints: the last token of a prompt has a step of its own when the prompt has at least so many. There is a
checkpoint before it then, and the same prompt again costs one token."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the caches of contexts made from now on work."""

    placement: str = COMPACT
    """``"compact"`` (bystanders are not copied) or ``"classic"`` (llama.cpp's, cell for cell)."""
    consecutive_seq_ids: bool = False
    """Whether a ubatch holds consecutive sequence ids only, as llama.cpp splits it. Hybrid models are always split as
    llama.cpp splits them: their attention half needs it."""
    spare_cells: int = 0
    """Cells beyond one for each sequence."""
    checkpoint_cells: int | None = None
    """Cells for checkpoints; 0: none are made, and a sequence can't roll back. None: `checkpoint_bytes` decides."""
    checkpoint_bytes: int | None = None
    """Memory for checkpoints. None: 16 cells, or as many as 256 MiB hold, but at least 2."""
    checkpoint_interval: int = 512
    """Tokens between two checkpoints of a long text."""
    max_replay: int | None = None
    """The most tokens that a rollback replays; None: no limit."""

    def cells_for_checkpoints(self, state_bytes: int) -> int:
        """How many cells of `state_bytes` bytes checkpoints get."""
        if self.checkpoint_cells is not None:
            return self.checkpoint_cells
        if self.checkpoint_bytes is not None:
            return cells_within(self.checkpoint_bytes, state_bytes)
        return default_checkpoint_cells(state_bytes)
