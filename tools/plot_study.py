"""Draws every figure of the study from its results file, into docs/study/.

    python tools/plot_study.py                         # all figures that have runs
    python tools/plot_study.py headline rates

Needs `pip install 'lit-asyncrl[plot]'`. Colours are told apart by colour-blind readers (Okabe and Ito), lines by their
style too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import FormatStrFormatter, LogLocator
from study_arms import ARMS, HEADLINE, MAIN, OPOB_ARMS, POOL_ARMS, RATE_ARMS, TASKS
from study_drawing import ACCURACY, BLACK, BLUE, GREEN, LOOKS, ORANGE, PINK, RED, SKY, Drawn, dots, draw_median, finish
from study_grid import LAG, RAMP_START, RATES, SEEDS, Form, cell
from study_results import RESULTS, Results, is_collapsed, rate_text, read_lines, start_of
from study_signal_tables import lagged_cells
from study_statistics import ESS_ALARM, Run, healthy_mean, window


def headline(results: Results) -> Drawn:
    """Accuracy over updates, main methods, both forms of the lag."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True)
    forms: tuple[Form, ...] = ("cold", "ramp")
    shown = list[Run]()
    for axis, form, title in zip(
        axes, forms, (f"lag {LAG} from the start", f"lag {LAG} from update {RAMP_START} on"), strict=True
    ):
        for arm in MAIN:
            runs = results.of(cell("reverse10", arm, form, seed=seed) for seed in SEEDS)
            shown += runs
            draw_median(axis, runs, arm)
        if form == "ramp":
            axis.axvline(RAMP_START, color="grey", linewidth=0.8)
        axis.set(title=title, xlabel="optimizer updates", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(ACCURACY)
    return finish(figure, axes), shown


def methods(results: Results) -> Drawn:
    """Final accuracy of every method and seed, both forms of the lag."""
    forms: tuple[Form, ...] = ("cold", "ramp")
    groups = [
        (title, {arm: results.of(cell("reverse10", arm, form, seed=s) for s in SEEDS) for arm in HEADLINE})
        for form, title in zip(forms, (f"lag {LAG} from the start", f"lag {LAG} from update {RAMP_START} on"), strict=True)
    ]
    sync = results.synchronous("reverse10", 3e-4, SEEDS)
    return dots(groups, {title: sync for title, _ in groups})


def rates(results: Results) -> Drawn:
    """Median accuracy by rate, one panel for each lag."""
    settings: list[tuple[str, Form, int]] = [(f"lag {lag} from the start", "cold", lag) for lag in (8, 32, 128)]
    settings.append((f"lag {LAG} from update {RAMP_START} on", "ramp", LAG))
    figure, axes = plt.subplots(1, 4, figsize=(14, 4.4), sharey=True)
    shown = list[Run]()
    for axis, (title, form, lag) in zip(axes, settings, strict=True):
        for arm in RATE_ARMS:
            points = []
            for rate in RATES:
                one = [cell("reverse10", arm, form, rate, seed, lag) for seed in SEEDS[:3]]
                if runs := results.of(one):
                    points.append((rate, statistics.median(run["accuracy"] for run in runs), any(map(is_collapsed, runs))))
                    shown += runs
            colour, line, marker = LOOKS[arm]
            if points:
                xs, ys, fallen = zip(*points, strict=True)
                axis.plot(xs, ys, linestyle=line, marker=marker, color=colour, label=ARMS[arm].title)
                axis.plot(*circled(xs, ys, fallen), "o", markersize=12, markerfacecolor="none", color=colour)
        axis.set(title=title, xlabel="learning rate", xscale="log", xlim=(RATES[0] / 1.2, RATES[-1] * 1.2), ylim=(-0.02, 1.02))
        axis.set_xticks(RATES, [rate_text(rate) for rate in RATES])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[-1].plot([], [], "o", markersize=12, markerfacecolor="none", color="grey", label="circled: a run of three collapsed")
    axes[0].set_ylabel(f"median {ACCURACY}")
    return finish(figure, axes), shown


def circled(xs: Sequence[float], ys: Sequence[float], fallen: Sequence[bool]) -> tuple[list[float], list[float]]:
    """The points at which a run collapsed."""
    kept = [(x, y) for x, y, fell in zip(xs, ys, fallen, strict=True) if fell]
    return [x for x, _ in kept], [y for _, y in kept]


def alarms(results: Results) -> Drawn:
    """Lowest ESS ratio, largest gradient norm and KL of the first lagged updates against final accuracy."""
    runs = [run for run in results.of(lagged_cells()) if window(run, "min_ess", start_of(run))]
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.4), sharey=True)
    for axis, (field, peak, label) in zip(
        axes,
        (
            ("min_ess", min, "lowest ESS ratio"),
            ("max_grad_norm", max, "largest gradient norm"),
            ("max_kl", max, "largest KL, nats per token"),
        ),
        strict=True,
    ):
        for fallen, colour, marker, name in ((False, BLUE, "o", "stands"), (True, RED, "x", "collapses")):
            found = [run for run in runs if is_collapsed(run) == fallen]
            xs = [peak(window(run, field, start_of(run))) for run in found]
            axis.plot(xs, [run["accuracy"] for run in found], marker, color=colour, alpha=0.5, markersize=5, label=name)
        axis.set(xlabel=f"{label} of the first 100 lagged\nupdates, or up to the collapse", xscale="log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].axvline(ESS_ALARM, color="grey", linestyle="--", linewidth=1, label=f"ESS alarm at {ESS_ALARM:g}")
    axes[0].set(ylabel=f"final {ACCURACY}", ylim=(-0.03, 1.03))
    return finish(figure, axes), runs


def gac(results: Results) -> Drawn:
    """Mean cosine of consecutive gradients by lag."""
    lags = (0, 2, 4, 8, 32)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True)
    shown = list[Run]()
    for axis, rate in zip(axes, (1e-4, 3e-4), strict=True):
        for arm in ("none", "ppo", "tis"):
            means = []
            for lag in lags:
                one = [
                    cell("reverse10", arm if lag else "sync", "cold" if lag else "sync", rate, seed, lag) for seed in SEEDS[:3]
                ]
                runs = results.of(one)
                values = [m for run in runs if (m := healthy_mean(run, "cosine", run["lag"])) is not None]
                means.append(statistics.median(values) if values else np.nan)
                shown += runs
            colour, line, marker = LOOKS[arm]
            axis.plot(range(len(lags)), means, linestyle=line, marker=marker, color=colour, label=ARMS[arm].title)
        axis.set(title=f"learning rate {rate_text(rate)}", xlabel="lag, updates")
        axis.set_xticks(range(len(lags)), [str(lag) for lag in lags])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean cosine of consecutive gradients")
    return finish(figure, axes), shown


def tic_gmc(results: Results) -> Drawn:
    """Accuracy by group size, one panel for each threshold and rate."""
    sizes, epsilons = (4, 8, 16, 32), (0.1, 0.2, 0.4)
    figure, axes = plt.subplots(2, 3, figsize=(11, 6.4), sharey=True, sharex=True)
    shown = list[Run]()
    for i, rate in enumerate((1e-4, 3e-4)):
        for j, epsilon in enumerate(epsilons):
            for shift, arm in ((-0.06, "tic"), (0.06, "gmc")):
                colour, line, marker = LOOKS[arm]
                medians = []
                for k, size in enumerate(sizes):
                    one = [cell("reverse10", arm, "cold", rate, s, group_size=size, epsilon=epsilon) for s in SEEDS[:3]]
                    runs = results.of(one)
                    values = [run["accuracy"] for run in runs]
                    medians.append(statistics.median(values) if values else np.nan)
                    axes[i, j].plot([k + shift] * len(values), values, marker, color=colour, alpha=0.5, markersize=5)
                    shown += runs
                axes[i, j].plot(range(len(sizes)), medians, linestyle=line, color=colour, label=f"{ARMS[arm].title}, median")
            axes[i, j].set_title(f"rate {rate_text(rate)}, epsilon {epsilon:g}", fontsize=10)
            axes[i, j].set_xticks(range(len(sizes)), [str(size) for size in sizes])
            axes[i, j].grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("group size (128 responses an update)")
    for axis in axes[:, 0]:
        axis.set(ylabel="greedy accuracy", ylim=(-0.03, 1.03))
    return finish(figure, axes), shown


def opob(results: Results) -> Drawn:
    """Final accuracies by the weights of the optimal baseline."""
    settings = (("reverse10", 3e-4), ("reverse10", 6e-4), ("reverse4to16", 3e-4))
    groups = [
        (
            f"{TASKS[task].title}, rate {rate_text(rate)}",
            {arm: results.of(cell(task, arm, "cold", rate, seed) for seed in SEEDS) for arm in OPOB_ARMS},
        )
        for task, rate in settings
    ]
    return dots(groups, {title: results.synchronous(t, r, SEEDS) for (title, _), (t, r) in zip(groups, settings, strict=True)})


def tasks(results: Results) -> Drawn:
    """Final accuracies on all tasks."""
    groups = [
        (setting.title, {arm: results.of(cell(task, arm, "cold", seed=seed) for seed in SEEDS) for arm in MAIN})
        for task, setting in TASKS.items()
    ]
    return dots(groups, {setting.title: results.synchronous(task, 3e-4, SEEDS) for task, setting in TASKS.items()})


def pace(results: Results) -> Drawn:
    """Accuracy by seconds and by trained tokens under real asynchrony: medians over seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True)
    shown = list[Run]()
    for axis, field, label in ((axes[0], "seconds", "seconds of training"), (axes[1], "tokens", "trained tokens, thousands")):
        for arm in POOL_ARMS:
            runs = results.of(cell("reverse4to16", arm, "async", seed=seed) for seed in SEEDS)
            if not runs:
                continue
            shown += runs
            colour, line, marker = LOOKS[arm]
            unit = 1000 if field == "tokens" else 1
            number = min(len(run[field]) for run in runs)
            xs = [0.0, *(statistics.median(run[field][i] for run in runs) / unit for i in range(number))]
            ys = [statistics.median(run["curve"][i][1] for run in runs) for i in range(number + 1)]
            axis.plot(xs, ys, linestyle=line, marker=marker, markersize=4, color=colour, label=ARMS[arm].title)
        axis.set(xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(ACCURACY)
    return finish(figure, axes), shown


def bias(results: Results) -> Drawn:
    """Gradient bias by group size, one panel for each pair of policies."""
    lines = read_lines(results.path.with_name("bias.jsonl"))
    pairs = sorted({line["updates"] for line in lines})
    names = list(dict.fromkeys(line["method"] for line in lines))
    looks = dict(
        zip(
            names,
            (
                (RED, ":", "x"),
                (BLACK, "--", "s"),
                (PINK, (0, (5, 1)), "D"),
                (ORANGE, "-.", "^"),
                (SKY, "--", "<"),
                (BLUE, "-", "o"),
                (GREEN, ":", "P"),
            ),
            strict=False,
        )
    )
    figure, axes = plt.subplots(1, max(1, len(pairs)), figsize=(max(9, 4 * len(pairs)), 4.4), sharey=True, squeeze=False)
    for axis, updates in zip(axes[0], pairs, strict=False):
        for name in names:
            found = sorted((n["group_size"], n["bias"]) for n in lines if (n["updates"], n["method"]) == (updates, name))
            colour, line, marker = looks[name]
            axis.plot(*zip(*found, strict=True), linestyle=line, marker=marker, color=colour, label=name)
        sizes = sorted({n["group_size"] for n in lines})
        axis.set(title=f"policies {updates} updates apart", xlabel="group size", xscale="log")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("bias against fresh gradients\n/ norm of the fresh gradient")
    return finish(figure, axes), lines


FIGURES: dict[str, Callable[[Results], Drawn]] = {
    f.__name__: f for f in (headline, methods, rates, alarms, gac, tic_gmc, bias, opob, tasks, pace)
}


def made_of(lines: Sequence[Run], noun: str) -> str:
    """Number, seeds and commits of what a figure shows; it is written into the file, where `results_table.py` reads it."""
    distinct = {line["key"]: line for line in lines}.values()
    seeds, commits = (sorted({line[field] for line in distinct}) for field in ("seed", "commit"))
    return f"{len(distinct)} {noun}, seeds {' '.join(map(str, seeds))}, commits {' '.join(commits)}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", metavar="NAME", help=f"one of {', '.join(FIGURES)}; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results file (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="folder (default: %(default)s)")
    given = parser.parse_args()
    if unknown := [name for name in given.figures if name not in FIGURES]:
        parser.error(f"NAME must be one of {', '.join(FIGURES)}, got {', '.join(unknown)}")
    if not given.results.is_file():
        parser.error(f"--results must be a results file, got {given.results}")
    results = Results(given.results)
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.figures or FIGURES:
        figure, shown = FIGURES[name](results)
        if shown:
            path = given.out / f"{name}.png"
            note = made_of(shown, "measurements" if name == "bias" else "runs")
            figure.savefig(path, dpi=100, metadata={"Description": note})
            print(f"{path}: {note}")
        else:
            print(f"{name}: no runs yet")
        plt.close(figure)


if __name__ == "__main__":
    main()
