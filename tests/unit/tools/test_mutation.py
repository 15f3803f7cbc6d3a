"""The changes that the mutation test makes, and how it finds the tests that a changed line is for."""

import json
import subprocess
import sys
from pathlib import Path

from executed_lines import Run
from mutants import mutants_of

TOOLS = Path(__file__).parents[3] / "tools"

SOURCE = '''"""Docstring with 1 number."""
LIMIT = 3


def area(width: float, height: float = 2.0) -> float:
    """Twice 1."""
    if width < 0:
        raise ValueError(f"{width + 1}")
    return width * height
'''


def test_each_mutant_is_one_change_of_what_runs(tmp_path: Path) -> None:
    module = tmp_path / "shapes.py"
    module.write_text(SOURCE, encoding="utf-8")
    mutants = mutants_of(module)
    assert [(mutant.lines, mutant.change) for mutant in mutants] == [
        (range(5, 6), "2.0 -> 3.0"),
        (range(7, 8), "negate width < 0"),
        (range(7, 8), "Lt -> LtE in width < 0"),
        (range(7, 8), "0 -> 1"),
        (range(9, 10), "Mult -> Div in width * height"),
    ]
    assert "return width / height" in mutants[-1].source
    assert len({mutant.source for mutant in mutants}) == 5


def test_a_mutant_meets_the_tests_that_run_its_lines_the_fastest_first() -> None:
    run = Run(
        at_import={"shapes": [5]},
        lines={"a.py::slow": {"shapes": [7, 9]}, "a.py::quick": {"shapes": [9]}, "b.py::other": {"shapes": [9]}},
        seconds={"a.py::slow": 2.0, "a.py::quick": 0.1, "b.py::other": 0.2},
    )
    assert run.tests("shapes", range(9, 10), ["a.py"]) == ["a.py::quick", "a.py::slow"]
    assert run.tests("shapes", range(7, 8), ["a.py", "b.py"]) == ["a.py::slow"]
    assert run.tests("shapes", range(8, 9), ["a.py", "b.py"]) == []
    assert run.tests("shapes", range(5, 6), ["a.py"]) == ["a.py::quick", "a.py::slow"]  # runs at import: it may be for any


TESTS = """
import os
import pytest
import shapes

@pytest.fixture(scope="module")
def forked():
    process = os.fork()
    if not process:
        try:
            shapes.area(-1.0)
        finally:
            os._exit(0)
    os.waitpid(process, 0)

def test_plain():
    assert shapes.area(3.0) == 6.0

def test_first(forked):
    pass

def test_second(forked):
    pass

def test_of_nothing():
    pass
"""

WATCHED = """
import sys
from pathlib import Path
import pytest
from executed_lines import Watch

module, target = map(Path, sys.argv[1:3])
sys.path.insert(0, str(module.parent))
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "test_shapes.py"], plugins=[Watch([module], target)]))
"""


def test_lines_are_those_of_the_test_and_its_fixtures_forks_included(tmp_path: Path) -> None:
    module, target = tmp_path / "shapes.py", tmp_path / "run.json"
    module.write_text(SOURCE, encoding="utf-8")
    (tmp_path / "test_shapes.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TOOLS)!r})\n{WATCHED}", str(module), str(target)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60, stdout=subprocess.DEVNULL)
    run = Run(**json.loads(target.read_text(encoding="utf-8")))
    assert {5} <= set(run.at_import["shapes"])
    assert {test.split("::")[1]: lines.get("shapes", []) for test, lines in run.lines.items()} == {
        "test_plain": [7, 9],
        "test_first": [7, 8],
        "test_second": [7, 8],
        "test_of_nothing": [],
    }
    assert all(seconds >= 0 for seconds in run.seconds.values())
