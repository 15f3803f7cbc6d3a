"""The grid of the study: the cells of every section, and the command line of one run.

A *cell* is one run: task, arm, form and size of the lag, rate, group size, threshold and seed. Sections name the cells that a
question needs; a cell that two sections name is run once.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from study_arms import ARMS, GAC_ARMS, HEADLINE, MAIN, OPOB_ARMS, POOL_ARMS, RATE_ARMS, SYNCHRONOUS, TASKS

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "experiment" / "study.yaml"
UPDATES = 300
"""Updates of every run."""
RAMP_START = 100
"""Updates without lag before it is switched on, in the form `ramp`."""
RESPONSES = 128
"""Responses of one update, whatever the group size."""
EVALUATE_EVERY = 20
"""Updates between evaluations (256 prompts; 1,024 after the last update)."""
MAX_RUNS = 900
SEEDS = (200, 201, 202, 203, 204)
RATES = (1e-4, 3e-4, 6e-4, 1e-3)
RATE = 3e-4
LAG = 32
GROUP_SIZE = 8
EPSILON = 0.2
FIXED_THRESHOLDS = (0.1, 0.5)
"""GAC's thresholds where they are given; the values 0.05 and 0.3 froze a prototype of this model."""

Form = Literal["sync", "cold", "ramp", "async"]


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        task, arm: keys of `TASKS` and `ARMS`.
        form: `sync` no lag; `cold` the lag from the start; `ramp` from update 100 on; `async` real asynchrony, engine in its own
            process. `sync` in the section of the pool is also served by that engine: its arm tells.
        lag: updates; 0 where it is not forced.
        rate: learning rate.
        seed: of prompts, sampling and warm start.
        group_size: responses of a prompt.
        epsilon: of TIC and GMC; None for all others.
    """

    task: str
    arm: str
    form: Form
    lag: int
    rate: float
    seed: int
    group_size: int = GROUP_SIZE
    epsilon: float | None = None

    @property
    def key(self) -> str:
        """Identity in the results file."""
        threshold = "" if self.epsilon is None else f"/e{self.epsilon:g}"
        return f"{self.task}/{self.arm}/{self.form}/k{self.lag}/{self.rate:g}/G{self.group_size}{threshold}/{self.seed}"

    @property
    def needs_thresholds(self) -> bool:
        """Whether a synchronous run of the same task, rate and seed must give gradient alignment control its thresholds."""
        return ARMS[self.arm].control == "calibrated"

    @property
    def calibration(self) -> Cell:
        """That synchronous run."""
        return cell(self.task, "sync", "sync", self.rate, self.seed)


def cell(
    task: str,
    arm: str,
    form: Form,
    rate: float = RATE,
    seed: int = SEEDS[0],
    lag: int = LAG,
    group_size: int = GROUP_SIZE,
    epsilon: float = EPSILON,
) -> Cell:
    """A cell with what does not apply to it left out, so that equal runs have equal keys. A synchronous arm has no lag."""
    if arm in SYNCHRONOUS and form != "async":
        form = "sync"
    no_lag = form in ("sync", "async")
    return Cell(task, arm, form, 0 if no_lag else lag, rate, seed, group_size, epsilon if ARMS[arm].has_epsilon else None)


def unique(cells: Iterable[Cell]) -> list[Cell]:
    """Each cell once, in order."""
    return list({c.key: c for c in cells}.values())


def headline() -> list[Cell]:
    """Every method at lag 32 and the rate 3e-4, both forms of the lag."""
    cells = []
    for seed in SEEDS:
        forms: tuple[Form, ...] = ("cold", "ramp")
        cells += [cell("reverse10", arm, form, seed=seed) for form in forms for arm in HEADLINE]
    return unique(cells)


def rates() -> list[Cell]:
    """How wide the range of rates is that a method survives, by lag."""
    cells = []
    for seed in SEEDS[:3]:
        for lag in (32, 8, 128):
            cells += [cell("reverse10", arm, "cold", rate, seed, lag) for rate in RATES for arm in RATE_ARMS]
        cells += [cell("reverse10", arm, "ramp", rate, seed) for rate in RATES for arm in RATE_ARMS]
    return unique(cells)


def tic_gmc() -> list[Cell]:
    """TIC against GMC over threshold, group size and rate; and with the ESS step size."""
    cells = []
    for seed in SEEDS[:3]:
        for rate in (1e-4, 3e-4):
            cells += [
                cell("reverse10", arm, "cold", rate, seed, group_size=size, epsilon=epsilon)
                for epsilon in (0.2, 0.1, 0.4)
                for size in (8, 32, 4, 16)
                for arm in ("tic", "gmc")
            ]
            cells += [cell("reverse10", arm, "cold", rate, seed) for arm in ("tic_ess", "gmc_ess")]
    return cells


def gac() -> list[Cell]:
    """Cosine of consecutive gradients by lag and method; alignment control that acts, at lag 8."""
    cells = []
    for seed in SEEDS[:3]:
        for rate in (1e-4, 3e-4):
            cells.append(cell("reverse10", "sync", "sync", rate, seed))
            cells += [cell("reverse10", arm, "cold", rate, seed, lag) for lag in (8, 2, 4, 32) for arm in ("none", "ppo", "tis")]
            cells += [cell("reverse10", arm, "cold", rate, seed, lag=8) for arm in ("vcpo_proxy", *GAC_ARMS)]
    return cells


def opob() -> list[Cell]:
    """Where the logit proxy's lead over the exact norm comes from; lengths differ on one task only."""
    cells = []
    for seed in SEEDS:
        cells += [cell("reverse10", arm, "cold", rate, seed) for rate in (3e-4, 6e-4) for arm in OPOB_ARMS]
        cells += [cell("reverse4to16", arm, "cold", seed=seed) for arm in ("vcpo_proxy", "vcpo_exact", *OPOB_ARMS[4:])]
    return cells


def tasks() -> list[Cell]:
    """The main methods on two other tasks."""
    return [cell(task, arm, "cold", seed=seed) for seed in SEEDS for task in ("reverse4to16", "sort10") for arm in MAIN]


def pace() -> list[Cell]:
    """Samplers under real asynchrony; the synchronous run is served by the same engine."""
    return [cell("reverse4to16", arm, "async", seed=seed) for seed in SEEDS for arm in POOL_ARMS]


SECTIONS = {
    "headline": headline,
    "rates": rates,
    "tic_gmc": tic_gmc,
    "gac": gac,
    "opob": opob,
    "tasks": tasks,
    "pace": pace,
}
"""In the order in which they are run."""


def cells_of(sections: Iterable[str], seeds: Sequence[int] | None = None) -> list[Cell]:
    """Cells of some sections, each once, in the order of the sections; of some seeds only if they are given."""
    return unique(c for name in sections for c in SECTIONS[name]() if seeds is None or c.seed in seeds)


def quick() -> list[Cell]:
    """The headline in small: the main methods, the lag from the start, two seeds."""
    return [c for c in headline() if c.arm in MAIN and c.form != "ramp" and c.seed in SEEDS[:2]]


def check_package() -> None:
    """Refuse to run another checkout's package.

    Raises:
        SystemExit: with the remedy.
    """
    found = importlib.util.find_spec("lit_asyncrl")
    where = None if found is None or found.origin is None else Path(found.origin).resolve().parents[1]
    if where != ROOT:
        raise SystemExit(f"lit_asyncrl must be the package of {ROOT}, got that of {where}. Set PYTHONPATH={ROOT}.")


def callbacks_of(cell: Cell, thresholds: Sequence[float] | None) -> list[dict[str, Any]]:
    """The run's callbacks as the command line takes them.

    Raises:
        ValueError: a cell that is calibrated has no thresholds.
    """
    arm = ARMS[cell.arm]
    engine = {"mode": "process", "num_slots": RESPONSES, "num_threads": 1} if cell.form == "async" else {"mode": "inline"}
    rollout = {
        "publish_lag": cell.lag,
        "publish_lag_start": RAMP_START if cell.form == "ramp" else 0,
        "trainer_threads": 1,
        "evaluate_first": False,
        "engine": {"class_path": "HFEngine", "init_args": engine},
    }
    if arm.control == "observe":
        control: dict[str, Any] = {"observe_only": True}
    elif arm.control == "fixed":
        control = {"thresholds": list(FIXED_THRESHOLDS)}
    elif thresholds is None:
        raise ValueError(f"{cell.key} needs thresholds of {cell.calibration.key}, which has none. Run that first.")
    else:
        control = {"thresholds": list(thresholds)}
    return [
        {"class_path": "AsyncRollout", "init_args": rollout},
        *([{"class_path": "EssLrScale"}] if arm.ess_lr else []),
        {"class_path": "GradientAlignmentControl", "init_args": control},
        {"class_path": "RunReport"},
        {"class_path": "study_run.StudyRecorder"},
    ]


def arguments_of(cell: Cell, policy: str, updates: int = UPDATES, thresholds: Sequence[float] | None = None) -> list[str]:
    """The command line of `lit-asyncrl fit` for a cell.

    Args:
        cell: what to run.
        policy: folder of the warm start, or the name of a packaged model.
        updates: optimizer updates.
        thresholds: gradient alignment control's, where the cell needs them.

    Raises:
        ValueError: it needs them, and has none.
    """
    arm, task = ARMS[cell.arm], TASKS[cell.task]
    is_async = cell.form == "async" and cell.arm != "sync"
    behind = 2 * (arm.updates_per_batch - 1) if cell.lag else 0  # weights go out once a batch
    arguments = [
        f"--config={CONFIG}",
        f"--seed_everything={cell.seed}",
        f"--trainer.max_steps={updates}",
        f"--trainer.val_check_interval={EVALUATE_EVERY // arm.updates_per_batch}",
        f"--trainer.callbacks={json.dumps(callbacks_of(cell, thresholds))}",
        f"--model.policy.path={policy}",
        f"--model.objective={arm.objective}",
        f"--model.advantage={arm.advantage}",
        f"--model.updates_per_batch={arm.updates_per_batch}",
        f"--model.optimizer.init_args.lr={cell.rate}",
        f"--data.task={task.name}",
        f"--data.task.min_digits={task.digits[0]}",
        f"--data.task.max_digits={task.digits[1]}",
        f"--data.sampling.max_new_tokens={task.max_new_tokens}",
        f"--data.sampler={arm.sampler}",
        f"--data.batch_groups={RESPONSES // cell.group_size * arm.updates_per_batch}",
        f"--data.group_size={cell.group_size}",
        f"--data.max_policy_age={'null' if is_async else cell.lag + behind}",
        *(["--data.capacity_groups=128"] if is_async else []),
    ]
    if cell.epsilon is not None:
        arguments.append(f"--model.objective.epsilon={cell.epsilon:g}")
    return arguments + [f"--{setting}" for setting in arm.settings]
