"""Samplers that consume: each entry leaves the buffer once, taken for a batch or rejected as stale.

They work in any `torchrl.data.ReplayBuffer`; with `FreeSlotWriter`, no waiting entry is ever overwritten:

    sampler = PaceSampler()
    buffer = ReplayBuffer(storage=LazyStackStorage(4096), sampler=sampler, writer=FreeSlotWriter(sampler), batch_size=16)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from lit_asyncrl.pool.facts import GroupFacts


class StalenessSampler(Sampler):
    """Base of the samplers: keeps which slots wait, in order of arrival, and which are free again.

    A batch is taken in up to three calls: `plan` decides how many entries to reject and names the slots whose prefix has to be
    scored for that; `score` brings their log-probs; `sample` rejects, and returns the batch. Scoring between them needs no lock
    of the buffer. `sample` alone plans by itself, without scores.

    Attributes:
        policy_version: the trainer's; the caller keeps it up to date.
        rejected: slots that the last `sample` rejected, stalest first.
        kept: slots whose entries it rewrote without some of their members, and which members [G] bool they kept.
        groups_rejected: entries rejected so far.
        tokens_rescored: sampled tokens whose log-probs were computed again so far.
        target_occupancy: entries that should be waiting; None where the sampler has no such target.
        rejection_ema: smoothed share of the pool that is too much; 0 for a sampler that does not reject.
        splits_groups: whether single members are rejected, so that a group goes on smaller.
    """

    target_occupancy: float | None = None
    rejection_ema: float = 0.0
    splits_groups: bool = False

    def __init__(self) -> None:
        self.policy_version = 0
        self.rejected: list[int] = []
        self.kept: dict[int, Tensor] = {}
        self.groups_rejected = 0
        self.tokens_rescored = 0
        self._waiting: dict[int, None] = {}  # slots in order of arrival
        self._free: dict[int, None] = {}

    # --- taking a batch -------------------------------------------------------------------------------------------------

    def plan(self, storage: Storage, batch_size: int) -> list[int]:
        """Decide what the next `sample` rejects. Call once per batch taken.

        Returns:
            Slots with a prefix whose log-probs `score` should be told; empty if nothing is to be rejected.
        """
        return []

    def score(self, storage: Storage, slots: Sequence[int], logprobs: Sequence[Tensor]) -> None:
        """Tell the log-probs [L] under the current policy of planned slots; read at prefix tokens only."""

    def _reject(self, storage: Storage, batch_size: int) -> tuple[list[int], dict[int, Tensor]]:
        """Slots to reject before the batch is taken, stalest first, and which members [G] bool the reduced entries keep."""
        return [], {}

    def _choose(self, storage: Storage, batch_size: int) -> list[int]:
        """The batch: by default the oldest arrivals."""
        return list(itertools.islice(self._waiting, batch_size))

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict]:
        """Reject, then consume `batch_size` entries.

        Returns:
            Their slots [batch_size] int64, and an empty dictionary: `TensorDictReplayBuffer` would make columns of what is in it.

        Raises:
            RuntimeError: fewer entries are waiting.
        """
        if len(self._waiting) < batch_size:
            raise RuntimeError(f"Cannot take {batch_size} entries: {len(self._waiting)} are waiting.")
        self.rejected, self.kept = self._reject(storage, batch_size)
        self.discard(self.rejected)
        self.groups_rejected += len(self.rejected)
        taken = self._choose(storage, batch_size)
        self.discard(taken)
        return slot_tensor(taken), {}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether `batch_size` entries are waiting."""
        return len(self._waiting) >= batch_size

    # --- slots ----------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[int]:
        """Slots that wait, in order of arrival."""
        return list(self._waiting)

    def describe(self, slot: int, facts: GroupFacts) -> None:
        """Tell what is known of the entry in `slot`, so that it need not be read for ranking. Optional."""

    def add(self, index: int) -> None:
        """Called by the buffer: slot `index` was written."""
        self._arrive([int(index)])

    def extend(self, index: Tensor) -> None:
        """Called by the buffer: the slots `index` were written."""
        self._arrive(torch.as_tensor(index).flatten().tolist())

    def _arrive(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._free.pop(slot, None)  # written by another writer than `FreeSlotWriter`
            self._waiting.pop(slot, None)  # a written slot is a new arrival, even where another writer overwrote it
            self._waiting[slot] = None

    def discard(self, slots: Sequence[int]) -> None:
        """Take slots out of the queue; their entries may be overwritten from then on."""
        for slot in slots:
            del self._waiting[slot]
            self._free[slot] = None

    @property
    def num_free(self) -> int:
        """Slots that were given back and not written since."""
        return len(self._free)

    def pop_free_slot(self) -> int | None:
        """A slot that may be written again, or None."""
        return self._free.popitem()[0] if self._free else None

    # --- state ----------------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, float]:
        """Numbers about the last decision, for the log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Plain Python."""
        return {
            "policy_version": self.policy_version,
            "groups_rejected": self.groups_rejected,
            "tokens_rescored": self.tokens_rescored,
            "waiting": list(self._waiting),
            "free": list(self._free),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self._empty()
        self.policy_version = state_dict["policy_version"]
        self.groups_rejected = state_dict["groups_rejected"]
        self.tokens_rescored = state_dict["tokens_rescored"]
        self._waiting = dict.fromkeys(state_dict["waiting"])
        self._free = dict.fromkeys(state_dict["free"])

    def _empty(self) -> None:
        """Called by the buffer: every slot was emptied. Counters and averages stay."""
        self._waiting.clear()
        self._free.clear()

    def dumps(self, path: str | Path) -> None:
        """Write the state into the folder `path`."""
        Path(path).mkdir(exist_ok=True)
        (Path(path) / "sampler_metadata.json").write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def loads(self, path: str | Path) -> None:
        """Read the state from the folder `path`."""
        self.load_state_dict(json.loads((Path(path) / "sampler_metadata.json").read_text(encoding="utf-8")))


def slot_tensor(slots: Sequence[int]) -> Tensor:
    """[N] int64; by way of NumPy, which reads a short list in a quarter of the time."""
    return torch.from_numpy(np.array(slots, dtype=np.int64))


class FifoSampler(StalenessSampler):
    """Takes groups in order of completion and rejects none."""
