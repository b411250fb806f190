"""What is done with a run's log besides running it: publish, record, replay, compare, explain, watch, mend, export.

Each works on a live log or on a recording (`sources.py`); the commands in `ops.cli` only read arguments and print.
"""
