"""RewardRunner: calls reward functions in a thread of its own, with a bounded wait and one policy for what goes wrong."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lit_asyncrl.errors import ConfigurationError, RewardError, StopRequested
from lit_asyncrl.interfaces import Task
from lit_asyncrl.supervisor import POLL_S, Supervisor
from lit_asyncrl.types import Example
from lit_asyncrl.waits import Countdown, Flag, Inbox, start_thread

MAX_REWARD = 1e30
"""Largest absolute value of a reward; weighted sums of such stay finite in float32."""

MAX_HUNG_THREADS = 4
"""Threads that may hang in rewards at one time; one more ends the run even with `on_error="skip"`."""


@dataclass(slots=True)
class _Job:
    """One group to score. The thread fills `values` or `error`, then sets `done`."""

    task: Task
    completions: Sequence[str]
    example: Example
    values: list[list[float]] = field(default_factory=list)
    error: RewardError | None = None
    at: tuple[str, int] = ("", 0)
    done: Flag = field(default_factory=Flag)

    def run(self) -> None:
        try:
            for position, completion in enumerate(self.completions):
                row = []
                for reward in self.task.rewards:
                    self.at = (reward.name, position)
                    row.append(self._number(reward(completion, self.example)))
                self.values.append(row)
        except BaseException as error:  # noqa: BLE001 - raised again, with its cause, where the score is waited for
            self.error = RewardError(f"{self.where()} raised {type(error).__name__}: {error}")
            self.error.__cause__ = error
        finally:
            self.done.set()

    def where(self) -> str:
        name, position = self.at
        return f"reward {name!r} of task {self.example.task!r} (example {self.example.index}, response {position})"

    @staticmethod
    def _number(value: Any) -> float:
        # float() would also take the text "1", which more likely is a mistake. Rewards are stored in float32.
        if value is None or isinstance(value, (str, bytes)) or not abs(number := float(value)) <= MAX_REWARD:
            raise ValueError(f"a reward must be a number between -{MAX_REWARD:g} and {MAX_REWARD:g}, got {value!r}")
        return number


class _RewardThread:
    """Runs the jobs of its inbox until it is closed."""

    def __init__(self) -> None:
        self.inbox: Inbox[_Job] = Inbox()
        self.thread = start_thread(self._run, "reward")

    def _run(self) -> None:
        for job in self.inbox:
            job.run()


class RewardRunner:
    """Scores the responses of one prompt together, so that a fast reward costs one hand-over per group.

    Safe to call from several threads; their groups are scored one after the other.

    Args:
        timeout_s: seconds for scoring one group.
        on_error: `raise` a `RewardError`, or `skip` the group and count it.
        supervisor: polled while waiting, so that a fault elsewhere or a stop request ends the wait.

    Attributes:
        num_failed: groups skipped so far.
    """

    def __init__(
        self, timeout_s: float = 10.0, on_error: Literal["raise", "skip"] = "raise", supervisor: Supervisor | None = None
    ) -> None:
        if not timeout_s > 0:
            raise ConfigurationError(f"reward_timeout_s must be above 0, got {timeout_s}.")
        self.num_failed = 0
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._supervisor = supervisor or Supervisor()
        self._lock = threading.Lock()
        self._thread: _RewardThread | None = None
        self._closed = False
        self._hung: list[_RewardThread] = []

    def score(self, task: Task, completions: Sequence[str], example: Example) -> list[list[float]] | None:
        """Score one group.

        Args:
            task: gives the reward functions.
            completions: G decoded responses.
            example: what they answer.

        Returns:
            G lists of R unweighted values in the order of `task.rewards`; None if the group failed and failures are skipped.

        Raises:
            RewardError: a reward raised, returned something else than a finite number, or took too long.
            StopRequested: the run was asked to stop meanwhile, or has ended.
        """
        with self._lock:
            if self._closed:
                raise StopRequested("the rewards are closed")
            job = _Job(task, completions, example)
            if self._thread is None:
                self._thread = _RewardThread()
            self._thread.inbox.put(job)
            who = threading.current_thread().name
            with self._supervisor.busy(who, f"the rewards of task {example.task!r}", self._timeout_s + POLL_S):
                in_time = self._wait(job)
            error = job.error if in_time else self._abandon(job)
            if error is None:
                return job.values
            if self._on_error == "raise":
                raise error
            if len(self._hung) > MAX_HUNG_THREADS:
                raise RewardError(f"At most {MAX_HUNG_THREADS} rewards may hang at one time, got one more. {error}") from error
            self.num_failed += 1
            if self.num_failed == 1:
                warnings.warn(f"A group is left out, and counted with those to come: {error}", stacklevel=2)
            return None

    def close(self) -> None:
        """End the thread, and score nothing more; a thread that hangs in a reward dies with the process."""
        with self._lock:
            self._closed = True
            if self._thread is not None:
                self._thread.inbox.close()
                self._thread = None

    def _wait(self, job: _Job) -> bool:
        """Whether the job ended in time."""
        countdown = Countdown(self._timeout_s, POLL_S)
        while not job.done.wait(min(POLL_S, countdown.left_s)):
            self._supervisor.raise_if_stopping()
            if not countdown.left_s:
                return False
        return True

    def _abandon(self, job: _Job) -> RewardError:
        """Leave the thread to its fate; the next group gets another one."""
        assert self._thread is not None
        self._thread.inbox.close()  # should the reward ever return, the thread ends
        self._hung = [thread for thread in (*self._hung, self._thread) if thread.thread.is_alive()]
        self._thread = None
        return RewardError(
            f"data.reward_timeout_s must suffice for a group of {len(job.completions)} responses, got {self._timeout_s:g} s, "
            f"used up in {job.where()}. Make the reward faster, raise the timeout, or set data.on_reward_error: skip."
        )
