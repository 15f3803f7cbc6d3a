"""The embedded engine in the caller's process: decode steps are run by whoever waits for completions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from lit_asyncrl.errors import ConfigurationError, EngineError, WeightSyncError
from lit_asyncrl.generation.hf_core import PURPOSES, EngineCore, EngineCounters, EngineSettings
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, NamedTensors, Purpose
from lit_asyncrl.waits import Changed


class InlineBackend:
    """An `EngineCore` behind a lock; updates, pauses and requests of other threads go between two decode steps."""

    def __init__(self, settings: EngineSettings) -> None:
        try:
            self._core = EngineCore(settings)
        except ConfigurationError as error:
            raise EngineError(f"The generation engine cannot start: {error}") from error
        self.max_model_len = self._core.max_model_len
        self._changed = Changed()
        self._guests_lock = threading.Lock()
        self._guests = 0  # threads that want in between two steps
        self._finished: dict[Purpose, list[Completion]] = {purpose: [] for purpose in PURPOSES}
        self._waits = settings.in_flight == "wait"
        self._report: DeliveryReport | None = None
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def counters(self) -> EngineCounters:
        """Totals so far; an engine that is run by its callers is never idle by itself."""
        return EngineCounters(self._core.generated_tokens, self._core.busy_s)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        with self._between_steps():
            self._core.submit(requests)

    def take(self, purpose: Purpose, timeout_s: float) -> list[Completion]:
        """Decode until a completion of this purpose is finished, at most `timeout_s` (plus one step)."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                self._raise_if_dead()
                if self._finished[purpose]:
                    taken, self._finished[purpose] = self._finished[purpose], []
                    return taken
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return []
                if self._guests or not self._core.has_work:
                    self._changed.wait_news(remaining)
                else:
                    self._step()

    def partial_completions(self) -> list[Completion]:
        """Training responses that were not taken yet, as far as they are; also of an engine that failed or was stopped."""
        with self._between_steps(check=False):
            untaken = [replace(completion, finish_reason="abort") for completion in self._finished["train"]]
            return [*untaken, *self._core.partial_completions()]

    @property
    def silent_s(self) -> float:
        """0: who runs the engine hears of everything."""
        return 0.0

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """Load the weights at once; with `wait`, copy them and load them when nothing is in flight."""
        if self._waits:
            weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        with self._between_steps():
            self._core.begin_update(version, weights)
            self._report = self._core.try_update()

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """The report of `begin_update`; decodes until the weights are loaded. After a timeout it may be called again."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._between_steps():
                report, self._report = self._report, None
                if report is not None:
                    return report
                version = self._core.pending_version
                assert version is not None, "finish_update without begin_update"
                if time.monotonic() >= deadline:
                    raise WeightSyncError(
                        f"The generation engine must load version {version} within {timeout_s:.1f} s, and still waits for "
                        "responses (in_flight: wait). Allow for the longest one."
                    )
                self._step()

    def set_paused(self, paused: bool) -> None:
        """Let training responses stand still, or go on."""
        with self._between_steps():
            self._core.set_paused(paused)
            self._update_if_due()

    def stop(self) -> None:
        """End waiting calls with an `EngineError`."""
        with self._between_steps(check=False):
            self._closed = True

    def _step(self) -> None:
        try:
            purpose, finished = self._core.step()
            self._update_if_due()
        except BaseException as error:
            self._failure = error
            raise
        if finished:
            self._finished[purpose].extend(finished)
            self._changed.notify_all()

    def _update_if_due(self) -> None:
        report = self._core.try_update()
        if report is not None:
            self._report = report

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineError(f"The generation engine failed while decoding: {self._failure!r}") from self._failure
        if self._closed:
            raise EngineError("The generation engine was stopped.")

    @contextmanager
    def _between_steps(self, check: bool = True) -> Iterator[None]:
        """Exclusive access; the thread that decodes makes way after its present step (a plain lock would not be fair)."""
        with self._guests_lock:
            self._guests += 1
        with self._changed:
            with self._guests_lock:
                self._guests -= 1
            try:
                if check:
                    self._raise_if_dead()
                yield
            finally:
                self._changed.notify_all()
