"""Prompt sampling: which groups are issued, when, from which stream."""
