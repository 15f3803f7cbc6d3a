"""Replay in its parts: forced decisions in the pool, answers held back until their turn, differences named."""

from __future__ import annotations

import pytest
import torch
from builders import make_group

from lit_asyncrl.errors import StopRequested, WaitTimeoutError
from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.pool.tape import Decision
from lit_asyncrl.recording.events import added_event, checksum, completion_event, evaluation_event, take_event, to_line
from lit_asyncrl.recording.file import Header
from lit_asyncrl.recording.replay import ReplayError, ReplayPrompts, RunReplay
from lit_asyncrl.recording.replay_engine import ReplayEngine
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import Completion, GenerationRequest, Prompt, SamplingParams

HEADER = Header({}, seed=0, num_threads=1, device="cpu", torch="2.13.0")


class Source:
    """As much of a prompt source as a replay uses."""

    def __init__(self) -> None:
        self.state = {"position": 0, "next_group_id": 0, "requeued": [], "unsettled": []}

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = state

    def next_prompts(self, num_prompts):
        keys, self.state["requeued"] = self.state["requeued"][:num_prompts], self.state["requeued"][num_prompts:]
        return [Prompt(group_id, None, index, (index, 1), epoch, attempt, 0) for group_id, index, epoch, attempt in keys]


def replay_of(tmp_path, events, header=HEADER) -> RunReplay:
    path = tmp_path / "run.record"
    fields = {**vars(header)}
    path.write_bytes(b"".join(to_line(event) for event in [["header", 1, fields], *events]))
    return RunReplay(str(path), header, Source(), lambda ids, weights: [0.0])


def pool_of(tape, **settings) -> TrajectoryPool:
    pool = TrajectoryPool(
        **({"batch_groups": 2, "max_policy_age": None, "capacity_groups": 8} | settings),
        sampler=PaceSampler(),
        supervisor=Supervisor(),
    )
    pool.tape = tape
    pool.open_admission()
    return pool


def add(pool, *groups) -> None:
    pool.reserve(len(groups), 0.0)
    for group in groups:
        pool.add(group)


def train(request_id, version=0) -> list:
    return completion_event(Completion(request_id, [5], [-0.5], [version], "stop"))


def request(request_id, purpose="train", seed=0) -> GenerationRequest:
    return GenerationRequest(request_id, (1, 2), SamplingParams(), seed, purpose)


def engine_of(events) -> ReplayEngine:
    engine = ReplayEngine(events, lambda ids, weights: [-1.5])
    engine.start("", eos_token_ids=[1], probe_ids=[2, 3], max_model_len=None)
    engine.begin_update(0, {})
    return engine


def ids(engine) -> list[int]:
    return [completion.request_id for completion in engine.completions(0.0)]


# --- the pool -----------------------------------------------------------------------------------------------------------


def test_the_recorded_groups_are_taken_in_the_recorded_order_whatever_else_waits(tmp_path):
    logprobs = torch.full((8,), -0.25)
    tape = replay_of(tmp_path, [take_event(Decision(0, [3, 1], [0, 0], [2], {}, {1: logprobs}))])
    pool = pool_of(tape)
    add(pool, *(make_group(i) for i in range(5)))
    taken = pool.take(0, None, 0.0)
    assert [item.group.group_id for item in taken] == [3, 1]
    assert taken[0].logprobs is None and torch.equal(taken[1].logprobs, logprobs)
    assert (len(pool), pool.groups_rejected, pool.ledger.count("dropped", "rejected")) == (2, 1, 1)


def test_a_batch_waits_for_each_of_its_groups(tmp_path):
    tape = replay_of(tmp_path, [take_event(Decision(0, [3, 1], [0, 0]))])
    pool = pool_of(tape)
    add(pool, *(make_group(i) for i in range(3)))
    with pytest.raises(WaitTimeoutError):
        pool.take(0, None, 0.0)
    add(pool, make_group(3))
    assert [item.group.group_id for item in pool.take(0, None, 0.0)] == [3, 1]


def test_a_group_loses_the_recorded_members(tmp_path):
    reduced = {0: torch.tensor([True, False, True])}
    tape = replay_of(tmp_path, [take_event(Decision(0, [0, 1], [0, 0], [], reduced))])
    pool = pool_of(tape)
    add(pool, *(make_group(i, [(0,), (0, 0), (0, 0, 0)]) for i in range(2)))
    taken = pool.take(0, None, 0.0)
    assert taken[0].group.lengths.tolist() == [3, 5]  # prompts of 2 tokens; the member of 2 is gone
    assert pool.ledger.tokens("dropped", "rejected") == 2


def test_a_batch_has_the_recorded_completed_versions(tmp_path):
    tape = replay_of(tmp_path, [take_event(Decision(2, [0, 1], [2, 1]))])
    pool = pool_of(tape)
    add(pool, make_group(0), make_group(1))
    assert [item.group.completed_version for item in pool.take(2, None, 0.0)] == [2, 1]


def test_a_group_that_left_before_its_batch_is_named(tmp_path):
    tape = replay_of(tmp_path, [take_event(Decision(2, [0, 1], [0, 0]))])
    pool = pool_of(tape, max_policy_age=1, capacity_groups=None)
    add(pool, make_group(0))
    with pytest.raises(ReplayError, match="Group 0 must wait in the pool when batch 0 is taken"):
        pool.take(2, None, 0.0)  # its age of 2 is above 1


def test_another_number_of_updates_is_named(tmp_path):
    tape = replay_of(tmp_path, [take_event(Decision(1, [0, 1], [0, 0]))])
    with pytest.raises(ReplayError, match="policy_version must be 1 when batch 0 is taken, as in the recorded run, got 0"):
        pool_of(tape).take(0, None, 0.0)


def test_the_end_of_the_record_stops_the_run(tmp_path):
    with pytest.warns(UserWarning, match="ends after 0 batches"), pytest.raises(StopRequested):
        pool_of(replay_of(tmp_path, [])).take(0, None, 0.0)


def test_other_rewards_are_named(tmp_path):
    tape = replay_of(tmp_path, [added_event(0, torch.tensor([0.0, 0.5]))])
    with pytest.raises(ReplayError, match=r"Group 0 .* must have the rewards \[0.0, 0.5\] .* got \[0.0, 1.0\]"):
        add(pool_of(tape), make_group(0))


def test_a_group_that_was_dropped_and_is_not_is_named(tmp_path):
    tape = replay_of(tmp_path, [["left", 0, "dropped", "zero variance"]])
    with pytest.raises(ReplayError, match=r"Group 0 was dropped \(zero variance\) in the recorded run, and is not here"):
        add(pool_of(tape), make_group(0))


def test_a_group_that_is_dropped_and_was_not_is_named(tmp_path):
    pool = pool_of(replay_of(tmp_path, [added_event(0, torch.tensor([0.0, 1.0]))]))
    pool.record(0, "in_flight")
    with pytest.raises(ReplayError, match=r"Group 0 reached the pool in the recorded run, and is dropped \(truncated\) here"):
        pool.record(0, "dropped", reason="truncated")


def test_what_the_record_ends_before_is_no_difference(tmp_path):
    pool = pool_of(replay_of(tmp_path, []))
    add(pool, make_group(0))
    pool.record(1, "in_flight")
    pool.record(1, "dropped", reason="truncated")
    assert len(pool) == 1


# --- the engine ---------------------------------------------------------------------------------------------------------


def test_answers_keep_the_recorded_order():
    engine = engine_of([train(2), train(0), train(1)])
    engine.submit([request(0), request(1)])
    assert ids(engine) == []
    engine.submit([request(2)])
    assert ids(engine) == [2, 0, 1]


def test_an_answer_waits_for_the_weights_that_sampled_it():
    engine = engine_of([train(0), train(1, version=1)])
    engine.submit([request(0), request(1)])
    assert ids(engine) == [0]
    engine.begin_update(1, {})
    assert ids(engine) == [1]


def test_an_answer_waits_for_the_batches_that_were_taken_before_it():
    engine = engine_of([train(0), take_event(Decision(0, [0], [0])), train(1)])
    engine.submit([request(0), request(1)])
    assert ids(engine) == [0]
    engine.advance(1)
    assert ids(engine) == [1]


def test_a_paused_engine_answers_evaluations_only():
    recorded = evaluation_event(7, (1, 2), Completion(40, [6], [-0.1], [0], "stop"))
    engine = engine_of([train(0), recorded])
    engine.pause()
    engine.submit([request(0), request(3, "evaluation", seed=7)])
    assert ids(engine) == []
    assert engine.evaluation_completions(0.0) == [Completion(3, [6], pytest.approx([-0.1]), [0], "stop")]
    engine.resume()
    assert ids(engine) == [0]


def test_an_evaluation_that_was_not_recorded_stops_the_run():
    with pytest.warns(UserWarning, match="no evaluation of request 3 at policy_version 0"), pytest.raises(StopRequested):
        engine_of([]).submit([request(3, "evaluation")])


def test_the_proof_of_delivery_is_the_trainers_own():
    engine = engine_of([])
    report = engine.finish_update(0.0)
    assert (report.version, list(report.probe_logprobs)) == (0, [-1.5])


# --- the prompts --------------------------------------------------------------------------------------------------------


def test_prompts_come_in_the_recorded_order_under_their_ids_and_then_no_more():
    keys = [[0, 4, 0, 0, checksum((4, 1))], [2, 4, 0, 1, checksum((4, 1))], [1, 5, 0, 0, checksum((5, 1))]]
    source = Source()
    prompts = ReplayPrompts(source, keys)
    assert [(p.group_id, p.source_index, p.attempt) for p in prompts.next_prompts(9)] == [(0, 4, 0), (2, 4, 1), (1, 5, 0)]
    assert prompts.ended and prompts.next_prompts(1) == []
    assert (source.state["position"], source.state["next_group_id"]) == (2, 3)  # two first attempts; ids 0 to 2


def test_another_prompt_under_the_id_is_named():
    prompts = ReplayPrompts(Source(), [[0, 4, 0, 0, checksum((9, 9))]])
    with pytest.raises(ReplayError, match="Group 0 must be of the prompt of the recorded run"):
        prompts.next_prompts(1)
