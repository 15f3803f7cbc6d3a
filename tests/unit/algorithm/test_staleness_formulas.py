"""PACE's formulas against the hand-computed pool of eight trajectories."""

import math

import pytest
import torch

from lit_asyncrl.algorithm.staleness import (
    absolute_scores,
    effective_staleness,
    generation_staleness,
    group_means,
    members_to_reject,
    percentile_scores,
    prefix_forgetting,
    prefix_mask,
    rejection_budget,
    waiting_staleness,
)

# id: segments (version, tokens), completed version, forgetting of the prefix
POOL = {
    "a": ([(10, 100)], 10, None),
    "b": ([(7, 100), (8, 100), (9, 100), (10, 100)], 10, 0.02),
    "c": ([(7, 100), (8, 100), (9, 100), (10, 100)], 10, 0.50),
    "d": ([(9, 100)], 9, None),
    "e": ([(8, 50), (9, 150)], 9, 0.10),
    "f": ([(11, 100)], 11, None),
    "g": ([(9, 150), (11, 150)], 11, 0.05),
    "h": ([(8, 100)], 8, None),
}
VERSIONS = torch.cat([torch.full((n,), v) for segments, _, _ in POOL.values() for v, n in segments]).int()
LENGTHS = torch.tensor([sum(n for _, n in segments) for segments, _, _ in POOL.values()])
COMPLETED = torch.tensor([c for _, c, _ in POOL.values()])
START = torch.tensor([min(v for v, _ in segments) for segments, _, _ in POOL.values()])
FORGETTING = torch.tensor([float("nan") if f is None else f for _, _, f in POOL.values()])


def test_generation_and_waiting_staleness_add_up_to_the_mean_age() -> None:
    generation = generation_staleness(VERSIONS, LENGTHS, COMPLETED)
    waiting = waiting_staleness(12, COMPLETED)
    # b: (3 + 2 + 1 + 0) / 4 = 1.5; e: 1 * 50 / 200 = .25; g: 2 * 150 / 300 = 1
    assert generation.tolist() == [0, 1.5, 1.5, 0, 0.25, 0, 1, 0]
    assert waiting.tolist() == [2, 2, 2, 3, 3, 1, 1, 4]
    assert (generation + waiting).tolist() == [2, 3.5, 3.5, 3, 3.25, 1, 2, 4]


def test_percentiles_rank_only_members_with_a_prefix() -> None:
    # four members have a prefix: .02 < .05 < .10 < .50
    assert percentile_scores(FORGETTING).tolist() == [0, 0.25, 1, 0, 0.75, 0, 0.5, 0]


def test_equal_forgetting_gives_everyone_the_lowest_rank() -> None:
    assert percentile_scores(torch.zeros(4)).tolist() == [0.25] * 4
    assert percentile_scores(torch.full((3,), float("nan"))).tolist() == [0, 0, 0]


def test_effective_staleness_and_the_rejected_members_match_the_oracle() -> None:
    generation, waiting = generation_staleness(VERSIONS, LENGTHS, COMPLETED), waiting_staleness(12, COMPLETED)
    staleness = effective_staleness(waiting, generation, percentile_scores(FORGETTING))
    # b: 2 + .25^4 * 1.5; c: 2 + 1.5; e: 3 + .75^4 * .25; g: 1 + .5^4
    expected = [2, 2.005859375, 3.5, 3, 3.0791015625, 1, 1.0625, 4]
    assert staleness.tolist() == pytest.approx(expected, abs=1e-12)
    ids = torch.arange(8)
    assert {"abcdefgh"[i] for i in members_to_reject(staleness, START, ids, 3)} == {"h", "c", "e"}
    total = effective_staleness(waiting, generation, percentile_scores(FORGETTING), gamma=0.0)
    # gamma 0: 0^0 = 1, so generation counts in full: h 4, then b and c 3.5
    assert {"abcdefgh"[i] for i in members_to_reject(total, START, ids, 3)} == {"h", "b", "c"}


def test_rejection_budget_matches_the_oracle() -> None:
    # x = (8 - 4) / 8 = .5; q = .5 * .25 + .5 * .5 = .375; floor(.375 * 8) = 3 <= 8 - 4
    assert rejection_budget(8, 4, 4, previous_ema=0.25, beta=0.5) == (3, 0.375)


def test_rejection_never_starves_the_next_batch() -> None:
    assert rejection_budget(5, 1, 4, previous_ema=0.9, beta=0.0) == (1, 0.9)  # floor(4.5) = 4, but 5 - 4 = 1
    assert rejection_budget(3, 1, 4, previous_ema=0.9, beta=0.0)[0] == 0
    assert rejection_budget(0, 1, 4, previous_ema=0.5, beta=0.2) == (0, pytest.approx(0.4))


def test_budget_is_not_lost_to_rounding() -> None:
    # .29 * 100 is 28.999999999999996 in binary
    assert rejection_budget(100, 1, 10, previous_ema=0.29, beta=0.0)[0] == 29


def test_ties_go_to_the_older_start_version_and_then_to_the_lower_id() -> None:
    staleness = torch.tensor([1.0, 2.0, 2.0, 2.0])
    start, ids = torch.tensor([0, 5, 4, 4]), torch.tensor([1, 2, 9, 7])
    assert members_to_reject(staleness, start, ids, 4).tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("signed", (0.5 - 0.1) / 2),
        ("abs", (0.5 + 0.1) / 2),
        ("pos", 0.5 / 2),
        # e^-.5 - 1 + .5 = .10653066, e^.1 - 1 - .1 = .00517092; mean .05585079
        ("k3", 0.05585079),
    ],
)
def test_prefix_forgetting_averages_over_the_prefix_alone(score: str, expected: float) -> None:
    versions = torch.tensor([-1, 3, 3, 4, -1, 4])
    lengths = torch.tensor([4, 2])
    behavior = torch.tensor([0.0, -1.0, -2.0, -1.0, 0.0, -1.0])
    poison = float("nan")
    logprobs = torch.tensor([poison, -1.5, -1.9, poison, poison, poison], dtype=torch.float64)
    assert prefix_mask(versions, lengths, 4).tolist() == [False, True, True, False, False, False]
    forgetting = prefix_forgetting(logprobs, behavior, versions, lengths, 4, score)
    assert float(forgetting[0]) == pytest.approx(expected, abs=1e-7)
    assert bool(forgetting[1].isnan())


def test_tokens_that_were_not_sampled_do_not_age() -> None:
    versions = torch.tensor([-1, -1, 2, 4, -1, -1])
    # member 0: (4 - 2 + 4 - 4) / 2 = 1; member 1 sampled nothing
    assert generation_staleness(versions, torch.tensor([4, 2]), 4).tolist() == [1, 0]


def test_group_means_average_members() -> None:
    assert group_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]), 2).tolist() == [2, 5]


def test_absolute_scores_weigh_what_was_forgotten_and_nothing_else() -> None:
    # 1 - e^-.5 = .39346934; a prefix that became likelier, and none at all, score 0
    scores = absolute_scores(torch.tensor([0.5, -0.5, float("nan"), 0.0, 50.0]))
    assert scores.tolist() == pytest.approx([0.39346934, 0, 0, 0, 1], abs=1e-8)


def test_tokens_of_version_0_are_sampled_ones():
    versions, lengths = torch.tensor([-1, 0, 2]), torch.tensor([3])
    assert generation_staleness(versions, lengths, 2).tolist() == [1.0]  # (2 + 0) / 2
    assert prefix_mask(versions, lengths, 2).tolist() == [False, True, False]


def test_a_prompt_token_is_no_prefix_whatever_was_served():
    assert prefix_mask(torch.tensor([-1, 1]), torch.tensor([2]), 1).tolist() == [False, False]


def test_the_positive_score_counts_no_token_that_became_likelier():
    # d = .5 and -.3: (.5 + 0) / 2
    result = prefix_forgetting(
        torch.tensor([0.0, -1.0, -0.2]), torch.tensor([0.0, -0.5, -0.5]), torch.tensor([-1, 0, 0]), torch.tensor([3]), 1, "pos"
    )
    assert result.tolist() == pytest.approx([0.25])


def test_one_scored_member_has_the_full_percentile():
    assert percentile_scores(torch.tensor([0.3, math.nan])).tolist() == [1.0, 0.0]


def test_the_budget_is_smoothed_by_a_fifth():
    # excess (40 - 20) / 40 = .5, ema = .8 * 0 + .2 * .5 = .1, floor(.1 * 40) = 4
    assert rejection_budget(40, 20.0, 8, 0.0) == (4, pytest.approx(0.1))


def test_ties_keep_the_lower_id_and_the_older_start_first():
    staleness = torch.full((40,), 2.0)
    start = torch.arange(40) % 2
    ids = torch.arange(39, -1, -1)
    chosen = members_to_reject(staleness, start, ids, 40)
    # among equals, start version 0 first, each by rising id; ids fall with the position
    assert ids[chosen].tolist() == sorted(ids[start == 0].tolist()) + sorted(ids[start == 1].tolist())


def test_members_of_one_group_that_tie_in_all_keep_their_order():
    # ids 9 9 9 9 8 8 8 8 ... 0: of equal ones, the first comes first
    ids = torch.arange(39, -1, -1) // 4
    chosen = members_to_reject(torch.zeros(40), torch.zeros(40), ids, 40).tolist()
    assert chosen == [4 * (9 - name) + member for name in range(10) for member in range(4)]
