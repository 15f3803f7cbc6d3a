"""A generation engine on a virtual clock: slots, requests in order, and finished groups with the version of every token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np
import torch
from torch import Tensor

from lit_asyncrl.simulation.settings import SimulationSettings
from lit_asyncrl.types import TrajectoryGroup

_BLOCK_RESPONSES = 2048  # drawn and laid out at once

_NEVER = float("inf")


@dataclass(slots=True)
class _Layout:
    """A group before it is generated: what does not depend on when that happens. N tokens, G members.

    Attributes:
        durations: G seconds.
        members: [G] int64 tokens, each member's one prompt token included.
        offsets: [N] seconds from a member's start to each of its tokens.
        prompt_positions: [G] where the prompt tokens are.
        lengths, token_ids, loss_mask, behavior_logprobs, rewards, reward_components: as of `TrajectoryGroup`.
    """

    durations: list[float]
    members: np.ndarray
    offsets: np.ndarray
    prompt_positions: np.ndarray
    lengths: Tensor
    token_ids: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    rewards: Tensor
    reward_components: Tensor


class VirtualEngine:
    """Decodes requests in order of submission, each in the slot that is free first; weights change between two tokens.

    A request's start and end are known when it is submitted, since nothing that comes later can overtake it.

    Args:
        settings: sizes, rates and lengths.
        seed: of lengths and forgetting scores.
    """

    def __init__(self, settings: SimulationSettings, seed: np.random.SeedSequence) -> None:
        self._settings = settings
        self._layouts = _layouts(settings, seed)
        self._free_at = [0.0] * settings.num_slots  # heap
        self._pending: list[tuple[float, int, list[float], _Layout]] = []  # heap: end, group id, members' starts, layout
        self._swaps: list[float] = []  # when the first, second, ... update's weights were loaded
        self._next_id = 0
        self._flags = torch.full((settings.group_size,), True), torch.full((settings.group_size,), False)
        self.busy_s = 0.0

    def submit(self, num_groups: int, now: float) -> range:
        """Queue the requests of new groups, and give their ids, which count up from 0."""
        free_at = self._free_at
        first = self._next_id
        for group_id in range(first, first + num_groups):
            layout = next(self._layouts)
            starts = []
            end = 0.0
            for duration in layout.durations:
                start = free_at[0]
                if start < now:
                    start = now
                starts.append(start)
                stop = start + duration
                heapreplace(free_at, stop)
                if stop > end:
                    end = stop
            heappush(self._pending, (end, group_id, starts, layout))
        self._next_id += num_groups
        return range(first, self._next_id)

    def swap(self, now: float) -> None:
        """One more update's weights are served from `now` on (or later by the publish lag)."""
        self._swaps.append(now)

    @property
    def next_end(self) -> float:
        """When the next group is complete; infinity if none is in flight."""
        return self._pending[0][0] if self._pending else _NEVER

    def pop(self) -> TrajectoryGroup:
        """The group that is complete next. No swap before `next_end` may be reported afterwards."""
        end, group_id, starts, layout = heappop(self._pending)
        self.busy_s += sum(layout.durations)
        versions = self._versions(np.array(starts).repeat(layout.members) + layout.offsets, min(starts))
        versions[layout.prompt_positions] = -1
        return TrajectoryGroup(
            group_id=group_id,
            prompt_index=group_id,
            epoch=0,
            task="simulated",
            token_ids=layout.token_ids,
            loss_mask=layout.loss_mask,
            behavior_logprobs=layout.behavior_logprobs,
            token_versions=torch.from_numpy(versions),
            lengths=layout.lengths,
            rewards=layout.rewards,
            reward_components=layout.reward_components,
            correct=self._flags[0],
            truncated=self._flags[1],
            completed_version=self._served(bisect_right(self._swaps, end)),
            reward_names=("forgetting",),
        )

    def _versions(self, times: np.ndarray, since: float) -> np.ndarray:
        """Version served at each of the times, all at `since` or later; int32."""
        before = bisect_right(self._swaps, since)
        applied = np.array(self._swaps[before:]).searchsorted(times, "right").astype(np.int32)
        applied += before
        if self._settings.publish_lag:
            applied = np.maximum(applied - np.int32(self._settings.publish_lag), 0)
        return applied

    def _served(self, applied: int) -> int:
        return max(applied - self._settings.publish_lag, 0)


def forgetting_logprobs(groups: Sequence[TrajectoryGroup]) -> list[Tensor]:
    """The simulation's `PrefixScorer`: a member's reward holds its forgetting score, and the behavior log-probs are 0."""
    return [torch.repeat_interleave(-group.rewards, group.lengths) for group in groups]


def _layouts(settings: SimulationSettings, seed: np.random.SeedSequence) -> Iterator[_Layout]:
    """Groups without end, laid out in blocks: each member has one prompt token and, evenly from start to end, sampled ones."""
    length_rng, forgetting_rng = (np.random.default_rng(part) for part in seed.spawn(2))
    probe = settings.lengths.draw(np.random.default_rng(0), (65536,))
    quantum = float(probe.mean()) / settings.tokens_per_mean_response  # real tokens that one simulated token stands for
    shape = (max(_BLOCK_RESPONSES // settings.group_size, 1), settings.group_size)
    while True:
        tokens = settings.lengths.draw(length_rng, shape)
        durations = tokens * settings.token_s
        num_sampled = np.maximum(1, np.rint(tokens / quantum)).astype(np.int64)
        lengths = num_sampled + 1
        flat = lengths.ravel()
        position = np.arange(flat.sum()) - np.repeat(flat.cumsum() - flat, flat)
        step = durations / np.maximum(num_sampled - 1, 1)  # the first token is sampled at the start, the last at the end
        offsets = np.maximum(position - 1, 0) * np.repeat(step.ravel(), flat)
        mean = settings.forgetting_nats
        forgetting = forgetting_rng.exponential(mean, shape) if mean else np.zeros(shape)
        scores = torch.from_numpy(forgetting.astype(np.float32))
        sizes = lengths.sum(axis=1)
        split = sizes.tolist()
        yield from map(
            _Layout,
            durations.tolist(),
            lengths,
            [offsets[stop - size : stop] for stop, size in zip(sizes.cumsum().tolist(), split, strict=True)],
            lengths.cumsum(axis=1) - lengths,
            torch.from_numpy(lengths).unbind(),
            torch.zeros(len(position), dtype=torch.int64).split(split),
            torch.from_numpy(position > 0).split(split),
            torch.zeros(len(position)).split(split),
            scores.unbind(),
            scores[..., None].unbind(),
        )
