"""Which incarnations of the trainer speak for the run, told from the order of the log alone.

    … trained.2.g1   trained.3.g1   trained.3.g2   trained.4.g1 ✗   trained.4.g2 …

A trainer that sleeps between its last look at its lease and its publish wakes to say one thing more. Where a later generation
spoke before it, every reader passes it over; where none did, it is as if it had spoken and then died.
"""

from __future__ import annotations


class Generations:
    """The newest generation that was heard, in the order of the log."""

    def __init__(self, newest: int = 0) -> None:
        self.newest = newest

    def admits(self, generation: int) -> bool:
        """Whether a message of this generation counts; hears it."""
        self.newest = max(self.newest, generation)
        return generation == self.newest
