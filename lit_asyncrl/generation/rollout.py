"""RolloutWorker: prompts -> engine -> rewards -> trajectory groups -> pool, in the background.

Three threads, each blocking on one thing only:

    dispatcher: waits for admission by the pool, then sends whole groups of requests to the engine
    collector:  waits for completions and sorts them into their groups
    scorer:     waits for complete groups whose weights are proved, scores them, and hands them to the pool

So what the engine has answered is in its group at once, however long rewards take: a checkpoint loses none of it.
A fault in any of them ends the run through the supervisor with its original cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lit_asyncrl.errors import EngineError, StopRequested
from lit_asyncrl.generation.groups import build_group, check_completion, outcome_of, proved_part
from lit_asyncrl.interfaces import GenerationEngine, PromptStream, RewardScorer, Task, TrajectorySink
from lit_asyncrl.supervisor import POLL_S, Supervisor
from lit_asyncrl.timing import StepTimes
from lit_asyncrl.types import Completion, GenerationRequest, Prompt, Response, SamplingParams
from lit_asyncrl.waits import Changed, Flag, Thread, start_thread

UNPROVED_POLL_S = 0.005
"""Seconds between two looks for the proof of the weights that complete groups wait for."""

Truncated = Literal["train", "mask", "drop"]
ZeroVariance = Literal["keep", "drop"]

_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive sample indices over the seed space


def sample_seed(prompt: Prompt, index: int) -> int:
    """Seed in [0, 2^63) of sample `index` of the prompt's group."""
    return (prompt.seed + (index + 1) * _SEED_STEP) % 2**63


class _PendingGroup:
    """A group outside the pool: its finished members, and of the others what a resumed run had sampled before it."""

    __slots__ = ("completed_version", "completions", "newest_version", "partials", "prompt", "tokens")

    def __init__(self, prompt: Prompt, group_size: int, carried: Iterable[Completion] = ()) -> None:
        self.prompt = prompt
        self.completions: list[Completion | None] = [None] * group_size
        self.partials: dict[int, Completion] = {}  # by member
        for completion in carried:
            index = completion.request_id % group_size
            if completion.finish_reason == "abort":
                self.partials[index] = completion
            else:
                self.completions[index] = completion
        self.completed_version = -1  # served when the last member finished: time that rewards take counts as waiting
        self.tokens = sum(len(c.token_ids) for c in carried)  # that the ledger knows of
        self.newest_version = max((v for c in carried for v in c.token_versions), default=-1)

    @property
    def missing(self) -> list[int]:
        """Members that are not finished."""
        return [i for i, completion in enumerate(self.completions) if completion is None]

    def collect(self, index: int, completion: Completion) -> int:
        """Take over a finished member; returns how many of its tokens are new."""
        partial = self.partials.pop(index, None)
        new = len(completion.token_ids) - (len(partial.token_ids) if partial else 0)
        self.completions[index] = completion
        self.tokens += new
        self.newest_version = max([self.newest_version, *completion.token_versions])
        return new


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group outside the pool, as a checkpoint holds it.

    Attributes:
        prompt: to send again, under the same group id.
        members: what is sampled of its members: finished ones, and partial ones with the finish reason `abort`.
    """

    prompt: Prompt
    members: list[Completion]


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
        vocab_size: number of the policy's embeddings, for the check of answers; None: any token id.
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
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
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
        self._complete: list[_PendingGroup] = []  # not scored yet; nor those whose weights are not proved to be served
        self._carried: dict[int, list[Completion]] = {}
        self._lock = Changed()
        self._drawing = Changed()  # taken before the other: it is held while a task's own code runs, which may take its time
        self._is_drawing = False
        self._closing = Flag()
        self._threads: list[Thread] = []
        self.collected_tokens = 0  # of finished responses, as far as this process sampled them
        self._idle_s = 0.0
        self._idle_since: float | None = None

    def carry(self, members: Mapping[int, Sequence[Completion]]) -> None:
        """Go on with what a checkpoint holds of groups that will be drawn again: finished and partial members by group id."""
        self._carried = {group_id: list(completions) for group_id, completions in members.items()}

    def start(self) -> None:
        """Start the threads."""
        self._idle_since = time.monotonic()
        loops = {"dispatcher": self._dispatch_loop, "collector": self._collect_loop, "scorer": self._score_loop}
        for name, target in loops.items():
            self._threads.append(start_thread(partial(self._guarded, target, f"rollout {name}"), f"rollout-{name}"))

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the threads; requests in flight stay with the engine, their prompts stay outstanding."""
        self._closing.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads.clear()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold every group where it is: none enters or leaves, and no member arrives."""
        with self._drawing, self._lock:
            yield

    def open_groups(self) -> list[OpenGroup]:
        """Groups that were sent and have not reached the pool, in dispatch order, with all that is sampled of them so far.

        Responses are cut at their first token of weights that are not proved to be served: a checkpoint outlives the proof. What
        the engine has answered and the collector not yet seen is not in them. Call it `frozen`.
        """
        size, served = self._config.group_size, self._served_version()
        sampled: dict[int, Completion] = {}
        for pending in self._pending.values():
            for index, partial_member in pending.partials.items():
                sampled[pending.prompt.group_id * size + index] = partial_member
        for completion in self._engine.partial_completions():
            known = sampled.get(completion.request_id)
            if known is None or len(known.token_ids) < len(completion.token_ids):
                sampled[completion.request_id] = completion
        groups = []
        for group_id in sorted(self._pending):
            pending = self._pending[group_id]
            members = [c or sampled.get(group_id * size + i) for i, c in enumerate(pending.completions)]
            proved = [proved_part(member, served) for member in members if member is not None]
            groups.append(OpenGroup(pending.prompt, [member for member in proved if member is not None]))
        return groups

    @property
    def carried(self) -> dict[int, list[Completion]]:
        """What `carry` brought of groups that were not drawn yet."""
        return dict(self._carried)

    @property
    def exhausted(self) -> bool:
        """Whether the prompt source has ended and nothing is in flight."""
        with self._lock:
            return not self._is_drawing and not self._pending and self._prompts.ended

    @property
    def unfinished_tokens(self) -> int:
        """Tokens that the engine has reported for responses it has not finished."""
        return max(0, self._engine.generated_tokens - self._engine.lost_tokens - self.collected_tokens)

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
        self._complete = []
        return len(doubtful)

    @property
    def idle_s(self) -> float:
        """Seconds during which no training request was in flight (the engine waited for admission)."""
        with self._lock:
            now = time.monotonic()
            return self._idle_s + (now - self._idle_since if self._idle_since is not None else 0.0)

    def _guarded(self, target: Callable[[], None], who: str) -> None:
        try:
            with self._supervisor.part(who):
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
        with self._drawing:
            self._is_drawing = True
            prompts = self._prompts.next_prompts(num_prompts)
            with self._lock:
                self._add(prompts)
                self._is_drawing = False
        return prompts

    def _add(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            carried = self._carried.pop(prompt.group_id, [])
            pending = self._pending[prompt.group_id] = _PendingGroup(prompt, self._config.group_size, carried)
            self._record(pending)
        if prompts and self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    def _record(self, pending: _PendingGroup) -> None:
        """Tell the ledger where a group is, and the scorer if it is complete; the lock is held."""
        complete = not pending.missing
        tokens = pending.tokens or None
        self._sink.record(pending.prompt.group_id, "scoring" if complete else "in_flight", tokens=tokens)
        if complete:
            pending.completed_version = self._served_version()
            self._complete.append(pending)
            self._lock.notify_all()

    def _send(self, prompts: Sequence[Prompt]) -> None:
        size, sampling = self._config.group_size, self._config.sampling
        with self._lock:  # a group that was carried complete may be in the pool by now
            groups = [group for prompt in prompts if (group := self._pending.get(prompt.group_id))]
            requests = [
                GenerationRequest(
                    group.prompt.group_id * size + i,
                    group.prompt.token_ids,
                    sampling,
                    sample_seed(group.prompt, i),
                    partial=group.partials.get(i),
                )
                for group in groups
                for i in group.missing
            ]
        if requests:
            self._engine.submit(requests)

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
        check_completion(completion, pending.prompt, pending.partials.get(index), self._vocab_size)
        with self._lock:
            self.collected_tokens += pending.collect(index, completion)
            self._record(pending)

    def _score_loop(self) -> None:
        while not self._closing.is_set():
            self._supervisor.raise_if_stopping()
            proved = self._take_proved()
            for pending in proved:
                self._finish(pending)
            if self._complete and not proved:
                self._closing.wait(UNPROVED_POLL_S)

    def _take_proved(self) -> list[_PendingGroup]:
        """Complete groups whose every token is of weights that the engine provably served; waits a moment for the first."""
        with self._lock:
            self._lock.wait_until(lambda: bool(self._complete), POLL_S)
            served, complete = self._served_version(), self._complete
            self._complete = [pending for pending in complete if pending.newest_version > served]
            return [pending for pending in complete if pending.newest_version <= served]

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
            completed_version=pending.completed_version,
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
