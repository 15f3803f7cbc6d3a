"""Waits: bounded, woken by news, and in order."""

from __future__ import annotations

import threading
import time

import pytest

from lit_asyncrl.waits import Changed, Flag, Inbox, start_thread

SOON = 5.0


def test_a_wait_ends_with_the_news_that_it_waits_for():
    changed, items = Changed(), []

    def produce():
        with changed:
            items.append(1)
            changed.notify_all()

    thread = start_thread(produce, "producer")
    assert changed.wait_until(lambda: bool(items), SOON)
    thread.join(SOON)


def test_a_wait_without_news_ends_at_its_limit():
    started = time.monotonic()
    assert not Changed().wait_until(lambda: False, 0.05)
    assert 0.05 <= time.monotonic() - started < SOON


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_a_limit_that_is_over_only_looks(timeout_s):
    assert Changed().wait_until(lambda: True, timeout_s)
    assert not Flag().wait(timeout_s)


def test_the_lock_can_be_taken_again_by_its_holder():
    changed = Changed()
    with changed, changed:
        assert changed.wait_until(lambda: True, 0.0)


def test_the_lock_is_released_by_an_exception():
    changed, taken = Changed(), Flag()
    with pytest.raises(ZeroDivisionError), changed:
        raise ZeroDivisionError

    def take():
        with changed:
            taken.set()

    start_thread(take, "other").join(SOON)
    assert taken.is_set()


def test_a_flag_wakes_every_thread_that_waits_for_it():
    flag, seen = Flag(), []
    threads = [start_thread(lambda: seen.append(flag.wait(SOON)), f"waiter {i}") for i in range(3)]
    flag.set()
    for thread in threads:
        thread.join(SOON)
    assert seen == [True, True, True]


def test_messages_come_in_order_and_end_when_the_inbox_is_closed():
    inbox: Inbox[int] = Inbox()
    for i in range(3):
        inbox.put(i)
    inbox.close()
    assert list(inbox) == [0, 1, 2]


def test_what_is_put_after_the_end_and_what_is_discarded_is_gone():
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    inbox.discard()
    inbox.put(2)
    assert list(inbox) == []


def test_a_message_wakes_the_thread_that_waits_for_one():
    inbox: Inbox[int] = Inbox()
    seen: list[int] = []
    thread = start_thread(lambda: seen.extend(inbox), "reader")
    inbox.put(7)
    inbox.close()
    thread.join(SOON)
    assert seen == [7]


def test_a_message_taken_out_is_not_held_by_the_inbox():
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    reader = iter(inbox)
    assert next(reader) == 1
    inbox.put(2)  # would never return if the reader kept the lock
    assert next(reader) == 2


def test_a_thread_does_not_keep_the_process_alive():
    thread = start_thread(lambda: None, "named")
    assert thread.daemon
    assert thread.name == "named"
    thread.join(SOON)
    assert threading.current_thread() is not thread
