"""`headrace replay FILE`."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal

import anyio
import anyio.to_thread
from cyclopts import Parameter

from broker.api import Broker
from broker.connect import connect
from broker.embedded import EmbeddedServer
from broker.recording import Recording
from broker.settings import ConnectSettings
from ops.cli.failing import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, plain_errors
from ops.cli.incomplete import tell_soundness
from ops.cli.log_views import print_report
from ops.cli.output import console, progress_bar, write_json
from ops.logtools.points import parse_stretch
from ops.logtools.replay import Replay, ReplayFigures, ReplaySettings
from ops.logtools.soundness import soundness
from ops.logtools.stage_diffs import diff_stage
from ops.run_folder import Endpoints, RunFolder
from ops.stopping import until_stopped
from pipeline.logs import set_up_logs
from schemas.errors import ConfigError
from schemas.subjects import PREFIX, check_filter


def replay(
    file: Path,
    /,
    *,
    into: Path | None = None,
    url: str | None = None,
    token_file: str = "",
    run: str | None = None,
    speed: str = "max",
    step_by_step: bool = False,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    to: str | None = None,
    subject: Annotated[list[str] | None, Parameter(negative=())] = None,
    serve: bool = False,
    stage: Literal["reward", "assembly", "training"] | None = None,
    diff: bool = False,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    limit: int = 20,
    quiet: bool = False,
    json: bool = False,
) -> int:
    """Publish a recording into a broker again, or run today's code of one stage on it and show what differs.

    With --diff the exit code is 0 when nothing differs and 1 when something does or nothing could be compared. It is 3 when
    the recording is damaged or messages are missing in it: what can be read is published or compared; stderr says what not.

    Examples:
        headrace replay q.hrrec --into runs/again
        headrace replay q.hrrec --into runs/again --speed 10 --from step:3 --to step:5 --serve
        headrace replay q.hrrec --url nats://127.0.0.1:4222 --run again --subject 'episode.>'
        headrace replay q.hrrec --stage assembly --diff --json
        headrace replay q.hrrec --stage reward --diff --set streams.math.reward_threshold=0.8

    Parameters
    ----------
    file
        A recording.
    into
        Start a broker of its own over this folder, which then is a run's folder: tap, why and status find it there.
    url
        Or a broker that runs already.
    token_file
        File with that broker's token.
    run
        The run's id there; the recorded one when left out.
    speed
        `max`, `1` = the original timing, `10` = ten times as fast.
    step_by_step
        Wait for Enter after each step's manifest.
    from_
        Begin there: step:12, seq:4711, +90s after the start, or a time (UTC).
    to
        End there.
    subject
        Only these subjects, such as 'episode.>'. May be repeated.
    serve
        With --into: keep the broker running until Ctrl-C.
    stage
        With --diff: the stage to run.
    diff
        Compare what today's code makes with what was recorded.
    set_
        With --diff: `a.b=c` on top of the recorded config. May be repeated.
    limit
        With --diff: differences shown.
    quiet
        No progress.
    json
        One JSON object.
    """
    set_up_logs(process="replay", level="ERROR" if diff else "WARNING")
    if (stage is None) == diff:
        sys.stderr.write("headrace replay: --stage and --diff belong together\n")
        return EXIT_USAGE
    if stage is None and (into is None) == (url is None):
        found = "both" if into is not None else "neither"
        sys.stderr.write(
            f"headrace replay: expected --into FOLDER or --url URL, found {found}; or --stage STAGE --diff\n"
        )
        return EXIT_USAGE
    with plain_errors(OSError), Recording(file) as recording:
        if limit < 0:
            raise ConfigError(f"--limit: expected at least 0, found {limit}")
        if stage is not None:
            report = anyio.run(diff_stage, recording, stage, set_ or [])
            if json:
                write_json(report)
            else:
                print_report(report, console(), limit=limit)
            incomplete = tell_soundness(soundness(recording))
            return EXIT_FAILED if report.differences or not report.compared else incomplete
        stretch = parse_stretch(recording, from_, to)
        settings = ReplaySettings(
            speed=_speed(speed),
            filters=tuple(_filter(text, recording.run) for text in subject or ()),
            after_sequence=stretch.after_sequence,
            to_sequence=stretch.to_sequence,
            from_time_s=stretch.from_time_s,
            to_time_s=stretch.to_time_s,
        )
        target = _Target(into=into, url=url, token_file=token_file, run=run or recording.run)
        figures, stopped = anyio.run(_replay, recording, settings, target, step_by_step, serve, quiet or json)
        sound = soundness(recording)
        figures.damages, figures.gaps = sound.damages, sound.gaps
    if json:
        write_json(figures)
    else:
        gone = f", {figures.missing_payloads:,} payloads are not in the recording" if figures.missing_payloads else ""
        console().print(
            f"published {figures.published:,} messages and {figures.payloads:,} payloads in {figures.seconds:.2f} s"
            f"{f', {figures.standing:,} stood already' if figures.standing else ''}{gone}"
        )
    incomplete = tell_soundness(sound)
    if stopped:
        return EXIT_INTERRUPTED
    if not figures.published and not figures.standing:
        wanted = "--subject, --from and --to leave none of them" if subject or from_ or to else "it holds none"
        sys.stderr.write(f"headrace: no message of {file} was published: {wanted}\n")
        return EXIT_FAILED
    return incomplete


class _Target:
    """Where a replay goes."""

    def __init__(self, *, into: Path | None, url: str | None, token_file: str, run: str) -> None:
        self.into = into
        self.url = url
        self.token_file = token_file
        self.run = run


async def _replay(
    recording: Recording, settings: ReplaySettings, target: _Target, step_by_step: bool, serve: bool, quiet: bool
) -> tuple[ReplayFigures, bool]:
    async with _broker(target) as broker:
        task = Replay(recording, broker, settings, between_steps=_enter if step_by_step else None)
        stopped = False
        async with anyio.create_task_group() as tasks:

            def stop() -> None:
                nonlocal stopped
                stopped = True
                tasks.cancel_scope.cancel()

            async with until_stopped(stop):
                with progress_bar(quiet=quiet) as bar:
                    shown = bar.add_task("replaying", total=recording.num_messages, detail="")

                    async def show() -> None:
                        while True:
                            figures = task.figures
                            done = figures.published + figures.standing
                            bar.update(shown, completed=done, detail=f"sequence {figures.last_recorded_sequence:,}")
                            await anyio.sleep(0.25)

                    tasks.start_soon(show)
                    await task.run()
                if serve and target.into is not None:
                    sys.stderr.write(f"serving {target.into} until Ctrl-C\n")
                    await anyio.sleep_forever()
            tasks.cancel_scope.cancel()
        return task.figures, stopped and not serve


@asynccontextmanager
async def _broker(target: _Target) -> AsyncGenerator[Broker]:
    if target.into is None:
        settings = ConnectSettings(name="replay", token_file=target.token_file)
        async with connect(target.url or "", target.run, settings, create=True) as broker:
            yield broker
        return
    folder = RunFolder(target.into)
    folder.create()
    server = EmbeddedServer(folder.nats)
    await server.start()
    try:
        settings = server.connect_settings(ConnectSettings(name="replay"))
        folder.write_endpoints(Endpoints(run=target.run, broker_url=server.url, broker_login=settings))
        async with connect(server.url, target.run, settings, create=True) as broker:
            yield broker
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop()


async def _enter(step: int) -> None:
    sys.stderr.write(f"step {step} is published; Enter goes on\n")
    await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)


def _speed(text: str) -> float:
    if text == "max":
        return 0.0
    try:
        speed = float(text.removesuffix("x").removeprefix("×"))
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise ConfigError(f"--speed {text!r}: expected max, 1 (the original timing) or another factor > 0")
    return speed


def _filter(text: str, run: str) -> str:
    return check_filter(text if text.startswith(f"{PREFIX}.") else f"{PREFIX}.{run}.{text}")
