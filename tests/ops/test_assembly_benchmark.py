"""The assembly benchmark reports what it is asked for; how fast it is on this machine is no test."""

from ops.bench.assembly import run


def test_the_benchmark_reports_figures_beside_their_references():
    report = run()
    metrics = report.metrics
    assert metrics["partition_max_over_mean"] <= 1.02
    assert metrics["state_bytes_growth_384_to_768"] < 2.2
    assert metrics["checkpoint_bytes_768_ended"] < 4096
    assert "AReaL" in report.reference["source"]
