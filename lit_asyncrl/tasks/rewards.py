"""Reward functions: small classes that compare one decoded response with the example's answer."""

from __future__ import annotations

import re

from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.types import Example

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")


class ExactMatch(RewardFn):
    """1 if the response equals the answer, else 0; surrounding white space is ignored on both sides.

    Args:
        weight: factor in the weighted sum of the task's rewards.
    """

    name = "exact_match"

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, completion: str, example: Example) -> float:
        """Compare as text."""
        return float(completion.strip() == str(example.answer).strip())
