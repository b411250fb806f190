"""Groups of ranks that meet at one address: only those of one session find each other."""

from __future__ import annotations

import os
import socket

import torch
from rank_processes import nursery

from stages.training.errors import CollectiveError
from stages.training.ranks import process_group

DEADLINE_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(pipe, rank: int, session: str, port: int, start_timeout_s: float) -> None:
    """What a rank finds of its group: the sum over it, or why there is none."""
    group = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in group.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
    try:
        with process_group(timeout_s=60.0, start_timeout_s=start_timeout_s, session=session) as ranks:
            total = torch.tensor([10.0**rank])
            ranks.sum(total)
            pipe.send(float(total))
            pipe.recv()  # all have their answers
    except CollectiveError as error:
        pipe.send(str(error))


def both(sessions: tuple[str, str], *, start_timeout_s: float = DEADLINE_S) -> list[float | str]:
    context, port, pipes = nursery(), free_port(), []
    processes = []
    for rank, session in enumerate(sessions):
        ours, theirs = context.Pipe()
        process = context.Process(target=join, args=(theirs, rank, session, port, start_timeout_s), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    found: list[float | str] = []
    for pipe in pipes:
        assert pipe.poll(DEADLINE_S)
        found.append(pipe.recv())
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join(DEADLINE_S)
        process.kill()
    return found


def test_ranks_of_one_session_are_a_group() -> None:
    assert both(("new", "new")) == [11.0, 11.0]


def test_a_rank_of_a_former_session_is_nobody_s_and_both_say_what_they_wait_for() -> None:
    for rank, found in enumerate(both(("new", "old"), start_timeout_s=3.0)):
        assert isinstance(found, str)
        assert found.startswith(f"rank {rank} of 2: expected all ranks at 127.0.0.1:"), found
        assert "within 3 s (training.start_timeout_s)" in found
