"""An engine that replays given completions: for tests, dry runs and recorded runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lit_asyncrl.errors import EngineError
from lit_asyncrl.generation.hf_core import PURPOSES
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, NamedTensors, Purpose
from lit_asyncrl.waits import Changed


class ScriptedEngine(GenerationEngine):
    """Answers every request at once with what a function says; a request's `partial` takes the place of its first tokens.

    A subclass may let training requests wait for their turn (`_next_due`).

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
        self._waiting: dict[Purpose, dict[int, GenerationRequest]] = {purpose: {} for purpose in PURPOSES}  # by id
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
            for request in requests:
                self._waiting[request.purpose][request.request_id] = request
            self._answer_waiting()

    def completions(self, timeout_s: float) -> list[Completion]:
        """Training answers."""
        return self._take("train", timeout_s)

    def evaluation_completions(self, timeout_s: float) -> list[Completion]:
        """Evaluation answers."""
        return self._take("evaluation", timeout_s)

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """Serve the version from now on."""
        report = DeliveryReport(version, self._score_probe(version, weights, self._probe_ids), pause_s=0.0)
        with self._changed:
            self._version, self._report = version, report
            self._answer_waiting()

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """The report of `begin_update`."""
        report, self._report = self._report, None
        assert report is not None, "finish_update without begin_update"
        return report

    def partial_completions(self) -> list[Completion]:
        """Training answers that were not taken, and what held requests came with."""
        with self._changed:
            held = [(request.partial, request.request_id) for request in self._waiting["train"].values()]
            found = [*((answer, answer.request_id) for answer in self._finished["train"]), *held]
            return [
                replace(partial, request_id=request_id, finish_reason="abort")
                for partial, request_id in found
                if partial is not None and partial.token_ids
            ]

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
        """Training tokens answered so far, those of requests' `partial` left out."""
        return self._generated_tokens

    def _take(self, purpose: Purpose, timeout_s: float) -> list[Completion]:
        with self._changed:
            self._changed.wait_until(lambda: not self._running or bool(self._finished[purpose]), timeout_s)
            if not self._running:
                raise EngineError("The scripted engine is not running.")
            taken, self._finished[purpose] = self._finished[purpose], []
            return taken

    def _next_due(self) -> GenerationRequest | None:
        """The waiting training request to answer next, if any may be answered now; the lock is held."""
        return next(iter(self._waiting["train"].values()), None)

    def _answer_waiting(self) -> None:
        for request in list(self._waiting["evaluation"].values()):
            self._answer(request)
        while not self._paused and (due := self._next_due()) is not None:
            carried = 0 if due.partial is None else len(due.partial.token_ids)
            self._generated_tokens += len(self._answer(due).token_ids) - carried
        self._changed.notify_all()

    def _answer(self, request: GenerationRequest) -> Completion:
        del self._waiting[request.purpose][request.request_id]
        completion = _after_partial(request, self._respond(request, self._version))
        self._finished[request.purpose].append(completion)
        return completion


def _after_partial(request: GenerationRequest, answer: Completion) -> Completion:
    partial = request.partial
    if partial is None:
        return answer
    count = len(partial.token_ids)
    return Completion(
        answer.request_id,
        partial.token_ids + answer.token_ids[count:],
        partial.behavior_logprobs + answer.behavior_logprobs[count:],
        partial.token_versions + answer.token_versions[count:],
        answer.finish_reason,
    )
