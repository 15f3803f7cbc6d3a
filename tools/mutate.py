"""Mutation test of `lit_asyncrl.algorithm`: each small change to a module must be noticed by the module's own tests.

    python tools/mutate.py                           # every module: under half an hour on two free cores
    python tools/mutate.py gradients score_norms     # some of them

The changes are those of `mutants.py`. A first run of the tests finds out which lines each test runs; a mutant then meets the
tests that run its lines, fastest first, until one of them fails. The interpreter starts once, with PyTorch loaded; each mutant
runs in a fork of it, which loads the changed module in place of the real one. No file is changed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from executed_lines import Run, Watch
from mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lit_asyncrl.algorithm"
SOURCES = ROOT / "lit_asyncrl" / "algorithm"
TESTS = ROOT / "tests" / "unit" / "algorithm"
GOAL = 0.95

ESTIMATED = ["test_policy_gradient", "test_untrained_trajectories", "test_method_combinations"]
"""The tests of the estimator as a whole."""

TESTED_THROUGH = {
    "advantages": ["test_advantages", "test_micro_batches"],
    "aggregation": ["test_objectives", "test_objective_bounds"],
    "clip_losses": ["test_objectives", "test_objective_bounds", "test_batch_objectives"],
    "estimator": [*ESTIMATED, "test_regularizers", "test_micro_batch_split"],
    "exact_gradients": [*ESTIMATED, "test_score_norms", "test_micro_batch_split", "test_shared_prefix"],
    "group_losses": ["test_objectives", "test_objective_bounds"],
    "logprobs": ["test_token_logprobs", "test_shared_prefix", "test_regularizers", "test_policy_gradient"],
    "method": [*ESTIMATED, "test_batch_objectives", "test_score_norms", "test_micro_batch_split"],
    "options": ["test_objectives", "test_objective_bounds"],
    "score_records": ["test_score_records", "test_score_norms"],
    "scored": [*ESTIMATED, "test_update_statistics"],
    "weight_losses": ["test_objectives", "test_objective_bounds"],
    "weights": ["test_importance_weights", "test_weight_statistics"],
}
"""Modules whose tests speak of the module above them, or are imported by many; all others are tested by the files that import
from them."""

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "hypothesis",
    "hypothesis.strategies",
)

MIN_LIMIT_S = 6.0
TIMES_AS_LONG = 4.0
"""A test may take so many seconds of CPU, and so many times those that it took without a mutant."""

MAX_WAIT_S = 600.0
"""After so long, by the clock, a mutant's tests wait for something that does not come."""

QUICK = ("-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:unraisableexception")
"""Options of pytest that leave out what costs more than most tests do."""


def tests_of(module: str) -> list[str]:
    """Files of the module's own tests, relative to the repository.

    Raises:
        SystemExit: it has none.
    """
    names = TESTED_THROUGH.get(module)
    if names is None:
        wanted = f"{PACKAGE}.{module}"
        files = sorted(TESTS.glob("test_*.py"))
        names = [f.stem for f in files if any(name == wanted for name in _imported(f))]
    if not names:
        raise SystemExit(f"no test under {TESTS} imports from {PACKAGE}.{module}: add one, or name it in TESTED_THROUGH.")
    return [str((TESTS / f"{name}.py").relative_to(ROOT)) for name in names]


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


# ---------------------------------------------------------------- one run, in a fork


class _Replacement(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from given source."""

    def __init__(self, name: str, source: str, path: str) -> None:
        self.name = name
        self.source = source
        self.path = path

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self.source, self.path, "exec"), module.__dict__)  # noqa: S102 - the mutant is what this tool is for


class _Chosen:
    """Pytest plugin: the given tests and no others, in their order, each with a limit on its CPU time.

    That does not depend on what else runs on the machine. A process that passes it is ended by SIGXCPU.

    Args:
        tests: seconds of CPU by id.
    """

    def __init__(self, tests: Mapping[str, float]) -> None:
        self._seconds = tests
        self._place = {test: i for i, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Last, since pytest itself puts tests together that share a fixture."""
        items[:] = sorted((item for item in items if item.nodeid in self._place), key=lambda item: self._place[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Before each test."""
        limit = int(time.process_time() + MIN_LIMIT_S + TIMES_AS_LONG * self._seconds[nodeid])
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _run(files: Sequence[str], plugin: object, *options: str) -> int:
    """Pytest's status, without a word; for a fork."""
    os.setsid()  # processes that tests start end with it
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(ROOT)
    return int(pytest.main([*QUICK, *options, *files], plugins=[plugin]))


def start(mutant: Mutant | None, tests: Mapping[str, float]) -> int:
    """Run tests in a fork, with a mutant in place of its module; the fork's id. It exits with pytest's status."""
    process = os.fork()
    if process:
        return process
    status = 70
    with contextlib.suppress(BaseException):
        if mutant is not None:
            sys.meta_path.insert(0, _Replacement(f"{PACKAGE}.{mutant.path.stem}", mutant.source, str(mutant.path)))
        status = _run(sorted({test.split("::")[0] for test in tests}), _Chosen(tests), "-x")
    os._exit(status)


def baseline(files: Sequence[str]) -> Run:
    """What the tests run without a mutant.

    Raises:
        SystemExit: they fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "run.json"
        process = os.fork()
        if not process:
            status = 70
            with contextlib.suppress(BaseException):
                status = _run(files, Watch(sorted(SOURCES.glob("*.py")), target))
            os._exit(status)
        _, status = os.waitpid(process, 0)
        if os.waitstatus_to_exitcode(status) != 0:
            raise SystemExit(f"the tests fail without any change: pytest {' '.join(files)}")
        run = Run(**json.loads(target.read_text(encoding="utf-8")))
    _, status = os.waitpid(start(None, dict(sorted(run.seconds.items(), key=lambda pair: pair[1]))), 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit("the tests fail without any change when the fastest come first")
    return run


# ---------------------------------------------------------------- all mutants


@dataclass
class Outcome:
    """What became of a module's mutants.

    Attributes:
        survivors: those that no test noticed, each with the number of tests that it met.
        endless: those that were noticed because a test did not end, or ended the process.
    """

    survivors: list[tuple[Mutant, int]]
    endless: list[Mutant]


def run_all(mutants: Sequence[Mutant], run: Run, files: Sequence[str], jobs: int) -> Outcome:
    """Let every mutant meet its tests. One that makes a test take several times its CPU time, or wait, counts as noticed."""
    waiting, running, outcome = list(mutants), dict[int, tuple[Mutant, int, float]](), Outcome([], [])
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            tests = {test: run.seconds[test] for test in run.tests(mutant.path.stem, mutant.lines, files)}
            if not tests:
                outcome.survivors.append((mutant, 0))
                continue
            running[start(mutant, tests)] = (mutant, len(tests), time.monotonic() + MAX_WAIT_S)
        time.sleep(0.01)
        for process, (mutant, num_tests, deadline) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended and time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                ended, status = os.waitpid(process, 0)
            if not ended:
                continue
            del running[process]
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                outcome.survivors.append((mutant, num_tests))
            elif code < 0:
                outcome.endless.append(mutant)
            elif code not in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):  # a test, or an import of one
                raise SystemExit(f"pytest ended with {code} at {mutant.path.stem}, line {mutant.lines.start}: {mutant.change}")
    return outcome


def report(module: str, num_mutants: int, outcome: Outcome, seconds: float) -> None:
    """One line, and one for each mutant that a person should look at."""
    share = 1 - len(outcome.survivors) / max(num_mutants, 1)
    print(f"{module:<20} {num_mutants:>4} mutants, {share:6.1%} noticed, {seconds:5.0f} s", flush=True)
    for mutant, num_tests in sorted(outcome.survivors, key=lambda pair: pair[0].lines.start):
        print(f"    line {mutant.lines.start}: {mutant.change}  ({num_tests} tests)", flush=True)
    for mutant in outcome.endless:
        print(f"    endless, line {mutant.lines.start}: {mutant.change}", flush=True)


def main() -> int:
    """Run the modules that were named; 1 if fewer than the goal's share of all mutants were noticed."""
    known = sorted(path.stem for path in SOURCES.glob("*.py") if path.stem != "__init__")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="module", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.modules) - set(known)):
        parser.error(f"no such module: {', '.join(unknown)}")
    made = {module: mutants_of(SOURCES / f"{module}.py") for module in arguments.modules or known}
    if arguments.list:
        for mutants in made.values():
            for mutant in mutants:
                print(f"{mutant.path.stem}:{mutant.lines.start}  {mutant.change}")
        return 0
    os.environ.update(HF_HUB_OFFLINE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.path.insert(0, str(ROOT))
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.freeze()  # no fork looks at, and thereby copies, what is here already
    began = time.monotonic()
    total = missed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        files = {module: tests_of(module) for module, mutants in made.items() if mutants}
        run = baseline(sorted({file for names in files.values() for file in names}))
        print(f"{len(run.lines)} tests, {time.monotonic() - began:.0f} s", flush=True)
        for module, names in files.items():
            started = time.monotonic()
            outcome = run_all(made[module], run, names, arguments.jobs)
            total, missed = total + len(made[module]), missed + len(outcome.survivors)
            report(module, len(made[module]), outcome, time.monotonic() - started)
    share = 1 - missed / max(total, 1)
    print(f"{'all':<20} {total:>4} mutants, {share:6.1%} noticed (goal {GOAL:.0%}), {time.monotonic() - began:.0f} s")
    return int(share < GOAL)


if __name__ == "__main__":
    sys.exit(main())
