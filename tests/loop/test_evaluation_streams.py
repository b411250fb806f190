"""An evaluation stream in a whole run: every so many versions, in the result, in no step; the end waits for the last."""

from __future__ import annotations

from pathlib import Path

OWN_AGENT = Path(__file__).parents[2] / "examples" / "own_agent.toml"


async def test_evaluations_are_in_the_result_and_in_no_step(headrace, tmp_path) -> None:
    rows = tmp_path / "held-out.jsonl"
    rows.write_text(
        "".join(f'{{"id": "{word}", "prompt": "a word like {word}"}}\n' for word in ("dam", "lock", "race"))
    )
    head, tail = OWN_AGENT.read_text().split("[sampling]")
    held_out = f"""
[[streams]]
name = "held-out"
stream_id = "held-out"
runner = "function"
agent = "examples.own_agent:vowels"
rows = "{rows}"
evaluate_every_versions = 2
evaluation_slots = 2
reward_threshold = 0.1

"""
    config = tmp_path / "evaluated.toml"
    config.write_text(f"{head}{held_out}[sampling]{tail}")
    async with headrace("--steps", "4", config=config) as run:
        result = await run.result()
    found = {evaluation["version"]: evaluation for evaluation in result["evaluations"]}
    assert {0, 4} <= set(found) <= {0, 2, 4}
    for evaluation in found.values():
        assert (evaluation["stream"], evaluation["complete"], evaluation["num_rejected"]) == ("held-out", True, 0)
        assert (evaluation["num_tasks"], evaluation["num_rollouts"]) == (3, 6)
        assert [one["k"] for one in evaluation["pass_at_k"]] == [1, 2]
        assert all(0 <= one["low"] <= one["value"] <= one["high"] <= 1 for one in evaluation["pass_at_k"])
    assert result["dropped_by_reason"] == {"evaluation": 3 * len(found)}
    assert (result["steps"], result["groups"]["trained"], result["unexplained"]) == (4, 16, 0)
