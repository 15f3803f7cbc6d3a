"""RolloutWorker: prompts -> engine -> rewards -> trajectory groups -> pool, in the background.

Two threads, each blocking on one thing only:

    dispatcher: waits for admission by the pool, then sends whole groups of requests to the engine
    collector:  waits for completions, assembles groups, scores them, and hands them to the pool

A fault in either ends the run through the supervisor with its original cause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from lit_asyncrl.errors import EngineError, StopRequested
from lit_asyncrl.generation.groups import build_group, check_completion, outcome_of
from lit_asyncrl.interfaces import GenerationEngine, PromptStream, RewardScorer, Task, TrajectorySink
from lit_asyncrl.supervisor import POLL_S, Supervisor
from lit_asyncrl.timing import StepTimes
from lit_asyncrl.types import Completion, GenerationRequest, Prompt, Response, SamplingParams
from lit_asyncrl.waits import Flag, Thread, start_thread

UNPROVED_POLL_S = 0.005
"""Longest wait for completions, in seconds, while complete groups wait for the proof of their weights."""

Truncated = Literal["train", "mask", "drop"]
ZeroVariance = Literal["keep", "drop"]

_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive sample indices over the seed space


def sample_seed(prompt: Prompt, index: int) -> int:
    """Seed in [0, 2^63) of sample `index` of the prompt's group."""
    return (prompt.seed + (index + 1) * _SEED_STEP) % 2**63


@dataclass(slots=True)
class _PendingGroup:
    prompt: Prompt
    completions: list[Completion | None]
    missing: int = field(init=False)
    tokens: int = 0  # of the completions that are here
    newest_version: int = -1  # of their tokens

    def __post_init__(self) -> None:
        self.missing = len(self.completions)


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """What the rollout worker does with each group; every field is documented where the user sets it (`RolloutDataModule`)."""

    group_size: int
    sampling: SamplingParams
    truncated: Truncated = "train"
    zero_variance: ZeroVariance = "keep"
    max_dispatch_groups: int = 1024  # at least batch_groups, so that at age 0 a batch goes out in one message


class RolloutWorker:
    """Runs generation beside the trainer.

    Args:
        engine: started, and serving its first weights.
        prompts: where prompts come from.
        scorer: runs the rewards, bounded in time.
        sink: the pool.
        tasks: tasks by name, for their rewards.
        decode: token ids -> text, special tokens removed.
        config: group size, sampling, and what happens to truncated and zero-variance groups.
        served_version: the version the engine provably serves.
        supervisor: takes faults and bounds waits.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        prompts: PromptStream,
        scorer: RewardScorer,
        sink: TrajectorySink,
        tasks: Mapping[str, Task],
        decode: Callable[[Sequence[int]], str],
        config: RolloutConfig,
        *,
        served_version: Callable[[], int],
        supervisor: Supervisor,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._scorer = scorer
        self._sink = sink
        self._tasks = tasks
        self._decode = decode
        self._config = config
        self._served_version = served_version
        self._supervisor = supervisor
        self.times = StepTimes()
        self._pending: dict[int, _PendingGroup] = {}
        self._unproved: list[_PendingGroup] = []  # complete, with tokens of weights whose delivery is not proved yet
        self._lock = threading.Lock()
        self._closing = Flag()
        self._threads: list[Thread] = []
        self.collected_tokens = 0  # of finished responses, in this process
        self._idle_s = 0.0
        self._idle_since: float | None = None

    def start(self) -> None:
        """Start both threads."""
        self._idle_since = time.monotonic()
        for name, target in (("dispatcher", self._dispatch_loop), ("collector", self._collect_loop)):
            self._threads.append(start_thread(partial(self._guarded, target, f"rollout {name}"), f"rollout-{name}"))

    def stop(self, timeout_s: float = 10.0) -> None:
        """End both threads; requests in flight stay with the engine, their prompts stay outstanding."""
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout_s)
        self._threads.clear()

    @contextmanager
    def frozen(self) -> Iterator[list[Prompt]]:
        """Hold every group where it is (none enters or leaves) and give the outstanding prompts: for one consistent snapshot.

        Yields:
            Prompts dispatched whose group has not reached the pool, in dispatch order: what a resumed run must send again.
        """
        with self._lock:
            yield [self._pending[group_id].prompt for group_id in sorted(self._pending)]

    @property
    def exhausted(self) -> bool:
        """Whether the prompt source has ended and nothing is in flight."""
        with self._lock:
            return self._prompts.ended and not self._pending

    @property
    def unfinished_tokens(self) -> int:
        """Tokens that the engine has reported for responses it has not finished."""
        return max(0, self._engine.generated_tokens - self.collected_tokens)

    def fail_unproved(self, policy_version: int, reason: str) -> int:
        """Groups with a token of this version or a newer one fail: its delivery was not proved. Call after `stop`.

        No such group has reached the pool: complete ones wait here for the proof.

        Args:
            policy_version: of the weights.
            reason: as the ledger is told.

        Returns:
            How many groups failed.
        """
        doubtful = [pending for pending in self._pending.values() if pending.newest_version >= policy_version]
        for pending in doubtful:
            self._end(pending, "failed", reason)
        self._unproved = []
        return len(doubtful)

    @property
    def idle_s(self) -> float:
        """Seconds during which no training request was in flight (the engine waited for admission)."""
        with self._lock:
            now = time.monotonic()
            return self._idle_s + (now - self._idle_since if self._idle_since is not None else 0.0)

    def _guarded(self, target: Callable[[], None], who: str) -> None:
        try:
            target()
        except StopRequested:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the trainer thread, which re-raises it
            self._supervisor.fail(error, who)

    def _dispatch_loop(self) -> None:
        while not self._closing.is_set():
            self._supervisor.raise_if_stopping()
            admitted = self._sink.reserve(self._config.max_dispatch_groups, POLL_S)
            if not admitted:
                continue
            prompts = self._draw(admitted)
            if prompts:
                self._send(prompts)
            if len(prompts) < admitted:
                self._sink.release(admitted - len(prompts))
                self._closing.wait(POLL_S)  # the source has ended, unless a dropped prompt is sent again

    def _draw(self, num_prompts: int) -> list[Prompt]:
        """Take prompts from the source and make them outstanding in one step, so that no snapshot falls in between."""
        with self._lock:
            prompts = self._prompts.next_prompts(num_prompts)
            for prompt in prompts:
                self._pending[prompt.group_id] = _PendingGroup(prompt, [None] * self._config.group_size)
                self._sink.record(prompt.group_id, "in_flight")
            if prompts and self._idle_since is not None:
                self._idle_s += time.monotonic() - self._idle_since
                self._idle_since = None
        return prompts

    def _send(self, prompts: Sequence[Prompt]) -> None:
        size = self._config.group_size
        self._engine.submit(
            [
                GenerationRequest(p.group_id * size + i, p.token_ids, self._config.sampling, sample_seed(p, i))
                for p in prompts
                for i in range(size)
            ]
        )

    def _collect_loop(self) -> None:
        while not self._closing.is_set():
            self._supervisor.raise_if_stopping()
            for completion in self._engine.completions(UNPROVED_POLL_S if self._unproved else POLL_S):
                self._collect(completion)
            self._finish_proved()

    def _collect(self, completion: Completion) -> None:
        group_id, index = divmod(completion.request_id, self._config.group_size)
        with self._lock:
            pending = self._pending.get(group_id)
        if pending is None or pending.completions[index] is not None:
            raise EngineError(
                f"The engine answered request {completion.request_id} (group {group_id}, sample {index}), which is not "
                "outstanding."
            )
        check_completion(completion, pending.prompt)
        with self._lock:
            pending.completions[index] = completion
            pending.missing -= 1
            pending.tokens += len(completion.token_ids)
            pending.newest_version = max([pending.newest_version, *completion.token_versions])
            self.collected_tokens += len(completion.token_ids)
            self._sink.record(group_id, "scoring" if pending.missing == 0 else "in_flight", tokens=pending.tokens)
        if pending.missing == 0:
            self._unproved.append(pending)
            self._finish_proved()

    def _finish_proved(self) -> None:
        """Hand on the complete groups whose every token is of weights that the engine provably served; hold the others back."""
        served, complete = self._served_version(), self._unproved
        self._unproved = [pending for pending in complete if pending.newest_version > served]
        for pending in complete:
            if pending.newest_version <= served:
                self._finish(pending)

    def _finish(self, pending: _PendingGroup) -> None:
        """Score a group whose responses are all here, and hand it to the pool or say why not."""
        completions = [c for c in pending.completions if c is not None]
        prompt, task = pending.prompt, self._tasks[pending.prompt.example.task]
        if any(c.finish_reason == "abort" for c in completions):
            self._end(pending, "failed", "aborted member")
            return
        with self.times.measure("reward"):
            responses = [Response(self._decode(c.token_ids), len(c.token_ids)) for c in completions]
            components = self._scorer.score(task, responses, prompt.example)
        if components is None:
            self._end(pending, "failed", "reward")
            return
        self._sink.record(prompt.group_id, "scoring", outcome=outcome_of(completions, components, task))
        if self._config.truncated == "drop":
            kept = [i for i, c in enumerate(completions) if c.finish_reason != "length"]
            if len(kept) < min(2, len(completions)):
                self._end(pending, "dropped", "truncated")
                return
            completions, components = [completions[i] for i in kept], [components[i] for i in kept]
        group = build_group(
            prompt,
            completions,
            components,
            task,
            completed_version=self._served_version(),
            mask_truncated=self._config.truncated == "mask",
        )
        if self._config.zero_variance == "drop" and bool((group.rewards == group.rewards[0]).all()):
            self._end(pending, "dropped", "zero variance")
            return
        with self.times.measure("assemble"), self._lock:
            self._sink.add(group)
            self._forget(pending)

    def _end(self, pending: _PendingGroup, state: str, reason: str) -> None:
        with self._lock:
            self._sink.record(pending.prompt.group_id, state, tokens=pending.tokens, reason=reason)
            self._sink.release(1)
            self._forget(pending)

    def _forget(self, pending: _PendingGroup) -> None:
        del self._pending[pending.prompt.group_id]
        if not self._pending:
            self._idle_since = time.monotonic()
