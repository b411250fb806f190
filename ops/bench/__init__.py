"""Benchmarks: each measures headrace beside a bare reference in one process or machine, in one run."""
