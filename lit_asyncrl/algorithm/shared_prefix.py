"""How the tokens of a micro-batch lie in the rows that a model is fed, so that a group's prompt is computed once:

    plain               two members a row             four members a row
    prompt answer-1     prompt answer-1 answer-2      prompt answer-1 answer-2 answer-3 answer-4
    prompt answer-2     prompt answer-3 answer-4
    prompt answer-3
    prompt answer-4

A token of a shared row attends to the prefix and to its own trajectory, at the positions it has there: log-probs and gradients
are those of the plain rows up to rounding. The prefix's gradient, the sum over its members, comes from autograd.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_asyncrl.types import MicroBatch

TOKEN_COST = 6
"""Work per token outside of attention, in attended tokens per hidden unit: 24 h^2 weights of a usual layer against 4 h
multiplications for each attended token. Times measured on a CPU with 76 thousand to 135 million parameters agree to a tenth."""

WORTHWHILE = 0.95
"""Rows are shared if they cost at most this part of the plain ones; building the layout takes up to 3 %."""


class RowLayout(NamedTuple):
    """What a model is fed: N rows of W tokens, and where a trajectory's tokens are in them.

    The last token of a trajectory is not fed: its logits would score nothing.

    Attributes:
        input_ids, position_ids: [N, W] int64.
        attention_mask: [N, 1, W, W], added to the attention scores; None: causal.
        rows: [B] int64, the row of each trajectory.
        columns: [B, T - 1] int64, the column of each token but the last; meaningless for padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    rows: Tensor
    columns: Tensor


def plain_layout(micro_batch: MicroBatch) -> RowLayout:
    """One row per trajectory, without a mask: attention is causal and padding on the right, where no real token sees it."""
    ids = micro_batch.input_ids[:, : max(1, micro_batch.input_ids.shape[1] - 1)]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return RowLayout(ids, positions, None, torch.arange(len(ids), device=ids.device), positions)


def cheapest_layout(model: nn.Module, micro_batch: MicroBatch) -> RowLayout:
    """The plain rows, or rows of 2, 4, ... up to all members of a group where that is clearly less work.

    N rows of W tokens cost N * W * (TOKEN_COST * h + A), with h the hidden size and A the tokens that a kernel visits per
    token: W under a mask, W / 2 for causal attention, which skips the other half. Long responses therefore stay plain, and the
    mask (N * W * W elements, one for all layers) remains small beside the hidden states that sharing saves.

    Args:
        model: any; one that cannot take our mask gets plain rows (see `_hidden_size`), as do groups that have nothing in common.
        micro_batch: see `MicroBatch`; what the members of a group have in common at their beginning is found, not told.

    Source: our own; sharing a prompt within a group is known from inference ("prefix caching").
    """
    plain = plain_layout(micro_batch)
    hidden_size = _hidden_size(model)
    sizes = micro_batch.group_index.unique_consecutive(return_counts=True)[1]
    largest = int(sizes.max())
    if hidden_size is None or largest == 1 or micro_batch.input_ids.shape[1] < 2:
        return plain
    members = _Members(micro_batch, sizes)
    if not members.prefix.any():
        return plain
    num_rows, width = plain.input_ids.shape
    lowest = WORTHWHILE * num_rows * width * (TOKEN_COST * hidden_size + width / 2)
    chosen = None
    per_row = 1
    while per_row < largest:
        per_row = min(2 * per_row, largest)
        rows, used = members.rows(per_row)
        width = int(used.max())
        cost = len(used) * width * (TOKEN_COST * hidden_size + width)
        if cost < lowest:
            lowest, chosen = cost, rows
    return plain if chosen is None else members.layout(chosen, _attention_dtype(model, micro_batch.input_ids.device))


class _Members:
    """The trajectories of a micro-batch as a prefix that their group has in common, and a rest.

    Attributes:
        ids, positions: [B, T - 1].
        fed: [B, T - 1] bool, the tokens to feed.
        group: [B], 0, 1, ... in the order of the groups.
        rank: [B] position of each trajectory within its group.
        prefix, rest: [B] tokens to feed.
    """

    def __init__(self, micro_batch: MicroBatch, sizes: Tensor) -> None:
        self.ids = micro_batch.input_ids[:, :-1]
        device = self.ids.device
        self.positions = torch.arange(self.ids.shape[1], device=device).expand_as(self.ids)
        num_fed = micro_batch.attention_mask.sum(-1) - 1
        self.fed = self.positions < num_fed[:, None]
        self.group = torch.arange(len(sizes), device=device).repeat_interleave(sizes)
        first = (sizes.cumsum(0) - sizes)[self.group]
        self.rank = torch.arange(len(first), device=device) - first
        common = ((self.ids == self.ids[first]) & self.fed).long().cumprod(-1).sum(-1)
        longest = common.new_full((len(sizes),), self.ids.shape[1])
        self.prefix = longest.scatter_reduce_(0, self.group, common, "amin")[self.group]
        self.rest = num_fed - self.prefix

    def rows(self, per_row: int) -> tuple[Tensor, Tensor]:
        """The row [B] of each trajectory, `per_row` of a group to a row, and the tokens [N] in each row."""
        begins = self.rank % per_row == 0
        rows = begins.cumsum(0) - 1
        return rows, self.prefix[begins].index_add(0, rows, self.rest)

    def layout(self, rows: Tensor, dtype: torch.dtype) -> RowLayout:
        """The layout of given rows. They end together, on the right, so that logits are needed of the last columns only."""
        rests = torch.zeros(int(rows[-1]) + 1, dtype=torch.long, device=rows.device).index_add(0, rows, self.rest)
        used = rests[rows] + self.prefix
        width = int(used.max())
        before = self.rest.cumsum(0) - self.rest - (rests.cumsum(0) - rests)[rows]  # of earlier members of the row
        in_prefix = self.positions < self.prefix[:, None]
        columns = self.positions + (width - used)[:, None] + before[:, None].masked_fill(in_prefix, 0)
        places = (rows[:, None] * width + columns)[self.fed]

        def lay(values: Tensor, fill: int) -> Tensor:
            flat = torch.full((len(rests) * width,), fill, device=values.device)
            return flat.index_put((places,), values[self.fed]).view(len(rests), width)

        members = torch.arange(len(rows), device=rows.device)[:, None]
        owner = lay(torch.where(in_prefix, -1, members), len(rows))  # padding sees padding: no token may see nothing at all
        keys = owner[:, None, :]
        hidden = ((keys != -1) & (keys != owner[:, :, None])).logical_or_(
            torch.ones(width, width, dtype=torch.bool, device=rows.device).triu(1)
        )
        mask = torch.zeros(hidden.shape, dtype=dtype, device=rows.device).masked_fill_(hidden, torch.finfo(dtype).min)
        return RowLayout(lay(self.ids, 0), lay(self.positions, 0), mask[:, None], rows, columns)


def _hidden_size(model: nn.Module) -> int | None:
    """The hidden size of a model whose tokens meet in attention alone, and that takes our mask as it is; else None.

    That is full attention by `sdpa`: other kernels take no mask or (`eager`) keep the whole matrix; windows would cut by place
    in the row; recurrent and convolution layers see the neighbour in the row.
    """
    config: Any = getattr(model, "config", None)
    takes_mask = getattr(config, "_attn_implementation", None) == "sdpa" and getattr(model, "_supports_attention_backend", False)
    layer_types = set(getattr(config, "layer_types", None) or ())
    attention_alone = layer_types <= {"full_attention"} and not getattr(model, "_is_stateful", False)
    windowed = getattr(config, "sliding_window", None) is not None
    return getattr(config, "hidden_size", None) if takes_mask and attention_alone and not windowed else None


def _attention_dtype(model: Any, device: torch.device) -> torch.dtype:
    """The dtype of queries: a mask of any other would be converted, and kept, in each layer."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    dtype: torch.dtype = model.dtype
    return dtype
