"""Key-value cache of continuous slots: one buffer row per response, each row with its own length.

A row's keys and values stay where they are while the response grows; buffers grow in rows and in length only when needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

LENGTH_STEP = 64
"""Buffer lengths are multiples of it, in tokens."""


def _grown(current: int, needed: int, smallest: int, largest: int) -> int:
    """`current` if it suffices, else at least double, from `smallest`, at most `largest` (or what is needed)."""
    return current if needed <= current else max(needed, min(largest, max(2 * current, smallest)))


class SlotCache(Cache):
    """What a transformers model takes as `past_key_values` when every row is at a position of its own.

    Buffers are [rows, length, kv_heads * head_dim] per layer, for keys and for values: a position's heads are neighbours, so
    that writing one token per row is one `index_copy_`.

    Args:
        num_slots: most rows.
        max_length: most tokens per row.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.max_length = max_length
        self._rows = 0
        self._length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._live = (0, 0)
        self._flat_positions = torch.empty(0, dtype=torch.int64)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens; contents are kept."""
        rows = _grown(self._rows, rows, 16, self.num_slots)
        length = _grown(self._length, length, LENGTH_STEP, self.max_length)
        length += -length % LENGTH_STEP
        if (rows, length) == (self._rows, self._length):
            return
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                # Zeros, not garbage: masked positions are multiplied by 0, which leaves NaN as it is.
                new = old.new_zeros(rows, length, old.shape[2])
                new[: self._rows, : self._length] = old
                buffers[layer] = new
        self._rows, self._length = rows, length

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """Say where the next token of each live row goes.

        Args:
            positions: [n] int64, tokens already held by row i.
            longest: tokens of the longest row, the new one included: attention sees this many positions.
        """
        rows = torch.arange(positions.shape[0], device=positions.device)
        self._flat_positions = rows * self._length + positions
        self._live = (int(positions.shape[0]), longest)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token per live row. Takes [n, kv_heads, 1, head_dim], returns views [n, kv_heads, longest, head_dim]."""
        self._ensure_layer(layer_idx, key_states, value_states)
        return (
            self._put(self._keys[layer_idx], key_states),
            self._put(self._values[layer_idx], value_states),
        )

    def fill(self, prefixes: DynamicCache, source: Tensor, rows: Tensor) -> None:
        """Copy prefilled prompts into rows.

        Args:
            prefixes: cache of a forward over prompts, [u, kv_heads, P, head_dim] per layer; P may be longer than a row, where the
                forward took a long prompt along that is not among `source`.
            source: [m] which prompt.
            rows: [m] which row.
        """
        layers: list[Any] = prefixes.layers
        for layer_idx, layer in enumerate(layers):
            self._ensure_layer(layer_idx, layer.keys, layer.values)
            for buffer, states in ((self._keys[layer_idx], layer.keys), (self._values[layer_idx], layer.values)):
                width = min(states.shape[2], buffer.shape[1])
                buffer[rows, :width] = states[:, :, :width].transpose(1, 2).flatten(2)[source]

    def move(self, source: Tensor, target: Tensor, longest: int) -> None:
        """Copy rows `source` [m] over rows `target` [m], the first `longest` tokens."""
        for buffer in (*self._keys, *self._values):
            buffer[target, :longest] = buffer[source, :longest]

    def release(self) -> None:
        """Give the memory back."""
        self._keys, self._values = [], []
        self._rows = self._length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that attention sees; models ask only when they get no position ids."""
        return self._live[1]

    def _ensure_layer(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        if layer_idx == len(self._keys):
            for buffers, states in ((self._keys, keys), (self._values, values)):
                buffers.append(states.new_zeros(self._rows, self._length, states.shape[1] * states.shape[3]))

    def _put(self, buffer: Tensor, states: Tensor) -> Tensor:
        n, heads, _, head_dim = states.shape
        buffer.view(-1, buffer.shape[2]).index_copy_(0, self._flat_positions, states.reshape(n, heads * head_dim))
        longest = self._live[1]
        return buffer[:n, :longest].view(n, longest, heads, head_dim).transpose(1, 2)
