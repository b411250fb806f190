"""The ranks of one session on this node: started together; the first that dies takes the others along."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import anyio

from ops.supervise.process import ProcessGivenUpError, ProcessSpec, SupervisedProcess


class RanksEnd(StrEnum):
    """How they ended."""

    FINISHED = "finished"
    """Each has done its work."""
    FAILED = "failed"
    """One died by itself; `reason` says which, and its last lines."""
    STOPPED = "stopped"
    """They were told to."""


class RankProcesses:
    """So many processes, none of which is started again."""

    def __init__(self, specs: Sequence[ProcessSpec]) -> None:
        self._processes: Final = [SupervisedProcess(spec) for spec in specs]
        self._told = False
        self.reason = ""
        self.for_good = False
        """Starting them again won't help."""

    async def run(self) -> RanksEnd:
        """Start them and wait until none is left."""
        async with anyio.create_task_group() as tasks:
            for process in self._processes:
                tasks.start_soon(self._watch, process)
        if self.reason:
            return RanksEnd.FAILED
        finished = all(process.finished.is_set() for process in self._processes)
        return RanksEnd.FINISHED if finished else RanksEnd.STOPPED

    def kill(self) -> None:
        """SIGKILL to all, now: nothing of a step that others can't complete is worth waiting for."""
        self._told = True
        for process in self._processes:
            process.kill()

    async def stop(self) -> None:
        """Let each end after its step, within its deadline."""
        self._told = True
        async with anyio.create_task_group() as tasks:
            for process in self._processes:
                tasks.start_soon(process.stop)

    async def _watch(self, process: SupervisedProcess) -> None:
        try:
            await process.run()
        except ProcessGivenUpError as error:
            if not self._told:
                self.reason = str(error)
                self.for_good = error.for_good
                self.kill()
