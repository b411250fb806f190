"""Errors of the training room's backends."""


class TrainingError(Exception):
    """Root: a model, a row or a setting can't be trained with. Not retryable."""


class CollectiveError(TrainingError):
    """Ranks that belong together no longer meet: one died, hangs, or took another path. This rank can't go on alone."""


class CheckpointError(TrainingError):
    """A checkpoint is partial, corrupt or of another model."""


class OtherSettingsError(CheckpointError):
    """A checkpoint was written with other model or optimizer settings: no other start of this trainer can read it."""
