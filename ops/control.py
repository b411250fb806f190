"""What a person asks of a whole run: pause, resume, drain. An instruction is a message of the log; sampling obeys it in its order."""

from __future__ import annotations

import uuid

import msgspec

from broker.api import Broker
from pipeline.log import RunLog
from schemas.messages.sampling import Control, ControlAction, RunStarted
from schemas.topics import RUN_CONTROL, RUN_STARTED


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What is in force now."""

    paused: bool = False
    """No new group is issued until a resume; a new start of the run changes nothing in it."""
    draining: bool = False
    """No new group is issued until a resume or a new start of the run."""
    reason: str = ""
    """Of the latest instruction in force."""
    since_unix_s: float = 0.0

    @property
    def word(self) -> str:
        """`paused`, `draining` or nothing."""
        return "paused" if self.paused else "draining" if self.draining else ""

    def after(self, message: msgspec.Struct, unix_time_s: float) -> Standing:
        """What is in force after a message, as sampling sees it."""
        match message:
            case RunStarted():
                return msgspec.structs.replace(self, draining=False)
            case Control(action=ControlAction.PAUSE, reason=reason):
                return Standing(paused=True, draining=self.draining, reason=reason, since_unix_s=unix_time_s)
            case Control(action=ControlAction.DRAIN | ControlAction.STOP, reason=reason):
                return Standing(paused=self.paused, draining=True, reason=reason, since_unix_s=unix_time_s)
            case Control(action=ControlAction.RESUME):
                return Standing()
            case _:
                return self


async def ask(broker: Broker, action: ControlAction, reason: str = "") -> Control:
    """Put an instruction on the log."""
    return await RunLog(broker).publish(Control(id=uuid.uuid4().hex, action=action, reason=reason))


async def standing(broker: Broker) -> Standing:
    """What is in force on a run's log."""
    found = Standing()
    async with RunLog(broker).read([RUN_STARTED, RUN_CONTROL], follow=False) as entries:
        async for entry in entries:
            found = found.after(entry.message, entry.unix_time_s)
    return found
