from __future__ import annotations

import anyio
from hypothesis import given
from hypothesis import strategies as st

from broker.memory import MemoryBroker
from pipeline.headroom import WorkerBroker
from pipeline.metrics import Metrics
from pipeline.runner import StageRunner
from pipeline.stage import bind
from pipeline.tracing import HEADER, Place, place_of, traceparent
from schemas.ids import group_id, session_id
from stages.fan_out import fan_out

EPISODE = [
    "hr.demo.episode.requested.g0000001.2.0",
    "hr.demo.episode.launched.g0000001.2.0.0",
    "hr.demo.episode.accepted.g0000001.2.0.0",
    "hr.demo.session.opened.g0000001-2-0-0.gw",
    "hr.demo.interaction.recorded.g0000001-2-0-0.0",
    "hr.demo.session.closed.g0000001-2-0-0",
    "hr.demo.episode.ended.g0000001.2.0",
    "hr.demo.episode.requested.g0000001.2.1",
    "hr.demo.episode.ended.g0000001.2.1",
    "hr.demo.trajectory.ready.g0000001.2",
]


def test_all_messages_of_an_episode_share_a_trace_and_form_one_tree() -> None:
    places = {subject: place_of(subject) for subject in EPISODE}
    assert len({place.trace_id for place in places.values()}) == 1
    spans = {place.span_id for place in places.values()}
    assert len(spans) == len(EPISODE)
    roots = [subject for subject, place in places.items() if not place.parent_id]
    assert roots == EPISODE[:1]
    assert all(place.parent_id in spans for subject, place in places.items() if subject not in roots)
    assert places[EPISODE[4]].parent_id == places[EPISODE[5]].span_id
    assert places[EPISODE[7]].parent_id == places[EPISODE[6]].span_id


@given(group=st.integers(0, 10**8), slot=st.integers(0, 999), attempt=st.integers(0, 9), launch_try=st.integers(0, 9))
def test_a_session_is_in_the_trace_of_its_slot_whatever_its_numbers(group, slot, attempt, launch_try) -> None:
    session = session_id(group_id(group), slot, attempt, launch_try)
    of_session = place_of(f"hr.demo.session.closed.{session}")
    of_slot = place_of(f"hr.demo.episode.requested.{group_id(group)}.{slot}.{attempt}")
    assert of_session.trace_id == of_slot.trace_id
    assert of_session.parent_id == of_slot.span_id
    assert (of_session.trace_id >> 128, of_session.span_id >> 64) == (0, 0)


def test_slots_groups_and_runs_have_traces_of_their_own() -> None:
    subjects = [
        "hr.a.trajectory.ready.g1.0",
        "hr.a.trajectory.ready.g1.1",
        "hr.a.trajectory.ready.g2.0",
        "hr.b.trajectory.ready.g1.0",
    ]
    assert len({place_of(subject).trace_id for subject in subjects}) == 4


def test_messages_about_many_episodes_have_no_place() -> None:
    for subject in ("hr.demo.group.issued.g1", "hr.demo.step.trained.1.1", "hr.demo.session.closed.odd", "elsewhere"):
        assert place_of(subject) is None


class Spans:
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said_places: list[tuple[Place, int]] = []

    def said(self, place: Place, began_ns: int) -> None:
        self.said_places.append((place, began_ns))


async def fanned(broker: MemoryBroker, spans: Spans | None, wait_until) -> None:
    metrics = Metrics("demo", "fan_out")
    runner = StageRunner(bind(fan_out), WorkerBroker(broker, spans), metrics)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        await wait_until(lambda: metrics.succeeded == 1)
        runner.drain()


async def headers_of(broker: MemoryBroker) -> list[dict[str, str]]:
    async with broker.read(["hr.demo.episode.requested.>"], follow=False) as records:
        return [dict(record.headers) async for record in records]


async def test_a_traced_worker_writes_the_header_and_tells_when_its_work_began(broker, log, wait_until) -> None:
    await log.issue(0, slots=2)
    spans = Spans()
    await fanned(broker, spans, wait_until)
    assert [place.name for place, _ in spans.said_places] == ["episode.requested"] * 2
    assert all(began_ns > 0 for _, began_ns in spans.said_places)
    assert {header[HEADER] for header in await headers_of(broker)} == {traceparent(p) for p, _ in spans.said_places}


async def test_what_stands_already_gives_no_second_span(broker, log, fan, wait_until) -> None:
    issued = await log.issue(0, slots=2)
    for request in fan(issued):
        await broker.publish(f"hr.demo.episode.requested.{request.group}.{request.slot}.0", b"stands")
    spans = Spans()
    await fanned(broker, spans, wait_until)
    assert spans.said_places == []


async def test_without_tracing_messages_carry_no_header(broker, log, wait_until) -> None:
    await log.issue(0, slots=2)
    await fanned(broker, None, wait_until)
    assert await headers_of(broker) == [{}, {}]
