"""The account of a chaos run from its log alone, read as plain maps: no message type, fold or account of the run is used.

Every issued slot must have exactly one counted result, every group one end, every row one place in one step, every answered call
its record, every step the weights that its manifest gives. What does not hold is named: lost, doubled or unexplained.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Any, Final

import msgspec

Plain = dict[str, Any]  # Any: a message as msgpack says it

_EXPLAINED_LETTERS: Final = frozenset({"deliveries"})
"""A message that was handed out too often, since its workers were killed again and again; its slot must still have a result."""


class Findings(msgspec.Struct, kw_only=True):
    """What does not hold, in words."""

    lost: list[str] = []
    doubled: list[str] = []
    unexplained: list[str] = []


class Ledger:
    """Takes the log in its order; `close` says what does not hold."""

    def __init__(self, *, groups_per_step: int, max_staleness: int) -> None:
        self.findings: Final = Findings()
        self.topics: Final[Counter[str]] = Counter()
        self.manifests: Final[dict[int, Plain]] = {}
        """step → the reference of its manifest."""
        self.trained: Final[dict[int, dict[int, str]]] = defaultdict(dict)
        """step → generation → digest of the weights."""
        self.row_tokens: Final[dict[str, Plain]] = {}
        """row → the reference of its tokens."""
        self._groups_per_step: Final = groups_per_step
        self._max_staleness: Final = max_staleness
        self._subjects: Final[set[str]] = set()
        self._slots: Final[dict[str, int]] = {}
        self._requested: Final[set[tuple[str, int]]] = set()
        self._final_ends: Final[Counter[tuple[str, int]]] = Counter()
        self._results: Final[Counter[tuple[str, int]]] = Counter()
        self._rows_of: Final[dict[str, tuple[str, int]]] = {}
        self._closed: Final[dict[str, Plain]] = {}
        self._steps_of: Final[dict[str, list[int]]] = defaultdict(list)
        self._dropped: Final[Counter[str]] = Counter()
        self._recorded: Final[dict[str, set[int]]] = defaultdict(set)
        self._interactions: Final[set[str]] = set()
        self._sessions: Final[dict[str, int]] = {}
        self._failed_sessions: Final[set[str]] = set()

    @property
    def num_dropped(self) -> int:
        """Groups that closed unusable or were dropped later."""
        return len(self._dropped)

    @property
    def num_repeated_ends(self) -> int:
        """Slots of which two workers saw an end of their own; the first one that is mapped counts."""
        return sum(count > 1 for count in self._final_ends.values())

    def take(self, subject: str, data: bytes) -> None:
        """One message."""
        if subject in self._subjects:
            self.findings.doubled.append(f"{subject} stands twice")
            return
        self._subjects.add(subject)
        topic = ".".join(subject.split(".")[2:4])
        self.topics[topic] += 1
        message: Plain = msgspec.msgpack.decode(data)
        handler = getattr(self, f"_on_{topic.replace('.', '_')}", None)
        if handler is not None:
            handler(message)

    def _on_group_issued(self, message: Plain) -> None:
        self._slots[message["group"]] = message["num_slots"]

    def _on_episode_requested(self, message: Plain) -> None:
        self._requested.add((message["group"], message["slot"]))

    def _on_episode_ended(self, message: Plain) -> None:
        self._final_ends[message["group"], message["slot"]] += message["final"]

    def _on_interaction_recorded(self, message: Plain) -> None:
        self._recorded[message["session"]].add(message["ordinal"])
        self._interactions.add(message["interaction_id"])

    def _on_session_closed(self, message: Plain) -> None:
        self._sessions[message["session"]] = message["num_interactions"]
        if message.get("system_error"):
            self._failed_sessions.add(message["session"])

    def _on_trajectory_ready(self, message: Plain) -> None:
        slot = (message["group"], message["slot"])
        self._results[slot] += 1
        for row in message.get("rows", []):
            self._rows_of[row["row"]] = slot
            self.row_tokens[row["row"]] = row["tokens"]

    def _on_group_closed(self, message: Plain) -> None:
        self._closed[message["group"]] = message

    def _on_step_assembled(self, message: Plain) -> None:
        step = message["step"]
        self.manifests[step] = message["manifest"]
        for group in message["groups"]:
            self._steps_of[group].append(step)
        for dropped in message.get("dropped", []):
            self._dropped[dropped[0]] += 1
        staleness = step - 1 - message["min_version"]
        if staleness > self._max_staleness:
            self.findings.unexplained.append(
                f"step {step} is {staleness} versions stale, allowed {self._max_staleness}"
            )

    def _on_step_trained(self, message: Plain) -> None:
        self.trained[message["step"]][message["generation"]] = message["digest"]

    def _on_dead_letter(self, message: Plain) -> None:
        if message["reason"] not in _EXPLAINED_LETTERS:
            self.findings.unexplained.append(
                f"dead letter of {message['stage']}: {message['subject']}: {message['reason']}: {message['error'][:200]}"
            )

    def close(self, *, answered: Collection[str]) -> Findings:
        """Everything has been taken.

        Args:
            answered: ids of the calls whose answers reached an agent.
        """
        self._check_slots()
        self._check_groups()
        self._check_sessions()
        self._check_steps()
        for interaction in sorted(set(answered) - self._interactions - {""}):
            self.findings.lost.append(f"call {interaction} was answered and is not on the log")
        return self.findings

    def _check_slots(self) -> None:
        found = self.findings
        for group, num_slots in self._slots.items():
            for slot in range(num_slots):
                key = (group, slot)
                if self._results[key] != 1:
                    (found.doubled if self._results[key] else found.lost).append(
                        f"slot {group}/{slot} has {self._results[key]} results"
                    )
                if key not in self._requested:
                    found.lost.append(f"slot {group}/{slot} was never asked for")
        for group, _slot in self._results.keys() | self._requested:
            if group not in self._slots:
                found.unexplained.append(f"group {group} was never issued")

    def _check_groups(self) -> None:
        found = self.findings
        waiting: list[str] = []
        for group, num_slots in self._slots.items():
            closed = self._closed.get(group)
            ends = len(self._steps_of[group]) + self._dropped[group]
            if closed is None:
                found.lost.append(f"group {group} was never closed")
            elif sum(closed.get(key, 0) for key in ("num_usable", "num_rejected", "num_missing")) != num_slots:
                found.unexplained.append(f"group {group} was closed over other numbers than its {num_slots} slots")
            elif ends > 1:
                found.doubled.append(f"group {group} ended {ends} times: steps {self._steps_of[group]}")
            elif not ends and closed["usable"]:
                waiting.append(group)
        if len(waiting) >= self._groups_per_step:
            found.unexplained += [f"group {group} is closed, usable and in no step" for group in waiting]

    def _check_sessions(self) -> None:
        for session, count in self._sessions.items():
            ordinals = self._recorded[session]
            # A call whose storage nobody confirmed in time was answered with an error and failed its session: it may stand, uncounted.
            in_doubt = {count} if session in self._failed_sessions else set[int]()
            if ordinals - in_doubt != set(range(count)):
                self.findings.lost.append(
                    f"session {session} closed with {count} calls, recorded are {sorted(ordinals)}"
                )

    def _check_steps(self) -> None:
        expected = set(range(1, len(self.manifests) + 1))
        if set(self.manifests) != expected:
            self.findings.lost.append(f"steps {sorted(expected - set(self.manifests))} are missing")
        for step in sorted(set(self.manifests) - set(self.trained)):
            self.findings.lost.append(f"step {step} was assembled and never trained")
        for step in sorted(set(self.trained) - set(self.manifests)):
            self.findings.unexplained.append(f"step {step} was trained and never assembled")

    def check_rows(self, step: int, manifest: Plain, seen: dict[str, int]) -> None:
        """The rows of one step.

        Args:
            step: from 1.
            manifest: its payload.
            seen: row → the step that has it; grows.
        """
        for number, row in enumerate(manifest["row_ids"]):
            slot = self._rows_of.get(row)
            group = manifest["groups"][_int32(manifest["row_group"], number)]
            if slot is None or slot[0] != group:
                self.findings.unexplained.append(f"row {row} of step {step} comes from no result of group {group}")
            elif manifest["payload_ids"][number] != self.row_tokens[row]["id"]:
                self.findings.unexplained.append(f"row {row} of step {step} names other tokens than its result")
            if row in seen:
                self.findings.doubled.append(f"row {row} is in step {seen[row]} and in step {step}")
            seen[row] = step


def _int32(array: list[Any], index: int) -> int:
    """One item of an encoded int32 array: [dtype, little-endian bytes]."""
    return int.from_bytes(array[1][4 * index : 4 * index + 4], "little", signed=True)
