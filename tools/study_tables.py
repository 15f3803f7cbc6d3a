"""Tables of the study on final accuracy: methods, rates, thresholds, tasks; and what was run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from study_arms import ARMS, HEADLINE, MAIN, OPOB_ARMS, RATE_ARMS, TASKS
from study_grid import LAG, RATES, SECTIONS, SEEDS, Form, cell, cells_of
from study_results import (
    FORM_TITLES,
    Results,
    collapsed,
    difference,
    fell,
    rate_text,
    spread,
    table,
    told,
    with_collapses,
)
from study_statistics import Run, best_rate, is_stable

CLAIMS = (
    *(("vcpo_proxy", arm) for arm in HEADLINE if arm != "vcpo_proxy"),
    *(("gmc", "tic"), ("sync_opob", "sync")),
)
"""Pairs of methods whose difference has an interval, left minus right."""
LAGS = (8, 32, 128)


def headline(results: Results) -> str:
    """Every method at lag 32."""
    return told(results, SECTIONS["headline"](), headline_table(results))


def headline_table(results: Results) -> str:
    """Both forms of the lag side by side."""
    rows = []
    for arm in HEADLINE:
        row = [ARMS[arm].title]
        for form in FORM_TITLES:
            runs = _headline_runs(results, arm, form)
            late = f"{statistics.median(run['accuracy_last3'] for run in runs):.2f}" if runs else "-"
            row += [spread(runs), late, collapsed(runs)]
        rows.append(row)
    return table(["method", *(h for title in FORM_TITLES.values() for h in (title, "last three", "collapsed"))], rows)


def sparse(results: Results) -> str:
    """The same from warm starts that sample almost nothing right; those runs have a file of their own."""
    return headline_table(Results(results.path.with_name("sparse.jsonl")))


def claims(results: Results) -> str:
    """Paired differences at lag 32."""
    rows = []
    for left, right in CLAIMS:
        row = [f"{ARMS[left].title} minus {ARMS[right].title}"]
        for form in FORM_TITLES:
            mine, other = (_headline_runs(results, arm, form) for arm in (left, right))
            row += [difference(mine, other), difference(mine, other, "accuracy_last3")]
        rows.append(row)
    header = ["difference of accuracy", *(h for title in FORM_TITLES.values() for h in (title, "last three"))]
    return told(results, SECTIONS["headline"](), table(header, rows))


def _headline_runs(results: Results, arm: str, form: Form) -> list[Run]:
    return results.of(cell("reverse10", arm, form, seed=seed) for seed in SEEDS)


def rate_runs(results: Results, arm: str, form: Form, lag: int, rate: float) -> list[Run]:
    """Runs of three seeds of a method at a lag and rate on `reverse10`."""
    return results.of(cell("reverse10", arm, form, rate, seed, lag) for seed in SEEDS[:3])


def _by_rate(results: Results, arm: str, form: Form, lag: int) -> dict[float, list[Run]]:
    return {rate: runs for rate in RATES if (runs := rate_runs(results, arm, form, lag, rate))}


def _rates_of(results: Results, form: Form, lag: int) -> str:
    """One table of accuracy by rate."""
    at_sync = _by_rate(results, "sync", form, lag)
    reference = max((statistics.median(r["accuracy"] for r in runs) for runs in at_sync.values()), default=0.0)
    rows = []
    for arm in RATE_ARMS:
        by_rate = _by_rate(results, arm, form, lag)
        row = [ARMS[arm].title]
        for rate in RATES:
            runs = by_rate.get(rate, [])
            row.append(f"{statistics.median(r['accuracy'] for r in runs):.2f}{fell(runs)}" if runs else "-")
        stable = [rate for rate in RATES if rate in by_rate and is_stable(by_rate[rate], reference)]
        row.append(" ".join(map(rate_text, stable)) or ("none" if by_rate else "-"))
        rows.append(row)
    return table(["method", *map(rate_text, RATES), "stable rates"], rows)


def rates(results: Results) -> str:
    """Accuracy by rate, one table for each lag."""
    parts = [f"Lag {lag} from the start:\n\n" + _rates_of(results, "cold", lag) for lag in LAGS]
    parts.append(f"Lag {LAG} from update 100 on:\n\n" + _rates_of(results, "ramp", LAG))
    return told(results, SECTIONS["rates"](), "\n\n".join(parts))


def best_rates(results: Results) -> str:
    """Each method at its own best rate, and how far VCPO is ahead there."""
    settings: list[tuple[str, Form, int]] = [
        *((f"lag {lag}", "cold", lag) for lag in LAGS),
        (f"lag {LAG} from 100 on", "ramp", LAG),
    ]
    rows = []
    for arm in RATE_ARMS:
        row = [ARMS[arm].title]
        for _, form, lag in settings:
            mine, vcpo = (_by_rate(results, name, form, lag) for name in (arm, "vcpo_proxy"))
            if not mine or not vcpo:
                row.append("-")
                continue
            rate = best_rate(mine)
            ahead = "" if arm == "vcpo_proxy" else f"; {difference(vcpo[best_rate(vcpo)], mine[rate])}"
            mean = statistics.fmean(r["accuracy"] for r in mine[rate])
            row.append(f"{mean:.2f} at {rate_text(rate)}{fell(mine[rate])}{ahead}")
        rows.append(row)
    return told(results, SECTIONS["rates"](), table(["method", *(name for name, _, _ in settings)], rows))


def tic_gmc(results: Results) -> str:
    """TIC and GMC by threshold, group size and rate, and their paired difference."""
    sizes, epsilons, rows, together = (4, 8, 16, 32), (0.1, 0.2, 0.4), [], []
    for rate in (1e-4, 3e-4):
        settings = [("tic", "gmc", epsilon, sizes) for epsilon in epsilons] + [("tic_ess", "gmc_ess", 0.2, (8,))]
        for tic, gmc, epsilon, run_sizes in settings:
            runs = {arm: {size: _of_size(results, arm, rate, epsilon, size) for size in run_sizes} for arm in (tic, gmc)}
            cells = {ARMS[arm].title: {size: with_collapses(runs[arm][size]) for size in run_sizes} for arm in (tic, gmc)}
            cells["GMC minus TIC"] = {size: difference(runs[gmc][size], runs[tic][size]) for size in run_sizes}
            for title, by_size in cells.items():
                rows.append([rate_text(rate), f"{epsilon:g}", title, *(by_size.get(size, "") for size in sizes)])
        tics, gmcs = (
            [run for epsilon in epsilons for size in sizes for run in _of_size(results, arm, rate, epsilon, size)]
            for arm in ("tic", "gmc")
        )
        together.append([rate_text(rate), difference(_of_seeds(gmcs), _of_seeds(tics)), collapsed(tics), collapsed(gmcs)])
    header = ["rate", "epsilon", "method", *(f"G = {size}" for size in sizes)]
    summary = table(["rate", "GMC minus TIC", "TIC collapsed", "GMC collapsed"], together)
    text = f"{table(header, rows)}\n\nAll thresholds and group sizes together, without the ESS step size:\n\n{summary}"
    return told(results, SECTIONS["tic_gmc"](), text)


def _of_seeds(runs: Sequence[Run]) -> list[Run]:
    """The mean accuracy of each seed."""
    seeds = sorted({run["seed"] for run in runs})
    return [
        {"seed": seed, "accuracy": statistics.fmean(run["accuracy"] for run in runs if run["seed"] == seed)} for seed in seeds
    ]


def _of_size(results: Results, arm: str, rate: float, epsilon: float, size: int) -> list[Run]:
    return results.of(cell("reverse10", arm, "cold", rate, seed, group_size=size, epsilon=epsilon) for seed in SEEDS[:3])


def opob(results: Results) -> str:
    """Ways to weigh the optimal baseline."""
    settings = [("reverse10", 3e-4), ("reverse10", 6e-4), ("reverse4to16", 3e-4)]
    rows = []
    for arm in OPOB_ARMS:
        row = [ARMS[arm].title]
        for task, rate in settings:
            mine, proxy = (_of_rate(results, task, name, rate) for name in (arm, "vcpo_proxy"))
            row += [with_collapses(mine), "-" if arm == "vcpo_proxy" else difference(mine, proxy)]
        rows.append(row)
    header = [
        "method",
        *(h for task, rate in settings for h in (f"{TASKS[task].title}, {rate_text(rate)}", "minus the first row")),
    ]
    forms = zip(("paper", "released", "norms over length"), OPOB_ARMS[::2], OPOB_ARMS[1::2], strict=True)
    norms = [
        [
            form,
            *(difference(_of_rate(results, task, exact, rate), _of_rate(results, task, proxy, rate)) for task, rate in settings),
        ]
        for form, proxy, exact in forms
    ]
    text = (
        f"{table(header, rows)}\n\nExact minus logit proxy, by the other weights:\n\n{table(['weights', *header[1::2]], norms)}"
    )
    return told(results, SECTIONS["opob"](), text)


def _of_rate(results: Results, task: str, arm: str, rate: float) -> list[Run]:
    return results.of(cell(task, arm, "cold", rate, seed) for seed in SEEDS)


def tasks(results: Results) -> str:
    """The main methods on all tasks."""
    rows = []
    for arm in MAIN:
        row = [ARMS[arm].title]
        for task in TASKS:
            runs, vcpo = (results.of(cell(task, name, "cold", seed=seed) for seed in SEEDS) for name in (arm, "vcpo_proxy"))
            row += [with_collapses(runs), "-" if arm == "vcpo_proxy" else difference(vcpo, runs)]
        rows.append(row)
    header = ["method", *(h for task in TASKS.values() for h in (task.title, "VCPO (proxy) minus it"))]
    return told(results, SECTIONS["tasks"](), table(header, rows))


def warm(results: Results) -> str:
    """The warm starts that were used."""
    rows = []
    for task, setting in TASKS.items():
        found = {run["seed"]: run["warm"] for run in results.of(c for c in cells_of(SECTIONS) if c.task == task)}
        for field, title in (("greedy", "greedy accuracy"), ("sampled", "sampled accuracy"), ("steps", "supervised steps")):
            rows.append([setting.title, title, *(f"{found[seed][field]:g}" if seed in found else "-" for seed in SEEDS)])
    return table(["task", "", *(f"seed {seed}" for seed in SEEDS)], rows)


def effort(results: Results) -> str:
    """Runs and hours of one core by section (engine processes not included); a run of two sections counts in the first."""
    rows, seen, hours = [], set[str](), 0.0
    for name, section in SECTIONS.items():
        cells = [c for c in section() if c.key not in seen]
        seen |= {c.key for c in cells}
        runs = results.of(cells)
        spent = sum(run["cpu_s"] for run in runs) / 3600
        hours += spent
        commits = ", ".join(sorted({run["commit"] for run in runs})) or "-"
        rows.append([name, str(len(cells)), str(len(runs)), f"{spent:.1f}", commits])
    rows.append(["all", str(len(seen)), str(len(results.of(cells_of(SECTIONS)))), f"{hours:.1f}", ""])
    return table(["section", "runs planned", "runs made", "core hours", "commits"], rows)
