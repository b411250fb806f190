"""A user's filter, found by its import path."""

from stages.assembly.filters import GroupView


def no_short_answers(view: GroupView) -> str | None:
    return "short" if min(slot.num_loss_tokens for slot in view.slots) < 5 else None
