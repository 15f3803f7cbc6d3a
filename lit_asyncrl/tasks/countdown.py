"""Countdown: reach a target with the four operations from given numbers. Expressions are parsed, never evaluated as code."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.tasks.procedural import MAX_DRAWS, ProceduralTask
from lit_asyncrl.types import Example

MAX_EXPRESSION_CHARACTERS = 200
"""Longer expressions are refused: bounds the parser's depth and the size of the numbers."""

_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")
_MESSAGE = (
    "Using the numbers {numbers}, write an arithmetic expression that equals {target}. You can use + - * / and parentheses, and "
    "each number at most once. Think first, then give the expression alone, as in <answer>(1 + 2) * 3</answer>."
)


class _Parser:
    """Recursive descent, one method a rule.

    sum := product (+|- product)*,  product := factor (*|/ factor)*,  factor := number | ( sum )
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_EXPRESSION_CHARACTERS:
            raise ValueError(f"an expression must have at most {MAX_EXPRESSION_CHARACTERS} characters, got {len(text)}")
        self.numbers: list[int] = []
        self._tokens = []
        text, place = text.strip(), 0
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                raise ValueError(f"unexpected {text[place]!r} at character {place}")
            self._tokens.append(match[1] or match[2])
            place = match.end()
        self._tokens.reverse()

    def parse(self) -> Fraction:
        value = self._sum()
        if self._tokens:
            raise ValueError(f"unexpected {self._tokens[-1]!r}")
        return value

    def _next_is(self, characters: str) -> bool:
        return bool(self._tokens) and self._tokens[-1] in characters

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next_is("+-"):
            sign = 1 if self._tokens.pop() == "+" else -1
            value += sign * self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self._next_is("*/"):
            operator, right = self._tokens.pop(), self._factor()
            if operator == "/" and right == 0:
                raise ValueError("division by zero")
            value = value * right if operator == "*" else value / right
        return value

    def _factor(self) -> Fraction:
        token = self._tokens.pop() if self._tokens else "the end"
        if token.isdigit():
            self.numbers.append(int(token))
            return Fraction(int(token))
        if token != "(":
            raise ValueError(f"a number or '(' must come here, got {token!r}")
        value = self._sum()
        if not self._next_is(")"):
            raise ValueError("a '(' is not closed")
        self._tokens.pop()
        return value


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Value of an expression of whole numbers, `+ - * /` and parentheses, exactly, and the numbers it uses in order.

    Raises:
        ValueError: the text is anything else, is longer than `MAX_EXPRESSION_CHARACTERS`, or divides by zero.

    Example:
        >>> evaluate_expression("(1 + 2) * 3 / 2")
        (Fraction(9, 2), [1, 2, 3, 2])
    """
    parser = _Parser(text)
    return parser.parse(), parser.numbers


class CountdownReward(RewardFn):
    """1 if the response's expression equals the target and uses each given number at most once, else 0.

    The expression is the text of the last `<answer>...</answer>`, without one the last line that is not empty; what follows an
    equals sign is left out.

    Args:
        weight: factor in the weighted sum of the task's rewards.
    """

    name = "countdown"

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, completion: str, example: Example) -> float:
        """Parse and compare."""
        closed, _, _ = completion.rpartition("</answer>")  # a regular expression is quadratic in tags that are never closed
        _, tag, answer = closed.rpartition("<answer>")
        lines = [line for line in (answer.partition("</answer>")[0] if tag else completion).splitlines() if line.strip()]
        if not lines:
            return 0.0
        try:
            value, numbers = evaluate_expression(lines[-1].partition("=")[0])
        except ValueError:
            return 0.0
        allowed = Counter(example.answer["numbers"])
        return float(value == example.answer["target"] and Counter(numbers) <= allowed)


class Countdown(ProceduralTask):
    """Reach a target from given numbers: prompt `c3,7,25>46=`, for example answered by `25+7*3`.

    The target is the result of joining all numbers in a random order with random operations (division only without remainder),
    so that a solution exists; the reward lets a response use fewer. The example's answer is `{"numbers": [...], "target": int}`.

    Args:
        num_numbers: how many numbers are given; at least 2.
        max_number: numbers are drawn uniformly from [1, max_number].
        max_target: targets lie in [1, max_target] and are none of the numbers.
        template: `short` as above, or `chat`: one user message in plain English.
        seed: of the data.
        name: name in logs; by default `countdown`.
        rewards: reward functions; by default `CountdownReward`.
        num_train: training examples in one epoch.
        num_heldout: held-out examples.
    """

    def __init__(
        self,
        num_numbers: int = 3,
        max_number: int = 25,
        max_target: int = 99,
        template: Literal["short", "chat"] = "short",
        seed: int = 0,
        name: str | None = None,
        rewards: Sequence[RewardFn] | None = None,
        num_train: int = 1_000_000,
        num_heldout: int = 4096,
    ) -> None:
        if not 2 <= num_numbers <= 20:
            raise ConfigurationError(f"num_numbers must be between 2 and 20, got {num_numbers}.")
        if max_number < 2 or max_target < max_number:
            raise ConfigurationError(
                f"max_target must be at least max_number ({max_number}), and that at least 2, got {max_target}."
            )
        super().__init__(
            rewards=[CountdownReward()] if rewards is None else rewards,
            name=name or "countdown",
            seed=seed,
            num_train=num_train,
            num_heldout=num_heldout,
        )
        self._num_numbers = num_numbers
        self._max_number = max_number
        self._max_target = max_target
        self._template = template

    def train_example(self, index: int) -> Example:
        """Training example `index` in [0, num_train)."""
        return self._as_chat(super().train_example(index))

    def heldout_example(self, index: int) -> Example:
        """Held-out example `index` in [0, num_heldout)."""
        return self._as_chat(super().heldout_example(index))

    def draw(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        """Draw numbers and a target that they reach."""
        for _ in range(MAX_DRAWS):
            numbers = [rng.randint(1, self._max_number) for _ in range(self._num_numbers)]
            target = _join(rng, numbers)
            if 1 <= target <= self._max_target and target not in numbers:
                prompt = f"c{','.join(map(str, numbers))}>{target}="
                return prompt, {"numbers": numbers, "target": target}
        raise ConfigurationError(
            f"max_target must be reachable with num_numbers {self._num_numbers} and max_number {self._max_number}, got "
            f"{self._max_target}, not reached in {MAX_DRAWS} draws (task {self.name}). Raise it."
        )

    def _as_chat(self, example: Example) -> Example:
        if self._template == "short":
            return example
        message = {"role": "user", "content": _MESSAGE.format(**example.answer)}
        return Example([message], example.answer, example.task, example.index)


def _join(rng: random.Random, numbers: Sequence[int]) -> int:
    """Join all numbers, two at a time, with random operations that stay whole and above 0."""
    values = list(numbers)
    while len(values) > 1:
        rng.shuffle(values)
        right, left = values.pop(), values.pop()
        results = [left + right, left * right]
        if left > right:
            results.append(left - right)
        if left % right == 0:
            results.append(left // right)
        values.append(rng.choice(results))
    return values[0]
