"""A TorchRL writer that fills free slots only, so that no waiting group is ever overwritten."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torchrl.data.replay_buffers.writers import Writer

from lit_asyncrl.pool.sampler import StalenessSampler, slot_tensor


class FreeSlotWriter(Writer):
    """Writes into slots that the sampler has given back, then into new ones; refuses when there is neither.

    TorchRL's round-robin writer overwrites waiting entries as soon as entries leave out of order.

    Args:
        sampler: the buffer's sampler, which knows what was consumed or rejected.
    """

    def __init__(self, sampler: StalenessSampler) -> None:
        super().__init__()
        self._sampler = sampler
        self._write_count = 0  # read by `ReplayBuffer.write_count`

    def add(self, data: Any) -> int:
        """Store one entry and return its slot.

        Raises:
            RuntimeError: every slot holds a waiting entry.
        """
        slot = self._next_slot(len(self._storage))
        self._storage.set(slot, data)
        self._write_count += 1
        return slot

    def extend(self, data: Sequence) -> Tensor:
        """Store several entries and return their slots, [N] int64.

        Raises:
            RuntimeError: there are fewer slots than entries; none is stored.
        """
        end = len(self._storage)
        room = self._sampler.num_free + self._storage.max_size - end
        if len(data) > room:
            raise RuntimeError(f"The buffer is full: it has room for {room} entries, not for {len(data)}.")
        slots: list[int] = []
        for _ in range(len(data)):
            slots.append(self._next_slot(end))
            end = max(end, slots[-1] + 1)
        self._storage.set(slots, data)
        self._write_count += len(slots)
        return slot_tensor(slots)

    def _next_slot(self, end: int) -> int:
        """A slot that was given back, else the first one that was never written."""
        slot = self._sampler.pop_free_slot()
        if slot is None:
            slot = end
            if slot >= self._storage.max_size:
                raise RuntimeError(f"The buffer is full: all of its {slot} entries are waiting.")
        return slot

    def _empty(self, empty_write_count: bool = True) -> None:
        if empty_write_count:
            self._write_count = 0

    def state_dict(self) -> dict[str, Any]:
        """How many entries were written."""
        return {"write_count": self._write_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self._write_count = state_dict["write_count"]

    def dumps(self, path: str | Path) -> None:
        """Write the state into the folder `path`."""
        Path(path).mkdir(exist_ok=True)
        (Path(path) / "writer_metadata.json").write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def loads(self, path: str | Path) -> None:
        """Read the state from the folder `path`."""
        self.load_state_dict(json.loads((Path(path) / "writer_metadata.json").read_text(encoding="utf-8")))
