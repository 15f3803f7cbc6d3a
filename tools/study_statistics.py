"""Statistics of the study as pure functions; the definitions were fixed before any of its results was looked at.

A *curve* is a list of [update, accuracy], the warm start first. A *run* is a line of the results file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

COLLAPSE_SHARE = 0.5
COLLAPSE_EVALUATIONS = 3
"""Collapse: accuracy below this share of its running best (the warm start counts) for this many evaluations in a row. The
collapse is dated by the first of them."""

ESS_ALARM = 0.05
ESS_ALARM_UPDATES = 3
"""ESS alarm: the ratio is below this value, in one update, or in that many in a row (dated by the first of them)."""

ALARM_QUANTILE = 0.99
KL_HEALTHY = 0.05
"""Alarms by gradient norm and by KL: above this quantile of the block maxima of synchronous runs at the same task and rate, up to
a collapse of theirs. A synchronous run has no KL at all, so its alarm is at least at the bound that docs/metrics.md calls
healthy, nats per token."""

BLOCK = 10
"""Updates of a block. Alarms by blocks are dated by the last update of the last of them."""

PREDICTION_UPDATES = 100
"""Ranking looks at so many lagged updates, or at those up to the collapse if that is earlier."""

STABLE_SHARE = 0.8
"""A rate is stable for a method: no run collapses, and the median accuracy is at least this share of the synchronous median at
its best rate."""

RESAMPLES = 10_000
CONFIDENCE = 0.95

Run = Mapping[str, Any]


def first_below(values: Sequence[float], bound: float, in_a_row: int) -> int | None:
    """Number (from 1) of the first of `in_a_row` values in a row that are below `bound`; None if there is none.

    Example:
        >>> first_below([0.5, 0.01, 0.5, 0.01, 0.02], 0.05, 1), first_below([0.5, 0.01, 0.5, 0.01, 0.02], 0.05, 2)
        (2, 4)
    """
    run = 0
    for number, value in enumerate(values, 1):
        run = run + 1 if value < bound else 0
        if run == in_a_row:
            return number - in_a_row + 1
    return None


def blocks(values: Sequence[float], size: int, reduce: Callable[[Sequence[float]], float]) -> list[float]:
    """One number for every `size` values; the last block may be shorter.

    Example:
        >>> blocks([3.0, 1.0, 2.0, 5.0, 4.0], 2, max)
        [3.0, 5.0, 4.0]
    """
    return [reduce(values[start : start + size]) for start in range(0, len(values), size)]


def collapse_update(curve: Sequence[Sequence[float]]) -> int | None:
    """Update of the collapse (see `COLLAPSE_SHARE`), None if there is none.

    Example:
        >>> collapse_update([[0, 0.5], [20, 0.6], [40, 0.2], [60, 0.1], [80, 0.2]])
        40
    """
    best, fallen = 0.0, 0
    for i, (_, accuracy) in enumerate(curve):
        best = max(best, accuracy)
        fallen = fallen + 1 if accuracy < COLLAPSE_SHARE * best else 0
        if fallen == COLLAPSE_EVALUATIONS:
            return int(curve[i - COLLAPSE_EVALUATIONS + 1][0])
    return None


def alarm_threshold(synchronous: Sequence[Run], field: str) -> float | None:
    """Threshold of the alarm by `max_grad_norm` or `max_kl`; None without a synchronous run."""
    values = [value for run in synchronous for value in healthy(run, field)]
    if not values:
        return None
    threshold = float(np.nanquantile(values, ALARM_QUANTILE))
    return max(threshold, KL_HEALTHY) if field == "max_kl" else threshold


def block_alarm(maxima: Sequence[float], threshold: float, start: int = 0, in_a_row: int = 1) -> int | None:
    """Last update of the first `in_a_row` blocks in a row, after update `start`, above the threshold; None if there are none.

    Example:
        >>> maxima = [9.0, 1.0, 3.0, 3.0]
        >>> block_alarm(maxima, 2.0), block_alarm(maxima, 2.0, start=10), block_alarm(maxima, 2.0, in_a_row=2)
        (10, 30, 40)
    """
    run = 0
    for i, value in enumerate(maxima):
        run = run + 1 if i * BLOCK >= start and value > threshold else 0
        if run == in_a_row:
            return (i + 1) * BLOCK
    return None


def lead_time(collapse: int | None, alarm: int | None) -> int | None:
    """Updates from alarm to collapse; None if either is missing, or the alarm comes after it."""
    if collapse is None or alarm is None or alarm > collapse:
        return None
    return collapse - alarm


def window(run: Run, field: str, start: int) -> list[float]:
    """A run's blocks of the first lagged updates, of those up to the collapse if that is earlier; see `PREDICTION_UPDATES`."""
    return healthy(run, field, start)[: PREDICTION_UPDATES // BLOCK]


def ranking_quality(fallen: Sequence[Sequence[float]], standing: Sequence[Sequence[float]]) -> float | None:
    """Probability that a run that collapses has a higher peak than one that does not; ties count half; None without both kinds.

    A pair is looked at for as long as the collapsing run's window lasts: the peak of more blocks is higher by itself.

    Args:
        fallen, standing: `window` of each run.

    Example:
        >>> ranking_quality([[3.0], [1.0]], [[2.0, 9.0], [1.0, 9.0]])
        0.625
    """
    if not fallen or not standing:
        return None
    pairs = [(max(mine), max(other[: len(mine)])) for mine in fallen for other in standing]
    return sum((mine > other) + 0.5 * (mine == other) for mine, other in pairs) / len(pairs)


def paired_bootstrap(differences: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean of paired differences, pairs drawn with replacement.

    With few pairs it is narrower than it should be: with 5, an interval of 95 % covers some 85 %.
    """
    values = np.asarray(differences, dtype=float)
    means = values[np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def paired_differences(left: Sequence[Run], right: Sequence[Run], field: str = "accuracy") -> list[float]:
    """Differences left minus right of runs of the same seed."""
    others = {run["seed"]: run[field] for run in right}
    return [run[field] - others[run["seed"]] for run in left if run["seed"] in others]


def is_stable(runs: Sequence[Run], reference: float) -> bool:
    """Whether a method's runs at one rate are stable (see `STABLE_SHARE`); `reference`: the best synchronous median."""
    collapsed = any(collapse_update(run["curve"]) is not None for run in runs)
    return not collapsed and statistics.median(run["accuracy"] for run in runs) >= STABLE_SHARE * reference


def best_rate(by_rate: Mapping[float, Sequence[Run]]) -> float:
    """The rate with the highest mean accuracy, since means are compared; the lowest of them if it is shared."""
    means = {rate: statistics.fmean(run["accuracy"] for run in runs) for rate, runs in by_rate.items() if runs}
    return max(sorted(means), key=lambda rate: means[rate])


def healthy(run: Run, field: str, start: int = 0) -> list[float]:
    """A field's blocks after update `start` and up to the collapse, after which there is no gradient to speak of."""
    collapse = collapse_update(run["curve"])
    end = math.inf if collapse is None else collapse
    return [value for i, value in enumerate(run[field]) if i * BLOCK >= start and (i + 1) * BLOCK <= end]


def healthy_mean(run: Run, field: str, start: int = 0) -> float | None:
    """Mean of `healthy`; None if there is no such block."""
    values = healthy(run, field, start)
    return statistics.fmean(values) if values else None


def accuracy_at(run: Run, axis: str, value: float) -> float:
    """Accuracy where `axis` (`seconds` or `tokens`, of each evaluation) has a value, by linear interpolation."""
    points = run["curve"][-len(run[axis]) :]
    first = run["curve"][0] if len(run["curve"]) > len(points) else points[0]
    xs = [0.0, *run[axis]]
    ys = [first[1], *(accuracy for _, accuracy in points)]
    return float(np.interp(value, xs, ys))
