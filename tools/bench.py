"""The project's own benchmarks: ratios measured in one run, so that they mean the same on any machine.

    python tools/bench.py a b d e                            # c needs TRL in an environment of its own, see bench_trl.py
    python tools/bench.py c --trl-python trl-env/bin/python

    a  asynchronous against synchronous, one core each for engine and trainer, at lengths where both take about as long
    b  embedded engine against `transformers.generate`
    c  a step with the GRPO objective against TRL's `GRPOTrainer`, same number of threads
    d  where a step's time goes
    e  a step with exact OPOB (`batched`) against a plain step

Medians over `--steps` steps after `--warmup`. Run it on a machine with two cores that does nothing else.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench_compute import bench_generate, bench_opob
from bench_fits import bench_against_trl, bench_async, bench_step
from bench_runs import Setup
from bench_table import Line, print_table

BUSY_LOAD = 0.7
"""Load average (1 minute) above which the machine counts as busy."""

PARTS: dict[str, Callable[[Setup], list[Line]]] = {
    "a": bench_async,
    "b": bench_generate,
    "c": bench_against_trl,
    "d": bench_step,
    "e": bench_opob,
}


def main() -> int:
    """Run the parts that were named; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--steps", type=int, default=20, help="measured steps (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default: %(default)s)")
    parser.add_argument("--trl-python", help="interpreter of the environment that TRL is in, for part c")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of both sides of part c (default: %(default)s)")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        print(f"warning: this machine is busy (load average {load:.1f}); the figures below mean little", file=sys.stderr)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    missed = False
    with tempfile.TemporaryDirectory() as work_dir:
        setup = Setup(Path(work_dir), arguments.steps, arguments.warmup, arguments.threads, arguments.trl_python)
        for part in arguments.parts:
            lines = PARTS[part](setup)
            print_table(f"({part}) {PARTS[part].__doc__}", lines)
            missed = missed or any(line.verdict().endswith("miss") for line in lines)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
