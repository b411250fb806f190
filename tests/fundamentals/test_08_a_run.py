"""Chapter 8: a whole run, and how to ask it questions afterwards.

Broker, Arena, gateway, all stages and a trainer, started by one command. The engine is scripted and the optimizer a stand-in,
so that it takes seconds and no torch; everything between them is the real thing. When it is over, its log still knows all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 2


def headrace(*arguments: str, folder: Path) -> Any:  # Any: JSON
    """A command's JSON; it must end well."""
    done = subprocess.run(
        [sys.executable, "-m", "ops", *arguments, "--json"],
        capture_output=True,
        cwd=ROOT,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a run that trained two steps, and what it said at its end."""
    folder = tmp_path_factory.mktemp("tutorial") / "run"
    said = headrace(
        "run",
        "examples/smoke.toml",
        "--steps",
        str(STEPS),
        "--set",
        f"run.dir={folder}",
        "--record",
        str(folder.with_suffix(".hrrec")),
        folder=folder,
    )
    return folder, said


def test_every_group_is_accounted_for(finished: tuple[Path, Any]) -> None:
    """Issued is trained plus dropped plus open; nothing vanished, nothing counts twice."""
    _, said = finished
    groups = said["groups"]
    assert said["steps"] == STEPS
    assert groups["issued"] == groups["trained"] + groups["dropped"] + groups["open"]
    assert (said["unexplained"], said["doubled"], said["dead_letters"]) == (0, 0, 0)


def test_a_group_can_tell_its_whole_life(finished: tuple[Path, Any]) -> None:
    """`headrace why step:1` names the step's groups, those that were complete first; `headrace why g0000002` tells one's life: issued,
    rolled out, scored, closed, put into a step, trained, in this order.
    """
    folder, _ = finished
    group = headrace("why", "step:1", "--in", str(folder), folder=folder)["facts"]["groups"][0]
    life = headrace("why", group, "--in", str(folder), folder=folder)
    story = ["issued", "requested", "launched", "ended", "rewarded", "group closed", "in step 1", "step 1 trained"]
    told = dict.fromkeys(event["what"] for event in life["events"])
    assert life["fate"] == "trained"
    assert [what for what in told if what in story] == story


def test_a_step_can_be_made_again_from_the_recording(finished: tuple[Path, Any]) -> None:
    """`headrace replay FILE --stage assembly --diff`: today's code over what was recorded gives the same manifests."""
    folder, _ = finished
    recording = str(folder.with_suffix(".hrrec"))
    compared = headrace("replay", recording, "--stage", "assembly", "--diff", folder=folder)
    assert compared["compared"] > 0
    assert compared["differences"] == 0
