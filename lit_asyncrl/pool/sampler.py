"""Samplers that consume: each entry leaves the buffer once, in order of completion or rejected as stale.

Works in any `torchrl.data.ReplayBuffer` whose writer is `FreeSlotWriter`:

    sampler = PaceSampler()
    buffer = ReplayBuffer(storage=LazyStackStorage(4096), sampler=sampler, writer=FreeSlotWriter(sampler), batch_size=16)
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage


class StalenessSampler(Sampler):
    """Base of the samplers: keeps which slots wait, in order of arrival, and which are free again.

    A batch is taken in up to three calls: `plan` decides how many entries to reject and names the slots whose prefix has to be
    scored for that; `score` brings their log-probs; `sample` rejects, and returns the oldest arrivals of what is left. Scoring
    between them needs no lock of the buffer. `sample` alone plans by itself, without scores.

    Attributes:
        policy_version: the trainer's; the caller keeps it up to date.
        groups_rejected: entries rejected so far.
        tokens_rescored: sampled tokens whose log-probs were computed again so far.
        target_occupancy: entries that should be waiting; None where the sampler has no such target.
        rejection_ema: smoothed share of the pool that is too much; 0 for a sampler that does not reject.
    """

    target_occupancy: float | None = None
    rejection_ema: float = 0.0

    def __init__(self) -> None:
        self.policy_version = 0
        self.groups_rejected = 0
        self.tokens_rescored = 0
        self._waiting: dict[int, None] = {}  # slots in order of arrival
        self._free: deque[int] = deque()

    # --- taking a batch -------------------------------------------------------------------------------------------------

    def plan(self, storage: Storage, batch_size: int) -> list[int]:
        """Decide what the next `sample` rejects. Call once per batch taken.

        Returns:
            Slots with a prefix whose log-probs `score` should be told; empty if nothing is to be rejected.
        """
        return []

    def score(self, storage: Storage, slots: Sequence[int], logprobs: Sequence[Tensor]) -> None:
        """Tell the log-probs [L] under the current policy of planned slots; read at prefix tokens only."""

    def _reject(self, storage: Storage, batch_size: int) -> list[int]:
        """Slots to reject before the batch is taken, stalest first."""
        return []

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict]:
        """Reject, then consume the `batch_size` oldest arrivals.

        Returns:
            Their slots [batch_size] int64, and `{"rejected": slots [R] int64}`.

        Raises:
            RuntimeError: fewer entries are waiting.
        """
        if len(self._waiting) < batch_size:
            raise RuntimeError(f"Cannot take {batch_size} entries: {len(self._waiting)} are waiting.")
        rejected = self._reject(storage, batch_size)
        self.discard(rejected)
        self.groups_rejected += len(rejected)
        taken = list(itertools.islice(self._waiting, batch_size))
        self.discard(taken)
        return torch.tensor(taken, dtype=torch.int64), {"rejected": torch.tensor(rejected, dtype=torch.int64)}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether `batch_size` entries are waiting."""
        return len(self._waiting) >= batch_size

    # --- slots ----------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[int]:
        """Slots that wait, in order of arrival."""
        return list(self._waiting)

    def add(self, index: int) -> None:
        """Called by the buffer: slot `index` was written."""
        self._waiting.pop(int(index), None)  # a written slot is a new arrival, even where another writer overwrote it
        self._waiting[int(index)] = None

    def extend(self, index: Tensor) -> None:
        """Called by the buffer: the slots `index` were written."""
        for slot in torch.as_tensor(index).flatten().tolist():
            self.add(slot)

    def discard(self, slots: Sequence[int]) -> None:
        """Take slots out of the queue; their entries may be overwritten from then on."""
        for slot in slots:
            del self._waiting[slot]
        self._free.extend(slots)

    def pop_free_slot(self) -> int | None:
        """A slot that may be written again, or None."""
        return self._free.popleft() if self._free else None

    # --- state ----------------------------------------------------------------------------------------------------------

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
        self._free = deque(state_dict["free"])

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


class FifoSampler(StalenessSampler):
    """Takes groups in order of completion and rejects none."""
