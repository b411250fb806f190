"""Keeping a run's store within its limits: the low-water mark, purging below it, collecting payloads, saying who holds it."""
