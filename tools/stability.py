"""The stability table: which methods survive weights that are 32 updates old. Runs, table and figure.

    python tools/stability.py run                    # all cells, both cores, resumable; about 25 minutes on two cores
    python tools/stability.py run --seeds 100 --arms vcpo_proxy tis
    python tools/stability.py table                  # Markdown table from the results file
    python tools/stability.py plot                   # docs/stability.png

Every run goes through the product's own entry point with `configs/experiment/stability_lag32.yaml`; an arm only changes
objective, baseline, step size, lag and rate. Results are appended to `docs/stability.jsonl`, one line a run; finished runs are
skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "stability.jsonl"
CONFIG = ROOT / "configs" / "experiment" / "stability_lag32.yaml"
LAG = 32
RATES = (1e-4, 3e-4, 6e-4)
"""Rates of the synchronous runs; the lagged ones use the best of them."""
RAMP_START = 100
"""Updates without lag before it is switched on, in the `ramp` form."""


@dataclass(frozen=True)
class Arm:
    """A method: what it changes in the experiment file."""

    title: str
    objective: str
    advantage: str
    score_norm: str | None = None
    ess_lr: bool = False

    def arguments(self) -> list[str]:
        """Command-line overrides."""
        arguments = [f"--model.objective={self.objective}", f"--model.advantage={self.advantage}"]
        if self.score_norm is not None:
            arguments.append(f"--model.advantage.score_norm={self.score_norm}")
        return arguments


ARMS = {
    "none": Arm("no correction", "Reinforce", "GroupMean"),
    "tis": Arm("sequence TIS, cap 8", "SequenceTIS", "GroupMean"),
    "ppo": Arm("PPO clip 0.2 (GRPO)", "PPOClip", "GroupMean"),
    "vcpo_exact": Arm("VCPO, exact OPOB", "SequenceTIS", "OPOB", "batched", ess_lr=True),
    "vcpo_proxy": Arm("VCPO, logit-proxy OPOB", "SequenceTIS", "OPOB", "logit_proxy", ess_lr=True),
}


@dataclass(frozen=True)
class Cell:
    """One run: an arm, the form of the lag (`sync`: none, `cold`: from the start, `ramp`: from update 100), rate and seed."""

    arm: str
    form: str
    lr: float
    seed: int

    @property
    def key(self) -> str:
        """Identity in the results file."""
        return f"{self.arm}/{self.form}/{self.lr:g}/{self.seed}"


def cells(arms: list[str], seeds: list[int], lr: float) -> list[Cell]:
    """Synchronous runs at three rates (three seeds), then every arm in both forms of the lag, and the other synchronous seeds."""
    rates = [Cell("tis", "sync", rate, seed) for rate in RATES for seed in seeds[:3]]
    lagged = [Cell(arm, form, lr, seed) for seed in seeds for form in ("cold", "ramp") for arm in arms]
    return rates + lagged + [Cell("tis", "sync", lr, seed) for seed in seeds[3:]]


def run_cell(cell: Cell, max_steps: int) -> dict[str, Any]:
    """One run in this process; returns its line of the results file."""
    import torch

    from lit_asyncrl.callbacks.report import RunReport
    from lit_asyncrl.cli import run

    torch.set_num_threads(1)
    arm = ARMS[cell.arm]
    rollout = {
        "class_path": "AsyncRollout",
        "init_args": {
            "publish_lag": 0 if cell.form == "sync" else LAG,
            "publish_lag_start": RAMP_START if cell.form == "ramp" else 0,
            "trainer_threads": 1,
            "evaluate_first": False,
            "engine": {"class_path": "HFEngine", "init_args": {"mode": "inline"}},
        },
    }
    callbacks = [rollout, *([{"class_path": "EssLrScale"}] if arm.ess_lr else []), {"class_path": "RunReport"}]
    arguments = [
        "fit",
        f"--config={CONFIG}",
        f"--seed_everything={cell.seed}",
        f"--trainer.max_steps={max_steps}",
        f"--trainer.callbacks={json.dumps(callbacks)}",
        f"--data.max_policy_age={0 if cell.form == 'sync' else LAG}",
        f"--model.optimizer.init_args.lr={cell.lr}",
        *arm.arguments(),
    ]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        cli = run([*arguments, f"--trainer.default_root_dir={folder}"])
    summary = next(c for c in cli.trainer.callbacks if isinstance(c, RunReport)).summary  # type: ignore[attr-defined]
    return {
        "key": cell.key,
        "arm": cell.arm,
        "form": cell.form,
        "lr": cell.lr,
        "seed": cell.seed,
        "updates": summary["policy_version"],
        "accuracy": summary["accuracy_after"],
        "curve": [[e["policy_version"], round(e["heldout/accuracy"], 4)] for e in summary["evaluations"]],
        "ess_ratio_mean": round(summary["ess_ratio_mean"], 4),
        "policy_age_mean": round(summary["policy_age_mean"], 3),
        "policy_age_max": summary["policy_age_max"],
        "run_s": round(time.monotonic() - started, 1),
    }


def load() -> list[dict[str, Any]]:
    """Finished runs."""
    if not RESULTS.is_file():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines() if line]


def run_all(todo: list[Cell], max_steps: int, workers: int) -> None:
    """Run cells in `workers` processes of one thread each; append each result as it comes."""
    context = multiprocessing.get_context("spawn")
    started = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=context) as pool, RESULTS.open("a", encoding="utf-8") as file:
        futures = [pool.submit(run_cell, cell, max_steps) for cell in todo]
        for done, future in enumerate(as_completed(futures), 1):
            result = future.result()
            file.write(json.dumps(result) + "\n")
            file.flush()
            left = (time.monotonic() - started) / done * (len(todo) - done) / 60
            progress = f"{done}/{len(todo)} {result['key']}: {result['accuracy']:.3f}"
            print(f"{progress} ({result['run_s']} s; {left:.0f} min left)", flush=True)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: median and every seed's accuracy per arm and form."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = defaultdict(list)
    for result in sorted(results, key=lambda r: r["seed"]):
        groups[result["arm"], result["form"], result["lr"]].append(result)
    lines = ["| method | lag | rate | median | each seed | mean ESS ratio |", "|---|---|---|---|---|---|"]
    forms = {"sync": "0 (synchronous)", "cold": f"{LAG}", "ramp": f"{LAG}, from update {RAMP_START}"}
    order = {form: i for i, form in enumerate(forms)}
    for (arm, form, lr), runs in sorted(groups.items(), key=lambda g: (order[g[0][1]], list(ARMS).index(g[0][0]), g[0][2])):
        accuracies = [r["accuracy"] for r in runs]
        title = "on-policy" if form == "sync" else ARMS[arm].title
        each = " ".join(f"{a:.2f}" for a in accuracies)
        ess = statistics.mean(r["ess_ratio_mean"] for r in runs)
        lines.append(f"| {title} | {forms[form]} | {lr:g} | **{statistics.median(accuracies):.2f}** | {each} | {ess:.2f} |")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], lr: float, path: Path) -> None:
    """Accuracy over updates: median line and min-max band per arm, one panel per form of the lag."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = dict(zip(ARMS, ("#999999", "#D55E00", "#E69F00", "#56B4E9", "#0072B2"), strict=True))  # Okabe-Ito
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.3), sharey=True)
    for axis, form, title in (
        (axes[0], "cold", f"weights {LAG} updates old from the start"),
        (axes[1], "ramp", f"{LAG} updates old from update {RAMP_START} on"),
    ):
        sync = [r for r in results if r["form"] == "sync" and r["lr"] == lr]
        draw(axis, sync, "#000000", "synchronous", "--")
        for arm, color in colors.items():
            draw(axis, [r for r in results if (r["arm"], r["form"], r["lr"]) == (arm, form, lr)], color, ARMS[arm].title, "-")
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("optimizer updates")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out greedy accuracy (256 prompts)")
    figure.legend(*axes[1].get_legend_handles_labels(), fontsize=8, loc="lower center", ncol=6)
    figure.suptitle(f"Reversing 10 digits, learning rate {lr:g}: median of seeds, band from lowest to highest", fontsize=11)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def draw(axis: Any, runs: list[dict[str, Any]], color: str, label: str, style: str) -> None:
    """One arm's curve."""
    if not runs:
        return
    steps = [step for step, _ in runs[0]["curve"]]
    values = [[dict(r["curve"]).get(step, float("nan")) for r in runs] for step in steps]
    axis.plot(steps, [statistics.median(v) for v in values], style, color=color, label=label, linewidth=1.8)
    axis.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.12, linewidth=0)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table", "plot"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102, 103, 104])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--lr", type=float, default=3e-4, help="rate of the lagged runs: the synchronous run's best of three")
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.command == "table":
        print(table(load()))
    elif arguments.command == "plot":
        plot(load(), arguments.lr, ROOT / "docs" / "stability.png")
    else:
        finished = {result["key"] for result in load()}
        todo = [cell for cell in cells(arguments.arms, arguments.seeds, arguments.lr) if cell.key not in finished]
        run_all(todo, arguments.max_steps, arguments.workers)
        print(table(load()))


if __name__ == "__main__":
    main()
