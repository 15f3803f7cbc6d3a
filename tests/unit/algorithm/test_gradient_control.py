"""Step-size factor of VCPO, projection of GAC, and the scalars they pool over processes."""

import json
import math
import multiprocessing
from pathlib import Path

import pytest
import torch

from lit_asyncrl.algorithm.gradients import (
    alignment,
    calibrated_thresholds,
    ess_lr_scale,
    gac_beta,
    gac_regime,
    gradient_products,
    has_fallen,
    project_gradients,
    projected_alignment,
)
from lit_asyncrl.algorithm.ranks import mean_over_ranks, pooled_ess_ratio, summed_over_ranks


@pytest.mark.parametrize(
    ("ratio", "reference", "expected"),
    [(2 / 3, 1.0, 0.8164966), (2 / 3, 0.55, 1.0), (1 / 3, 1.0, 0.5773503), (1 / 3, 0.55, 0.7784989)],
)
def test_lr_scale_matches_the_oracle(ratio: float, reference: float, expected: float) -> None:
    assert ess_lr_scale(ratio, reference) == pytest.approx(expected, abs=1e-7)


def test_linear_rule_and_floor() -> None:
    assert ess_lr_scale(0.25, 0.5, "linear") == 0.5
    assert ess_lr_scale(0.0001, floor=0.1) == 0.1
    assert ess_lr_scale(0.0001) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0, 1.0, 4.0], 2 / 3),  # 36 / (3 * 18)
        ([1.0, 1.0, 1.0, 1.0], 1.0),
        ([0.001, 0.001, 0.001, 8.0], 0.2501875),
        ([1.0, 1.0, 20.0], 0.4013267),
        ([5.0], 1.0),
    ],
)
def test_the_pooled_ratio_matches_the_oracle(weights: list[float], expected: float) -> None:
    assert pooled_ess_ratio(torch.tensor(weights).log()) == pytest.approx(expected, abs=1e-7)


def test_the_pooled_ratio_of_huge_weights_does_not_overflow() -> None:
    assert pooled_ess_ratio(torch.tensor([700.0, 0.0, 0.0, -5.0])) == pytest.approx(0.25)
    assert pooled_ess_ratio(torch.tensor([-700.0, -700.0])) == pytest.approx(1.0)


def test_the_pooled_ratio_without_weight_is_zero() -> None:
    assert pooled_ess_ratio(torch.zeros(0)) == 0.0
    assert pooled_ess_ratio(torch.tensor([-math.inf])) == 0.0


CASES = [
    # g, previous, cosine, full, beta at .2, projected at .2, beta at .05
    ((3.0, 4.0), (2.0, 0.0), 0.6, (0, 4), 0.2721655, (0.8164966, 4), 0.0667502),
    (
        (1.0, 2, 2),
        (2.0, 1, 2),
        0.8888889,
        (-0.7777778, 1.1111111, 0.2222222),
        0.1052032,
        (-0.5907499, 1.2046250, 0.4092501),
        0.0258017,
    ),
]


@pytest.mark.parametrize(("g", "previous", "cosine", "full", "beta_2", "projected", "beta_05"), CASES)
def test_projection_matches_the_oracle(g, previous, cosine, full, beta_2, projected, beta_05) -> None:  # type: ignore[no-untyped-def]
    for beta, expected in ((gac_beta(cosine, 0.2, "full"), full), (gac_beta(cosine, 0.2), projected)):
        gradient, reference = [torch.tensor(g, dtype=torch.float64)], [torch.tensor(previous, dtype=torch.float64)]
        products = gradient_products(gradient, reference)
        assert alignment(products) == pytest.approx(cosine, abs=1e-7)
        result = project_gradients(gradient, reference, products, beta)
        assert result[0].tolist() == pytest.approx(expected, abs=1e-6)
        assert gradient[0].tolist() == list(g)  # the next reference
        after, ratio = projected_alignment(cosine, beta)
        assert ratio == pytest.approx(float(result[0].norm() / gradient[0].norm()), abs=1e-6)
        assert after == pytest.approx(0.0 if beta == 0 else 0.2, abs=1e-6)
    assert gac_beta(cosine, 0.2) == pytest.approx(beta_2, abs=1e-6)
    assert gac_beta(cosine, 0.05) == pytest.approx(beta_05, abs=1e-6)


def test_attenuation_to_the_threshold_ends_exactly_there() -> None:
    gradient, previous = [torch.randn(7) + 1, torch.randn(3, 2) + 1], [torch.randn(7) + 1, torch.randn(3, 2) + 1]
    products = gradient_products(gradient, previous)
    kept = [p.clone() for p in previous]
    result = project_gradients(gradient, previous, products, gac_beta(alignment(products), 0.1))
    assert alignment(gradient_products(result, kept)) == pytest.approx(0.1, abs=1e-6)


def test_the_result_takes_the_references_memory() -> None:
    gradient, previous = [torch.tensor([3.0, 4.0])], [torch.tensor([2.0, 0.0])]
    result = project_gradients(gradient, previous, gradient_products(gradient, previous), 0.0)
    assert result[0] is previous[0]


def test_renormalizing_restores_the_norm() -> None:
    gradient, previous = [torch.tensor([3.0, 4.0])], [torch.tensor([2.0, 0.0])]
    result = project_gradients(gradient, previous, gradient_products(gradient, previous), 0.0, renormalize=True)
    assert result[0].tolist() == pytest.approx([0.0, 5.0])


def test_nothing_is_restored_of_a_gradient_that_was_wholly_parallel() -> None:
    gradient, previous = [torch.tensor([2.0, 0.0])], [torch.tensor([4.0, 0.0])]
    result = project_gradients(gradient, previous, gradient_products(gradient, previous), 0.0, renormalize=True)
    assert result[0].tolist() == [0.0, 0.0]
    assert projected_alignment(1.0, 0.0) == (0.0, 0.0)


def test_attenuation_is_continuous_at_the_threshold_and_tends_to_full_for_threshold_zero() -> None:
    assert gac_beta(0.2 + 1e-12, 0.2) == pytest.approx(1.0)
    assert gac_beta(0.6, 0.0) == 0.0
    assert gac_beta(1.0, 0.2) == 0.0


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_cosine_does_not_depend_on_either_scale(scale: float) -> None:
    g, p = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    expected = alignment(gradient_products([g], [p]))
    assert alignment(gradient_products([scale * g], [p])) == pytest.approx(expected)
    assert alignment(gradient_products([g], [scale * p])) == pytest.approx(expected)


def test_sums_over_many_pieces_keep_float32s_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    g, p = torch.randn(100_000), torch.randn(100_000)
    expected = torch.stack([g.double() @ p.double(), g.double() @ g.double(), p.double() @ p.double()])
    for size in (1 << 12, 1 << 20):
        monkeypatch.setattr("lit_asyncrl.algorithm.gradients.CHUNK_ELEMENTS", size)
        products = gradient_products([g], [p])
        assert products.dtype == torch.float64
        torch.testing.assert_close(products[1:], expected[1:], rtol=1e-6, atol=0)
        assert float((products[0] - expected[0]).abs() / expected[1]) < 1e-6


def test_rounding_takes_no_cosine_beyond_one() -> None:
    assert alignment(torch.tensor([1.0 + 1e-6, 1.0, 1.0], dtype=torch.float64)) == 1.0
    assert alignment(torch.tensor([-1.0 - 1e-6, 1.0, 1.0], dtype=torch.float64)) == -1.0


def test_no_gradient_at_all_counts_as_orthogonal() -> None:
    assert alignment(gradient_products([], [])) == 0.0


def test_calibrated_thresholds_are_percentile_and_six_deviations() -> None:
    # 0, .1, ... 1: percentile 95 is .95; mean .5, deviation sqrt(.1) = .3162278
    low, high = calibrated_thresholds([i / 10 for i in range(11)])
    assert low == pytest.approx(0.95)
    assert high == pytest.approx(0.5 + 6 * 0.3162278, abs=1e-6)


def test_calibrated_thresholds_of_opposed_gradients_are_not_negative() -> None:
    assert calibrated_thresholds([-0.5, -0.5]) == (0.0, 0.0)


def test_a_fall_is_measured_from_the_best_value_in_its_own_size() -> None:
    assert has_fallen(1.7, best=2.0, min_drop=0.1)  # below 2 - .1 * 2 = 1.8
    assert not has_fallen(1.9, best=2.0, min_drop=0.1)
    assert has_fallen(-1.2, best=-1.0, min_drop=0.1)
    assert not has_fallen(-1.05, best=-1.0, min_drop=0.1)
    assert not has_fallen(1.0, best=1.0, min_drop=0.0)


def test_products_do_not_depend_on_how_the_vector_is_split() -> None:
    g, p = torch.randn(12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    whole = gradient_products([g], [p])
    split = gradient_products(list(g.split(5)), list(p.split(5)))
    torch.testing.assert_close(whole, split, atol=1e-12, rtol=0)


def test_regimes_are_one_sided() -> None:
    regimes = [gac_regime(c, 0.05, 0.3) for c in (-0.6, 0.0, 0.05, 0.06, 0.3, 0.31)]
    assert regimes == ["safe", "safe", "safe", "project", "project", "skip"]


@pytest.mark.parametrize("gradient", [[0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]])
def test_a_useless_gradient_counts_as_orthogonal(gradient: list[float]) -> None:
    assert alignment(gradient_products([torch.tensor(gradient)], [torch.tensor([1.0, 2.0])])) == 0.0


# ---------------------------------------------------------------- two processes


def pool(rank: int, folder: Path) -> None:
    """One of two ranks: half of a gradient, and a part of the trajectories."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    torch.manual_seed(0)
    g, p = torch.randn(10) + 1, torch.randn(10) + 1
    part = slice(0, 4) if rank == 0 else slice(4, 10)
    weights = ([0.0, 0.0], [math.log(4.0)])[rank]
    cosine = alignment(summed_over_ranks(gradient_products([g[part]], [p[part]])))
    values = {
        "whole": alignment(gradient_products([g], [p])),
        "sharded": cosine,
        "copied": alignment(summed_over_ranks(gradient_products([g], [p]))),
        "regime": gac_regime(cosine, 0.1, 0.9),
        "beta": gac_beta(cosine, 0.1),
        "ess_ratio": pooled_ess_ratio(torch.tensor(weights)),
        "far_apart": pooled_ess_ratio(torch.tensor([700.0 * (2 * rank - 1)])),
        "one_rank_has_none": pooled_ess_ratio(torch.zeros(2 if rank else 0)),
        "reward": mean_over_ranks(float(rank)),
    }
    (folder / f"{rank}.json").write_text(json.dumps(values), encoding="utf-8")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("fork")  # nothing is imported again
    processes = [context.Process(target=pool, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
        process.kill()
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def test_every_rank_reads_the_same_scalars_and_takes_the_same_branch(two_ranks: list[dict]) -> None:
    assert two_ranks[0] == two_ranks[1]
    assert two_ranks[0]["regime"] == "project"


def test_shards_and_copies_of_a_gradient_have_the_whole_vectors_cosine(two_ranks: list[dict]) -> None:
    assert two_ranks[0]["sharded"] == pytest.approx(two_ranks[0]["whole"], rel=1e-6)
    assert two_ranks[0]["copied"] == pytest.approx(two_ranks[0]["whole"], rel=1e-6)


def test_the_effective_sample_size_is_that_of_all_ranks_trajectories(two_ranks: list[dict]) -> None:
    # Weights 1, 1 here and 4 there: 36 / (3 * 18) = 2/3. Each rank's own ratio is 1.
    assert two_ranks[0]["ess_ratio"] == pytest.approx(2 / 3)
    assert two_ranks[0]["one_rank_has_none"] == 1.0
    # Log-weights 700 here and -700 there: one trajectory of two has all the weight.
    assert two_ranks[0]["far_apart"] == 0.5


def test_rewards_are_averaged_over_ranks(two_ranks: list[dict]) -> None:
    assert two_ranks[0]["reward"] == 0.5


def test_one_process_pools_with_nobody() -> None:
    values = torch.tensor([1.0, 2.0])
    pooled = summed_over_ranks(values)
    assert pooled.tolist() == [1.0, 2.0]
    assert pooled is not values
    assert mean_over_ranks(0.3) == 0.3
