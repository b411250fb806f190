"""`headrace bench gateway` measures what it says it does."""

import pytest

from ops.bench.gateway import measure_load, run
from ops.bench.gateway_servers import our_gateway, upstream
from stages.gateway.settings import Recording


@pytest.mark.parametrize("stream", [False, True])
def test_our_gateway_answers_a_load(stream):
    with our_gateway(Recording.STRICT, chunk_tokens=20, num_sessions=4) as serving:
        load = measure_load(serving, concurrency=4, stream=stream, calls=5)
    assert load.per_second > 0
    assert load.per_core_second > 0
    assert 0 < load.p50_ms <= load.p99_ms


def test_the_upstream_server_answers_bodies_and_streams():
    with upstream() as serving:
        for stream in (False, True):
            assert measure_load(serving, concurrency=2, stream=stream, calls=3).per_second > 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_whole_run_has_every_figure():
    result = run()
    wanted = {
        "fast_p50_ms", "fast_p99_ms", "fast_requests_per_core_s", "strict_p50_ms", "streams_per_s", "memory_1000_sessions_mb",
        "turn_1000_over_10",
    }  # fmt: skip
    assert wanted <= result.metrics.keys()
    assert all(isinstance(value, (int, float)) for value in result.metrics.values())
