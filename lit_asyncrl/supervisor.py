"""Who is alive, who waits for whom, first exception wins: the only place that owns waits.

Threads, the engine's process and signal handlers report to one `Supervisor`. Every blocking call of the package goes through
`Supervisor.wait_for` (a condition) or polls in slices of at most `POLL_S` and calls `raise_if_stopping` between slices, so that a
fault anywhere ends every wait in a fraction of a second with the original cause. The same calls are the heartbeats that the run's
`Watchdog` looks at (`watchdog.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lit_asyncrl.errors import StopRequested, WaitTimeoutError
from lit_asyncrl.waits import Changed, Countdown

POLL_S = 0.1
"""Longest time, in seconds, that a wait goes without looking for a fault or a stop request."""

CLOSED = "closed"
"""Reason of a stop request that only says that the run is over."""


@dataclass(slots=True)
class Part:
    """A thread of the run that must give signs of life."""

    who: str
    beats: int = 0


@dataclass(slots=True)
class _Wait:
    """Something that somebody waits for, or is busy with for a limited time."""

    who: str
    what: str
    since: float = field(default_factory=time.monotonic)  # seconds, monotonic
    limit_s: float | None = None

    def __str__(self) -> str:
        return f"{self.who} for {self.what} ({time.monotonic() - self.since:.1f} s)"


class Supervisor:
    """Collects the first fault and the stop request of a run, and bounds its waits.

    Example:
        >>> supervisor = Supervisor()
        >>> ready = Changed()
        >>> supervisor.wait_for(ready, lambda: True, timeout_s=1.0, who="trainer", what="a batch")
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may come while its own thread holds it
        self._failure: BaseException | None = None
        self._culprit: str | None = None
        self._stop_reason: str | None = None
        self._waits: dict[int, _Wait] = {}  # by id
        self._wait_totals: dict[str, float] = {}
        self._parts: dict[int, Part] = {}  # by thread

    def fail(self, error: BaseException, who: str) -> None:
        """Record a fault of the part named `who`. The first one wins; later ones are consequences."""
        with self._lock:
            if self._failure is None:
                self._failure = error
                self._culprit = who

    def request_stop(self, reason: str) -> None:
        """Ask every part to end at its next safe point. The first reason is kept; a signal's is, even after `CLOSED`."""
        with self._lock:
            if self._stop_reason in (None, CLOSED):
                self._stop_reason = reason

    @property
    def stop_reason(self) -> str | None:
        """Why the run was asked to stop; None while it was not."""
        return self._stop_reason

    @property
    def failure(self) -> BaseException | None:
        """The first fault, or None."""
        return self._failure

    def raise_if_failed(self) -> None:
        """Re-raise the first fault with its own traceback; a note names the part that failed."""
        if self._failure is not None:
            note = f"Raised in lit-asyncrl's {self._culprit}."
            if note not in getattr(self._failure, "__notes__", ()):
                self._failure.add_note(note)
            raise self._failure

    def raise_if_stopping(self) -> None:
        """`raise_if_failed`, and `StopRequested` once a stop was asked for. A sign of life of the calling thread."""
        self.beat()
        self.raise_if_failed()
        if self._stop_reason is not None:
            raise StopRequested(self._stop_reason)

    def wait_for(
        self,
        changed: Changed,
        predicate: Callable[[], bool],
        *,
        timeout_s: float,
        who: str,
        what: str,
    ) -> None:
        """Wait until `predicate()` holds. The caller may hold `changed` (to act atomically afterwards)
        or not; it is held while the predicate is evaluated.

        Args:
            changed: notified by whoever can make the predicate true.
            predicate: cheap; called with `changed` held.
            timeout_s: seconds before giving up.
            who: the waiting part, for the message and the accounting of waiting time.
            what: what it waits for.

        Raises:
            WaitTimeoutError: the time is up; the message names both, and every other wait in progress.
            StopRequested: a stop was asked for.
            BaseException: the first fault of another part.
        """
        wait = _Wait(who, what)
        countdown = Countdown(timeout_s, POLL_S)
        self._waits[id(wait)] = wait
        try:
            with changed:
                while True:
                    self.raise_if_stopping()
                    if predicate():
                        return
                    if not (left_s := countdown.left_s):
                        raise WaitTimeoutError(
                            f"{who} waited {timeout_s:.1f} s for {what}. Waits in progress: {self.describe_waits()}."
                        )
                    changed.wait_news(min(POLL_S, left_s))
        finally:
            del self._waits[id(wait)]
            with self._lock:
                self._wait_totals[who] = self._wait_totals.get(who, 0.0) + time.monotonic() - wait.since

    def waited_s(self, who: str) -> float:
        """Seconds that the part `who` has spent in `wait_for` so far."""
        return self._wait_totals.get(who, 0.0)

    def describe_waits(self) -> str:
        """Every wait in progress, in words."""
        return "; ".join(map(str, list(self._waits.values()))) or "none"

    # ---------------------------------------------------------------- for the watchdog

    def beat(self) -> None:
        """A sign of life of the calling thread, at the cost of a look-up; of no effect in a thread that is no `part`."""
        part = self._parts.get(threading.get_ident())
        if part is not None:
            part.beats += 1

    @contextmanager
    def part(self, who: str) -> Iterator[None]:
        """The calling thread works for the run meanwhile, and gives signs of life."""
        me = threading.get_ident()
        self._parts[me] = Part(who)
        try:
            yield
        finally:
            del self._parts[me]

    @contextmanager
    def busy(self, who: str, what: str, limit_s: float) -> Iterator[None]:
        """`who` waits for `what` meanwhile, for at most `limit_s` seconds by a timeout of its own: no stall until then."""
        wait = _Wait(who, what, limit_s=limit_s)
        self._waits[id(wait)] = wait
        try:
            yield
        finally:
            del self._waits[id(wait)]

    @property
    def is_busy(self) -> bool:
        """Whether something is within the time limit of its own."""
        now = time.monotonic()
        return any(wait.limit_s is not None and now - wait.since < wait.limit_s for wait in list(self._waits.values()))

    @property
    def parts(self) -> dict[int, Part]:
        """The threads that give signs of life, by identity."""
        return dict(self._parts)
