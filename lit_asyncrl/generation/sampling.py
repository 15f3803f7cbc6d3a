"""Draws one token per row from logits: tempered softmax, inverse CDF, one prepared uniform per token.

The uniform of token t depends on the request's seed and t alone, so neither slot counts nor neighbours change the draw.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Restriction(NamedTuple):
    """Per-row limits of the distribution: `top_p` [n] float32, `top_k` [n] int64 (0: none), `min_p` [n] float32."""

    top_p: Tensor
    top_k: Tensor
    min_p: Tensor


def request_uniforms(seed: int, count: int) -> Tensor:
    """The first `count` uniforms in [0, 1) of a request, [count] float64, from the counter-based generator Philox.

    A longer array of the same seed begins with the shorter one.
    """
    generator = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1)))
    return torch.from_numpy(generator.random(count))


def sample_from_probs(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling; never returns a token of probability zero.

    Args:
        probs: [n, V] float32, non-negative, not necessarily summing to one.
        uniforms: [n] float64 in [0, 1).

    Returns:
        [n] int64: the first id whose cumulative mass, in float64, exceeds the uniform times the total.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # The product may round up to the total, which no id exceeds: stay just below it.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return ids.clamp_(max=probs.shape[1] - 1)  # only NaN logits get here; their log-prob is NaN and shows them


def restrict(probs: Tensor, restriction: Restriction) -> Tensor:
    """Zero what top-k, then top-p (of what is left), then min-p (relative to the largest) cut off.

    Args:
        probs: [n, V] float32, summing to one.
        restriction: per-row limits.

    Returns:
        [n, V] float32, at least the largest entry of each row kept, not renormalised.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    top_k = torch.where(restriction.top_k > 0, restriction.top_k, probs.shape[1])
    kept = torch.where(rank < top_k.unsqueeze(1), ordered, 0.0)
    mass_before = kept.cumsum(dim=-1, dtype=torch.float64) - kept
    limit = torch.where(restriction.top_p < 1.0, restriction.top_p.double(), torch.inf) * kept.sum(dim=-1, dtype=torch.float64)
    keep = (mass_before < limit.unsqueeze(1)) & (ordered >= restriction.min_p.unsqueeze(1) * ordered[:, :1])
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(1, order, torch.where(keep, kept, 0.0))


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    *,
    greedy: Tensor | None = None,
    restriction: Restriction | None = None,
) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-prob.

    Args:
        logits: [n, V] float32.
        temperature: [n] float32, positive; 1 for greedy rows.
        uniforms: [n] float64 in [0, 1).
        greedy: [n] bool, rows that take the most probable id; None: no row.
        restriction: limits of the sampled distribution; None: none.

    Returns:
        ids [n] int64, and log-probs [n] float32 in nats under the *unrestricted* tempered distribution.
    """
    logprobs = torch.log_softmax(logits / temperature.unsqueeze(1), dim=-1)
    probs = logprobs.exp()
    ids = sample_from_probs(probs if restriction is None else restrict(probs, restriction), uniforms)
    if greedy is not None:
        ids = torch.where(greedy, logits.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
