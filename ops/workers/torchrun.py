"""`python -m ops.workers.torchrun`: torchrun with an exit code that tells what became of the ranks.

Torchrun itself ends with 1 whatever a rank ended with, so that a rank whose settings can't work would be started again for
nothing. Arguments are torchrun's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, cast

import structlog
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ops.supervise.process import EXIT_GIVEN_UP
from pipeline.logs import set_up_logs

log = structlog.get_logger("headrace.ranks")


class _Failure(Protocol):
    exitcode: int
    timestamp: int


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them."""
    set_up_logs(process="ranks")
    try:
        run.run(run.parse_args(list(arguments)))
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as error:
        failures = cast("dict[int, _Failure]", error.failures)
        first = min(failures, key=lambda rank: failures[rank].timestamp)
        ended = failures[first].exitcode
        log.error("a rank failed, and so the others were ended", rank=first, exit_code=ended)  # noqa: TRY400 - its own log says why
        return EXIT_GIVEN_UP if any(one.exitcode == EXIT_GIVEN_UP for one in failures.values()) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
