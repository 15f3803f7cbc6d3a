"""Reward functions: small classes that compare one decoded response with the example's answer."""

from __future__ import annotations

import re
from decimal import Decimal

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.types import Example, Response

_NUMBER = re.compile(r"(?:(?<![\d.])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


class ExactMatch(RewardFn):
    """1 if the response equals the answer, else 0; white space around either is ignored.

    Args:
        weight: factor in the weighted sum of the task's rewards.
    """

    name = "exact_match"

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, completion: str, example: Example) -> float:
        """Compare as text."""
        return float(completion.strip() == str(example.answer).strip())


class LastNumber(RewardFn):
    """1 if the last number of the response equals the last number of the answer, else 0.

    Numbers are compared by value: `1,000.0` equals `1000`, and an answer such as `... #### 72` counts as 72.

    Args:
        weight: factor in the weighted sum of the task's rewards.
    """

    name = "last_number"

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, completion: str, example: Example) -> float:
        """Compare by value.

        Raises:
            ValueError: the answer holds no number.
        """
        wanted = last_number(str(example.answer))
        if wanted is None:
            raise ValueError(f"the answer must hold a number, got {example.answer!r}")
        return float(last_number(completion) == wanted)


class CharacterShare(RewardFn):
    """Share of the answer's characters that the response has at the same place, in [0, 1]: partial credit.

    Characters beyond the answer count as wrong: the divisor is the longer of the two lengths.

    Args:
        weight: factor in the weighted sum of the task's rewards; with 0 it is logged and not trained on.
    """

    name = "character_share"

    def __init__(self, weight: float = 0.0) -> None:
        self.weight = weight

    def __call__(self, completion: str, example: Example) -> float:
        """Compare character by character."""
        answer = str(example.answer)
        longest = max(len(answer), len(completion))
        return sum(a == b for a, b in zip(answer, completion, strict=False)) / longest if longest else 1.0


class LengthPenalty(RewardFn):
    """Minus the share by which the response exceeds `max_characters`, at least -1 and 0 for a response that keeps to it.

    Args:
        max_characters: length that is free of charge; above 0.
        weight: factor in the weighted sum of the task's rewards.
    """

    name = "length_penalty"

    def __init__(self, max_characters: int, weight: float = 1.0) -> None:
        if max_characters < 1:
            raise ConfigurationError(f"max_characters must be at least 1, got {max_characters}.")
        self.max_characters = max_characters
        self.weight = weight

    def __call__(self, completion: str, example: Example) -> float:
        """Measure the excess."""
        return -min(1.0, max(0, len(completion) - self.max_characters) / self.max_characters)


class OverlongPenalty(RewardFn):
    """Soft punishment of responses that come near their budget, by sampled tokens.

    0 up to max_tokens - buffer_tokens, then falling linearly to -1 at max_tokens, and -1 beyond.

    Args:
        max_tokens: length at which the whole penalty is due: the sampler's `max_new_tokens`.
        buffer_tokens: length of the slope; in [1, max_tokens].
        weight: factor in the weighted sum of the task's rewards.

    Source: DAPO (arXiv 2503.14476), soft overlong punishment. It adds to the other rewards and thus to the spread of a group.
    """

    name = "overlong_penalty"

    def __init__(self, max_tokens: int, buffer_tokens: int, weight: float = 1.0) -> None:
        if not 1 <= buffer_tokens <= max_tokens:
            raise ConfigurationError(
                f"buffer_tokens must be at least 1 and at most max_tokens, got {buffer_tokens} (max_tokens {max_tokens}). "
                "Set max_tokens to data.sampling.max_new_tokens and buffer_tokens to a part of it."
            )
        self.max_tokens = max_tokens
        self.buffer_tokens = buffer_tokens
        self.weight = weight

    def __call__(self, completion: str, example: Example) -> float:
        """Measure the excess.

        Raises:
            TypeError: the response does not know its number of tokens.
        """
        if not isinstance(completion, Response):
            raise TypeError(f"completion must be a lit_asyncrl.types.Response, got {type(completion).__name__}")
        return -min(1.0, max(0.0, (completion.num_tokens - self.max_tokens + self.buffer_tokens) / self.buffer_tokens))


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text, commas between thousands removed; None without one."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
