"""The scripted engine that answers from a record, each training request in its recorded turn."""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from lit_asyncrl.errors import StopRequested
from lit_asyncrl.generation.scripted import ScriptedEngine
from lit_asyncrl.recording.events import Event, checksum, completion_of, newest_version
from lit_asyncrl.types import Completion, GenerationRequest, NamedTensors

ScoreProbe = Callable[[Sequence[int], NamedTensors], Sequence[float]]
"""(probe, weights) -> the trainer's log-probs of the probe under these weights, nats."""


class ReplayEngine(ScriptedEngine):
    """Gives the recorded answers in the recorded order; see `replay`. Evaluations are answered at once.

    Args:
        events: of the record.
        score_probe: called in `begin_update`, in the trainer's thread: the trainer proves the delivery to itself.
    """

    def __init__(self, events: Sequence[Event], score_probe: ScoreProbe) -> None:
        super().__init__(self._recorded, lambda version, weights, ids: score_probe(ids, weights))
        self._script: deque[Event] = deque(event for event in events if event[0] in ("completion", "take"))
        self._evaluations: dict[tuple[int, int, int], deque[Event]] = defaultdict(deque)  # by version, seed, checksum
        for event in events:
            if event[0] == "evaluation":
                self._evaluations[newest_version(event), event[1], event[2]].append(event)
        self._newest = -1  # version that was ever served: a lagged run goes back to older ones after an evaluation
        self._takes_passed = self._num_taken = 0

    def advance(self, num_taken: int) -> None:
        """So many batches were taken: answers recorded after them may be given."""
        with self._changed:
            self._num_taken = num_taken
            self._answer_waiting()

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """Serve the version from now on."""
        self._newest = max(self._newest, version)
        super().begin_update(version, weights)

    def _next_due(self) -> GenerationRequest | None:
        """The request of the next recorded answer, if it was sent and its weights were served; passes over taken batches."""
        while self._script and self._script[0][0] == "take" and self._takes_passed < self._num_taken:
            self._script.popleft()
            self._takes_passed += 1
        if not self._script or self._script[0][0] == "take" or newest_version(self._script[0]) > self._newest:
            return None
        return self._waiting["train"].get(self._script[0][1])

    def _recorded(self, request: GenerationRequest, version: int) -> Completion:
        if request.purpose == "train":
            return completion_of(self._script.popleft()[1:])
        recorded = self._evaluations.get((version, request.seed, checksum(request.prompt_ids)))
        if not recorded:
            warnings.warn(
                f"The record holds no evaluation of request {request.request_id} at policy_version {version}: the replay ends.",
                stacklevel=2,
            )
            raise StopRequested("the end of the record")
        answer = completion_of(recorded.popleft()[3:])
        answer.request_id = request.request_id
        return answer
