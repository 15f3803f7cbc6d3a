"""How fast a run generates and trains, and how long its responses are: given, read from an earlier run, or measured."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.generation.rollout import build_group
from lit_asyncrl.policy import end_of_sequence_ids, probe_ids, resolve_policy_path, vocabulary_size
from lit_asyncrl.pool.collate import collate
from lit_asyncrl.pool.ledger import INTERRUPTED, UNFINISHED
from lit_asyncrl.pool.records import TakenGroup
from lit_asyncrl.simulation.lengths import LengthDistribution, LengthShape, MeasuredLengths, lengths_with_mean
from lit_asyncrl.tasks.prompt_source import PromptSource
from lit_asyncrl.types import Completion, GenerationRequest, Prompt

if TYPE_CHECKING:
    from lit_asyncrl.callbacks.async_rollout import AsyncRollout
    from lit_asyncrl.datamodule import RolloutDataModule
    from lit_asyncrl.module import PolicyModule

MEASURE_TIMEOUT_S = 120.0
"""Longest time for a measurement of generation."""

SUMMARY_KEYS = (
    "wall_s",
    "policy_version",
    "generated_tokens",
    "share_trainer_waits_for_data",
    "share_engine_waits_for_admission",
    "ledger",
)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a simulation needs to know of engine and trainer.

    Attributes:
        token_s: seconds per token of one response while every slot is busy.
        train_s: seconds per update.
        lengths: response lengths.
        source: where the numbers come from, in words.
    """

    token_s: float
    train_s: float
    lengths: LengthDistribution
    source: str


@dataclass(frozen=True, slots=True)
class GivenRates:
    """Numbers that a user knows; None where another source has to be asked.

    Attributes:
        token_s, train_s: as in `Rates`.
        mean_tokens: mean response length, responses that are cut at the budget included.
        shape: of the distribution, unless the lengths are measured.
    """

    token_s: float | None = None
    train_s: float | None = None
    mean_tokens: float | None = None
    shape: LengthShape = "exponential"

    @property
    def is_complete(self) -> bool:
        """Whether nothing has to be measured."""
        return None not in (self.token_s, self.train_s, self.mean_tokens)

    def over(self, rates: Rates | None, max_new_tokens: int) -> Rates:
        """These numbers, and those of `rates` where one is missing."""
        known = [value for value in (self.token_s, self.train_s, self.mean_tokens) if value is not None]
        sources = (["given"] if known else []) + ([rates.source] if rates is not None else [])
        lengths: LengthDistribution
        if self.mean_tokens is not None:
            lengths = lengths_with_mean(self.shape, self.mean_tokens, max_new_tokens)
        else:
            assert rates is not None
            lengths = rates.lengths
        token_s = self.token_s if self.token_s is not None or rates is None else rates.token_s
        train_s = self.train_s if self.train_s is not None or rates is None else rates.train_s
        assert token_s is not None and train_s is not None
        return Rates(token_s, train_s, lengths, "; the rest ".join(sources))


def summary_rates(path: str, num_slots: int, group_size: int, shape: LengthShape, max_new_tokens: int) -> Rates:
    """Rates of an earlier run with as many slots, from its `summary.json`.

    Raises:
        ConfigurationError: the file cannot be read or is another one.
    """
    try:
        summary: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        missing = [key for key in SUMMARY_KEYS if key not in summary]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"summary must name a run's summary.json, got {path!r} ({error}).") from error
    if missing:
        raise ConfigurationError(f"summary must name a run's summary.json, got {path!r} without {missing}.")
    updates = summary["policy_version"] + summary.get("skipped_updates", 0)
    open_states = ("pending", "in_flight", "scoring", f"in_flight: {UNFINISHED}", f"dropped: {INTERRUPTED}")
    ended = [row for name, row in summary["ledger"].items() if name not in open_states]  # some hold members' tokens alone
    responses = sum(row["prompts"] for row in ended) * group_size
    if not updates or not responses or not summary["generated_tokens"]:
        raise ConfigurationError(f"summary must be of a run with at least one update, got {path!r} with {updates} updates.")
    generating_s = summary["wall_s"] * (1.0 - summary["share_engine_waits_for_admission"])
    training_s = summary["wall_s"] * (1.0 - summary["share_trainer_waits_for_data"])
    mean_tokens = sum(row["tokens"] for row in ended) / responses
    return Rates(
        num_slots * generating_s / summary["generated_tokens"],
        training_s / updates,
        lengths_with_mean(shape, mean_tokens, max_new_tokens),
        f"from {path} ({updates} updates)",
    )


def measure_rates(module: PolicyModule, data: RolloutDataModule, rollout: AsyncRollout, num_slots: int) -> Rates:
    """Fill the engine's slots once with training prompts, and form one batch's gradient from the responses.

    The rewards are 0 and 1 in turn, so that no verifier runs. Nothing is trained.

    Raises:
        ConfigurationError, DataError: a run with these settings would be refused.
    """
    data.prepare(module, rollout.publish_lag)
    source = PromptSource(
        data.task,
        module.tokenizer,
        seed=data.seed or 0,
        max_new_tokens=data.sampling.max_new_tokens,
        context=module.context_length(),
        max_epochs=data.max_prompt_epochs,
    )
    prompts = source.next_prompts(max(1, -(-num_slots // data.group_size)))
    completions, token_s = _measure_generation(module, data, rollout, prompts, num_slots)
    batch_s = _measure_training(module, data, prompts[: max(1, num_slots // data.group_size)], completions)
    train_s = batch_s / module.updates_per_batch
    lengths = MeasuredLengths([len(c.token_ids) for c in completions])
    return Rates(token_s, train_s, lengths, f"measured ({len(completions)} responses, 1 batch)")


def _measure_generation(
    module: PolicyModule, data: RolloutDataModule, rollout: AsyncRollout, prompts: Sequence[Prompt], num_slots: int
) -> tuple[list[Completion], float]:
    """Completions in the order of the requests, of one group at least, and seconds per token.

    Every step of the engine adds one token to each response, so the longest one counts the steps; a group of more responses than
    slots takes as many times longer.
    """
    engine = rollout.engine
    path = resolve_policy_path(module.policy.path)
    probe = probe_ids(module.tokenizer, vocabulary_size(module.model))
    engine.start(
        path,
        eos_token_ids=end_of_sequence_ids(path, module.tokenizer),
        probe_ids=probe,
        max_model_len=rollout.max_model_len or module.context_length(),
    )
    try:
        engine.begin_update(0, module.weights())
        engine.finish_update(MEASURE_TIMEOUT_S)
        size = data.group_size
        requests = [
            GenerationRequest(number * size + i, prompt.token_ids, data.sampling, prompt.seed + i)
            for number, prompt in enumerate(prompts)
            for i in range(size)
        ][: max(num_slots, size)]
        started = time.monotonic()
        engine.submit(requests)
        answers: dict[int, Completion] = {}
        while len(answers) < len(requests):
            answers |= {completion.request_id: completion for completion in engine.completions(0.1)}
            if time.monotonic() - started > MEASURE_TIMEOUT_S:
                raise ConfigurationError(
                    f"token_s, train_s and mean_tokens must be given where {len(requests)} responses take more than "
                    f"{MEASURE_TIMEOUT_S:.0f} s, got {len(answers)} in that time. Give them, or summary."
                )
        elapsed = time.monotonic() - started
    finally:
        engine.stop()
    completions = [answers[request.request_id] for request in requests]
    waves = -(-len(requests) // num_slots)
    return completions, elapsed / waves / max(len(completion.token_ids) for completion in completions)


def _measure_training(
    module: PolicyModule, data: RolloutDataModule, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> float:
    """Seconds for the gradient of one batch; the second time, since the first one also allocates."""
    size = data.group_size
    groups = []
    for number in range(data.batch_groups):
        at = number % len(prompts)
        task = data.tasks[prompts[at].example.task]
        components = [[float(i % 2)] * len(task.rewards) for i in range(size)]
        members = completions[at * size : (at + 1) * size]
        groups.append(TakenGroup(build_group(prompts[at], members, components, task, completed_version=0)))
    batch = collate(
        groups,
        max_tokens_per_micro_batch=data.max_tokens_per_micro_batch,
        temperature=data.sampling.temperature,
        policy_version=0,
    )
    seconds = 0.0
    for _ in range(2):
        started = time.monotonic()
        module.estimator.gradient(module.model, batch.micro_batches, backward=torch.Tensor.backward)
        seconds = time.monotonic() - started
        module.zero_grad()
    return seconds
