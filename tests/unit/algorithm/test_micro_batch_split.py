"""The gradient and the update of a batch do not depend on its micro-batches, for every objective, advantage and aggregation."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from algorithm_cases import METHODS, gradient_of, make_batch, make_model, take
from torch import Tensor, nn

from lit_asyncrl.algorithm.advantages import GroupMean
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.losses import M2PO, DecoupledPPO, PPOClip
from lit_asyncrl.algorithm.regularizers import Regularizer
from lit_asyncrl.algorithm.scored import MicroBatchStats
from lit_asyncrl.types import MicroBatch

NUM_GROUPS = 8
AGGREGATIONS = ["sequence-mean-token-mean", "token-mean", "sequence-mean-token-sum", "constant-length"]


def split(batch: MicroBatch, num_parts: int) -> list[MicroBatch]:
    """Micro-batches of whole groups."""
    size = NUM_GROUPS // num_parts
    parts = [take(batch, batch.group_index // size == i) for i in range(num_parts)]
    return [replace(part, group_index=part.group_index - size * i) for i, part in enumerate(parts)]


def behaved_batch(model: nn.Module, dtype: torch.dtype) -> MicroBatch:
    """Sampled by a policy near the model's: weights of all sizes, and an untrained response."""
    batch = make_batch(NUM_GROUPS, 3, dtype=dtype)
    with torch.no_grad():
        logprobs = token_logprobs(model, batch).logprobs
    noise = 0.4 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampled = batch.token_versions >= 0
    batch.loss_mask[5] = False
    return replace(batch, behavior_logprobs=(logprobs + noise.to(dtype)).masked_fill(~sampled, 0.0))


def form(method: PolicyGradient, model: nn.Module, parts: list[MicroBatch], **more: nn.Module) -> list[MicroBatchStats]:
    model.zero_grad()
    return method.gradient(model, parts, backward=lambda loss: loss.backward(), **more)


def distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize("name", METHODS)
def test_gradient_and_update_are_those_of_the_whole_batch(name: str) -> None:
    method = PolicyGradient(*METHODS[name])
    model = make_model("tied qwen3", torch.float64)
    batch = behaved_batch(model, torch.float64)
    results = []
    for num_parts in (1, 4, 8):
        copy = deepcopy(model)
        stats = form(method, copy, split(batch, num_parts))
        gradient = gradient_of(copy).clone()
        torch.optim.AdamW(copy.parameters(), lr=1e-3).step()
        weights = torch.cat([p.detach().flatten() for p in copy.parameters()])
        factors = [torch.cat([getattr(s, key).double() for s in stats]) for key in ("advantages", "log_weights_B")]
        results.append((gradient, weights, sum(s.loss for s in stats), factors, sum(s.num_clipped for s in stats)))
    gradient, weights, loss, factors, num_clipped = results[0]
    assert float(gradient.norm()) > 1e-3
    for other in results[1:]:
        assert distance(other[0], gradient) < 1e-10
        # AdamW's first step is the sign of each entry: where the gradient is 0 up to rounding, so is its sign
        certain = gradient.abs() > 1e-6 * gradient.abs().max()
        assert float((other[1] - weights)[certain].abs().max()) < 1e-10
        assert other[2] == pytest.approx(loss, rel=1e-9, abs=1e-12)
        for one, two in zip(other[3], factors, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)
        assert other[4] == num_clipped


@pytest.mark.parametrize("name", METHODS)
def test_gradient_in_float32_is_that_of_the_whole_batch_up_to_rounding(name: str) -> None:
    method = PolicyGradient(*METHODS[name])
    model = make_model("tied qwen3", torch.float32)
    with torch.no_grad():  # weights of a usual size: large logits are rounded more
        for parameter in model.parameters():
            parameter.mul_(0.2 if parameter.dim() == 2 else 1.0)
    batch = behaved_batch(model, torch.float32)
    gradients = []
    for num_parts in (1, 4, 8):
        form(method, model, split(batch, num_parts))
        gradients.append(gradient_of(model).clone())
    for other in gradients[1:]:
        assert distance(other, gradients[0]) < 1e-6


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["vcpo exact", "vcpo one by one", "vcpo batch exact", "grpo"])
def test_every_aggregation_is_over_the_whole_batch(name: str, aggregation) -> None:  # type: ignore[no-untyped-def]
    regularizer = Regularizer(0.1, "k3", 0.2)
    length = 9 if aggregation == "constant-length" else None
    method = PolicyGradient(*METHODS[name], aggregation, length, regularizer)
    model, reference = make_model("tied qwen3", torch.float64), make_model("untied llama", torch.float64)
    batch = behaved_batch(model, torch.float64)
    results = []
    for num_parts in (1, 4):
        stats = form(method, model, split(batch, num_parts), reference=reference)
        kl = [s.reference_kl_sum for s in stats]
        results.append((gradient_of(model).clone(), sum(s.loss for s in stats), sum(k for k in kl if k is not None)))
    assert distance(results[1][0], results[0][0]) < 1e-10
    assert results[1][1:] == pytest.approx(results[0][1:], rel=1e-9)


def count_forwards(model: nn.Module) -> list[int]:
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def test_a_batch_in_one_micro_batch_needs_no_further_pass() -> None:
    model = make_model("tied qwen3", torch.float32)
    batch = behaved_batch(model, torch.float32)
    calls = count_forwards(model)
    form(PolicyGradient(M2PO(), GroupMean()), model, [batch])
    assert len(calls) == 1


def test_log_probs_that_were_handed_on_save_the_pass() -> None:
    model = make_model("tied qwen3", torch.float32)
    parts = split(behaved_batch(model, torch.float32), 4)
    method = PolicyGradient(M2PO(), GroupMean())
    scored = method.with_logprobs(model, parts)
    assert method.with_logprobs(model, scored)[0].logprobs is scored[0].logprobs
    calls = count_forwards(model)
    form(method, model, parts)
    assert len(calls) == 8  # 4 without gradient, 4 with
    expected = gradient_of(model).clone()
    calls.clear()
    form(method, model, scored)
    assert len(calls) == 4
    assert distance(gradient_of(model), expected) < 1e-5


def test_the_proximal_policy_is_the_one_whose_log_probs_were_handed_on() -> None:
    model = make_model("tied qwen3", torch.float64)
    batch = behaved_batch(model, torch.float64)
    at_behavior = replace(batch, logprobs=batch.behavior_logprobs.masked_fill(~batch.loss_mask, torch.nan))
    form(PolicyGradient(DecoupledPPO(), GroupMean()), model, [at_behavior])
    gradient = gradient_of(model).clone()
    form(PolicyGradient(PPOClip(), GroupMean()), model, [batch])
    assert distance(gradient, gradient_of(model)) < 1e-12
