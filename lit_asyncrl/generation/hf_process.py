"""The trainer's side of the embedded engine's process: starts it, talks to it, notices its death, ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lit_asyncrl.errors import EngineDiedError, EngineError, WeightSyncError
from lit_asyncrl.generation.hf_core import PURPOSES, EngineCounters, EngineSettings
from lit_asyncrl.generation.hf_decoder import Increments
from lit_asyncrl.generation.transport import Connection, SharedTensors, create_memfd, layout_of
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, NamedTensors, Purpose
from lit_asyncrl.waits import Changed, start_thread

POLL_S = 0.5
"""How often the reading thread looks whether it should end, in seconds."""
ANSWER_TIMEOUT_S = 60.0
"""Longest wait for a message to be taken and for an answer that needs no more than the present decode step."""
STOP_GRACE_S = 2.0
"""Time to end by itself before SIGKILL."""


class ProcessBackend:
    """An `hf_worker`, ready after `wait_ready`. Thread-safe: a reading thread sorts answers, callers wait on one condition.

    What was sampled for unfinished training responses is kept here as the worker reports it, so that it outlives the worker.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.counters = EngineCounters()
        self.max_model_len = 0
        self._settings = settings
        self._changed = Changed()
        self._send_lock = threading.Lock()
        self._weights_lock = threading.Lock()
        self._generated_tokens = 0
        self._partials: dict[int, Completion] = {}  # of training requests that are not finished, by id
        self._heard_at = time.monotonic()
        self._finished: dict[Purpose, list[Completion]] = {purpose: [] for purpose in PURPOSES}
        self._pending_version: int | None = None
        self._answer: DeliveryReport | str | None = None
        self._paused = False
        self._ready = False
        self._failure: EngineError | None = None
        self._stopping = False
        self._shared: SharedTensors | None = None
        self._layout: Any = None
        self._memfd = create_memfd()
        self._connection, self._process = _spawn(self._memfd, settings.num_threads)
        self._reader = start_thread(self._read, "hf-engine-reader")

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the model is loaded.

        Raises:
            EngineError: not within `timeout_s`, the model cannot be loaded, or the engine was stopped meanwhile.
        """
        self._send("start", self._settings)
        if not self._wait(lambda: self._ready, timeout_s):
            raise EngineError(f"The generation engine must be ready within {timeout_s:.0f} s, and was not.")

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Send requests, all in one message."""
        with self._changed:
            for request in requests:
                if request.purpose == "train" and request.partial is not None:
                    self._partials[request.request_id] = _copy(request.partial, request.request_id)
        self._send("submit", list(requests))

    def partial_completions(self) -> list[Completion]:
        """Training responses that were not taken yet, as far as reported; also of an engine that is gone or was stopped."""
        with self._changed:
            untaken = [*self._finished["train"], *self._partials.values()]
            return [_copy(completion, completion.request_id) for completion in untaken if completion.token_ids]

    @property
    def silent_s(self) -> float:
        """Seconds since the worker's last message; 0 before it is ready."""
        return time.monotonic() - self._heard_at if self._ready else 0.0

    def take(self, purpose: Purpose, timeout_s: float) -> list[Completion]:
        """Finished completions of one purpose; waits at most `timeout_s` for the first. A dead engine gives its last ones."""
        with self._changed:
            if self._stopping or not self._finished[purpose]:
                self._wait(lambda: bool(self._finished[purpose]), timeout_s)
            taken, self._finished[purpose] = self._finished[purpose], []
        return taken

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """Copy the weights into shared memory and tell the engine."""
        if self._pending_version is not None:
            raise WeightSyncError(
                f"Version {version} must follow a finished update, but version {self._pending_version} was not answered: "
                "writing now could mix the two."
            )
        layout, size = layout_of(weights)
        place = None
        with self._weights_lock:
            self._raise_if_dead()
            if layout != self._layout:
                os.ftruncate(self._memfd, size)
                self._shared = SharedTensors(self._memfd, layout, size)
                self._layout = layout
                place = (layout, size)
            assert self._shared is not None
            self._shared.write(weights)
        self._answer = None
        self._pending_version = version
        self._send("update", version, place)

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """Wait for the engine's report; after a timeout it may be called again."""
        version = self._pending_version
        assert version is not None, "finish_update without begin_update"
        if not self._wait(lambda: self._answer is not None, timeout_s):
            raise WeightSyncError(
                f"The generation engine must load version {version} within {timeout_s:.1f} s, and has not answered. "
                "Is its process stopped, or a decode step (with in_flight: wait, a response) longer than that?"
            )
        self._pending_version = None
        if isinstance(self._answer, str):
            raise WeightSyncError(self._answer)
        assert isinstance(self._answer, DeliveryReport)
        return self._answer

    def set_paused(self, paused: bool) -> None:
        """Let training responses stand still, or go on; returns when the engine has confirmed it."""
        self._send("pause", paused)
        if not self._wait(lambda: self._paused == paused, ANSWER_TIMEOUT_S):
            raise EngineDiedError(f"The generation engine has not answered a request to pause for {ANSWER_TIMEOUT_S:.0f} s.")

    def stop(self) -> None:
        """End the process (SIGKILL after a grace), the thread and the descriptors; idempotent."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
        with contextlib.suppress(OSError, EngineError):
            self._connection.send(("stop",), 0.1)
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        with self._send_lock:  # whoever was sending has noticed by now
            self._connection.close()
        with self._weights_lock:
            self._shared = None
            os.close(self._memfd)

    def _send(self, kind: str, *content: Any) -> None:
        try:
            with self._send_lock:
                self._raise_if_dead()
                self._connection.send((kind, *content), ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            raise EngineDiedError(f"The generation engine takes no messages: {error}") from error
        except OSError as error:
            self._wait(lambda: self._failure is not None, ANSWER_TIMEOUT_S)  # raises the reader's better message
            raise EngineDiedError("The generation engine's process is gone.") from error

    def _wait(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_until(lambda: predicate() or self._failure is not None or self._stopping, timeout_s)
            self._raise_if_dead()
            return predicate()

    def _raise_if_dead(self) -> None:
        if self._stopping:
            raise EngineError("The generation engine was stopped.")
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)  # one for each thread: each has a traceback of its own

    def _read(self) -> None:
        """Sort incoming messages until the process is gone."""
        try:
            while True:
                message = self._connection.receive(POLL_S)
                if message is not None:
                    with self._changed:
                        self._handle(*message)
                        self._changed.notify_all()
                elif self._stopping:
                    return
        except EOFError:
            self._fail(None)
        except Exception as error:  # noqa: BLE001 - whoever waits next raises it
            self._fail(EngineError(f"The generation engine answered with something unreadable: {error!r}"))

    def _handle(self, kind: str, counters: EngineCounters, increments: Increments | None, *content: Any) -> None:
        self._heard_at = time.monotonic()
        if kind == "failed":
            # A worker that has served may serve again; one that cannot start cannot start.
            self._failure = (EngineDiedError if self._ready else EngineError)(f"The generation engine failed: {content[0]}")
            return
        if kind == "finished":
            self._finish(*content)
        elif kind == "updated":
            self._answer = content[0]
        elif kind == "paused":
            self._paused = content[0]
        elif kind == "ready":
            self._ready, self.max_model_len = True, content[0]
        if increments is not None:  # of responses that are unfinished after this message
            self._extend(increments)
        # Counted here, so that what is counted is exactly what would be known after a crash.
        self.counters = replace(counters, generated_tokens=self._generated_tokens)

    def _finish(self, purpose: Purpose, completions: list[Completion]) -> None:
        self._finished[purpose].extend(completions)
        if purpose == "train":
            for completion in completions:
                known = self._partials.pop(completion.request_id, None)
                self._generated_tokens += len(completion.token_ids) - (0 if known is None else len(known.token_ids))

    def _extend(self, increments: Increments) -> None:
        begin = 0
        for request_id, length in zip(increments.request_ids, increments.lengths, strict=True):
            if not length:
                continue
            end = begin + length
            partial = self._partials.setdefault(request_id, Completion(request_id, [], [], [], "abort"))
            partial.token_ids += increments.token_ids[begin:end].tolist()
            partial.behavior_logprobs += increments.logprobs[begin:end].tolist()
            partial.token_versions += increments.versions[begin:end].tolist()
            begin = end
        self._generated_tokens += begin

    def _fail(self, failure: EngineError | None) -> None:
        if failure is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
            words = _exit_words(self._process.returncode)
            kind = EngineDiedError if self._ready else EngineError
            failure = kind(f"The generation engine's process ended unexpectedly ({words}).")
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()


def _copy(completion: Completion, request_id: int) -> Completion:
    return Completion(
        request_id,
        list(completion.token_ids),
        list(completion.behavior_logprobs),
        list(completion.token_versions),
        "abort",
    )


def _exit_words(returncode: int | None) -> str:
    if returncode is None:
        return "still exiting"
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"


def _spawn(memfd: int, num_threads: int) -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    # The child finds the same packages as we do, whatever changed sys.path, and -P keeps its working directory out.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(num_threads),
    }
    command = [sys.executable, "-P", "-m", "lit_asyncrl.generation.hf_worker", str(theirs.fileno()), str(memfd)]
    with theirs:
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(), memfd),
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output belongs to the trainer
            env=environment,
        )
    return Connection(ours), process
