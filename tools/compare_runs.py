"""Draws one page of curves of any runs: reward, accuracy, ESS ratio, step scale, gradient cosine, staleness, throughput.

    python tools/compare_runs.py runs/grpo/version_0 runs/vcpo/version_0 --out compare.png

Reads the TensorBoard files of each run's folder. Needs `pip install 'lit-asyncrl[plot]'`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator, ScalarEvent

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000", "#999933")
SUFFIXES = (".png", ".svg", ".pdf")
STYLES = ("-", "--", ":", "-.")
"""Told apart by colour-blind readers, and in print after eight runs by their lines."""

LEGEND_CHARACTERS = 110
"""That fit into one row of the legend."""

Curve = tuple[np.ndarray, np.ndarray]
"""Updates and values."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: title with unit, the scalars it shows (regular expressions; the first that a run has), and its limits.

    What a group of the expression matches, such as the name of a held-out set, is added to the title.
    """

    title: str
    tags: tuple[str, ...]
    limits: tuple[float | None, float | None] = (None, None)
    smoothed: bool = True


PANELS = (
    Panel("held-out accuracy", (r"val/(.*)/accuracy",), (-0.02, 1.02), smoothed=False),
    Panel("mean reward of the batch", (r"reward/mean",)),
    Panel("ESS / trajectories", (r"weights/ess_ratio",), (-0.02, 1.02)),
    Panel("factor on the learning rate", (r"control/lr_scale",), (-0.02, 1.02)),
    Panel("cosine of consecutive gradients", (r"control/gradient_cosine_mean", r"control/gradient_cosine")),
    Panel("gradient norm before clipping", (r"control/grad_norm",)),
    Panel("policy age of trained tokens, updates", (r"pool/policy_age_mean",), (-0.05, None)),
    Panel("trained tokens / s", (r"throughput/trained_tokens_per_s",), (0.0, None)),
)


def read_curves(folder: str) -> dict[str, Curve]:
    """Every scalar of a run's folder by tag. What a run logged beyond the update from which it was resumed is left out.

    Raises:
        SystemExit: there is no TensorBoard file, or no scalar in it.
    """
    if not any(Path(folder).glob("events.out.tfevents.*")):
        raise SystemExit(f"RUN must be a folder with TensorBoard files, got {folder!r}. Name one such as runs/vcpo/version_0.")
    events = EventAccumulator(folder, size_guidance={SCALARS: 0})
    events.Reload()
    curves = {}
    for tag in events.Tags()["scalars"]:
        points: list[ScalarEvent] = []
        for point in events.Scalars(tag):
            while points and points[-1].step >= point.step:
                points.pop()
            points.append(point)
        curves[tag] = np.array([p.step for p in points]), np.array([p.value for p in points])
    if not curves:
        raise SystemExit(f"RUN must hold scalars, got none in {folder!r}. Has the run made an update?")
    return curves


def curve_of(curves: dict[str, Curve], panel: Panel) -> tuple[Curve, str] | None:
    """The run's curve for a panel and what its title adds; None if it logs nothing of the kind."""
    for pattern in panel.tags:
        for tag, curve in sorted(curves.items()):
            if found := re.fullmatch(pattern, tag):
                return curve, " ".join(found.groups())
    return None


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean over `window` values, of fewer at both ends; NaN counts as missing."""
    finite = np.isfinite(values)
    kernel = np.ones(min(window, len(values)))
    sums, counts = (np.convolve(part, kernel, "same") for part in (np.where(finite, values, 0.0), finite.astype(float)))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def short_names(folders: Sequence[str]) -> list[str]:
    """What tells the folders apart: their paths without the parts that all begin and end with.

    Example:
        >>> short_names(["runs/grpo/version_0", "runs/vcpo/version_0"])
        ['grpo', 'vcpo']
    """
    paths = [Path(folder).parts for folder in folders]
    while len(paths) > 1 and min(map(len, paths)) > 1 and len({path[0] for path in paths}) == 1:
        paths = [path[1:] for path in paths]
    while len(paths) > 1 and min(map(len, paths)) > 1 and len({path[-1] for path in paths}) == 1:
        paths = [path[:-1] for path in paths]
    return [str(Path(*path)) for path in paths]


def draw(runs: dict[str, dict[str, Curve]], out: Path, window: int) -> None:
    """Write the page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = max(1, LEGEND_CHARACTERS // (max(map(len, runs)) + 8))
    legend_height = 0.22 * (-(-len(runs) // columns) + 2)
    figure, axes = plt.subplots(4, 2, figsize=(11, 12 + legend_height), sharex=True)
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        shown = set[str]()
        for i, (name, curves) in enumerate(runs.items()):
            found = curve_of(curves, panel)
            if found is None:
                continue
            (steps, values), of = found
            shown.add(of)
            if panel.smoothed:
                values = smooth(values, window)
            style = STYLES[i // len(COLOURS) % len(STYLES)]
            axis.plot(
                steps,
                values,
                style,
                color=COLOURS[i % len(COLOURS)],
                linewidth=1.4,
                label=name,
                marker="." if len(steps) == 1 or not panel.smoothed else "",
            )
        axis.set_title(", ".join([panel.title, *sorted(shown - {""})]), fontsize=11)
        axis.set_ylim(*panel.limits) if shown else axis.text(0.5, 0.5, "not logged", ha="center", transform=axis.transAxes)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("update")
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    note = f"moving mean over {window} updates, but for the accuracy" if window > 1 else "as logged"
    names = [name if len(name) < LEGEND_CHARACTERS else "..." + name[-LEGEND_CHARACTERS:] for name in handles]
    figure.legend(handles.values(), names, loc="lower center", ncols=columns, title=note, frameon=False)
    figure.tight_layout(rect=(0, legend_height / figure.get_figheight(), 1, 1))
    figure.savefig(out, dpi=90)
    plt.close(figure)


def main() -> None:
    """Read, draw, and name the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's log folder")
    parser.add_argument("--out", type=Path, default=Path("compare.png"), help="file to write (default: %(default)s)")
    parser.add_argument("--smooth", type=int, default=9, metavar="UPDATES", help="window of the moving mean; 1: none")
    arguments = parser.parse_args()
    if arguments.smooth < 1:
        parser.error(f"--smooth must be at least 1 update, got {arguments.smooth}")
    folders = [str(Path(folder)) for folder in arguments.runs]
    if repeated := sorted({folder for folder in folders if folders.count(folder) > 1}):
        parser.error(f"every RUN must be another folder, got {', '.join(repeated)} more than once")
    if not arguments.out.parent.is_dir() or arguments.out.suffix not in SUFFIXES:
        parser.error(f"--out must be a file {' or '.join(SUFFIXES)} in a folder that exists, got {arguments.out}")
    curves = [read_curves(folder) for folder in folders]
    draw(dict(zip(short_names(folders), curves, strict=True)), arguments.out, arguments.smooth)
    print(arguments.out)


if __name__ == "__main__":
    main()
