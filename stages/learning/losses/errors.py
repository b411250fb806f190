"""Errors of the losses: settings that don't fit together, inputs that a setting needs and doesn't get."""


class LossError(ValueError):
    """Root of the losses' errors."""


class LossConfigError(LossError):
    """Settings that exclude each other; raised before anything starts."""


class LossInputError(LossError):
    """A batch lacks what the settings need, or holds values that can't be trained on."""
