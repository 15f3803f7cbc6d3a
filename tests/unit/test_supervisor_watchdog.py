"""Watchdog: silence and standstill end the run by name; long work, limits of its own, and a stopped trainer do not."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import contextmanager

import pytest

from lit_asyncrl.errors import StallError
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.waits import Changed, Flag
from lit_asyncrl.watchdog import LOOK_S, Watchdog

LOOK = 0.02
STALL = 0.2
LONG = 5 * STALL
ENDED_S = 10.0


@contextmanager
def watched(supervisor, *, progress=None, silent_s=None, stall_timeout_s=STALL):
    """Progress without end unless told otherwise."""
    watchdog = Watchdog(
        supervisor,
        stall_timeout_s=stall_timeout_s,
        progress=progress or itertools.count().__next__,
        silent_s=silent_s or {},
        look_s=LOOK,
    )
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.close()


def wait_for_failure(supervisor, timeout_s=ENDED_S):
    """The fault, or None after the time. Idle, so that this thread does not count as working."""
    changed = Changed()
    changed.wait_until(lambda: False, 0.0)
    deadline = time.monotonic() + timeout_s
    while supervisor.failure is None and time.monotonic() < deadline:
        with changed:
            changed.wait_news(0.1)
    return supervisor.failure


@pytest.fixture
def stuck():
    """A thread that is a part of the run and stays in a user's code until the test ends."""
    supervisor, inside, release = Supervisor(), Flag(), threading.Event()

    def user_code():
        inside.set()
        release.wait(60.0)

    def run():
        with supervisor.part("rollout dispatcher"):
            supervisor.beat()
            user_code()

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(5.0)
    yield supervisor
    release.set()
    thread.join(5.0)


def test_a_silent_thread_is_named_with_the_line_it_is_at(stuck):
    with watched(stuck):
        failure = wait_for_failure(stuck)
    assert isinstance(failure, StallError)
    assert "rollout dispatcher" in str(failure)
    assert "test_supervisor_watchdog.py" in str(failure)
    assert "in user_code" in str(failure)


def test_a_thread_that_polls_is_alive():
    supervisor, ended = Supervisor(), Flag()

    def run():
        with supervisor.part("rollout collector"):
            while not ended.wait(LOOK):
                supervisor.raise_if_stopping()

    thread = threading.Thread(target=run)
    thread.start()
    with watched(supervisor):
        failure = wait_for_failure(supervisor, LONG)
    ended.set()
    thread.join(5.0)
    assert failure is None


def test_a_thread_that_has_left_is_not_missed():
    supervisor = Supervisor()
    with supervisor.part("rollout collector"):
        pass
    with watched(supervisor):
        assert wait_for_failure(supervisor, LONG) is None


def test_an_engine_without_a_sign_of_life_is_named():
    supervisor, started = Supervisor(), time.monotonic()
    with watched(supervisor, silent_s={"generation engine": lambda: time.monotonic() - started}):
        assert "generation engine" in str(wait_for_failure(supervisor))


def test_an_engine_that_reports_from_time_to_time_is_alive():
    supervisor, started = Supervisor(), time.monotonic()
    with watched(supervisor, silent_s={"generation engine": lambda: (time.monotonic() - started) % (STALL / 2)}):
        assert wait_for_failure(supervisor, LONG) is None


def test_a_run_that_does_not_get_on_names_who_waits_for_what():
    supervisor = Supervisor()
    with watched(supervisor, progress=lambda: 0), pytest.raises(StallError, match="trainer for a batch"):
        supervisor.wait_for(Changed(), lambda: False, timeout_s=ENDED_S, who="trainer", what="a batch")


def test_a_trainer_that_computes_is_not_stalled():
    supervisor = Supervisor()
    with watched(supervisor, progress=lambda: 0):
        deadline = time.monotonic() + LONG
        while time.monotonic() < deadline:
            sum(range(1000))
    assert supervisor.failure is None


def test_something_within_a_limit_of_its_own_is_no_stall():
    supervisor = Supervisor()
    with watched(supervisor, progress=lambda: 0), supervisor.busy("rollout collector", "a reward", 60.0):
        assert wait_for_failure(supervisor, LONG) is None


def test_a_limit_that_is_over_protects_no_longer():
    supervisor = Supervisor()
    with watched(supervisor, progress=lambda: 0), supervisor.busy("rollout collector", "a reward", STALL):
        assert "rollout collector for a reward" in str(wait_for_failure(supervisor))


def test_time_is_counted_in_looks_so_that_a_stopped_trainer_is_not_silent(stuck):
    watchdog = Watchdog(stuck, stall_timeout_s=STALL, progress=lambda: 0, silent_s={}, look_s=LOOK)
    watchdog._look()
    watchdog._now_s += 2 * LOOK  # what one late look counts at most, after however long a stop
    watchdog._look()
    assert stuck.failure is None


def test_a_fault_of_the_watchdog_ends_the_run():
    def broken():
        raise ZeroDivisionError

    supervisor = Supervisor()
    with watched(supervisor, progress=broken):
        assert isinstance(wait_for_failure(supervisor), ZeroDivisionError)


def test_a_closed_watchdog_leaves_no_thread():
    with watched(Supervisor()):
        pass
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_supervision_costs_less_than_a_hundredth():
    supervisor = Supervisor()
    watchdog = Watchdog(supervisor, stall_timeout_s=600.0, progress=lambda: 0, silent_s={"engine": lambda: 0.0})
    with supervisor.part("rollout collector"):
        started = time.thread_time()
        for _ in range(10_000):
            supervisor.beat()
        beat_s = (time.thread_time() - started) / 10_000
        started = time.thread_time()
        for _ in range(1000):
            watchdog._look()
        look_s = (time.thread_time() - started) / 1000
    print(f"beat {beat_s * 1e6:.2f} us, look {look_s * 1e6:.0f} us every {LOOK_S} s")
    # Two threads that beat 200 times a second at most (every 5 ms), and one look a second.
    assert 2 * 200 * beat_s + look_s / LOOK_S < 0.01
