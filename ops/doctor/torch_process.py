"""`python -m ops.doctor.torch_process < config.json`: what torch is, can use, and thinks of a config, as one JSON line."""

from __future__ import annotations

import sys

import msgspec

from ops.config import RunConfig
from ops.doctor.facts import TorchFacts
from schemas.errors import ConfigError


def main() -> None:
    """Print the facts; a config on stdin may be absent."""
    import torch  # noqa: PLC0415 - no part of the base install; what is wrong with it is said on stderr

    given, problem = sys.stdin.buffer.read(), ""
    if given:
        from ops.workers.torch_trainer import check_learning  # noqa: PLC0415 - same

        try:
            check_learning(msgspec.json.decode(given, type=RunConfig))
        except ConfigError as error:
            problem = str(error)
    facts = TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda or "",
        devices=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        config_error=problem,
    )
    sys.stdout.buffer.write(msgspec.json.encode(facts) + b"\n")


if __name__ == "__main__":
    main()
