"""Arithmetic with two whole numbers: prompt `12+34=`, answer `46`; or as a question in a chat."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.tasks.procedural import ProceduralTask, check_range
from lit_asyncrl.tasks.rewards import ExactMatch, LastNumber

Operation = Literal["+", "-", "*"]


class Arithmetic(ProceduralTask):
    """Add, subtract or multiply two whole numbers: prompt `7-12=`, answer `-5`.

    Args:
        operations: drawn from uniformly.
        min_operand: smallest operand; at least 0.
        max_operand: largest operand; operands are drawn uniformly.
        question: a message for the tokenizer's chat template, with `{}` where the calculation (`12 + 34`) stands; None: the plain
            text `12+34=`, for models without a chat template.
        seed: of the data.
        name: name in logs; by default `arithmetic`.
        rewards: reward functions; by default `ExactMatch`, of a chat `LastNumber`.
        num_train: training examples in one epoch.
        num_heldout: held-out examples.
    """

    def __init__(
        self,
        operations: Sequence[Operation] = ("+",),
        min_operand: int = 0,
        max_operand: int = 99,
        question: str | None = None,
        seed: int = 0,
        name: str | None = None,
        rewards: Sequence[RewardFn] | None = None,
        num_train: int = 1_000_000,
        num_heldout: int = 4096,
    ) -> None:
        check_range("min_operand", min_operand, "max_operand", max_operand, least=0, most=10**12)
        if not operations or not set(operations) <= {"+", "-", "*"}:
            raise ConfigurationError(f"operations must be a list of '+', '-' and '*', got {list(operations)}.")
        if question is not None and question.count("{}") != 1:
            raise ConfigurationError(f"question must hold {{}} once, where the calculation goes, got {question!r}.")
        usual: list[RewardFn] = [ExactMatch() if question is None else LastNumber()]
        super().__init__(
            rewards=usual if rewards is None else rewards,
            name=name or "arithmetic",
            seed=seed,
            num_train=num_train,
            num_heldout=num_heldout,
        )
        self._operations = list(operations)
        self._min_operand = min_operand
        self._max_operand = max_operand
        self._question = question

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw a calculation and its result."""
        operation = rng.choice(self._operations)
        left, right = (rng.randint(self._min_operand, self._max_operand) for _ in range(2))
        results = {"+": left + right, "-": left - right, "*": left * right}
        return f"{left}{operation}{right}=", str(results[operation])

    def present(self, prompt: str) -> str | list[dict[str, str]]:
        """The calculation, or the question about it as a user's message."""
        if self._question is None:
            return prompt
        calculation = re.sub(r"(\D)", r" \1 ", prompt.removesuffix("="))
        return [{"role": "user", "content": self._question.replace("{}", calculation)}]
