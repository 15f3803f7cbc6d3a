"""Weights of every objective: closed forms for stop-gradient weights, finite differences of the surrogate for surrogates."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_asyncrl.algorithm.losses import (
    CISPO,
    GMCGRPO,
    GSPO,
    M2PO,
    SAPO,
    TICGRPO,
    DecoupledPPO,
    IcePop,
    PPOClip,
    Reinforce,
    SequenceMask,
    SequenceTIS,
    TokenMIS,
    TokenTIS,
    check_aggregation,
    token_scales,
)
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Objective

RATIOS = torch.tensor([0.3, 0.6, 1.0, 2.5, 6.0], dtype=torch.float64)
OBJECTIVES = [
    Reinforce(),
    TokenTIS(),
    CISPO(),
    TokenMIS(),
    IcePop(),
    SequenceTIS(),
    SequenceMask(),
    SequenceMask(measure="geometric_mean", weight="token_ratio", negative_only=True),
    PPOClip(dual_clip=3.0),
    GSPO(),
    SAPO(),
    DecoupledPPO(),
    M2PO(),
    TICGRPO(),
    GMCGRPO(),
]


def weights(objective: Objective, ratios: Tensor, advantage: float = 1.0, groups: list[int] | None = None) -> list[float]:
    """omega of one-token trajectories with these ratios."""
    log_ratio = ratios.log()[:, None]
    index = torch.tensor(groups if groups is not None else [0] * len(ratios))
    advantages = torch.full((len(ratios),), advantage)
    return objective.coefficients(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool), advantages, index)[:, 0].tolist()


@pytest.mark.parametrize(
    ("objective", "advantage", "expected"),
    [
        (Reinforce(), 1.0, [1, 1, 1, 1, 1]),
        (TokenTIS(2.0), 1.0, [0.3, 0.6, 1, 2, 2]),
        (TokenTIS(5.0, min_weight=0.5), -1.0, [0.5, 0.6, 1, 2.5, 5]),
        (CISPO(), 1.0, [0.3, 0.6, 1, 2.5, 5]),
        (CISPO(0.5, 1.0), -1.0, [0.5, 0.6, 1, 2, 2]),
        (TokenMIS(), 1.0, [0, 0.6, 1, 0, 0]),
        (IcePop(), -1.0, [0, 0.6, 1, 2.5, 0]),
        (SequenceTIS(8.0), -1.0, [0.3, 0.6, 1, 2.5, 6]),
        (SequenceTIS(2.0), 1.0, [0.3, 0.6, 1, 2, 2]),
        (SequenceMask(), 1.0, [0, 1, 1, 0, 0]),
        (SequenceMask(weight="token_ratio"), 1.0, [0, 0.6, 1, 0, 0]),
        (SequenceMask(0.5, 5.0, weight="sequence_ratio"), 1.0, [0, 0.6, 1, 2.5, 0]),
        (SequenceMask(0.5, None), 1.0, [0, 1, 1, 1, 1]),
        (SequenceMask(None, 2.0), 1.0, [1, 1, 1, 0, 0]),
        (SequenceMask(0.5, None, negative_only=True), 1.0, [1, 1, 1, 1, 1]),
        (SequenceMask(0.5, None, negative_only=True), -1.0, [0, 1, 1, 1, 1]),
        (PPOClip(), 1.0, [0.3, 0.6, 1, 0, 0]),
        (PPOClip(), -1.0, [0, 0, 1, 2.5, 6]),
        (PPOClip(dual_clip=3.0), -1.0, [0, 0, 1, 2.5, 0]),
        (GSPO(0.5, 1.6), 1.0, [0.3, 0.6, 1, 2.5, 0]),
        (GSPO(0.5, 1.6), -1.0, [0, 0.6, 1, 2.5, 6]),
        (DecoupledPPO(), 1.0, [0.3, 0.6, 1, 2.5, 0]),  # proximal = current: the behavior weight alone, masked above 5
        (DecoupledPPO(mode="truncate"), -1.0, [0.3, 0.6, 1, 2.5, 5]),
        (TICGRPO(), 1.0, [0.3, 0.6, 1, 0, 0]),
        (TICGRPO(mode="truncate"), -1.0, [0.3, 0.6, 1, 1.2, 1.2]),
    ],
)
def test_weights_match_the_oracle(objective: Objective, advantage: float, expected: list[float]) -> None:
    assert weights(objective, RATIOS, advantage) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    # 4 s (1 - s) r, s = sigmoid(tau (r - 1)): r = .3: s = .331812, 4 * .331812 * .668188 * .3 = .266057
    [(1.0, [0.2661, 0.5766, 1, 1.4915, 0.1596]), (-1.0, [0.2629, 0.5743, 1, 1.4209, 0.1246])],
)
def test_soft_gate_matches_the_oracle(advantage: float, expected: list[float]) -> None:
    assert weights(SAPO(), RATIOS, advantage) == pytest.approx(expected, abs=5e-5)


def clip_surrogate(low: float, high: float, dual: float | None = None) -> Callable[[Tensor, float], Tensor]:
    def surrogate(log_ratio: Tensor, advantage: float) -> Tensor:
        ratio = log_ratio.exp()
        value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        return value if dual is None or advantage > 0 else value.clamp(min=dual * advantage)

    return surrogate


def soft_surrogate(log_ratio: Tensor, advantage: float) -> Tensor:
    tau = 1.0 if advantage > 0 else 1.05
    return 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * advantage


@pytest.mark.parametrize("advantage", [1.7, -0.8])
@pytest.mark.parametrize(
    ("objective", "surrogate"),
    [
        (PPOClip(), clip_surrogate(0.2, 0.2)),
        (PPOClip(0.2, 0.28), clip_surrogate(0.2, 0.28)),
        (PPOClip(0.1, 0.4, 3.0), clip_surrogate(0.1, 0.4, 3.0)),
        (GSPO(0.3, 2.0), clip_surrogate(0.3, 2.0)),
        (SAPO(), soft_surrogate),
    ],
    ids=["ppo", "clip higher", "dual clip", "gspo", "sapo"],
)
def test_weight_is_the_slope_of_the_surrogate(
    objective: Objective, surrogate: Callable[[Tensor, float], Tensor], advantage: float
) -> None:
    step, logs = 1e-6, RATIOS.log()
    slope = (surrogate(logs + step, advantage) - surrogate(logs - step, advantage)) / (2 * step)
    assert weights(objective, RATIOS, advantage) == pytest.approx((slope / advantage).tolist(), abs=1e-8)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gspo_weight_is_the_slope_of_a_geometric_mean(advantage: float) -> None:
    # surrogate min(s A, clip(s) A), s = exp(mean log-ratio): slope per token s A / T, with 1 / T from the aggregation
    log_ratio = torch.tensor([[0.3, -0.1, 0.4]], dtype=torch.float64)
    surrogate, step = clip_surrogate(0.5, 0.5), 1e-6
    up, down = (surrogate((log_ratio + torch.tensor([[s, 0.0, 0.0]])).mean(), advantage) for s in (step, -step))
    slope = float((up - down) / (2 * step)) * 3 / advantage
    arguments = (torch.ones(1, 3, dtype=torch.bool), torch.tensor([advantage]), torch.tensor([0]))
    assert GSPO(0.5, 0.5).coefficients(log_ratio, *arguments).tolist()[0] == pytest.approx([slope] * 3, abs=1e-8)
    assert slope == pytest.approx(math.exp(0.2), abs=1e-8)  # mean of .3, -.1, .4


SEQUENCE = (
    torch.tensor([[5.0, 0.2, -0.1, 0.3]], dtype=torch.float64),  # the masked 5.0 does not count
    torch.tensor([[False, True, True, True]]),
    torch.ones(1),
    torch.zeros(1, dtype=torch.long),
)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (SequenceTIS(), [1.4918247] * 3),  # e^(.2 - .1 + .3)
        (TICGRPO(), [0] * 3),
        (TICGRPO(mode="truncate"), [1.2] * 3),
        (TICGRPO(0.5), [1.4918247] * 3),
        (TICGRPO(0.5, "truncate"), [1.4918247] * 3),
        (GSPO(0.2, 0.2), [1.1426308] * 3),  # e^(.4 / 3)
        (GSPO(0.2, 0.14), [0] * 3),
        (SequenceMask(0.9, 1.2), [0] * 3),  # the product is 1.49
        (SequenceMask(0.9, 1.2, "geometric_mean"), [1] * 3),
        (SequenceMask(0.9, 1.2, "geometric_mean", "sequence_ratio"), [1.1426308] * 3),
        (SequenceMask(0.9, 1.2, "geometric_mean", "token_ratio"), [1.2214028, 0.9048374, 1.3498588]),
    ],
)
def test_sequence_measures_run_over_trained_tokens(objective: Objective, expected: list[float]) -> None:
    assert objective.coefficients(*SEQUENCE)[0, 1:].tolist() == pytest.approx(expected, abs=1e-7)


def test_off_policy_sequence_masking_drops_bad_responses_that_the_policy_left() -> None:
    # mean(behavior - current) = .2 and .05 nats, delta = .1: only the first is beyond, and only if its advantage is negative
    log_ratio = torch.tensor([[-0.3, -0.1], [-0.05, -0.05], [-0.3, -0.1]], dtype=torch.float64)
    objective = SequenceMask(math.exp(-0.1), None, "geometric_mean", negative_only=True)
    arguments = (torch.ones(3, 2, dtype=torch.bool), torch.tensor([-1.0, -1.0, 1.0]), torch.zeros(3, dtype=torch.long))
    assert objective.coefficients(log_ratio, *arguments).tolist() == [[0, 0], [1, 1], [1, 1]]


def test_group_mass_capping_matches_the_oracle() -> None:
    # mean 1.625 > 1.2: kappa = 1.2 / 1.625; the second group's mean 1.175 is below the cap
    ratios = torch.tensor([0.5, 0.8, 1.2, 4.0, 0.9, 1.0, 1.1, 1.7], dtype=torch.float64)
    result = weights(GMCGRPO(0.2), ratios, groups=[0] * 4 + [1] * 4)
    assert result[:4] == pytest.approx([0.3692308, 0.5907692, 0.8861538, 2.9538462], abs=1e-7)
    assert result[4:] == pytest.approx([0.9, 1.0, 1.1, 1.7], abs=1e-12)


def test_masking_turns_the_sign_that_group_mass_capping_keeps() -> None:
    # sum_i w_i A_i / 4 with A = 1, -1, 1, -1: importance sampling (.5 - .8 + 1.2 - 4) / 4 = -.775; mask (.5 - .8 + 1.2) / 4
    ratios, signs = torch.tensor([0.5, 0.8, 1.2, 4.0], dtype=torch.float64), [1, -1, 1, -1]
    for objective, expected in (
        (GMCGRPO(), -0.5723077),  # 1.2 / 1.625 * -.775
        (TICGRPO(), 0.225),
        (TICGRPO(mode="truncate"), -0.075),  # (.5 - .8 + 1.2 - 1.2) / 4
    ):
        result = weights(objective, ratios)
        assert sum(w * a for w, a in zip(result, signs, strict=True)) / 4 == pytest.approx(expected, abs=1e-7)


def test_group_mass_capping_does_not_overflow_and_skips_untrained_members() -> None:
    log_ratio = torch.tensor([[700.0], [0.0], [0.0], [-5.0], [0.0]], dtype=torch.float64)
    mask = torch.tensor([[True]] * 4 + [[False]])
    result = GMCGRPO(0.2).coefficients(log_ratio, mask, torch.ones(5), torch.zeros(5, dtype=torch.long))[:4, 0]
    assert result[0] == pytest.approx(4.8)  # 4 members * 1.2
    assert result[1] == pytest.approx(4.8 * math.exp(-700), rel=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_huge_log_ratios_give_finite_float32_weights(objective: Objective) -> None:
    log_ratio = torch.tensor([[700.0], [-700.0], [700.0], [-700.0]])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    arguments = (torch.ones(4, 1, dtype=torch.bool), advantages, torch.zeros(4, dtype=torch.long))
    assert objective.coefficients(log_ratio, *arguments).isfinite().all()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_ratios_of_one_give_weights_of_one(objective: Objective) -> None:
    for advantage in (1.0, -1.0):
        assert weights(objective, torch.ones(3, dtype=torch.float64), advantage) == [1, 1, 1]


@pytest.mark.parametrize("objective", [TokenTIS(1e12), SequenceTIS(1e12), CISPO(1.0, 1e12), GMCGRPO(1e12), TICGRPO(1e12)])
def test_an_infinite_cap_gives_plain_importance_sampling(objective: Objective) -> None:
    assert weights(objective, RATIOS) == pytest.approx(RATIOS.tolist(), rel=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_what_stands_at_masked_tokens_changes_no_weight(objective: Objective) -> None:
    log_ratio = torch.tensor([[0.2, 0.0, -0.3], [0.4, 0.1, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    arguments = (mask, torch.tensor([1.0, -1.0]), torch.tensor([0, 0]))
    expected = objective.coefficients(log_ratio, *arguments)[mask]
    for poison in (math.nan, math.inf, -math.inf, 1e9):
        assert torch.equal(objective.coefficients(log_ratio.masked_fill(~mask, poison), *arguments)[mask], expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SequenceTIS(0.0), r"objective\.init_args\.max_weight must be a finite number above 0, got 0\.0"),
        (lambda: TokenTIS(-1.0), "max_weight"),
        (lambda: TokenTIS(2.0, min_weight=3.0), r"min_weight must be in \[0, max_weight = 2\.0\], got 3\.0"),
        (lambda: SequenceTIS(math.nan), "max_weight"),
        (lambda: CISPO(epsilon_low=1.5), "epsilon_low must be at most 1"),
        (lambda: TokenMIS(2.0, 0.5), "lower must be in"),
        (lambda: SequenceMask(None, None), "lower must be set where upper is not"),
        (lambda: SequenceMask(2.0, 1.0), r"lower must be below upper = 1\.0, got 2\.0"),
        (lambda: SequenceMask(measure="sum"), "measure must be one of"),  # type: ignore[arg-type]
        (lambda: PPOClip(epsilon_low=1.5), "epsilon_low must be at most 1"),
        (lambda: PPOClip(epsilon_high=0.0), "epsilon_high"),
        (lambda: PPOClip(dual_clip=1.0), "dual_clip must be above 1"),
        (lambda: GSPO(epsilon_high=-1.0), "epsilon_high"),
        (lambda: SAPO(tau_negative=0.0), "tau_negative"),
        (lambda: DecoupledPPO(max_weight=0.0), "max_weight"),
        (lambda: M2PO(budget=0.0), "budget"),
        (lambda: M2PO(min_epsilon_low=2.0), "min_epsilon_low must be at most 1"),
        (lambda: GMCGRPO(0.0), "epsilon"),
        (lambda: TICGRPO(mode="clip"), r"mode must be one of \['mask', 'truncate'\]"),  # type: ignore[arg-type]
        (lambda: check_aggregation("mean", None), r"model\.aggregation must be one of"),
        (lambda: check_aggregation("constant-length", None), "max_response_length must be a positive"),
        (lambda: check_aggregation("token-mean", 5), "max_response_length must be a positive"),
        (lambda: check_aggregation("constant-length", 0), "max_response_length must be a positive"),
    ],
)
def test_impossible_values_are_refused_by_key(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_all_impossible_values_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"epsilon_low must .*epsilon_high must .*dual_clip must"):
        PPOClip(epsilon_low=2.0, epsilon_high=-1.0, dual_clip=0.5)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence-mean-token-mean", [1 / 20, 1 / 40]),  # 1 / (10 * 2), 1 / (10 * 4)
        ("token-mean", [1 / 50, 1 / 50]),
        ("sequence-mean-token-sum", [1 / 10, 1 / 10]),
        ("constant-length", [1 / 80, 1 / 80]),  # 1 / (10 * 8)
    ],
)
def test_token_scales_use_the_whole_batch(aggregation, expected: list[float]) -> None:  # type: ignore[no-untyped-def]
    length = 8 if aggregation == "constant-length" else None
    scales = token_scales(
        aggregation, torch.tensor([2, 4]), num_trajectories=10, num_trained_tokens=50, max_response_length=length
    )
    assert scales.tolist() == pytest.approx(expected, abs=1e-15)
