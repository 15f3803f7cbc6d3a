"""What the pool counts at the door, against the formulas written out over single tokens."""

from __future__ import annotations

import pytest
from builders import make_group
from hypothesis import given
from hypothesis import strategies as st

from lit_asyncrl.algorithm.staleness import generation_staleness
from lit_asyncrl.pool.facts import inspect_group

GROUPS = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=4)


@given(responses=GROUPS, masked=st.sets(st.integers(0, 20)), late=st.integers(0, 2))
def test_facts_equal_the_counts_over_tokens(responses, masked, late) -> None:
    group = make_group(3, responses, max(map(max, responses)) + late)
    for token in masked:
        if token < group.loss_mask.numel():
            group.loss_mask[token] = False
    facts = inspect_group(group, 8)
    versions = group.token_versions.tolist()
    trained = [v for v, used in zip(versions, group.loss_mask.tolist(), strict=True) if used]
    assert facts.num_members == len(responses)
    assert facts.num_sampled == sum(map(len, responses))
    assert facts.num_trained == len(trained)
    assert facts.version_sum == sum(trained)
    assert facts.oldest_version == min(trained, default=0)
    assert facts.start_version == min(map(min, responses))
    assert facts.newest_version == max(map(max, responses))
    expected = generation_staleness(group.token_versions, group.lengths, group.completed_version).mean()
    assert facts.generation == pytest.approx(float(expected))


@given(responses=GROUPS, bound=st.integers(0, 4), measure=st.sampled_from(["mean", "oldest"]))
def test_the_last_version_is_the_last_one_within_the_bound(responses, bound, measure) -> None:
    facts = inspect_group(make_group(0, responses), 6)
    tokens = [version for response in responses for version in response]
    last = facts.last_version(bound, measure)

    def age(policy_version: float) -> float:
        ages = [policy_version - version for version in tokens]
        return sum(ages) / len(ages) if measure == "mean" else max(ages)

    assert age(last) <= bound < age(last + 1)
