"""The learning table: every method with every seed, its curves, and the page docs/learning.md.

    python tests/loop/learning_table.py [--json FILE] [--steps N] [--methods NAME ...] [--seeds N ...]     make the runs
    python tests/loop/learning_table.py --json FILE --docs docs                                            write page and picture

Runs one after the other on one core; what FILE holds already is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

LAST = 10
SMOOTH = 5
THRESHOLD = 0.8


def main() -> None:
    options = _options()
    found: dict[str, dict[str, list[float]]] = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.docs is None:
        _run_all(options, found)
    else:
        (options.docs / "learning.md").write_text(page(found), encoding="utf-8")
        draw(found, options.docs / "learning.svg")
    sys.stdout.write(table(found) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("learning.json"))
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--methods", nargs="*")
    parser.add_argument("--seeds", nargs="*", type=int)
    return parser.parse_args()


def _run_all(options: argparse.Namespace, found: dict[str, dict[str, list[float]]]) -> None:
    from learning_case import METHODS, SEEDS, STEPS, learn  # noqa: PLC0415 - torch and all, which the page doesn't need

    for seed in options.seeds or SEEDS:
        for name in options.methods or METHODS:
            curves = found.setdefault(name, {})
            if str(seed) in curves:
                continue
            started = time.process_time()
            with tempfile.TemporaryDirectory(prefix="headrace-learning-") as folder:
                curves[str(seed)] = [
                    round(reward, 4) for reward in learn(Path(folder), METHODS[name], seed, options.steps or STEPS)
                ]
            options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
            last = np.mean(curves[str(seed)][-LAST:])
            sys.stderr.write(f"{name}, seed {seed}: {last:.3f}, {time.process_time() - started:.0f} s of CPU\n")


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """One line a method."""
    lines = [
        f"| method | first 3 steps | last {LAST} steps: seeds | mean ± std | steps to {THRESHOLD} |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, curves in found.items():
        runs = np.array([curves[seed] for seed in sorted(curves, key=int)])
        last = runs[:, -LAST:].mean(axis=1)
        spread = f" ± {last.std(ddof=1):.3f}" if len(last) > 1 else ""
        reached = [_reached(curve) for curve in runs]
        lines.append(
            f"| {name} | {runs[:, :3].mean():.2f} | {', '.join(f'{value:.3f}' for value in last)} | {last.mean():.3f}{spread} "
            f"| {', '.join('–' if step is None else str(step) for step in reached)} |"
        )
    return "\n".join(lines)


def _reached(curve: np.ndarray) -> int | None:
    """The first step whose running mean is at the threshold."""
    smooth = _smooth(curve)
    above = np.flatnonzero(smooth >= THRESHOLD)
    return None if not len(above) else int(above[0]) + SMOOTH


def _smooth(curve: np.ndarray) -> np.ndarray:
    return np.convolve(curve, np.ones(SMOOTH) / SMOOTH, mode="valid")


def draw(found: dict[str, dict[str, list[float]]], file: Path) -> None:
    """Each method's mean over seeds as a line, the seeds as thin ones."""
    import matplotlib as mpl  # noqa: PLC0415 - only for pictures

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "headrace"
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    columns = 4
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(11, 2.6 * rows), sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (name, curves) in zip(axes.flat, found.items(), strict=False):
        runs = np.array([_smooth(np.array(curve)) for curve in curves.values()])
        steps = np.arange(SMOOTH, SMOOTH + runs.shape[1])
        for run in runs:
            axis.plot(steps, run, color="#9db8d2", linewidth=0.8)
        axis.plot(steps, runs.mean(axis=0), color="#1f4e79", linewidth=1.8)
        axis.axhline(THRESHOLD, color="#888888", linewidth=0.6, linestyle=":")
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0, 1)
        axis.tick_params(labelsize=7)
    for axis in axes.flat[max(0, len(found) - columns) : len(found)]:  # the lowest of each column
        axis.tick_params(labelbottom=True)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel(f"mean reward, running mean of {SMOOTH}", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)


def page(found: dict[str, dict[str, list[float]]]) -> str:
    """docs/learning.md."""
    num_steps = len(next(iter(next(iter(found.values())).values())))
    return f"""# Learning

Each method on the first run's tasks (3:1 \"reverse a word\" with partial credit and a two-call task where only the whole word counts), from the same
warmed-up tiny policy of each seed (0.4 M parameters): {num_steps} steps of 8 groups with 8 slots, AdamW at 5e-4, aggregation `token_mean`, float32 on one
CPU core. The real sampler, advantages, loss weights, partition and trainer take part; rollouts are one version old, or four where it says so.

{table(found)}

\"Steps to {THRESHOLD}\" is the first step at which the mean reward of the last {SMOOTH} steps is at least that; one number a seed.

![Mean reward over steps, by method](learning.svg)

Thin lines are seeds, thick ones their mean. All methods run with one learning rate; constants are CISPO's cap 1 + 4, PPO's clip 0.2 (for GRPO 0.28 above), and for PPO with critic advantages normalised over
the step and 3 steps in which only the critic learns. GSPO's clip, 0.03 and 0.04, was changed after a first look: its default of 3e-4 and 4e-4, made for rows of a
thousand tokens, reached 0.791 with seed 0 (these rows have five). This shows that each method learns, not which one is best.

```sh
python tests/loop/learning_table.py --json learning.json        # about half a minute of one core for each method and seed
python tests/loop/learning_table.py --json learning.json --docs docs
```

`tests/loop/test_learning.py` (nightly) holds every method and seed to a mean reward of at least 0.8 over the last {LAST} steps.
"""


if __name__ == "__main__":
    main()
