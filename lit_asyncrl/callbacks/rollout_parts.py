"""What runs beside the trainer (engine, weight publisher, evaluator, rollout worker, watchdog), started and closed as one."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from lit_asyncrl.callbacks.signals import SignalHandlers
from lit_asyncrl.callbacks.tapes import open_tape
from lit_asyncrl.evaluation import Evaluator
from lit_asyncrl.generation.publisher import EXACT_NOISE, ROUNDED_NOISE, WeightPublisher
from lit_asyncrl.generation.restarting import RestartingEngine
from lit_asyncrl.generation.rollout import RolloutWorker
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.policy import end_of_sequence_ids, probe_ids, resolve_policy_path, vocabulary_size
from lit_asyncrl.pool.ledger import INTERRUPTED, UNPROVED
from lit_asyncrl.recording.recorder import RunRecorder
from lit_asyncrl.recording.replay import RunReplay
from lit_asyncrl.supervisor import CLOSED
from lit_asyncrl.watchdog import Watchdog

if TYPE_CHECKING:
    from lit_asyncrl.callbacks.async_rollout import AsyncRollout


class RolloutParts:
    """The parts of one run, from `start` to `close`.

    Args:
        rollout: set up; its settings hold.
        resumed: whether the run goes on from a checkpoint.

    Attributes:
        engine: the one that answers: the user's, started anew when it dies; beside a recorder; or a replay's.
        publisher, evaluator, worker: there once `start` has returned.
        signals: SIGTERM and SIGINT.
    """

    publisher: WeightPublisher
    evaluator: Evaluator
    worker: RolloutWorker

    def __init__(self, rollout: AsyncRollout, *, resumed: bool) -> None:
        self._rollout = rollout
        self._module, self._data, self._supervisor = rollout.module, rollout.data, rollout.supervisor
        self._resumed = resumed
        self._restarting: RestartingEngine | None = None
        self._tape: RunRecorder | RunReplay | None = None
        self._probe: Sequence[int] = ()
        self._is_starting = True
        self._closing = ExitStack()
        self.is_running = False
        self.engine: GenerationEngine = rollout.engine
        self.published_version = -1
        self.signals = SignalHandlers(
            self._supervisor,
            on_leave=lambda: self.engine.stop(),
            grace_s=rollout.grace_s,
            is_started=lambda: not self._is_starting,
        )

    # ---------------------------------------------------------------- life cycle

    def start(self) -> None:
        """Start all but the worker's threads, prove that weights reach the engine, and deliver the trainer's.

        Raises:
            AsyncRLError: what does not start, or the proof that fails; call `close` then.
        """
        self.is_running = True
        try:
            self._watch()
            self._set_threads()
            self._start_engine()
            self._make_worker()
            self._deliver_first()
        finally:
            self._is_starting = False

    def close(self) -> None:
        """Stop worker, publisher, engine, tape, watchdog and signals, in this order; idempotent."""
        if not self.is_running:
            return
        self.is_running = False
        self._supervisor.request_stop(CLOSED)
        self._closing.close()

    def fail_unproved(self) -> None:
        """After a failed proof of delivery: drop what was sampled since the last proved one."""
        if hasattr(self, "worker"):
            self.worker.fail_unproved(self.publisher.served_version + 1, UNPROVED)

    def _watch(self) -> None:
        """Take SIGTERM and SIGINT over, and begin to look whether everything gets on."""
        settings = self._rollout
        self._closing.callback(self.signals.close)
        self.signals.install()
        watchdog = Watchdog(
            self._supervisor,
            stall_timeout_s=max(settings.stall_timeout_s, settings.sync_timeout_s),
            progress=self._progress,
            silent_s={"generation engine": lambda: 0.0 if self._is_starting else self.engine.silent_s},
            at_each_look=self.signals.look,
        )
        self._closing.callback(watchdog.close)
        watchdog.start()

    def _progress(self) -> object:
        """What changes as the run gets on."""
        if self._is_starting:
            return None
        return (
            self.engine.generated_tokens,
            self.worker.collected_tokens,
            self.evaluator.num_answers,
            self.publisher.deliveries,
            self._module.policy_version,
        )

    def _set_threads(self) -> None:
        threads = self._rollout.trainer_threads
        if threads is None and self.engine.num_threads:
            threads = max(1, len(os.sched_getaffinity(0)) - self.engine.num_threads)
        if threads is not None:
            self._closing.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads)

    def _start_engine(self) -> None:
        module, tokenizer = self._module, self._module.tokenizer
        path = resolve_policy_path(module.policy.path)
        self._probe = probe_ids(tokenizer, vocabulary_size(module.model))
        self._tape = open_tape(self._rollout, self._watched_engine, resumed=self._resumed)
        if self._tape is not None:
            self._closing.callback(self._tape.close)
        self.engine = self._watched_engine() if self._tape is None else self._tape.engine
        self._closing.callback(self.engine.stop)
        with self._supervisor.busy("trainer", "the engine's start", math.inf):  # its own start_timeout_s ends it
            self.engine.start(
                path,
                eos_token_ids=end_of_sequence_ids(path, tokenizer),
                probe_ids=self._probe,
                max_model_len=self._rollout.max_model_len or module.context_length(),
            )

    def _watched_engine(self) -> RestartingEngine:
        """The user's engine, to be started anew when it dies."""
        self._restarting = RestartingEngine(
            self._rollout.engine,
            supervisor=self._supervisor,
            max_restarts=self._rollout.max_restarts,
            silent_timeout_s=self._rollout.silent_timeout_s,
            on_lost=lambda tokens: self._data.pool.ledger.add_tokens("dropped", tokens, INTERRUPTED),
        )
        return self._restarting

    def _make_worker(self) -> None:
        """Publisher, evaluator and worker around the engine."""
        settings, data = self._rollout, self._data
        self.publisher = WeightPublisher(
            self.engine,
            publish_lag=settings.publish_lag,
            publish_lag_start=settings.publish_lag_start,
            tolerance=settings.probe_tolerance,
            max_noise=ROUNDED_NOISE if self.engine.rounds_weights else EXACT_NOISE,
            timeout_s=settings.sync_timeout_s,
            supervisor=self._supervisor,
            needs_weights=lambda: self._restarting is not None and self._restarting.needs_weights,
            on_delivered=lambda published, served: data.pool.delivered(published),
        )
        self._closing.callback(self.publisher.close)
        data.while_waiting = self.publisher.redeliver_if_lost
        self.evaluator = Evaluator(
            self.engine,
            data.scorer,
            data.tasks,
            data.decode,
            supervisor=self._supervisor,
            timeout_s=settings.evaluation_timeout_s,
            while_waiting=self.publisher.redeliver_if_lost,
        )
        self.worker = RolloutWorker(
            self.engine,
            data.prompts if self._tape is None else self._tape.prompts,
            data.scorer,
            data.pool,
            data.tasks,
            data.decode,
            data.rollout_config,
            served_version=lambda: self.publisher.served_version,
            supervisor=self._supervisor,
            vocab_size=vocabulary_size(self._module.model),
        )
        self._closing.callback(self.worker.stop)
        data.worker = self.worker

    # ---------------------------------------------------------------- weights

    def _deliver_first(self) -> None:
        module = self._module
        if self._rollout.rehearse and not isinstance(self._tape, RunReplay):
            self.publisher.rehearse(
                module.policy_version, module.weights(), lambda changed: module.probe_logprobs(self._probe, changed)
            )
        self.publish()
        self.publisher.wait_delivered(self._rollout.sync_timeout_s)

    def publish(self) -> None:
        """Send the trainer's weights to the engine; returns when they may change.

        Raises:
            WaitTimeoutError, StopRequested, or the fault of the delivery before.
        """
        self.published_version = self._module.policy_version
        self.publisher.publish(self.published_version, self._module.weights(), self._module.probe_logprobs(self._probe))

    # ---------------------------------------------------------------- counts

    @property
    def engine_restarts(self) -> int:
        """How often the engine was started anew."""
        return 0 if self._restarting is None else self._restarting.restarts

    @property
    def engine_down_s(self) -> float:
        """Seconds without an engine since `start`."""
        return 0.0 if self._restarting is None else self._restarting.down_s
