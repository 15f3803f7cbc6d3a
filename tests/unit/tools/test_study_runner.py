"""The study's runner: what is done is not run again, and every line is whole."""

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import study
from study_grid import SECTIONS, Cell, cell, cells_of
from study_results import read_results


def test_a_later_line_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    for accuracy in (0.1, 0.2):
        study.ResultsLog(path).append({"key": "a", "accuracy": accuracy})
    assert read_results(path) == {"a": {"key": "a", "accuracy": 0.2}}
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2


def test_a_line_after_one_that_a_kill_has_cut_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"key": "a"', encoding="utf-8")
    study.ResultsLog(path).append({"key": "b"})
    assert read_results(path) == {"b": {"key": "b"}}


def test_a_second_runner_is_refused(tmp_path: Path) -> None:
    first = study.ResultsLog(tmp_path / "results.jsonl")
    with pytest.raises(SystemExit, match="no other runner writes"):
        study.ResultsLog(tmp_path / "results.jsonl")
    first.append({"key": "a"})


def test_a_results_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="must be a file that can be written"):
        study.ResultsLog(tmp_path)


CELLS = [cell("reverse10", arm, "cold") for arm in ("none", "ppo", "tis", "ess")]


def end_of_ppo(one: Cell, *_: Any) -> dict[str, Any]:
    """A run that ends its worker, among others that do not."""
    if one.arm == "ppo":
        os._exit(1)
    return {"key": one.key, "accuracy": 0.5, "run_s": 0.1}


def test_a_worker_that_dies_costs_its_own_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "make_pool", lambda workers: ProcessPoolExecutor(workers, multiprocessing.get_context("fork")))
    monkeypatch.setattr(study, "work", end_of_ppo)
    path = tmp_path / "results.jsonl"
    study.Runner(path, tmp_path, workers=2, retry=False).run(CELLS)
    lines = read_results(path)
    assert set(lines) == {one.key for one in CELLS}
    assert [key for key, line in lines.items() if "error" in line] == [CELLS[1].key]


def test_a_calibrated_run_waits_for_the_run_that_calibrates_it(tmp_path: Path) -> None:
    runner = study.Runner(tmp_path / "results.jsonl", tmp_path, workers=2, retry=False)
    calibrated = cell("reverse10", "gac", "cold", lag=8)
    assert runner._startable([calibrated, CELLS[0]], [calibrated.calibration]) == 1
    assert runner._startable([calibrated], [calibrated.calibration]) is None
    assert runner._startable([calibrated], [CELLS[0]]) == 0


@pytest.mark.parametrize(
    ("line", "retry", "done"), [({}, False, True), ({"error": "no"}, False, True), ({"error": "no"}, True, False)]
)
def test_a_failed_run_is_made_again_only_if_that_is_asked_for(
    tmp_path: Path, line: dict[str, str], retry: bool, done: bool
) -> None:
    one = cell("reverse10", "none", "cold")
    runner = study.Runner(tmp_path / "results.jsonl", tmp_path, workers=1, retry=retry)
    assert runner.is_done(one, {one.key: line}) is done
    assert not runner.is_done(cell("reverse10", "ppo", "cold"), {one.key: line})


def test_the_status_counts_runs_of_every_section(tmp_path: Path) -> None:
    cells = cells_of(["headline"])
    path = tmp_path / "results.jsonl"
    lines = [{"key": cells[0].key}, {"key": cells[1].key, "error": "no"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    rows = {line.split()[0]: [int(n) for n in line.split()[1:]] for line in study.status(path).splitlines()[1:]}
    assert rows["headline"] == [len(cells), 1, 1, len(cells) - 2]
    assert set(rows) == {*SECTIONS, "all"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--workers", "0"],
        ["run", "--limit", "-1"],
        ["run", "--limit", "0"],
        ["run", "--quick", "--seeds", "200"],
        ["run", "--section", "rates", "--seeds", "204"],
        ["run", "--section", "nothing"],
        ["run", "--seeds", "7"],
        ["jump"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        study.parse(arguments)
    assert refusal.value.code == 2
