"""The study: stabilizers of asynchronous reinforcement learning side by side on tiny models (docs/study.md).

    python tools/study.py run                          # all sections, both cores, resumable; some hours
    python tools/study.py run --quick                  # the headline in small: 14 runs, minutes
    python tools/study.py run --section headline --seeds 200 201 --limit 10
    python tools/study.py status                       # runs done, failed and left, by section
    python tools/study.py check                        # two runs that cannot come out otherwise; under three minutes
    python tools/study.py bias                         # gradient bias and variance at frozen pairs of policies

Every run goes through the product's own `fit` with `configs/experiment/study.yaml`. A finished run is one line of
`docs/study/results.jsonl` and is not made again; a failed one is a line with its error, tried again with `--retry` only. Stop it
at any time (Ctrl-C, or a signal to the process): its workers end with it, and the runs that were going on are lost.
`tools/results_table.py` and `tools/plot_study.py` make the tables and figures.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import multiprocessing
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from study_grid import SECTIONS, SEEDS, UPDATES, Cell, cell, cells_of, quick
from study_results import RESULTS
from study_warm_start import CACHE

RUNS_PER_WORKER = 40
"""Runs of one interpreter, which then makes place for a fresh one."""


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Lines of the results file by key, failed ones included; a later line replaces an earlier one."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {result["key"]: result for line in lines if line for result in [json.loads(line)]}


def append(path: Path, line: dict[str, Any]) -> None:
    """Add one line, whole even if another runner writes too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line, separators=(",", ":")) + "\n")
        file.flush()


def start_worker() -> None:
    """In a worker: one thread for torch, silence, and an end with the parent, however that ends."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    sys.argv = sys.argv[:1]  # Lightning warns of arguments that are not its own
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def work(cell: Cell, cache: Path, updates: int, thresholds: Sequence[float] | None, policy: str | None) -> dict[str, Any]:
    """One run in a worker."""
    from study_run import run_cell

    return run_cell(cell, cache, updates, thresholds, policy)


class Runner:
    """Runs cells in worker processes and appends their lines.

    Args:
        results: file of the results.
        cache: folder of the warm starts.
        workers: processes; runs with an engine of their own need two cores each, so only one of them runs at a time.
        retry: run failed cells again.
    """

    def __init__(self, results: Path, cache: Path, workers: int, retry: bool) -> None:
        self.results = results
        self.cache = cache
        self.workers = workers
        self.retry = retry
        self._seconds: list[float] = []

    def is_done(self, cell: Cell, done: dict[str, dict[str, Any]]) -> bool:
        """Whether a cell need not be run."""
        return cell.key in done and not (self.retry and "error" in done[cell.key])

    def run(self, cells: Sequence[Cell]) -> None:
        """Run all cells that are not done; those with an engine process one at a time, last."""
        done = load(self.results)
        todo = [c for c in cells if not self.is_done(c, done)]
        print(f"{len(todo)} of {len(cells)} runs to make", flush=True)
        alone = [c for c in todo if c.form == "async"]
        self._run([c for c in todo if c.form != "async"], self.workers, len(alone))
        self._run(alone, 1, 0)

    def _run(self, todo: list[Cell], workers: int, later: int) -> None:
        left, failed_before = list(todo), {key for key, line in load(self.results).items() if "error" in line}
        while left:
            pool = make_pool(workers)
            running: dict[Future[dict[str, Any]], Cell] = {}
            try:
                while left or running:
                    while left and len(running) < workers:
                        next_cell = left.pop(0)
                        known = load(self.results)
                        taken = known.get(next_cell.key)  # by another runner, meanwhile
                        if taken is None or ("error" in taken and next_cell.key in failed_before):
                            running[pool.submit(work, *self._arguments(next_cell, known))] = next_cell
                    if running:
                        self._collect(running, len(left), later, workers)
            except BrokenProcessPool:
                for lost in running.values():
                    append(self.results, {"key": lost.key, "error": "the worker process died"})
                    print(f"{lost.key}: the worker process died", flush=True)
            except KeyboardInterrupt:
                os._exit(130)  # the workers end with this process
            pool.shutdown()

    def _arguments(self, cell: Cell, known: dict[str, dict[str, Any]]) -> tuple[Any, ...]:
        thresholds = known.get(cell.calibration.key, {}).get("gac_thresholds") if cell.needs_thresholds else None
        return cell, self.cache, UPDATES, thresholds, None

    def _collect(self, running: dict[Future[dict[str, Any]], Cell], left: int, later: int, workers: int) -> None:
        """Wait for a run to end, write its line and say how far it is."""
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            line = future.result()
            del running[future]
            append(self.results, line)
            self._seconds.append(line["run_s"])
            seconds = statistics.fmean(self._seconds)
            minutes = seconds * ((left + len(running) / 2) / workers + later) / 60
            result = line["error"] if "error" in line else f"accuracy {line['accuracy']:.3f}"
            print(f"{line['key']}: {result} ({line['run_s']} s; {left} left, {minutes:.0f} min)", flush=True)


def make_pool(workers: int) -> ProcessPoolExecutor:
    """Fresh interpreters, which several runs share."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, max_tasks_per_child=RUNS_PER_WORKER)


def status(path: Path) -> str:
    """Runs done, failed and left of every section."""
    done = load(path)
    lines = [f"{'section':<12}{'runs':>6}{'done':>6}{'failed':>8}{'left':>6}"]
    for name, cells in [*((name, cells_of([name])) for name in SECTIONS), ("all", cells_of(SECTIONS))]:
        found = [done[c.key] for c in cells if c.key in done]
        failed = sum("error" in line for line in found)
        lines.append(f"{name:<12}{len(cells):>6}{len(found) - failed:>6}{failed:>8}{len(cells) - len(found):>6}")
    return "\n".join(lines)


def check(workers: int) -> None:
    """No correction collapses and VCPO learns, from the packaged model at lag 32; by the last three evaluations.

    Raises:
        SystemExit: it comes out otherwise.
    """
    started = time.monotonic()
    cells = [cell("reverse10", arm, "cold") for arm in ("none", "vcpo_proxy")]
    with make_pool(workers) as pool:
        futures = [pool.submit(work, c, CACHE, UPDATES, None, "tiny-reverse10") for c in cells]
        lines = [future.result() for future in futures]
    for line in lines:
        print(line["error"] if "error" in line else f"{line['arm']}: accuracy {line['accuracy_last3']:.3f}")
    print(f"{time.monotonic() - started:.0f} s")
    none, vcpo = (line.get("accuracy_last3", float("nan")) for line in lines)
    if not (none <= 0.2 and vcpo >= 0.7):
        raise SystemExit(f"no correction must reach at most 0.2 and VCPO at least 0.7, got {none:.3f} and {vcpo:.3f}.")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "status", "check", "bias"])
    parser.add_argument(
        "--section", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="default: all, in this order"
    )
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, help="default: those of each section")
    parser.add_argument("--quick", action="store_true", help="the main methods at lag 32 with two seeds")
    parser.add_argument("--limit", type=int, help="largest number of runs to make")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: %(default)s)")
    parser.add_argument("--retry", action="store_true", help="run failed runs again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results file (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the warm starts (default: %(default)s)")
    given = parser.parse_args(arguments)
    if given.workers < 1:
        parser.error(f"--workers must be at least 1, got {given.workers}")
    return given


def main() -> None:
    """Command line."""
    given = parse()
    if given.command == "status":
        print(status(given.results))
    elif given.command == "check":
        check(given.workers)
    elif given.command == "bias":
        from study_bias import measure_all

        measure_all(given.cache, given.results.with_name("bias.jsonl"))
    else:
        runner = Runner(given.results, given.cache, given.workers, given.retry)
        cells = quick() if given.quick else cells_of(given.section, given.seeds)
        if given.limit is not None:
            done = load(given.results)
            cells = [c for c in cells if not runner.is_done(c, done)][: given.limit]
        runner.run(cells)
        print(status(given.results))
        if given.quick:
            from results_table import TABLES
            from study_results import Results

            print(TABLES["headline"](Results(given.results)))


if __name__ == "__main__":
    main()
