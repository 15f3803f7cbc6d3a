"""Examples in docstrings say what the code does."""

import doctest
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("lit_asyncrl", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_file_hold(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "tools")])
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    found = doctest.testmod(importlib.import_module(name.removeprefix("tools.")), optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0
