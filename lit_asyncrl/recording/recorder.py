"""Records a run: what its engine answers, what is sent, and what its pool decides, in order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from lit_asyncrl.interfaces import GenerationEngine, PromptStream
from lit_asyncrl.pool.tape import Decision
from lit_asyncrl.recording.events import (
    added_event,
    completion_event,
    dispatch_event,
    evaluation_event,
    take_event,
)
from lit_asyncrl.recording.file import Header, RecordWriter
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, NamedTensors, Prompt, TrajectoryGroup


class RunRecorder:
    """The pool's `Tape` that writes; it decides nothing.

    Args:
        path: of the new file.
        header: what a replay has to have in common with this run.
        engine: what samples.
        prompts: what is sent.
        supervisor: gets faults of the writer.

    Attributes:
        engine, prompts: to be used in place of those given.

    Raises:
        ConfigurationError: the file exists or cannot be written.
    """

    def __init__(
        self, path: str, header: Header, engine: GenerationEngine, prompts: PromptStream, supervisor: Supervisor
    ) -> None:
        self._writer = RecordWriter(path, supervisor)
        self._writer.start(header)
        self.engine = RecordingEngine(engine, self._writer)
        self.prompts = RecordingPrompts(prompts, self._writer)

    def next_decision(self, policy_version: int) -> Decision | None:
        """None: the sampler decides."""
        return None

    def taken(self, decision: Decision) -> None:
        """Write a decision."""
        self._writer.put(take_event, decision)

    def added(self, group: TrajectoryGroup) -> None:
        """Write that a group has reached the pool."""
        self._writer.put(added_event, group.group_id, group.rewards)

    def left(self, group_id: int, state: str, reason: str) -> None:
        """Write that a group has not."""
        self._writer.put(_plain, "left", group_id, state, reason)

    def missing(self, decision: Decision, group_ids: set[int]) -> None:
        """Not called: nothing was decided before."""

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class RecordingPrompts:
    """Prompts of a source, each written when it is given out."""

    def __init__(self, prompts: PromptStream, writer: RecordWriter) -> None:
        self._prompts = prompts
        self._writer = writer

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        """As the source's."""
        prompts = self._prompts.next_prompts(num_prompts)
        for prompt in prompts:
            self._writer.put(dispatch_event, prompt)
        return prompts

    @property
    def ended(self) -> bool:
        """As the source's."""
        return self._prompts.ended


class RecordingEngine(GenerationEngine):
    """An engine whose answers are written as they arrive; in everything else the engine itself."""

    def __init__(self, engine: GenerationEngine, writer: RecordWriter) -> None:
        self._engine = engine
        self._writer = writer
        self._lock = threading.Lock()
        self._evaluations: dict[int, GenerationRequest] = {}  # unanswered

    @property
    def rounds_weights(self) -> bool:  # type: ignore[override]
        """As the engine's."""
        return self._engine.rounds_weights

    def start(
        self, policy_path: str, *, eos_token_ids: Sequence[int], probe_ids: Sequence[int], max_model_len: int | None
    ) -> None:
        """As the engine's."""
        self._engine.start(policy_path, eos_token_ids=eos_token_ids, probe_ids=probe_ids, max_model_len=max_model_len)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """As the engine's; evaluations are remembered until they are answered."""
        with self._lock:
            self._evaluations |= {r.request_id: r for r in requests if r.purpose == "evaluation"}
        self._engine.submit(requests)

    def completions(self, timeout_s: float) -> list[Completion]:
        """As the engine's, written."""
        completions = self._engine.completions(timeout_s)
        for completion in completions:
            self._writer.put(completion_event, completion)
        return completions

    def evaluation_completions(self, timeout_s: float) -> list[Completion]:
        """As the engine's, written."""
        completions = self._engine.evaluation_completions(timeout_s)
        with self._lock:
            requests = [self._evaluations.pop(completion.request_id) for completion in completions]
        for request, completion in zip(requests, completions, strict=True):
            self._writer.put(evaluation_event, request.seed, request.prompt_ids, completion)
        return completions

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """As the engine's."""
        self._engine.begin_update(version, weights)

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """As the engine's."""
        return self._engine.finish_update(timeout_s)

    def partial_completions(self) -> list[Completion]:
        """As the engine's."""
        return self._engine.partial_completions()

    @property
    def lost_tokens(self) -> int:
        """As the engine's."""
        return self._engine.lost_tokens

    @property
    def silent_s(self) -> float:
        """As the engine's."""
        return self._engine.silent_s

    def pause(self) -> None:
        """As the engine's."""
        self._engine.pause()

    def resume(self) -> None:
        """As the engine's."""
        self._engine.resume()

    def stop(self) -> None:
        """As the engine's."""
        self._engine.stop()

    @property
    def num_threads(self) -> int:
        """As the engine's."""
        return self._engine.num_threads

    @property
    def generated_tokens(self) -> int:
        """As the engine's."""
        return self._engine.generated_tokens


def _plain(*values: Any) -> list[Any]:
    return list(values)
