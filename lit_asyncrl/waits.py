"""Every wait of the package: bounded in time, and in this module alone.

Conditions, events and queues of the standard library can wait for ever; the linter forbids them elsewhere (`banned-api`). What
waits for another part of a run goes through `Supervisor.wait_for`, which also ends at the first fault; what is here is for the
inside of one part.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from threading import Thread
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")

IDLE_S = 1.0
"""How often, in seconds, a thread without messages wakes up."""
LOOK_S = 0.25
"""How often, in seconds, a wait looks at its countdown."""


class Countdown:
    """A time limit that runs while this process does: after a stop (Ctrl-Z, SIGSTOP), what came meanwhile must be read first.

    Between two looks at most twice their usual distance counts.

    Args:
        limit_s: seconds.
        look_s: how often `left_s` is read, in seconds.
    """

    def __init__(self, limit_s: float, look_s: float = LOOK_S) -> None:
        self._left_s = limit_s
        self._most_s = 2 * look_s
        self._seen = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds that are left, down to 0."""
        now = time.monotonic()
        self._left_s -= min(now - self._seen, self._most_s)
        self._seen = now
        return max(0.0, self._left_s)


class Changed:
    """A lock, and news of changes to what it guards. Re-entrant.

    Example:
        >>> changed, finished = Changed(), []
        >>> with changed:
        ...     finished.append(1)
        ...     changed.notify_all()
        >>> changed.wait_until(lambda: bool(finished), timeout_s=1.0)
        True
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def __enter__(self) -> Changed:
        self._condition.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._condition.release()

    def notify_all(self) -> None:
        """Let every waiting thread look again; the caller holds the lock."""
        self._condition.notify_all()

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `predicate()` holds, which is called with the lock held; the caller may hold it or not.

        Returns:
            Whether it holds; False after `timeout_s` seconds.
        """
        countdown = Countdown(timeout_s)
        with self._condition:
            while not predicate():
                if not (left_s := countdown.left_s):
                    return False
                self._condition.wait(min(LOOK_S, left_s))
            return True

    def wait_news(self, timeout_s: float) -> None:
        """Wait for the next `notify_all`, at most `timeout_s` seconds; the caller holds the lock."""
        self._condition.wait(max(0.0, timeout_s))


class Flag:
    """Something that happens once."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """It has happened."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for it at most `timeout_s` seconds; whether it has happened."""
        return self._event.wait(max(0.0, timeout_s))


class Inbox(Generic[Item]):
    """Messages to one thread, in order."""

    def __init__(self) -> None:
        self._changed = Changed()
        self._items: deque[Item] = deque()
        self._closed = False

    def put(self, item: Item) -> None:
        """Add a message; never waits. Of no effect once it is closed."""
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()

    def close(self) -> None:
        """No message will follow."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def discard(self) -> None:
        """Close it, and forget what was not read: nobody will."""
        with self._changed:
            self._items.clear()
            self.close()

    def __iter__(self) -> Iterator[Item]:
        """Messages as they come, until the inbox is closed and empty."""
        while True:
            with self._changed:
                self._changed.wait_until(lambda: self._closed or bool(self._items), IDLE_S)
                item = [self._items.popleft()] if self._items else []
                if self._closed and not item:
                    return
            yield from item


def start_thread(target: Callable[[], object], name: str) -> Thread:
    """Run `target` in a thread that does not keep the process alive."""
    thread = Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def pause(seconds: float) -> None:
    """Do nothing for so long. For retries, not for waiting for somebody."""
    time.sleep(seconds)
