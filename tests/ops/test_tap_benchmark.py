import pytest

from ops.bench import tap


@pytest.mark.nightly
def test_a_tap_beside_a_pipeline_at_full_rate_changes_nothing_and_costs_little() -> None:
    found = tap.run()
    assert found.metrics["messages_shown"] > 0
    assert found.metrics["messages_redelivered"] == 0
    assert found.metrics["consumers_changed"] == 0
    assert found.ratio["pass_through_tapped_per_s"] >= 0.95
