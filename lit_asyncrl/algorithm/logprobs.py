"""Logits to token log-probs, entropy and score energy, without a second copy of the logits in memory.

Only rows that are needed are read, a chunk at a time; the backward pass computes the softmax again from the logits and their
log-sum-exp instead of keeping it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_asyncrl.algorithm.shared_prefix import cheapest_layout, plain_layout
from lit_asyncrl.types import MicroBatch

CHUNK_ELEMENTS = 1 << 20
"""Logits that are upcast at a time: 4 MiB in float32, of which the forward pass holds a few copies."""


class TokenLogprobs(NamedTuple):
    """What a forward pass says of each token, [B, T], aligned to tokens; 0 where neither trained nor sampled.

    Attributes:
        logprobs: nats, float32 (float64 for a float64 model), with gradient.
        entropy: nats, of the distribution that the token was drawn from; detached unless its gradient is asked for.
        energy: squared norm of the gradient of the log-prob with respect to the (tempered) logits,
            1 - 2 p(token) + sum_v p(v)^2; detached; None unless asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    energy: Tensor | None


def token_logprobs(
    model: nn.Module,
    micro_batch: MicroBatch,
    *,
    need_energy: bool = False,
    share_prefix: bool = True,
    entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Score the tokens of a micro-batch under `model`.

    Logits are divided by `micro_batch.temperature` (0, greedy, counts as 1) and normalized in float32, also under autocast.
    Members of a group that begin alike may share a row (see `cheapest_layout`); otherwise no attention mask is passed, and the
    attention kernels take their fast causal path. Works under `torch.no_grad()`.

    Args:
        model: Hugging Face causal language model (accepts `logits_to_keep`).
        micro_batch: see `MicroBatch`; tokens with `loss_mask` or a version of at least 0 are scored, token 0 never.
        need_energy: whether to compute `energy`.
        share_prefix: False: one row per trajectory, for callers that look into the model.
        entropy_gradient: whether `entropy` carries a gradient.
    """
    layout = cheapest_layout(model, micro_batch) if share_prefix else plain_layout(micro_batch)
    needed = (micro_batch.loss_mask | (micro_batch.token_versions >= 0)) & micro_batch.attention_mask
    rows, tokens = needed[:, 1:].nonzero(as_tuple=True)  # token t + 1 is scored by the logits at t
    columns = layout.columns[rows, tokens]
    width = layout.input_ids.shape[1]
    first = int(columns.min()) if columns.numel() else width - 1
    logits = model(
        input_ids=layout.input_ids,
        position_ids=layout.position_ids,
        attention_mask=layout.attention_mask,
        use_cache=False,
        logits_to_keep=width - first,
    ).logits
    flat_rows = layout.rows[rows] * logits.shape[1] + columns - first
    targets = micro_batch.input_ids[rows, tokens + 1]
    temperature = micro_batch.temperature or 1.0
    logprobs, entropy, energy = _RowLogprobs.apply(logits, flat_rows, targets, temperature, need_energy)

    if not entropy_gradient:
        entropy = entropy.detach()

    def scatter(values: Tensor) -> Tensor:
        return values.new_zeros(needed.shape).index_put((rows, tokens + 1), values)

    return TokenLogprobs(scatter(logprobs), scatter(entropy), scatter(energy) if need_energy else None)


class _RowLogprobs(torch.autograd.Function):
    """Log-prob of one target per chosen row of logits, a row possibly several times; saves the logits and two numbers each."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, temperature: float, need_energy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat = logits.flatten(0, 1)
        dtype = torch.promote_types(torch.float32, logits.dtype)
        logprobs, entropy, energy, normalizer = (torch.empty(rows.shape, dtype=dtype, device=logits.device) for _ in range(4))
        for chunk in _chunks(rows.numel(), logits.shape[-1]):
            scores = flat[rows[chunk]].to(dtype).div_(temperature)
            normalizer[chunk] = scores.logsumexp(-1)
            logprobs[chunk] = scores.gather(-1, targets[chunk, None]).squeeze(-1) - normalizer[chunk]
            probs = (scores - normalizer[chunk, None]).exp_()
            # 0 * -inf of a token that cannot occur is 0.
            entropy[chunk] = normalizer[chunk] - torch.where(probs > 0, probs * scores, 0.0).sum(-1)
            if need_energy:
                energy[chunk] = 1.0 - 2.0 * logprobs[chunk].exp() + probs.square_().sum(-1)
        ctx.save_for_backward(logits, rows, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(energy)
        ctx.set_materialize_grads(False)  # an unused output has None
        return logprobs, entropy, energy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        logits, rows, targets, normalizer, entropy = ctx.saved_tensors
        of_logprobs, of_entropy, _ = grads
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normalizer)
        flat = logits.flatten(0, 1)
        result = torch.zeros_like(flat)
        for chunk in _chunks(rows.numel(), logits.shape[-1]):
            scores = flat[rows[chunk]].to(normalizer.dtype).div_(ctx.temperature).sub_(normalizer[chunk, None])
            weight = of_logprobs[chunk, None] / ctx.temperature
            # d log p(target) / d logits = (onehot(target) - p) / temperature
            if of_entropy is None:
                row_grads = scores.exp_().mul_(-weight)
            else:
                # d entropy / d logits = -p (log p + entropy) / temperature; 0 * -inf of a token that cannot occur is 0.
                slope = (scores + entropy[chunk, None]).mul_(of_entropy[chunk, None] / ctx.temperature).add_(weight)
                probs = scores.exp_()
                row_grads = torch.where(probs > 0, probs * slope, 0.0).neg_()
            row_grads.scatter_add_(-1, targets[chunk, None], weight)
            result.index_add_(0, rows[chunk], row_grads.to(result.dtype))
        return result.view_as(logits), None, None, None, None


def _chunks(num_rows: int, vocab_size: int) -> list[slice]:
    """Slices of rows that hold at most `CHUNK_ELEMENTS` logits (at least one row) each."""
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
