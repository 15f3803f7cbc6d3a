"""Mini-batches of several updates, ages at each update, and what settings of model and data contradict."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from algorithm_cases import make_batch

from lit_asyncrl.algorithm.advantages import OPOB, GroupMean
from lit_asyncrl.algorithm.losses import GMCGRPO, SequenceTIS
from lit_asyncrl.algorithm.micro_batches import policy_ages, select, split_updates, trained_counts, without_over_age
from lit_asyncrl.algorithm.settings import contradictions
from lit_asyncrl.algorithm.statistics import age_stats, mean_stats
from lit_asyncrl.types import MicroBatch, SamplingParams, StepStats


def numbered(num_groups: int, first: int, group_size: int = 2) -> MicroBatch:
    """A micro-batch whose rewards name the groups: `first`, `first` + 1, ..."""
    batch = make_batch(num_groups, group_size)
    return replace(batch, rewards=batch.group_index.double() + first)


def names(update: list[MicroBatch]) -> list[list[float]]:
    return [sorted(set(part.rewards.tolist())) for part in update]


def test_groups_are_dealt_out_to_the_updates_in_turn() -> None:
    # groups 0 1 2 | 3 4 5 6 of two micro-batches: the first update has 0, 2, 4, 6
    updates = split_updates([numbered(3, 0), numbered(4, 3)], 2)
    assert [names(update) for update in updates] == [[[0, 2], [4, 6]], [[1], [3, 5]]]
    assert [part.group_index.tolist() for part in updates[1]] == [[0, 0], [0, 0, 1, 1]]


def test_one_update_leaves_the_micro_batches_as_they_are() -> None:
    parts = [numbered(3, 0), numbered(2, 3)]
    assert split_updates(parts, 1) == [parts]


def test_fewer_groups_than_updates_give_fewer_updates() -> None:
    assert [names(update) for update in split_updates([numbered(2, 0)], 3)] == [[[0]], [[1]]]


def test_no_token_is_lost_or_trained_twice() -> None:
    batch = make_batch(5, 3)
    parts = [part for update in split_updates([batch], 2) for part in update]
    assert trained_counts(parts) == trained_counts([batch])
    assert sum(int(part.input_ids[part.attention_mask].sum()) for part in parts) == int(
        batch.input_ids[batch.attention_mask].sum()
    )


def test_selected_trajectories_keep_only_the_padding_that_they_need() -> None:
    batch = replace(make_batch(), logprobs=torch.zeros(12, 14))
    chosen = select(batch, torch.tensor([3, 7]))
    assert chosen.input_ids.shape[1] == int(batch.attention_mask[[3, 7]].sum(-1).max())
    assert chosen.logprobs is not None and chosen.logprobs.shape == chosen.input_ids.shape


def aged(versions: list[list[int]], group_index: list[int]) -> MicroBatch:
    token_versions = torch.tensor(versions, dtype=torch.int32)
    shape = token_versions.shape
    trained = token_versions >= 0
    zeros = torch.zeros(shape)
    return MicroBatch(zeros.long(), trained, trained, zeros, token_versions, zeros[:, 0], torch.tensor(group_index), 1.0)


@pytest.mark.parametrize(
    ("bound", "measure", "kept"),
    # at version 9: ages of group 0: 1, 3, 1 (mean 5/3, oldest 3), of group 1: 2, 2 (mean and oldest 2)
    [(1, "mean", []), (2, "mean", [0, 1]), (2, "oldest", [1]), (3, "oldest", [0, 1])],
)
def test_groups_over_the_age_bound_are_not_trained(bound: int, measure, kept: list[int]) -> None:  # type: ignore[no-untyped-def]
    batch = aged([[-1, 8, 6], [-1, 8, -1], [-1, 7, -1], [-1, 7, -1]], [0, 0, 1, 1])
    result, over_age = without_over_age(batch, 9, bound, measure)
    assert batch.group_index[result.loss_mask.any(-1)].unique().tolist() == kept
    assert over_age == [group for group in (0, 1) if group not in kept]
    assert torch.equal(result.loss_mask[batch.group_index == 1], batch.loss_mask[2:] & (1 in kept))


def test_a_group_without_trained_tokens_has_no_age() -> None:
    batch = aged([[-1, 0], [-1, 8]], [0, 1])
    batch.loss_mask = torch.tensor([[False, False], [False, True]])
    assert without_over_age(batch, 9, 2, "mean")[1] == []


def test_ages_are_those_at_each_update() -> None:
    batch = aged([[-1, 8, 6]], [0])
    stats = age_stats([policy_ages(batch, 9), policy_ages(batch, 11)], 3)
    # 1, 3 and 3, 5
    assert stats == {"pool/policy_age_mean": 3.0, "pool/policy_age_max": 5.0, "batch/groups_over_age": 3.0}
    assert age_stats([torch.zeros(0)], 0)["pool/policy_age_max"] == 0


def test_a_batch_s_statistics_are_the_means_of_its_updates() -> None:
    steps = [
        StepStats(torch.tensor([0.0]), 1.0, 0.5, 0.8, 2.0, {"loss": 1.0, "policy/entropy": 3.0}),
        StepStats(torch.tensor([1.0, 2.0]), 2.0, 1.0, 1.0, 4.0, {"loss": 2.0}),
    ]
    mean = mean_stats(steps)
    assert mean.log_weights.tolist() == [0, 1, 2]
    assert (mean.ess, mean.ess_ratio, mean.lr_scale, mean.grad_norm) == pytest.approx((1.5, 0.75, 0.9, 3.0))
    assert mean.metrics == {"loss": 1.5, "policy/entropy": 3.0}
    assert mean_stats(steps[:1]) is steps[0]


class Data:
    batch_groups = 2
    group_size = 4
    max_policy_age: int | None = 1
    max_tokens_per_micro_batch: int | None = 40
    sampling = SamplingParams(max_new_tokens=9)


def test_settings_that_agree_have_no_contradiction() -> None:
    assert contradictions(GMCGRPO(), GroupMean(), 2, Data()) == []  # 4 * (9 + 1) tokens fit into 40


def test_all_contradictions_are_named_at_once() -> None:
    data = Data()
    data.max_tokens_per_micro_batch = 39
    messages = " ".join(contradictions(GMCGRPO(), GroupMean(), 3, data))
    for message in (
        "model.updates_per_batch must be at most data.batch_groups, got 3 updates for 2 groups",
        "data.max_policy_age must be at least model.updates_per_batch - 1, got 1 for 3 updates",
        "data.max_tokens_per_micro_batch must hold a whole group where model.objective couples its members, got 39 tokens",
    ):
        assert message in messages
    assert "Raise it to at least 40" in messages
    assert len(contradictions(SequenceTIS(), GroupMean(), 2, data)) == 0


def test_without_a_bound_on_age_or_size_nothing_is_exceeded() -> None:
    data = Data()
    data.max_policy_age = data.max_tokens_per_micro_batch = None
    assert contradictions(GMCGRPO(), GroupMean(), 2, data) == []


def test_two_responses_are_a_group() -> None:
    data = Data()
    data.group_size = 2
    assert contradictions(SequenceTIS(), OPOB(), 1, data) == []


@pytest.mark.parametrize("advantage", [OPOB(), GroupMean("sample_std")])
def test_one_response_is_no_group(advantage) -> None:  # type: ignore[no-untyped-def]
    data = Data()
    data.group_size = 1
    (message,) = contradictions(SequenceTIS(), advantage, 1, data)
    assert message.startswith(f"data.group_size must be at least 2 with {type(advantage).__name__}, got 1")
