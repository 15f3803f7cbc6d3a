"""An engine that answers from a record."""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from lit_asyncrl.errors import EngineError, StopRequested
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.recording.events import Event, checksum, completion_of, newest_version
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, NamedTensors
from lit_asyncrl.waits import Changed

ScoreProbe = Callable[[Sequence[int], NamedTensors], Sequence[float]]
"""(probe, weights) -> the trainer's log-probs of the probe under these weights, nats."""


class ReplayEngine(GenerationEngine):
    """Gives the recorded answers in the recorded order; see `replay`.

    Args:
        events: of the record.
        score_probe: called in `begin_update`, in the trainer's thread.
    """

    def __init__(self, events: Sequence[Event], score_probe: ScoreProbe) -> None:
        self._score_probe = score_probe
        self._changed = Changed()
        self._script: deque[Event] = deque(event for event in events if event[0] in ("completion", "take"))
        self._evaluations: dict[tuple[int, int, int], deque[Event]] = defaultdict(deque)  # by version, seed, checksum
        for event in events:
            if event[0] == "evaluation":
                self._evaluations[newest_version(event), event[1], event[2]].append(event)
        self._submitted: set[int] = set()
        self._evaluated: list[Completion] = []
        self._report: DeliveryReport | None = None
        self._version = self._newest = -1
        self._takes_passed = self._num_taken = 0
        self._paused = False
        self._running = False
        self._generated_tokens = 0

    def start(
        self, policy_path: str, *, eos_token_ids: Sequence[int], probe_ids: Sequence[int], max_model_len: int | None
    ) -> None:
        """Ready at once; nothing is loaded."""
        self._probe_ids = tuple(probe_ids)
        self._running = True

    def advance(self, num_taken: int) -> None:
        """So many batches were taken: answers recorded after them may be given."""
        with self._changed:
            self._num_taken = num_taken
            self._changed.notify_all()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Answer training requests when it is their turn, and those of an evaluation at once.

        Raises:
            StopRequested: the record has no such evaluation.
        """
        with self._changed:
            self._submitted |= {request.request_id for request in requests if request.purpose == "train"}
            evaluations = [request for request in requests if request.purpose == "evaluation"]
            answers = [self._evaluation(request) for request in evaluations]
            self._evaluated += [answer for answer in answers if answer is not None]
            self._changed.notify_all()
        if None in answers:
            warnings.warn(
                f"The record holds no evaluation of these {len(evaluations)} responses at policy_version {self._version}: the "
                "replay ends.",
                stacklevel=2,
            )
            raise StopRequested("the end of the record")

    def _evaluation(self, request: GenerationRequest) -> Completion | None:
        recorded = self._evaluations.get((self._version, request.seed, checksum(request.prompt_ids)))
        if not recorded:
            return None
        answer = completion_of(recorded.popleft()[3:])
        answer.request_id = request.request_id
        return answer

    def completions(self, timeout_s: float) -> list[Completion]:
        """Recorded training answers whose turn it is."""
        with self._changed:
            self._changed.wait_until(lambda: not self._running or self._is_due(), timeout_s)
            self._check_running()
            answers = []
            while self._is_due():
                answer = completion_of(self._script.popleft()[1:])
                self._submitted.remove(answer.request_id)
                self._generated_tokens += len(answer.token_ids)
                answers.append(answer)
            return answers

    def _is_due(self) -> bool:
        """Whether an answer may be given; passes over batches that were taken."""
        while self._script and self._script[0][0] == "take" and self._takes_passed < self._num_taken:
            self._script.popleft()
            self._takes_passed += 1
        if self._paused or not self._script or self._script[0][0] == "take":
            return False
        event = self._script[0]
        return event[1] in self._submitted and newest_version(event) <= self._newest

    def evaluation_completions(self, timeout_s: float) -> list[Completion]:
        """Answers to evaluations."""
        with self._changed:
            self._changed.wait_until(lambda: not self._running or bool(self._evaluated), timeout_s)
            self._check_running()
            answers, self._evaluated = self._evaluated, []
            return answers

    def _check_running(self) -> None:
        if not self._running:
            raise EngineError("The engine that replays a record is not running.")

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """Serve the version from now on; the trainer proves it to itself."""
        report = DeliveryReport(version, self._score_probe(self._probe_ids, weights), pause_s=0.0)
        with self._changed:
            self._version = version
            self._newest = max(self._newest, version)
            self._report = report
            self._changed.notify_all()

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """The report of `begin_update`."""
        report, self._report = self._report, None
        assert report is not None, "finish_update without begin_update"
        return report

    def pause(self) -> None:
        """Give no training answer until `resume`."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Undo `pause`."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def stop(self) -> None:
        """End waiting calls."""
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
