"""The ledger: sums close, settled groups stay settled, tokens are never lost."""

from __future__ import annotations

import io

import pytest
import torch

from lit_asyncrl.errors import PoolError
from lit_asyncrl.pool.ledger import UNPROVED, Ledger, LedgerRow, format_table, totals
from lit_asyncrl.types import GroupOutcome


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
    assert ledger.count("pending") == 2


def test_the_table_ends_with_the_sum() -> None:
    # 107 / 6 = 17.83
    assert format_table(lived_ledger().rows()).splitlines()[-1].split() == ["total", "6", "107", "17.8"]
    assert totals(lived_ledger().rows())["dropped: truncated"] == {"prompts": 1, "tokens": 40}


def test_the_sums_of_a_moment_count_every_reported_token() -> None:
    ledger = lived_ledger()
    assert ledger.num_tokens == sum(row.tokens for row in ledger.rows()) == 107
    rows = ledger.rows(unfinished_tokens=9)
    assert LedgerRow("in_flight", "unfinished", 0, 9) in rows
    assert sum(row.tokens for row in rows) == 116


def test_tokens_of_unproved_weights_fail_without_a_group() -> None:
    ledger = lived_ledger()
    ledger.add_tokens("failed", 12, UNPROVED)
    assert ledger.tokens("failed", UNPROVED) == 12
    assert ledger.count("failed", UNPROVED) == 0
    with pytest.raises(PoolError, match="state must be dropped or failed for tokens without a group, got 'trained'"):
        ledger.add_tokens("trained", 1)


def test_tokens_of_unfinished_responses_are_interrupted_after_a_resume() -> None:
    ledger = Ledger()
    ledger.load_state_dict(lived_ledger().state_dict(unfinished_tokens=4))
    assert ledger.tokens("dropped", "interrupted") == 15 + 4


def test_carried_tokens_stay_with_their_group_and_only_lost_ones_are_interrupted() -> None:
    # group 0: 5 collected, 3 more in a partial response, all carried; group 1: 6 of its 10 carried; of 4 unfinished, 3 carried
    ledger = Ledger()
    ledger.load_state_dict(lived_ledger().state_dict(unfinished_tokens=4, carried={0: 8, 1: 6}))
    assert ledger.tokens("pending") == 14
    assert ledger.tokens("dropped", "interrupted") == (5 + 10 + 4) - 14
    assert ledger.num_tokens == 107 + 4
    ledger.move(0, "in_flight", tokens=8)
    assert ledger.num_tokens == 107 + 4


def test_carried_tokens_that_cannot_be_used_are_interrupted() -> None:
    ledger = Ledger()
    ledger.load_state_dict(lived_ledger().state_dict(carried={0: 5, 1: 10}))
    ledger.interrupt()
    assert (ledger.tokens("pending"), ledger.tokens("dropped", "interrupted")) == (0, 15)
    assert ledger.num_tokens == 107


def test_the_outcomes_of_open_groups_round_trip() -> None:
    ledger, again = Ledger(), Ledger()
    ledger.move(0, "waiting", tokens=40, outcome=GroupOutcome(2, 40, 1.5, 1))
    ledger.move(1, "waiting", tokens=4)
    again.load_state_dict(ledger.state_dict())
    for each in (ledger, again):
        each.move_all([0, 1], "in_training")
        each.move_all([0, 1], "trained")
    assert again.bias.means() == ledger.bias.means()


def test_a_prompt_that_is_to_be_sent_again_is_pending_until_it_is_in_flight() -> None:
    ledger = Ledger()
    ledger.move(0, "pending")
    assert ledger.rows() == [LedgerRow("pending", "", 1, 0)]
    ledger.move(0, "in_flight")
    assert ledger.num_dispatched == 1


def test_a_listener_hears_of_every_last_move_once() -> None:
    ledger, heard = Ledger(), []
    ledger.on_settled(lambda group_id, state: heard.append((group_id, state)))
    for group_id in range(3):
        ledger.move(group_id, "waiting")
    ledger.move(0, "dropped", reason="test")
    ledger.move_all([1, 2], "in_training")
    ledger.move_all([1, 2], "trained")
    assert heard == [(0, "dropped"), (1, "trained"), (2, "trained")]


def test_bias_compares_trained_with_dispatched_responses() -> None:
    # dispatched: 4 responses, 60 tokens, reward 3, 2 correct: means 15, .75, difficulty .5
    # trained: 2 responses, 20 tokens, reward 2, 2 correct: means 10, 1, difficulty 0
    ledger = Ledger()
    for group_id, outcome in ((0, GroupOutcome(2, 20, 2.0, 2)), (1, GroupOutcome(2, 40, 1.0, 0))):
        ledger.move(group_id, "waiting", tokens=outcome.num_tokens, outcome=outcome)
    ledger.move(1, "dropped", reason="rejected")
    assert ledger.bias.metrics()["length_bias"] == 0.0  # nothing is trained yet
    ledger.move(0, "in_training")
    ledger.move(0, "trained")
    metrics = ledger.bias.metrics()
    assert metrics == pytest.approx({"length_bias": 10 / 15 - 1, "reward_bias": 0.25, "difficulty_bias": -0.5})


def test_members_taken_out_count_as_dispatched_and_not_as_trained() -> None:
    ledger = Ledger()
    ledger.move(0, "scoring", tokens=50, outcome=GroupOutcome(3, 50, 1.0, 1))
    ledger.move(0, "waiting", tokens=20, outcome=GroupOutcome(2, 20, 1.0, 1))
    ledger.remove_members(0, 15, "rejected", GroupOutcome(1, 5, 1.0, 1))
    ledger.move(0, "in_training")
    ledger.move(0, "trained")
    assert (ledger.tokens("trained"), ledger.tokens("dropped", "members"), ledger.tokens("dropped", "rejected")) == (5, 30, 15)
    assert ledger.bias.means()["length"] == {"dispatched": 50 / 3, "trained": 5.0}
