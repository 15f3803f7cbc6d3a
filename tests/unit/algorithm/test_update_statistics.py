"""Numbers of a whole update from those of its micro-batches, and what counts as trained, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import make_batch

from lit_asyncrl.algorithm.micro_batches import select, split_updates, trained_counts, without_over_age
from lit_asyncrl.algorithm.mismatch import Mismatch, mismatch_metrics
from lit_asyncrl.algorithm.scored import MicroBatchStats, no_stats
from lit_asyncrl.algorithm.statistics import age_stats, pool_stats
from lit_asyncrl.types import MicroBatch


def part(log_weights: list[float], num_tokens: int, **changes: object) -> MicroBatchStats:
    n = len(log_weights)
    stats = MicroBatchStats(
        rows=torch.arange(n),
        log_weights_B=torch.tensor(log_weights, dtype=torch.float64),
        lengths=torch.ones(n, dtype=torch.long),
        advantages=torch.tensor([1.0, -2.0, 3.0][:n]),
        baselines=None,
        score_norms_squared=None,
        loss=0.25,
        num_tokens=num_tokens,
        num_clipped=1,
        log_ratio_sum=0.6,
        k3_sum=0.3,
        entropy_sum=1.5,
        weight_sum=2.0,
        removed_sum=0.5,
    )
    return replace(stats, **changes)  # type: ignore[arg-type]


def test_sums_are_divided_by_the_tokens_of_the_whole_update() -> None:
    stats = pool_stats([part([0.0, 0.0], 2), part([math.log(3.0)], 4)], 7)
    metrics = stats.metrics
    assert metrics["loss"] == 0.5
    assert metrics["policy/entropy"] == pytest.approx(3.0 / 6)
    assert metrics["policy/advantage_abs_mean"] == pytest.approx((1 + 2 + 1) / 3)
    assert metrics["weights/log_ratio_mean"] == pytest.approx(1.2 / 6)
    assert metrics["weights/k3_kl"] == pytest.approx(0.6 / 6)
    assert metrics["weights/clipped_share"] == pytest.approx(2 / 6)
    assert metrics["weights/sequence_weight_mean"] == pytest.approx((1 + 1 + 3) / 3)
    assert metrics["weights/sequence_weight_max"] == pytest.approx(3.0)
    assert metrics["mismatch/truncation"] == pytest.approx(1.0 / 4.0)
    assert (stats.ess, stats.ess_ratio) == pytest.approx((25 / 11, 25 / 33))  # (1 + 1 + 3)^2 / (1 + 1 + 9)
    assert "policy/baseline_mean" not in metrics
    assert "policy/reference_kl" not in metrics


def test_baselines_and_reference_kl_are_means_where_there_are_any() -> None:
    one = part([0.0], 2, baselines=torch.tensor([0.5]), reference_kl_sum=0.4)
    two = part([0.0, 0.0], 4, baselines=torch.tensor([1.0, 3.0]), reference_kl_sum=0.8)
    metrics = pool_stats([one, two], 7).metrics
    assert metrics["policy/baseline_mean"] == pytest.approx(4.5 / 3)
    assert metrics["policy/reference_kl"] == pytest.approx(1.2 / 6)


def test_weights_that_are_all_0_lose_nothing_by_truncation() -> None:
    assert pool_stats([part([0.0], 2, weight_sum=0.0, removed_sum=0.0)], 7).metrics["mismatch/truncation"] == 0.0
    assert pool_stats([part([0.0], 2, weight_sum=0.2, removed_sum=0.1)], 7).metrics["mismatch/truncation"] == pytest.approx(0.5)


def test_an_update_with_one_trained_token_has_statistics_and_one_without_any_has_none() -> None:
    assert pool_stats([part([0.0], 1)], 7).ess_ratio == 1.0
    stats = pool_stats([no_stats(make_batch())], 7)
    assert (stats.ess, stats.ess_ratio, stats.metrics) == (0.0, 0.0, {})


def test_a_micro_batch_without_trained_tokens_adds_nothing() -> None:
    values = vars(no_stats(make_batch()))
    assert [name for name, value in values.items() if isinstance(value, torch.Tensor) and len(value)] == []
    assert [name for name, value in values.items() if isinstance(value, int | float) and value != 0] == []


def test_no_token_has_the_age_0() -> None:
    assert age_stats([torch.zeros(0)], 0) == {
        "pool/policy_age_mean": 0.0,
        "pool/policy_age_max": 0.0,
        "batch/groups_over_age": 0.0,
    }


# ---------------------------------------------------------------- micro-batches


def test_a_trajectory_is_as_wide_as_its_own_tokens() -> None:
    mask = torch.tensor([[True, True, False, False], [True, True, True, False], [True, False, False, False]])
    zeros = torch.zeros(3, 4)
    batch = MicroBatch(zeros.long(), mask, mask, zeros, zeros.int(), zeros[:, 0], torch.tensor([0, 0, 1]), 1.0)
    assert select(batch, torch.tensor([0, 2])).input_ids.shape == (2, 2)  # not 1 + 2 tokens, nor 3 trajectories' worth
    assert trained_counts([batch, batch]) == (6, 12)
    partly = replace(batch, loss_mask=mask & torch.tensor([False, True, False, False]))
    assert trained_counts([partly]) == (2, 2)  # one token each: a trajectory needs one trained token, not all


def test_dealing_goes_on_from_one_micro_batch_to_the_next() -> None:
    # groups 0 1 2 | 3 4 | 5 6, three updates: 0 3 6, 1 4, 2 5
    parts = [make_batch(3, 2), make_batch(2, 2), make_batch(2, 2)]
    named = [replace(batch, rewards=batch.group_index.double() + first) for batch, first in zip(parts, (0, 3, 5), strict=True)]
    updates = split_updates(named, 3)
    assert [sorted({r for p in update for r in p.rewards.tolist()}) for update in updates] == [[0, 3, 6], [1, 4], [2, 5]]


def test_groups_of_tokens_from_the_future_are_not_over_age() -> None:
    versions = torch.tensor([[-1, 12, 12]], dtype=torch.int32)  # age -3 at version 9, under a bound of -1 updates
    mask, zeros = versions >= 0, torch.zeros(1, 3)
    batch = MicroBatch(zeros.long(), mask, mask, zeros, versions, zeros[:, 0], torch.zeros(1, dtype=torch.long), 1.0)
    assert without_over_age(batch, 9, 0, "mean")[1] == []
    assert without_over_age(batch, 9, 0, "oldest")[1] == []


# ---------------------------------------------------------------- mismatch


def test_tokens_of_version_0_are_sampled_ones() -> None:
    versions = torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32)
    log_ratio = torch.tensor([[0.0, 0.1, 0.3, 1.0]])
    # version 1's token comes after a prefix of version 0: it is stale
    assert Mismatch.of(log_ratio, versions >= 0, versions).clean == {0: (pytest.approx(0.4), 2)}


def test_an_untrained_token_of_the_own_version_is_no_clean_one() -> None:
    versions = torch.tensor([[-1, 3, 3]], dtype=torch.int32)
    mismatch = Mismatch.of(torch.tensor([[0.0, 0.5, 0.25]]), torch.tensor([[False, False, True]]), versions)
    assert mismatch.clean == {3: (pytest.approx(0.25), 1)}


def test_nothing_has_no_mismatch() -> None:
    assert mismatch_metrics([Mismatch()], 3) == {}
    assert (Mismatch().total, Mismatch().count) == (0.0, 0)
