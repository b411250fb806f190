import contextlib

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api import ConsumerSettings
from broker.memory import MemoryBroker, MemoryServer
from ops.logtools.expressions import Expression, field_names
from ops.logtools.names import parse_name
from ops.logtools.patterns import parse_pattern
from ops.logtools.sources import apart
from ops.logtools.tap import LeftOut, Tapped, TapSettings, chosen, follow_filters, is_about, rates, tap
from pipeline.log import RunLog
from schemas.errors import ConfigError, InvalidIdError
from schemas.messages.sampling import EpisodeRequested, GroupIssued, Tick
from schemas.subjects import matches

FIELDS = {"stream": "math", "slot": 3, "score": 0.25, "rows": [{"row": "a"}], "error": "", "reward": None}


def holds(text):
    return Expression(text, FIELDS).matches(FIELDS)


@pytest.mark.parametrize(
    "text",
    [
        'stream == "math" and slot > 2',
        "score < 0.5 or reward > 1",
        "not error",
        "rows[0].row == 'a'",
        "len(rows) == 1",
        "slot in (1, 2, 3)",
        "'at' in stream",
        "startswith(stream, 'ma') and contains(stream, 'th')",
        "1 < slot <= 3",
        "slot * 2 - 1 == 5",
        "abs(-slot) == 3 and lower('X') == 'x'",
        "reward == None",
    ],
)
def test_an_expression_holds(text):
    assert holds(text)


@pytest.mark.parametrize("text", ["reward > 0", "stream > 3", "rows[9].row == 'a'", "score / 0 > 1", "'x' in slot"])
def test_what_makes_no_sense_of_a_message_is_false(text):
    assert not holds(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sccore > 1", "did you mean score"),
        ("__import__('os')", "not allowed"),
        ("stream.upper()", "not allowed"),
        ("(lambda: 1)()", "not allowed"),
        ("slot ** 99", "not allowed"),
        ("[x for x in rows]", "not allowed"),
        ("slot is None", "not allowed"),
        ("len(rows, 1)", "takes 1 argument"),
        ("slot >", "not an expression"),
        ("-" * 1990 + "slot", "nested too deeply|not an expression"),
        ("x" * 3000, "at most 2000 characters"),
    ],
)
def test_an_expression_that_could_do_more_or_nothing_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        Expression(text, FIELDS)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="abslotre()[]<>=!.+-*/%'\" 0123,notadr", max_size=40))
def test_any_text_is_an_expression_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        Expression(text, FIELDS).matches(FIELDS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (">", "hr.r.>"),
        ("episode", "hr.r.episode.*.>"),
        ("episode.ended", "hr.r.episode.ended.>"),
        ("episode.ended.g0000001.*.0", "hr.r.episode.ended.g0000001.*.0"),
        ("hr.r.step.>", "hr.r.step.>"),
        ("*.ended", "hr.r.*.ended.>"),
    ],
)
def test_a_pattern_is_a_filter_of_the_run(text, expected):
    assert parse_pattern(text, "r").filter == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("episod.ended", "did you mean episode.ended"),
        ("episode.ended.g0000001", "key of episode.ended has 3 parts"),
        ("ep*.ended", "match whole tokens only"),
        ("hr.other.step.>", "can match nothing here"),
        ("", "empty pattern"),
        ("banana", "topics:"),
        ("episode.>.x", "may only be the last"),
    ],
)
def test_a_pattern_that_can_match_nothing_is_refused_with_suggestions(text, words):
    with pytest.raises(InvalidIdError, match=words):
        parse_pattern(text, "r")


tokens = st.sampled_from(["a", "b", "*"])
filters = st.builds(
    lambda middle, end: ".".join(["hr", "r", *middle, *end]),
    st.lists(tokens, min_size=1, max_size=3),
    st.sampled_from([[], [">"]]),
)


@given(st.lists(filters, min_size=1, max_size=4), st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
def test_filters_set_apart_match_at_least_the_same_subjects(wanted, rest):
    subject = ".".join(["hr", "r", *rest])
    kept = apart(wanted)
    assert sum(matches(pattern, subject) for pattern in kept) <= 1
    if any(matches(pattern, subject) for pattern in wanted):
        assert any(matches(pattern, subject) for pattern in kept)


async def publish_ticks(log, first, last):
    for ordinal in range(first, last):
        await log.publish(Tick(ordinal=ordinal, period_s=1.0, unix_time_s=0.0))


async def collect(broker, filters, count, said, **options):
    """What a tap shows while `said` is published; `count` items of it."""
    seen = []
    async with anyio.create_task_group() as tasks:
        ready = anyio.Event()

        async def watch():
            taps = tap(broker, filters, options.pop("settings", TapSettings()), **options)
            ready.set()
            async for one in taps:
                seen.append(one)
                if len(seen) == count:
                    tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        await ready.wait()
        await anyio.wait_all_tasks_blocked()
        await said()
        with anyio.fail_after(10):
            await anyio.sleep_forever()
    return seen


async def test_a_tap_shows_what_comes_from_now_on_decoded():
    broker = MemoryBroker(MemoryServer(), "r")
    log = RunLog(broker)
    await publish_ticks(log, 0, 5)
    seen = await collect(broker, ["hr.r.fold.>"], 2, lambda: publish_ticks(log, 5, 7))
    assert [(one.key, one.fields["ordinal"]) for one in seen] == [("5", 5), ("6", 6)]


async def test_a_tap_shows_so_many_a_second_and_counts_what_it_passes_over():
    broker = MemoryBroker(MemoryServer(), "r")
    log = RunLog(broker)
    seen = await collect(
        broker, ["hr.r.>"], 11, lambda: publish_ticks(log, 0, 500), settings=TapSettings(per_second=10)
    )
    assert [type(one) for one in seen] == [Tapped] * 10 + [LeftOut]
    assert seen[-1].num_messages == 490


async def test_a_tap_takes_no_message_from_a_consumer():
    broker = MemoryBroker(MemoryServer(), "r")
    log = RunLog(broker)
    async with broker.consume("worker", ["hr.r.>"], ConsumerSettings()) as deliveries:
        before = await broker.consumers()
        await collect(broker, ["hr.r.>"], 20, lambda: publish_ticks(log, 0, 20))
        for ordinal in range(20):
            delivery = await anext(deliveries)
            assert (delivery.sequence, delivery.num_delivered) == (ordinal + 1, 1)
            await delivery.ack()
        after = await broker.consumers()
    assert [status.durable for status in before] == [status.durable for status in after] == ["worker"]
    assert after[0].num_redelivered == 0


async def test_where_and_fields_choose():
    broker = MemoryBroker(MemoryServer(), "r")
    log = RunLog(broker)
    where = Expression("ordinal % 2 == 1", field_names([Tick]))
    seen = await collect(broker, ["hr.r.>"], 3, lambda: publish_ticks(log, 0, 6), where=where)
    assert [chosen(one, ["ordinal", "topic", "no.such"]) for one in seen] == [
        {"ordinal": ordinal, "topic": "fold.tick", "no.such": None} for ordinal in (1, 3, 5)
    ]


async def test_following_an_episode_shows_its_own_messages_only():
    broker = MemoryBroker(MemoryServer(), "r")
    log = RunLog(broker)

    async def said():
        for group in (1, 2):
            await log.publish(GroupIssued(group=f"g{group:07d}", ordinal=group, stream="s", data_id="d", num_slots=2))
            for slot in (0, 1):
                await log.publish(
                    EpisodeRequested(group=f"g{group:07d}", slot=slot, attempt=0, stream="s", data_id="d")
                )

    subject = parse_name("g2/1")
    seen = await collect(broker, follow_filters("r", subject), 2, said, only=is_about(subject))
    assert [one.subject for one in seen] == ["hr.r.group.issued.g0000002", "hr.r.episode.requested.g0000002.1.0"]


async def test_rates_count_messages_by_topic():
    broker = MemoryBroker(MemoryServer(), "r")
    log = RunLog(broker)
    async with anyio.create_task_group() as tasks:
        found = rates(broker, ["hr.r.>"], period_s=0.2)

        async def later():
            await anyio.wait_all_tasks_blocked()
            await publish_ticks(log, 0, 10)

        tasks.start_soon(later)
        with anyio.fail_after(10):
            first = await anext(found)
        assert round(first.messages["fold.tick"] * first.seconds) == 10
        await found.aclose()


async def test_a_message_that_can_not_be_decoded_is_shown_with_its_error():
    broker = MemoryBroker(MemoryServer(), "r")

    async def said():
        await broker.publish("hr.r.group.issued.g0000001", msgspec.msgpack.encode({"a": 4}))

    (seen,) = await collect(broker, ["hr.r.>"], 1, said)
    assert "expected a GroupIssued" in seen.fields["error"]
