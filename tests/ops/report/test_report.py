"""`headrace report`: the figures are the log's, the page needs nothing else, and it names every fault."""

import json
import re
from html.parser import HTMLParser

import msgspec
import pytest
from synthetic import SyntheticRun

from ops.accounts import account
from ops.cli import main
from ops.logtools.sources import LiveSource, open_source
from ops.report.gather import gather
from ops.report.hops import HopTimes
from ops.report.page import page
from ops.run_account import HarnessClasses
from schemas.messages.rollout import EpisodeLaunched
from schemas.messages.sampling import Control, ControlAction, EpisodeRequested


@pytest.fixture
async def figures(chaotic):
    return await gather(LiveSource(chaotic.broker))


async def test_the_account_is_that_of_the_run(chaotic, figures):
    counted = await account(chaotic.broker, staleness_bound=8)
    assert msgspec.structs.replace(figures.account, seconds=0.0) == counted


async def test_a_recording_gives_the_same_figures_as_the_run(recorded, figures):
    async with open_source(str(recorded)) as source:
        again = await gather(source)
    assert msgspec.structs.replace(again, place="") == msgspec.structs.replace(figures, place="")


async def test_rewards_are_told_by_stream_and_lie_around_the_mean(figures):
    streams = {stream for step in figures.steps for stream in step.reward_by_stream}
    assert streams == {"math", "words"}
    for step in figures.steps:
        by_stream = step.reward_by_stream.values()
        assert min(by_stream) - 1e-9 <= step.reward <= max(by_stream) + 1e-9


async def test_tokens_in_the_rates_are_those_of_the_log(chaotic, figures):
    span_s = (figures.last_unix_s - figures.first_unix_s) / len(figures.rates)
    trained = sum(rate.trained_per_s for rate in figures.rates) * span_s
    assert trained == pytest.approx(sum(step.num_tokens for step in figures.steps if step.is_trained))


async def test_the_page_needs_no_network_and_no_script(figures):
    text = page(figures)
    assert not re.search(r"https?://|<script|<link|<img|@import|url\(", text)


async def test_the_page_is_well_formed(figures):
    checker = _Nesting()
    checker.feed(page(figures))
    assert checker.open_tags == []
    assert not checker.problems


async def test_every_fault_is_named_with_where_to_look(figures):
    text = page(figures)
    assert {fault.stage for fault in figures.faults} == {"arena_launch", "map_rewards"}
    for fault in figures.faults:
        assert fault.letter in text
    for reason in figures.account.dropped_by_reason:
        assert reason in text


async def test_ends_are_told_by_class_for_each_stream_and_harness(figures):
    streams = {one.stream for one in figures.account.classes_by_harness}
    assert streams == set(figures.account.groups_by_stream)
    counted = HarnessClasses(stream="words", harness="loop@1", classes={"scored": 1234, "model": 7})
    text = page(
        msgspec.structs.replace(figures, account=msgspec.structs.replace(figures.account, classes_by_harness=[counted]))
    )
    card = text.partition("Episode ends by stream and harness")[2].partition("</section>")[0]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", card) == ["words", "loop@1", "1,234", "7", "0", "0"]


async def test_losses_and_mismatch_have_charts_and_the_rest_a_table(figures):
    steps = [
        msgspec.structs.replace(
            step, stats={"step_loss": 0.5, "mismatch/kl": 1e-4, **{f"further_{n:02}": n for n in range(12)}}
        )
        for step in figures.steps
    ]
    steps[3].skipped = "non-finite gradient"
    text = page(msgspec.structs.replace(figures, steps=steps))
    assert "<h3>step_loss</h3>" in text
    assert "Mismatch of engine and trainer" in text
    assert f"Further statistics of step {steps[-1].step}" in text
    assert "non-finite gradient" in text


async def test_texts_of_a_log_can_not_break_the_page(figures):
    hostile = "<script>alert(1)</script>"
    changed = msgspec.structs.replace(
        figures, run=hostile, streams=[hostile], rejected_slots={hostile: 1}, place=hostile
    )
    assert "<script" not in page(changed)


async def test_a_run_that_has_only_begun_has_a_page(small):
    assert "no figures" in page(await gather(LiveSource(small.broker)))


@pytest.fixture
async def small():
    """Nothing but its start and a pause."""
    run = SyntheticRun(seed=1, num_groups=0)
    await run.build()
    await run.log.publish(Control(id="c1", action=ControlAction.PAUSE, reason="lunch"))
    return run


async def test_what_people_asked_is_told(small):
    assert "pause: lunch" in page(await gather(LiveSource(small.broker)))


def test_a_hop_is_the_time_between_two_messages_of_an_episode():
    hops = HopTimes()
    for slot, launch_s in ((0, 10.5), (1, 12.0)):
        hops.take(EpisodeRequested(group="g", slot=slot, attempt=0, stream="s", data_id="d"), 10.0)
        hops.take(EpisodeLaunched(group="g", slot=slot, attempt=0, launch_try=0, session="x"), launch_s)
    (hop,) = hops.result()
    assert (hop.name, hop.count, hop.median_s, hop.max_s) == ("request → launch", 2, 1.25, 2.0)


def test_the_command_writes_a_file_or_json(recorded, tmp_path, capsys):
    target = tmp_path / "report.html"
    assert main(["report", str(recorded), "-o", str(target)]) == 0
    assert "12" in target.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["report", str(recorded), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "r"


class _Nesting(HTMLParser):
    """Tags that are not closed where they should be."""

    def __init__(self):
        super().__init__()
        self.open_tags = []
        self.problems = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open_tags.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open_tags or self.open_tags.pop() != tag:
            self.problems.append(tag)
