"""Benchmarks: each module has `run() -> dict` with its metrics, the reference it stands beside, the ratio and the machine."""
