"""Bias and variance of the gradient by importance weights, at frozen pairs of policies, as the group grows.

`python tools/study.py bias` writes docs/study/bias.jsonl. The behavior policy is a warm start; the current policy is the same
after some synchronous updates. A *fresh* gradient is of responses of the current policy; the others are of responses of the
behavior policy under a method's weights, from the product's own estimator. Rewards less the mean of the *other* members and
summed token terms make untruncated weights unbiased whatever the group size, so that what is left is the weights' own bias. It is
measured twice: against fresh gradients, and against untruncated weights on the same responses, which has less noise only where
those weights have no heavy tail.

Beside it, docs/study/baselines.jsonl: what a baseline leaves of the gradient, and its variance, under VCPO's weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from study_arms import TASKS
from study_grid import RESPONSES, arguments_of, cell
from study_results import read_lines
from study_run import commit, fit, significant
from study_warm_start import task_of, warm_start
from torch import Tensor

from lit_asyncrl.algorithm.advantages import OPOB, GroupMean, LeaveOneOut
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.losses import GMCGRPO, TICGRPO, Reinforce, SequenceTIS
from lit_asyncrl.interfaces import Advantage, Objective
from lit_asyncrl.types import MicroBatch

TASK, SEED, RATE = "reverse10", 200, 3e-4
UPDATES = (16, 32)
"""Updates between the two policies of a pair."""
GROUP_SIZES = (4, 8, 16, 32)
BATCHES = 250
"""Batches of 128 responses for the mean gradient of each pair and group size."""
FRESH_BATCHES = 1000
"""Batches for the fresh gradient of a pair."""
UNTRUNCATED = "untruncated"
METHODS: Mapping[str, Objective] = {
    "none": Reinforce(),
    UNTRUNCATED: SequenceTIS(max_weight=1e6),
    "sequence TIS, cap 8": SequenceTIS(),
    "TIC, mask, epsilon 0.2": TICGRPO(),
    "TIC, truncate, epsilon 0.2": TICGRPO(mode="truncate"),
    "GMC, epsilon 0.2": GMCGRPO(),
}
BASELINES: Mapping[str, Advantage] = {
    "others' mean": LeaveOneOut(),
    "group mean": GroupMean(normalize="none"),
    "OPOB, logit proxy": OPOB("logit_proxy", normalize="none"),
    "OPOB, exact": OPOB("batched", normalize="none"),
    "OPOB, logit proxy, released weights": OPOB("logit_proxy", "released", normalize="none"),
    "OPOB, exact, released weights": OPOB("batched", "released", normalize="none"),
}
BASELINE_GROUP_SIZE = 8


class Moments:
    """Mean and total variance (trace of the covariance) of vectors that are added one by one."""

    def __init__(self) -> None:
        self.number = 0
        self.mean: Tensor = torch.zeros(())
        self._squares = 0.0

    def add(self, vector: Tensor) -> None:
        """Welford's update."""
        self.number += 1
        before = vector - self.mean
        self.mean = self.mean + before / self.number
        self._squares += float(torch.dot(before, vector - self.mean))

    @property
    def variance(self) -> float:
        """Unbiased, summed over coordinates."""
        return self._squares / (self.number - 1)


@dataclass(frozen=True)
class Pair:
    """A behavior policy, and the current policy some updates later."""

    updates: int
    behavior: Any
    current: Any
    tokenizer: Any


def relative_bias(difference: Tensor, noise: float, norm: float) -> dict[str, float]:
    """Norm of a mean difference over `norm`, with its noise taken off, and that noise.

    The squared distance of two means of vectors exceeds that of their expectations by the sum of variance / number, on average.
    """
    bias_squared = max(float(difference.square().sum()) - noise, 0.0)
    return {"bias": significant(bias_squared**0.5 / norm), "noise": significant(noise**0.5 / norm)}


def fresh_norm(fresh: Moments) -> float:
    """Norm of the expected gradient."""
    return max(float(fresh.mean.square().sum()) - fresh.variance / fresh.number, 1e-30) ** 0.5


def measure_all(cache: Path, out: Path) -> None:
    """Measure what is not there yet: pairs and group sizes into `out`, the pairs' baselines into `baselines.jsonl` beside it."""
    torch.set_num_threads(1)
    baselines = out.with_name("baselines.jsonl")
    done = {(line["updates"], line["group_size"]) for line in read_lines(out)}
    with_baselines = {line["updates"] for line in read_lines(baselines)}
    out.parent.mkdir(parents=True, exist_ok=True)
    for updates in UPDATES:
        sizes = [size for size in GROUP_SIZES if (updates, size) not in done]
        if not sizes and updates in with_baselines:
            continue
        pair = make_pair(cache, updates)
        fresh = fresh_gradient(pair, FRESH_BATCHES)
        if updates not in with_baselines:
            _write(baselines, updates, BASELINE_GROUP_SIZE, measure_baselines(pair, fresh, BATCHES))
        for size in sizes:
            _write(out, updates, size, measure(pair, fresh, size, BATCHES))


def _write(file: Path, updates: int, group_size: int, results: Mapping[str, Mapping[str, float]]) -> None:
    """Append a line for each method."""
    with file.open("a", encoding="utf-8") as lines:
        for name, result in results.items():
            line = {"key": f"{TASK}/{updates}/G{group_size}/{name}", "updates": updates, "group_size": group_size, "method": name}
            lines.write(json.dumps(line | {"seed": SEED, "commit": commit(), **result}) + "\n")
    print(f"{file.name}: {updates} updates apart, groups of {group_size}: measured", flush=True)


def make_pair(cache: Path, updates: int) -> Pair:
    """A warm start, and what synchronous training makes of it."""
    from lit_asyncrl.policy import load_model, load_tokenizer

    folder, _ = warm_start(TASK, SEED, cache)
    cli = fit(arguments_of(cell(TASK, "sync", "sync", RATE, SEED), str(folder), updates))
    return Pair(updates, load_model(str(folder)).eval(), cli.model.model.eval(), load_tokenizer(str(folder)))


def make_estimator(objective: Objective, advantage: Advantage | None = None) -> PolicyGradient:
    """The product's estimator, with what keeps untruncated weights unbiased unless another advantage is given."""
    return PolicyGradient(objective, advantage or LeaveOneOut(), "sequence-mean-token-sum")


def fresh_gradient(pair: Pair, batches: int) -> Moments:
    """Moments of the gradient of the current policy's own responses."""
    torch.manual_seed(0)
    estimator, fresh = make_estimator(Reinforce()), Moments()
    for i in range(batches):
        fresh.add(gradient(estimator, pair.current, sample(pair, pair.current, max(GROUP_SIZES), i)))
    return fresh


def measure(pair: Pair, fresh: Moments, group_size: int, batches: int) -> dict[str, dict[str, float]]:
    """Figures of every method at one pair and group size, relative to the fresh gradient.

    Returns:
        Of every method `bias` and `noise` against fresh gradients, `paired_bias` and `paired_noise` against untruncated weights,
        and `variance` of one batch's gradient over the fresh norm squared.
    """
    torch.manual_seed(group_size)
    estimators = {name: make_estimator(objective) for name, objective in METHODS.items()}
    moments, paired = {name: Moments() for name in METHODS}, {name: Moments() for name in METHODS}
    for i in range(batches):
        stale = sample(pair, pair.behavior, group_size, i)
        gradients = {name: gradient(estimator, pair.current, stale) for name, estimator in estimators.items()}
        for name, vector in gradients.items():
            moments[name].add(vector)
            paired[name].add(vector - gradients[UNTRUNCATED])
    norm, results = fresh_norm(fresh), {}
    for name, of in moments.items():
        noise = of.variance / of.number + fresh.variance / fresh.number
        against = relative_bias(paired[name].mean, paired[name].variance / paired[name].number, norm)
        results[name] = {
            **relative_bias(of.mean - fresh.mean, noise, norm),
            **{f"paired_{key}": value for key, value in against.items()},
            "variance": significant(of.variance / norm**2),
        }
    return results


def measure_baselines(pair: Pair, fresh: Moments, batches: int) -> dict[str, dict[str, float]]:
    """Figures of every baseline under sequence TIS at one pair.

    Returns:
        Of every baseline `signal`, the component of its mean gradient along the fresh one over the latter's norm, and `variance`
        of one batch's gradient over that norm squared.
    """
    torch.manual_seed(0)
    estimators = {name: make_estimator(SequenceTIS(), advantage) for name, advantage in BASELINES.items()}
    moments = {name: Moments() for name in BASELINES}
    for i in range(batches):
        stale = sample(pair, pair.behavior, BASELINE_GROUP_SIZE, i)
        for name, estimator in estimators.items():
            moments[name].add(gradient(estimator, pair.current, stale))
    norm = fresh_norm(fresh)
    return {
        name: {
            "signal": significant(float(torch.dot(of.mean, fresh.mean)) / norm**2),
            "variance": significant(of.variance / norm**2),
        }
        for name, of in moments.items()
    }


def gradient(estimator: PolicyGradient, model: Any, batch: MicroBatch) -> Tensor:
    """The estimator's gradient of one batch as one vector, float64."""
    model.zero_grad()
    estimator.gradient(model, [batch], backward=lambda loss: loss.backward())
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()]).double()


@torch.no_grad()
def sample(pair: Pair, policy: Any, group_size: int, number: int) -> MicroBatch:
    """128 scored responses of a policy to prompts of the training split; `number` chooses the prompts."""
    task = task_of(TASK)
    num_groups = RESPONSES // group_size
    examples = [task.train_example(number * num_groups + i) for i in range(num_groups) for _ in range(group_size)]
    inputs = pair.tokenizer([e.prompt for e in examples], return_tensors="pt", return_token_type_ids=False)
    start = inputs["input_ids"].shape[1]
    ids = policy.generate(**inputs, max_new_tokens=TASKS[TASK].max_new_tokens, do_sample=True, top_k=0, top_p=1.0)
    is_end = ids[:, start:] == pair.tokenizer.eos_token_id
    before_end = is_end.int().cumsum(1) - is_end.int() == 0  # the end itself is trained
    trained = torch.cat([torch.zeros(RESPONSES, start, dtype=torch.bool), before_end], 1)
    texts = pair.tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
    batch = MicroBatch(
        input_ids=ids,
        attention_mask=trained | (torch.arange(ids.shape[1]) < start),
        loss_mask=trained,
        behavior_logprobs=torch.zeros(ids.shape),
        token_versions=torch.where(trained, 0, -1).int(),
        rewards=torch.tensor([task.rewards[0](text, e) for text, e in zip(texts, examples, strict=True)]),
        group_index=torch.arange(num_groups).repeat_interleave(group_size),
        temperature=1.0,
    )
    return replace(batch, behavior_logprobs=token_logprobs(policy, batch).logprobs.float())
