"""The study's runner: what is done is not run again, and every line is whole."""

import json
from pathlib import Path

import pytest
import study
from study_grid import SECTIONS, cell, cells_of


def test_a_later_line_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    for accuracy in (0.1, 0.2):
        study.append(path, {"key": "a", "accuracy": accuracy})
    assert study.load(path) == {"a": {"key": "a", "accuracy": 0.2}}
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2


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
    "arguments", [["run", "--workers", "0"], ["run", "--section", "nothing"], ["run", "--seeds", "7"], ["jump"]]
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        study.parse(arguments)
    assert refusal.value.code == 2
