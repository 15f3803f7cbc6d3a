"""MathVerify: mathematical equivalence of response and answer, judged in a process that can be killed."""

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
from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.types import Example

START_TIMEOUT_S = 60.0
"""Seconds for a new process to load sympy."""


class MathVerify(RewardFn):
    """1 if `math-verify` finds the response equivalent to the answer, else 0.

    The work is done in a process of its own, started by the first call, since symbolic mathematics can run for ever in code that
    no exception reaches. A request that exceeds its time is an error and not a reward of 0; the process is killed and the next
    call starts another.

    Args:
        timeout_s: seconds for one response.
        weight: factor in the weighted sum of the task's rewards.
    """

    name = "math_verify"

    def __init__(self, timeout_s: float = 5.0, weight: float = 1.0) -> None:
        if not timeout_s > 0:
            raise ConfigurationError(f"timeout_s must be above 0, got {timeout_s} (reward math_verify).")
        self.timeout_s = timeout_s
        self.weight = weight
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __call__(self, completion: str, example: Example) -> float:
        """Ask the process.

        Raises:
            RewardError: no answer in time, the process died, or math-verify raised.
        """
        request = {"answer": str(example.answer), "completion": completion, "limit_s": self.timeout_s + 1.0}
        with self._lock:
            try:
                reply = _exchange(self._running(), json.dumps(request).encode() + b"\n", self.timeout_s)
            except (OSError, TimeoutError) as error:
                self._kill()
                raise RewardError(f"math-verify must answer within {self.timeout_s:g} s, got no answer ({error}).") from error
        if "error" in reply:
            raise RewardError(f"math-verify raised {reply['error']}.")
        return float(reply["score"])

    def close(self) -> None:
        """Kill the process."""
        with self._lock:
            self._kill()

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, started if there is none."""
        if self._process is None or self._process.poll() is not None:
            self._kill()
            worker = Path(__file__).with_name("reward_worker.py")
            # A session of its own keeps the terminal's Ctrl-C away; -P keeps this folder's modules from shadowing others.
            command = [sys.executable, "-P", str(worker)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
            )
            _exchange(self._process, b"", START_TIMEOUT_S)
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _exchange(process: subprocess.Popen[bytes], request: bytes, timeout_s: float) -> dict[str, Any]:
    """Send a line (or nothing) and read one, both within `timeout_s` seconds."""
    assert process.stdin is not None and process.stdout is not None
    deadline = time.monotonic() + timeout_s
    to_worker, from_worker = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(to_worker, False)
    while request:
        if not select.select([], [to_worker], [], max(0.0, deadline - time.monotonic()))[1]:
            raise TimeoutError("it does not read its input")
        request = request[os.write(to_worker, request) :]
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
