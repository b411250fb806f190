"""Errors of the training room's backends."""


class TrainingError(Exception):
    """Root: a model, a row or a setting can't be trained with. Not retryable."""


class CheckpointError(TrainingError):
    """A checkpoint is partial, corrupt or of another model."""
