"""Held-out evaluation: accuracy, mean@n and pass@k of named sets, each at exactly one policy version; nothing of it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import comb
from typing import Any

from lit_asyncrl.errors import ConfigurationError, EngineError, WaitTimeoutError
from lit_asyncrl.interfaces import GenerationEngine, RewardScorer, Task
from lit_asyncrl.supervisor import POLL_S, Supervisor
from lit_asyncrl.types import Completion, GenerationRequest, Prompt, Response, SamplingParams
from lit_asyncrl.waits import Countdown


@dataclass(frozen=True)
class EvaluationSet:
    """A named held-out set and how its responses are sampled.

    Args:
        num_prompts: prompts per evaluation during training.
        final_num_prompts: prompts in the first and the last evaluation of a run, and in `validate` and `test`.
        num_samples: responses per prompt; accuracy is their mean (mean@n), and pass@k is reported for k = num_samples.
        temperature: 0 is greedy.
        max_new_tokens: response budget; None: as in training.
        top_p, top_k, min_p: restrictions of the distribution, allowed here.
        task: whose held-out split to use; None: the training task's.
    """

    num_prompts: int = 256
    final_num_prompts: int = 1024
    num_samples: int = 1
    temperature: float = 0.0
    max_new_tokens: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    task: Task | None = None

    def check(self, name: str) -> None:
        """Refuse values that cannot be run.

        Raises:
            ConfigurationError: naming the set and the value.
        """
        for key in ("num_prompts", "final_num_prompts", "num_samples", "max_new_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigurationError(f"data.evaluation.{name}.{key} must be at least 1, got {value}.")
        for key, value, within in (
            ("top_p", self.top_p, 0 < self.top_p <= 1),
            ("top_k", self.top_k, self.top_k >= 0),
            ("min_p", self.min_p, 0 <= self.min_p <= 1),
        ):
            if not within:
                raise ConfigurationError(
                    f"data.evaluation.{name}.{key} must be in its range, got {value} (top_p in (0, 1], top_k at least 0, min_p "
                    "in [0, 1])."
                )
        if self.temperature < 0:
            raise ConfigurationError(f"data.evaluation.{name}.temperature must be 0 or above, got {self.temperature}.")
        if self.temperature == 0 and self.num_samples > 1:
            raise ConfigurationError(
                f"data.evaluation.{name}.num_samples must be 1 at temperature 0, got {self.num_samples} (all samples would be "
                "equal). Set a temperature above 0."
            )

    def sampling(self, train_max_new_tokens: int) -> SamplingParams:
        """Sampling parameters of its requests."""
        budget = train_max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        return SamplingParams(self.temperature, budget, self.top_p, self.top_k, self.min_p)


@dataclass(frozen=True)
class EvaluationBatch:
    """A whole held-out set, ready to sample. Filled by the datamodule; its prompts' `group_id` is their position in the set."""

    name: str
    prompts: tuple[Prompt, ...]
    num_samples: int
    sampling: SamplingParams


@dataclass
class EvaluationResult:
    """What one evaluation found.

    Attributes:
        version: the one policy version that sampled everything.
        metrics: `accuracy` (= mean@n), `pass@k`, `reward`, `response_length` (tokens), `truncated_share`, one mean per reward.
        records: one dict per response, for JSONL.
    """

    version: int
    metrics: dict[str, float]
    records: list[dict[str, Any]] = field(default_factory=list)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased probability that at least one of k samples is correct: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al., Evaluating Large Language Models Trained on Code (2021), eq. 1.

    Example:
        >>> pass_at_k(4, 1, 2)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        0.5
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


class Evaluator:
    """Samples and scores evaluation batches with a running engine.

    Args:
        engine: serving the version to evaluate; it decodes evaluation requests apart from training ones.
        scorer: runs the rewards.
        tasks: tasks by name.
        decode: token ids -> text, special tokens removed.
        supervisor: bounds the wait.
        timeout_s: seconds for one whole evaluation.
        while_waiting: called now and then, in the caller's thread.

    Attributes:
        num_answers: responses received so far.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        scorer: RewardScorer,
        tasks: Mapping[str, Task],
        decode: Callable[[Sequence[int]], str],
        *,
        supervisor: Supervisor,
        timeout_s: float,
        while_waiting: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._tasks = tasks
        self._decode = decode
        self._supervisor = supervisor
        self._timeout_s = timeout_s
        self._while_waiting = while_waiting
        self._ids = count()
        self.num_answers = 0

    def run(self, batch: EvaluationBatch) -> EvaluationResult:
        """Evaluate one set.

        Raises:
            WaitTimeoutError: not finished within `timeout_s`.
            EngineError: responses of more than one version.
            RewardError: a reward failed and failures are not skipped.
            StopRequested: the run was asked to stop meanwhile.
        """
        completions = self._sample(batch)
        versions = {v for c in completions for v in c.token_versions}
        if len(versions) != 1:
            raise EngineError(f"Evaluation {batch.name!r} must be of one policy version, got {sorted(versions)}.")
        return self._summarize(batch, completions, versions.pop())

    def _sample(self, batch: EvaluationBatch) -> list[Completion]:
        n = batch.num_samples
        order: dict[int, int] = {}
        requests = []
        for i, prompt in enumerate(batch.prompts):
            for j in range(n):
                request_id = next(self._ids)
                order[request_id] = i * n + j
                requests.append(
                    GenerationRequest(request_id, prompt.token_ids, batch.sampling, (prompt.seed + j) % 2**63, "evaluation")
                )
        results: list[Completion | None] = [None] * len(requests)
        missing = len(requests)
        countdown = Countdown(self._timeout_s, POLL_S)
        self._engine.submit(requests)
        while missing:
            self._supervisor.raise_if_stopping()
            self._while_waiting()
            for completion in self._engine.evaluation_completions(POLL_S):
                if completion.request_id in order:  # others: left from an evaluation that was broken off
                    results[order[completion.request_id]] = completion
                    missing -= 1
                    self.num_answers += 1
            if missing and not countdown.left_s:
                raise WaitTimeoutError(
                    f"Evaluation {batch.name!r} had {missing} of {len(requests)} responses missing after {self._timeout_s:.0f} s."
                )
        return [c for c in results if c is not None]

    def _summarize(self, batch: EvaluationBatch, completions: Sequence[Completion], version: int) -> EvaluationResult:
        n = batch.num_samples
        records: list[dict[str, Any]] = []
        passes, failed = [], 0
        for i, prompt in enumerate(batch.prompts):
            members = completions[i * n : (i + 1) * n]
            task = self._tasks[prompt.example.task]
            texts = [Response(self._decode(c.token_ids), len(c.token_ids)) for c in members]
            components = self._scorer.score(task, texts, prompt.example)
            if components is None:
                failed += 1
                continue
            correct = [task.is_correct(c) for c in components]
            passes.append(pass_at_k(n, sum(correct), n))
            for member, text, values, is_correct in zip(members, texts, components, correct, strict=True):
                records.append(_record(prompt, member, text, values, is_correct, task, version))
        metrics = _means(records)
        if n > 1 and passes:
            metrics[f"pass@{n}"] = sum(passes) / len(passes)
        metrics["failed_prompts"] = float(failed)
        return EvaluationResult(version, metrics, records)


def _record(
    prompt: Prompt, completion: Completion, text: str, values: Sequence[float], correct: bool, task: Task, version: int
) -> dict[str, Any]:
    return {
        "task": prompt.example.task,
        "prompt_index": prompt.example.index,
        "prompt": prompt.example.prompt,
        "answer": prompt.example.answer,
        "completion": text,
        "reward": sum(r.weight * v for r, v in zip(task.rewards, values, strict=True)),
        "reward_components": {r.name: v for r, v in zip(task.rewards, values, strict=True)},
        "correct": correct,
        "response_length": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "policy_version": version,
    }


def _means(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    total = len(records)
    if total == 0:
        return {"accuracy": float("nan")}
    metrics = {
        "accuracy": sum(r["correct"] for r in records) / total,
        "reward": sum(r["reward"] for r in records) / total,
        "response_length": sum(r["response_length"] for r in records) / total,
        "truncated_share": sum(r["finish_reason"] == "length" for r in records) / total,
    }
    by_name: dict[str, list[float]] = {}
    for record in records:
        for name, value in record["reward_components"].items():
            by_name.setdefault(name, []).append(value)
    return metrics | {f"reward/{name}": sum(values) / len(values) for name, values in by_name.items()}
