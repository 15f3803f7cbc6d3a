"""Base of the procedural tasks: examples as a function of (seed, split, index), training and held-out prompts disjoint."""

from __future__ import annotations

import hashlib
import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import RewardFn, Task
from lit_asyncrl.types import Example

HELDOUT_SHARE = 10
"""One prompt in so many belongs to the held-out split."""

MAX_DRAWS = 10_000
"""Draws for one example after which the split counts as empty: the chance of that is 0.9 ** 10_000 in a large space."""


def is_heldout_prompt(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split: a property of its text alone, so that no seed can mix the splits."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_SHARE == 0


class ProceduralTask(Task):
    """A task that draws its examples from a random generator seeded by (seed, name of the class, split, index).

    Every prompt belongs to one split by a hash of its text, whatever the seed, and an example is drawn until it falls in the
    split that is asked for. Nothing is stored. Within a split a prompt may come twice when the space of prompts is small.
    Subclasses define `draw`.

    Args:
        rewards: reward functions.
        name: name of the task in logs and samples.
        seed: of the data.
        num_train: training examples in one epoch.
        num_heldout: held-out examples.
    """

    def __init__(self, *, rewards: Sequence[RewardFn], name: str, seed: int, num_train: int, num_heldout: int) -> None:
        for key, size in (("num_train", num_train), ("num_heldout", num_heldout)):
            if size < 1:
                raise ConfigurationError(f"{key} must be at least 1, got {size} (task {name}).")
        self.rewards = list(rewards)
        self.name = name
        self._seed = seed
        self._num_train = num_train
        self._num_heldout = num_heldout

    @abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, Any]:
        """Draw a prompt and its answer, using no other source of randomness than `rng`."""

    def present(self, prompt: str) -> str | list[dict[str, str]]:
        """What the model is given for a prompt that was drawn: the text as it is, unless a task puts it into a chat message."""
        return prompt

    @property
    def num_train(self) -> int:
        """Number of training examples: one epoch."""
        return self._num_train

    @property
    def num_heldout(self) -> int:
        """Number of held-out examples."""
        return self._num_heldout

    def train_example(self, index: int) -> Example:
        """Training example `index` in [0, num_train)."""
        return self._example(index, self._num_train, heldout=False)

    def heldout_example(self, index: int) -> Example:
        """Held-out example `index` in [0, num_heldout)."""
        return self._example(index, self._num_heldout, heldout=True)

    def setup(self) -> None:
        """Draw one example of each split, so that a space of prompts that is too small shows before the run starts."""
        self.train_example(0)
        self.heldout_example(0)

    def _example(self, index: int, size: int, *, heldout: bool) -> Example:
        split = "heldout" if heldout else "train"
        if not 0 <= index < size:
            raise IndexError(f"index must be in [0, {size}), got {index} (task {self.name}, split {split}).")
        key = f"{self._seed}/{type(self).__name__}/{split}/{index}".encode()
        rng = random.Random(int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "big"))
        for _ in range(MAX_DRAWS):
            prompt, answer = self.draw(rng)
            if is_heldout_prompt(prompt) == heldout:
                return Example(prompt=self.present(prompt), answer=answer, task=self.name, index=index)
        raise ConfigurationError(
            f"task {self.name} must have prompts for both splits, got none for split {split} in {MAX_DRAWS} draws "
            f"(one prompt in {HELDOUT_SHARE} is held out). Choose settings that allow more different prompts."
        )


def check_range(low_key: str, low: int, high_key: str, high: int, *, least: int, most: int) -> None:
    """Check `least <= low <= high <= most`.

    Raises:
        ConfigurationError: naming the key that is out of range.
    """
    if not least <= low <= most:
        raise ConfigurationError(f"{low_key} must be between {least} and {most}, got {low}.")
    if not low <= high <= most:
        raise ConfigurationError(f"{high_key} must be between {low_key} ({low}) and {most}, got {high}.")
