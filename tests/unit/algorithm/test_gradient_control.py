"""Step-size factor of VCPO and projection of GAC."""

import math

import pytest
import torch

from lit_asyncrl.algorithm.gradients import (
    alignment,
    ess_lr_scale,
    gac_beta,
    gac_regime,
    gradient_products,
    project_gradients_,
)


@pytest.mark.parametrize(
    ("ratio", "reference", "expected"),
    [(2 / 3, 1.0, 0.8164966), (2 / 3, 0.55, 1.0), (1 / 3, 1.0, 0.5773503), (1 / 3, 0.55, 0.7784989)],
)
def test_lr_scale_matches_the_oracle(ratio: float, reference: float, expected: float) -> None:
    assert ess_lr_scale(ratio, reference) == pytest.approx(expected, abs=1e-7)


def test_linear_rule_and_floor() -> None:
    assert ess_lr_scale(0.25, 0.5, "linear") == 0.5
    assert ess_lr_scale(0.0001, floor=0.1) == 0.1


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
    reference = [torch.tensor(previous, dtype=torch.float64)]
    for beta, expected in ((gac_beta(cosine, 0.2, "full"), full), (gac_beta(cosine, 0.2), projected)):
        gradient = [torch.tensor(g, dtype=torch.float64)]
        products = gradient_products(gradient, reference)
        assert alignment(products) == pytest.approx(cosine, abs=1e-7)
        project_gradients_(gradient, reference, products, beta)
        assert gradient[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert gac_beta(cosine, 0.2) == pytest.approx(beta_2, abs=1e-6)
    assert gac_beta(cosine, 0.05) == pytest.approx(beta_05, abs=1e-6)


def test_attenuation_to_the_threshold_ends_exactly_there() -> None:
    gradient, previous = [torch.randn(7) + 1, torch.randn(3, 2) + 1], [torch.randn(7) + 1, torch.randn(3, 2) + 1]
    products = gradient_products(gradient, previous)
    project_gradients_(gradient, previous, products, gac_beta(alignment(products), 0.1))
    assert alignment(gradient_products(gradient, previous)) == pytest.approx(0.1, abs=1e-6)


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
