"""Draws docs/staleness.png and prints the tables of docs/staleness.md.

    python tools/plot_staleness.py                     # some minutes on one core
    python tools/plot_staleness.py --updates 100       # a quick look

Setting: 16 groups of 8 per update, responses of 256 tokens on average at 10 ms a token, log-normal unless said otherwise.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lit_asyncrl.algorithm.staleness_forms import generation_staleness_form, waiting_staleness_form
from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.ranking import FreshestFirstSampler, MaxAgeSampler, TotalStalenessSampler
from lit_asyncrl.pool.sampler import StalenessSampler
from lit_asyncrl.simulation.lengths import ResponseLengths, summarize
from lit_asyncrl.simulation.queue_drop import QueueDropSampler
from lit_asyncrl.simulation.settings import SimulationResult, SimulationSettings, saturated
from lit_asyncrl.simulation.simulator import simulate

OUT = Path(__file__).resolve().parents[1] / "docs" / "staleness.png"
BATCH, MEAN_TOKENS, TOKEN_S = 128, 256.0, 0.01  # responses, tokens, seconds
BOUNDS = (0, 1, 2, 4, 8)
SLOTS = (32, 64, 128, 256, 512)
LENGTHS = {
    "exponential": ResponseLengths("exponential", MEAN_TOKENS),
    "log-normal 0.7": ResponseLengths("lognormal", MEAN_TOKENS, sigma=0.7),
    "log-normal 1.0": ResponseLengths("lognormal", MEAN_TOKENS, sigma=1.0),
}
SAMPLERS: dict[str, Callable[[], StalenessSampler]] = {
    "oldest arrival": lambda: QueueDropSampler(16),
    "oldest token": MaxAgeSampler,
    "total staleness": TotalStalenessSampler,
    "freshest first": FreshestFirstSampler,
    "PACE": PaceSampler,
    "PACE, gamma 16": lambda: PaceSampler(gamma=16.0),
}
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#e69f00", "#009e73", "#666666"  # told apart by colour-blind readers too


def settings(slots: int, rho: float, lengths: ResponseLengths, **changes: Any) -> SimulationSettings:
    """A setting by its ratio of generation to training throughput."""
    train_s = rho * BATCH * MEAN_TOKENS * TOKEN_S / slots
    return SimulationSettings(num_slots=slots, token_s=TOKEN_S, train_s=train_s, lengths=lengths, **changes)


def by_bound(updates: int) -> dict[int, SimulationResult]:
    """PACE under several age bounds, generation about as fast as training."""
    lengths = LENGTHS["log-normal 0.7"]
    return {
        bound: simulate(settings(128, 0.9, lengths, max_policy_age=bound), PaceSampler(), num_updates=updates) for bound in BOUNDS
    }


def by_slots(updates: int) -> dict[int, tuple[SimulationResult, float]]:
    """Generation at 0.6 of the trainer's rate, without bound, and the closed form of the total."""
    lengths = LENGTHS["log-normal 0.7"]
    tail = summarize(lengths, 8).tail_ratio
    found = {}
    for slots in SLOTS:
        result = simulate(saturated(settings(slots, 0.6, lengths)), QueueDropSampler(16), num_updates=updates)
        found[slots] = result, generation_staleness_form(slots, BATCH, 0.6, tail) + waiting_staleness_form(0.6)
    return found


def by_sampler(updates: int) -> dict[tuple[str, str], SimulationResult]:
    """Generation at 1.22 times the trainer's rate: 18 % of the groups are too many, whoever chooses them."""
    return {
        (shape, name): simulate(saturated(settings(256, 1.22, lengths)), make(), num_updates=updates)
        for shape, lengths in LENGTHS.items()
        for name, make in SAMPLERS.items()
    }


def print_tables(
    bounds: dict[int, SimulationResult],
    slots: dict[int, tuple[SimulationResult, float]],
    samplers: dict[tuple[str, str], SimulationResult],
) -> None:
    """The tables of docs/staleness.md."""
    print("| `max_policy_age` | generation | waiting | largest age | over age | length bias | trainer busy | slots busy |")
    print("|---|---|---|---|---|---|---|---|")
    for bound, r in bounds.items():
        print(
            f"| {bound} | {r.generation_staleness:.2f} | {r.waiting_staleness:.2f} | {r.policy_age_max} | "
            f"{r.over_age_share:.1%} | {r.length_bias:+.1%} | {r.trainer_busy:.0%} | {r.slots_busy:.0%} |"
        )
    print("\n| slots | start to use | closed form | policy age, mean over tokens | largest |\n|---|---|---|---|---|")
    for number, (r, closed) in slots.items():
        total = r.start_staleness + r.waiting_staleness
        print(f"| {number} | {total:.2f} | {closed:.2f} | {r.policy_age:.2f} | {r.policy_age_max} |")
    print("\n| rejected first | rejected |" + "".join(f" {shape} |" for shape in LENGTHS) + " policy age |")
    print("|---|---|" + "---|" * len(LENGTHS) + "---|")
    for name in SAMPLERS:
        results = [samplers[shape, name] for shape in LENGTHS]
        biases = "".join(f" {r.length_bias:+.1%} |" for r in results)
        print(f"| {name} | {results[1].rejected_share:.0%} |{biases} {results[1].policy_age:.2f} |")


def draw(
    bounds: dict[int, SimulationResult],
    slots: dict[int, tuple[SimulationResult, float]],
    samplers: dict[tuple[str, str], SimulationResult],
    out: Path,
) -> None:
    """Three panels: age by bound, age by slots, length bias by sampler."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.4), constrained_layout=True)
    _draw_bounds(left, bounds)
    _draw_slots(middle, slots)
    _draw_samplers(right, samplers)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x" if axis is right else "y", alpha=0.3)
        axis.set_axisbelow(True)
    figure.savefig(out, dpi=110)


def _draw_bounds(axis: Any, bounds: dict[int, SimulationResult]) -> None:
    places = range(len(bounds))
    generation = [r.generation_staleness for r in bounds.values()]
    waiting = [r.waiting_staleness for r in bounds.values()]
    axis.bar(places, generation, color=BLUE, label="generation")
    axis.bar(places, waiting, bottom=generation, color=ORANGE, hatch="//", edgecolor="white", label="waiting")
    for place, r in zip(places, bounds.values(), strict=True):
        axis.annotate(f"{r.trainer_busy:.0%}", (place, r.policy_age), ha="center", va="bottom", fontsize=9, color=GREY)
    axis.set_xticks(list(places), [str(bound) for bound in bounds])
    axis.set_xlabel("max_policy_age (updates)")
    axis.set_ylabel("policy age, mean over tokens (updates)")
    axis.set_title("Age by bound\n(grey: share of time the trainer works)", fontsize=11)
    axis.legend(frameon=False)


def _draw_slots(axis: Any, slots: dict[int, tuple[SimulationResult, float]]) -> None:
    axis.plot(list(slots), [closed for _, closed in slots.values()], color=GREY, label="start to use, closed form")
    simulated = [r.start_staleness + r.waiting_staleness for r, _ in slots.values()]
    axis.plot(list(slots), simulated, "o", color=BLUE, label="start to use, simulated")
    axis.plot(list(slots), [r.policy_age for r, _ in slots.values()], "s--", color=ORANGE, label="mean over tokens")
    axis.set_xlabel("slots (responses generated at once)")
    axis.set_ylabel("age of a group (updates)")
    axis.set_title("Age by concurrency\n(128 responses per update, no bound)", fontsize=11)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)


def _draw_samplers(axis: Any, samplers: dict[tuple[str, str], SimulationResult]) -> None:
    height = 0.26
    for i, (shape, color) in enumerate(zip(LENGTHS, (BLUE, ORANGE, GREEN), strict=True)):
        values = [100 * samplers[shape, name].length_bias for name in SAMPLERS]
        places = [j + (i - 1) * height for j in range(len(SAMPLERS))]
        axis.barh(places, values, height, color=color, hatch=("", "//", "..")[i], edgecolor="white", label=shape)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(SAMPLERS)), list(SAMPLERS))
    axis.invert_yaxis()
    axis.set_xlabel("trained over generated mean length, - 1 (%)")
    axis.set_title("Length bias by who is rejected first\n(about 18 % of the groups under every rule)", fontsize=11)
    axis.legend(frameon=False, title="lengths", loc="upper left", fontsize=8, title_fontsize=8)


def main() -> None:
    """Simulate, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what was imported need not be looked at again while groups come and go
    parts = by_bound(arguments.updates), by_slots(arguments.updates), by_sampler(arguments.updates)
    print_tables(*parts)
    draw(*parts, arguments.out)
    print(f"\n{arguments.out}")


if __name__ == "__main__":
    main()
