"""Launchers of two nodes over one broker, with processes in place of ranks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from alive import lives

from broker.memory import MemoryBroker, MemoryServer
from ops.nodes.rank_failures import RankFailures
from ops.nodes.ranks import (
    LeaderWord,
    MemberWord,
    RankGroup,
    RankMember,
    RanksGivenUpError,
    Word,
    rank_environments,
    words_subject,
)
from ops.supervise.process import ProcessSpec, RestartPolicy
from ops.workers.checkpoint_place import meet_in
from ops.workers.ranks import ERROR_LABEL, RankLauncher
from pipeline.metrics import Metrics
from schemas.errors import ConfigError

RANK = """
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
name = f"{os.environ['HEADRACE_TRAINER_SESSION']}.{os.environ['RANK']}"
(place / f".{name}").write_text(str(os.getpid()))
(place / f".{name}").rename(place / name)
if (place / "broken").exists():
    print("the model has no such layer", file=sys.stderr)
    sys.exit(int((place / "broken").read_text() or 1))
while not (place / "done").exists():
    time.sleep(0.01)
"""
"""Says that it runs, and runs until a file tells that all is done."""


class Link:
    """What a launcher uses of its broker. While it is away, words are kept back, as clients do."""

    run = "r"

    def __init__(self) -> None:
        self._broker = MemoryBroker(MemoryServer(), "r")
        self.listen = self._broker.listen
        self.away = False
        self.kept: list[tuple[str, bytes]] = []

    async def announce(self, subject: str, data: bytes) -> None:
        if self.away:
            self.kept.append((subject, data))
        else:
            await self._broker.announce(subject, data)

    async def come_back(self) -> None:
        """Deliver what was kept back, one launcher's words after the other's."""
        self.away = False
        for subject, data in sorted(self.kept, key=lambda kept: getattr(decoded(kept[1]), "node", "")):
            await self._broker.announce(subject, data)
            await anyio.wait_all_tasks_blocked()  # each launcher has heard it and acted


def decoded(data: bytes) -> Word:
    return msgspec.msgpack.decode(data, type=Word)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker = Link()
        self.metrics: dict[str, Metrics] = {}

    def launcher(self, node: str, *, settings: str = "same", most_failures: int = 99) -> RankLauncher:
        members = (RankMember(node="a", num_ranks=1), RankMember(node="b", num_ranks=2))
        group = RankGroup(node=node, address="127.0.0.1", members=members, master="127.0.0.1", port=0)

        async def specs(word: LeaderWord) -> list[ProcessSpec]:
            return [
                ProcessSpec(
                    name=f"rank {environment['RANK']}",
                    argv=[sys.executable, "-c", RANK, str(self.folder)],
                    env=environment,
                    log_file=str(self.folder / "logs" / f"{environment['RANK']}.log"),
                    finishes=True,
                    stop_deadline_s=1.0,
                    restart=RestartPolicy(max_restarts=0),
                )
                for environment in rank_environments(group, word, "")
            ]

        self.metrics[node] = Metrics("r", "ranks")
        return RankLauncher(
            self.broker,
            group,
            self.metrics[node],
            specs,
            self.folder / "shared",
            silent_beats=2,
            failures=RankFailures(most_failures, lambda: 0),
            settings=settings,
        )

    def sessions(self) -> dict[str, dict[str, int]]:
        """Session → rank → process."""
        found: dict[str, dict[str, int]] = {}
        for path in self.folder.glob("[0-9a-f]*.[012]"):
            session, _, rank = path.name.partition(".")
            found.setdefault(session, {})[rank] = int(path.read_text())
        return found

    def whole(self, *, but: set[str] = frozenset()) -> dict[str, dict[str, int]]:
        """Sessions in which every rank came up."""
        return {name: ranks for name, ranks in self.sessions().items() if len(ranks) == 3 and name not in but}


def living(ranks: dict[str, int]) -> list[str]:
    return [rank for rank, pid in ranks.items() if lives(pid)]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@asynccontextmanager
async def running(*launchers: RankLauncher) -> AsyncGenerator[anyio.abc.TaskGroup]:
    async with anyio.create_task_group() as tasks:
        for launcher in launchers:
            tasks.start_soon(launcher.run)
        yield tasks
        tasks.cancel_scope.cancel()


async def test_a_rank_that_dies_takes_those_of_the_other_node_along_and_all_begin_again(rig, wait_until) -> None:
    async with running(rig.launcher("a"), rig.launcher("b")):
        await wait_until(rig.whole)
        ((first, ranks),) = rig.whole().items()
        os.kill(ranks["2"], signal.SIGKILL)
        await wait_until(lambda: not living(ranks))
        await wait_until(lambda: rig.whole(but={first}))
        assert sorted(living(*rig.whole(but={first}).values())) == ["0", "1", "2"]


async def test_the_reason_is_told_until_the_next_session_begins(rig, wait_until) -> None:
    leader = rig.launcher("a")
    async with running(leader) as tasks:
        async with anyio.create_task_group() as other:
            other.start_soon(rig.launcher("b").run)
            await wait_until(rig.whole)
            other.cancel_scope.cancel()  # as a node that dies: its ranks are gone, and it says nothing more
        reason = "node b is silent: it died, or can't reach the broker"
        await wait_until(lambda: rig.metrics["a"].labels.get(ERROR_LABEL) == reason)
        await wait_until(lambda: not living(*rig.whole().values()))
        waits_for = "node b, to begin with all 3 ranks"
        await wait_until(lambda: rig.metrics["a"].report().waiting_for == waits_for)
        known = set(rig.sessions())
        tasks.start_soon(rig.launcher("b").run)
        await wait_until(lambda: rig.whole(but=known))
        await wait_until(lambda: ERROR_LABEL not in rig.metrics["a"].labels)


async def test_a_broker_that_was_away_ends_no_session(rig, wait_until) -> None:
    async with running(rig.launcher("a"), rig.launcher("b")):
        await wait_until(rig.whole)
        ((_, ranks),) = rig.whole().items()
        rig.broker.away = True
        await wait_until(lambda: len({decoded(data).beat for _, data in rig.broker.kept if _member(data)}) > 5)
        await rig.broker.come_back()
        heard: list[int] = []
        async with rig.broker.listen(words_subject("r")) as words:
            async for _, data in words:  # until long after a node would have been given up
                if _member(data):
                    heard.append(decoded(data).beat)
                if heard and max(heard) > min(heard) + 4:
                    break
        assert sorted(living(ranks)) == ["0", "1", "2"]
        assert len(rig.sessions()) == 1


def _member(data: bytes) -> bool:
    return isinstance(decoded(data), MemberWord)


async def test_ranks_whose_leading_node_died_are_ended_and_wait_for_it(rig, wait_until) -> None:
    async with running(rig.launcher("b")) as tasks:
        async with anyio.create_task_group() as other:
            other.start_soon(rig.launcher("a").run)
            await wait_until(rig.whole)
            other.cancel_scope.cancel()
        await wait_until(lambda: not living(*rig.whole().values()))
        known = set(rig.sessions())
        tasks.start_soon(rig.launcher("a").run)
        await wait_until(lambda: rig.whole(but=known))


async def test_launchers_end_when_all_ranks_have_finished(rig, wait_until) -> None:
    async with anyio.create_task_group() as tasks:
        for node in "ab":
            tasks.start_soon(rig.launcher(node).run)
        await wait_until(rig.whole)
        (rig.folder / "done").touch()
    assert len(rig.sessions()) == 1


async def test_a_node_that_leaves_ends_its_ranks_and_the_others_wait_for_it(rig, wait_until) -> None:
    leaving = rig.launcher("b")
    async with running(rig.launcher("a")):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leaving.run)
            await wait_until(rig.whole)
            leaving.drain()
        await wait_until(lambda: not living(*rig.whole().values()))
        await wait_until(lambda: "node b" in rig.metrics["a"].report().waiting_for)


async def test_ranks_that_fail_again_and_again_are_given_up_with_their_last_lines(rig) -> None:
    (rig.folder / "broken").touch()
    said = (
        r"the trainer's ranks failed 2 times within 120 s\. node [ab]: rank \d ended .*\n.*the model has no such layer"
    )
    with pytest.RaisesGroup(pytest.RaisesExc(RanksGivenUpError, match=said), flatten_subgroups=True):
        async with running(rig.launcher("a", most_failures=1), rig.launcher("b")):
            await anyio.sleep_forever()


async def test_a_rank_that_can_never_run_is_not_started_again(rig) -> None:
    (rig.folder / "broken").write_text("78")
    said = (
        r"the trainer's ranks can't run as they are set\. node [ab]: rank \d ended \(exit code 78\).*\n.*no such layer"
    )
    with pytest.RaisesGroup(pytest.RaisesExc(RanksGivenUpError, match=said), flatten_subgroups=True):
        async with running(rig.launcher("a"), rig.launcher("b")):
            await anyio.sleep_forever()
    assert len(rig.sessions()) == 1


async def test_a_node_with_other_settings_trains_nothing_and_says_so(rig, wait_until) -> None:
    async with running(rig.launcher("a"), rig.launcher("b", settings="other")):
        await wait_until(
            lambda: (
                rig.metrics["a"].labels.get(ERROR_LABEL, "").startswith("node b: other [training], [loss], [assembly]")
            )
        )
    assert not rig.whole()


async def test_a_node_with_another_checkpoint_folder_is_told_so(tmp_path: Path) -> None:
    await meet_in(tmp_path / "one", "s1", leads=True, leader="a")
    await meet_in(tmp_path / "one", "s1", leads=False, leader="a")
    with pytest.raises(
        ConfigError, match=r"two is not the folder that node a writes to .* expected one on a file system"
    ):
        await meet_in(tmp_path / "two", "s1", leads=False, leader="a", deadline_s=0.2)
    await meet_in(tmp_path / "one", "s2", leads=True, leader="a")
    with pytest.raises(ConfigError, match="is not the folder"):
        await meet_in(tmp_path / "one", "s1", leads=False, leader="a", deadline_s=0.2)
