"""One run of the study: what is kept of it, and that a failure is a line like any other."""

from pathlib import Path
from typing import Any

import pytest
import study_run
from study_grid import cell
from study_run import StudyRecorder, result_of, run_cell, significant

SUMMARY = {
    "policy_version": 4,
    "accuracy_after": 0.91234,
    "policy_age_mean": 1.23456,
    "policy_age_max": 3.0,
    "generated_tokens": 100,
    "trained_tokens": 90,
    "skipped_updates": 2,
}


def recorder(updates: int = 12) -> StudyRecorder:
    """Twelve updates, of which the last two have a low ESS ratio, and four evaluations."""
    one = StudyRecorder()
    one.updates = {
        "ess": [0.9] * (updates - 2) + [0.04, 0.01],
        "grad_norm": [float(i) for i in range(updates)],
        "kl": [0.0123456] * updates,
        "cosine": [0.1] * updates,
        "lr_scale": [0.5] * updates,
    }
    one.evaluations = [(4, 0.5, 1.0, 10), (8, 0.6, 2.0, 20), (12, 0.7, 3.0, 30), (16, 0.8, 4.0, 40)]
    return one


def line(arm: str, **options: Any) -> dict[str, Any]:
    return result_of(cell("reverse10", arm, "cold", **options), recorder(), SUMMARY, {"greedy": 0.425})


def test_the_curve_begins_with_the_warm_start() -> None:
    assert line("none")["curve"] == [[0, 0.425], [4, 0.5], [8, 0.6], [12, 0.7], [16, 0.8]]


def test_the_late_accuracy_is_the_mean_of_three_evaluations() -> None:
    assert line("none")["accuracy_last3"] == 0.7  # (0.6 + 0.7 + 0.8) / 3


def test_alarms_are_dated_by_updates_and_not_by_blocks() -> None:
    assert (line("none")["ess_alarm"], line("none")["ess_alarm3"]) == (11, None)  # two in a row are not three


def test_blocks_are_of_ten_updates() -> None:
    kept = line("none")
    assert kept["min_ess"] == [0.9, 0.01]
    assert kept["max_grad_norm"] == [9.0, 11.0]
    assert kept["max_kl"] == [0.0123, 0.0123]


def test_what_does_not_apply_is_left_out() -> None:
    assert "lr_scale" in line("vcpo_proxy") and "lr_scale" not in line("none")
    assert line("gac", lag=8)["skipped"] == 2 and "skipped" not in line("none")
    assert "seconds" not in line("none")


def test_a_run_that_fails_is_a_line_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, seed: int, cache: Path) -> None:
        raise ValueError("no " + "x" * 1000)

    monkeypatch.setattr(study_run, "warm_start", fail)
    failed = run_cell(cell("reverse10", "gmc", "cold", group_size=16), tmp_path)
    assert failed["key"] == "reverse10/gmc/cold/k32/0.0003/G16/e0.2/200"
    assert failed["error"].startswith("ValueError: no xxx") and len(failed["error"]) == study_run.MAX_ERROR
    assert (failed["group_size"], failed["epsilon"], "accuracy" in failed) == (16, 0.2, False)


def test_numbers_are_kept_to_three_digits() -> None:
    assert [significant(v) for v in (0.0123456, 123456.0, 0.0)] == [0.0123, 123000.0, 0.0]
