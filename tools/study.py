"""The study: stabilizers of asynchronous reinforcement learning side by side on tiny models (docs/study.md).

    python tools/study.py run                          # all sections, both cores, resumable; some hours
    python tools/study.py run --quick                  # the headline in small: 16 runs, minutes
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
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from study_grid import SECTIONS, SEEDS, UPDATES, Cell, cell, cells_of, check_package, quick
from study_results import RESULTS, read_results
from study_warm_start import CACHE

RUNS_PER_WORKER = 40
"""Runs of one interpreter, which then makes place for a fresh one."""


class ResultsLog:
    """The results file, open for adding lines; one runner at a time.

    Raises:
        SystemExit: another runner has it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the process, however it ends
        except BlockingIOError:
            raise SystemExit(f"--results must be a file that no other runner writes, got {path}. Name another.") from None
        except OSError as error:
            raise SystemExit(f"--results must be a file that can be written, got {path}: {error}.") from None
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):  # a line that a kill has cut
            self._file.write("\n")

    def append(self, line: dict[str, Any]) -> None:
        """Add one line."""
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()


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
        self.log = ResultsLog(results)
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
        done = read_results(self.results)
        todo = [c for c in cells if not self.is_done(c, done)]
        print(f"{len(todo)} of {len(cells)} runs to make", flush=True)
        alone = [c for c in todo if c.form == "async"]
        self._run([c for c in todo if c.form != "async"], self.workers, len(alone))
        self._run(alone, 1, 0)

    def _run(self, todo: Sequence[Cell], workers: int, later: int) -> None:
        left = list(todo)
        while left:
            pool = make_pool(workers)
            running: dict[Future[dict[str, Any]], Cell] = {}
            lost: list[Cell] = []
            try:
                while left or running:
                    while len(running) < workers and (i := self._startable(left, running.values())) is not None:
                        next_cell = left.pop(i)
                        running[pool.submit(work, *self._arguments(next_cell))] = next_cell
                    self._collect(running, len(left), later, workers)
            except BrokenProcessPool:
                lost = list(running.values())
            except KeyboardInterrupt:
                os._exit(130)  # the workers end with this process
            pool.shutdown()
            self._run_lost(lost, workers, later)

    def _run_lost(self, lost: Sequence[Cell], workers: int, later: int) -> None:
        """One of these runs has ended its worker, and with it the pool: each by itself tells which."""
        if workers > 1:
            self._run(lost, 1, later)
            return
        for one in lost:
            self.log.append({"key": one.key, "error": "the worker process died"})
            print(f"{one.key}: the worker process died", flush=True)

    def _startable(self, left: Sequence[Cell], running: Iterable[Cell]) -> int | None:
        """The first cell whose thresholds do not come from a run that is going on."""
        busy = {c.key for c in running}
        return next((i for i, c in enumerate(left) if not (c.needs_thresholds and c.calibration.key in busy)), None)

    def _arguments(self, cell: Cell) -> tuple[Any, ...]:
        known = read_results(self.results) if cell.needs_thresholds else {}
        return cell, self.cache, UPDATES, known.get(cell.calibration.key, {}).get("gac_thresholds"), None

    def _collect(self, running: dict[Future[dict[str, Any]], Cell], left: int, later: int, workers: int) -> None:
        """Wait for a run to end, write its line and say how far it is."""
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            line = future.result()
            del running[future]
            self.log.append(line)
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
    done = read_results(path)
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
    parser.add_argument("--section", nargs="+", choices=list(SECTIONS), help="default: all, in this order")
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, help="default: those of each section")
    parser.add_argument("--quick", action="store_true", help="the main methods at lag 32 with two seeds")
    parser.add_argument("--limit", type=int, help="largest number of runs to make")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: %(default)s)")
    parser.add_argument("--retry", action="store_true", help="run failed runs again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results file (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the warm starts (default: %(default)s)")
    given = parser.parse_args(arguments)
    for name in ("workers", "limit"):
        if (number := getattr(given, name)) is not None and number < 1:
            parser.error(f"--{name} must be at least 1, got {number}")
    if given.quick and (given.section or given.seeds):
        parser.error("--quick must be given without --section and --seeds: it has its own")
    given.cells = quick() if given.quick else cells_of(given.section or SECTIONS, given.seeds)
    if not given.cells:
        parser.error(f"--seeds must be of the sections {', '.join(given.section)}, got {', '.join(map(str, given.seeds))}")
    return given


def main() -> None:
    """Command line."""
    given = parse()
    if given.command == "status":
        print(status(given.results))
        return
    check_package()
    if given.command == "check":
        check(given.workers)
    elif given.command == "bias":
        from study_bias import measure_all

        measure_all(given.cache, given.results.with_name("bias.jsonl"))
    else:
        runner = Runner(given.results, given.cache, given.workers, given.retry)
        done = read_results(given.results)
        runner.run([c for c in given.cells if not runner.is_done(c, done)][: given.limit] if given.limit else given.cells)
        print(status(given.results))
        if given.quick:
            from results_table import TABLES
            from study_results import Results

            print(TABLES["headline"](Results(given.results)))


if __name__ == "__main__":
    main()
