"""How the tokens of a micro-batch lie in the rows that the model is fed, so that a group's prompt is computed once.

    plain                 shared, two members a row
    prompt answer 1       prompt answer 1 answer 2
    prompt answer 2       prompt answer 3 answer 4
    prompt answer 3
    prompt answer 4

A token of a shared row attends to the prefix and to its own trajectory, at the positions it has there, so that nothing but the
work differs. Several copies of the prefix become one, whose gradient autograd sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_asyncrl.types import MicroBatch

TOKEN_COST = 6.0
"""What a token costs outside attention, in attended tokens per hidden unit: 24 h^2 of 4 h multiplications in a usual layer."""
MASKED_COST = 1.0
"""Cost of an attended token under an explicit mask."""
CLEARLY = 0.9
"""Rows are shared if that costs at most this part of the plain rows."""
MAX_MASK_ELEMENTS = 1 << 24
"""Size of an attention mask: 64 MiB in float32."""


class RowLayout(NamedTuple):
    """What the model is fed: N rows of W tokens, and where a trajectory's tokens are in them.

    The last token of a trajectory is not fed: its logits would score nothing.

    Attributes:
        input_ids, position_ids: [N, W] int64.
        attention_mask: [N, 1, W, W] additive, in the model's dtype; None: causal.
        rows: [B] int64, the row of each trajectory.
        columns: [B, T - 1] int64, the column of each token but the last; meaningless for padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    rows: Tensor
    columns: Tensor


def plain_layout(micro_batch: MicroBatch) -> RowLayout:
    """One row per trajectory. Padding is on the right, where no real token sees it."""
    ids = micro_batch.input_ids[:, : max(1, micro_batch.input_ids.shape[1] - 1)]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return RowLayout(ids, positions, None, torch.arange(len(ids), device=ids.device), positions)


def shared_layout(micro_batch: MicroBatch, members: int, dtype: torch.dtype) -> RowLayout:
    ids = micro_batch.input_ids[:, :-1]
    device = ids.device
    fed = (micro_batch.attention_mask.sum(-1) - 1).clamp_(min=0)
    positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
    _, group, counts = micro_batch.group_index.unique_consecutive(return_inverse=True, return_counts=True)
    leader = (counts.cumsum(0) - counts)[group]
    real = positions < fed[:, None]
    same = ((ids == ids[leader]) & real).long().cumprod(-1).sum(-1)
    prefix = torch.full_like(counts, ids.shape[1]).scatter_reduce(0, group, same, "amin")[group]
    rank = torch.arange(len(ids), device=device) - leader
    _, rows = (group * len(ids) + rank // members).unique_consecutive(return_inverse=True)
    num_rows = int(rows[-1]) + 1
    rest = fed - prefix
    ends = rest.cumsum(0)
    size = torch.zeros(num_rows, dtype=torch.long, device=device).index_add(0, rows, rest)
    before = ends - rest - (size.cumsum(0) - size)[rows]
    used = size[rows] + prefix
    width = int(used.max())
    columns = positions + width - used[:, None] + torch.where(positions >= prefix[:, None], before[:, None], 0)
    where = (rows[:, None] * width + columns)[real]
    def lay(values, fill):
        return torch.full((num_rows * width,), fill, device=device).index_put((where,), values[real]).view(num_rows, width)
    member = torch.where(positions < prefix[:, None], -1, torch.arange(len(ids))[:, None])
    owner = lay(member, -2)
    visible = (owner[:, None, :] == -1) | (owner[:, :, None] == owner[:, None, :])
    visible &= torch.ones(width, width, dtype=torch.bool, device=device).tril()
    if dtype is torch.bool:
        mask = visible
    else:
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, torch.finfo(dtype).min)
    return RowLayout(lay(ids, 0), lay(positions, 0), mask[:, None], rows, columns)
