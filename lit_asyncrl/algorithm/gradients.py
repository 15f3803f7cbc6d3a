"""Control of the update after the gradient is formed: step size by effective sample size (VCPO), alignment control (GAC), alarm.

GAC looks at the cosine c between the gradient g and the one before it, p, over all parameters, and has three regimes:

    c <= threshold_low                     safe      g is used as it is (negative cosines too: the rule is one-sided)
    threshold_low < c <= threshold_high    project   the part of g along p is scaled by beta < 1
    c > threshold_high                     skip      no update
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Attenuation = Literal["to_threshold", "full"]
Regime = Literal["safe", "project", "skip"]

CHUNK_ELEMENTS = 1 << 18
"""Elements that a sum adds in the gradient's own precision; two such pieces stay in the cache, so that memory is read once."""


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


def has_fallen(value: float, best: float, min_drop: float) -> bool:
    """Whether a reward or accuracy is below its best value by more than `min_drop` of that value's size."""
    return value < best - min_drop * abs(best)


def gradient_products(gradients: Sequence[Tensor], previous: Sequence[Tensor]) -> Tensor:
    """The three sums that alignment needs, over all parameters: <g, p>, <g, g>, <p, p>.

    Args:
        gradients, previous: tensors of equal shapes, in the same order; of sharded ones the local part is read.

    Returns:
        [3] float64. Processes' values may be added up before `alignment` reads them, whether they hold shards (the sum is that of
        the whole vector) or copies (all three grow alike, which no caller notices).
    """
    sums = [torch.zeros(3)]
    for pair in zip(gradients, previous, strict=True):
        for g, p in zip(*(_local(tensor).flatten().split(CHUNK_ELEMENTS) for tensor in pair), strict=True):
            sums.append(torch.stack([torch.dot(g, p), torch.dot(g, g), torch.dot(p, p)]))
    return torch.stack([part.double().to(sums[-1].device) for part in sums]).sum(0)


def alignment(products: Tensor) -> float:
    """Cosine between gradient and previous gradient from `gradient_products`; 0 if one of them is zero or not finite."""
    dot, square, previous_square = products.tolist()
    denominator = math.sqrt(square) * math.sqrt(previous_square)
    cosine = dot / denominator if denominator > 0 else 0.0
    return max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else 0.0


def calibrated_thresholds(cosines: Sequence[float]) -> tuple[float, float]:
    """Both thresholds from cosines that a run shows on fresh data: their 95th percentile (at least 0), and mean + 6 std.

    Independent noise in d effective dimensions has cosines of standard deviation 1 / sqrt(d); fixed thresholds below a few of
    these stop a small model for nothing. A high threshold above 1 means that no update is skipped.

    Args:
        cosines: at least one.

    Returns:
        (threshold_low, threshold_high), 0 <= threshold_low <= threshold_high.

    Source: ours. The thresholds of GAC (arXiv 2603.01501) are not known to us.
    """
    values = torch.tensor(cosines, dtype=torch.float64)
    low = max(0.0, float(values.quantile(0.95)))
    return low, max(low, float(values.mean() + 6.0 * values.std(correction=0)))


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


def projected_alignment(cosine: float, beta: float) -> tuple[float, float]:
    """What scaling the parallel part by `beta` leaves: the cosine with the previous gradient, and the norm over that of g.

    The parts have norms beta |c| and sqrt(1 - c^2), so that the ratio is sqrt(beta^2 c^2 + 1 - c^2) and the cosine beta c / ratio
    (0 where nothing is left).
    """
    ratio = math.sqrt(beta**2 * cosine**2 + max(0.0, 1.0 - cosine**2))
    return (beta * cosine / ratio if ratio > 0 else 0.0), ratio


def project_gradients(
    gradients: Sequence[Tensor], previous: Sequence[Tensor], products: Tensor, beta: float, renormalize: bool = False
) -> list[Tensor]:
    """Gradients whose part parallel to `previous` is scaled by `beta`: g + (beta - 1) <g, p> / <p, p> p.

    Args:
        gradients: g; left as it is, to be the next update's reference.
        previous: p; **overwritten** with the result, which saves a gradient-sized buffer.
        products: of `gradient_products`, added up over processes; <p, p> above 0.
        beta: of `gac_beta`.
        renormalize: scale the result to the norm of g (unless nothing is left of it).

    Returns:
        The tensors of `previous`.
    """
    factor = (beta - 1.0) * float(products[0] / products[2])
    norm_ratio = projected_alignment(alignment(products), beta)[1]
    for gradient, reference in zip(gradients, previous, strict=True):
        torch.add(gradient, reference, alpha=factor, out=reference)
        if renormalize and norm_ratio > 0:
            reference.div_(norm_ratio)
    return list(previous)


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
