"""How far the engine's log-probs are from the trainer's, told apart by cause: arithmetic, staleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mismatch:
    """Absolute log-ratios of trained tokens, summed.

    Attributes:
        total, count: over all trained tokens; nats, tokens.
        clean: by version: sum (nats) and number of the tokens that this version sampled after a prefix of its own alone.
    """

    total: float = 0.0
    count: int = 0
    clean: dict[int, tuple[float, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, log_ratio: Tensor, loss_mask: Tensor, token_versions: Tensor) -> Mismatch:
        """Sum up a micro-batch.

        Args:
            log_ratio: [B, T] nats.
            loss_mask: [B, T] bool.
            token_versions: [B, T], -1 where not sampled.
        """
        size = log_ratio.abs().double()
        sampled = token_versions >= 0
        # A prefix is of one version when nothing sampled so far differs from the token's own.
        highest = token_versions.cummax(dim=1).values
        lowest = torch.where(sampled, token_versions, torch.iinfo(token_versions.dtype).max).cummin(dim=1).values
        own = loss_mask & (highest == token_versions) & (lowest == token_versions)
        clean = {}
        for version in token_versions[own].unique().tolist():
            chosen = own & (token_versions == version)
            clean[version] = (float(size[chosen].sum()), int(chosen.sum()))
        return cls(float(size[loss_mask].sum()), int(loss_mask.sum()), clean)


def mismatch_metrics(parts: Sequence[Mismatch], policy_version: int) -> dict[str, float]:
    """Mean absolute log-ratio, in nats, of the tokens where it can only be arithmetic, and of the others.

    Tokens of the current version after a prefix of that version alone were sampled by the very weights that now score them: their
    log-ratio is the numeric difference between engine and trainer (precision, kernels). The others differ by staleness too.

    Args:
        parts: of the micro-batches of one update.
        policy_version: of the weights that score, before the update.

    Returns:
        `mismatch/numeric` and `mismatch/staleness`, each where the batch has such tokens.
    """
    fresh = [part.clean.get(policy_version, (0.0, 0)) for part in parts]
    numeric, num_fresh = sum(s for s, _ in fresh), sum(n for _, n in fresh)
    total, count = sum(part.total for part in parts), sum(part.count for part in parts)
    metrics = {}
    if num_fresh:
        metrics["mismatch/numeric"] = numeric / num_fresh
    if count > num_fresh:
        metrics["mismatch/staleness"] = (total - numeric) / (count - num_fresh)
    return metrics
