"""The trainer's end of the weight transports, one interface: copy out what fits, then stream the rest while vLLM stands still."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.generation.vllm_chunks import ChunkFile, Piece, plan_chunks
from lit_asyncrl.types import NamedTensors

Transport = Literal["shared_memory", "nccl", "ipc"]


class WeightSender(Protocol):
    """Carries weights to vLLM. `client` has the four blocking calls of vLLM's `VLLMWeightSyncClient`."""

    def stage(self, weights: NamedTensors) -> bool:
        """Copy out before generation stops; True when everything is copied and `weights` may change."""
        ...

    def send(self, client: Any, weights: NamedTensors) -> None:
        """Deliver what was staged and the rest of `weights`; returns when vLLM has loaded them."""
        ...

    def close(self) -> None:
        """Release what is held; idempotent."""
        ...


class SharedMemorySender:
    """Chunks through a file in memory; needs no vLLM on this side.

    Args:
        dtype: that is served; the wire's.
        folder: where the file is made, seen by both sides; None: a memory file without a name (an engine started here).
        checksum_every: compare every tensor's checksum in each n-th update, the first included; None: never.
    """

    def __init__(self, dtype: torch.dtype, folder: str | None, checksum_every: int | None) -> None:
        self._dtype = dtype
        self._folder = folder
        self._checksum_every = checksum_every
        self._file: ChunkFile | None = None
        self._chunks: list[list[Piece]] = []
        self._first: list[dict[str, Any]] = []
        self._updates = 0
        self._introduced = False

    def stage(self, weights: NamedTensors) -> bool:
        """Write the first chunk."""
        self._file = self._file or ChunkFile(self._folder)
        self._chunks = plan_chunks(weights, self._dtype)
        self._checked = self._checksum_every is not None and self._updates % self._checksum_every == 0
        self._updates += 1
        self._first = self._file.write_chunk(self._chunks[0], weights, checked=self._checked)
        return len(self._chunks) == 1

    def send(self, client: Any, weights: NamedTensors) -> None:
        """Have each chunk loaded before the next is written."""
        assert self._file is not None, "send before stage"
        if not self._introduced:
            client.init_weight_transfer_engine({})
            self._introduced = True
        client.start_weight_update()
        for number, chunk in enumerate(self._chunks, 1):
            pieces = self._first if number == 1 else self._file.write_chunk(chunk, weights, checked=self._checked)
            client.update_weights({"path": self._file.path, "pieces": pieces, "is_last": number == len(self._chunks)})
        client.finish_weight_update()

    def close(self) -> None:
        """Free the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class DeviceSender:
    """`nccl` or `ipc`: vLLM's own trainer-side classes; the trainer's weights must be on a GPU."""

    def __init__(self, transport: Literal["nccl", "ipc"], dtype: torch.dtype) -> None:
        self._transport: Literal["nccl", "ipc"] = transport
        self._dtype = dtype
        self._connected: Any = None
        self._source: Any = None
        self._client = _Redirect()

    def stage(self, weights: NamedTensors) -> bool:
        """Check the device; nothing is copied."""
        device = next(iter(weights.values())).device
        if device.type != "cuda":
            raise ConfigurationError(
                f"engine.transport must be 'shared_memory' unless the trainer's weights are on a GPU, got {self._transport!r} "
                f"with weights on {device}. Set engine.transport: shared_memory."
            )
        return False

    def send(self, client: Any, weights: NamedTensors) -> None:
        """Stream from GPU to GPU."""
        self._client.target = client
        if self._connected is None:
            from lit_asyncrl.generation.vllm_transfer import device_sender

            self._connected, self._source = device_sender(
                self._transport, self._client, weights, self._dtype, client.world_size + 1
            )
        self._source.weights = weights
        self._connected.send_weights()

    def close(self) -> None:
        """vLLM's classes hold a communicator, which ends with the process."""
        self._connected = None


class _Redirect:
    """Passes a sender's calls on to the client of the update in progress."""

    target: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)
