"""Rows of the tables that `tools/bench.py` prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One row of a table: what was measured, and the goal where there is one (`low` or `high`: which side of it is good)."""

    label: str
    value: str
    ratio: float | None = None
    goal: float | None = None
    good: str = "high"

    def verdict(self) -> str:
        """`pass` or `miss`; empty without a goal."""
        if self.ratio is None or self.goal is None:
            return ""
        reached = self.ratio >= self.goal if self.good == "high" else self.ratio <= self.goal
        return f"{'>=' if self.good == 'high' else '<='} {self.goal:.2f} {'pass' if reached else 'miss'}"


def ratio_line(label: str, ratio: float, goal: float, good: str) -> Line:
    """A ratio with its goal."""
    return Line(label, "", ratio, goal, good)


def print_table(title: str, lines: list[Line]) -> None:
    """One part's rows in columns: label, value, ratio, goal with verdict."""
    print(f"\n{title}")
    for line in lines:
        ratio = "" if line.ratio is None else f"{line.ratio:5.2f}"
        print(f"  {line.label:<48} {line.value:<26} {ratio:>6}  {line.verdict()}".rstrip(), flush=True)
