"""How bytes move: the `Broker` port and what stands behind it. Start at `api.py`; `connect.py` is the door."""
