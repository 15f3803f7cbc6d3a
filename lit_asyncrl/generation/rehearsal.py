"""Rehearses the delivery of weights before a run: every tensor is changed enough to be seen, delivered, and looked for.

One update at a learning rate of 1e-6 moves log-probs by less than an engine in bfloat16 differs from the trainer anyway, so a
tensor that is never delivered could go unseen for long. Here each group of tensors (one role, such as every layer's `k_proj`) is
perturbed in turn; the engine must follow. The rehearsal also measures how far the two may differ when all is well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_asyncrl.errors import WeightSyncError
from lit_asyncrl.types import NamedTensors

MIN_TOLERANCE = 2e-5
"""Nats by which float32 log-probs of the same weights may differ when sums run in another order."""
GROUP_BYTES = 2**30
"""Most bytes of weights that are copied and perturbed at once."""
DRAWS = 3
"""Most perturbations of a group of tensors that are tried before its delivery counts as failed."""
FIRST_STRENGTH, MOST_STRENGTH = 0.05, 12.8
"""Standard deviation of the perturbation, in units of the tensor's own root mean square."""

ProbeScorer = Callable[[NamedTensors], Sequence[float]]
"""Weights that replace the trainer's own -> log-probs of the probe, nats."""
Deliver = Callable[[NamedTensors], Sequence[float]]
"""Sends weights to the engine -> its log-probs of the probe, nats; may raise `WeightSyncError`."""


def rehearse(weights: NamedTensors, deliver: Deliver, score: ProbeScorer, *, rounds_weights: bool, max_noise: float) -> float:
    """Deliver perturbed weights group by group and compare the probe's log-probs; measures the tolerance of later proofs.

    The engine is left with weights of the last group: deliver the true ones afterwards.

    Args:
        weights: the trainer's, by Hugging Face name.
        deliver: sends weights to the engine.
        score: the trainer's log-probs of the probe with some weights replaced.
        rounds_weights: whether the engine serves a rounded copy.
        max_noise: nats by which the true weights' log-probs may differ.

    Returns:
        Nats by which the probe may differ in a proof of delivery: ten times the difference under the true weights where the
        engine computes as the trainer does; four times, or the largest difference of the rehearsal, where it rounds.

    Raises:
        WeightSyncError: naming the tensors that were not delivered, or the difference under the true weights.
    """
    truth = score({})
    answer = deliver(weights)
    noise = largest_difference(answer, truth)
    if not noise <= max_noise:
        raise WeightSyncError(
            f"The engine must compute the trainer's log-probs: on the probe they may differ by {max_noise:g} nats, and differ by "
            f"{noise:g}. It serves other weights, or computes in another precision."
        )
    rule = _ROUNDED if rounds_weights else _EXACT
    tolerance = max(MIN_TOLERANCE, rule.noise_factor * noise)
    slack = max(MIN_TOLERANCE, rule.noise_factor * rule.distance(answer, truth))
    worst = max(_follow(weights, group, truth, deliver, score, slack, rule) for group in tensor_groups(weights))
    return max(tolerance, worst) if rounds_weights else tolerance


def tensor_groups(weights: NamedTensors) -> list[list[str]]:
    """Names by role, the numbers of layers and experts left out; a group holds at most `GROUP_BYTES`."""
    roles: dict[str, list[str]] = {}
    for name in weights:
        roles.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    groups: list[list[str]] = []
    for names in roles.values():
        used = GROUP_BYTES + 1
        for name in names:
            size = weights[name].numel() * weights[name].element_size()
            if used + size > GROUP_BYTES:
                groups.append([])
                used = 0
            groups[-1].append(name)
            used += size
    return groups


def perturb(name: str, tensor: Tensor, strength: float, draw: int = 0) -> Tensor:
    """The tensor plus normal noise of `strength` times its root mean square (0.02 for zeros); the same for the same `draw`."""
    generator = torch.Generator().manual_seed(DRAWS * sum(name.encode()) + draw)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.device, tensor.dtype)
    scale = tensor.float().square().mean().sqrt()
    return tensor + noise * (strength * torch.where(scale > 0, scale, 0.02)).to(tensor.dtype)


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest absolute difference, in nats; NaN when there is one."""
    if len(ours) != len(theirs):
        raise WeightSyncError(f"The engine must score the {len(theirs)} probe tokens, and scored {len(ours)}.")
    return float((torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)).abs().max())


def mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Mean absolute difference, in nats: of rounded weights one unlikely token may be far off, but not most of them."""
    return float((torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)).abs().mean())


@dataclass(frozen=True, slots=True)
class _Rule:
    """When an engine has followed a perturbation.

    Attributes:
        distance: between two sequences of log-probs, nats.
        noise_factor: how many times the distance under the true weights is still noise.
        margin: how many times that the perturbation must move the probe. A stale tensor shows as the whole effect; weights
            changed more than needed round worse than the true ones.
        share: part of the effect that may be missing.
    """

    distance: Callable[[Sequence[float], Sequence[float]], float]
    noise_factor: float
    margin: float
    share: float


_EXACT = _Rule(largest_difference, noise_factor=10.0, margin=10.0, share=1e-3)
_ROUNDED = _Rule(mean_difference, noise_factor=4.0, margin=3.0, share=0.2)


def _follow(
    weights: NamedTensors,
    group: Sequence[str],
    truth: Sequence[float],
    deliver: Deliver,
    score: ProbeScorer,
    slack: float,
    rule: _Rule,
) -> float:
    """Perturb a group until the engine follows; returns the largest difference left, nats.

    A strong perturbation can make a model in which rounding moves everything. Another one is drawn then; an engine that did not
    get the tensors follows none.
    """
    for draw in range(DRAWS):
        perturbed, effect, expected = _perturb_until_seen(
            weights, group, truth, score, rule.distance, target=max(1e-2, rule.margin * slack), draw=draw
        )
        answer = deliver({**weights, **perturbed})
        difference, allowed = rule.distance(answer, expected), max(slack, rule.share * effect)
        if difference <= allowed:
            return largest_difference(answer, expected)
    raise WeightSyncError(
        f"The engine must serve every tensor it is sent: after changing {_names(group)} the probe's log-probs may differ from "
        f"the trainer's by {allowed:.2g} nats, and differ by {difference:.2g} (the change moves them by {effect:.2g}). Those "
        "tensors do not reach the weights that are served."
    )


def _perturb_until_seen(
    weights: NamedTensors,
    group: Sequence[str],
    truth: Sequence[float],
    score: ProbeScorer,
    distance: Callable[[Sequence[float], Sequence[float]], float],
    *,
    target: float,
    draw: int,
) -> tuple[dict[str, Tensor], float, Sequence[float]]:
    """Perturbed tensors, how far they move the probe (nats), and its log-probs; the strength grows until it is `target`."""
    strength = FIRST_STRENGTH
    while True:
        perturbed = {name: perturb(name, weights[name], strength, draw) for name in group}
        expected = score(perturbed)
        effect = distance(expected, truth)
        if effect >= target:
            return perturbed, effect, expected
        if strength >= MOST_STRENGTH:
            raise WeightSyncError(
                f"Changing {_names(group)} must move the log-probs of the probe by {target:.2g} nats, and moves them by "
                f"{effect:.2g}: their delivery cannot be proved. Set AsyncRollout.rehearse to false to go without the rehearsal."
            )
        strength *= 2.0


def _names(group: Sequence[str]) -> str:
    return group[0] if len(group) == 1 else f"{group[0]} and {len(group) - 1} more of its kind"
