"""Everything that sampling knows: what a checkpoint of its fold holds."""

from __future__ import annotations

import msgspec

from schemas.messages.sampling import StreamListed
from stages.sampling.evaluation import EvaluationState
from stages.sampling.mixture import MixturePosition
from stages.sampling.open_streams import OpenStream


class SamplingState(msgspec.Struct, kw_only=True):
    """See the module."""

    listed: dict[str, StreamListed] = {}
    open: dict[str, OpenStream] = {}
    """The open streams that something was heard of."""
    listed_turns: int = 0
    """Rows drawn from the listed streams, beside open ones: their common place among the turns."""
    start: int = 0
    """Ordinal of the run's latest start."""
    finished: int = -1
    """The start for which the end was said."""
    max_steps: int | None = None
    """The run's end, as its latest start set it."""
    max_epochs: int | None = None
    position: MixturePosition | None = None
    num_issued: int = 0
    running: dict[str, None] = {}
    """Issued and not closed."""
    waiting: dict[str, None] = {}
    """Closed, usable, in no trained step."""
    steps: dict[int, list[str]] = {}
    """Assembled and not yet trained: step → its groups."""
    num_assembled: int = 0
    """Highest assembled step."""
    num_trained: int = 0
    """Highest trained step: the weight version that exists."""
    trainer: int = 0
    """Newest generation of the trainer that was heard."""
    num_groups_trained: int = 0
    num_groups_dropped: int = 0
    num_evaluation_issued: int = 0
    """Evaluation groups among `num_issued`."""
    evaluations: dict[str, EvaluationState] = {}
    evaluating: dict[str, None] = {}
    """Evaluation groups that are issued and not closed."""
    tick: int = 0
    full: bool = False
    """The run's store is nearly full."""
    issue_below: int | None = None
    """Groups with an ordinal below this have room in the store; None: nobody said."""
    paused: bool = False
    draining: bool = False

    @property
    def num_training_issued(self) -> int:
        """Issued groups that are no evaluation's."""
        return self.num_issued - self.num_evaluation_issued
