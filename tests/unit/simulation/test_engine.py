"""The virtual engine: which slot takes a request when, and which version samples each token."""

import numpy as np
import pytest

from lit_asyncrl.simulation.engine import VirtualEngine, forgetting_logprobs
from lit_asyncrl.simulation.lengths import MeasuredLengths, ResponseLengths
from lit_asyncrl.simulation.settings import SimulationSettings


def make_engine(**changes):
    """Groups of 2 responses of 4 s each, 4 simulated tokens a response, in 2 slots."""
    values = {
        "group_size": 2,
        "num_slots": 2,
        "token_s": 1.0,
        "lengths": ResponseLengths("constant", 4.0),
        "tokens_per_mean_response": 4,
    }
    return VirtualEngine(SimulationSettings(**{**values, **changes}), np.random.SeedSequence(0))


def test_requests_start_in_order_in_the_slot_that_is_free_first():
    engine = make_engine(num_slots=3)
    engine.submit(2, now=0.0)
    # slots free at 0, 0, 0: group 0 runs 0-4; group 1 starts at 0 and, in a freed slot, at 4, and ends at 8
    assert engine.next_end == 4.0
    engine.pop()
    assert engine.next_end == 8.0


def test_a_request_does_not_start_before_it_was_submitted():
    engine = make_engine()
    engine.submit(1, now=10.0)
    assert engine.next_end == 14.0


def test_tokens_carry_the_version_that_is_served_when_they_are_sampled():
    engine = make_engine()
    engine.submit(1, now=0.0)
    engine.swap(1.0)
    engine.swap(3.0)
    group = engine.pop()
    # one prompt token, then tokens at 0, 4/3, 8/3 and 4 s; updates at 1 and 3 s
    assert group.token_versions.tolist() == [-1, 0, 1, 1, 2] * 2
    assert group.completed_version == 2


def test_a_publish_lag_holds_versions_back():
    engine = make_engine(publish_lag=1)
    engine.submit(1, now=0.0)
    engine.swap(1.0)
    engine.swap(3.0)
    group = engine.pop()
    assert group.token_versions.tolist() == [-1, 0, 0, 0, 1] * 2
    assert group.completed_version == 1


def test_groups_come_in_order_of_completion():
    engine = make_engine(num_slots=8, lengths=MeasuredLengths([1, 4, 9]))
    engine.submit(4, now=0.0)
    ends, ids = [], []
    for _ in range(4):
        ends.append(engine.next_end)
        ids.append(engine.pop().group_id)
    assert ends == sorted(ends)
    assert sorted(ids) == [0, 1, 2, 3]
    assert engine.next_end == float("inf")


def test_longer_responses_have_more_simulated_tokens():
    engine = make_engine(lengths=MeasuredLengths([2, 6]), num_slots=1)  # mean 4: one simulated token per token
    engine.submit(8, now=0.0)
    lengths = {int(length) for _ in range(8) for length in engine.pop().lengths}
    assert lengths == {1 + 2, 1 + 6}


def test_scores_say_how_far_a_prefix_is_forgotten():
    engine = make_engine(forgetting_nats=0.5)
    engine.submit(1, now=0.0)
    group = engine.pop()
    [logprobs] = forgetting_logprobs([group])
    drop = group.behavior_logprobs - logprobs
    assert drop[:5].tolist() == pytest.approx([float(group.rewards[0])] * 5)
    assert drop[5:].tolist() == pytest.approx([float(group.rewards[1])] * 5)


def test_no_prefix_is_forgotten_at_a_mean_of_0():
    engine = make_engine(forgetting_nats=0.0)
    engine.submit(1, now=0.0)
    assert engine.pop().rewards.tolist() == [0.0, 0.0]
