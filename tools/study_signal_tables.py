"""Tables of the study on what happens inside a run: alarms, cosines, gradient bias, staleness."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from study_arms import ARMS, GAC_ARMS, POOL_ARMS
from study_grid import GROUP_SIZE, RATES, SECTIONS, SEEDS, Cell, cell, cells_of
from study_results import (
    ALARMS,
    Results,
    alarms_of,
    collapsed,
    difference,
    is_collapsed,
    leads_of,
    rate_text,
    read_lines,
    spread,
    start_of,
    table,
    told,
    with_collapses,
)
from study_statistics import Run, accuracy_at, healthy_mean, ranking_quality, window
from study_tables import rate_runs


def lagged_cells() -> list[Cell]:
    """Cells whose signals are comparable: lagged, on `reverse10`, groups of 8, no gradient alignment control that acts."""
    return [
        c
        for c in cells_of(SECTIONS)
        if c.task == "reverse10"
        and c.form in ("cold", "ramp")
        and c.group_size == GROUP_SIZE
        and ARMS[c.arm].control == "observe"
    ]


def _lagged(results: Results) -> list[tuple[Run, list[Run]]]:
    """Those that were run and stood when the lag began, with the synchronous runs of their rate."""
    runs = [run for run in results.of(lagged_cells()) if window(run, "min_ess", start_of(run))]
    return [(run, results.synchronous("reverse10", run["rate"], SEEDS)) for run in runs]


def alarms(results: Results) -> str:
    """How early each alarm rings before a collapse, and how often without one."""
    rows = []
    synchronous = [
        alarms_of(run, sync) for rate in RATES if (sync := results.synchronous("reverse10", rate, SEEDS)) for run in sync
    ]
    for form, title in (("cold", "from the start"), ("ramp", "from update 100 on")):
        runs = [(run, sync) for run, sync in _lagged(results) if run["form"] == form and sync]
        fallen = [leads_of(run, sync) for run, sync in runs if is_collapsed(run)]
        standing = [alarms_of(run, sync) for run, sync in runs if not is_collapsed(run)]
        for i, name in enumerate(ALARMS):
            leads = [lead for run in fallen if (lead := run[i]) is not None]
            median = f"{statistics.median(leads):.0f} ({min(leads)}-{max(leads)})" if leads else "-"
            false = sum(run[i] is not None for run in standing)
            quiet = f"{sum(run[i] is not None for run in synchronous)}/{len(synchronous)}"
            rows.append([title, name, f"{len(leads)}/{len(fallen)}", median, f"{false}/{len(standing)}", quiet])
    header = ["lag", "alarm", "collapses announced", "lead in updates: median (range)", "alarms without a collapse"]
    return told(results, lagged_cells(), table([*header, "alarms in synchronous runs"], rows))


def ranking(results: Results) -> str:
    """How well each number ranks runs that collapse above those that do not."""
    groups: dict[str, Callable[[Run], bool]] = {
        "all lagged runs": lambda run: True,
        "without the ESS step size": lambda run: not ARMS[run["arm"]].ess_lr,
        "sequence weights, no ESS step size": lambda run: run["arm"] in ("tis", "opob_proxy", "gmc", "tic"),
        "lag from the start": lambda run: run["form"] == "cold",
        "lag from update 100 on": lambda run: run["form"] == "ramp",
    }
    lagged = [run for run, _ in _lagged(results)]
    rows = []
    for name, belongs in groups.items():
        runs = list(filter(belongs, lagged))
        areas = []
        for field, sign in (("min_ess", -1), ("max_grad_norm", 1), ("max_kl", 1)):
            fallen, standing = (
                [[sign * value for value in window(r, field, start_of(r))] for r in runs if is_collapsed(r) == kind]
                for kind in (True, False)
            )
            areas.append(ranking_quality(fallen, standing))
        rows.append([name, collapsed(runs), *("-" if a is None else f"{a:.2f}" for a in areas)])
    header = ["runs", "collapsed", "lowest ESS ratio", "largest gradient norm", "largest KL"]
    return told(results, lagged_cells(), table(header, rows))


def gac_cosine(results: Results) -> str:
    """Cosine of consecutive gradients by lag, up to a collapse, after the lag has built up."""
    lags, rows = (2, 4, 8, 32), []
    for rate in (1e-4, 3e-4):
        sync = _cosines(results.synchronous("reverse10", rate, SEEDS[:3]))
        for arm in ("none", "ppo", "tis"):
            row = [rate_text(rate), ARMS[arm].title, _median(sync)]
            for lag in lags:
                row.append(_median(_cosines(rate_runs(results, arm, "cold", lag, rate))))
            rows.append(row)
    return told(results, SECTIONS["gac"](), table(["rate", "method", "lag 0", *(f"lag {lag}" for lag in lags)], rows))


def _cosines(runs: Sequence[Run]) -> list[float]:
    return [mean for run in runs if (mean := healthy_mean(run, "cosine", run["lag"])) is not None]


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})" if values else "-"


def gac_acting(results: Results) -> str:
    """Gradient alignment control that acts, at lag 8."""
    rows = []
    for base, arms in (("none", GAC_ARMS[:2]), ("ppo", GAC_ARMS[2:4]), ("tis", GAC_ARMS[4:6]), ("vcpo_proxy", GAC_ARMS[6:])):
        for arm in (base, *arms):
            row = [ARMS[arm].title]
            for rate in (1e-4, 3e-4):
                runs, plain = (rate_runs(results, name, "cold", 8, rate) for name in (arm, base))
                skipped = f"{statistics.median(r['skipped'] for r in runs):.0f}" if runs and arm != base else "-"
                row += [with_collapses(runs), "-" if arm == base else difference(runs, plain), skipped]
            rows.append(row)
    header = ["method", *(f"{h} at {rate_text(rate)}" for rate in (1e-4, 3e-4) for h in ("accuracy", "gain", "skipped"))]
    return told(results, SECTIONS["gac"](), table(header, rows))


def pace(results: Results) -> str:
    """Samplers under real asynchrony."""
    runs = {arm: results.of(cell("reverse4to16", arm, "async", seed=seed) for seed in SEEDS) for arm in POOL_ARMS}
    if not any(runs.values()):
        return results.progress(SECTIONS["pace"]())
    least = {
        (seed, axis): min(run[axis][-1] for mine in runs.values() for run in mine if run["seed"] == seed)
        for seed in {run["seed"] for mine in runs.values() for run in mine}
        for axis in ("seconds", "tokens")
    }
    equal = {
        arm: [
            {"seed": run["seed"], **{axis: accuracy_at(run, axis, least[run["seed"], axis]) for axis in ("seconds", "tokens")}}
            for run in mine
        ]
        for arm, mine in runs.items()
    }
    rows = [_pace_row(arm, runs[arm], equal) for arm in POOL_ARMS if runs[arm]]
    header = ["method", "accuracy at equal time", "minus first in, first out", "at equal trained tokens", "final", "seconds"]
    header += ["generation staleness", "waiting staleness", "rejected groups", "length, trained over dispatched"]
    return told(results, SECTIONS["pace"](), table(header, rows))


def _pace_row(arm: str, runs: Sequence[Run], equal: dict[str, list[dict[str, float]]]) -> list[str]:
    plain = "vcpo_fifo" if arm.startswith("vcpo") else "fifo"
    lengths = [run["lengths"]["trained"] / run["lengths"]["dispatched"] - 1 for run in runs]
    return [
        ARMS[arm].title,
        spread(equal[arm], "seconds"),
        "-" if arm == plain else difference(equal[arm], equal[plain], "seconds"),
        spread(equal[arm], "tokens"),
        spread(runs),
        spread(runs, "wall_s", 0),
        *(f"{statistics.median(run[field] for run in runs):.1f}" for field in ("generation_staleness", "waiting_staleness")),
        f"{statistics.median(run['rejected_share'] for run in runs):.0%}",
        f"{statistics.median(lengths):+.1%}",
    ]


def bias(results: Results) -> str:
    """Gradient bias and variance at frozen pairs of policies."""
    lines = read_lines(results.path.with_name("bias.jsonl"))
    if not lines:
        return "*not run yet (`python tools/study.py bias`)*"
    sizes = sorted({line["group_size"] for line in lines})
    rows = []
    for updates in sorted({line["updates"] for line in lines}):
        for method in dict.fromkeys(line["method"] for line in lines):
            found = {line["group_size"]: line for line in lines if (line["updates"], line["method"]) == (updates, method)}
            texts = (
                f"{n['bias']:.2f} ({n['noise']:.2f}), {n['paired_bias']:.2f} ({n['paired_noise']:.2f}), {n['variance']:.1f}"
                for n in found.values()
            )
            rows.append([str(updates), method, *texts])
    return table(["updates apart", "weights", *(f"G = {size}" for size in sizes)], rows)


def baselines(results: Results) -> str:
    """What a baseline leaves of the gradient at frozen pairs of policies, and its noise."""
    lines = sorted(read_lines(results.path.with_name("baselines.jsonl")), key=lambda line: line["updates"])
    if not lines:
        return "*not run yet (`python tools/study.py bias`)*"
    rows = [
        [
            str(line["updates"]),
            line["method"],
            f"{line['signal']:.2f}",
            f"{line['variance']:.1f}",
            f"{line['variance'] / line['signal'] ** 2:.1f}",
        ]
        for line in lines
    ]
    return table(["updates apart", "baseline", "signal", "variance", "variance over signal squared"], rows)
