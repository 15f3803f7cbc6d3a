"""Who is alive, who waits for whom, first exception wins: the only place that owns waits.

Threads, the engine's process and signal handlers report to one `Supervisor`. Every blocking call of the package goes through
`Supervisor.wait_for` (a condition) or polls in slices of at most `POLL_S` and calls `raise_if_failed` between slices, so that a
fault anywhere ends every wait in a fraction of a second with the original cause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lit_asyncrl.errors import StopRequested, WaitTimeoutError
from lit_asyncrl.waits import Changed

POLL_S = 0.1
"""Longest time, in seconds, that a wait goes without looking for a fault or a stop request."""


class Supervisor:
    """Collects the first fault and the stop request of a run, and bounds its waits.

    Example:
        >>> supervisor = Supervisor()
        >>> ready = Changed()
        >>> supervisor.wait_for(ready, lambda: True, timeout_s=1.0, who="trainer", what="a batch")
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._culprit: str | None = None
        self._stop_reason: str | None = None
        self._waits: dict[int, tuple[str, str, float]] = {}
        self._wait_totals: dict[str, float] = {}

    def fail(self, error: BaseException, who: str) -> None:
        """Record a fault of the part named `who`. The first one wins; later ones are consequences."""
        with self._lock:
            if self._failure is None:
                self._failure = error
                self._culprit = who

    def request_stop(self, reason: str) -> None:
        """Ask every part to end at its next safe point."""
        with self._lock:
            if self._stop_reason is None:
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
        """`raise_if_failed`, and `StopRequested` once a stop was asked for."""
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
        started = time.monotonic()
        deadline = started + timeout_s
        me = threading.get_ident()
        self._waits[me] = (who, what, started)
        try:
            with changed:
                while True:
                    self.raise_if_stopping()
                    if predicate():
                        return
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise WaitTimeoutError(
                            f"{who} waited {timeout_s:.1f} s for {what}. Waits in progress: {self.describe_waits()}."
                        )
                    changed.wait_news(min(POLL_S, remaining))
        finally:
            self._waits.pop(me, None)
            with self._lock:
                self._wait_totals[who] = self._wait_totals.get(who, 0.0) + time.monotonic() - started

    def waited_s(self, who: str) -> float:
        """Seconds that the part `who` has spent in `wait_for` so far."""
        return self._wait_totals.get(who, 0.0)

    def describe_waits(self) -> str:
        """Every wait in progress, in words."""
        now = time.monotonic()
        waits = [f"{who} for {what} ({now - since:.1f} s)" for who, what, since in list(self._waits.values())]
        return "; ".join(waits) or "none"
