"""How the study's figures look: one colour, line and marker for each method, one legend below all panels."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from study_arms import ARMS
from study_results import is_collapsed
from study_statistics import Run

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

Drawn = tuple[Figure, Sequence[Run]]
"""A figure and the runs, or lines of another results file, that it shows; an empty one has none."""
ACCURACY = "greedy accuracy on held-out prompts"
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#B8A800", "#0072B2", "#D55E00", "#CC79A7"),
)
LOOKS = {
    "sync": (BLACK, "--", "s"),
    "sync_opob": (BLACK, ":", "d"),
    "none": (RED, ":", "x"),
    "ppo": (ORANGE, "-.", "^"),
    "token_tis": (YELLOW, (0, (3, 1, 1, 1, 1, 1)), "v"),
    "tis": (PINK, (0, (5, 1)), "D"),
    "ess": (GREEN, ":", "P"),
    "opob_proxy": (SKY, "--", "<"),
    "vcpo_proxy": (BLUE, "-", "o"),
    "vcpo_exact": (SKY, "-.", "*"),
    "gmc_ess_opob": (GREEN, "-", "h"),
    "tic": (ORANGE, "-.", "^"),
    "gmc": (BLUE, "-", "o"),
    "fifo": (RED, ":", "x"),
    "max_age": (ORANGE, "-.", "^"),
    "total": (PINK, (0, (5, 1)), "D"),
    "pace": (GREEN, "-", "h"),
    "vcpo_fifo": (SKY, "--", "<"),
    "vcpo_pace": (BLUE, "-", "o"),
}
"""Colour, line and marker of a method, the same in every figure."""


def draw_median(axis: Any, runs: Sequence[Run], arm: str) -> None:
    """A method's median curve, with a band from the lowest to the highest run."""
    if not runs:
        return
    steps = [step for step, _ in runs[0]["curve"]]
    values = [[dict(map(tuple, run["curve"])).get(step, np.nan) for run in runs] for step in steps]
    colour, line, _ = LOOKS[arm]
    axis.plot(steps, [statistics.median(v) for v in values], linestyle=line, color=colour, label=ARMS[arm].title, linewidth=1.8)
    axis.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.10, linewidth=0)


def finish(figure: Figure, axes: Any, columns: int = 4) -> Figure:
    """One legend below all panels."""
    handles = {label: handle for axis in np.ravel(axes) for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    rows = -(-len(handles) // columns)
    bottom = 0.24 * rows / figure.get_figheight() + 0.01
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=columns, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, bottom if handles else 0, 1, 1))
    return figure


def dots(groups: Sequence[tuple[str, dict[str, list[Run]]]], references: dict[str, list[Run]]) -> Drawn:
    """One panel a group, one row a method: each run a dot, their median a bar, the synchronous median a line."""
    rows = len(groups[0][1])
    figure, axes = plt.subplots(1, len(groups), figsize=(4.2 * len(groups) + 2.2, 0.32 * rows + 1.6), sharey=True, squeeze=False)
    for axis, (title, by_arm) in zip(axes[0], groups, strict=True):
        for i, runs in enumerate(by_arm.values()):
            values = [run["accuracy"] for run in runs]
            fallen = [is_collapsed(run) for run in runs]
            for marker, kept, colour in (("o", False, BLUE), ("x", True, RED)):
                found = [v for v, f in zip(values, fallen, strict=True) if f == kept]
                label = "run that collapsed" if kept else "run"
                axis.plot(found, [i] * len(found), marker, color=colour, alpha=0.7, markersize=6, label=label)
            if values:
                axis.plot(statistics.median(values), i, "|", color=BLACK, markersize=16, markeredgewidth=2, label="median")
        if reference := references.get(title):
            median = statistics.median(run["accuracy"] for run in reference)
            axis.axvline(median, color=BLACK, linestyle="--", linewidth=1, label="synchronous median")
        axis.set(title=title, xlabel=ACCURACY, xlim=(-0.03, 1.03))
        axis.grid(axis="x", alpha=0.3)
    axes[0, 0].set_yticks(range(rows), [ARMS[arm].title for arm in groups[0][1]])
    axes[0, 0].set_ylim(rows - 0.4, -0.6)
    shown = [run for _, by_arm in groups for runs in by_arm.values() for run in runs]
    return finish(figure, axes), shown + [run for runs in references.values() for run in runs]
