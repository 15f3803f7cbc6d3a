"""Computes the key-value states of prompts in batches and copies them into the slots that ask for them.

Slots become free a few at a time, and a forward over three short prompts costs nearly as much as one over thirty. So a forward
also takes the prompts next in the queue, and their states wait here for a slot: as long as the weights stay the same, unless
versions may be mixed. Equal prompts (the samples of a group) are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from lit_asyncrl.generation.slot_cache import SlotCache

Prefix = tuple[int, ...]

PREFILL_TOKENS = 4096
"""Most tokens, padding included, in one forward: bounds the memory of its activations (one longer prompt goes alone)."""
AHEAD_TOKENS = 1024
AHEAD_PROMPTS = 32
"""Prompts of the queue are taken along while a forward stays below both."""


class Prefiller:
    """Holds the states of one forward, which serve the queue in its order. Not thread-safe.

    Args:
        model: causal language model in evaluation mode.
        mixes_versions: whether states that waited here through a change of the weights are used after it.
    """

    def __init__(self, model: Any, *, mixes_versions: bool = False) -> None:
        self._model = model
        self._mixes_versions = mixes_versions
        self._device = next(model.parameters()).device
        self._version = -1
        self._index: dict[Prefix, int] = {}
        self._states = DynamicCache()

    def load(
        self, cache: SlotCache, rows: Sequence[int], prefixes: Sequence[Prefix], upcoming: Iterable[Prefix], version: int
    ) -> None:
        """Fill rows of the cache.

        Args:
            cache: with room for the rows.
            rows: where to.
            prefixes: what each row must hold; empty ones need nothing.
            upcoming: what the queue will ask for next, in order; read only as far as it is taken along.
            version: of the model's weights; states of another version are not used, unless versions may be mixed.
        """
        if version != self._version and not self._mixes_versions:
            self.release()
        self._version = version
        pending = [(prefix, row) for prefix, row in zip(prefixes, rows, strict=True) if prefix]
        upcoming = iter(upcoming)
        while pending:
            found = [(self._index[prefix], row) for prefix, row in pending if prefix in self._index]
            if found:
                source, target = torch.tensor(found, device=self._device).unbind(1)
                cache.fill(self._states, source, target)
            pending = [(prefix, row) for prefix, row in pending if prefix not in self._index]
            if pending:
                self._compute(self._next_batch([prefix for prefix, _ in pending], upcoming))

    def release(self) -> None:
        """Forget what waits here."""
        self._index = {}
        self._states = DynamicCache()

    def _next_batch(self, wanted: Sequence[Prefix], upcoming: Iterable[Prefix]) -> list[Prefix]:
        batch: dict[Prefix, None] = {}
        width = 0
        for prefix in wanted:
            width = max(width, len(prefix))
            if batch and width * (len(batch) + 1) > PREFILL_TOKENS:
                return list(batch)
            batch[prefix] = None
        for prefix in upcoming:
            width = max(width, len(prefix))
            if len(batch) >= AHEAD_PROMPTS or width * (len(batch) + 1) > AHEAD_TOKENS:
                break
            if prefix:
                batch[prefix] = None
        return list(batch)

    def _compute(self, prefixes: list[Prefix]) -> None:
        width = max(map(len, prefixes))
        # Padding on the right: a causal model computes real tokens as if it were not there, and what it leaves in the cache
        # lies beyond the row's length, where it is masked until overwritten.
        input_ids = torch.tensor([[*prefix, *[0] * (width - len(prefix))] for prefix in prefixes], device=self._device)
        self._states = DynamicCache()
        self._model(input_ids=input_ids, past_key_values=self._states, use_cache=True, logits_to_keep=1)
        self._index = {prefix: i for i, prefix in enumerate(prefixes)}
