"""Control of the update after the gradient is formed: step size by effective sample size (VCPO), alignment control (GAC)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Attenuation = Literal["to_threshold", "full"]
Regime = Literal["safe", "project", "skip"]


def ess_lr_scale(
    ess_ratio: float, reference_ratio: float = 1.0, rule: Literal["sqrt", "linear"] = "sqrt", floor: float = 0.0
) -> float:
    """Factor on this update's learning rate: s = min(1, ess_ratio / reference_ratio), or its square root.

    Args:
        ess_ratio: of the whole batch, in (0, 1].
        reference_ratio: ratio at which the learning rate is used in full; below 1 where even fresh data has a smaller one.
        rule: `sqrt` for Adam-like optimizers, `linear` for SGD.
        floor: smallest factor returned, in [0, 1].

    Returns:
        In [floor, 1].

    Source: VCPO (arXiv 2602.17616), step size guided by the effective sample size. The floor is ours (the paper has none).
    """
    scale = min(1.0, ess_ratio / reference_ratio)
    return max(floor, math.sqrt(scale) if rule == "sqrt" else scale)


def gradient_products(gradients: Sequence[Tensor], previous: Sequence[Tensor]) -> Tensor:
    """The three sums that alignment needs, over all parameters: <g, p>, <g, g>, <p, p>.

    Args:
        gradients, previous: tensors of equal shapes, in the same order.

    Returns:
        [3] float64; shards' values may be added up before `alignment` reads them.
    """
    pairs = [(g.double().flatten(), p.double().flatten()) for g, p in zip(gradients, previous, strict=True)]
    return torch.stack([torch.stack([g @ p, g @ g, p @ p]) for g, p in pairs]).sum(0)


def alignment(products: Tensor) -> float:
    """Cosine between gradient and previous gradient from `gradient_products`; 0 if one of them is zero or not finite."""
    dot, square, previous_square = products.tolist()
    denominator = math.sqrt(square) * math.sqrt(previous_square) if square >= 0 and previous_square >= 0 else 0.0
    cosine = dot / denominator if denominator > 0 else 0.0
    return cosine if math.isfinite(cosine) and math.isfinite(denominator) else 0.0


def gac_regime(cosine: float, threshold_low: float, threshold_high: float) -> Regime:
    """`safe` up to `threshold_low` (negative cosines too: the rule is one-sided), `skip` above `threshold_high`, else `project`.

    Source: GAC (arXiv 2603.01501), regimes as told by public digests; the paper's thresholds are unknown.
    """
    if cosine <= threshold_low:
        return "safe"
    return "project" if cosine <= threshold_high else "skip"


def gac_beta(cosine: float, threshold_low: float, mode: Attenuation = "to_threshold") -> float:
    """Factor on the part of the gradient parallel to the previous one.

    `full`: 0. `to_threshold`: the factor after which the cosine is exactly `threshold_low`,
    (threshold_low / cosine) sqrt((1 - cosine^2) / (1 - threshold_low^2)).

    Args:
        cosine: above `threshold_low`.
        threshold_low: in [0, 1).
        mode: which.

    Returns:
        In [0, 1].

    Source: GAC (arXiv 2603.01501) gives the projection; how much of the parallel part stays is our derivation.
    """
    if mode == "full":
        return 0.0
    return threshold_low / cosine * math.sqrt(max(0.0, 1.0 - cosine**2) / (1.0 - threshold_low**2))


def project_gradients_(gradients: Sequence[Tensor], previous: Sequence[Tensor], products: Tensor, beta: float) -> None:
    """Scale the part of `gradients` parallel to `previous` by `beta`, in place: g += (beta - 1) <g, p> / <p, p> p."""
    factor = (beta - 1.0) * float(products[0] / products[2])
    for gradient, reference in zip(gradients, previous, strict=True):
        gradient.add_(reference.to(gradient.dtype), alpha=factor)
