"""What became of every prompt and of every generated token.

    pending -> in_flight -> scoring -> waiting -> in_training -> trained
                   '----------'----------'-----------'---> dropped[reason] | failed[reason]

Groups that are not settled are kept one by one, settled ones as counts: memory does not grow with the length of a run.
A group is trained once the update that it was for is applied. Of several updates of one batch, each group belongs to one: a group
that is over age by then, or whose update is skipped, is dropped for that reason, whatever becomes of the others.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from lit_asyncrl.errors import PoolError
from lit_asyncrl.pool.bias import Bias
from lit_asyncrl.pool.snapshot import table
from lit_asyncrl.types import GroupOutcome

OPEN_STATES = ("pending", "in_flight", "scoring", "waiting", "in_training")
FINAL_STATES = ("trained", "dropped", "failed")
_ENTRY_STATES = ("pending", "in_flight", "scoring", "waiting")
_OUTSIDE_STATES = ("pending", "in_flight", "scoring")
_STATES = (*OPEN_STATES, *FINAL_STATES)

INTERRUPTED = "interrupted"
"""Reason for tokens that a run took with it when it ended: their engine had not reported them. Their responses go on without."""

MEMBERS = "members"
"""Reason for tokens of members that were taken out of a group that went on without them."""

UNPROVED = "unproved weights"
"""Reason for groups with tokens of weights whose delivery was never proved: they fail, and are not trained."""

UNFINISHED = "unfinished"
"""Reason for tokens of responses that their engine had not finished."""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One line of the closing table: `reason` is empty except for dropped and, if one was given, failed groups."""

    state: str
    reason: str
    prompts: int
    tokens: int

    @property
    def name(self) -> str:
        """State and reason in one."""
        return f"{self.state}: {self.reason}" if self.reason else self.state


class _Entry:
    """An open group: where it is, its tokens, what was dispatched and what is left of that."""

    __slots__ = ("dispatched", "outcome", "state", "tokens")

    def __init__(self, state: str, tokens: int) -> None:
        self.state = state
        self.tokens = tokens
        self.dispatched: GroupOutcome | None = None
        self.outcome: GroupOutcome | None = None


_NOTHING = _Entry("pending", 0)


class Ledger:
    """Thread-safe account of prompts (one group each) and of the tokens sampled for them.

    The rollout worker reports `in_flight`, `scoring`, and what it drops or fails; the pool reports the rest.
    At any instant the rows' prompts add up to `num_dispatched`, and their tokens to `num_tokens`.

    Attributes:
        bias: how trained groups differ from dispatched ones.

    Example:
        >>> ledger = Ledger()
        >>> ledger.move(7, "in_flight")
        >>> ledger.move(7, "dropped", tokens=40, reason="zero_variance")
        >>> ledger.count("dropped", "zero_variance"), ledger.tokens("dropped")
        (1, 40)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _Entry] = {}
        self._prompts: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._num_dispatched = 0
        self._on_settled: Callable[[int, str], None] | None = None
        self.bias = Bias()

    def on_settled(self, listener: Callable[[int, str], None]) -> None:
        """Call `listener(group_id, state)` after each group's last move, without the ledger's lock."""
        self._on_settled = listener

    def move(
        self,
        group_id: int,
        state: str,
        tokens: int | None = None,
        reason: str | None = None,
        outcome: GroupOutcome | None = None,
    ) -> None:
        """Put a group into a state; a group is entered by its first move, to `pending`, `in_flight`, `scoring` or `waiting`.

        Args:
            group_id: of the prompt.
            state: one of the states above; a settled group cannot be moved again.
            tokens: tokens sampled for the group so far; None leaves the number as it was. A number below the last one means
                that members were taken out of the group: the difference is counted as dropped for the reason `members`.
            reason: why, for `dropped` (required) and `failed`.
            outcome: of the group's responses; the first one given is what was dispatched, the last one what is left of it.

        Raises:
            PoolError: the group is unknown (or settled) and `state` cannot be a first one, or `dropped` lacks a reason.
        """
        if state not in OPEN_STATES:
            _check(group_id, state, reason)
        with self._lock:
            self._move(group_id, state, tokens, reason or "", outcome)
        if self._on_settled is not None and state in FINAL_STATES:
            self._on_settled(group_id, state)

    def move_all(self, group_ids: Iterable[int], state: str, reason: str | None = None) -> None:
        """`move` of several groups at one instant, with the tokens they have."""
        group_ids = list(group_ids)
        _check(group_ids, state, reason)
        with self._lock:
            for group_id in group_ids:
                self._move(group_id, state, None, reason or "", None)
        if self._on_settled is not None and state in FINAL_STATES:
            for group_id in group_ids:
                self._on_settled(group_id, state)

    def _move(self, group_id: int, state: str, tokens: int | None, reason: str, outcome: GroupOutcome | None) -> None:
        entry = self._open.get(group_id)
        if entry is None:
            if state not in _ENTRY_STATES:
                raise PoolError(
                    f"state must be one of {_ENTRY_STATES} for a group that is not open, got {state!r} (group {group_id}). "
                    "Report the group when its first request is submitted, and settle it once."
                )
            self._num_dispatched += 1
            entry = self._open[group_id] = _Entry(state, 0)
        else:
            entry.state = state
        if tokens is not None:
            if tokens < entry.tokens:
                self._tokens["dropped", MEMBERS] += entry.tokens - tokens
            entry.tokens = tokens
        if outcome is not None:
            entry.outcome = outcome
            if entry.dispatched is None:
                entry.dispatched = outcome
        if state in FINAL_STATES:
            del self._open[group_id]
            key = (state, reason)
            self._prompts[key] += 1
            self._tokens[key] += entry.tokens
            if entry.dispatched is not None:
                self.bias.settle(entry.dispatched, entry.outcome if state == "trained" else None)

    def add_tokens(self, state: str, tokens: int, reason: str = "") -> None:
        """Count tokens that belong to no open group: those of requests that were given up, or answered too late.

        Args:
            state: `dropped` or `failed`.
            tokens: how many.
            reason: why.
        """
        if state not in ("dropped", "failed"):
            raise PoolError(f"state must be dropped or failed for tokens without a group, got {state!r} ({tokens} tokens).")
        with self._lock:
            self._tokens[state, reason] += tokens

    def remove_members(self, group_id: int, tokens: int, reason: str, outcome: GroupOutcome) -> None:
        """Count `tokens` of an open group's as dropped for `reason`: members were taken out, which leaves this `outcome`."""
        with self._lock:
            entry = self._open[group_id]
            entry.tokens -= tokens
            entry.outcome = outcome
            self._tokens["dropped", reason] += tokens

    def state_of(self, group_id: int) -> str | None:
        """Where an open group is; None for one that is settled or unknown."""
        entry = self._open.get(group_id)
        return entry.state if entry else None

    @property
    def num_dispatched(self) -> int:
        """Prompts that were ever entered."""
        return self._num_dispatched

    @property
    def num_open(self) -> int:
        """Prompts that are not settled."""
        return len(self._open)

    @property
    def num_tokens(self) -> int:
        """Tokens that were ever reported."""
        with self._lock:
            return sum(self._tokens.values()) + sum(entry.tokens for entry in self._open.values())

    def count(self, state: str, reason: str | None = None) -> int:
        """Prompts in a state (with `reason`, if given)."""
        return sum(row.prompts for row in self.rows() if row.state == state and reason in (None, row.reason))

    def tokens(self, state: str, reason: str | None = None) -> int:
        """Sampled tokens in a state (with `reason`, if given)."""
        return sum(row.tokens for row in self.rows() if row.state == state and reason in (None, row.reason))

    def rows(self, unfinished_tokens: int = 0) -> list[LedgerRow]:
        """The table: open states first, then settled ones by reason; all of one instant.

        Args:
            unfinished_tokens: tokens of responses that an engine is still sampling; a line of their own where there are any.
        """
        prompts: Counter[tuple[str, str]] = Counter()
        tokens: Counter[tuple[str, str]] = Counter()
        with self._lock:
            for entry in self._open.values():
                prompts[entry.state, ""] += 1
                tokens[entry.state, ""] += entry.tokens
            prompts.update(self._prompts)
            tokens.update(self._tokens)
        if unfinished_tokens:
            tokens["in_flight", UNFINISHED] += unfinished_tokens
        # A reason may hold tokens alone (`interrupted`), so the keys of both are needed.
        keys = sorted(set(prompts) | set(tokens), key=lambda key: (_STATES.index(key[0]), key[1]))
        return [LedgerRow(state, reason, prompts[state, reason], tokens[state, reason]) for state, reason in keys]

    def interrupt(self) -> None:
        """Count what `pending` groups carry as dropped for the reason `interrupted`: they are sampled from the beginning."""
        with self._lock:
            for entry in self._open.values():
                if entry.state == "pending":
                    self._tokens["dropped", INTERRUPTED] += entry.tokens
                    entry.tokens = 0

    def state_dict(self, unfinished_tokens: int = 0, carried: Mapping[int, int] = MappingProxyType({})) -> dict[str, Any]:
        """What a resumed run goes on with: plain Python and tensors, loadable with `weights_only=True`.

        Groups in flight or scoring are in it as `pending`: they are dispatched again.

        Args:
            unfinished_tokens: tokens that an engine has reported for responses which it has not finished.
            carried: by group, sampled tokens that the checkpoint holds of groups outside the pool. What it does not hold of
                them, unfinished or not, is counted as dropped for the reason `interrupted`.
        """
        with self._lock:
            outside = {g: carried.get(g, 0) for g, entry in self._open.items() if entry.state in _OUTSIDE_STATES}
            lost = unfinished_tokens + sum(self._open[g].tokens - tokens for g, tokens in outside.items())
            tokens = self._tokens + Counter({("dropped", INTERRUPTED): lost})
            rows = [
                (g, _STATES.index("pending" if g in outside else entry.state), outside.get(g, entry.tokens))
                for g, entry in self._open.items()
            ]
            entries = [entry if g not in outside else _NOTHING for g, entry in self._open.items()]
            return {
                "open": table(rows, np.int64).view(-1, 3),
                "dispatched": _pack_outcomes([entry.dispatched for entry in entries]),
                "left": _pack_outcomes([entry.outcome for entry in entries]),
                "settled": [(*key, self._prompts[key], tokens[key]) for key in set(self._prompts) | set(tokens)],
                "num_dispatched": self._num_dispatched,
                "bias": self.bias.state_dict(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        with self._lock:
            self._num_dispatched = state["num_dispatched"]
            self._prompts = Counter({(name, reason): prompts for name, reason, prompts, _ in state["settled"]})
            self._tokens = Counter({(name, reason): tokens for name, reason, _, tokens in state["settled"]})
            self.bias.load_state_dict(state["bias"])
            self._open = {}
            outcomes = zip(_unpack_outcomes(state["dispatched"]), _unpack_outcomes(state["left"]), strict=True)
            for (group_id, index, tokens), (dispatched, outcome) in zip(state["open"].tolist(), outcomes, strict=True):
                entry = self._open[group_id] = _Entry(_STATES[index], tokens)
                entry.dispatched, entry.outcome = dispatched, outcome


def totals(rows: Iterable[LedgerRow]) -> dict[str, dict[str, int]]:
    """The rows by name (`waiting`, `dropped: rejected`, ...), for a summary file."""
    return {row.name: {"prompts": row.prompts, "tokens": row.tokens} for row in rows}


def format_table(rows: Iterable[LedgerRow]) -> str:
    """The closing table as aligned text; its last line adds the others up."""
    lines = [(row.name, row.prompts, row.tokens) for row in rows]
    lines.append(("total", sum(prompts for _, prompts, _ in lines), sum(tokens for _, _, tokens in lines)))
    header = f"{'state':<26}{'prompts':>12}{'tokens':>14}{'tokens/prompt':>16}"
    return "\n".join(
        [
            header,
            *(
                f"{name:<26}{prompts:>12,}{tokens:>14,}{f'{tokens / prompts:,.1f}' if prompts else '':>16}".rstrip()
                for name, prompts, tokens in lines
            ),
        ]
    )


def _check(group_ids: int | list[int], state: str, reason: str | None) -> None:
    if state not in _STATES:
        raise PoolError(f"state must be one of {_STATES}, got {state!r} (group {group_ids}).")
    if state == "dropped" and not reason:
        raise PoolError(f"reason must be given for a dropped group, got {reason!r} (group {group_ids}). Name it.")


def _pack_outcomes(outcomes: list[GroupOutcome | None]) -> Tensor:
    """Outcomes as one table [N, 4] float64, so that ten thousand take milliseconds to read; NaN where there is none."""
    unknown = (float("nan"),) * len(GroupOutcome._fields)
    return table([outcome or unknown for outcome in outcomes], np.float64).view(-1, len(unknown))


def _unpack_outcomes(table: Tensor) -> list[GroupOutcome | None]:
    rows = table.tolist()
    return [
        GroupOutcome(int(number), int(tokens), reward, int(correct)) if not math.isnan(number) else None
        for number, tokens, reward, correct in rows
    ]
