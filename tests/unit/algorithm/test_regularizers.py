"""KL penalty and entropy bonus: the estimates by hand, their gradients, and their part in the estimator's loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from algorithm_cases import gradient_of, make_batch, make_model
from torch import Tensor, nn

from lit_asyncrl.algorithm.advantages import OPOB, GroupMean
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.losses import SequenceTIS
from lit_asyncrl.algorithm.regularizers import ReferenceKL, Regularizer, kl_estimate
from lit_asyncrl.errors import ConfigurationError

ESTIMATORS = ("k1", "k2", "k3")


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    # l = .5: k2 = .125; k3 = e^-.5 - 1 + .5 = .106531, its slope 1 - e^-.5 = .393469
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.1065307, 0.3934693)],
)
def test_estimates_and_slopes_match_the_oracle(estimator, value: float, slope: float) -> None:  # type: ignore[no-untyped-def]
    log_ratio = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(log_ratio, estimator)
    estimate.backward()
    assert log_ratio.grad is not None
    assert (float(estimate.detach()), float(log_ratio.grad)) == pytest.approx((value, slope), abs=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_estimate_over_the_policy_is_the_divergence(estimator) -> None:  # type: ignore[no-untyped-def]
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    log_ratio = policy.log() - reference.log()
    assert float((policy * kl_estimate(log_ratio, estimator)).sum()) == pytest.approx(float((policy * log_ratio).sum()))


@pytest.mark.parametrize("log_ratio", [700.0, -700.0])
def test_huge_log_ratios_stay_finite_in_float32(log_ratio: float) -> None:
    values = torch.tensor([log_ratio], requires_grad=True)
    total = torch.stack([kl_estimate(values, estimator) for estimator in ESTIMATORS]).sum()
    total.backward()
    assert total.isfinite()
    assert values.grad is not None and values.grad.isfinite().all()


@pytest.fixture
def model() -> nn.Module:
    return make_model("tied qwen3", torch.float64)


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    return make_model("untied llama", torch.float64)


def form(method: PolicyGradient, model: nn.Module, reference: nn.Module | None, batch=None):  # type: ignore[no-untyped-def]
    model.zero_grad()
    batch = make_batch() if batch is None else batch
    (stats,) = method.gradient(model, [batch], backward=lambda loss: loss.backward(), reference=reference)
    return gradient_of(model).clone(), stats


def expected_regularization(model: nn.Module, reference: nn.Module, regularizer: Regularizer) -> tuple[Tensor, float]:
    """Gradient and value by the definitions: plain log-softmax, a mean of token means."""
    batch = make_batch()

    def of(network: nn.Module) -> Tensor:
        return (network(input_ids=batch.input_ids).logits[:, :-1] / batch.temperature).log_softmax(-1)

    logp, mask = of(model), batch.loss_mask[:, 1:]
    targets = batch.input_ids[:, 1:, None]
    with torch.no_grad():
        reference_logp = of(reference).gather(-1, targets)[..., 0]
    log_ratio = logp.gather(-1, targets)[..., 0] - reference_logp
    kl = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": (-log_ratio).exp() - 1 + log_ratio}[regularizer.kl_estimator]
    terms = regularizer.kl_coefficient * kl + regularizer.entropy_coefficient * (logp.exp() * logp).sum(-1)
    loss = ((terms * mask).sum(-1) / mask.sum(-1)).mean()
    model.zero_grad()
    loss.backward()
    return gradient_of(model).clone(), float(loss.detach())


@pytest.mark.parametrize("score_norm", [None, "batched", "per_trajectory", "logit_proxy"])
@pytest.mark.parametrize(
    "regularizer", [Regularizer(0.3, e, 0.1) for e in ESTIMATORS] + [Regularizer(0.3), Regularizer(0, "k3", 1.0)]
)
def test_both_terms_add_their_gradient_and_value(model, reference, score_norm, regularizer) -> None:  # type: ignore[no-untyped-def]
    advantage = GroupMean() if score_norm is None else OPOB(score_norm)
    plain, without = form(PolicyGradient(SequenceTIS(), advantage), model, None)
    method = PolicyGradient(SequenceTIS(), advantage, regularizer=regularizer)
    gradient, stats = form(method, model, reference)
    expected, value = expected_regularization(model, reference, regularizer)
    torch.testing.assert_close(gradient - plain, expected, rtol=1e-9, atol=1e-12)
    assert stats.loss - without.loss == pytest.approx(value, rel=1e-9)


def test_a_coefficient_of_zero_only_measures(model, reference) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch()
    gradient, stats = form(PolicyGradient(SequenceTIS(), GroupMean(), regularizer=Regularizer(0.0, "k1")), model, reference)
    plain, without = form(PolicyGradient(SequenceTIS(), GroupMean()), model, None)
    assert torch.equal(gradient, plain)
    assert without.reference_kl_sum is None
    with torch.no_grad():
        logprobs = [token_logprobs(m, batch).logprobs[batch.loss_mask] for m in (model, reference)]
    assert stats.reference_kl_sum == pytest.approx(float((logprobs[0] - logprobs[1]).sum()))


def test_poisoned_masked_slots_change_nothing(model, reference) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch()
    poisoned = replace(
        batch,
        input_ids=torch.where(batch.attention_mask, batch.input_ids, 11),
        behavior_logprobs=torch.where(batch.loss_mask, batch.behavior_logprobs, torch.nan),
    )
    method = PolicyGradient(SequenceTIS(), GroupMean(), regularizer=Regularizer(0.3, "k3", 0.1))
    clean, _ = form(method, model, reference)
    torch.testing.assert_close(form(method, model, reference, poisoned)[0], clean, rtol=1e-10, atol=1e-14)


def test_the_entropy_s_gradient_is_finite_where_a_token_cannot_occur() -> None:
    from lit_asyncrl.algorithm.logprobs import _RowLogprobs

    logits = torch.tensor([[[0.7, 0.3, 0.0]]], dtype=torch.float64).log().requires_grad_()
    _, entropy, _ = _RowLogprobs.apply(logits, torch.tensor([0]), torch.tensor([0]), 1.0, False)
    entropy.backward()
    # -p (log p + H), H = .6108643: -.7 (-.3566749 + .6108643), and its negative, since the sum is 0
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([-0.1779326, 0.1779326, 0.0], abs=1e-7)


def test_what_a_penalty_cannot_be_is_refused_by_key() -> None:
    with pytest.raises(
        ConfigurationError, match=r"model\.reference_kl\.estimator must be one of .*reference_kl\.coefficient must"
    ):
        ReferenceKL(-1.0, "k4")  # type: ignore[arg-type]


def test_a_coefficient_of_0_measures_and_one_below_is_refused():
    assert ReferenceKL(0.0).coefficient == 0.0
    assert ReferenceKL().coefficient == 0.001
    with pytest.raises(ConfigurationError, match=r"model\.reference_kl\.coefficient must be a finite number of at least 0"):
        ReferenceKL(-0.1)


def test_without_a_coefficient_or_a_reference_there_is_no_penalty():
    arguments = (torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1), torch.ones(1, 2, dtype=torch.bool))
    logprobs, entropy, scales, mask = arguments
    assert float(Regularizer(0.5).loss(logprobs, entropy, None, scales, mask)) == 0.0
    assert float(Regularizer(0.0).loss(logprobs, entropy, logprobs.clone().fill_(torch.nan), scales, mask)) == 0.0
