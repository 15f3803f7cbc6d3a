"""An engine that replays given completions: for tests, dry runs and recorded runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from lit_asyncrl.errors import EngineError
from lit_asyncrl.generation.hf_core import PURPOSES
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, NamedTensors, Purpose
from lit_asyncrl.waits import Changed


class ScriptedEngine(GenerationEngine):
    """Answers every request at once with what a function says.

    Args:
        respond: (request, served version) -> completion.
        score_probe: (version, weights, probe ids) -> log-probs of the probe, for the proof of delivery; by default zeros.
    """

    def __init__(
        self,
        respond: Callable[[GenerationRequest, int], Completion],
        score_probe: Callable[[int, NamedTensors, Sequence[int]], Sequence[float]] | None = None,
    ) -> None:
        self._respond = respond
        self._score_probe = score_probe or (lambda version, weights, ids: [0.0] * (len(ids) - 1))
        self._changed = Changed()
        self._waiting: deque[GenerationRequest] = deque()
        self._finished: dict[Purpose, list[Completion]] = {purpose: [] for purpose in PURPOSES}
        self._report: DeliveryReport | None = None
        self._version = -1
        self._paused = False
        self._running = False
        self._generated_tokens = 0

    def start(
        self, policy_path: str, *, eos_token_ids: Sequence[int], probe_ids: Sequence[int], max_model_len: int | None
    ) -> None:
        """Ready at once; nothing is loaded."""
        self._probe_ids = tuple(probe_ids)
        self._running = True

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue the requests' answers."""
        with self._changed:
            self._waiting.extend(requests)
            self._answer_waiting()

    def completions(self, timeout_s: float) -> list[Completion]:
        """Training answers."""
        return self._take("train", timeout_s)

    def evaluation_completions(self, timeout_s: float) -> list[Completion]:
        """Evaluation answers."""
        return self._take("evaluation", timeout_s)

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """Serve the version from now on."""
        with self._changed:
            self._version = version
            self._report = DeliveryReport(version, self._score_probe(version, weights, self._probe_ids), pause_s=0.0)

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """The report of `begin_update`."""
        report, self._report = self._report, None
        assert report is not None, "finish_update without begin_update"
        return report

    def pause(self) -> None:
        """Answer no training request until `resume`."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Undo `pause`."""
        with self._changed:
            self._paused = False
            self._answer_waiting()

    def stop(self) -> None:
        """End waiting calls with an `EngineError`."""
        with self._changed:
            self._running = False
            self._changed.notify_all()

    @property
    def num_threads(self) -> int:
        """None of its own."""
        return 0

    @property
    def generated_tokens(self) -> int:
        """Training tokens answered so far."""
        return self._generated_tokens

    def _take(self, purpose: Purpose, timeout_s: float) -> list[Completion]:
        with self._changed:
            self._changed.wait_until(lambda: not self._running or bool(self._finished[purpose]), timeout_s)
            if not self._running:
                raise EngineError("The scripted engine is not running.")
            taken, self._finished[purpose] = self._finished[purpose], []
            return taken

    def _answer_waiting(self) -> None:
        held: deque[GenerationRequest] = deque()
        for request in self._waiting:
            if self._paused and request.purpose == "train":
                held.append(request)
                continue
            completion = self._respond(request, self._version)
            self._finished[request.purpose].append(completion)
            if request.purpose == "train":
                self._generated_tokens += len(completion.token_ids)
        self._waiting = held
        self._changed.notify_all()
