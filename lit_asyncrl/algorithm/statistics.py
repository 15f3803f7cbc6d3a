"""Numbers of a whole update for the log, from those of its micro-batches, and of several updates of one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_asyncrl.algorithm.mismatch import mismatch_metrics
from lit_asyncrl.algorithm.scored import MicroBatchStats
from lit_asyncrl.algorithm.weights import effective_sample_size
from lit_asyncrl.types import StepStats


def pool_stats(parts: Sequence[MicroBatchStats], policy_version: int) -> StepStats:
    """Statistics of the whole batch from those of its micro-batches; one effective sample size over all of them.

    Args:
        parts: of the micro-batches.
        policy_version: of the weights that the gradient was formed with.
    """
    log_weights = torch.cat([part.log_weights_B for part in parts])
    tokens = sum(part.num_tokens for part in parts)
    if tokens == 0:
        return StepStats(log_weights, 0.0, 0.0)
    ess, ess_ratio = effective_sample_size(log_weights)
    advantages = torch.cat([part.advantages for part in parts])
    weights = log_weights.double().exp()
    metrics = {
        "loss": sum(part.loss for part in parts),
        "policy/entropy": sum(part.entropy_sum for part in parts) / tokens,
        "policy/advantage_abs_mean": float(advantages.abs().mean()),
        "weights/log_ratio_mean": sum(part.log_ratio_sum for part in parts) / tokens,
        "weights/k3_kl": sum(part.k3_sum for part in parts) / tokens,
        "weights/clipped_share": sum(part.num_clipped for part in parts) / tokens,
        "weights/sequence_weight_mean": float(weights.mean()),
        "weights/sequence_weight_max": float(weights.max()),
        "mismatch/truncation": sum(part.removed_sum for part in parts) / max(1e-30, sum(part.weight_sum for part in parts)),
        **mismatch_metrics([part.mismatch for part in parts], policy_version),
    }
    baselines = [part.baselines for part in parts if part.baselines is not None]
    if baselines:
        metrics["policy/baseline_mean"] = float(torch.cat(baselines).mean())
    reference_kl = [part.reference_kl_sum for part in parts if part.reference_kl_sum is not None]
    if reference_kl:
        metrics["policy/reference_kl"] = sum(reference_kl) / tokens
    return StepStats(log_weights, float(ess), float(ess_ratio), metrics=metrics)


def mean_stats(steps: Sequence[StepStats]) -> StepStats:
    """Statistics of one batch from those of its updates (at least one): plain means, and all log-weights."""
    if len(steps) == 1:
        return steps[0]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    keys = dict.fromkeys(key for step in steps for key in step.metrics)
    return StepStats(
        log_weights=torch.cat([step.log_weights for step in steps]),
        ess=mean([step.ess for step in steps]),
        ess_ratio=mean([step.ess_ratio for step in steps]),
        lr_scale=mean([step.lr_scale for step in steps]),
        grad_norm=mean([step.grad_norm for step in steps]),
        metrics={key: mean([step.metrics[key] for step in steps if key in step.metrics]) for key in keys},
    )


def age_stats(ages: Sequence[Tensor], num_over_age: int) -> dict[str, float]:
    """Ages of the tokens that the updates of one batch trained, each measured at its own update.

    Args:
        ages: 1-d, in updates.
        num_over_age: groups left out of a later update.
    """
    pooled = torch.cat(list(ages)).double()
    return {
        "pool/policy_age_mean": float(pooled.mean()) if pooled.numel() else 0.0,
        "pool/policy_age_max": float(pooled.max()) if pooled.numel() else 0.0,
        "batch/groups_over_age": float(num_over_age),
    }
