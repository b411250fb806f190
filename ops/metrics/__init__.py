"""Every worker's counters for Prometheus.

`definitions` is the one list of metrics; what is served, docs/metrics.md and the dashboard in `ops/deploy` all come from it.
"""
