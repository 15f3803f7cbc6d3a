"""The estimator on a real tiny model: its gradient by brute force, its invariances, and its sums for the log."""

from dataclasses import replace

import pytest
import torch
from algorithm_cases import METHODS, assert_same, gradient_of, make_batch, make_model, run, take
from torch import Tensor, nn

from lit_asyncrl.algorithm.advantages import OPOB, GroupMean
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.losses import (
    Reinforce,
    SequenceTIS,
    TokenTIS,
)
from lit_asyncrl.algorithm.scored import MicroBatchStats


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> PolicyGradient:
    return PolicyGradient(*METHODS[request.param])


CLEAN: dict[int, tuple[Tensor, list[MicroBatchStats]]] = {}


def clean(method: PolicyGradient, model: nn.Module) -> tuple[Tensor, list[MicroBatchStats]]:
    """Gradient and statistics of `make_batch()` as it is, formed once for each method."""
    key = id(method.objective)
    if key not in CLEAN:
        gradient, stats = run(method, model, [make_batch()])
        CLEAN[key] = (gradient.clone(), stats)
    return CLEAN[key]


def test_gradient_is_the_weighted_sum_of_scores(method: PolicyGradient, model: nn.Module) -> None:
    batch = make_batch()
    gradient, (stats,) = run(method, model, [batch])
    logprobs = token_logprobs(model, batch).logprobs
    log_ratio = (logprobs.detach() - batch.behavior_logprobs).masked_fill(~batch.loss_mask, 0.0)
    omega = method.objective.coefficients(log_ratio, batch.loss_mask, stats.advantages, batch.group_index)
    lengths = batch.loss_mask.sum(-1, keepdim=True)
    loss = -(omega * stats.advantages[:, None] * logprobs / lengths / len(lengths))[batch.loss_mask].sum()
    model.zero_grad()
    loss.backward()
    assert_same(gradient, gradient_of(model))
    assert stats.loss == pytest.approx(loss.item(), rel=1e-9)


@pytest.mark.parametrize("score_norm", ["batched", "per_trajectory"])
def test_exact_optimal_baseline_uses_the_true_score_norms(score_norm: str, model: nn.Module) -> None:
    batch = make_batch()
    _, (stats,) = run(PolicyGradient(SequenceTIS(), OPOB(score_norm)), model, [batch])  # type: ignore[arg-type]
    sums = token_logprobs(model, batch).logprobs.masked_fill(~batch.loss_mask, 0.0).sum(-1)
    norms = []
    for value in sums:
        norms.append(sum(g.square().sum() for g in torch.autograd.grad(value, list(model.parameters()), retain_graph=True)))
    weights = (2 * (sums.detach() - batch.behavior_logprobs.masked_fill(~batch.loss_mask, 0.0).sum(-1))).exp() * torch.stack(
        norms
    )
    for group in range(3):
        members = batch.group_index == group
        expected = (weights * batch.rewards)[members].sum() / weights[members].sum()
        assert stats.baselines is not None
        assert stats.baselines[members].tolist() == pytest.approx([float(expected)] * 4, rel=1e-9)


def test_padding_changes_nothing(method: PolicyGradient, model: nn.Module) -> None:
    batch = make_batch()

    def wider(x: Tensor, value: float) -> Tensor:
        return torch.cat([x, torch.full((len(x), 5), value, dtype=x.dtype)], dim=1)

    padded = replace(
        batch,
        input_ids=wider(batch.input_ids, 7),
        attention_mask=wider(batch.attention_mask, False),
        loss_mask=wider(batch.loss_mask, False),
        behavior_logprobs=wider(batch.behavior_logprobs, 0.0),
        token_versions=wider(batch.token_versions, -1),
    )
    assert_same(run(method, model, [padded])[0], clean(method, model)[0])


def test_poisoned_masked_slots_change_nothing(method: PolicyGradient, model: nn.Module) -> None:
    batch = make_batch()
    poisoned = replace(
        batch,
        input_ids=torch.where(batch.attention_mask, batch.input_ids, 11),
        behavior_logprobs=torch.where(batch.loss_mask, batch.behavior_logprobs, torch.nan),
    )
    expected, (unharmed,) = clean(method, model)
    gradient, (stats,) = run(method, model, [poisoned])
    assert_same(gradient, expected)
    for name in ("loss", "log_ratio_sum", "k3_sum", "entropy_sum", "num_clipped"):
        assert getattr(stats, name) == pytest.approx(getattr(unharmed, name), rel=1e-12), name


def test_the_order_of_trajectories_changes_nothing(method: PolicyGradient, model: nn.Module) -> None:
    batch = make_batch()
    assert_same(run(method, model, [take(batch, torch.randperm(12))])[0], clean(method, model)[0])


def test_the_names_of_groups_change_nothing(method: PolicyGradient, model: nn.Module) -> None:
    batch = make_batch()
    renamed = replace(batch, group_index=torch.tensor([2, 0, 1])[batch.group_index])
    assert_same(run(method, model, [renamed])[0], clean(method, model)[0])


def test_a_parameter_that_no_log_prob_depends_on_has_no_gradient() -> None:
    model = make_model("tied qwen3", torch.float64)
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    run(PolicyGradient(*METHODS["vcpo one by one"]), model, [make_batch()])
    assert model.unused.grad is not None and not model.unused.grad.any()


def test_gradients_accumulate_over_calls(path: PolicyGradient, model: nn.Module) -> None:
    batch = make_batch()
    run(path, model, [batch])
    assert_same(run(path, model, [batch], zero_grad=False)[0], 2 * clean(path, model)[0])


@pytest.mark.parametrize("shift", [300.0, -300.0])
def test_log_weights_of_hundreds_of_nats_give_a_finite_gradient(method: PolicyGradient, model: nn.Module, shift: float) -> None:
    batch = make_batch()
    batch.behavior_logprobs[::2] += shift * batch.loss_mask[::2]
    gradient, (stats,) = run(method, model, [batch])
    assert gradient.isfinite().all()
    assert float(stats.log_weights_B.abs().max()) > 700
    assert stats.advantages.isfinite().all()


def test_on_policy_weights_are_those_of_no_correction(model: nn.Module) -> None:
    batch = make_batch()
    with torch.no_grad():
        batch.behavior_logprobs = token_logprobs(model, batch).logprobs
    plain, (stats,) = run(PolicyGradient(Reinforce(), GroupMean()), model, [batch])
    for objective in {type(o): o for o, _ in METHODS.values()}.values():
        assert_same(run(PolicyGradient(objective, GroupMean()), model, [batch])[0], plain)
    assert stats.k3_sum == 0
    assert stats.log_weights_B.tolist() == [0] * 12


def test_clipped_tokens_are_counted(model: nn.Module) -> None:
    batch = make_batch()
    with torch.no_grad():
        logprobs = token_logprobs(model, batch).logprobs
    batch.behavior_logprobs = logprobs.clone()
    first, second = batch.loss_mask[0].nonzero().squeeze(-1)[:2].tolist()
    batch.behavior_logprobs[0, first] -= 1.0  # ratio e > 2
    batch.behavior_logprobs[0, second] -= 0.5  # ratio 1.65 < 2
    _, (token,) = run(PolicyGradient(TokenTIS(2.0), GroupMean()), model, [batch])
    _, (sequence,) = run(PolicyGradient(SequenceTIS(2.0), GroupMean()), model, [batch])
    _, (none,) = run(PolicyGradient(Reinforce(), GroupMean()), model, [batch])
    assert (token.num_clipped, sequence.num_clipped, none.num_clipped) == (1, int(batch.loss_mask[0].sum()), 0)
    assert token.log_ratio_sum == pytest.approx(1.5)


def test_sums_for_the_log_are_over_trained_tokens(model: nn.Module) -> None:
    batch, mask = make_batch(), make_batch().loss_mask[:, 1:]
    with torch.no_grad():
        logp = (model(input_ids=batch.input_ids).logits[:, :-1] / batch.temperature).log_softmax(-1)
    log_ratio = (logp.gather(-1, batch.input_ids[:, 1:, None])[..., 0] - batch.behavior_logprobs[:, 1:])[mask]
    _, (stats,) = run(PolicyGradient(TokenTIS(1.5), GroupMean()), model, [batch])
    assert stats.num_tokens == len(log_ratio)
    expected = {
        "log_ratio_sum": log_ratio,
        "entropy_sum": -(logp.exp() * logp).sum(-1)[mask],
        "k3_sum": log_ratio.exp() - 1 - log_ratio,
        "weight_sum": log_ratio.exp(),
        "removed_sum": (log_ratio.exp() - 1.5).clamp(min=0.0),
    }
    for name, values in expected.items():
        assert getattr(stats, name) == pytest.approx(float(values.sum())), name
