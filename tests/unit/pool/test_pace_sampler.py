"""PACE as a TorchRL sampler: the worked example of the method, ties, budget, average."""

from __future__ import annotations

import pytest
import torch
from builders import make_group
from torchrl.data import LazyStackStorage, ReplayBuffer

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.records import GroupCodec
from lit_asyncrl.pool.sampler import FifoSampler, StalenessSampler
from lit_asyncrl.pool.writer import FreeSlotWriter

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


def make_buffer(sampler: StalenessSampler, groups: list, capacity: int = 64) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyStackStorage(capacity), sampler=sampler, writer=FreeSlotWriter(sampler))
    codec = GroupCodec()
    for group in groups:
        buffer.add(codec.encode(group))
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
    logprobs = [torch.full((buffer.storage.get(slot)["token_ids"].numel(),), -0.5 - ORACLE[names[slot]][2]) for slot in slots]
    sampler.score(buffer.storage, slots, logprobs)
    _, info = buffer.sample(4, return_info=True)
    assert [names[slot] for slot in info["rejected"].tolist()] == ["h", "c", "e"]
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
        [torch.full((buffer.storage.get(s)["token_ids"].numel(),), -0.5 - d) for s, d in zip(slots, drift, strict=True)],
    )
    _, info = buffer.sample(4, return_info=True)
    assert info["rejected"].tolist() == [7, 2, 4]


def test_unscored_prefixes_count_as_not_forgotten() -> None:
    # E = waiting staleness alone: a 2, b 2, c 2, d 3, e 3, f 1, g 1, h 4; of the three highest, e starts at 8 and d at 9.
    sampler = PaceSampler(ema_beta=0.5)
    buffer = oracle_buffer(sampler)
    sampler.policy_version, sampler.rejection_ema = 12, 0.25
    _, info = buffer.sample(4, return_info=True)
    assert info["rejected"].tolist() == [7, 4, 3]


def test_ties_reject_the_older_start_version_then_the_lower_id() -> None:
    # V = 5; all have E = 5 - 4 = 1 (no prefix scored); starts: ids 5, 3: 4, id 9: 2. Budget of 2.
    sampler = PaceSampler(ema_beta=1.0, target_occupancy=1)
    groups = [make_group(5, [[4]], 4), make_group(9, [[2, 4]], 4), make_group(3, [[4]], 4)]
    buffer = make_buffer(sampler, groups)
    sampler.policy_version = 5
    # excess (3-1)/3; budget floor(2/3*3) = 2
    _, info = buffer.sample(1, return_info=True)
    assert info["rejected"].tolist() == [1, 2]


def test_group_staleness_is_the_mean_over_members() -> None:
    # V = 4, c = 4, both groups interrupted. Only prefixes of member 0 differ: F of (group 0, member 0) is the highest.
    # group 0: GS members (2, 0) -> p = 1 -> E = (2 + 0)/2 = 1;  group 1: GS (1, 1), p = 1/3 each -> E = 1/81
    sampler = PaceSampler(ema_beta=1.0, target_occupancy=1)
    groups = [make_group(0, [[2], [4]], 4), make_group(1, [[3], [3]], 4)]
    buffer = make_buffer(sampler, groups)
    sampler.policy_version = 4
    slots = sampler.plan(buffer.storage, 1)
    sampler.score(buffer.storage, slots, [torch.full((6,), -2.0), torch.full((6,), -0.5)])
    _, info = buffer.sample(1, return_info=True)
    assert info["rejected"].tolist() == [0]


def test_the_budget_never_starves_the_next_batch() -> None:
    sampler = PaceSampler(ema_beta=1.0, target_occupancy=0.01)
    buffer = make_buffer(sampler, [make_group(i) for i in range(6)])
    _, info = buffer.sample(4, return_info=True)
    assert len(info["rejected"]) == 2
    assert len(info["index"]) == 4


def test_the_average_follows_the_occupancy_series_by_hand() -> None:
    # batch 2, target 2, beta .5; occupancies 4, 2, 8:
    # x = .5, 0, .75;  q = .25, .125, .5*.125 + .5*.75 = .4375;  budgets floor(1), 0, floor(3.5) = 3
    sampler = PaceSampler(ema_beta=0.5)
    buffer = make_buffer(sampler, [])
    codec = GroupCodec()
    averages, rejected, next_id = [], [], 0
    for occupancy in (4, 2, 8):
        while len(sampler.waiting) < occupancy:
            buffer.add(codec.encode(make_group(next_id)))
            next_id += 1
        _, info = buffer.sample(2, return_info=True)
        averages.append(sampler.rejection_ema)
        rejected.append(len(info["rejected"]))
    assert averages == pytest.approx([0.25, 0.125, 0.4375])
    assert rejected == [1, 0, 3]


def test_nothing_is_scored_while_nothing_is_rejected() -> None:
    sampler = PaceSampler()
    buffer = make_buffer(sampler, [make_group(i, [[0, 1]], 1) for i in range(4)])
    assert sampler.plan(buffer.storage, 4) == []


def test_fifo_takes_in_order_of_arrival_and_rejects_nothing() -> None:
    sampler = FifoSampler()
    buffer = make_buffer(sampler, [make_group(i) for i in (4, 2, 7, 1)])
    batch, info = buffer.sample(3, return_info=True)
    assert [int(record["group_id"]) for record in batch.unbind(0)] == [4, 2, 7]
    assert info["rejected"].tolist() == []


def test_a_sampler_with_too_few_entries_refuses() -> None:
    buffer = make_buffer(FifoSampler(), [make_group(0)])
    with pytest.raises(RuntimeError, match="Cannot take 2 entries: 1 are waiting"):
        buffer.sample(2)


def test_the_writer_reuses_only_consumed_slots_out_of_order() -> None:
    sampler = PaceSampler(ema_beta=1.0, target_occupancy=1)
    buffer = make_buffer(sampler, [make_group(i, [[v]], v) for i, v in enumerate((5, 0, 5, 5))], capacity=4)
    sampler.policy_version = 5
    _, info = buffer.sample(2, return_info=True)  # excess 3/4, budget min(3, 2): the stale one (slot 1), then slot 0
    assert info["rejected"].tolist() == [1, 0]
    codec = GroupCodec()
    buffer.extend([codec.encode(make_group(i)) for i in range(10, 14)])
    stored = [int(buffer.storage.get(slot)["group_id"]) for slot in sampler.waiting]
    assert stored == [10, 11, 12, 13]
    with pytest.raises(RuntimeError, match="full"):
        buffer.add(codec.encode(make_group(99)))


def test_the_writer_never_overwrites_a_waiting_entry() -> None:
    sampler = FifoSampler()
    buffer = make_buffer(sampler, [make_group(i) for i in range(4)], capacity=4)
    sampler.discard([2])
    codec = GroupCodec()
    assert buffer.add(codec.encode(make_group(4))) == 2
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
