"""Group-relative advantages and the off-policy optimal baseline against hand-computed numbers."""

import pytest
import torch
from torch import Tensor

from lit_asyncrl.algorithm.advantages import OPO, OPOB, GroupMean, LeaveOneOut
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Advantage


def advantages(advantage: Advantage, rewards: list[float], groups: list[int] | None = None, **kwargs: Tensor) -> list[float]:
    size = len(rewards)
    arguments = {
        "lengths": torch.ones(size, dtype=torch.long),
        "log_weights": torch.zeros(size),
        "score_norms_squared": torch.ones(size),
    } | kwargs
    index = torch.tensor(groups if groups is not None else [0] * size)
    return advantage(torch.tensor(rewards, dtype=torch.float64), index, **arguments).tolist()


REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (GroupMean("population_std"), [1.224745, -0.816497]),  # .6 / sqrt(.24), -.4 / sqrt(.24)
        (GroupMean("sample_std"), [1.095445, -0.730297]),  # .6 / sqrt(.3)
        (GroupMean("none"), [0.6, -0.4]),
        (LeaveOneOut(), [0.75, -0.5]),  # 5 / 4 of the line above
    ],
)
def test_group_relative_advantages_match_the_oracle(advantage: Advantage, expected: list[float]) -> None:
    good, bad = expected
    assert advantages(advantage, REWARDS) == pytest.approx([good, bad, bad, good, bad], abs=1e-6)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (GroupMean("sample_std"), [0.707107, -0.707107]),  # 1 / sqrt((1 + 1) / (2 - 1))
        (LeaveOneOut(), [2.0, -2.0]),  # each less the other one: 2 - 0
    ],
)
def test_two_members_have_one_degree_of_freedom(advantage: Advantage, expected: list[float]) -> None:
    assert advantages(advantage, [2.0, 0.0]) == pytest.approx(expected, abs=1e-6)


def test_length_weighted_baseline_matches_the_oracle() -> None:
    # b = (10 + 10) / (10 + 20 + 30 + 10 + 30) = .2
    result = advantages(OPO(), REWARDS, lengths=torch.tensor([10, 20, 30, 10, 30]))
    assert result == pytest.approx([0.8, -0.2, -0.2, 0.8, -0.2], abs=1e-12)


def test_length_weighted_baseline_leaves_untrained_responses_out_unless_there_are_no_others() -> None:
    # second group: b = 4 / 1; third: plain mean 1
    lengths = torch.tensor([1, 3, 0, 1, 0, 0])
    result = advantages(OPO(), [0, 4, 2, 4, 0, 2], [0, 0, 1, 1, 2, 2], lengths=lengths)
    assert result == pytest.approx([-3, 1, -2, 0, -1, 1])


def test_groups_do_not_see_each_other() -> None:
    both = advantages(GroupMean(), [*REWARDS, 5.0, 7.0], [0] * 5 + [1] * 2)
    assert both[:5] == advantages(GroupMean(), REWARDS)
    assert both[5:] == [-1, 1]


@pytest.mark.parametrize("advantage", [GroupMean(), GroupMean("sample_std"), GroupMean("none"), LeaveOneOut(), OPO(), OPOB()])
def test_a_group_of_equal_rewards_has_no_advantage(advantage: Advantage) -> None:
    assert advantages(advantage, [0.1] * 3, log_weights=torch.tensor([0.3, -2.0, 5.0])) == [0, 0, 0]


@pytest.mark.parametrize("advantage", [GroupMean(), GroupMean("sample_std"), LeaveOneOut(), OPO(), OPOB(), OPOB(scope="batch")])
def test_a_lone_member_has_no_advantage(advantage: Advantage) -> None:
    assert advantages(advantage, [2.0]) == [0]


def test_a_spread_of_no_more_than_the_smallest_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_asyncrl.algorithm.advantages.MIN_STD", 0.5)  # that of (0, 1)
    assert advantages(GroupMean(), [0.0, 1.0, 0.0, 1.5], [0, 0, 1, 1]) == [0, 0, -1, 1]


ORACLE = {
    "log_weights": torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64).log(),
    "score_norms_squared": torch.tensor([1.0, 4.0, 1.0]),
}


@pytest.mark.parametrize(
    ("options", "baseline"),
    [
        ({}, 5 / 6),  # W = 1, .25 * 4, 4 -> (1 + 4) / 6
        ({"weighting": "released"}, 0.9855072),  # W = 1, 1 * .25, 4 * 4 -> 17 / 17.25
        ({"normalize_by_length": True}, 1.25 / 1.5),  # T = 1, 2, 4: W = 1, .25, .25 -> 1.25 / 1.5
    ],
)
def test_optimal_baseline_matches_the_oracle(options: dict, baseline: float) -> None:
    lengths = torch.tensor([1, 2, 4])
    result = advantages(OPOB(normalize="none", **options), [1, 0, 1], lengths=lengths, **ORACLE)
    assert result == pytest.approx([1 - baseline, -baseline, 1 - baseline], abs=1e-7)


def test_optimal_baseline_is_divided_by_the_population_std() -> None:
    result = advantages(OPOB(), [1, 0, 1], **ORACLE)
    assert result == pytest.approx([(1 / 6) / 0.4714045, (-5 / 6) / 0.4714045, (1 / 6) / 0.4714045], abs=1e-6)


def test_released_weighting_truncates_its_second_weight_at_eight() -> None:
    logs = torch.tensor([16.0, 1.0], dtype=torch.float64).log()
    # W = 8^2 * 16^2, 1 -> b = 16384 / 16385
    result = advantages(OPOB(weighting="released", normalize="none"), [1, 0], log_weights=logs)
    assert result == pytest.approx([1 - 16384 / 16385, -16384 / 16385], abs=1e-12)


def test_one_baseline_of_a_batch_is_taken_from_group_relative_values() -> None:
    # values (1, -1) and (1, -1); W = 1, 1, 4, 0 -> b = (1 - 1 + 4) / 6 = 2/3
    logs = torch.tensor([1.0, 1.0, 2.0, 0.0], dtype=torch.float64).log()
    result = advantages(OPOB(scope="batch"), [3, 1, 5, 0], [0, 0, 1, 1], log_weights=logs)
    assert result == pytest.approx([1 / 3, -5 / 3, 1 / 3, -5 / 3])


def test_a_given_baseline_of_the_batch_is_used_for_its_parts() -> None:
    opob = OPOB(scope="batch", normalize="none")
    # the part's values are (1, -1)
    assert advantages(opob.with_baseline(0.25), [3, 1]) == pytest.approx([0.75, -1.25])
    assert opob.given_baseline is None


def test_no_baseline_has_a_smaller_weighted_second_moment() -> None:
    weights, norms = torch.rand(6, dtype=torch.float64) * 3, torch.rand(6, dtype=torch.float64)
    rewards = torch.rand(6, dtype=torch.float64)
    w = weights.square() * norms
    centred = advantages(OPOB(normalize="none"), rewards.tolist(), log_weights=weights.log(), score_norms_squared=norms)
    moment = float((w * torch.tensor(centred, dtype=torch.float64).square()).sum())
    assert moment == pytest.approx(float((w * rewards**2).sum() - (w * rewards).sum() ** 2 / w.sum()), abs=1e-12)
    for other in (rewards.mean(), (weights * rewards).sum() / weights.sum(), torch.tensor(0.0)):
        assert moment <= float((w * (rewards - other) ** 2).sum()) + 1e-12


@pytest.mark.parametrize("log_weight", [700.0, -700.0])
def test_optimal_baseline_of_huge_log_weights_is_finite(log_weight: float) -> None:
    logs = torch.tensor([log_weight, 0.0, log_weight])
    result = advantages(OPOB(normalize="none"), [1, 0, 0], log_weights=logs)
    # positive: members 0 and 2 share the weight, b = 1/2; negative: member 1 has it all, b = 0
    baseline = 0.5 if log_weight > 0 else 0.0
    assert result == pytest.approx([1 - baseline, -baseline, -baseline])


def test_a_group_without_scores_falls_back_to_its_mean() -> None:
    norms = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])
    result = advantages(OPOB(normalize="none"), [3, 0, 0, 0, 4], [0, 0, 0, 1, 1], score_norms_squared=norms)
    assert result == [2, -1, -1, -2, 2]


def test_unknown_options_are_refused_by_key() -> None:
    with pytest.raises(ConfigurationError, match=r"score_norm must be one of .* got 'exact'"):
        OPOB(score_norm="exact")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="normalize"):
        GroupMean("std")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError, match=r"weighting must be one of \['paper', 'released'\], got 'code'.*normalize must be"
    ):
        OPOB(weighting="code", normalize="std")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"score_norm must .*scope must be one of \['group', 'batch'\], got 'run'"):
        OPOB(score_norm="exact", scope="run")  # type: ignore[arg-type]
