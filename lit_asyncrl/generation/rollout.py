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
from typing import Any, Literal

import torch

from lit_asyncrl.errors import EngineError, StopRequested
from lit_asyncrl.interfaces import GenerationEngine, PromptStream, RewardScorer, Task, TrajectorySink
from lit_asyncrl.supervisor import POLL_S, Supervisor
from lit_asyncrl.timing import StepTimes
from lit_asyncrl.types import Completion, GenerationRequest, Prompt, SamplingParams, TrajectoryGroup

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
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._exhausted = False
        self._idle_s = 0.0
        self._idle_since: float | None = None

    def start(self) -> None:
        """Start both threads."""
        self._idle_since = time.monotonic()
        for name, target in (("dispatcher", self._dispatch_loop), ("collector", self._collect_loop)):
            thread = threading.Thread(target=self._guarded, args=(target, f"rollout {name}"), name=f"rollout-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

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
            return self._exhausted and not self._pending

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
                with self._lock:
                    self._exhausted = True
                return

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
            for completion in self._engine.completions(POLL_S):
                self._collect(completion)

    def _collect(self, completion: Completion) -> None:
        group_id, index = divmod(completion.request_id, self._config.group_size)
        with self._lock:
            pending = self._pending.get(group_id)
        if pending is None or pending.completions[index] is not None:
            raise EngineError(
                f"The engine answered request {completion.request_id} (group {group_id}, sample {index}), which is not "
                "outstanding."
            )
        _check(completion, pending.prompt)
        pending.completions[index] = completion
        pending.missing -= 1
        if pending.missing == 0:
            self._finish(pending)

    def _finish(self, pending: _PendingGroup) -> None:
        completions = [c for c in pending.completions if c is not None]
        prompt = pending.prompt
        tokens = sum(len(c.token_ids) for c in completions)
        self._sink.record(prompt.group_id, "scoring", tokens=tokens)
        if any(c.finish_reason == "abort" for c in completions):
            self._end(pending, "failed", tokens, "aborted member")
            return
        task = self._tasks[prompt.example.task]
        with self.times.measure("reward"):
            components = self._scorer.score(task, [self._decode(c.token_ids) for c in completions], prompt.example)
        if components is None:
            self._end(pending, "failed", tokens, "reward")
            return
        if self._config.truncated == "drop":
            kept = [i for i, c in enumerate(completions) if c.finish_reason != "length"]
            if len(kept) < min(2, len(completions)):
                self._end(pending, "dropped", tokens, "truncated")
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
            self._end(pending, "dropped", tokens, "zero variance")
            return
        with self.times.measure("assemble"), self._lock:
            self._sink.add(group)
            self._forget(pending)

    def _end(self, pending: _PendingGroup, state: str, tokens: int, reason: str) -> None:
        with self._lock:
            self._sink.record(pending.prompt.group_id, state, tokens=tokens, reason=reason)
            self._sink.release(1)
            self._forget(pending)

    def _forget(self, pending: _PendingGroup) -> None:
        del self._pending[pending.prompt.group_id]
        if not self._pending:
            self._idle_since = time.monotonic()


def _check(completion: Completion, prompt: Prompt) -> None:
    """Refuse an answer that cannot be trained on, naming the prompt."""
    n = len(completion.token_ids)
    if n == 0 and completion.finish_reason != "abort":
        problem: str | None = "no tokens"
    elif len(completion.behavior_logprobs) != n or len(completion.token_versions) != n:
        problem = f"{n} tokens, {len(completion.behavior_logprobs)} log-probs, {len(completion.token_versions)} versions"
    elif any(not (value <= 1e-4 and value > float("-inf")) for value in completion.behavior_logprobs):
        problem = "a log-prob that is NaN, infinite or above 0"
    else:
        problem = None
    if problem:
        raise EngineError(
            f"The engine's answer to prompt {prompt.example.index} of task {prompt.example.task!r} (group {prompt.group_id}) has "
            f"{problem}."
        )


def build_group(
    prompt: Prompt,
    completions: Sequence[Completion],
    components: Sequence[Sequence[float]],
    task: Task,
    *,
    completed_version: int,
    mask_truncated: bool = False,
) -> TrajectoryGroup:
    """Concatenate prompt and response of every member into the flat tensors of a `TrajectoryGroup`.

    Args:
        prompt: shared by the members.
        completions: G completions, none aborted.
        components: G lists of R unweighted reward values.
        task: gives the rewards' weights and names, and the accuracy criterion.
        completed_version: version served at completion.
        mask_truncated: leave truncated members in the baseline but train none of their tokens.
    """
    prompt_ids, n_prompt = list(prompt.token_ids), len(prompt.token_ids)
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for completion in completions:
        n = len(completion.token_ids)
        trained = not (mask_truncated and completion.finish_reason == "length")
        token_ids += prompt_ids + list(completion.token_ids)
        mask += [False] * n_prompt + [trained] * n
        logprobs += [0.0] * n_prompt + list(completion.behavior_logprobs)
        versions += [-1] * n_prompt + list(completion.token_versions)
    values = torch.tensor([list(c) for c in components], dtype=torch.float32)
    weights = torch.tensor([reward.weight for reward in task.rewards], dtype=torch.float32)
    return TrajectoryGroup(
        group_id=prompt.group_id,
        prompt_index=prompt.example.index,
        epoch=prompt.epoch,
        task=prompt.example.task,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        behavior_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        token_versions=torch.tensor(versions, dtype=torch.int32),
        lengths=torch.tensor([n_prompt + len(c.token_ids) for c in completions], dtype=torch.int64),
        rewards=values @ weights,
        reward_components=values,
        correct=torch.tensor([task.is_correct(c) for c in components], dtype=torch.bool),
        truncated=torch.tensor([c.finish_reason == "length" for c in completions], dtype=torch.bool),
        completed_version=completed_version,
        reward_names=tuple(reward.name for reward in task.rewards),
    )


def sample_record(group: TrajectoryGroup, decode: Callable[[Sequence[int]], str], index: int) -> dict[str, Any]:
    """Member `index` of a group as plain values for `save_rollouts` and the text samples."""
    start = int(group.lengths[:index].sum())
    stop = start + int(group.lengths[index])
    sampled = group.token_versions[start:stop] >= 0
    ids = group.token_ids[start:stop]
    versions = group.token_versions[start:stop][sampled]
    return {
        "group_id": group.group_id,
        "task": group.task,
        "prompt_index": group.prompt_index,
        "epoch": group.epoch,
        "sample": index,
        "prompt": decode(ids[~sampled].tolist()),
        "completion": decode(ids[sampled].tolist()),
        "reward": float(group.rewards[index]),
        "reward_components": dict(zip(group.reward_names, group.reward_components[index].tolist(), strict=True)),
        "correct": bool(group.correct[index]),
        "truncated": bool(group.truncated[index]),
        "first_version": int(versions.min()) if versions.numel() else None,
        "last_version": int(versions.max()) if versions.numel() else None,
    }
