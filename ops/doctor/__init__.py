"""Whether this machine, this installation and a config can run headrace, and what to do where they can't.

`probe` looks (files, sockets, processes), `checks` judges what was seen: pure functions from facts to findings.
"""
