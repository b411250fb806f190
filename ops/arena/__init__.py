"""The local Arena: the whole Arena API on loopback, with real tasks, harness processes and planned faults.

It is the far side of the client's contract tests and the default Arena of a first run; it shares no code with the client.
Read `server.py` first (`serve`), then `config.py`. Nothing is imported here: workers use `lifeline.py` alone, and an HTTP
server would cost each of them 8 MB.
"""
