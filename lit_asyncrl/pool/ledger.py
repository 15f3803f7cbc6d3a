"""What became of every prompt and of every generated token.

    in_flight -> scoring -> waiting -> in_training -> trained
         '----------'----------'-----------'---> dropped[reason] | failed

Groups that are not settled are kept one by one, settled ones as counts: memory does not grow with the length of a run.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

from lit_asyncrl.errors import PoolError

OPEN_STATES = ("in_flight", "scoring", "waiting", "in_training")
FINAL_STATES = ("trained", "dropped", "failed")
_ENTRY_STATES = ("in_flight", "scoring", "waiting")
INTERRUPTED = "interrupted"
"""Reason for tokens that were generated but not yet in the pool when a run ended; their prompts are dispatched again."""

MEMBERS = "members"
"""Reason for tokens of members that were taken out of a group that went on without them."""


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


class Ledger:
    """Thread-safe account of prompts (one group each) and of the tokens sampled for them.

    The rollout worker reports `in_flight`, `scoring`, and what it drops or fails; the pool reports the rest.
    At any instant the rows' prompts add up to `num_dispatched`.

    Example:
        >>> ledger = Ledger()
        >>> ledger.move(7, "in_flight")
        >>> ledger.move(7, "dropped", tokens=40, reason="zero_variance")
        >>> ledger.count("dropped", "zero_variance"), ledger.tokens("dropped")
        (1, 40)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, int]] = {}
        self._prompts: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._num_dispatched = 0

    def move(self, group_id: int, state: str, tokens: int | None = None, reason: str | None = None) -> None:
        """Put a group into a state; a group is entered by its first move, to `in_flight`, `scoring` or `waiting`.

        Args:
            group_id: of the prompt.
            state: one of the states above; a settled group cannot be moved again.
            tokens: tokens sampled for the group so far; None leaves the number as it was. A number below the last one means
                that members were taken out of the group: the difference is counted as dropped for the reason `members`.
            reason: why, for `dropped` (required) and `failed`.

        Raises:
            PoolError: the group is unknown (or settled) and `state` cannot be a first one, or `dropped` lacks a reason.
        """
        if state not in (*OPEN_STATES, *FINAL_STATES):
            raise PoolError(f"state must be one of {(*OPEN_STATES, *FINAL_STATES)}, got {state!r} (group {group_id}).")
        if state == "dropped" and not reason:
            raise PoolError(f"reason must be given for a dropped group, got {reason!r} (group {group_id}). Name it.")
        with self._lock:
            known = self._open.get(group_id)
            if known is None:
                if state not in _ENTRY_STATES:
                    raise PoolError(
                        f"state must be one of {_ENTRY_STATES} for a group that is not open, got {state!r} (group {group_id}). "
                        "Report the group when its first request is submitted, and settle it once."
                    )
                self._num_dispatched += 1
            before = known[1] if known else 0
            count = before if tokens is None else tokens
            if count < before:
                self._tokens["dropped", MEMBERS] += before - count
            if state in FINAL_STATES:
                self._open.pop(group_id, None)
                self._prompts[state, reason or ""] += 1
                self._tokens[state, reason or ""] += count
            else:
                self._open[group_id] = (state, count)

    def state_of(self, group_id: int) -> str | None:
        """Where an open group is; None for one that is settled or unknown."""
        known = self._open.get(group_id)
        return known[0] if known else None

    @property
    def num_dispatched(self) -> int:
        """Prompts that were ever entered."""
        return self._num_dispatched

    @property
    def num_open(self) -> int:
        """Prompts that are not settled."""
        return len(self._open)

    def count(self, state: str, reason: str | None = None) -> int:
        """Prompts in a state (with `reason`, if given)."""
        return sum(row.prompts for row in self.rows() if row.state == state and reason in (None, row.reason))

    def tokens(self, state: str, reason: str | None = None) -> int:
        """Sampled tokens in a state (with `reason`, if given)."""
        return sum(row.tokens for row in self.rows() if row.state == state and reason in (None, row.reason))

    def rows(self) -> list[LedgerRow]:
        """The table: open states first, then settled ones by reason; all of one instant."""
        prompts: Counter[tuple[str, str]] = Counter()
        tokens: Counter[tuple[str, str]] = Counter()
        with self._lock:
            for state, count in self._open.values():
                prompts[state, ""] += 1
                tokens[state, ""] += count
            prompts.update(self._prompts)
            tokens.update(self._tokens)
        order = {state: place for place, state in enumerate((*OPEN_STATES, *FINAL_STATES))}
        # A reason may hold tokens alone (`interrupted`), so the keys of both are needed.
        keys = sorted(set(prompts) | set(tokens), key=lambda key: (order[key[0]], key[1]))
        return [LedgerRow(state, reason, prompts[state, reason], tokens[state, reason]) for state, reason in keys]

    def totals(self) -> dict[str, dict[str, int]]:
        """The rows by name (`waiting`, `dropped: rejected`, ...), for a summary file."""
        return {row.name: {"prompts": row.prompts, "tokens": row.tokens} for row in self.rows()}

    def table(self) -> str:
        """The closing table as aligned text; its last line adds the others up."""
        rows = self.rows()
        lines = [(row.name, row.prompts, row.tokens) for row in rows]
        lines.append(("total", sum(row.prompts for row in rows), sum(row.tokens for row in rows)))
        header = f"{'state':<26}{'prompts':>12}{'tokens':>14}"
        return "\n".join([header, *(f"{name:<26}{prompts:>12,}{tokens:>14,}" for name, prompts, tokens in lines)])

    def state_dict(self) -> dict[str, Any]:
        """Plain Python, loadable with `weights_only=True`."""
        with self._lock:
            return {
                "open": [(group_id, state, count) for group_id, (state, count) in self._open.items()],
                "settled": [
                    (state, reason, self._prompts[state, reason], self._tokens[state, reason])
                    for state, reason in set(self._prompts) | set(self._tokens)
                ],
                "num_dispatched": self._num_dispatched,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved account.

        Prompts that were in flight or scoring stay open: they are dispatched again. Their tokens are lost and counted as
        dropped for the reason `interrupted`.
        """
        with self._lock:
            self._num_dispatched = state["num_dispatched"]
            self._prompts = Counter({(name, reason): prompts for name, reason, prompts, _ in state["settled"]})
            self._tokens = Counter({(name, reason): tokens for name, reason, _, tokens in state["settled"]})
            self._open = {}
            for group_id, name, tokens in state["open"]:
                lost = name in ("in_flight", "scoring")
                self._open[group_id] = (name, 0 if lost else tokens)
                if lost and tokens:
                    self._tokens["dropped", INTERRUPTED] += tokens
