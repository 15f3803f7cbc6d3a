"""Trajectories without a trained token: their reward counts in the group, and nothing else of them does."""

from dataclasses import replace

import pytest
import torch
from algorithm_cases import METHODS, assert_same, make_batch, run, take
from torch import Tensor, nn

from lit_asyncrl.algorithm.advantages import OPO, GroupMean
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.losses import Reinforce, SequenceTIS


def test_trajectories_without_trained_tokens_have_neither_gradient_nor_weight(path: PolicyGradient, model: nn.Module) -> None:
    batch = make_batch()
    batch.loss_mask[[1, 6]] = False
    kept = torch.tensor([0, 2, 3, 4, 5, 7, 8, 9, 10, 11])
    _, (stats,) = run(path, model, [batch])
    assert stats.rows.tolist() == kept.tolist()
    assert len(stats.log_weights_B) == len(stats.advantages) == 10
    changed = replace(batch, input_ids=batch.input_ids.clone())
    changed.input_ids[[1, 6]] = 3
    assert_same(run(path, model, [changed])[0], run(path, model, [batch])[0])


def test_the_reward_of_an_untrained_trajectory_counts_in_its_groups_mean(model: nn.Module) -> None:
    batch = replace(make_batch(), rewards=torch.tensor([1.0, 0.0, 0.0, 1.0] * 3, dtype=torch.float64))
    batch.loss_mask[0] = False
    _, (stats,) = run(PolicyGradient(SequenceTIS(), GroupMean("none")), model, [batch])
    # mean of [1, 0, 0, 1] = 1/2 for the first group's three trained members, as for the others
    assert stats.advantages[:3].tolist() == pytest.approx([-0.5, -0.5, 0.5])


def test_an_untrained_trajectory_has_no_part_in_a_baseline_by_length(model: nn.Module) -> None:
    batch = replace(make_batch(), rewards=torch.arange(12, dtype=torch.float64))
    batch.loss_mask[0] = False
    _, (stats,) = run(PolicyGradient(Reinforce(), OPO()), model, [batch])
    lengths, rewards = batch.loss_mask[1:4].sum(-1).double(), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert stats.advantages[:3].tolist() == pytest.approx((rewards - lengths @ rewards / lengths.sum()).tolist())


@pytest.mark.parametrize("name", ["vcpo batch exact", "vcpo batch one by one", "vcpo batch proxy", "m2po batch proxy", "grpo"])
def test_a_batch_without_trained_tokens_has_no_gradient(name: str, model: nn.Module) -> None:
    batch = make_batch()
    batch.loss_mask[:] = False
    parts = [take(batch, batch.group_index == 0), take(batch, batch.group_index > 0)]
    _, stats = run(PolicyGradient(*METHODS[name]), model, parts)
    assert all(p.grad is None for p in model.parameters())
    assert [part.num_tokens for part in stats] == [0, 0]


@pytest.mark.parametrize("name", ["vcpo batch exact", "vcpo batch one by one", "vcpo batch proxy"])
def test_the_only_trained_trajectory_of_a_batch_is_its_baseline(name: str, model: nn.Module) -> None:
    batch = replace(make_batch(), rewards=torch.arange(12, dtype=torch.float64))
    batch.loss_mask[torch.arange(12) != 3] = False
    parts = [take(batch, batch.group_index == 0), take(batch, batch.group_index > 0)]
    gradient, stats = run(PolicyGradient(*METHODS[name]), model, parts)
    assert stats[0].advantages.tolist() == pytest.approx([0.0], abs=1e-12)
    assert float(gradient.abs().max()) < 1e-12


def test_the_only_trained_member_of_a_group_is_its_baseline(model: nn.Module) -> None:
    batch = make_batch()
    batch.loss_mask[1:4] = False
    exact, (stats,) = run(PolicyGradient(*METHODS["vcpo exact"]), model, [batch])
    one_by_one, _ = run(PolicyGradient(*METHODS["vcpo one by one"]), model, [batch])
    assert stats.advantages[0] == 0.0
    torch.testing.assert_close(one_by_one, exact, rtol=1e-6, atol=1e-14)


def test_a_micro_batch_without_trained_tokens_leaves_the_gradient_alone(path: PolicyGradient, model: nn.Module) -> None:
    batch = make_batch()
    nothing = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))

    def forbidden(loss: Tensor) -> None:
        raise AssertionError("backward was called")

    model.zero_grad()
    stats = path.accumulate(model, nothing, num_trajectories=1, num_trained_tokens=1, backward=forbidden)
    assert all(p.grad is None for p in model.parameters())
    assert len(stats.log_weights_B) == stats.num_tokens == 0
