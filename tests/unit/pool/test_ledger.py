"""The ledger: sums close, settled groups stay settled, tokens are never lost."""

from __future__ import annotations

import io

import pytest
import torch

from lit_asyncrl.errors import PoolError
from lit_asyncrl.pool.ledger import Ledger, LedgerRow


def lived_ledger() -> Ledger:
    """Six groups: one per open state but `in_training`, one trained, one dropped, one failed."""
    ledger = Ledger()
    for group_id in range(6):
        ledger.move(group_id, "in_flight")
    ledger.move(0, "in_flight", tokens=5)
    ledger.move(1, "scoring", tokens=10)
    ledger.move(2, "waiting", tokens=20)
    for state in ("waiting", "in_training", "trained"):
        ledger.move(3, state, tokens=30)
    ledger.move(4, "dropped", tokens=40, reason="truncated")
    ledger.move(5, "failed", tokens=2)
    return ledger


def test_rows_add_up_to_everything_dispatched() -> None:
    ledger = lived_ledger()
    assert ledger.rows() == [
        LedgerRow("in_flight", "", 1, 5),
        LedgerRow("scoring", "", 1, 10),
        LedgerRow("waiting", "", 1, 20),
        LedgerRow("trained", "", 1, 30),
        LedgerRow("dropped", "truncated", 1, 40),
        LedgerRow("failed", "", 1, 2),
    ]
    assert ledger.num_dispatched == 6
    assert ledger.num_open == 3


def test_settled_groups_are_not_kept_one_by_one() -> None:
    ledger = Ledger()
    for group_id in range(1000):
        ledger.move(group_id, "in_flight")
        ledger.move(group_id, "failed")
    assert ledger.num_open == 0
    assert ledger.count("failed") == 1000


def test_members_taken_out_of_a_group_are_accounted_for() -> None:
    ledger = Ledger()
    ledger.move(0, "scoring", tokens=10)
    ledger.move(0, "waiting", tokens=7)
    assert ledger.tokens("waiting") == 7
    assert ledger.tokens("dropped", "members") == 3


@pytest.mark.parametrize("state", ["in_training", "trained", "failed"])
def test_an_unknown_group_cannot_start_late(state) -> None:
    with pytest.raises(PoolError, match=r"state must be one of .* that is not open"):
        Ledger().move(0, state)


def test_a_settled_group_cannot_be_settled_again() -> None:
    ledger = lived_ledger()
    with pytest.raises(PoolError, match="not open, got 'trained'"):
        ledger.move(3, "trained")


def test_a_drop_needs_a_reason() -> None:
    ledger = lived_ledger()
    with pytest.raises(PoolError, match="reason must be given"):
        ledger.move(2, "dropped")


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(PoolError, match=r"state must be one of .*, got 'lost'"):
        Ledger().move(0, "lost")


def test_the_account_round_trips_and_interrupted_tokens_stay_counted() -> None:
    file = io.BytesIO()
    torch.save(lived_ledger().state_dict(), file)
    file.seek(0)
    ledger = Ledger()
    ledger.load_state_dict(torch.load(file, weights_only=True))
    assert ledger.num_dispatched == 6
    assert sum(row.prompts for row in ledger.rows()) == 6
    assert sum(row.tokens for row in ledger.rows()) == 5 + 10 + 20 + 30 + 40 + 2
    assert ledger.tokens("dropped", "interrupted") == 15
    assert (ledger.tokens("in_flight"), ledger.tokens("waiting")) == (0, 20)


def test_the_table_ends_with_the_sum() -> None:
    assert lived_ledger().table().splitlines()[-1].split() == ["total", "6", "107"]
    assert lived_ledger().totals()["dropped: truncated"] == {"prompts": 1, "tokens": 40}
