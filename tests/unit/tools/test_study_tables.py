"""Tables of the study: what is missing says so, and a document's marks are filled."""

import json
from pathlib import Path
from typing import Any

import plot_study
import pytest
import results_table
from matplotlib import pyplot
from study_grid import SECTIONS, SEEDS, Cell, cell, headline
from study_results import Results, difference, rate_text, spread


def line_of(one: Cell, accuracy: float, curve: list[list[float]] | None = None) -> dict[str, Any]:
    """A line as a finished run leaves it."""
    numbers = [0.1] * 30
    return {
        "key": one.key,
        "task": one.task,
        "arm": one.arm,
        "form": one.form,
        "lag": one.lag,
        "rate": one.rate,
        "seed": one.seed,
        "commit": "abc",
        "accuracy": accuracy,
        "accuracy_last3": accuracy - 0.01,
        "curve": curve or [[0, 0.5], [20, accuracy], [40, accuracy], [60, accuracy]],
        "warm": {"greedy": 0.5, "sampled": 0.1, "steps": 158},
        "ess_alarm": 12,
        "ess_alarm3": None,
        "min_ess": numbers,
        "max_grad_norm": numbers,
        "max_kl": numbers,
        "cosine": numbers,
        "cpu_s": 36.0,
    }


def write(path: Path, lines: list[dict[str, Any]]) -> Results:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return Results(path)


def row(text: str, title: str) -> list[str]:
    return next([part.strip() for part in line.split("|")[2:-1]] for line in text.splitlines() if line.startswith(f"| {title} |"))


@pytest.mark.parametrize("name", results_table.TABLES)
def test_a_table_without_runs_says_so_or_shows_dashes(tmp_path: Path, name: str) -> None:
    text = results_table.TABLES[name](Results(tmp_path / "none.jsonl"))
    assert "not run yet" in text or " - |" in text


@pytest.mark.parametrize("name", sorted(set(results_table.TABLES) - {"bias"}))
def test_every_table_can_be_made_of_the_headline_runs_of_one_seed(tmp_path: Path, name: str) -> None:
    results = write(tmp_path / "results.jsonl", [line_of(one, 0.8) for one in headline() if one.seed == SEEDS[0]])
    assert results_table.TABLES[name](results)


def test_the_headline_has_median_range_and_collapses(tmp_path: Path) -> None:
    fallen = [[0, 0.5], [20, 0.1], [40, 0.1], [60, 0.1]]
    lines = [
        line_of(cell("reverse10", "none", "cold", seed=s), a, fallen) for s, a in zip(SEEDS[:3], (0.1, 0.3, 0.2), strict=True)
    ]
    text = results_table.headline(write(tmp_path / "results.jsonl", lines))
    assert text.startswith("*3 of 180 runs made so far*")
    assert row(text, "no correction") == ["**0.20** (0.10-0.30)", "0.19", "3/3", "-", "-", "-"]


def test_noise_is_counted_in_units_of_what_is_left_of_the_signal(tmp_path: Path) -> None:
    line = {"updates": 16, "method": "group mean", "signal": 0.5, "variance": 2.0}
    write(tmp_path / "baselines.jsonl", [line])
    text = results_table.baselines(Results(tmp_path / "results.jsonl"))
    assert text.endswith("| 16 | group mean | 0.50 | 2.0 | 8.0 |")  # 2 / 0.5^2


def test_a_failed_run_is_no_result(tmp_path: Path) -> None:
    one = cell("reverse10", "none", "cold")
    results = write(tmp_path / "results.jsonl", [{"key": one.key, "error": "ValueError: no"}])
    assert results.of([one]) == []
    assert results.progress([one, cell("reverse10", "ppo", "cold")]) == "*not run yet (0 of 2 runs, 1 failed)*"


def test_a_line_that_a_kill_has_cut_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = cell("reverse10", "none", "cold")
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(line_of(one, 0.1)) + '\n{"key": "reverse10/ppo', encoding="utf-8")
    assert [run["accuracy"] for run in Results(path).of([one])] == [0.1]
    assert "results.jsonl: line 2 is not whole" in capsys.readouterr().err


def test_a_run_that_was_made_again_counts_by_its_last_line(tmp_path: Path) -> None:
    one = cell("reverse10", "none", "cold")
    results = write(tmp_path / "results.jsonl", [line_of(one, 0.1), line_of(one, 0.9)])
    assert [run["accuracy"] for run in results.of([one])] == [0.9]


def test_marks_are_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- table:claims -->\nold\n<!-- /table -->\nafter\n", encoding="utf-8")
    results = Results(tmp_path / "none.jsonl")
    assert results_table.write(document, results) == 1
    filled = document.read_text(encoding="utf-8")
    assert filled == f"before\n<!-- table:claims -->\n\n{results_table.claims(results)}\n\n<!-- /table -->\nafter\n"
    results_table.write(document, results)
    assert document.read_text(encoding="utf-8") == filled


def test_a_figure_is_shown_once_it_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "page.md"
    document.write_text("<!-- figure:rates: What it shows -->\n<!-- /figure -->\n", encoding="utf-8")
    monkeypatch.setattr(results_table, "FOLDER", tmp_path / "study")
    results_table.write(document, Results(tmp_path / "none.jsonl"))
    assert "*not drawn yet (`python tools/plot_study.py rates`)*" in document.read_text(encoding="utf-8")
    results = write(tmp_path / "one.jsonl", [line_of(cell("reverse10", "none", "cold"), 0.5)])
    arguments = ["plot_study.py", "rates", "--results", str(results.path), "--out", str(tmp_path / "study")]
    monkeypatch.setattr("sys.argv", arguments)
    plot_study.main()
    results_table.write(document, results)
    made_of = "*What it shows: `python tools/plot_study.py rates`; 1 runs, seeds 200, commits abc.*"
    shown = f"<!-- figure:rates: What it shows -->\n\n![What it shows](study/rates.png)\n\n{made_of}\n\n<!-- /figure -->\n"
    assert document.read_text(encoding="utf-8") == shown


@pytest.mark.parametrize("name", sorted(set(plot_study.FIGURES) - {"bias"}))
def test_every_figure_tells_the_runs_it_shows(tmp_path: Path, name: str) -> None:
    empty, shown = plot_study.FIGURES[name](Results(tmp_path / "none.jsonl"))
    assert not shown
    cells = SECTIONS["headline" if name in ("methods", "alarms") else name]()
    extra = {"seconds": [1.0, 2.0, 3.0], "tokens": [5, 10, 15]}
    results = write(tmp_path / "results.jsonl", [line_of(one, 0.8) | extra for one in cells])
    drawn, shown = plot_study.FIGURES[name](results)
    assert drawn.axes and {run["key"] for run in shown} <= {one.key for one in cells}
    assert len({run["key"] for run in shown}) > 20
    for figure in (empty, drawn):
        pyplot.close(figure)


def test_the_figure_of_the_bias_tells_its_measurements(tmp_path: Path) -> None:
    empty, shown = plot_study.bias(Results(tmp_path / "results.jsonl"))
    assert not shown
    pyplot.close(empty)
    lines = [
        {"key": f"{u}/{g}", "updates": u, "group_size": g, "method": "TIC", "seed": 200, "commit": "abc", "bias": 0.1}
        for u in (4, 16)
        for g in (8, 4)
    ]
    write(tmp_path / "bias.jsonl", lines)
    drawn, shown = plot_study.bias(Results(tmp_path / "results.jsonl"))
    assert len(drawn.axes) == 2 and list(drawn.axes[0].lines[0].get_xdata()) == [4, 8]
    assert plot_study.made_of(shown, "measurements") == "4 measurements, seeds 200, commits abc"
    pyplot.close(drawn)


@pytest.mark.parametrize("text", ["<!-- table:nothing -->\n<!-- /table -->\n", "<!-- figure:nothing: x -->\n<!-- /figure -->\n"])
def test_a_mark_that_names_no_table_or_figure_is_refused(tmp_path: Path, text: str) -> None:
    document = tmp_path / "page.md"
    document.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"marks must name one of .*, got nothing"):
        results_table.write(document, Results(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table:claims -->\nprose\n<!-- table:rates -->\n<!-- /table -->\n",
        "<!-- table:claims -->\nprose\n",
        "<!-- table:best-rates -->\n<!-- /table -->\n",
        "<!-- figure:rates: x -->\nprose\n<!-- figure:gac: y -->\n<!-- /figure -->\n",
    ],
)
def test_a_mark_without_its_end_is_refused_and_nothing_is_written(tmp_path: Path, text: str) -> None:
    document = tmp_path / "page.md"
    document.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match="must be followed by its"):
        results_table.write(document, Results(tmp_path / "none.jsonl"))
    assert document.read_text(encoding="utf-8") == text


def test_figures_of_results_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "rates.png"
    kept.touch()
    monkeypatch.setattr("sys.argv", ["plot_study.py", "--results", str(tmp_path / "typo.jsonl"), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as refusal:
        plot_study.main()
    assert refusal.value.code == 2 and kept.exists()


def test_a_run_that_collapses_before_its_lag_begins_is_no_collapse_to_announce(tmp_path: Path) -> None:
    early = [[0, 0.5], [20, 0.0], [40, 0.0], [60, 0.0]]
    late = [[0, 0.5], [100, 0.9], [160, 0.0], [180, 0.0], [200, 0.0]]
    lines = [line_of(cell("reverse10", "sync", "sync"), 0.9)]
    for arm, curve in (("none", early), ("ppo", late)):
        lines.append(line_of(cell("reverse10", arm, "ramp"), 0.0, curve) | {"ess_alarm": 130})
    text = results_table.alarms(write(tmp_path / "results.jsonl", lines))
    announced = [
        line for line in text.splitlines() if line.startswith("| from update 100 on | ESS ratio under 0.05 in an update |")
    ]
    assert "| 1/1 | 30 (30-30) | 0/0 |" in announced[0]


def test_the_pool_is_compared_at_the_time_of_the_shortest_run_of_a_seed(tmp_path: Path) -> None:
    lines = []
    for arm, seconds in (("fifo", [10.0, 20.0]), ("pace", [20.0, 40.0])):
        one = cell("reverse4to16", arm, "async")
        shared = {"generation_staleness": 1.0, "waiting_staleness": 1.0, "rejected_share": 0.0, "wall_s": seconds[-1]}
        line = line_of(one, 0.9, [[0, 0.5], [20, 0.7], [40, 0.9]]) | shared | {"seconds": seconds, "tokens": [5, 10]}
        lines.append(line | {"lengths": {"trained": 11.0, "dispatched": 10.0}})
    text = results_table.pace(write(tmp_path / "results.jsonl", lines))
    assert row(text, "PPO clip, PACE")[:2] == ["**0.70** (0.70-0.70)", "-0.20 [-0.20, -0.20]"]  # after 20 s: 0.7 against 0.9


def test_the_page_of_the_study_has_a_mark_for_every_table() -> None:
    page = results_table.DOCUMENTS[0].read_text(encoding="utf-8")
    assert {name for _, name, _ in results_table.MARK.findall(page)} == set(results_table.TABLES)


def test_the_page_of_the_study_has_a_mark_for_every_figure() -> None:
    page = results_table.DOCUMENTS[0].read_text(encoding="utf-8")
    assert {found[1] for found in results_table.FIGURE.findall(page)} == set(plot_study.FIGURES)


def test_numbers_as_text() -> None:
    runs = [{"seed": i, "accuracy": a} for i, a in enumerate((0.1, 0.5, 0.9))]
    assert spread(runs) == "**0.50** (0.10-0.90)"
    assert spread([]) == "-"
    assert difference(runs, [{"seed": i, "accuracy": 0.1} for i in range(3)])[:5] == "+0.40"  # (0 + 0.4 + 0.8) / 3
    assert rate_text(3e-4) == "3e-4"
