"""Which tests run which lines: a pytest plugin that watches some files, for `tools/mutate.py`."""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


@dataclass
class Run:
    """What one run of the tests says.

    Attributes:
        at_import: per file's stem, the lines that run while tests are collected: every test may depend on them.
        lines: per test's id and file's stem, the lines that the test runs, those of its fixtures included.
        seconds: per test's id, of CPU; the watching makes them more than usual.
    """

    at_import: dict[str, list[int]] = field(default_factory=dict)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def tests(self, stem: str, lines: range, files: Sequence[str]) -> list[str]:
        """Ids of the tests of some files that may depend on one of the lines, fastest first."""
        in_files = [test for test in self.lines if test.split("::")[0] in files]
        if not set(lines) & set(self.at_import.get(stem, ())):
            in_files = [test for test in in_files if set(lines) & set(self.lines[test].get(stem, ()))]
        return sorted(in_files, key=lambda test: self.seconds[test])


class Watch:
    """The plugin. Processes that tests fork are watched too: what they run is noted in memory that is shared with them.

    Args:
        files: what is watched, at absolute paths.
        target: where the `Run` is written to, as JSON.
    """

    def __init__(self, files: Sequence[Path], target: Path) -> None:
        self.run = Run()
        self._target = target
        self._stems = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) + 1 for path in files}
        self._first: dict[str, int] = {}
        size = 0
        for path in files:
            self._first[str(path)] = size
            size += self._stems[path.stem]
        self._seen = mmap.mmap(-1, max(size, 1))
        self._fixtures: dict[str, dict[str, list[int]]] = {}

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._first else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._seen[self._first[frame.f_code.co_filename] + frame.f_lineno] = 1
        return self._line

    def _take(self) -> dict[str, list[int]]:
        """What was run since the last call."""
        seen, self._seen[:] = bytes(self._seen), bytes(len(self._seen))
        taken = {}
        for stem, first in zip(self._stems, self._first.values(), strict=True):
            lines = [line for line in range(self._stems[stem]) if seen[first + line]]
            if lines:
                taken[stem] = lines
        return taken

    def pytest_collection(self) -> None:
        """Begin, before test files are imported."""
        sys.settrace(self._call)

    def pytest_collection_finish(self) -> None:
        """All test files are imported."""
        self.run.at_import = self._take()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """A fixture that outlives the test is of all tests that ask for it."""
        before = self._take()
        value = yield
        lines = self._take()
        if fixturedef.scope != "function":
            self._fixtures[fixturedef.argname] = lines
        self._put(before)
        self._put(lines)
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """One test, with its fixtures."""
        sys.settrace(self._call)
        self._take()
        started = time.process_time()
        value = yield
        self.run.seconds[item.nodeid] = time.process_time() - started
        for name in getattr(item, "fixturenames", ()):
            self._put(self._fixtures.get(name, {}))
        self.run.lines[item.nodeid] = self._take()
        return value

    def _put(self, lines: dict[str, list[int]]) -> None:
        for stem, first in zip(self._stems, self._first.values(), strict=True):
            for line in lines.get(stem, ()):
                self._seen[first + line] = 1

    def pytest_sessionfinish(self) -> None:
        """Write it down."""
        sys.settrace(None)
        self._target.write_text(json.dumps(asdict(self.run)), encoding="utf-8")
