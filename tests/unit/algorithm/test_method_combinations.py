"""Which objectives and advantages go together, those of one's own included, and how the others are refused."""

from dataclasses import replace

import pytest
import torch
from algorithm_cases import make_batch, make_model, run, take
from torch import Tensor, nn

from lit_asyncrl.algorithm.advantages import OPOB
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.losses import GSPO, SequenceMask, SequenceTIS, TokenTIS
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Advantage, Objective


class AdvantageSigned(Objective):
    """A trajectory weight that looks at the sign of the advantage."""

    trajectory_level = True

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        return torch.where(advantages > 0, 1.0, 0.5)[:, None].expand_as(log_ratio)


def test_weights_may_depend_on_the_advantage_where_norms_are_batched_only(model: nn.Module) -> None:
    batch = replace(make_batch(), rewards=make_batch().rewards + 1.0)  # all above 0: signs differ from those of zeros alone
    run(PolicyGradient(AdvantageSigned(), OPOB("batched")), model, [batch])
    with pytest.raises(ConfigurationError, match="must not look at the advantages"):
        run(PolicyGradient(AdvantageSigned(), OPOB("per_trajectory")), model, [batch])


@pytest.mark.parametrize("score_norm", ["batched", "per_trajectory"])
def test_exact_norms_need_one_weight_per_trajectory(score_norm: str) -> None:
    with pytest.raises(ConfigurationError, match=r"got TokenTIS .*logit_proxy"):
        PolicyGradient(TokenTIS(), OPOB(score_norm))  # type: ignore[arg-type]


class OwnAdvantage(Advantage):
    score_norm = "per_trajectory"

    def __call__(self, rewards, group_index, *, lengths, log_weights, score_norms_squared):  # type: ignore[no-untyped-def]
        return rewards


def test_one_by_one_norms_are_for_the_optimal_baseline() -> None:
    with pytest.raises(ConfigurationError, match="must be OPOB"):
        PolicyGradient(SequenceTIS(), OwnAdvantage())


class ByNorm(Advantage):
    def __init__(self, score_norm: str) -> None:
        self.score_norm = score_norm

    def __call__(self, rewards, group_index, *, lengths, log_weights, score_norms_squared):  # type: ignore[no-untyped-def]
        return rewards * score_norms_squared


@pytest.mark.parametrize("score_norm", ["batched", "logit_proxy"])
def test_an_advantage_of_one_s_own_is_given_the_norms_that_it_asks_for(score_norm: str, model: nn.Module) -> None:
    batch = make_batch()
    _, (stats,) = run(PolicyGradient(SequenceTIS(), ByNorm(score_norm)), model, [batch])
    _, (vcpo,) = run(PolicyGradient(SequenceTIS(), OPOB(score_norm)), model, [batch])  # type: ignore[arg-type]
    torch.testing.assert_close(stats.advantages, batch.rewards * vcpo.score_norms_squared)
    assert stats.baselines is None


def test_model_is_checked_for_batched_norms_only() -> None:
    model = make_model("tied qwen3", torch.float64)
    model.gradient_checkpointing_enable()
    PolicyGradient(SequenceTIS(), OPOB("per_trajectory")).check_supported(model)
    with pytest.raises(ConfigurationError, match="gradient checkpointing"):
        PolicyGradient(SequenceTIS(), OPOB("batched")).check_supported(model)


@pytest.mark.parametrize("advantage", [OPOB("per_trajectory"), OPOB("batched", scope="batch")])
def test_an_objective_that_looks_at_advantages_is_refused_where_they_come_last(advantage: OPOB) -> None:
    for objective in (GSPO(), SequenceMask(negative_only=True)):
        with pytest.raises(ConfigurationError, match="must not look at the advantages"):
            PolicyGradient(objective, advantage)
    PolicyGradient(GSPO(), OPOB("batched"))


def test_an_unmarked_objective_that_looks_at_advantages_is_found_when_a_batch_baseline_comes_last(model: nn.Module) -> None:
    batch, method = make_batch(), PolicyGradient(AdvantageSigned(), OPOB("batched", scope="batch"))
    parts = [take(batch, batch.group_index == 0), take(batch, batch.group_index > 0)]
    with pytest.raises(ConfigurationError, match="must not look at the advantages"):
        run(method, model, parts)
    run(method, model, [batch])  # one micro-batch: the baseline is known in time


class Unbound(Objective):
    needs_batch_logprobs = True

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        return log_ratio


def test_all_that_does_not_go_together_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"aggregation must .*one weight per trajectory .*ProximalObjective"):
        PolicyGradient(Unbound(), OPOB("batched"), "mean")  # type: ignore[arg-type]
