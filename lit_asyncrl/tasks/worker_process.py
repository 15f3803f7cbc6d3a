"""WorkerProcess: a reward's process that can be killed; one JSON line there, one JSON line back, each in bounded time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lit_asyncrl.errors import ConfigurationError, RewardError

START_TIMEOUT_S = 60.0
"""Seconds for a new process to load what it needs."""


class WorkerProcess:
    """Runs `reward_worker.py`. Started by `start` or the first `ask`; killed when an answer takes too long, and started anew.

    Args:
        name: of the reward, for messages.
        timeout_s: seconds for one answer.
        first: what a new process is told before anything else.
    """

    def __init__(self, name: str, timeout_s: float, first: dict[str, Any]) -> None:
        if not timeout_s > 0:
            raise ConfigurationError(f"timeout_s must be above 0, got {timeout_s} (reward {name}).")
        self._name = name
        self._timeout_s = timeout_s
        self._first = first
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it runs, and wait until it has loaded.

        Raises:
            RewardError: it does not start, or cannot load the reward.
        """
        with self._lock:
            self._ask(None)

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to one request.

        Raises:
            RewardError: no answer in time, the process died, or the reward raised.
        """
        with self._lock:
            return self._ask(request)

    def kill(self) -> None:
        """End the process."""
        with self._lock:
            self._kill()

    def _ask(self, request: dict[str, Any] | None) -> Any:
        limit_s = START_TIMEOUT_S
        try:
            if self._process is None or self._process.poll() is not None:
                self._kill()
                self._process = _popen()
                reply = _exchange(self._process, self._first, limit_s)
                if "error" in reply:
                    self._kill()  # it would take the next request for what it is to load
                    raise RewardError(f"Reward {self._name!r} could not be loaded in its process: {reply['error']}.")
            if request is None:
                return None
            limit_s = self._timeout_s
            reply = _exchange(self._process, {**request, "limit_s": limit_s + 1.0}, limit_s)
        except (OSError, TimeoutError) as error:
            self._kill()
            raise RewardError(f"{self._name} must answer within {limit_s:g} s, got no answer ({error}).") from error
        if "error" in reply:
            raise RewardError(f"{self._name} raised {reply['error']}.")
        return reply["score"]

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _popen() -> subprocess.Popen[bytes]:
    worker = Path(__file__).with_name("reward_worker.py")
    # A session of its own keeps the terminal's Ctrl-C away; -P keeps this folder's modules from shadowing others.
    command = [sys.executable, "-P", str(worker)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)


def _exchange(process: subprocess.Popen[bytes], request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send a line and read one, both within `timeout_s` seconds."""
    assert process.stdin is not None and process.stdout is not None
    deadline = time.monotonic() + timeout_s
    to_worker, from_worker = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(to_worker, False)
    line = json.dumps(request).encode() + b"\n"
    while line:
        if not select.select([], [to_worker], [], max(0.0, deadline - time.monotonic()))[1]:
            raise TimeoutError("it does not read its input")
        line = line[os.write(to_worker, line) :]
    reply = b""
    while not reply.endswith(b"\n"):
        if not select.select([from_worker], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError("it is still computing")
        chunk = os.read(from_worker, 65536)
        if not chunk:
            raise BrokenPipeError("it ended")
        reply += chunk
    answer: dict[str, Any] = json.loads(reply)
    return answer
