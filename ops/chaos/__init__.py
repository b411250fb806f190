"""Chaos: a real run, faults of every kind from a seed, and an account of it that shares no code with the run's own.

plan (pure, seeded) ─▶ world (servers, proxies, `headrace run`) ─▶ faults ─▶ drain ─▶ ledger + refold ─▶ result
"""
