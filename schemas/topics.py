"""Every topic of a run's log: name, message, key. The one list that says what may be said."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.messages import rollout as r
from schemas.messages import sampling as s
from schemas.messages import training as t
from schemas.subjects import Topic

RUN_STARTED: Final = Topic("run.started", s.RunStarted, lambda m: (m.ordinal,), "ordinal")
RUN_FINISHED: Final = Topic("run.finished", s.RunFinished, lambda m: (m.ordinal,), "ordinal")
STREAM_LISTED: Final = Topic("stream.listed", s.StreamListed, lambda m: (m.stream,), "stream")
PROMPT_PUBLISHED: Final = Topic(
    "prompt.published", s.PromptPublished, lambda m: (m.stream, m.data_id), "stream.data_id"
)
GROUP_ISSUED: Final = Topic("group.issued", s.GroupIssued, lambda m: (m.group,), "group")
EPISODE_REQUESTED: Final = Topic(
    "episode.requested", s.EpisodeRequested, lambda m: (m.group, m.slot, m.attempt), "group.slot.attempt"
)
EPISODE_LAUNCHED: Final = Topic(
    "episode.launched",
    r.EpisodeLaunched,
    lambda m: (m.group, m.slot, m.attempt, m.launch_try),
    "group.slot.attempt.try",
)
EPISODE_ACCEPTED: Final = Topic(
    "episode.accepted",
    r.EpisodeAccepted,
    lambda m: (m.group, m.slot, m.attempt, m.launch_try),
    "group.slot.attempt.try",
)
SESSION_CLAIMED: Final = Topic("session.claimed", r.SessionClaimed, lambda m: (m.claim, m.ordinal), "claim.ordinal")
SESSION_OPENED: Final = Topic("session.opened", r.SessionOpened, lambda m: (m.session, m.gateway), "session.gateway")
INTERACTION_RECORDED: Final = Topic(
    "interaction.recorded", r.InteractionRecorded, lambda m: (m.session, m.ordinal), "session.ordinal"
)
SESSION_CLOSED: Final = Topic("session.closed", r.SessionClosed, lambda m: (m.session,), "session")
SESSION_REWARDED: Final = Topic(
    "session.rewarded", r.SessionRewarded, lambda m: (m.session, m.ordinal), "session.ordinal"
)
EPISODE_ENDED: Final = Topic(
    "episode.ended", r.EpisodeEnded, lambda m: (m.group, m.slot, m.attempt), "group.slot.attempt"
)
TRAJECTORY_READY: Final = Topic("trajectory.ready", r.Trajectory, lambda m: (m.group, m.slot), "group.slot")
GROUP_CLOSED: Final = Topic("group.closed", s.GroupClosed, lambda m: (m.group,), "group")
STEP_ASSEMBLED: Final = Topic("step.assembled", t.StepAssembled, lambda m: (m.step,), "step")
STEP_TRAINED: Final = Topic("step.trained", t.StepTrained, lambda m: (m.step, m.generation), "step.generation")
WEIGHTS_PUBLISHED: Final = Topic(
    "weights.published", t.WeightsPublished, lambda m: (m.version, m.generation), "version.generation"
)
WEIGHTS_LOADED: Final = Topic(
    "weights.loaded",
    t.WeightsLoaded,
    lambda m: (m.engine, m.incarnation, m.version, m.generation),
    "engine.incarnation.version.generation",
)
RUN_CONTROL: Final = Topic("run.control", s.Control, lambda m: (m.id,), "id")
FOLD_TICK: Final = Topic("fold.tick", s.Tick, lambda m: (m.ordinal,), "ordinal")
RUN_RETAIN: Final = Topic("run.retain", s.Retain, lambda m: (m.ordinal,), "ordinal")
DEAD_LETTER: Final = Topic("dead.letter", s.DeadLetter, lambda m: (m.stage, m.sequence), "stage.sequence")
DEAD_RETRY: Final = Topic(
    "dead.retry", s.DeadRetry, lambda m: (m.stage, m.sequence, m.attempt), "stage.sequence.attempt"
)
DEAD_DROPPED: Final = Topic("dead.dropped", s.DeadDropped, lambda m: (m.stage, m.sequence), "stage.sequence")

TOPICS: Final[tuple[Topic[msgspec.Struct], ...]] = (
    RUN_STARTED,
    RUN_FINISHED,
    STREAM_LISTED,
    PROMPT_PUBLISHED,
    GROUP_ISSUED,
    EPISODE_REQUESTED,
    EPISODE_LAUNCHED,
    EPISODE_ACCEPTED,
    SESSION_CLAIMED,
    SESSION_OPENED,
    INTERACTION_RECORDED,
    SESSION_CLOSED,
    SESSION_REWARDED,
    EPISODE_ENDED,
    TRAJECTORY_READY,
    GROUP_CLOSED,
    STEP_ASSEMBLED,
    STEP_TRAINED,
    WEIGHTS_PUBLISHED,
    WEIGHTS_LOADED,
    RUN_CONTROL,
    FOLD_TICK,
    RUN_RETAIN,
    DEAD_LETTER,
    DEAD_RETRY,
    DEAD_DROPPED,
)  # pyright: ignore[reportAssignmentType] - Topic is invariant in its message; readers of this list only decode


def topic_named(name: str) -> Topic[msgspec.Struct] | None:
    """The topic of that name, or None."""
    return next((topic for topic in TOPICS if topic.name == name), None)
