"""Between trainer and engine process: framed messages on a socket, weights in shared memory without a name.

Messages are pickled. That is safe here and only here: the socket is an unnamed pair whose other end belongs to a process we
started ourselves. The weights lie in a `memfd`, which both sides map; the kernel frees it with its last user, so nothing stays
behind after `kill -9`.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

HEADER = struct.Struct("!Q")
ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple of it."""


class Entry(NamedTuple):
    """Where one tensor lies: its dtype, shape and first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


Layout = dict[str, Entry]


def layout_of(weights: Mapping[str, Tensor]) -> tuple[Layout, int]:
    """Places for tensors in one buffer, and the buffer's size in bytes."""
    layout: Layout = {}
    offset = 0
    for name, tensor in weights.items():
        layout[name] = Entry(tensor.dtype, tuple(tensor.shape), offset)
        offset += tensor.numel() * tensor.element_size()
        offset += -offset % ALIGNMENT
    return layout, offset


class SharedTensors:
    """Tensors in a memfd, as views of the mapped memory.

    Args:
        fd: of the memfd; stays open, owned by the caller.
        layout: as made by `layout_of`.
        size: of the buffer in bytes.
    """

    def __init__(self, fd: int, layout: Layout, size: int) -> None:
        flat = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        self.tensors = {name: _view(flat, entry) for name, entry in layout.items()}

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Copy tensors (of any device) in; names and shapes as in the layout."""
        for name, tensor in self.tensors.items():
            tensor.copy_(weights[name])


def _view(flat: Tensor, entry: Entry) -> Tensor:
    size = math.prod(entry.shape) * entry.dtype.itemsize
    return flat[entry.offset : entry.offset + size].view(entry.dtype).view(entry.shape)


def create_memfd() -> int:
    """A new, empty memory file without a name in the file system."""
    return os.memfd_create("lit-asyncrl-weights", os.MFD_CLOEXEC)


class Connection:
    """Whole Python objects over a stream socket: a length of 8 bytes, then the pickled object.

    One thread may send and one receive at the same time.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received = bytearray()

    def send(self, message: Any, timeout_s: float) -> None:
        """Send one message.

        Raises:
            TimeoutError: the other side has not taken it within `timeout_s`; the connection cannot be used any more.
            OSError: the other side is gone.
        """
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        view = memoryview(HEADER.pack(len(body)) + body)
        deadline = time.monotonic() + timeout_s
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                if not _ready(self._sock, select.POLLOUT, deadline - time.monotonic()):
                    raise TimeoutError(f"The other process has taken no message for {timeout_s:.0f} s.") from None

    def receive(self, timeout_s: float) -> Any | None:
        """One message, or None if none has begun to arrive within `timeout_s`.

        Raises:
            EOFError: the other side is gone.
        """
        body_end = self._body_end()
        while body_end is None or len(self._received) < body_end:
            if not self._received and not _ready(self._sock, select.POLLIN, timeout_s):
                return None
            # The rest of a message that has begun follows at once, or the sender's end shows as end-of-file.
            _ready(self._sock, select.POLLIN, 1.0)
            self._read_some()
            body_end = self._body_end()
        message = pickle.loads(memoryview(self._received)[HEADER.size : body_end])
        del self._received[:body_end]
        return message

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._sock.close()

    def _read_some(self) -> None:
        try:
            piece = self._sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError("The other process is gone.") from error
        if not piece:
            raise EOFError("The other process is gone.")
        self._received += piece

    def _body_end(self) -> int | None:
        if len(self._received) < HEADER.size:
            return None
        return HEADER.size + HEADER.unpack_from(self._received)[0]


def _ready(sock: socket.socket, event: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
