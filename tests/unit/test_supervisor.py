"""Supervisor: the first fault wins, a stop request ends every wait, waits are bounded and accounted."""

from __future__ import annotations

import threading
import traceback

import pytest

from lit_asyncrl.errors import EngineError, StopRequested, WaitTimeoutError
from lit_asyncrl.supervisor import CLOSED, Supervisor
from lit_asyncrl.waits import Changed


def _raise_deep_inside() -> None:
    raise EngineError("the engine is gone")


def _failed_supervisor() -> Supervisor:
    supervisor = Supervisor()
    try:
        _raise_deep_inside()
    except EngineError as error:
        supervisor.fail(error, "rollout collector")
    return supervisor


def _wait(supervisor: Supervisor, timeout_s: float = 5.0, **kwargs: object) -> None:
    supervisor.wait_for(Changed(), lambda: False, timeout_s=timeout_s, **({"who": "trainer", "what": "a batch"} | kwargs))


def test_no_fault_raises_nothing():
    Supervisor().raise_if_stopping()


def test_the_first_fault_wins():
    supervisor = _failed_supervisor()
    supervisor.fail(ValueError("a consequence"), "weight publisher")
    with pytest.raises(EngineError, match="the engine is gone"):
        supervisor.raise_if_failed()


def test_a_fault_keeps_the_traceback_of_where_it_was_raised():
    with pytest.raises(EngineError) as caught:
        _failed_supervisor().raise_if_failed()
    assert "_raise_deep_inside" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_a_fault_is_noted_once_with_the_part_that_failed():
    supervisor = _failed_supervisor()
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            supervisor.raise_if_failed()
    assert caught.value.__notes__ == ["Raised in lit-asyncrl's rollout collector."]


def test_a_stop_request_of_a_signal_that_lands_while_its_thread_holds_the_lock():
    supervisor, ended = Supervisor(), threading.Event()

    def interrupted() -> None:
        with supervisor._lock:
            supervisor.request_stop("SIGTERM")
        ended.set()

    threading.Thread(target=interrupted, daemon=True).start()
    assert ended.wait(10.0)
    assert supervisor.stop_reason == "SIGTERM"


def test_a_fault_wins_over_a_stop_request():
    supervisor = _failed_supervisor()
    supervisor.request_stop("SIGTERM")
    with pytest.raises(EngineError):
        supervisor.raise_if_stopping()


def test_the_first_stop_reason_is_kept():
    supervisor = Supervisor()
    supervisor.request_stop("SIGTERM")
    supervisor.request_stop("closed")
    assert supervisor.stop_reason == "SIGTERM"


def test_a_signal_is_the_reason_even_after_the_run_is_closed():
    supervisor = Supervisor()
    supervisor.request_stop(CLOSED)
    supervisor.request_stop("SIGTERM")
    assert supervisor.stop_reason == "SIGTERM"


def test_a_wait_returns_when_its_predicate_holds_already():
    supervisor = Supervisor()
    supervisor.wait_for(Changed(), lambda: True, timeout_s=0.0, who="trainer", what="a batch")


def test_a_wait_returns_when_another_thread_makes_its_predicate_true():
    supervisor, condition, ready = Supervisor(), Changed(), threading.Event()

    def produce() -> None:
        with condition:
            ready.set()
            condition.notify_all()

    thread = threading.Thread(target=produce)
    thread.start()
    supervisor.wait_for(condition, ready.is_set, timeout_s=5.0, who="trainer", what="a batch")
    thread.join(5.0)


def test_a_wait_that_times_out_names_who_and_what():
    with pytest.raises(WaitTimeoutError, match=r"trainer waited 0\.0 s for a batch"):
        _wait(Supervisor(), timeout_s=0.0)


def test_a_wait_that_times_out_names_the_other_waits_in_progress():
    supervisor, waiting = Supervisor(), threading.Event()

    def predicate() -> bool:
        waiting.set()
        return False

    def other() -> None:
        with pytest.raises(StopRequested):
            supervisor.wait_for(Changed(), predicate, timeout_s=10.0, who="rollout worker", what="room")

    thread = threading.Thread(target=other)
    thread.start()
    assert waiting.wait(5.0)
    with pytest.raises(WaitTimeoutError, match="rollout worker for room"):
        _wait(supervisor, timeout_s=0.0)
    supervisor.request_stop("test")
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_stop_request_ends_a_wait():
    supervisor = Supervisor()
    supervisor.request_stop("SIGINT")
    with pytest.raises(StopRequested, match="SIGINT"):
        _wait(supervisor)


def test_a_fault_ends_a_wait_that_began_before_it():
    supervisor, waiting = Supervisor(), threading.Event()
    caught: list[BaseException] = []

    def predicate() -> bool:
        waiting.set()
        return False

    def wait() -> None:
        try:
            supervisor.wait_for(Changed(), predicate, timeout_s=30.0, who="trainer", what="a batch")
        except EngineError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(5.0)
    supervisor.fail(EngineError("dead"), "engine")
    thread.join(5.0)
    assert [str(error) for error in caught] == ["dead"]


def test_waiting_time_is_accounted_to_who_waited():
    supervisor = Supervisor()
    with pytest.raises(WaitTimeoutError):
        _wait(supervisor, timeout_s=0.05)
    assert supervisor.waited_s("trainer") >= 0.05
    assert supervisor.waited_s("rollout worker") == 0.0


def test_a_wait_that_ended_is_no_longer_in_progress():
    supervisor = Supervisor()
    with pytest.raises(WaitTimeoutError):
        _wait(supervisor, timeout_s=0.0)
    assert supervisor.describe_waits() == "none"
