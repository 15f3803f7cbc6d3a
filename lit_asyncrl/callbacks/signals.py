"""SIGTERM and SIGINT: the first asks for a stop at the next step boundary; a second Ctrl-C or the end of the grace ends all.

Python runs a handler in the main thread, and between two of its instructions only. What cannot wait for that, a main thread that
hangs, is seen by the watchdog's thread, to which the kernel's side of each signal is written through a pipe (`set_wakeup_fd`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import psutil

from lit_asyncrl.errors import StopRequested
from lit_asyncrl.supervisor import CLOSED, Supervisor
from lit_asyncrl.waits import start_thread
from lit_asyncrl.watchdog import where

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}
"""Exit status of `lit-asyncrl` after a run that a signal stopped: 128 + signal number."""
HEARD_S = 5.0
"""Time, in seconds, that the main thread has to see a fault by itself before it is interrupted with it."""
SHUT_DOWN_S = 30.0
"""Longest time, in seconds, from that interruption to the end of the run, whose threads and engine have timeouts of their own."""
LEAVE_S = 3.0
"""Longest time, in seconds, for ending the engine when the process leaves at once."""


class SignalHandlers:
    """Installs both handlers (main thread only) and puts the previous ones back.

    Args:
        supervisor: receives the stop request; every bounded wait sees it within 0.1 s.
        on_leave: ends the engine, before leaving at once; may hang.
        grace_s: seconds from a signal, or from a fault, to the end of the run; then the process leaves by itself.
        is_started: whether training has begun. Before, there is nothing to save: a signal raises `StopRequested` at once.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        on_leave: Callable[[], None],
        grace_s: float = 30.0,
        is_started: Callable[[], bool] = lambda: True,
    ) -> None:
        self._supervisor = supervisor
        self._on_leave = on_leave
        self._grace_s = grace_s
        self._is_started = is_started
        self._previous: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._num_handled = 0
        self._num_interrupts = 0  # as the pipe tells
        self._begun = 0.0
        self._deadline: float | None = None
        self._was_interrupted = False

    def install(self) -> None:
        """Install; does nothing outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            previous = signal.signal(number, self._handle)
            self._previous.setdefault(number, previous)
        if self._pipe is None:
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if before != -1:  # somebody else's, who needs it
            signal.set_wakeup_fd(before)

    def restore(self) -> None:
        """Put the previous handlers back, where nobody else has done so already."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        if self._previous and self._pipe is not None:
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, self._pipe[1]):
                signal.set_wakeup_fd(before)
        self._previous.clear()

    def close(self) -> None:
        """`restore`, and release the pipe; after the last `look`."""
        self.restore()
        pipe, self._pipe = self._pipe, None
        for end in pipe or ():
            os.close(end)

    def look(self) -> None:
        """Called by the watchdog, every second or so: leaves when the grace is used up, or at a second Ctrl-C."""
        if self._pipe is None or not self._previous:
            return
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._pipe[0], 4096):
                self._hear(number)
        failure, reason, now = self._supervisor.failure, self._supervisor.stop_reason, time.monotonic()
        if failure is None and reason not in EXIT_CODES:
            return
        if self._deadline is None:
            self._begun, self._deadline = now, now + self._grace_s
        if failure is not None and not self._was_interrupted and now > self._begun + min(HEARD_S, self._grace_s):
            self._was_interrupted = True  # the handler raises the fault, wherever the main thread is
            self._deadline = now + max(SHUT_DOWN_S, self._grace_s)
            if reason != CLOSED:  # then it was heard, and the run is being shut down
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif now > self._deadline:
            if failure is not None:
                traceback.print_exception(failure)
            why = f"not ended within {now - self._begun:.0f} s (AsyncRollout.grace_s: {self._grace_s:g})"
            self._leave("fault" if reason not in EXIT_CODES else str(reason), why)

    def _hear(self, number: int) -> None:
        """A signal that the main thread may not have seen."""
        if self._was_interrupted or number not in (signal.SIGINT, signal.SIGTERM):
            return
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            self._leave(signal.SIGINT.name, "interrupted twice")
        self._supervisor.request_stop(signal.Signals(number).name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._was_interrupted:
            self._supervisor.raise_if_failed()
        self._num_handled += 1
        if number == signal.SIGINT and self._num_handled > 1:
            self._leave(name, "interrupted twice")
        self._supervisor.request_stop(name)
        if not self._is_started():
            raise StopRequested(name)

    def _leave(self, reason: str, why: str) -> NoReturn:
        """End the engine and this process, whatever it is doing."""
        main = threading.main_thread().ident or 0
        waits = self._supervisor.describe_waits()
        message = f"lit-asyncrl: {reason}: {why}; left at once. It was at {where(main)}. Waits in progress: {waits}."
        with contextlib.suppress(Exception):  # a screen that is gone, or that the main thread is writing to
            os.write(2, f"{message}\n".encode())
        start_thread(self._on_leave, "leaving").join(LEAVE_S)
        kill_workers()
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(EXIT_CODES.get(reason, 1))


def kill_workers() -> None:
    """SIGKILL to what this package started and is still there: a stopped process does not notice that its parent is gone."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("lit_asyncrl" in part or part.startswith("VLLM::") for part in child.cmdline()):
                child.kill()
