"""One run of the study through the product's command line, and its line of the results file."""

from __future__ import annotations

import contextlib
import functools
import io
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from study_arms import ARMS
from study_grid import ROOT, UPDATES, Cell, arguments_of, check_package
from study_statistics import BLOCK, ESS_ALARM, ESS_ALARM_UPDATES, blocks, first_below
from study_warm_start import warm_start

from lit_asyncrl.algorithm.gradients import calibrated_thresholds
from lit_asyncrl.callbacks.report import RunReport
from lit_asyncrl.cli import AsyncRLCLI, run
from lit_asyncrl.module import PolicyModule
from lit_asyncrl.types import TrainBatch

DIGITS = 3
"""Significant digits of what is stored."""
MAX_ERROR = 300
"""Characters of an error that are stored."""


# ---------------------------------------------------------------- what a run is watched by


class StudyRecorder(Callback):
    """Keeps what the results file needs of every update and evaluation. It reads; it changes nothing.

    Attributes:
        updates: per update the ESS ratio, gradient norm, k3 KL, cosine, step scale, policy age (mean), generation and waiting
            staleness.
        evaluations: optimizer steps so far, accuracy, seconds of training, trained tokens so far.
    """

    def __init__(self) -> None:
        self.updates: dict[str, list[float]] = {}
        self.evaluations: list[tuple[int, float, float, int]] = []
        self.trained_tokens = 0
        self._started = self._paused = float("nan")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._started = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainBatch, batch_idx: int
    ) -> None:
        """Note this update; the updates of one batch share its means."""
        assert isinstance(pl_module, PolicyModule) and pl_module.step is not None
        step = pl_module.step
        row = {
            "ess": step.ess_ratio,
            "grad_norm": step.grad_norm,
            "kl": step.metrics["weights/k3_kl"],
            "cosine": step.metrics["control/gradient_cosine"],
            "lr_scale": step.lr_scale,
            "age": batch.stats["pool/policy_age_mean"],
            "generation": batch.stats["pool/generation_staleness_mean"],
            "waiting": batch.stats["pool/waiting_staleness_mean"],
        }
        for name, value in row.items():
            self.updates.setdefault(name, []).extend([float(value)] * pl_module.updates_per_batch)
        self.trained_tokens += batch.num_trained_tokens

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._paused = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the evaluation and go on."""
        accuracy = next(float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/") and k.endswith("/accuracy"))
        self.evaluations.append((trainer.global_step, accuracy, self._paused - self._started, self.trained_tokens))
        self._started += time.monotonic() - self._paused


# ---------------------------------------------------------------- one run


def run_cell(
    cell: Cell, cache: Path, updates: int = UPDATES, thresholds: Sequence[float] | None = None, policy: str | None = None
) -> dict[str, Any]:
    """One run in this process.

    Args:
        cell: what to run.
        cache: where warm starts are kept.
        updates: optimizer updates.
        thresholds: gradient alignment control's, where the cell needs them.
        policy: a model instead of the seed's warm start.

    Returns:
        Its line of the results file; with `error` in place of results if it failed.
    """
    line = {"key": cell.key} | {name: value for name, value in asdict(cell).items() if value is not None}
    started = time.monotonic(), time.process_time()
    try:
        line["commit"] = commit()
        folder, figures = warm_start(cell.task, cell.seed, cache) if policy is None else (Path(policy), {})
        started = time.monotonic(), time.process_time()
        recorder, summary = results_of(fit(arguments_of(cell, str(folder), updates, thresholds)))
        line |= result_of(cell, recorder, summary, figures)
        if thresholds is not None:
            line["thresholds"] = list(thresholds)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a failed run is a line of the results, and the next one goes on
        line["error"] = f"{type(error).__name__}: {error}"[:MAX_ERROR]
    seconds = [round(now - then, 1) for now, then in zip((time.monotonic(), time.process_time()), started, strict=True)]
    return line | {"run_s": seconds[0], "cpu_s": seconds[1]}


def fit(arguments: Sequence[str]) -> AsyncRLCLI:
    """The product's `fit`, silent."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return run(["fit", *arguments, f"--trainer.default_root_dir={folder}"])


def results_of(cli: AsyncRLCLI) -> tuple[StudyRecorder, dict[str, Any]]:
    """Recorder and summary of a finished run.

    Raises:
        SystemExit: the run was stopped.
    """
    callbacks: list[Any] = cli.trainer.callbacks  # type: ignore[attr-defined]
    report = next(c for c in callbacks if isinstance(c, RunReport))
    recorder = next(c for c in callbacks if isinstance(c, StudyRecorder))
    if report.summary["stopped_by"] is not None:
        raise SystemExit(f"stopped by {report.summary['stopped_by']}")
    return recorder, report.summary


def result_of(cell: Cell, recorder: StudyRecorder, summary: dict[str, Any], warm: dict[str, float]) -> dict[str, Any]:
    """The fields of a finished run."""
    rows = recorder.updates
    first = [[0, warm["greedy"]]] if warm else []
    last_three = [accuracy for _, accuracy, _, _ in recorder.evaluations[-3:]]
    result = {
        "updates": summary["policy_version"],
        "accuracy": round(summary["accuracy_after"], 4),
        "accuracy_last3": round(sum(last_three) / max(len(last_three), 1), 4),
        "curve": first + [[step, round(accuracy, 3)] for step, accuracy, _, _ in recorder.evaluations],
        "warm": warm,
        "ess_alarm": first_below(rows["ess"], ESS_ALARM, 1),
        "ess_alarm3": first_below(rows["ess"], ESS_ALARM, ESS_ALARM_UPDATES),
        "min_ess": _rounded(blocks(rows["ess"], BLOCK, min)),
        "max_grad_norm": _rounded(blocks(rows["grad_norm"], BLOCK, max)),
        "max_kl": _rounded(blocks(rows["kl"], BLOCK, max)),
        "cosine": [round(value, 2) for value in blocks(rows["cosine"], BLOCK, _mean)],
        "age_mean": significant(summary["policy_age_mean"]),
        "age_max": significant(summary["policy_age_max"]),
        "sampled_tokens": summary["generated_tokens"],
        "trained_tokens": summary["trained_tokens"],
    }
    if ARMS[cell.arm].ess_lr:
        result["lr_scale"] = [round(value, 2) for value in blocks(rows["lr_scale"], BLOCK, _mean)]
    if ARMS[cell.arm].control != "observe":
        result["skipped"] = summary["skipped_updates"]
    if cell.form == "sync":
        result["gac_thresholds"] = _rounded(calibrated_thresholds([c for c in rows["cosine"] if c != 0.0]))
    if cell.form == "async":
        result |= _asynchrony(recorder, summary)
    return result


def _asynchrony(recorder: StudyRecorder, summary: dict[str, Any]) -> dict[str, Any]:
    """What is of interest where generation and training run at the same time."""
    rows = recorder.updates
    return {
        "seconds": [round(seconds, 1) for _, _, seconds, _ in recorder.evaluations],
        "tokens": [tokens for _, _, _, tokens in recorder.evaluations],
        "wall_s": significant(summary["wall_s"]),
        "generation_staleness": significant(_mean(rows["generation"])),
        "waiting_staleness": significant(_mean(rows["waiting"])),
        "groups_rejected": summary["groups_rejected"],
        "rejected_share": significant(summary["rejected_share"]),
        "lengths": {name: significant(value) for name, value in summary["bias"]["length"].items()},
        "trainer_waits": significant(summary["share_trainer_waits_for_data"]),
        "engine_waits": significant(summary["share_engine_waits_for_admission"]),
    }


def significant(value: float) -> float:
    """A number with three significant digits."""
    return float(f"{value:.{DIGITS}g}")


def _rounded(values: Sequence[float]) -> list[float]:
    return [significant(value) for value in values]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@functools.cache
def commit() -> str:
    """Commit of the package that runs, with a `+` where package, configs or tools differ from it.

    Raises:
        SystemExit: the package is not this checkout's.
    """
    check_package()
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "lit_asyncrl", "configs", "tools"], capture_output=True, text=True, check=False
    )
    return (head or "unknown") + ("+" if changed.stdout.strip() else "")
