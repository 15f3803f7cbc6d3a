"""Weights in chunks of bounded size through a file in memory: what sender and receiver of `shared_memory` agree on.

    sender (trainer)            file, one chunk long                receiver (vLLM's worker, vllm_transfer.py)
    write_chunk --------------> bytes of the chunk's pieces ------> read_piece, checksum compared, load
         |                                                               ^
         '---- names, dtypes, shapes, offsets, checksums (the RPC) ------'

A tensor larger than a chunk travels as several pieces. Nothing here needs vLLM, so that a trainer without it can use a server.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

CHUNK_BYTES = 32 * 2**20
"""Bytes of one chunk. Sender's copy, file, receiver's copies and those its loader holds stay below 256 MiB of host memory."""
ALIGNMENT = 64
"""Bytes; every piece begins at a multiple of it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's elements in a chunk.

    Attributes:
        name: Hugging Face parameter name.
        dtype: name of the torch dtype on the wire.
        shape: of the whole tensor.
        start, numel: which elements of the flattened tensor.
        offset: of the first byte in the file.
        checksum: XXH3 (64 bits) of the bytes as they left the trainer; None when this update is not checked.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int
    checksum: int | None = None


def plan_chunks(weights: Mapping[str, Tensor], dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES) -> list[list[Piece]]:
    """Divide tensors, in their order, into chunks of at most `chunk_bytes`.

    Args:
        weights: by Hugging Face name.
        dtype: on the wire, for floating-point tensors.
        chunk_bytes: at least a few hundred.
    """
    chunks: list[list[Piece]] = [[]]
    used = 0
    for name, tensor in weights.items():
        wire = dtype if tensor.is_floating_point() else tensor.dtype
        start = 0
        while start < tensor.numel():
            if used + wire.itemsize > chunk_bytes:
                chunks.append([])
                used = 0
            numel = min(tensor.numel() - start, (chunk_bytes - used) // wire.itemsize)
            chunks[-1].append(Piece(name, str(wire).removeprefix("torch."), tuple(tensor.shape), start, numel, used))
            used += numel * wire.itemsize
            used += -used % ALIGNMENT
            start += numel
    return chunks


class ChunkFile:
    """The sender's end: a file in memory that holds one chunk at a time.

    Args:
        path: where to make it, in a folder that the engine sees too (such as /dev/shm); None: a memory file without a name,
            which the kernel frees with its last user, for an engine on this host that runs as the same user.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        if path is None:
            self._fd = os.memfd_create("lit-asyncrl-weights", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            self._fd, self.path = tempfile.mkstemp(prefix="lit-asyncrl-weights-", dir=path)
        self._size = 0
        self._map: mmap.mmap | None = None

    def write_chunk(self, chunk: list[Piece], weights: Mapping[str, Tensor], *, checked: bool) -> list[dict[str, Any]]:
        """Copy a chunk's pieces (from any device) in; returns them for the message, with checksums when `checked`."""
        view = self._view(chunk[-1].offset + chunk[-1].numel * _dtype(chunk[-1]).itemsize)
        message = []
        for piece in chunk:
            source = weights[piece.name].detach().reshape(-1)[piece.start : piece.start + piece.numel]
            # The checksum is of what should be sent, not of what lies in the file, or a write that fails would go unseen.
            source = source.to(device="cpu", dtype=_dtype(piece)).contiguous()
            checksum = _checksum(source) if checked else None
            _tensor(view, piece).copy_(source)
            message.append(asdict(piece) | {"checksum": checksum})
        return message

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if self._path is not None:
                Path(self.path).unlink(missing_ok=True)

    def _view(self, size: int) -> Tensor:
        if size > self._size or self._map is None:
            self._size = max(size, self._size)
            os.ftruncate(self._fd, self._size)
            self._map = mmap.mmap(self._fd, self._size)
        return torch.frombuffer(self._map, dtype=torch.uint8)


def read_pieces(path: str, pieces: list[dict[str, Any]]) -> Iterator[tuple[Piece, Tensor]]:
    """The receiver's end: each piece with a view of its elements, flat; valid until the sender writes the next chunk.

    Raises:
        ValueError: the file is too short, or a checksum differs.
    """
    parsed = [Piece(**{**piece, "shape": tuple(piece["shape"])}) for piece in pieces]
    size = max(piece.offset + piece.numel * _dtype(piece).itemsize for piece in parsed)
    with Path(path).open("rb") as file:
        present = os.fstat(file.fileno()).st_size
        if present < size:
            raise ValueError(f"the chunk must hold {size} bytes, got {present} (first tensor {parsed[0].name})")
        # Private: torch wants writable memory, and a stray write must not reach the sender.
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    for piece in parsed:
        tensor = _tensor(flat, piece)
        if piece.checksum is not None and (received := _checksum(tensor)) != piece.checksum:
            raise ValueError(f"the checksum of {piece.name} must be {piece.checksum:#010x}, got {received:#010x}")
        yield piece, tensor


def _dtype(piece: Piece) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, piece.dtype)
    return dtype


def _tensor(flat: Tensor, piece: Piece) -> Tensor:
    dtype = _dtype(piece)
    return flat[piece.offset : piece.offset + piece.numel * dtype.itemsize].view(dtype)


def _checksum(tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.view(torch.uint8).numpy().data)
