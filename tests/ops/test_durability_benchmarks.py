"""The benchmarks of the broker's paths run, at a small size, and give every figure."""

from __future__ import annotations

import pytest

from ops.bench import fold, hop, payload


@pytest.mark.nightly
async def test_a_hop_is_measured_beside_bare_nats(monkeypatch):
    monkeypatch.setattr(hop, "SIZES", {512: 20, 8192: 10})
    monkeypatch.setattr(hop, "ROUNDS", 1)
    found = await hop._run()
    names = {"hop_512_tokens_per_s", "hop_8192_tokens_per_s"}
    assert set(found.metrics) == set(found.reference) == set(found.ratio) == names
    assert all(float(value) > 0 for value in found.metrics.values())


async def test_payloads_are_measured_on_the_broker_and_as_files(monkeypatch):
    monkeypatch.setattr(payload, "SIZES", {"64KB": (65536, 4)})
    monkeypatch.setattr(payload, "ROUNDS", 1)
    found = await payload._run()
    assert set(found.metrics) == {
        f"{kind}_{way}_64KB_mb_per_s" for kind in ("broker", "directory") for way in ("put", "get")
    }


@pytest.mark.nightly
async def test_a_fold_is_measured_beside_a_reader(monkeypatch):
    monkeypatch.setattr(fold, "GROUPS", 32)
    monkeypatch.setattr(fold, "ROUNDS", 1)
    found = await fold._run()
    assert set(found.ratio) == {"fold_again_per_s"}
