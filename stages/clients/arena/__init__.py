"""The client of an Arena: calls, registrations, routes, failure classes, preflight, audit.

Read `client.py` first. Shares no code with the local Arena, which is its other side in the tests. Nothing is imported here: accounts
and reports read the Arena's answers (`wire.py`) in processes that never call one, and an HTTP client weighs 15 MB.
"""
