"""Checks of a class's arguments: everything wrong with them is refused at once, by the keys that a user typed."""

from __future__ import annotations

import math
from typing import get_args

from lit_asyncrl.errors import ConfigurationError


class OptionCheck:
    """Collects what is wrong with arguments, then refuses all of it in one message.

    Args:
        prefix: what stands before an argument's name on the command line, such as `model.objective.init_args`.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._problems: list[str] = []

    def require(self, holds: bool, name: str, contract: str, value: object, remedy: str) -> None:
        """Note that `name` must `contract` if that does not hold."""
        if not holds:
            self._problems.append(f"{self._prefix}.{name} must {contract}, got {value!r}. {remedy}")

    def positive(self, name: str, value: float) -> None:
        """A finite number above 0."""
        holds = value > 0 and math.isfinite(value)
        self.require(holds, name, "be a finite number above 0", value, "Give a positive number.")

    def choice(self, name: str, value: str, choices: object) -> None:
        """One of the values of a `Literal`."""
        allowed = list(get_args(choices))
        self.require(value in allowed, name, f"be one of {allowed}", value, "Choose one of them.")

    def refuse(self) -> None:
        """Raise if anything was noted.

        Raises:
            ConfigurationError: with every problem.
        """
        if self._problems:
            raise ConfigurationError(" ".join(self._problems))


def objective_options() -> OptionCheck:
    """For the arguments of an objective."""
    return OptionCheck("model.objective.init_args")


def advantage_options() -> OptionCheck:
    """For the arguments of an advantage."""
    return OptionCheck("model.advantage.init_args")
