"""The study's results as tables and figures need them: runs of cells, alarms, and numbers as text."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from study_grid import RAMP_START, ROOT, Cell, Form, cell
from study_statistics import (
    ESS_ALARM,
    Run,
    alarm_threshold,
    block_alarm,
    collapse_update,
    lead_time,
    paired_bootstrap,
    paired_differences,
)

RESULTS = ROOT / "docs" / "study" / "results.jsonl"


class Results:
    """Finished runs, found by their cells.

    Args:
        path: results file; one that does not exist holds nothing.
    """

    def __init__(self, path: Path = RESULTS) -> None:
        self.path = path
        lines = read_results(path)
        self._runs: dict[str, Run] = {key: line for key, line in lines.items() if "error" not in line}
        self._failed = lines.keys() - self._runs.keys()

    def of(self, cells: Iterable[Cell]) -> list[Run]:
        """The runs of those cells that have been run."""
        return [self._runs[c.key] for c in cells if c.key in self._runs]

    def progress(self, cells: Sequence[Cell]) -> str:
        """A line that says what is missing; empty if nothing is."""
        unique = {c.key: c for c in cells}
        done = len(self.of(unique.values()))
        failed = sum(key in self._failed for key in unique)
        if done == len(unique):
            return ""
        note = f", {failed} failed" if failed else ""
        return f"*{done} of {len(unique)} runs made so far{note}*" if done else f"*not run yet (0 of {len(unique)} runs{note})*"

    def synchronous(self, task: str, rate: float, seeds: Iterable[int]) -> list[Run]:
        """Synchronous runs of a task at a rate."""
        return self.of(cell(task, "sync", "sync", rate, seed) for seed in seeds)


def start_of(run: Run) -> int:
    """Update at which the lag begins."""
    return RAMP_START if run["form"] == "ramp" else 0


def is_collapsed(run: Run) -> bool:
    """Whether a run collapsed; see `study_statistics`."""
    return collapse_update(run["curve"]) is not None


ALARMS = (
    "ESS ratio under 0.05 in an update",
    "ESS ratio under 0.05 in three updates in a row",
    "ESS ratio under 0.05 in three blocks in a row",
    "gradient norm, a block",
    "gradient norm, three blocks in a row",
    "KL, a block",
    "KL, three blocks in a row",
)
"""Names of `alarms_of`, in its order."""


def alarms_of(run: Run, synchronous: Sequence[Run]) -> list[int | None]:
    """The update of each alarm, None where it is silent; the synchronous runs give the thresholds of the last two."""
    start = start_of(run)
    low = block_alarm([-value for value in run["min_ess"]], -ESS_ALARM, start, in_a_row=3)
    alarms = [run["ess_alarm"], run["ess_alarm3"], low]
    for field in ("max_grad_norm", "max_kl"):
        threshold = alarm_threshold(synchronous, field)
        alarms += [None if threshold is None else block_alarm(run[field], threshold, start, in_a_row=n) for n in (1, 3)]
    return alarms


def leads_of(run: Run, synchronous: Sequence[Run]) -> list[int | None]:
    """Updates from each alarm to the run's collapse; None where there is no alarm in time."""
    collapse = collapse_update(run["curve"])
    return [lead_time(collapse, alarm) for alarm in alarms_of(run, synchronous)]


# ---------------------------------------------------------------- numbers as text


def rate_text(rate: float) -> str:
    """A rate such as 3e-4."""
    return f"{rate:.0e}".replace("e-0", "e-")


def spread(runs: Sequence[Run], field: str = "accuracy", digits: int = 2) -> str:
    """Median, lowest and highest of a field; a dash without runs."""
    if not runs:
        return "-"
    values = [run[field] for run in runs]
    return f"**{statistics.median(values):.{digits}f}** ({min(values):.{digits}f}-{max(values):.{digits}f})"


def fell(runs: Sequence[Run]) -> str:
    """How many collapsed, to follow a number; empty if none did."""
    fallen = sum(map(is_collapsed, runs))
    return f", {fallen} fell" if fallen else ""


def with_collapses(runs: Sequence[Run]) -> str:
    """`spread` of the accuracy, and how many collapsed, if any did."""
    return spread(runs) + fell(runs)


def collapsed(runs: Sequence[Run]) -> str:
    """How many runs of how many collapsed."""
    return f"{sum(map(is_collapsed, runs))}/{len(runs)}" if runs else "-"


def difference(left: Sequence[Run], right: Sequence[Run], field: str = "accuracy") -> str:
    """Mean paired difference with its bootstrap interval."""
    differences = paired_differences(left, right, field)
    if not differences:
        return "-"
    low, high = paired_bootstrap(differences)
    return f"{statistics.fmean(differences):+.2f} [{low:+.2f}, {high:+.2f}]"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


FORM_TITLES: dict[Form, str] = {"cold": "lag 32 from the start", "ramp": f"lag 32 from update {RAMP_START} on"}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a JSONL file; none if it does not exist. A line that is not whole, as a kill leaves it, is named and left out."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else (), 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if isinstance(line, dict):
            lines.append(line)
        else:
            print(f"{path.name}: line {number} is not whole; left out", file=sys.stderr)
    return lines


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Lines of the results file by key, failed runs included; a later line replaces an earlier one."""
    return {line["key"]: line for line in read_lines(path) if "key" in line}


def told(results: Results, cells: Sequence[Cell], text: str) -> str:
    """A table with, above it, what is missing; that alone if there is no run at all."""
    note = results.progress(cells)
    if note and not results.of(cells):
        return note
    return f"{note}\n\n{text}" if note else text
