"""Collation: padding by hand, whole groups by token budget, and the numbers for the log."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from builders import make_group

from lit_asyncrl.pool.collate import collate, groups_over_budget
from lit_asyncrl.pool.records import TakenGroup
from lit_asyncrl.types import MicroBatch, TrainBatch


def batch_of(groups, budget=None, version=0, logprobs=None) -> TrainBatch:
    taken = [TakenGroup(group, None if logprobs is None else logprobs[i]) for i, group in enumerate(groups)]
    return collate(taken, max_tokens_per_micro_batch=budget, temperature=0.7, policy_version=version)


def mixed_groups() -> list:
    return [
        make_group(0, [[0] * 3, [0] * 5]),
        make_group(1, [[0] * 9, [0] * 1, [0] * 2]),
        make_group(2, [[0] * 5, [0] * 4]),
        make_group(3, [[0] * 1, [0] * 1]),
    ]


def test_a_group_is_padded_on_the_right_and_aligned_to_tokens() -> None:
    # lengths 2 + 1 = 3 and 2 + 3 = 5; ids 1..8
    (mb,) = batch_of([make_group(0, [[0], [0, 1, 1]], 1)], version=1).micro_batches
    assert mb.input_ids.tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]
    assert mb.input_ids.dtype == torch.int64
    assert mb.attention_mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert mb.loss_mask.int().tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert mb.behavior_logprobs.tolist() == [[0, 0, -0.5, 0, 0], [0, 0, -0.5, -0.5, -0.5]]
    assert mb.token_versions.tolist() == [[-1, -1, 0, -1, -1], [-1, -1, 0, 1, 1]]
    assert mb.token_versions.dtype == torch.int32
    assert mb.rewards.tolist() == [0.0, 1.0]
    assert mb.group_index.tolist() == [0, 0]
    assert mb.temperature == 0.7
    assert mb.logprobs is None


def test_groups_are_contiguous_and_numbered_within_a_micro_batch() -> None:
    (mb,) = batch_of(mixed_groups()).micro_batches
    assert mb.group_index.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]  # groups 1, 0, 2, 3: longest first


def test_whole_groups_fill_micro_batches_up_to_the_budget() -> None:
    # longest first: group 1 (3 x 11 = 33 > 28, alone), groups 0 and 2 (4 x 7 = 28), then group 3 (6 x 7 = 42 > 28)
    batch = batch_of(mixed_groups(), budget=28)
    assert [tuple(mb.input_ids.shape) for mb in batch.micro_batches] == [(3, 11), (4, 7), (2, 3)]


def test_groups_over_the_budget_are_named() -> None:
    taken = [TakenGroup(group) for group in mixed_groups()]
    assert groups_over_budget(taken, 28) == [1]
    assert groups_over_budget(taken, None) == []


def rows(batch: TrainBatch) -> list:
    return sorted(
        (mb.input_ids[i][mb.attention_mask[i]].tolist(), float(mb.rewards[i]))
        for mb in batch.micro_batches
        for i in range(mb.num_trajectories)
    )


@pytest.mark.parametrize("budget", [1, 20, 28, 50, None])
def test_no_budget_loses_or_changes_a_trajectory(budget) -> None:
    batch, whole = batch_of(mixed_groups(), budget), batch_of(mixed_groups())
    assert rows(batch) == rows(whole)
    assert (batch.num_trajectories, batch.num_trained_tokens) == (9, 31)
    assert {k: v for k, v in batch.stats.items() if k != "batch/padding_share"} == pytest.approx(
        {k: v for k, v in whole.stats.items() if k != "batch/padding_share"}
    )


@pytest.mark.parametrize("budget", [28, None])
def test_the_order_in_which_groups_were_taken_changes_nothing(budget) -> None:
    one, two = batch_of(mixed_groups(), budget), batch_of(mixed_groups()[::-1], budget)
    for a, b in zip(one.micro_batches, two.micro_batches, strict=True):
        for field in dataclasses.fields(MicroBatch):
            x, y = getattr(a, field.name), getattr(b, field.name)
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
    assert one.stats == two.stats


def test_trajectories_without_a_trained_token_are_not_counted() -> None:
    group = make_group(0, [[0, 0], [0]])
    group.loss_mask[:4] = False
    batch = batch_of([group])
    assert (batch.num_trajectories, batch.num_trained_tokens) == (1, 1)


def test_a_batch_without_a_trained_token_is_empty_but_whole() -> None:
    group = make_group(0, [[0, 0], [0]])
    group.loss_mask[:] = False
    batch = batch_of([group])
    assert (batch.num_trajectories, batch.num_trained_tokens) == (0, 0)
    assert all(value == value for value in batch.stats.values())


def test_log_probs_are_handed_on_only_if_all_groups_of_the_micro_batch_have_them() -> None:
    groups = [make_group(0, [[0], [0]]), make_group(1, [[0], [0, 0]])]
    known = [torch.arange(6.0), torch.arange(7.0)]
    (mb,) = batch_of(groups, logprobs=known).micro_batches
    assert mb.logprobs.tolist() == [[0, 1, 2, 0], [3, 4, 5, 6], [0, 1, 2, 0], [3, 4, 5, 0]]
    (mb,) = batch_of(groups, logprobs=[known[0], None]).micro_batches
    assert mb.logprobs is None


def test_ages_and_staleness_by_hand() -> None:
    # V = 5, completed at 4. Versions 2, 4 | 4: ages 3, 1 | 1 -> mean 5/3, max 3; per trajectory 2 and 1
    # generation staleness (2 + 0)/2 = 1 and 0; waiting 1; the first of two responses holds two versions
    batch = batch_of([make_group(0, [[2, 4], [4]], 4)], version=5)
    assert batch.stats["pool/policy_age_mean"] == pytest.approx(5 / 3)
    assert batch.stats["pool/policy_age_max"] == 3
    assert batch.stats["pool/generation_staleness_mean"] == pytest.approx(0.5)
    assert batch.stats["pool/waiting_staleness_mean"] == 1
    assert batch.stats["pool/mixed_version_share"] == 0.5
    assert batch.histograms["policy_age"].tolist() == [2, 1]
    assert batch.histograms["generation_staleness"].tolist() == [1, 0]
    assert batch.histograms["waiting_staleness"].tolist() == [1, 1]
    assert batch.histograms["response_length"].tolist() == [2, 1]


def test_rewards_and_lengths_by_hand() -> None:
    # rewards 0, 1 and 1, 1: mean 3/4, accuracy 3/4, one of two groups without variance; lengths 1, 2, 3, 4: p5 1.15, p95 3.85
    groups = [
        make_group(0, [[0], [0, 0]], rewards=[0, 1], truncated=[False, True]),
        make_group(1, [[0] * 3, [0] * 4], rewards=[1, 1]),
    ]
    stats = batch_of(groups).stats
    assert stats["reward/mean"] == stats["reward/accuracy"] == stats["reward/match"] == 0.75
    assert stats["reward/zero_variance_share"] == 0.5
    assert stats["rollout/truncated_share"] == 0.25
    assert stats["rollout/response_length_mean"] == 2.5
    assert stats["rollout/response_length_p5"] == pytest.approx(1.15)
    assert stats["rollout/response_length_p95"] == pytest.approx(3.85)
    # tokens: 4 prompts of 2 + 10 = 18; padded 4 x 6 = 24
    assert stats["batch/num_tokens"] == 18
    assert stats["batch/padding_share"] == pytest.approx(0.25)


def test_each_reward_is_averaged_over_the_tasks_that_have_it() -> None:
    plain = make_group(0, [[0], [0]], rewards=[0, 1])
    other = dataclasses.replace(
        make_group(1, [[0], [0]], rewards=[1, 1]),
        reward_names=("match", "format"),
        reward_components=torch.tensor([[1.0, 0.5], [1.0, 1.0]]),
    )
    stats = batch_of([plain, other]).stats
    assert (stats["reward/match"], stats["reward/format"]) == (0.75, 0.75)
