"""PACE as a TorchRL sampler: the worked example of the method, ties, budget, average."""

from __future__ import annotations

import pytest
import torch
from builders import make_group
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer, TensorDictReplayBuffer

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.ranking import FreshestFirstSampler, MaxAgeSampler, RankingSampler, TotalStalenessSampler
from lit_asyncrl.pool.sampler import FifoSampler, StalenessSampler
from lit_asyncrl.pool.writer import FreeSlotWriter
from lit_asyncrl.types import TrajectoryGroup

# id -> (versions, completed_version, prefix forgetting); V = 12. Every "group" has one member.
ORACLE = {
    "a": ([10] * 100, 10, None),
    "b": ([7] * 100 + [8] * 100 + [9] * 100 + [10] * 100, 10, 0.02),
    "c": ([7] * 100 + [8] * 100 + [9] * 100 + [10] * 100, 10, 0.50),
    "d": ([9] * 100, 9, None),
    "e": ([8] * 50 + [9] * 150, 9, 0.10),
    "f": ([11] * 100, 11, None),
    "g": ([9] * 150 + [11] * 150, 11, 0.05),
    "h": ([8] * 100, 8, None),
}


def entry_of(group: TrajectoryGroup) -> TensorDict:
    """An entry as a buffer outside this project may hold it."""
    return TensorDict(
        {
            "group_id": torch.tensor(group.group_id),
            "completed_version": torch.tensor(group.completed_version),
            "lengths": group.lengths,
            "token_versions": group.token_versions,
            "behavior_logprobs": group.behavior_logprobs,
            "rewards": group.rewards,
        }
    )


def make_buffer(sampler: StalenessSampler, groups: list, capacity: int = 64) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyStackStorage(capacity), sampler=sampler, writer=FreeSlotWriter(sampler))
    for group in groups:
        buffer.add(entry_of(group))
    return buffer


def oracle_buffer(sampler: PaceSampler) -> ReplayBuffer:
    groups = [make_group(i, [versions], c) for i, (versions, c, _) in enumerate(ORACLE.values())]
    return make_buffer(sampler, groups)


def test_pace_drops_h_c_and_e_of_the_worked_example() -> None:
    # N = 8, B = 4, target 4: excess (8-4)/8 = .5; q = .5*.25 + .5*.5 = .375; budget floor(.375*8) = 3
    # E: a 2, b 2+.25^4*1.5 = 2.006, c 2+1.5 = 3.5, d 3, e 3+.75^4*.25 = 3.079, f 1, g 1+.5^4 = 1.0625, h 4
    sampler = PaceSampler(gamma=4.0, ema_beta=0.5)
    buffer = oracle_buffer(sampler)
    sampler.policy_version = 12
    sampler.rejection_ema = 0.25
    slots = sampler.plan(buffer.storage, 4)
    names = list(ORACLE)
    assert [names[slot] for slot in slots] == ["b", "c", "e", "g"]
    # behavior log-probs are -0.5, so the current policy's are -0.5 - F
    sizes = [buffer.storage.get(slot)["token_versions"].numel() for slot in slots]
    logprobs = [torch.full((n,), -0.5 - ORACLE[names[slot]][2]) for n, slot in zip(sizes, slots, strict=True)]
    sampler.score(buffer.storage, slots, logprobs)
    _, info = buffer.sample(4, return_info=True)
    assert [names[slot] for slot in sampler.rejected] == ["h", "c", "e"]
    assert [names[slot] for slot in info["index"].tolist()] == ["a", "b", "d", "f"]
    assert sampler.rejection_ema == pytest.approx(0.375)
    assert sampler.groups_rejected == 3
    assert [names[slot] for slot in sampler.waiting] == ["g"]


@pytest.mark.parametrize("forgetting", ["abs", "pos", "k3"])
def test_every_forgetting_score_ranks_the_worked_example_alike(forgetting) -> None:
    # All drifts are positive, so abs and pos equal signed; k3(d) = e^-d + d - 1 rises with d > 0.
    sampler = PaceSampler(ema_beta=0.5, forgetting=forgetting)
    buffer = oracle_buffer(sampler)
    sampler.policy_version, sampler.rejection_ema = 12, 0.25
    slots = sampler.plan(buffer.storage, 4)
    drift = [list(ORACLE.values())[slot][2] for slot in slots]
    sampler.score(
        buffer.storage,
        slots,
        [torch.full((buffer.storage.get(s)["token_versions"].numel(),), -0.5 - d) for s, d in zip(slots, drift, strict=True)],
    )
    buffer.sample(4)
    assert sampler.rejected == [7, 2, 4]


def test_unscored_prefixes_count_as_not_forgotten() -> None:
    # E = waiting staleness alone: a 2, b 2, c 2, d 3, e 3, f 1, g 1, h 4; of the three highest, e starts at 8 and d at 9.
    sampler = PaceSampler(ema_beta=0.5)
    buffer = oracle_buffer(sampler)
    sampler.policy_version, sampler.rejection_ema = 12, 0.25
    buffer.sample(4)
    assert sampler.rejected == [7, 4, 3]


def test_ties_reject_the_older_start_version_then_the_lower_id() -> None:
    # V = 5; all have E = 5 - 4 = 1 (no prefix scored); starts: ids 5, 3: 4, id 9: 2. Budget of 2.
    sampler = PaceSampler(ema_beta=1.0, target_occupancy=1)
    groups = [make_group(5, [[4]], 4), make_group(9, [[2, 4]], 4), make_group(3, [[4]], 4)]
    buffer = make_buffer(sampler, groups)
    sampler.policy_version = 5
    # excess (3-1)/3; budget floor(2/3*3) = 2
    buffer.sample(1)
    assert sampler.rejected == [1, 2]


def test_group_staleness_is_the_mean_over_members() -> None:
    # V = 4, c = 4, both groups interrupted. Only prefixes of member 0 differ: F of (group 0, member 0) is the highest.
    # group 0: GS members (2, 0) -> p = 1 -> E = (2 + 0)/2 = 1;  group 1: GS (1, 1), p = 1/3 each -> E = 1/81
    sampler = PaceSampler(ema_beta=1.0, target_occupancy=1)
    groups = [make_group(0, [[2], [4]], 4), make_group(1, [[3], [3]], 4)]
    buffer = make_buffer(sampler, groups)
    sampler.policy_version = 4
    slots = sampler.plan(buffer.storage, 1)
    sampler.score(buffer.storage, slots, [torch.full((6,), -2.0), torch.full((6,), -0.5)])
    buffer.sample(1)
    assert sampler.rejected == [0]


def test_the_budget_never_starves_the_next_batch() -> None:
    sampler = PaceSampler(ema_beta=1.0, target_occupancy=0.01)
    buffer = make_buffer(sampler, [make_group(i) for i in range(6)])
    _, info = buffer.sample(4, return_info=True)
    assert len(sampler.rejected) == 2
    assert len(info["index"]) == 4


def test_the_average_follows_the_occupancy_series_by_hand() -> None:
    # batch 2, target 2, beta .5; occupancies 4, 2, 8:
    # x = .5, 0, .75;  q = .25, .125, .5*.125 + .5*.75 = .4375;  budgets floor(1), 0, floor(3.5) = 3
    sampler = PaceSampler(ema_beta=0.5)
    buffer = make_buffer(sampler, [])
    averages, rejected, next_id = [], [], 0
    for occupancy in (4, 2, 8):
        while len(sampler.waiting) < occupancy:
            buffer.add(entry_of(make_group(next_id)))
            next_id += 1
        buffer.sample(2)
        averages.append(sampler.rejection_ema)
        rejected.append(len(sampler.rejected))
    assert averages == pytest.approx([0.25, 0.125, 0.4375])
    assert rejected == [1, 0, 3]


def test_nothing_is_scored_while_nothing_is_rejected() -> None:
    sampler = PaceSampler()
    buffer = make_buffer(sampler, [make_group(i, [[0, 1]], 1) for i in range(4)])
    assert sampler.plan(buffer.storage, 4) == []


def test_fifo_takes_in_order_of_arrival_and_rejects_nothing() -> None:
    sampler = FifoSampler()
    buffer = make_buffer(sampler, [make_group(i) for i in (4, 2, 7, 1)])
    batch = buffer.sample(3)
    assert [int(record["group_id"]) for record in batch.unbind(0)] == [4, 2, 7]
    assert sampler.rejected == []


def test_a_sampler_with_too_few_entries_refuses() -> None:
    buffer = make_buffer(FifoSampler(), [make_group(0)])
    with pytest.raises(RuntimeError, match="Cannot take 2 entries: 1 are waiting"):
        buffer.sample(2)


def test_the_writer_reuses_only_consumed_slots_out_of_order() -> None:
    sampler = PaceSampler(ema_beta=1.0, target_occupancy=1)
    buffer = make_buffer(sampler, [make_group(i, [[v]], v) for i, v in enumerate((5, 0, 5, 5))], capacity=4)
    sampler.policy_version = 5
    buffer.sample(2)  # excess 3/4, budget min(3, 2): the stale one (slot 1), then slot 0
    assert sampler.rejected == [1, 0]
    buffer.extend([entry_of(make_group(i)) for i in range(10, 14)])
    stored = [int(buffer.storage.get(slot)["group_id"]) for slot in sampler.waiting]
    assert stored == [10, 11, 12, 13]
    with pytest.raises(RuntimeError, match="full"):
        buffer.add(entry_of(make_group(99)))


def test_the_writer_never_overwrites_a_waiting_entry() -> None:
    sampler = FifoSampler()
    buffer = make_buffer(sampler, [make_group(i) for i in range(4)], capacity=4)
    sampler.discard([2])
    assert buffer.add(entry_of(make_group(4))) == 2
    assert [int(buffer.storage.get(slot)["group_id"]) for slot in sampler.waiting] == [0, 1, 3, 4]


def test_buffer_state_round_trips_through_a_file(tmp_path) -> None:
    sampler = PaceSampler(ema_beta=1.0)
    buffer = make_buffer(sampler, [make_group(i) for i in range(8)])
    buffer.sample(2)
    sampler.dumps(tmp_path / "sampler")
    restored = PaceSampler(ema_beta=1.0)
    restored.loads(tmp_path / "sampler")
    assert restored.state_dict() == sampler.state_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"gamma": 0.0}, "gamma"), ({"ema_beta": 0.0}, "ema_beta"), ({"target_occupancy": 0.0}, "target_occupancy")],
)
def test_impossible_arguments_are_refused(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=f"data.sampler.{message} must be"):
        PaceSampler(**arguments)


def test_samplers_resolve_by_short_name_on_the_command_line() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_argument("--sampler", type=StalenessSampler)
    config = parser.parse_args(["--sampler=PaceSampler", "--sampler.gamma=2.5", "--sampler.forgetting=k3"])
    sampler = parser.instantiate(config).sampler
    assert isinstance(sampler, PaceSampler)
    assert (sampler.gamma, sampler.forgetting) == (2.5, "k3")
    assert isinstance(parser.instantiate(parser.parse_args(["--sampler=FifoSampler"])).sampler, FifoSampler)


# --- options and alternatives ---------------------------------------------------------------------------------------------


def rejected_by(sampler: RankingSampler, score: bool = False) -> list[str]:
    """Names that a sampler rejects from the worked example with a budget of 3."""
    buffer = oracle_buffer(sampler)
    sampler.policy_version, sampler.rejection_ema = 12, 0.25
    slots = sampler.plan(buffer.storage, 4)
    names = list(ORACLE)
    if score:
        drift = [ORACLE[names[slot]][2] for slot in slots]
        sizes = [buffer.storage.get(slot)["token_versions"].numel() for slot in slots]
        sampler.score(buffer.storage, slots, [torch.full((n,), -0.5 - d) for n, d in zip(sizes, drift, strict=True)])
    buffer.sample(4)
    return [names[slot] for slot in sampler.rejected]


def test_total_staleness_drops_h_b_and_c_of_the_worked_example() -> None:
    # S: a 2, b 3.5, c 3.5, d 3, e 3.25, f 1, g 2, h 4; b and c tie, and b has the lower id
    assert rejected_by(TotalStalenessSampler(ema_beta=0.5)) == ["h", "b", "c"]


def test_max_age_drops_b_c_and_e_of_the_worked_example() -> None:
    # V - oldest: b, c 5; e, h 4 (both start at 8: e has the lower id); d, g 3
    assert rejected_by(MaxAgeSampler(ema_beta=0.5)) == ["b", "c", "e"]


def test_the_absolute_scale_weighs_by_what_was_forgotten() -> None:
    # weight 1 - e^-F: b .0198, c .3935, e .0952, g .0488
    # E: a 2, b 2.0297, c 2.5902, d 3, e 3.0238, f 1, g 1.0488, h 4
    assert rejected_by(PaceSampler(ema_beta=0.5, scale="absolute"), score=True) == ["h", "e", "d"]


def test_freshest_first_takes_the_freshest_in_order_of_arrival_and_rejects_the_stalest() -> None:
    sampler = FreshestFirstSampler(ema_beta=0.5)
    buffer = oracle_buffer(sampler)
    sampler.policy_version, sampler.rejection_ema = 12, 0.25
    _, info = buffer.sample(4, return_info=True)
    names = list(ORACLE)
    assert [names[slot] for slot in sampler.rejected] == ["h", "b", "c"]
    assert [names[slot] for slot in info["index"].tolist()] == ["a", "d", "f", "g"]  # e, 3.25, stays


def test_a_single_trajectory_is_rejected_and_its_group_goes_on_without_it() -> None:
    # V = c = 4, six members waiting, two groups, batch 1: target 1 group = 3 members, x = 3/6, budget floor(.5*6) = 3 = 6 - 3
    # Prefix of member 0 of group 0 is forgotten most (F = 1.5 against 0): p = 1, E = 2; group 1: p = 1/4, E = .0039.
    # The budget of 3: member 0 of group 0; then members of group 1 by id: one leaves, then the rest of two would be too few:
    # the group leaves whole.
    sampler = PaceSampler(ema_beta=1.0, unit="trajectory")
    groups = [make_group(0, [[2], [4], [4]], 4), make_group(1, [[3], [3], [3]], 4)]
    buffer = make_buffer(sampler, groups)
    sampler.policy_version = 4
    slots = sampler.plan(buffer.storage, 1)
    sampler.score(buffer.storage, slots, [torch.full((9,), -2.0), torch.full((9,), -0.5)])
    batch = buffer.sample(1)
    assert sampler.kept[0].tolist() == [False, True, True]
    assert sampler.rejected == [1]
    assert batch[0]["lengths"].tolist() == [3, 3]
    assert batch[0]["token_versions"].tolist() == [-1, -1, 4, -1, -1, 4]


def test_rejecting_trajectories_never_starves_the_next_batch() -> None:
    sampler = PaceSampler(ema_beta=1.0, target_occupancy=0.1, unit="trajectory")
    buffer = make_buffer(sampler, [make_group(i, [[0], [0]], 0) for i in range(3)])
    sampler.policy_version = 9
    _, info = buffer.sample(2, return_info=True)
    assert len(sampler.rejected) == 1  # six members, budget min(floor(.97 * 6), 6 - 4) = 2: one group of two
    assert len(info["index"]) == 2


def test_a_slot_that_leaves_between_plan_and_sample_is_passed_over() -> None:
    sampler = PaceSampler(ema_beta=1.0)
    buffer = make_buffer(sampler, [make_group(i, [[0, 1]], 1) for i in range(4)])
    sampler.policy_version = 1
    slots = sampler.plan(buffer.storage, 2)
    sampler.discard([slots[0]])
    buffer.add(entry_of(make_group(9, [[1], [1], [1]], 1)))  # takes the slot that became free
    sampler.score(buffer.storage, slots, [torch.full((4,), -0.5)] * 4)
    _, info = buffer.sample(2, return_info=True)
    assert 9 not in [int(buffer.storage.get(slot)["group_id"]) for slot in sampler.rejected]
    assert len(info["index"]) == 2


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_the_sampler_works_with_torchrl_s_own_writer_and_buffers(kind) -> None:
    sampler = PaceSampler(ema_beta=1.0, target_occupancy=1)
    buffer = kind(storage=LazyStackStorage(8), sampler=sampler, batch_size=2)
    for group_id in range(4):
        buffer.add(entry_of(make_group(group_id, [[group_id], [group_id]], group_id)))
    sampler.policy_version = 4
    batch = buffer.sample()  # excess 3/4; budget min(3, 4 - 2): the two that waited longest
    assert sorted(int(entry["group_id"]) for entry in batch.unbind(0)) == [2, 3]
    assert sampler.waiting == []


@pytest.mark.parametrize("kind", [FifoSampler, PaceSampler, TotalStalenessSampler, MaxAgeSampler, FreshestFirstSampler])
def test_an_empty_buffer_is_refused_and_a_full_one_emptied_in_order_of_arrival(kind) -> None:
    sampler = kind()
    buffer = make_buffer(sampler, [])
    with pytest.raises(RuntimeError, match="Cannot take 1 entries: 0 are waiting"):
        buffer.sample(1)
    for group_id in (3, 1, 2):
        buffer.add(entry_of(make_group(group_id)))
    batch = buffer.sample(3)
    assert [int(entry["group_id"]) for entry in batch.unbind(0)] == [3, 1, 2]


def test_contradictions_of_a_sampler_are_told_together() -> None:
    with pytest.raises(ConfigurationError, match=r"gamma must.*ema_beta must.*target_occupancy must"):
        PaceSampler(gamma=-1.0, ema_beta=2.0, target_occupancy=-1.0)


@pytest.mark.parametrize("scale", ["percentile", "absolute"])
def test_scores_that_tell_nothing_leave_waiting_and_the_order_of_completion(scale) -> None:
    # V = 5, c = 5 for all; behavior log-prob = current one: no forgetting. Excess 2/3: two of three leave, first completed first,
    # though id 9 is the oldest and longest.
    sampler = PaceSampler(ema_beta=1.0, target_occupancy=1, scale=scale)
    groups = [make_group(5, [[4, 5]], 5), make_group(3, [[4, 5]], 5), make_group(9, [[2, 3, 4, 5]], 5)]
    buffer = make_buffer(sampler, groups)
    sampler.policy_version = 5
    slots = sampler.plan(buffer.storage, 1)
    sampler.score(buffer.storage, slots, [torch.full((4,), -0.5), torch.full((4,), -0.5), torch.full((6,), -0.5)])
    buffer.sample(1)
    assert sampler.rejected == [0, 1]


def test_a_state_of_a_sampler_without_a_rejection_share_starts_with_none():
    sampler = PaceSampler()
    sampler.load_state_dict(FifoSampler().state_dict())
    assert sampler.rejection_ema == 0.0
