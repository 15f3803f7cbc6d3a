"""Whether the groups that are trained differ from those that were dispatched: in length, reward and difficulty."""

from __future__ import annotations

from collections.abc import Sequence

from lit_asyncrl.types import GroupOutcome


class Bias:
    """Sums over responses of settled groups: of all whose rewards are known, and of the trained ones.

    Groups that wait or are in training count when they are settled, so that a run which drops nothing shows no bias.

    Example:
        >>> bias = Bias()
        >>> bias.settle(GroupOutcome(2, 10, 1.0, 1), trained=GroupOutcome(2, 10, 1.0, 1))
        >>> bias.settle(GroupOutcome(2, 30, 0.0, 0), trained=None)
        >>> bias.means()["length"]
        {'dispatched': 10.0, 'trained': 5.0}
        >>> bias.metrics()["length_bias"], bias.metrics()["difficulty_bias"]
        (-0.5, -0.25)
    """

    def __init__(self) -> None:
        self._dispatched = [0.0] * 4
        self._trained = [0.0] * 4

    def settle(self, dispatched: GroupOutcome, trained: GroupOutcome | None) -> None:
        """Count a settled group: what was dispatched, and what of it was trained."""
        _add(self._dispatched, dispatched)
        if trained is not None:
            _add(self._trained, trained)

    def means(self) -> dict[str, dict[str, float]]:
        """Means over responses of trained and dispatched groups: length (tokens), reward, difficulty (share not correct)."""
        both = {"dispatched": _means(self._dispatched), "trained": _means(self._trained)}
        return {key: {name: means[key] for name, means in both.items()} for key in ("length", "reward", "difficulty")}

    def metrics(self) -> dict[str, float]:
        """Trained against dispatched: length as a relative difference, reward and difficulty as differences. 0 while unknown."""
        if not self._trained[0]:
            return {"length_bias": 0.0, "reward_bias": 0.0, "difficulty_bias": 0.0}
        trained, dispatched = _means(self._trained), _means(self._dispatched)
        return {
            "length_bias": trained["length"] / dispatched["length"] - 1.0 if dispatched["length"] else 0.0,
            "reward_bias": trained["reward"] - dispatched["reward"],
            "difficulty_bias": trained["difficulty"] - dispatched["difficulty"],
        }

    def state_dict(self) -> dict[str, list[float]]:
        """Plain Python."""
        return {"dispatched": list(self._dispatched), "trained": list(self._trained)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Undo `state_dict`."""
        self._dispatched, self._trained = list(state["dispatched"]), list(state["trained"])


def _add(sums: list[float], outcome: GroupOutcome) -> None:
    sums[0] += outcome[0]
    sums[1] += outcome[1]
    sums[2] += outcome[2]
    sums[3] += outcome[3]


def _means(sums: Sequence[float]) -> dict[str, float]:
    responses, tokens, reward, correct = sums
    count = max(responses, 1.0)
    return {"length": tokens / count, "reward": reward / count, "difficulty": 1.0 - correct / count if responses else 0.0}
