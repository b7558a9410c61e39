"""When a checkpoint is due: the protocol that a cache asks, and the default. Needs the standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

DEFAULT_BYTES = 256 << 20
MOST_CELLS, FEWEST_CELLS = 16, 2


def cells_within(n_bytes: int, state_bytes: int) -> int:
    """Cells for checkpoints that take at most `n_bytes`; `state_bytes`: of one cell, its snapshots included."""
    return n_bytes // max(state_bytes, 1)


def default_checkpoint_cells(state_bytes: int) -> int:
    """Cells for checkpoints when nobody says how many: 16, or what 256 MiB hold, but at least 2."""
    return max(FEWEST_CELLS, min(MOST_CELLS, cells_within(DEFAULT_BYTES, state_bytes)))


class Step(NamedTuple):
    """A sequence before the next ubatch that reads tokens into it: is its state, as it is now, worth a checkpoint?"""

    n_tokens: int
    """Tokens that the state has read."""
    since: int
    """Of these, tokens read since the last checkpoint of the lineage."""
    n_next: int
    """Tokens that the coming ubatch reads into the sequence."""
    same_batch: bool
    """Whether the state lies between two ubatches of one batch; else a batch has ended here."""
    n_batch: int
    """Tokens of the sequence in the batch that the state was last written in, so far."""
    branch: bool
    """Whether this is a branch point: two known continuations part here."""


class CheckpointPolicy(Protocol):
    """Says when a checkpoint is due; none of it has to be exact, a checkpoint costs a cell and no time."""

    @property
    def quiet_tokens(self) -> int:
        """While single tokens are generated, it is asked only after this many since the last checkpoint."""

    def due(self, step: Step) -> bool:
        """Whether to keep the state as it is before `step`."""

    def keep_abandoned(self, n_replay: int) -> bool:
        """Whether to keep a state that its sequence abandons, by a rollback or for other tokens.

        `n_replay`: tokens to replay to get it back without a checkpoint.
        """


@dataclass(frozen=True, slots=True)
class DefaultPolicy:
    """The end of each prompt and the token before it, prompts and answers every `checkpoint_interval` tokens, the end
    of each answer, branch points of known conversations, and abandoned states.
    """

    checkpoint_interval: int = 512
    """Tokens between two checkpoints of a long text. In a prompt, at the edges of ubatches only."""
    least_abandoned: int = 32
    """An abandoned state becomes a checkpoint when a rollback to it would replay at least so many tokens otherwise."""

    @property
    def quiet_tokens(self) -> int:
        """As the interval."""
        return self.checkpoint_interval

    def due(self, step: Step) -> bool:
        """Whether to keep the state as it is before `step`."""
        if not step.since:
            return False
        if step.branch or step.since >= self.checkpoint_interval:
            return True
        if step.same_batch:
            return step.n_next == 1 < step.n_batch  # the last token of a prompt, which a host reads by itself
        return (step.n_batch > 1) != (step.n_next > 1)  # a prompt has ended, or an answer

    def keep_abandoned(self, n_replay: int) -> bool:
        """Whether to keep a state that its sequence abandons."""
        return n_replay >= self.least_abandoned
