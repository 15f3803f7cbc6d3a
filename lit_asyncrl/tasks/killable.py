"""KillableReward: any reward, run in a process that is killed when it takes too long."""

from __future__ import annotations

import base64
import sys

import cloudpickle

from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.tasks.worker_process import WorkerProcess
from lit_asyncrl.types import Example


class KillableReward(RewardFn):
    """Runs another reward in a process of its own, which is killed and started anew when it exceeds its time.

    For a reward that may hang: a thread that hangs cannot be ended, and one that hangs while it holds the interpreter (a regular
    expression that backtracks, powers of large integers) stops the whole run. Costs some 0.1 ms a response, and the memory of one
    more Python with PyTorch.

    Args:
        reward: what to run; it is pickled, so it must not hold processes, locks or open files.
        timeout_s: seconds for one response.

    Attributes:
        name, weight: those of `reward`.
    """

    def __init__(self, reward: RewardFn, timeout_s: float = 5.0) -> None:
        self.reward = reward
        self.name = reward.name
        self.weight = reward.weight
        first = {"reward": base64.b64encode(cloudpickle.dumps(reward)).decode(), "path": sys.path}
        self._worker = WorkerProcess(reward.name, timeout_s, first)

    def start(self) -> None:
        """Load the reward in the process."""
        self._worker.start()

    def __call__(self, completion: str, example: Example) -> float:
        """Ask the process.

        Raises:
            RewardError: no answer in time, the process died, or the reward raised.
        """
        call = base64.b64encode(cloudpickle.dumps((completion, example))).decode()
        value: float = self._worker.ask({"call": call})
        return value

    def close(self) -> None:
        """Kill the process."""
        self._worker.kill()
