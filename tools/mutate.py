"""Mutation test of `lit_asyncrl.algorithm`: each small change to a module must be noticed by the module's own tests.

    python tools/mutate.py                           # every module: under half an hour on two free cores
    python tools/mutate.py gradients score_norms     # some of them

The changes are those of `mutants.py`. The interpreter starts once, with PyTorch loaded; each mutant runs in a fork of it, which
loads the changed module in place of the real one. No file is changed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.abc
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lit_asyncrl.algorithm"
SOURCES = ROOT / "lit_asyncrl" / "algorithm"
TESTS = ROOT / "tests" / "unit" / "algorithm"
GOAL = 0.95

TESTED_THROUGH = {
    "advantages": ["test_advantages", "test_micro_batches"],
    "aggregation": ["test_objectives", "test_objective_bounds"],
    "clip_losses": ["test_objectives", "test_objective_bounds", "test_batch_objectives"],
    "estimator": ["test_policy_gradient", "test_regularizers", "test_micro_batch_split"],
    "exact_gradients": ["test_score_norms", "test_policy_gradient", "test_micro_batch_split"],
    "group_losses": ["test_objectives", "test_objective_bounds"],
    "logprobs": ["test_token_logprobs", "test_regularizers", "test_policy_gradient"],
    "method": ["test_batch_objectives", "test_policy_gradient", "test_score_norms", "test_micro_batch_split"],
    "options": ["test_objectives", "test_objective_bounds"],
    "score_records": ["test_score_norms"],
    "scored": ["test_policy_gradient", "test_update_statistics"],
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
    "pytest",
)


def tests_of(module: str) -> list[str]:
    """Paths of the module's own tests.

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
    return [str(TESTS / f"{name}.py") for name in names]


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


# ---------------------------------------------------------------- running them


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


def start(tests: list[str], mutant: Mutant | None) -> int:
    """Run the tests in a fork, with the mutant in place of its module; the fork's id. It exits with pytest's status."""
    process = os.fork()
    if process:
        return process
    status = 70
    with contextlib.suppress(BaseException):
        os.setsid()  # processes that tests start end with it
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        if mutant is not None:
            sys.meta_path.insert(0, _Replacement(f"{PACKAGE}.{mutant.path.stem}", mutant.source, str(mutant.path)))
        import pytest

        os.chdir(ROOT)
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", *tests]))
    os._exit(status)


def run_all(tests: list[str], mutants: list[Mutant], jobs: int, timeout_s: float) -> list[Mutant]:
    """The mutants that the tests did not notice. One that makes them wait too long counts as noticed."""
    waiting, running, survivors = list(mutants), dict[int, tuple[Mutant, float]](), []
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            running[start(tests, mutant)] = (mutant, time.monotonic() + timeout_s)
        time.sleep(0.01)
        for process, (mutant, deadline) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del running[process]
                if os.waitstatus_to_exitcode(status) == 0:
                    survivors.append(mutant)
            elif time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                del running[process]
    return survivors


def baseline(tests: list[str]) -> float:
    """Seconds that the tests take without a mutant.

    Raises:
        SystemExit: they fail.
    """
    started = time.monotonic()
    _, status = os.waitpid(start(tests, None), 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"the tests fail without any change: pytest {' '.join(tests)}")
    return time.monotonic() - started


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
                print(f"{mutant.path.stem}:{mutant.line}  {mutant.change}")
        return 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(ROOT))
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    total = missed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        for module, mutants in made.items():
            tests = tests_of(module)
            began = time.monotonic()
            survivors = run_all(tests, mutants, arguments.jobs, 10.0 + 5.0 * baseline(tests)) if mutants else []
            total, missed = total + len(mutants), missed + len(survivors)
            share = 1 - len(survivors) / max(len(mutants), 1)
            print(f"{module:<20} {len(mutants):>4} mutants, {share:6.1%} noticed, {time.monotonic() - began:5.0f} s", flush=True)
            for mutant in survivors:
                print(f"    line {mutant.line}: {mutant.change}", flush=True)
    share = 1 - missed / max(total, 1)
    print(f"{'all':<20} {total:>4} mutants, {share:6.1%} noticed (goal {GOAL:.0%})")
    return int(share < GOAL)


if __name__ == "__main__":
    sys.exit(main())
