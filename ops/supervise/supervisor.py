"""All supervised processes of this node: started in order, stopped together, no one left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
import anyio.abc
import structlog

from ops.supervise.process import ProcessGivenUpError, ProcessSpec, SupervisedProcess

log = structlog.get_logger("headrace.supervisor")


class Supervisor:
    """Starts processes into a task group; the first essential one that is given up ends them all."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.processes: Final[dict[str, SupervisedProcess]] = {}
        self.failure: ProcessGivenUpError | None = None
        self.failed: Final = anyio.Event()
        self._tasks: Final = tasks

    async def start(
        self,
        spec: ProcessSpec,
        *,
        on_ready: Callable[[str], None] | None = None,
        on_given_up: Callable[[str], None] | None = None,
    ) -> SupervisedProcess:
        """Start a process; returns when it is ready.

        Args:
            on_ready: gets its ready line.
            on_given_up: gets the reason when it is given up and is not essential.

        Raises:
            ProcessGivenUpError: it did not become ready.
        """
        process = SupervisedProcess(spec, on_ready=on_ready)
        self.processes[spec.name] = process
        self._tasks.start_soon(self._watch, process, on_given_up)
        await self.wait_for(process.ready)
        return process

    async def wait_for(self, event: anyio.Event) -> None:
        """Wait for an event of a process, unless an essential one is given up first.

        Raises:
            ProcessGivenUpError: that one's end.
        """
        async with anyio.create_task_group() as tasks:

            async def give_up() -> None:
                await self.failed.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(give_up)
            await event.wait()
            tasks.cancel_scope.cancel()
        if self.failure is not None and not event.is_set():
            raise self.failure

    async def stop(self, *, servers: bool = True) -> None:
        """Stop all, in parallel within their deadlines; those that serve others come last, or with `servers` False stay."""
        with anyio.CancelScope(shield=True):
            for serves_others in (False, True) if servers else (False,):
                async with anyio.create_task_group() as tasks:
                    for process in self.processes.values():
                        if process.spec.serves_others is serves_others:
                            tasks.start_soon(process.stop)

    def kill(self) -> None:
        """SIGKILL to all, without waiting: this process is about to end."""
        for process in self.processes.values():
            process.kill()

    def fail(self, reason: str) -> None:
        """End everything for a reason that is no process's own."""
        self._fail(ProcessGivenUpError(reason))

    def _fail(self, failure: ProcessGivenUpError) -> None:
        if self.failure is None:
            self.failure = failure
            self.failed.set()

    async def end(self, name: str) -> bool:
        """Stop one process for good; whether there was one."""
        process = self.processes.pop(name, None)
        if process is None:
            return False
        await process.stop()
        return True

    async def _watch(self, process: SupervisedProcess, on_given_up: Callable[[str], None] | None) -> None:
        try:
            await process.run()
        except ProcessGivenUpError as error:
            log.error("a process is given up", name=process.spec.name)  # noqa: TRY400 - the text holds its last lines
            if process.spec.essential:
                self._fail(error)
            elif on_given_up is not None:
                on_given_up(str(error))
