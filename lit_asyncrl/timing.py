"""StepTimes: where the seconds of a part go, by name. Thread-safe: one thread may measure while another drains."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimes:
    """Adds up seconds per named part; `drain` gives them and starts anew.

    Example:
        >>> times = StepTimes()
        >>> with times.measure("forward"):
        ...     pass
        >>> sorted(times.drain())
        ['forward']
        >>> times.drain()
        {}
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the body to `part`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - started)

    def add(self, part: str, seconds: float) -> None:
        """Add seconds measured elsewhere."""
        with self._lock:
            self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        """Seconds per part since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds
