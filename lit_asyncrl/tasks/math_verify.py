"""MathVerify: mathematical equivalence of response and answer, judged in a process that can be killed."""

from __future__ import annotations

from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.tasks.worker_process import WorkerProcess
from lit_asyncrl.types import Example


class MathVerify(RewardFn):
    """1 if `math-verify` finds the response equivalent to the answer, else 0.

    The work is done in a process of its own, since symbolic mathematics can run for ever in code that no exception reaches. A
    request that exceeds its time is an error and not a reward of 0; the process is killed and the next call starts another. So is
    an answer in which math-verify finds no mathematics, or that it cannot even compare with itself. A response in which it finds
    none, or that it cannot compare with the answer, is wrong. Words are mathematics only in LaTeX: the response must box them.

    Args:
        timeout_s: seconds for one response.
        weight: factor in the weighted sum of the task's rewards.
    """

    name = "math_verify"

    def __init__(self, timeout_s: float = 5.0, weight: float = 1.0) -> None:
        self.weight = weight
        self._worker = WorkerProcess("math-verify", timeout_s, {"reward": None})

    def start(self) -> None:
        """Load sympy and math-verify in the process."""
        self._worker.start()

    def __call__(self, completion: str, example: Example) -> float:
        """Ask the process.

        Raises:
            RewardError: no answer in time, the process died, or the answer cannot be judged.
        """
        return float(self._worker.ask({"answer": str(example.answer), "completion": str(completion)}))

    def close(self) -> None:
        """Kill the process."""
        self._worker.kill()
