"""Sends weights to the engine and proves each delivery; keeps lagged versions when a forced lag is asked for.

    trainer thread: publish(V) -- wait for the delivery before, copy out --> engine
    publisher thread:            finish_update -> compare the probe -> raise served_version -> on_delivered

An engine that was started anew has lost its weights (`DeliveryLost`, `needs_weights`): `redeliver_if_lost` sends what is due
again, from the trainer's thread, which alone may read the model.

A delivery is proved when the engine's log-probs on the probe sequence equal the trainer's for the version *sent*: version
strings, checksums and norms can all look right while a stale tensor is served.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lit_asyncrl.errors import AsyncRLError, ConfigurationError, DeliveryLost, WeightSyncError
from lit_asyncrl.generation.rehearsal import MIN_TOLERANCE, ProbeScorer, rehearse
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.supervisor import POLL_S, Supervisor
from lit_asyncrl.types import DeliveryReport, NamedTensors
from lit_asyncrl.waits import Changed, Thread, start_thread

WHO = "weight publisher"
EXACT_NOISE = 1e-3
"""Nats beyond which a difference at the first delivery is no rounding of float32 sums."""
ROUNDED_NOISE = 1.0
"""The same where the engine rounds its weights (bfloat16: 0.05 nats on average and 0.3 at most for 135M parameters)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version: its weights and the trainer's log-probs on the probe, in nats."""

    version: int
    weights: NamedTensors
    probe_logprobs: Sequence[float]


def check_delivery(report: DeliveryReport, sent: Snapshot, tolerance: float) -> None:
    """Compare the engine's answer with what was sent.

    Args:
        report: the engine's answer.
        sent: the version sent, with the trainer's log-probs of the probe.
        tolerance: largest absolute difference allowed, in nats.

    Raises:
        WeightSyncError: another version, another number of tokens, or a difference beyond the tolerance (or NaN).
    """
    if report.version != sent.version:
        raise WeightSyncError(f"The engine must serve version {sent.version}, which was sent, and reports {report.version}.")
    if len(report.probe_logprobs) != len(sent.probe_logprobs):
        raise WeightSyncError(
            f"The engine must score the {len(sent.probe_logprobs)} probe tokens of version {sent.version}, "
            f"and scored {len(report.probe_logprobs)}."
        )
    differences = [abs(a - b) for a, b in zip(report.probe_logprobs, sent.probe_logprobs, strict=True)]
    worst = max(range(len(differences)), key=lambda i: math.inf if math.isnan(differences[i]) else differences[i])
    if not differences[worst] <= tolerance:
        raise WeightSyncError(
            f"The engine must serve the weights of version {sent.version}: log-probs on the probe may differ by {tolerance:g} "
            f"nats, and differ by {differences[worst]:g} at token {worst + 1} (engine {report.probe_logprobs[worst]:.6f}, "
            f"trainer {sent.probe_logprobs[worst]:.6f}). The engine serves other weights, or computes in another precision."
        )


def largest_difference(report: DeliveryReport, sent: Snapshot) -> float:
    """Largest absolute difference of the probe's log-probs, in nats."""
    return max(abs(a - b) for a, b in zip(report.probe_logprobs, sent.probe_logprobs, strict=True))


class WeightPublisher:
    """See the module. All but `close` belongs to one thread, the trainer's.

    What was published may be sent again at any `wait_delivered`, `redeliver_if_lost` and `serve_current`: call them only while
    the weights are still those (without a lag they are not copied), which is so between `publish` and the next optimizer step.

    Args:
        engine: a started engine.
        supervisor: gets the faults of the publisher's thread and bounds its waits.
        publish_lag: how many versions the engine is kept behind, in updates; 0 sends each version at once.
        publish_lag_start: version up to which each is sent at once; the lag builds up from there.
        tolerance: largest allowed difference of probe log-probs, in nats; None: measured, ten times the difference at the first
            delivery, at least 2e-5 (float32 sums in another order).
        max_noise: nats that the first delivery may be off by when the tolerance is measured.
        timeout_s: longest wait for one delivery.
        needs_weights: whether the engine was started anew and serves nothing until weights are sent.
        on_delivered: called as `(version published, version served)` in the publisher's thread after each proved delivery.

    Attributes:
        deliveries: proved deliveries, those for evaluation included.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        *,
        supervisor: Supervisor,
        publish_lag: int = 0,
        publish_lag_start: int = 0,
        tolerance: float | None = None,
        max_noise: float = EXACT_NOISE,
        timeout_s: float = 60.0,
        needs_weights: Callable[[], bool] = lambda: False,
        on_delivered: Callable[[int, int], None] | None = None,
    ) -> None:
        if publish_lag < 0:
            raise ConfigurationError(f"publish_lag must be at least 0, got {publish_lag}.")
        self.deliveries = 0
        self._engine = engine
        self._supervisor = supervisor
        self._lag = publish_lag
        self._lag_start = publish_lag_start
        self._tolerance = tolerance
        self._max_noise = max_noise
        self._timeout_s = timeout_s
        self._needs_weights = needs_weights
        self._on_delivered = on_delivered or (lambda published, served: None)
        self._snapshots: deque[Snapshot] = deque(maxlen=publish_lag + 1)
        self._changed = Changed()
        self._in_flight: tuple[Snapshot, Callable[[], None]] | None = None
        self._due: tuple[Snapshot, Callable[[], None]] | None = None  # what the engine must serve
        self._lost = False  # its delivery, with the engine
        self._published_version = -1
        self._served_version = -1
        self._pause_s = 0.0
        self._closing = False
        self._thread: Thread | None = None

    @property
    def served_version(self) -> int:
        """Version that training responses are sampled with, proved; -1 before the first. Not moved by `serve_current`."""
        return self._served_version

    @property
    def mean_pause_s(self) -> float:
        """Mean seconds for which a delivery stopped decoding."""
        return self._pause_s / max(1, self.deliveries)

    def rehearse(self, version: int, weights: NamedTensors, score: ProbeScorer) -> None:
        """Prove, before anything is sampled, that every tensor reaches the engine; measures the tolerance unless one was given.

        Args:
            version: the trainer's `policy_version`, to be published next.
            weights: by Hugging Face name.
            score: the trainer's log-probs of the probe with some weights replaced, nats at temperature 1.

        Raises:
            WeightSyncError: naming the tensors that do not reach it.
        """

        def deliver(changed: NamedTensors) -> Sequence[float]:
            while True:
                self._supervisor.raise_if_stopping()
                self._engine.begin_update(version, changed)
                with contextlib.suppress(DeliveryLost):
                    return self._engine.finish_update(self._timeout_s).probe_logprobs

        measured = rehearse(
            weights, deliver, score, rounds_weights=self._engine.rounds_weights, max_noise=self._tolerance or self._max_noise
        )
        if self._tolerance is None:
            self._tolerance = measured

    def publish(self, version: int, weights: NamedTensors, probe_logprobs: Sequence[float]) -> None:
        """Hand over a new version; returns when `weights` may change, before the delivery is proved.

        Args:
            version: the trainer's `policy_version`.
            weights: by Hugging Face name.
            probe_logprobs: the trainer's log-probs of the probe under them, nats at temperature 1.

        Raises:
            WaitTimeoutError, StopRequested, or the fault of the delivery before.
        """
        self._wait_idle(self._timeout_s + 1.0)  # a delivery that was lost is not made up for: its weights have changed
        if self._lag:
            # The engine gets them only later: the trainer's tensors will have changed by then.
            weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        if version <= self._lag_start:
            self._snapshots.clear()
        self._snapshots.append(Snapshot(version, weights, list(probe_logprobs)))
        while len(self._snapshots) > 1 and self._snapshots[1].version <= version - self._lag:
            self._snapshots.popleft()  # several updates of a batch are published as one version
        self._published_version = version
        due = self._snapshots[0]

        def delivered() -> None:
            self._served_version = due.version
            self._on_delivered(version, due.version)

        if due.version == self._served_version and not self._lost and not self._needs_weights():
            self._due = (due, _nothing)
            delivered()
        else:
            self._send(due, delivered)

    def wait_delivered(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is under way; what was lost with the engine is sent again.

        Args:
            timeout_s: default: the publisher's own.

        Raises:
            WaitTimeoutError, StopRequested, or the fault of the delivery.
        """
        while True:
            self._wait_idle(self._timeout_s + 1.0 if timeout_s is None else timeout_s)
            if self._lost:
                self._supervisor.wait_for(
                    self._changed,
                    self._needs_weights,
                    timeout_s=math.inf,  # the engine's own start timeout ends it
                    who="trainer",
                    what="the restart of the generation engine",
                )
            if not self.redeliver_if_lost():
                return

    def redeliver_if_lost(self) -> bool:
        """Send what is due to an engine that was started anew and is ready for it; returns before the delivery is proved.

        Returns:
            Whether anything was sent.
        """
        if self._in_flight is not None or self._due is None or not self._needs_weights():
            return False
        self._send(*self._due)
        return True

    @contextmanager
    def serve_current(self) -> Iterator[int]:
        """Serve the newest version meanwhile, for evaluation; yields it.

        With a lag, training responses stand still, keep their cache, and go on under the lagged version afterwards. After an
        exception in the body the newest version stays (the engine still records the true version of every token).
        """
        self.wait_delivered()
        if self._served_version == self._published_version:
            yield self._published_version
            return
        self._engine.pause()
        try:
            self._send(self._snapshots[-1], _nothing)
            self.wait_delivered()
            yield self._published_version
            self._send(self._snapshots[0], _nothing)
            self.wait_delivered()
        except BaseException:
            with contextlib.suppress(AsyncRLError):  # of an engine that is dead: the fault that ended the body matters
                self._engine.resume()
            raise
        self._engine.resume()

    def close(self) -> None:
        """End the thread; idempotent. A delivery under way is given up (the thread ends with the engine at the latest)."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(1.0)

    def _wait_idle(self, timeout_s: float) -> None:
        self._supervisor.wait_for(
            self._changed, lambda: self._in_flight is None, timeout_s=timeout_s, who="trainer", what="the delivery of weights"
        )

    def _send(self, snapshot: Snapshot, delivered: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = start_thread(self._run, WHO)
        self._due, self._lost = (snapshot, delivered), False
        self._engine.begin_update(snapshot.version, snapshot.weights)
        with self._changed:
            self._in_flight = (snapshot, delivered)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_until(lambda: self._closing or self._in_flight is not None, POLL_S)
                in_flight = self._in_flight
                if self._closing:
                    return
            if in_flight is None:
                continue
            try:
                self._finish(*in_flight)
            except DeliveryLost:
                with self._changed:
                    self._in_flight, self._lost = None, True
                    self._changed.notify_all()
            except Exception as error:  # noqa: BLE001 - raised by the supervisor in the trainer's thread
                if not self._closing:
                    self._supervisor.fail(error, WHO)
                return

    def _finish(self, sent: Snapshot, delivered: Callable[[], None]) -> None:
        report = self._engine.finish_update(self._timeout_s)
        if self._tolerance is None:
            check_delivery(report, sent, self._max_noise)
            self._tolerance = max(MIN_TOLERANCE, 10.0 * largest_difference(report, sent))
        check_delivery(report, sent, self._tolerance)
        self.deliveries += 1
        self._pause_s += report.pause_s
        delivered()
        with self._changed:
            self._in_flight, self._due = None, (sent, _nothing)
            self._changed.notify_all()


def _nothing() -> None:
    """A delivery that nobody has to be told of."""
