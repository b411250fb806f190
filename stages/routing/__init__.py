"""Which engine samples a call: the least loaded one that may, the session's own where that costs nothing.

    announcements ──▶ members ──▶ choose (pure) ──▶ a slot of an engine ──▶ tokens ──▶ slot free ──▶ who waits
                        ▲                                                   │
                        └──── quarantine, probe ◀── a failure ◀─────────────┘

`choosing`, `concurrency`, `quarantine` and `admission` decide and do nothing; `router` acts. Knows no HTTP and no broker: engines come
as ports, what they say of themselves as messages.
"""
