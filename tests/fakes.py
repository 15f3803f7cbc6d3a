"""Small stand-ins for parts of the system, shared by the tests."""

from __future__ import annotations

from collections.abc import Sequence

from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.types import Example


class FirstNumber(RewardFn):
    """The first token of a response, decoded as numbers with spaces between, as reward."""

    name = "first"

    def __call__(self, completion: str, example: Example) -> float:
        return float(completion.split()[0])


class DirectScorer:
    """Calls the rewards at once, in this thread; `None` for the examples in `skip`."""

    def __init__(self, skip: Sequence[int] = ()) -> None:
        self.skip = skip

    def score(self, task, completions, example):
        if example.index in self.skip:
            return None
        return [[reward(c, example) for reward in task.rewards] for c in completions]
