"""A time limit runs while its process does: a stop of the process uses up no more than a look."""

from __future__ import annotations

import time

import pytest

from lit_asyncrl import waits
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.waits import Changed, Countdown


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(waits, "time", clock)
    return clock


def test_it_counts_what_passes_between_looks(clock):
    countdown = Countdown(1.0, look_s=0.25)
    clock.now_s += 0.3
    assert countdown.left_s == pytest.approx(0.7)
    clock.now_s += 0.4
    assert countdown.left_s == pytest.approx(0.3)


def test_a_stop_counts_as_two_looks(clock):
    countdown = Countdown(1.0, look_s=0.25)
    clock.now_s += 3600.0
    assert countdown.left_s == 0.5
    clock.now_s += 3600.0
    assert countdown.left_s == 0.0


@pytest.mark.parametrize("limit_s", [0.0, -1.0])
def test_one_that_is_over_is_over_at_once(clock, limit_s):
    assert Countdown(limit_s).left_s == 0.0


def test_one_without_end_has_none(clock):
    countdown = Countdown(float("inf"))
    clock.now_s += 10.0
    assert countdown.left_s == float("inf")


def _stopped_once(clock: Clock, arrives_at_look: int):
    """A predicate that finds the process stopped for an hour before its second look, and holds at a later one."""
    looks = [0]

    def predicate() -> bool:
        looks[0] += 1
        if looks[0] == 2:
            clock.now_s += 3600.0
        return looks[0] >= arrives_at_look

    return predicate


def test_a_wait_sees_what_arrives_after_a_stop_that_was_longer_than_its_limit(clock):
    assert Changed().wait_until(_stopped_once(clock, 4), timeout_s=1.0)


def test_so_does_a_wait_of_the_supervisor(clock):
    started = time.monotonic()
    changed, predicate = Changed(), _stopped_once(clock, 4)
    Supervisor().wait_for(changed, predicate, timeout_s=1.0, who="trainer", what="a batch")
    assert time.monotonic() - started < 5.0
