from __future__ import annotations

import socket

from ops.engines.server_process import free_port


def test_a_former_port_is_taken_again_where_it_is_free() -> None:
    former = free_port("127.0.0.1")
    assert free_port("127.0.0.1", former=former) == former
    with socket.create_server(("127.0.0.1", former)):
        assert free_port("127.0.0.1", former=former) != former
