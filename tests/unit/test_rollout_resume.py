"""RolloutWorker over a checkpoint: what was sampled of groups in flight goes on, once, and the ledger's sums close throughout."""

from __future__ import annotations

import io

import pytest
import torch
from fakes import DirectScorer, FirstNumber

from lit_asyncrl.errors import EngineError
from lit_asyncrl.generation.groups import check_completion, pack_completions, proved_part, unpack_completions
from lit_asyncrl.generation.rollout import RolloutConfig, RolloutWorker
from lit_asyncrl.generation.scripted import ScriptedEngine
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.pool.sampler import FifoSampler
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.tasks.digits import ReverseDigits
from lit_asyncrl.types import Completion, Example, GenerationRequest, Prompt, SamplingParams
from lit_asyncrl.waits import Changed

GROUP_SIZE, NUM_GROUPS, LENGTH, TIMEOUT_S = 2, 3, 4, 10.0


def whole(request_id: int, versions: tuple[int, ...] = (0, 0, 0, 0)) -> Completion:
    """Four tokens: the request's own number first."""
    return Completion(request_id, [request_id, 5, 6, 1], [-0.5, -0.25, -0.125, -1.0], list(versions), "stop")


def first(completion: Completion, n: int) -> Completion:
    """Its first n tokens, not finished."""
    lists = (completion.token_ids[:n], completion.behavior_logprobs[:n], completion.token_versions[:n])
    return Completion(completion.request_id, *lists, "abort")


class Slow(ScriptedEngine):
    """Finishes only the requests in `finish`; has sampled `tokens` of each other one, of the weights that `versions` say."""

    def __init__(self, finish=(), tokens: int = 0, versions: tuple[int, ...] = (0, 0, 0, 0)) -> None:
        super().__init__(lambda request, version: whole(request.request_id, versions))
        self.finish, self.tokens, self.versions = finish, tokens, versions
        self.requests: list[GenerationRequest] = []

    def submit(self, requests) -> None:
        self.requests += requests
        super().submit([request for request in requests if request.request_id in self.finish])

    def partial_completions(self) -> list[Completion]:
        unfinished = [r for r in self.requests if r.request_id not in self.finish]
        return [first(whole(r.request_id, self.versions), max(self.tokens, sampled_before(r))) for r in unfinished if self.tokens]

    @property
    def generated_tokens(self) -> int:
        lengths = [(LENGTH if r.request_id in self.finish else max(self.tokens, sampled_before(r))) for r in self.requests]
        return sum(lengths) - sum(map(sampled_before, self.requests))


def sampled_before(request: GenerationRequest) -> int:
    return len(request.partial.token_ids) if request.partial else 0


class Prompts:
    """Prompts of three tokens, of the given groups."""

    def __init__(self, group_ids) -> None:
        self._left = list(group_ids)

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        taken, self._left = self._left[:num_prompts], self._left[num_prompts:]
        return [Prompt(i, Example(f"p{i}", "", "toy", i), i, (7, 8, 9), 0, 0, 1000 + i) for i in taken]

    @property
    def ended(self) -> bool:
        return not self._left


class Run:
    """A worker with a real pool; `carried` and `ledger` are those of the run before it."""

    def __init__(self, engine: ScriptedEngine, carried=None, ledger=None, scorer=None, groups=range(NUM_GROUPS)) -> None:
        self.supervisor = Supervisor()
        self.served_version = 0
        self.engine = engine
        self.pool = TrajectoryPool(batch_groups=1, sampler=FifoSampler(), max_policy_age=4, supervisor=self.supervisor)
        if ledger is not None:
            self.pool.ledger.load_state_dict(ledger)
        self.worker = RolloutWorker(
            engine,
            Prompts(groups),
            scorer or DirectScorer(),
            self.pool,
            {"toy": ReverseDigits(name="toy", rewards=[FirstNumber()])},
            lambda ids: " ".join(map(str, ids)),
            RolloutConfig(GROUP_SIZE, SamplingParams(max_new_tokens=LENGTH)),
            served_version=lambda: self.served_version,
            supervisor=self.supervisor,
        )
        self.worker.carry(carried or {})
        engine.start("", eos_token_ids=(1,), probe_ids=(0, 1), max_model_len=None)
        engine.begin_update(0, {})
        self.pool.open_admission()

    def __enter__(self) -> Run:
        self.worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.request_stop("test ends")
        self.worker.stop()
        self.engine.stop()

    def wait(self, predicate) -> None:
        self.supervisor.wait_for(Changed(), predicate, timeout_s=TIMEOUT_S, who="test", what="the state of the test")

    def wait_sent(self, collected: int) -> None:
        """Until every group was sent and so many tokens were collected."""
        self.wait(lambda: self.worker.collected_tokens == collected and self.worker._prompts.ended and self.engine.requests)

    def checkpoint(self):
        """What a resumed run gets: carried members by group, and the ledger's state, over `torch.save`."""
        with self.worker.frozen():
            groups = self.worker.open_groups()
            members = {g.prompt.group_id: g.members for g in groups} | self.worker.carried
            tokens = {group_id: sum(len(c.token_ids) for c in each) for group_id, each in members.items()}
            ledger = self.pool.ledger.state_dict(self.worker.unfinished_tokens, tokens)
        file = io.BytesIO()
        torch.save({"members": pack_completions(c for each in members.values() for c in each), "ledger": ledger}, file)
        file.seek(0)
        read = torch.load(file, weights_only=True)
        carried: dict[int, list[Completion]] = {}
        for completion in unpack_completions(read["members"]):
            carried.setdefault(completion.request_id // GROUP_SIZE, []).append(completion)
        return carried, read["ledger"]


def test_completions_round_trip_through_a_checkpoint_file():
    completions = [whole(3), first(whole(4), 2)]
    assert unpack_completions(pack_completions(completions)) == completions
    assert unpack_completions(pack_completions([])) == []


def test_a_response_is_cut_at_its_first_token_of_unproved_weights():
    completion = whole(0, (2, 3, 3, 4))
    assert proved_part(completion, 4) is completion
    assert proved_part(completion, 3) == first(completion, 3)
    assert proved_part(completion, 1) is None


def test_a_snapshot_holds_finished_and_partial_members():
    with Run(Slow(finish=[0], tokens=2)) as run:
        run.wait_sent(collected=LENGTH)
        carried, _ = run.checkpoint()
    # requests 0 to 5; only 0 is finished, of each other one two tokens are known
    expected = {0: [whole(0), first(whole(1), 2)]}
    expected |= {g: [first(whole(2 * g), 2), first(whole(2 * g + 1), 2)] for g in (1, 2)}
    assert carried == expected


def test_only_what_is_missing_is_asked_for_and_goes_on_after_its_partial():
    carried = {0: [whole(0), first(whole(1), 2)], 1: [first(whole(3), 1)]}
    engine = Slow()
    with Run(engine, carried) as run:
        run.wait_sent(collected=0)
        assert {r.request_id: r.partial for r in engine.requests} == {
            1: first(whole(1), 2),
            2: None,
            3: first(whole(3), 1),
            4: None,
            5: None,
        }
        assert run.worker.carried == {}


def test_a_resumed_group_equals_the_unbroken_one_and_the_sums_close_throughout():
    with Run(Slow(finish=[0, 2, 3], tokens=3)) as before:
        before.wait(lambda: len(before.pool) == 1)  # group 1; 12 tokens finished and 3 x 3 partial
        before.wait_sent(collected=12)
        carried, ledger = before.checkpoint()
    # group 1 is in the pool of the checkpoint
    with Run(Slow(finish=range(6)), carried, ledger, groups=[0, 2]) as after:
        after.wait(lambda: len(after.pool) == 2)
        taken = [item.group for _ in range(2) for item in after.pool.take(0, None, TIMEOUT_S)]
    groups = sorted(taken, key=lambda group: group.group_id)
    assert groups[0].token_ids.tolist() == [7, 8, 9, 0, 5, 6, 1, 7, 8, 9, 1, 5, 6, 1]
    # new here: the last tokens of requests 1, 4 and 5
    assert after.worker.collected_tokens == 3
    assert after.worker.unfinished_tokens == 0
    assert after.pool.ledger.num_tokens == 12 + 9 + 3
    assert after.pool.ledger.tokens("dropped") == 0


def test_a_group_that_was_complete_is_scored_without_a_request():
    carried = {0: [whole(0), whole(1)]}
    engine = Slow()
    with Run(engine, carried) as run:
        run.wait(lambda: len(run.pool) == 1)
        run.wait_sent(collected=0)
        assert sorted(r.request_id for r in engine.requests) == [2, 3, 4, 5]


def test_responses_are_in_the_snapshot_while_a_reward_takes_its_time():
    release = Changed()
    scoring: list[int] = []
    done: list[bool] = []

    class Waiting(DirectScorer):
        def score(self, task, completions, example):
            scoring.append(example.index)
            release.wait_until(lambda: bool(done), TIMEOUT_S)
            return super().score(task, completions, example)

    with Run(Slow(finish=range(5)), scorer=Waiting()) as run:
        try:
            run.wait(lambda: run.worker.collected_tokens == 5 * LENGTH and bool(scoring))
            carried, ledger = run.checkpoint()
        finally:
            with release:
                done.append(True)
                release.notify_all()
    assert {g: [c.finish_reason for c in members] for g, members in carried.items()} == {
        0: ["stop", "stop"],
        1: ["stop", "stop"],
        2: ["stop"],
    }
    assert all(reason != "interrupted" for _, reason, _, _ in ledger["settled"])


def test_tokens_of_unproved_weights_are_not_carried_and_count_as_interrupted():
    with Run(Slow(finish=[0, 1], tokens=3, versions=(0, 0, 1, 1))) as run:
        run.pool.set_policy_version(1)
        run.wait_sent(collected=2 * LENGTH)
        carried, ledger = run.checkpoint()
    assert all(c.finish_reason == "abort" and c.token_versions == [0, 0] for members in carried.values() for c in members)
    # of 2 x 4 + 4 x 3 tokens, 6 x 2 are carried
    assert [row for row in ledger["settled"] if row[1] == "interrupted"] == [("dropped", "interrupted", 0, 8)]


def test_what_was_carried_and_not_drawn_yet_is_in_the_next_snapshot():
    carried = {2: [whole(4), first(whole(5), 2)]}
    run = Run(Slow(), carried)  # not started: nothing is drawn
    assert run.checkpoint()[0] == carried


def test_an_answer_that_does_not_go_on_with_its_partial_is_refused():
    other = first(whole(0), 2)
    other.token_ids[1] = 9
    (prompt,) = Prompts([0]).next_prompts(1)
    check_completion(whole(0), prompt, first(whole(0), 2))
    with pytest.raises(EngineError, match="other tokens than the 2"):
        check_completion(whole(0), prompt, other)
