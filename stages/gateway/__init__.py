"""The rollout gateway: any agent that speaks OpenAI or Anthropic samples the policy here, and what it samples is recorded.

```
request ─▶ http ─▶ protocols/* ─▶ Call ─▶ preparation ─▶ ids ─▶ engine ─▶ ids ─▶ answering ─▶ events ─▶ protocols/* ─▶ client
                    (parse)          (forest: reuse or fork)                        └─▶ recording (before the answer ends)
```

Read `gateway.py` first. This room knows neither the broker nor an engine's or another gateway's HTTP: those are ports.
"""
