"""`headrace inspect FILE [EPISODE]`."""

from __future__ import annotations

from pathlib import Path

from broker.recording import Recording
from ops.cli.failing import EXIT_FAILED, plain_errors
from ops.cli.incomplete import tell_soundness
from ops.cli.log_views import print_conversation, print_summary
from ops.cli.output import console, write_json
from ops.logtools.inspecting import Episodes, conversations, summary
from ops.logtools.names import Kind, parse_name
from ops.logtools.soundness import soundness
from schemas.errors import ConfigError


def inspect(
    file: Path, episode: str | None = None, /, *, tokens: bool = False, verify: bool = False, json: bool = False
) -> int:
    """What a recording holds: counts, sizes, gaps; or one episode as a conversation, with tokens, versions and rewards.

    Exit code 3 when something in it is damaged or missing (stderr says what), 1 when the episode is not in it.

    Examples:
        headrace inspect q.hrrec
        headrace inspect q.hrrec g12/3 --tokens
        headrace inspect q.hrrec --verify --json

    Parameters
    ----------
    file
        A recording.
    episode
        A group (g12) or one of its episodes (g12/3, g12/3/0).
    tokens
        Show token ids and log-probs too.
    verify
        Read every block instead of the index alone, which is always done up to 256 MiB.
    json
        One JSON object.
    """
    with plain_errors(OSError), Recording(file) as recording:
        if episode is None:
            found = summary(recording, verify=verify)
            write_json(found) if json else print_summary(found, console())
            return tell_soundness(soundness(recording))
        subject = parse_name(episode)
        if subject.kind is Kind.STEP:
            raise ConfigError(f"{episode}: expected a group or an episode; `headrace why` tells a step's life")
        shown = [one for one in conversations(recording, subject) if one.attempts or one.stream]
        sound = soundness(recording)
        if json:
            write_json(Episodes(episodes=shown, damages=sound.damages, gaps=sound.gaps))
        else:
            for one in shown:
                print_conversation(one, console(), tokens=tokens)
        if not shown:
            console().print(f"{subject.name} is not in {file}")
    incomplete = tell_soundness(sound)
    return incomplete if shown else EXIT_FAILED
