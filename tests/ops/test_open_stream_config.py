"""Open streams in a config: what they may be set together with, and what sampling makes of them."""

from __future__ import annotations

import anyio
import pytest

from broker.connect import connect
from broker.memory import MemoryServer
from ops.config import RunConfig, decode_config, fold_digest, sampling_settings
from ops.running.rollouts import num_groups, until_rolled_out
from pipeline.log import RunLog
from schemas.config_arena import WhenEmpty
from schemas.errors import ConfigError
from schemas.messages.sampling import RunFinished
from stages.sampling.open_streams import OpenStreamSettings

OPEN = {"name": "o", "stream_id": "o", "runner": "function", "agent": "a.b:c", "open": True, "sampling_weight": 2.0}
LISTED = {"name": "a", "stream_id": "a"}


def config(*streams: dict, **sections) -> RunConfig:
    return decode_config({"streams": list(streams), **sections})


def test_open_streams_are_not_waited_for_and_have_a_weight_of_their_own() -> None:
    settings = sampling_settings(config(LISTED, OPEN))
    assert settings.streams == ("a",)
    assert settings.open_streams == (OpenStreamSettings(name="o", weight=2.0, when_empty=WhenEmpty.PASS),)


def test_what_an_empty_stream_does_to_the_others_is_fixed_for_a_run() -> None:
    assert fold_digest(config(OPEN)) != fold_digest(config({**OPEN, "when_empty": "wait"}))


@pytest.mark.parametrize(
    ("streams", "sections", "words"),
    [
        ([OPEN], {"run": {"epochs": 1}}, r"run\.epochs: an open stream has no epochs"),
        ([OPEN], {"sampling": {"epoch_size_groups": 8}}, r"sampling\.epoch_size_groups: found open streams only"),
        ([LISTED, OPEN], {"run": {"rollout_only": True}}, r"run\.rollout_only: streams a go round without end"),
        ([{**OPEN, "rows": "x.jsonl"}], {}, r"streams\[0\]\.open: expected .* no rows"),
        ([{**LISTED, "open": True}], {}, r"streams\[0\]\.open: expected runner"),
        ([{**OPEN, "evaluate_every_versions": 2}, LISTED], {}, r"streams\[0\]\.open: .*no evaluate_every_versions"),
        ([{**OPEN, "when_empty": "stop"}], {}, r"when_empty"),
    ],
)
def test_what_contradicts_an_open_stream_is_refused(streams: list[dict], sections: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(*streams, **sections)


def test_rollouts_of_an_open_stream_have_no_number_unless_steps_give_one() -> None:
    only = {"run": {"rollout_only": True}}
    assert num_groups(config(OPEN, **only), 0, endless=True) is None
    steps = {"run": {"rollout_only": True, "steps": 3}, "sampling": {"groups_per_step": 4}}
    assert num_groups(config(OPEN, **steps), 0, endless=True) == 12


async def test_rollouts_end_when_the_open_streams_are_used_up() -> None:
    done = anyio.Event()
    async with connect("memory://", "r", memory=MemoryServer()) as broker:
        await RunLog(broker).publish(RunFinished(ordinal=0, steps=0, reason="streams"))
        with anyio.fail_after(5):
            await until_rolled_out(broker, config(OPEN, run={"id": "r", "rollout_only": True}), done)
    assert done.is_set()
