"""Watchdog: looks every second whether the parts of a run are alive and the whole of it gets on, and ends it if not.

    silent part   a thread that polls (rollout) or an engine gave no sign of life for `stall_timeout_s`
    stall         nothing was sampled, answered, delivered or trained for `stall_timeout_s`, the trainer's thread computes
                  nothing, and nobody is within a time limit of its own (`Supervisor.busy`)

Time is counted in looks, not read from the clock: a trainer that was stopped (Ctrl-Z) or a machine that slept does not count
as silence. The timeouts of the single waits are mostly shorter; the watchdog is for what they cannot see, such as a task's code.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType

from lit_asyncrl.errors import StallError
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.waits import Flag, start_thread

LOOK_S = 1.0
"""Seconds between two looks."""
WORKING_SHARE = 0.02
"""Share of a core from which on the trainer's thread counts as working. Polling needs less."""
DEBUGGERS = ("bdb", "pdb", "pydevd")
"""Modules in whose frames a thread waits for a person."""


class Watchdog:
    """One thread that watches one run. Make and start it in the trainer's thread.

    Args:
        supervisor: gets the `StallError`.
        stall_timeout_s: seconds without a sign of life, or without progress, that end the run.
        progress: what changes as the run gets on (counts of tokens, answers, deliveries, updates); cheap, any thread.
        silent_s: by name, parts that cannot beat: seconds since their last sign of life.
        at_each_look: called at each look.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        stall_timeout_s: float,
        progress: Callable[[], object],
        silent_s: Mapping[str, Callable[[], float]],
        at_each_look: Callable[[], None] = lambda: None,
        look_s: float = LOOK_S,
    ) -> None:
        self._supervisor = supervisor
        self._stall_timeout_s = stall_timeout_s
        self._progress = progress
        self._silent_s = silent_s
        self._at_each_look = at_each_look
        self._look_s = look_s
        self._closing = Flag()
        self._trainer = threading.get_ident()
        self._trainer_clock = time.pthread_getcpuclockid(self._trainer)
        self._trainer_cpu_s = time.clock_gettime(self._trainer_clock)
        self._now_s = 0.0  # as counted in looks
        self._beats: dict[int, tuple[int, float]] = {}  # by thread: beats, and since when there are so many
        self._alive_at: dict[str, tuple[float, float]] = {}  # by name: silence as read last, and the last sign of life
        self._progressed: tuple[object, float] = (None, 0.0)

    def start(self) -> None:
        """Begin to look."""
        self._thread = start_thread(self._run, "watchdog")

    def close(self) -> None:
        """End; idempotent."""
        self._closing.set()
        thread = getattr(self, "_thread", None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)

    def _run(self) -> None:
        seen = time.monotonic()
        while not self._closing.wait(self._look_s):
            now = time.monotonic()
            self._now_s += min(now - seen, 2 * self._look_s)
            seen = now
            try:
                self._at_each_look()
                self._look()
            except Exception as error:  # noqa: BLE001 - a run without its watchdog must not go on unnoticed
                self._supervisor.fail(error, "watchdog")

    def _look(self) -> None:
        for ident, part in self._supervisor.parts.items():
            beats, since = self._beats.get(ident, (-1, self._now_s))
            if part.beats != beats:
                self._beats[ident] = (part.beats, self._now_s)
            elif self._is_over(since) and not _is_debugged(ident):
                self._fail(part.who, f"no sign of life of the {part.who} for that long, which is at {where(ident)}")
        for who, silent_s in self._silent_s.items():
            silent = silent_s()
            before, since = self._alive_at.get(who, (float("inf"), self._now_s))
            if silent < before + self._look_s / 2:  # it grows by more between two signs of life
                since = self._now_s
            self._alive_at[who] = (silent, since)
            if self._is_over(since):
                self._fail(who, f"no sign of life of the {who} for that long")
        self._look_at_progress()

    def _look_at_progress(self) -> None:
        now_cpu_s = time.clock_gettime(self._trainer_clock)
        working = now_cpu_s - self._trainer_cpu_s > WORKING_SHARE * self._look_s
        self._trainer_cpu_s = now_cpu_s
        progress = self._progress()
        before, since = self._progressed
        if progress != before or working or self._supervisor.is_busy or _is_debugged(self._trainer):
            self._progressed = (progress, self._now_s)
        elif self._is_over(since):
            self._fail(
                "run as a whole",
                "no progress (nothing sampled, answered, delivered or trained) for that long. The trainer is at "
                f"{where(self._trainer)}",
            )

    def _is_over(self, since: float) -> bool:
        return self._now_s - since > self._stall_timeout_s and self._supervisor.failure is None

    def _fail(self, who: str, what: str) -> None:
        error = StallError(
            f"AsyncRollout.stall_timeout_s must cover the longest time that a part needs, got {self._stall_timeout_s:g} s and "
            f"{what}. Waits in progress: {self._supervisor.describe_waits()}. Look at what is named, or raise the limit."
        )
        self._supervisor.fail(error, who)


def where(ident: int) -> str:
    """Where a thread is, in words: its innermost frame that belongs to neither Python's library nor the waits of this package."""
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_back is not None and _is_wait(frame):
        frame = frame.f_back
    if frame is None:
        return "its end"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_wait(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in ("threading", "lit_asyncrl.waits", "lit_asyncrl.supervisor", "contextlib")


def _is_debugged(ident: int) -> bool:
    frame = sys._current_frames().get(ident)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False
