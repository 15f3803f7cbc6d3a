"""The embedded engine's own process: `python -m lit_asyncrl.generation.hf_worker <socket fd> <memfd>`.

    trainer --"start" "submit" "update" "pause" "stop"--> here --"ready" "finished" "updated" "paused" "alive" "failed"--> trainer

Each message to the trainer begins with the counters and, now and then, what was sampled for unfinished training responses: the
trainer's side knows it after a crash. Between two decode steps the worker takes every message that has arrived; without work it
sleeps on the socket. End-of-file on the socket, or another parent than at the start, means that the trainer is gone: the process
exits at once. Needs neither Lightning nor TorchRL.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from lit_asyncrl.errors import WeightSyncError
from lit_asyncrl.generation.hf_core import EngineCore, EngineCounters, EngineSettings
from lit_asyncrl.generation.transport import Connection, SharedTensors

IDLE_POLL_S = 1.0
"""How often an idle engine looks whether its parent still exists (a forked child of it may hold the socket open), and says that
it exists itself."""
REPORT_S = 0.2
"""Longest time, in seconds, that counters and sampled tokens go unreported while decoding."""
SEND_TIMEOUT_S = 600.0
"""A trainer that reads nothing for so long is taken for dead."""


class Worker:
    """Message loop around an `EngineCore`."""

    def __init__(self, connection: Connection, memfd: int, settings: EngineSettings) -> None:
        self._parent = os.getppid()
        self._connection = connection
        self._memfd = memfd
        self._core = EngineCore(settings)
        self._shared: SharedTensors | None = None
        self._idle_s = 0.0
        self._last_message = self._last_increments = time.monotonic()

    def run(self) -> None:
        """Serve until told to stop. Raises EOFError when the trainer is gone."""
        self._send("ready", self._core.max_model_len)
        while True:
            report = self._core.try_update()
            if report is not None:
                self._send("updated", report)
            busy = self._core.has_work
            waiting_since = time.perf_counter()
            message = self._connection.receive(0.0 if busy else IDLE_POLL_S)
            if not busy:
                self._idle_s += time.perf_counter() - waiting_since
            if os.getppid() != self._parent:
                raise EOFError("The trainer's process is gone.")
            if message is not None:
                if message[0] == "stop":
                    return
                self._handle(*message)
            elif busy:
                self._step()
            if time.monotonic() - self._last_message >= IDLE_POLL_S:
                self._send("alive")

    def _step(self) -> None:
        purpose, finished = self._core.step()
        if finished or time.monotonic() - self._last_increments > REPORT_S:
            self._send("finished", purpose, finished)

    def _handle(self, kind: str, *content: Any) -> None:
        if kind == "submit":
            self._core.submit(content[0])
        elif kind == "pause":
            self._core.set_paused(content[0])
            self._send("paused", content[0])
        elif kind == "update":
            self._update(*content)
        else:
            raise AssertionError(f"unknown message {kind!r}")

    def _update(self, version: int, place: tuple[Any, int] | None) -> None:
        if place is not None:
            self._shared = SharedTensors(self._memfd, *place)
        assert self._shared is not None, "an update without a layout"
        try:
            # The trainer writes there again only after the answer.
            self._core.begin_update(version, self._shared.tensors)
        except WeightSyncError as error:
            self._send("updated", str(error))

    def _send(self, kind: str, *content: Any) -> None:
        counters = EngineCounters(self._core.generated_tokens, self._core.busy_s, self._idle_s)
        increments = None
        now = time.monotonic()
        if now - self._last_increments > REPORT_S or kind == "paused":
            increments = self._core.take_increments()
            self._last_increments = now
        self._connection.send((kind, counters, increments, *content), SEND_TIMEOUT_S)
        self._last_message = now


def main() -> int:
    """Serve on the socket and memfd of the command line; returns the exit status."""
    # The trainer decides when to end: a Ctrl-C or a batch system's SIGTERM reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    transformers_logging.disable_progress_bar()  # the screen is the trainer's
    connection = Connection(socket.socket(fileno=int(sys.argv[1])))
    try:
        message = connection.receive(60.0)
        if message is None:
            return 1
        settings: EngineSettings = message[1]
        torch.set_num_threads(settings.num_threads)
        Worker(connection, int(sys.argv[2]), settings).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:  # noqa: BLE001 - reported to the trainer, which raises it
        try:
            connection.send(("failed", EngineCounters(), None, f"{error!r}\n{traceback.format_exc()}"), 5.0)
        except OSError:
            traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    # No interpreter shutdown: nothing here needs one, and torch's takes longer than a trainer waits.
    status = main()
    sys.stderr.flush()
    os._exit(status)
