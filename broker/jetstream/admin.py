"""Topologies on a live server: apply, verify, compare. What stands there otherwise than declared is reported, and
changed only when asked to.
"""

from __future__ import annotations

import msgspec

from broker.errors import StoreFullError, TooFewServersError, TopologyError
from broker.jetstream.api import ApiError, Code, call
from broker.jetstream.link import Link
from broker.naming import run_names
from broker.shapes import ConsumerInfo, ConsumerPage, Done, StreamInfo, StreamNames
from broker.topology import (
    DurableSpec,
    StreamSpec,
    Topology,
    difference,
    durable_body,
    durable_spec,
    foreign_settings,
    stream_body,
    stream_spec,
)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What `apply` did to one thing."""

    what: str
    done: str
    """`created`, `changed`, `unchanged`, or `differs`."""
    differences: list[str] = []


class Admin:
    """The rights of somebody who may make streams and durables."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def apply(self, topology: Topology, *, update: bool = False) -> list[Change]:
        """Create what is missing.

        Args:
            topology: What is wanted.
            update: Change what differs, too (where the server allows it).

        Raises:
            TopologyError: something differs and `update` is False, or the server refuses the change. Nothing was
                changed by then but what was missing.
        """
        changes = [await self._apply_stream(spec, update=update) for spec in topology.streams]
        log = topology.log.name
        changes += [await self._apply_durable(log, spec, update=update) for spec in topology.durables]
        refused = [line for change in changes if change.done == "differs" for line in change.differences]
        if refused:
            raise TopologyError("; ".join(refused) + ". Apply with update to change it, or use another run id")
        return changes

    async def diff(self, topology: Topology) -> list[str]:
        """One line for each thing that is missing or differs; empty if all stands as declared."""
        lines: list[str] = []
        for spec in topology.streams:
            found = await self._stream(spec.name)
            lines += [f"stream {spec.name}: missing"] if found is None else _stream_lines(spec, found)
        for wanted in topology.durables:
            info = await self._durable(topology.log.name, wanted.name)
            lines += [f"durable {wanted.name}: missing"] if info is None else _durable_lines(wanted, info)
        return lines

    async def verify(self, topology: Topology) -> None:
        """Raise TopologyError unless all stands as declared."""
        lines = await self.diff(topology)
        if lines:
            raise TopologyError("; ".join(lines))

    async def runs(self) -> list[str]:
        """The runs that have a log on this server."""
        found: list[str] = []
        offset = 0
        while True:
            page = await call(self._link, "STREAM.NAMES", {"offset": offset}, StreamNames)
            names = page.streams or []
            found += [name.removeprefix("HR_") for name in names if name.startswith("HR_")]
            offset += len(names)
            if not names or offset >= page.total:
                return sorted(found)

    async def delete_run(self, run: str) -> None:
        """Delete all streams of a run, with everything in them."""
        names = run_names(run)
        for stream in (names.log_stream, names.state_stream, names.payload_stream):
            try:
                await call(self._link, f"STREAM.DELETE.{stream}", None, Done)
            except ApiError as error:
                if error.err_code != Code.STREAM_NOT_FOUND:
                    raise

    async def delete_durable(self, run: str, durable: str) -> None:
        """Delete a durable with its position."""
        try:
            await call(self._link, f"CONSUMER.DELETE.{run_names(run).log_stream}.{durable}", None, Done)
        except ApiError as error:
            if error.err_code not in (Code.CONSUMER_NOT_FOUND, Code.STREAM_NOT_FOUND):
                raise

    async def _stream(self, name: str) -> StreamInfo | None:
        try:
            return await call(self._link, f"STREAM.INFO.{name}", None, StreamInfo)
        except ApiError as error:
            if error.err_code == Code.STREAM_NOT_FOUND:
                return None
            raise

    async def _durable(self, stream: str, name: str) -> ConsumerInfo | None:
        try:
            return await call(self._link, f"CONSUMER.INFO.{stream}.{name}", None, ConsumerInfo)
        except ApiError as error:
            if error.err_code in (Code.CONSUMER_NOT_FOUND, Code.STREAM_NOT_FOUND):
                return None
            raise

    async def _apply_stream(self, spec: StreamSpec, *, update: bool) -> Change:
        what = f"stream {spec.name}"
        found = await self._stream(spec.name)
        if found is None:
            await self._change(f"STREAM.CREATE.{spec.name}", stream_body(spec), StreamInfo)
            return Change(what=what, done="created")
        lines = _stream_lines(spec, found)
        if not lines:
            return Change(what=what, done="unchanged")
        if not update:
            return Change(what=what, done="differs", differences=lines)
        await self._change(f"STREAM.UPDATE.{spec.name}", stream_body(spec), StreamInfo)
        return Change(what=what, done="changed", differences=lines)

    async def _apply_durable(self, stream: str, spec: DurableSpec, *, update: bool) -> Change:
        what = f"durable {spec.name}"
        found = await self._durable(stream, spec.name)
        lines = [] if found is None else _durable_lines(spec, found)
        if found is not None and not lines:
            return Change(what=what, done="unchanged")
        if lines and not update:
            return Change(what=what, done="differs", differences=lines)
        await self._change(f"CONSUMER.CREATE.{stream}.{spec.name}", durable_body(stream, spec), ConsumerInfo)
        return Change(what=what, done="changed" if lines else "created", differences=lines)

    async def _change(self, subject: str, body: object, kind: type[StreamInfo | ConsumerInfo]) -> None:
        try:
            await call(self._link, subject, body, kind)
        except ApiError as error:
            if error.err_code in (Code.INSUFFICIENT_STORAGE, Code.NO_SPACE):
                raise StoreFullError(f"the server has no room for this limit: {error}. Lower max_bytes") from error
            if error.err_code == Code.NO_PEERS:
                raise TooFewServersError(
                    f"a stream can't be made with so many copies (broker.replicas) before as many servers are there: {error}"
                ) from error
            raise TopologyError(f"the server refuses: {error}") from error

    async def consumers(self, run: str) -> list[ConsumerInfo]:
        """All durables of a run's log."""
        return await list_consumers(self._link, run_names(run).log_stream)


async def list_consumers(link: Link, stream: str) -> list[ConsumerInfo]:
    """All durables of a stream."""
    found: list[ConsumerInfo] = []
    offset = 0
    while True:
        page = await call(link, f"CONSUMER.LIST.{stream}", {"offset": offset}, ConsumerPage)
        infos = page.consumers or []
        found += [info for info in infos if info.config.durable_name]
        offset += len(infos)
        if not infos or offset >= page.total:
            return found


def _stream_lines(spec: StreamSpec, found: StreamInfo) -> list[str]:
    return difference(spec, stream_spec(found.config), f"stream {spec.name}") + foreign_settings(found.config)


def _durable_lines(spec: DurableSpec, found: ConsumerInfo) -> list[str]:
    return difference(spec, durable_spec(found.name, found.config), f"durable {spec.name}")
