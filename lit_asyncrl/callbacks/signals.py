"""SIGTERM and SIGINT: the first asks for a stop at the next step boundary, a SIGINT after that leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lit_asyncrl.supervisor import Supervisor

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}
"""Exit status of `lit-asyncrl` after a run that a signal stopped: 128 + signal number."""


class SignalHandlers:
    """Installs both handlers (main thread only) and puts the previous ones back.

    Args:
        supervisor: receives the stop request; every bounded wait sees it within 0.1 s.
        on_second: called before leaving on a second SIGINT.
    """

    def __init__(self, supervisor: Supervisor, on_second: Callable[[], None]) -> None:
        self._supervisor = supervisor
        self._on_second = on_second
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Install; does nothing outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put the previous handlers back, where nobody else has done so already."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self._supervisor.stop_reason in EXIT_CODES:
            self._on_second()
            os._exit(EXIT_CODES[name])
        self._supervisor.request_stop(name)
