"""AsyncRollout: generation in the background, weight delivery after each update, evaluation at one version.

    PromptSource --Prompt--> GenerationEngine --Completion--> rewards --TrajectoryGroup--> TrajectoryPool
         ^   admission (max_policy_age, room)   ^                                           | sampler (PACE)
         |                                      |                                           v TrainBatch
         |              weights, proved         |                                      PolicyModule
         '------------ AsyncRollout <-----------'---- optimizer <- learning-rate scale <- clip <- gradient

Who waits for whom: the trainer for a batch (pool), the dispatcher for admission (pool), the collector for completions (engine),
the publisher for the proof of delivery (engine). Every wait is bounded by the run's `Supervisor`.
"""

from __future__ import annotations

import threading
import time
import warnings
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm

from lit_asyncrl.callbacks.rollout_parts import RolloutParts
from lit_asyncrl.callbacks.rollout_settings import check_arguments, check_settings
from lit_asyncrl.checkpoint_io import save_last
from lit_asyncrl.datamodule import RolloutDataModule
from lit_asyncrl.errors import ConfigurationError, StopRequested
from lit_asyncrl.evaluation import EvaluationBatch, EvaluationResult
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.loaders import end_training
from lit_asyncrl.module import PolicyModule
from lit_asyncrl.pool.pool import BATCH_WAITER
from lit_asyncrl.recording.configuration import check_tape


class AsyncRollout(Callback):
    """Owns the engine, the weight publisher and the rollout worker of a run.

    Args:
        engine: samples the responses (default: the embedded transformers engine in its own process).
        publish_lag: serve weights this many updates old on purpose (to study staleness); versions stay exact.
        publish_lag_start: update from which on the lag holds; the newest weights are served before.
        probe_tolerance: largest difference, in nats, between the engine's and the trainer's log-probs of the probe sequence
            after a weight update; above it the run ends with `WeightSyncError`. None: measured (2e-5 in float32, the noise of
            rounding for an engine in bfloat16).
        max_model_len: tokens of prompt and response together that the engine must hold; None: the model's context. A smaller
            number saves memory where an engine reserves it.
        rehearse: prove before the first update, tensor group by tensor group, that changed weights reach the engine.
        sync_timeout_s: seconds for one weight update, proof included.
        evaluation_timeout_s: seconds for one evaluation of one held-out set.
        max_restarts: how often an engine that dies or falls silent is started anew, its unfinished responses going on; then, and
            with 0 at once, the run ends with its error.
        silent_timeout_s: seconds without a sign of life after which the engine counts as dead; more than its longest decode
            step, prefill or compilation.
        stall_timeout_s: seconds without a sign of life of a part, or without progress of the whole run, that end it (at least
            `sync_timeout_s`).
        grace_s: seconds from SIGTERM or Ctrl-C, or from a fault, to the end of the run; then the process leaves by itself.
        evaluate_first: evaluate the held-out sets before the first update.
        evaluate_last: evaluate them after the last update.
        trainer_threads: CPU threads of the trainer; None: the machine's cores less the engine's.
        record_run: new file to record the run in: answers in order of arrival, prompts, and what was taken from the pool.
        replay_run: record to train again, without the engine: on the same machine with the same weights, bit by bit.

    Attributes:
        configuration: the run's settings by key, for its record; the command line fills it in.
    """

    def __init__(
        self,
        engine: GenerationEngine | None = None,
        publish_lag: int = 0,
        publish_lag_start: int = 0,
        probe_tolerance: float | None = None,
        max_model_len: int | None = None,
        rehearse: bool = True,
        sync_timeout_s: float = 60.0,
        evaluation_timeout_s: float = 600.0,
        max_restarts: int = 3,
        silent_timeout_s: float = 120.0,
        stall_timeout_s: float = 600.0,
        grace_s: float = 30.0,
        evaluate_first: bool = True,
        evaluate_last: bool = True,
        trainer_threads: int | None = None,
        record_run: str | None = None,
        replay_run: str | None = None,
    ) -> None:
        self.engine = engine or HFEngine()
        self.publish_lag = publish_lag
        self.publish_lag_start = publish_lag_start
        self.probe_tolerance = probe_tolerance
        self.max_model_len = max_model_len
        self.rehearse = rehearse
        self.sync_timeout_s = sync_timeout_s
        self.evaluation_timeout_s = evaluation_timeout_s
        self.max_restarts = max_restarts
        self.silent_timeout_s = silent_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self.grace_s = grace_s
        self.evaluate_first = evaluate_first
        self.evaluate_last = evaluate_last
        self.trainer_threads = trainer_threads
        self.record_run = record_run
        self.replay_run = replay_run
        check_arguments(self)
        self.configuration: dict[str, Any] = {}
        self.first_results: dict[str, EvaluationResult] = {}
        self.last_results: dict[str, EvaluationResult] = {}
        self._train_started_at: float | None = None
        self._down_before_s = 0.0
        self._spent: dict[str, float] = {}
        self._parts: RolloutParts | None = None
        self._saved_version = -1
        self._resumed = False

    @property
    def parts(self) -> RolloutParts:
        """Engine, publisher, evaluator and worker of the run that goes on, or of the last one."""
        assert self._parts is not None, "nothing was started"
        return self._parts

    # ---------------------------------------------------------------- life cycle

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find policy and pool, and check that the settings agree. Nothing is started."""
        data = getattr(trainer, "datamodule", None)
        if not isinstance(pl_module, PolicyModule) or not isinstance(data, RolloutDataModule):
            raise ConfigurationError(
                "AsyncRollout must run with PolicyModule and RolloutDataModule, got "
                f"{type(pl_module).__name__} and {type(data).__name__}."
            )
        self.module, self.data = pl_module, data
        self.supervisor = data.supervisor
        check_settings(self, trainer, pl_module, data)
        self._resumed, self.first_results, self.last_results = False, {}, {}  # of an earlier run with these objects
        self._train_started_at, self._spent, self._saved_version = None, {}, -1
        pl_module.evaluate = self.evaluate
        lock_bars_in_process()

    def check_files(self) -> None:
        """Refuse a record that cannot be written or replayed.

        Raises:
            ConfigurationError: what is wrong, and the remedy.
        """
        check_tape(self.record_run, self.replay_run, self.configuration)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the engine with the trainer's weights (restored ones when resuming)."""
        self._start()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the engine when `validate` runs without `fit`."""
        self._start()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the engine for `test`."""
        self._start()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the engine for `predict`."""
        self._start()

    def _start(self) -> None:
        if self._parts is not None and self._parts.is_running:
            return
        self._parts = RolloutParts(self, resumed=self._resumed)
        self._parts.start()
        if self.module.trainer.state.fn == "fit":  # Lightning installs its own next, over the ones it finds
            self._parts.signals.restore()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate, then open admission: everything is restored by now."""
        self.parts.signals.install()  # Lightning has installed its own, which would end the loop without a checkpoint
        if self.evaluate_first and not self._resumed:
            try:
                self.first_results = self._evaluate_all("val")
            except StopRequested:
                end_training(trainer)
        self._train_started_at = time.monotonic()
        self._down_before_s = self.parts.engine_down_s
        self._saved_version = self.module.policy_version
        self.data.pool.set_policy_version(self.module.policy_version)
        self.data.pool.open_admission()
        self.parts.worker.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Send the new weights, or free the batch's room when the update was skipped."""
        module, pool = self.module, self.data.pool
        if trainer.global_step >= trainer.max_steps > 0:
            pool.close_admission()  # before the delivery makes room: nothing is generated that will not be trained
        try:
            with module.times.measure("publish"):
                if module.policy_version > self.parts.published_version:
                    pool.set_policy_version(module.policy_version)
                    self.supervisor.raise_if_stopping()
                    self.parts.publish()
                else:
                    pool.settle_skipped()
                    self.supervisor.raise_if_stopping()
        except StopRequested:
            end_training(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let callbacks that watch a metric pass over an epoch that was broken off: it may have none."""
        if self.supervisor.stop_reason is not None or self.data.is_epoch_broken_off:
            trainer.sanity_checking = True  # until `on_train_end`

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop producing, evaluate the result (not after a signal), and save what was learnt since the last checkpoint."""
        trainer.training = True
        self._spent = self.spent()
        self.data.pool.close_admission()
        if self.evaluate_last and self.supervisor.stop_reason is None:
            with suppress(StopRequested):
                self.last_results = self._evaluate_all("val")
        wanted = self.supervisor.stop_reason is not None or trainer.checkpoint_callback is not None
        is_trial: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
        if wanted and not is_trial and self.module.policy_version > self._saved_version:
            save_last(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where there was nothing left to train: say so, and evaluate what the checkpoint holds."""
        if self._train_started_at is not None:
            return
        warnings.warn(nothing_left(trainer), stacklevel=2)
        self.parts.signals.install()
        if self.evaluate_last and self.supervisor.stop_reason is None:
            with suppress(StopRequested):
                self.last_results = self._evaluate_all("val")

    def spent(self) -> dict[str, float]:
        """Of this session's training, so far or in all: seconds, waits and restarts, by attribute of `RunTotals`."""
        if self._spent:
            return self._spent
        started, parts = self._train_started_at, self._parts
        spent = {"train_s": 0.0, "engine_waited_s": 0.0, "engine_down_s": 0.0}
        if started is not None and parts is not None:
            spent["train_s"] = time.monotonic() - started
            spent["engine_waited_s"] = parts.worker.idle_s
            spent["engine_down_s"] = parts.engine_down_s - self._down_before_s
        restarts = 0 if parts is None else parts.engine_restarts
        return spent | {"trainer_waited_s": self.supervisor.waited_s(BATCH_WAITER), "engine_restarts": restarts}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say it if the pool's state is not restored: Lightning finds it by the datamodule's name."""
        name = type(self.data).__qualname__
        if trainer.state.fn == "fit" and name not in checkpoint:
            warnings.warn(
                f"The checkpoint holds no state of {name}, as it is of a run with another class of datamodule: prompts and pool "
                "begin anew.",
                stacklevel=2,
            )

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember what is saved, so that a signal does not save it again."""
        self._saved_version = self.module.policy_version

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release everything: Lightning calls no teardown after an exception."""
        self.close()
        if self._parts is not None:
            self._parts.fail_unproved()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release everything."""
        self.close()

    def close(self) -> None:
        """Stop what runs beside the trainer; idempotent."""
        if self._parts is not None:
            self._parts.close()

    # ---------------------------------------------------------------- evaluation

    def evaluate(self, batch: EvaluationBatch) -> EvaluationResult:
        """Evaluate one held-out set with the newest weights; a lagged engine serves them meanwhile and goes back."""
        # Not in the trainer's autocast, which would reach an engine in this process.
        busy = self.supervisor.busy("trainer", f"the evaluation of {batch.name!r}", self.evaluation_timeout_s)
        with torch.autocast(self.module.device.type, enabled=False), self.parts.publisher.serve_current(), busy:
            return self.parts.evaluator.run(batch)

    def _evaluate_all(self, area: str) -> dict[str, EvaluationResult]:
        results = {batch.name: self.evaluate(batch) for batch in self.data.evaluation_batches(final=True)}
        metrics = {f"{area}/{name}/{key}": value for name, result in results.items() for key, value in result.metrics.items()}
        for logger in self.module.trainer.loggers:
            logger.log_metrics(metrics, step=self.module.policy_version)
        return results

    def state_dict(self) -> dict[str, Any]:
        """The accuracy before training, so that a resumed run reports its own start."""
        return {"first": {name: {"version": r.version, "metrics": r.metrics} for name, r in self.first_results.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self._resumed = True
        self.first_results = {name: EvaluationResult(r["version"], r["metrics"]) for name, r in state_dict["first"].items()}


def lock_bars_in_process() -> None:
    """Give progress bars a lock of this process alone.

    TorchRL makes `spawn` the way to start processes, under which tqdm's own lock has a name in /dev/shm that outlives a SIGKILL.
    """
    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(threading.RLock())


def nothing_left(trainer: Trainer) -> str:
    """Why a `fit` has trained nothing, in words."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return (
            f"nothing left to train: the checkpoint is at update {trainer.global_step}, trainer.max_steps is {trainer.max_steps}."
        )
    return (
        f"nothing left to train: trainer.max_epochs is {trainer.max_epochs} (the run is at {trainer.current_epoch}), "
        f"trainer.limit_train_batches is {trainer.limit_train_batches}."
    )
