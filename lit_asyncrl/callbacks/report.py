"""RunReport: what a run shows and leaves behind: scalars, histograms and samples in the logger, closing table, summary.json.

It reads; it changes nothing. Scalars go to the loggers as one dictionary an update (forty `self.log` calls would cost more than a
small model's backward pass); only what the progress bar and ModelCheckpoint need goes through `self.log`.
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from lit_asyncrl.callbacks.async_rollout import AsyncRollout
from lit_asyncrl.callbacks.totals import RunTotals
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.evaluation import EvaluationResult
from lit_asyncrl.module import PolicyModule
from lit_asyncrl.pool.ledger import LedgerRow, format_table, totals
from lit_asyncrl.types import TrainBatch

OVERVIEW = {
    "overview": {
        "held-out accuracy": ["Multiline", [r"val/.*/accuracy"]],
        "reward": ["Multiline", ["reward/mean", "reward/accuracy"]],
        "ESS over trajectories, factor on the learning rate": ["Multiline", ["weights/ess_ratio", "control/lr_scale"]],
        "cosine of consecutive gradients": ["Multiline", ["control/gradient_cosine", "control/gradient_cosine_mean"]],
        "gradient norm": ["Multiline", ["control/grad_norm"]],
        "staleness, updates": [
            "Multiline",
            ["pool/policy_age_mean", "pool/policy_age_max", "pool/generation_staleness_mean", "pool/waiting_staleness_mean"],
        ],
        "tokens per second": ["Multiline", ["throughput/generated_tokens_per_s", "throughput/trained_tokens_per_s"]],
        "seconds per update": ["Multiline", ["time/step_s", "time/data_wait_s"]],
    }
}
"""TensorBoard's page `Custom Scalars`: what to look at first (regular expressions of keys)."""


class RunReport(Callback):
    """Logs every update and sums the run up.

    Args:
        histograms_every: updates between histograms of ages, staleness and importance weights, and readings of memory; 0: none.
        samples_every: updates between sample completions as text; 0: none.
        summary_name: file written into the log directory when training ends.
    """

    def __init__(self, histograms_every: int = 20, samples_every: int = 20, summary_name: str = "summary.json") -> None:
        self.histograms_every = histograms_every
        self.samples_every = samples_every
        self.summary_name = summary_name
        self.summary: dict[str, Any] = {}
        self._warned = False
        self._totals = RunTotals()
        self._resumed_at: int | None = None
        self._rows: list[LedgerRow] = []
        self._rollout: AsyncRollout | None = None

    @property
    def rollout(self) -> AsyncRollout:
        """The run's AsyncRollout."""
        assert self._rollout is not None, "the report is of a fit"
        return self._rollout

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run with this object."""
        if stage == "fit":
            self._rollout = find_rollout(trainer)
            self.summary, self._totals, self._resumed_at = {}, RunTotals(), None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember where this session begins."""
        self._resumed_at = int(checkpoint["lit_asyncrl"]["policy_version"])

    def state_dict(self) -> dict[str, Any]:
        """The counts of the run so far."""
        return {} if self._rollout is None else self._totals.plus(self._rollout.spent()).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from them."""
        self._totals = RunTotals(**state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self._last_at = time.monotonic()
        self._generated_before = self.rollout.parts.engine.generated_tokens
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(OVERVIEW)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainBatch, batch_idx: int
    ) -> None:
        """Log this update."""
        assert isinstance(pl_module, PolicyModule) and pl_module.step is not None
        started = time.perf_counter()
        metrics = self._metrics(trainer, pl_module, batch)
        step = trainer.global_step
        if pl_module.reached(self.histograms_every):
            metrics["system/memory_mib"] = _memory_mib()
        if pl_module.reached(trainer.log_every_n_steps):  # type: ignore[attr-defined]
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
        if pl_module.reached(self.histograms_every):
            self._log_histograms(trainer, pl_module, batch, step)
        if pl_module.reached(self.samples_every):
            self._log_samples(trainer, batch, step)
        for key, name in (
            ("reward/mean", "reward"),
            ("reward/accuracy", "accuracy"),
            ("weights/ess_ratio", "ess"),
            ("pool/policy_age_mean", "age"),
            ("throughput/generated_tokens_per_s", "tok/s"),
        ):
            pl_module.log(name, metrics[key], prog_bar=True, logger=False, batch_size=1)
        pl_module.times.add("log", time.perf_counter() - started)

    def _metrics(self, trainer: Trainer, module: PolicyModule, batch: TrainBatch) -> dict[str, float]:
        step = module.step
        assert step is not None
        now = time.monotonic()
        interval, self._last_at = now - self._last_at, now
        generated = self.rollout.parts.engine.generated_tokens
        new_tokens, self._generated_before = generated - self._generated_before, generated
        seconds = module.times.drain() | self.rollout.parts.worker.times.drain()
        self._totals.count(batch, step.ess_ratio)
        pool = self.rollout.data.pool
        return {
            **batch.stats,
            **step.metrics,
            "weights/ess": step.ess,
            "weights/ess_ratio": step.ess_ratio,
            "control/lr_scale": step.lr_scale,
            "control/lr": trainer.optimizers[0].param_groups[0]["lr"],
            "control/grad_norm": step.grad_norm,
            "control/skipped_updates": float(module.num_skipped),
            "control/policy_version": float(module.policy_version),
            **{f"pool/{key}": float(value) for key, value in pool.stats().items()},
            **{f"time/{part}_s": value for part, value in seconds.items()},
            "time/step_s": interval,
            "throughput/generated_tokens_per_s": new_tokens / interval,
            "throughput/trained_tokens_per_s": batch.num_trained_tokens / interval,
        }

    def _log_histograms(self, trainer: Trainer, module: PolicyModule, batch: TrainBatch, step: int) -> None:
        assert module.step is not None
        completed = self.rollout.data.pool.completed_staleness()
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                histograms = {**batch.histograms, **completed, "weights/sequence_log_weight": module.step.log_weights.cpu()}
                for name, values in histograms.items():
                    if values.numel():  # nothing is trained in a skipped update
                        logger.experiment.add_histogram(name, values, step)

    def _log_samples(self, trainer: Trainer, batch: TrainBatch, step: int) -> None:
        text = "\n\n".join(
            f"`{sample['prompt']}` -> `{sample['completion']}` (reward {sample['reward']:.3g}, versions "
            f"{sample['first_version']}-{sample['last_version']})"
            for sample in batch.samples
        )
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("samples/train", text, step)
            elif hasattr(logger, "log_text"):
                try:
                    logger.log_text(key="samples/train", columns=["text"], data=[[text]])
                except TypeError:
                    self._warn(logger)
            else:
                self._warn(logger)

    def _warn(self, logger: Any) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(logger).__name__} takes no text or histograms from RunReport: only scalars are logged there.",
                stacklevel=2,
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the evaluations during training for the summary."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            assert isinstance(pl_module, PolicyModule)
            values = {k.removeprefix("val/"): float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
            self._totals.evaluations.append({"policy_version": pl_module.policy_version, **values})

    # ---------------------------------------------------------------- the end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the summary and print the closing table."""
        self._sum_up(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same where there was nothing left to train."""
        if not self.summary:
            self._sum_up(trainer, pl_module)

    def _sum_up(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, PolicyModule)
        self.summary = self._summarize(trainer, module)
        folder = trainer.log_dir
        if folder is not None and trainer.is_global_zero:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            (path / self.summary_name).write_text(json.dumps(self.summary, indent=2) + "\n", encoding="utf-8")
        table = format_table(self._rows)
        self._log_ledger(trainer, table)
        self._print(folder, table)

    def _log_ledger(self, trainer: Trainer, table: str) -> None:
        """The closing table as scalars and as text."""
        scalars = {f"ledger/{row.name}/{kind}": float(getattr(row, kind)) for row in self._rows for kind in ("prompts", "tokens")}
        for logger in trainer.loggers:
            logger.log_metrics({name.replace(": ", "/").replace(" ", "_"): v for name, v in scalars.items()}, trainer.global_step)
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("ledger", "```\n" + table + "\n```", trainer.global_step)

    def _summarize(self, trainer: Trainer, module: PolicyModule) -> dict[str, Any]:
        rollout = self.rollout
        data, pool = rollout.data, rollout.data.pool
        with rollout.parts.worker.frozen():  # no response arrives meanwhile: all is of one instant
            self._rows = pool.ledger.rows(rollout.parts.worker.unfinished_tokens)
        generated = sum(row.tokens for row in self._rows)
        session = rollout.spent()
        whole = self._totals.plus(session)
        rejected_share = pool.groups_rejected / max(pool.ledger.num_dispatched, 1)
        return {
            "accuracy_before": _accuracy(rollout.first_results),
            "accuracy_after": _accuracy(rollout.last_results),
            "evaluation_before": _metrics_of(rollout.first_results),
            "evaluation_after": _metrics_of(rollout.last_results),
            "evaluations": whole.evaluations,
            "policy_version": module.policy_version,
            "resumed_at": self._resumed_at,
            "skipped_updates": module.num_skipped,
            "wall_s": round(whole.train_s, 3),
            "session_wall_s": round(session["train_s"], 3),
            "generated_tokens": generated,
            "trained_tokens": whole.trained_tokens,
            "generated_tokens_per_s": generated / max(whole.train_s, 1e-9),
            **whole.means(),
            "groups_rejected": pool.groups_rejected,
            "tokens_rescored": pool.tokens_rescored,
            "rejected_share": rejected_share,
            "engine_restarts": whole.engine_restarts,
            "bound": whole.bound(rejected_share),
            "memory_mib": _memory_mib(),
            "ledger": totals(self._rows),
            "bias": pool.ledger.bias.means(),
            "stopped_by": data.supervisor.stop_reason,
            "seed": data.run_seed,
            "config_path": _config_path(trainer),
        }

    def _print(self, folder: str | None, ledger: str) -> None:
        summary = self.summary
        table = Table(title="lit-asyncrl: the run", show_header=False)
        for key in (
            "accuracy_before",
            "accuracy_after",
            "policy_version",
            "wall_s",
            "session_wall_s",
            "engine_restarts",
            "generated_tokens_per_s",
            "trained_tokens_per_s",
            "policy_age_mean",
            "policy_age_max",
            "ess_ratio_mean",
            "mixed_version_share",
            "groups_rejected",
            "tokens_rescored",
            "share_trainer_waits_for_data",
            "share_engine_waits_for_admission",
        ):
            value = summary[key]
            table.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
        table.add_row("hint", summary["bound"])
        console = Console()
        console.print(table)
        console.print(ledger)
        if folder is not None:
            console.print(f"summary: {Path(folder) / self.summary_name}", soft_wrap=True)


def find_rollout(trainer: Trainer) -> AsyncRollout:
    """The run's AsyncRollout callback.

    Raises:
        ConfigurationError: there is none.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, AsyncRollout):
            return callback
    raise ConfigurationError("trainer.callbacks must hold AsyncRollout beside RunReport, got none. Add it.")


def _accuracy(results: dict[str, EvaluationResult]) -> float | None:
    return next((r.metrics["accuracy"] for r in results.values()), None)


def _metrics_of(results: dict[str, EvaluationResult]) -> dict[str, dict[str, float]]:
    return {name: {"policy_version": r.version, **r.metrics} for name, r in results.items()}


def _memory_mib() -> float:
    """Resident memory of trainer and engine now, MiB."""
    process = psutil.Process()
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def _config_path(trainer: Trainer) -> str | None:
    path = Path(trainer.log_dir) / "config.yaml" if trainer.log_dir is not None else None
    return str(path) if path is not None and path.is_file() else None
