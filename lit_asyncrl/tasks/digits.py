"""Two tasks on strings of digits: reverse them, sort them. One character per token suits the packaged tiny models."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.tasks.procedural import ProceduralTask, check_range
from lit_asyncrl.tasks.rewards import ExactMatch


class _DigitTask(ProceduralTask):
    """Draws a string of digits whose length is uniform in [min_digits, max_digits] and each digit uniform."""

    _tag: str
    _name: str

    def __init__(
        self,
        min_digits: int = 4,
        max_digits: int = 10,
        seed: int = 0,
        name: str | None = None,
        rewards: Sequence[RewardFn] | None = None,
        num_train: int = 1_000_000,
        num_heldout: int = 4096,
    ) -> None:
        check_range("min_digits", min_digits, "max_digits", max_digits, least=2, most=1000)
        super().__init__(
            rewards=[ExactMatch()] if rewards is None else rewards,
            name=name or self._name,
            seed=seed,
            num_train=num_train,
            num_heldout=num_heldout,
        )
        self._min_digits = min_digits
        self._max_digits = max_digits

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw a prompt and the digits to answer."""
        length = rng.randint(self._min_digits, self._max_digits)
        digits = "".join(rng.choices("0123456789", k=length))
        # Aligned at its end, so that what is to be learned is the same for every length.
        return f"{self._tag}{digits:>{self._max_digits}}=", self.solve(digits)

    def solve(self, digits: str) -> str:
        """Compute the answer to a string of digits."""
        raise NotImplementedError


class ReverseDigits(_DigitTask):
    """Reverse a string of digits: prompt `r4071=`, answer `1704`. Shorter strings are padded with spaces: `r  71=`.

    Args:
        min_digits: shortest string; at least 2.
        max_digits: longest string; the length is drawn uniformly, and fixed if both are equal.
        seed: of the data.
        name: name in logs; by default `reverse_digits`.
        rewards: reward functions; by default `ExactMatch`.
        num_train: training examples in one epoch.
        num_heldout: held-out examples.
    """

    _tag = "r"
    _name = "reverse_digits"

    def solve(self, digits: str) -> str:
        """Reverse the digits."""
        return digits[::-1]


class SortDigits(_DigitTask):
    """Sort a string of digits in rising order: prompt `s4071=`, answer `0147`. Shorter ones are padded with spaces: `s  71=`.

    Args:
        min_digits: shortest string; at least 2.
        max_digits: longest string; the length is drawn uniformly, and fixed if both are equal.
        seed: of the data.
        name: name in logs; by default `sort_digits`.
        rewards: reward functions; by default `ExactMatch`.
        num_train: training examples in one epoch.
        num_heldout: held-out examples.
    """

    _tag = "s"
    _name = "sort_digits"

    def solve(self, digits: str) -> str:
        """Sort the digits."""
        return "".join(sorted(digits))
