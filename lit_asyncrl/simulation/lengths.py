"""Distributions of response lengths, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from lit_asyncrl.errors import ConfigurationError

LengthShape = Literal["constant", "uniform", "exponential", "lognormal"]

_NUM_ESTIMATE = 2**20  # responses drawn to estimate a mean or a percentile


class LengthDistribution(Protocol):
    """Where the simulator draws response lengths from."""

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Lengths in tokens, float64 of the given shape, above 0."""
        ...


@dataclass(frozen=True)
class ResponseLengths:
    """Lengths of a named shape around a mean.

    Args:
        shape: `constant`; `uniform` in [0.5, 1.5] times the mean; `exponential`; `lognormal`.
        mean_tokens: mean before truncation.
        max_tokens: response budget, at which longer responses are cut; None: no budget.
        sigma: standard deviation of the logarithm, for `lognormal` (0.7: the longest in a hundred is four times the mean).

    Raises:
        ConfigurationError: a number is out of its range.
    """

    shape: LengthShape = "exponential"
    mean_tokens: float = 256.0
    max_tokens: float | None = None
    sigma: float = 0.7

    def __post_init__(self) -> None:
        if not self.mean_tokens > 0:
            raise ConfigurationError(f"mean_tokens must be above 0 tokens, got {self.mean_tokens}.")
        if self.max_tokens is not None and not self.max_tokens > 0:
            raise ConfigurationError(f"max_tokens must be above 0 tokens, got {self.max_tokens}.")

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Independent lengths, float64 tokens."""
        if self.shape == "constant":
            relative = np.ones(shape)
        elif self.shape == "uniform":
            relative = rng.uniform(0.5, 1.5, shape)
        elif self.shape == "exponential":
            relative = rng.exponential(1.0, shape)
        else:
            relative = rng.lognormal(-0.5 * self.sigma**2, self.sigma, shape)  # this location makes the mean 1
        tokens = relative * self.mean_tokens
        return tokens if self.max_tokens is None else np.minimum(tokens, self.max_tokens)


def lengths_with_mean(shape: LengthShape, mean_tokens: float, max_tokens: float) -> ResponseLengths:
    """The distribution whose mean is `mean_tokens` after responses were cut at `max_tokens`.

    Raises:
        ConfigurationError: no distribution cut there has that mean.
    """
    if not mean_tokens <= max_tokens:
        raise ConfigurationError(f"mean_tokens must be at most the response budget of {max_tokens} tokens, got {mean_tokens}.")
    relative = ResponseLengths(shape, 1.0).draw(np.random.default_rng(0), (65536,))
    low, high = mean_tokens, 100.0 * mean_tokens
    for _ in range(40):  # halves the interval; the cut mean rises with the mean before the cut
        middle = 0.5 * (low + high)
        low, high = (middle, high) if np.minimum(middle * relative, max_tokens).mean() < mean_tokens else (low, middle)
    return ResponseLengths(shape, low, max_tokens)


class MeasuredLengths:
    """Draws, with replacement, from lengths that were measured.

    Args:
        tokens: response lengths.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        if not tokens or min(tokens) < 1:
            raise ConfigurationError(f"tokens must hold at least one length of at least one token, got {list(tokens)[:8]}.")
        self._tokens = np.asarray(tokens, dtype=np.float64)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Independent lengths, float64 tokens."""
        return rng.choice(self._tokens, shape)


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """What planning needs of a distribution: mean and 99th percentile of a response in tokens, and the mean over groups of the
    longest response over the mean response (`tail_ratio`)."""

    mean_tokens: float
    p99_tokens: float
    tail_ratio: float


def summarize(lengths: LengthDistribution, group_size: int, seed: int = 0) -> LengthSummary:
    """Estimate from a million responses drawn with a fixed seed."""
    drawn = lengths.draw(np.random.default_rng(seed), (max(_NUM_ESTIMATE // group_size, 1), group_size))
    mean = float(drawn.mean())
    return LengthSummary(mean, float(np.percentile(drawn, 99)), float(drawn.max(axis=1).mean()) / mean)
