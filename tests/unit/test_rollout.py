"""RolloutWorker: completions become whole groups, and every fault of a part ends the run with its cause."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from fakes import DirectScorer, FirstNumber

from lit_asyncrl.errors import EngineError, RewardError, StopRequested
from lit_asyncrl.generation.groups import build_group, sample_record
from lit_asyncrl.generation.rollout import RolloutConfig, RolloutWorker
from lit_asyncrl.generation.scripted import ScriptedEngine
from lit_asyncrl.pool.ledger import UNPROVED
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.pool.sampler import FifoSampler
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.tasks.digits import ReverseDigits
from lit_asyncrl.types import Completion, Example, GenerationRequest, Prompt, SamplingParams
from lit_asyncrl.waits import Changed

GROUP_SIZE = 2
BATCH_GROUPS = 3
TIMEOUT_S = 10.0


class Prompts:
    """`number` prompts of three tokens."""

    def __init__(self, number: int = BATCH_GROUPS) -> None:
        self._left = list(range(number))

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        taken, self._left = self._left[:num_prompts], self._left[num_prompts:]
        return [Prompt(i, Example(f"p{i}", "", "toy", i), i, (7, 8, 9), 0, 0, 1000 + i) for i in taken]

    @property
    def ended(self) -> bool:
        return not self._left


class ShuffledEngine(ScriptedEngine):
    """Holds training answers back until `expected` are there, then gives them out in the order that `order` makes."""

    def __init__(self, respond, expected: int, order: Callable[[list[Completion]], list[Completion]]) -> None:
        super().__init__(respond)
        self._expected, self._order, self._held = expected, order, []

    def completions(self, timeout_s: float) -> list[Completion]:
        self._held += super().completions(timeout_s)
        if len(self._held) < self._expected:
            return []
        given, self._held = self._order(self._held), []
        self._expected = 0
        return given


def answer(request: GenerationRequest, version: int = 0, **changes) -> Completion:
    """Two tokens: the sample's index within its group, and 1."""
    fields = {
        "request_id": request.request_id,
        "token_ids": [request.request_id % GROUP_SIZE, 1],
        "behavior_logprobs": [-0.5, -0.25],
        "token_versions": [version, version],
        "finish_reason": "stop",
    }
    return Completion(**(fields | changes))


class Run:
    """A worker with a real pool and a scripted engine."""

    def __init__(self, respond=answer, *, prompts=None, scorer=None, engine=None, **config) -> None:
        self.served_version = 0
        self.supervisor = Supervisor()
        self.pool = TrajectoryPool(batch_groups=BATCH_GROUPS, sampler=FifoSampler(), max_policy_age=4, supervisor=self.supervisor)
        self.engine = engine or ScriptedEngine(respond)
        task = ReverseDigits(name="toy", rewards=[FirstNumber()])
        self.worker = RolloutWorker(
            self.engine,
            prompts or Prompts(),
            scorer or DirectScorer(),
            self.pool,
            {"toy": task},
            lambda ids: " ".join(map(str, ids)),
            RolloutConfig(GROUP_SIZE, SamplingParams(max_new_tokens=4), **config),
            served_version=lambda: self.served_version,
            supervisor=self.supervisor,
        )
        self.engine.start("", eos_token_ids=(1,), probe_ids=(0, 1), max_model_len=None)
        self.engine.begin_update(0, {})
        self.pool.open_admission()

    def __enter__(self) -> Run:
        self.worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.request_stop("test ends")
        self.worker.stop()
        self.engine.stop()

    def take(self):
        return [taken.group for taken in self.pool.take(0, None, TIMEOUT_S)]

    def wait_settled(self, number: int) -> None:
        """Until `number` groups are settled (dropped or failed)."""
        ledger = self.pool.ledger
        self.supervisor.wait_for(
            Changed(),
            lambda: ledger.count("dropped") + ledger.count("failed") >= number,
            timeout_s=TIMEOUT_S,
            who="test",
            what="settled groups",
        )

    def wait_fault(self) -> BaseException:
        with pytest.raises(Exception) as caught:
            self.supervisor.wait_for(Changed(), lambda: False, timeout_s=TIMEOUT_S, who="test", what="a fault")
        return caught.value


@pytest.mark.parametrize(
    "order",
    [
        lambda held: held,
        lambda held: held[::-1],
        lambda held: held[::2] + held[1::2],  # first members of every group, then second ones
    ],
    ids=["in order", "reversed", "interleaved"],
)
def test_groups_are_assembled_by_id_in_any_order_of_completion(order):
    engine = ShuffledEngine(answer, BATCH_GROUPS * GROUP_SIZE, order)
    with Run(engine=engine) as run:
        groups = run.take()
    assert sorted(g.group_id for g in groups) == [0, 1, 2]
    for group in groups:
        # members in sample order: prompt 7 8 9, then the sample's index and the end
        assert group.token_ids.tolist() == [7, 8, 9, 0, 1, 7, 8, 9, 1, 1]
        assert group.rewards.tolist() == [0.0, 1.0]


def test_every_field_of_a_group_is_filled_from_the_engine_s_answer():
    prompt = Prompt(4, Example("p", "", "toy", 11), 11, (7, 8), 2, 0, 0)
    completions = [
        Completion(8, [5, 1], [-0.5, -0.25], [3, 4], "stop"),
        Completion(9, [6], [-1.5], [4], "length"),
    ]
    task = ReverseDigits(name="toy", rewards=[FirstNumber()])
    group = build_group(prompt, completions, [[1.0], [0.0]], task, completed_version=4)
    assert group.token_ids.tolist() == [7, 8, 5, 1, 7, 8, 6]
    assert group.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert group.behavior_logprobs.tolist() == [0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.5]
    assert group.token_versions.tolist() == [-1, -1, 3, 4, -1, -1, 4]
    assert group.lengths.tolist() == [4, 3]
    assert group.correct.tolist() == [True, False]
    assert group.truncated.tolist() == [False, True]
    assert (group.prompt_index, group.epoch, group.completed_version) == (11, 2, 4)


def test_rewards_are_summed_with_their_weights():
    first, second = FirstNumber(), FirstNumber()
    first.weight, second.weight = 2.0, -0.5
    prompt = Prompt(0, Example("p", "", "toy", 0), 0, (7,), 0, 0, 0)
    completion = Completion(0, [5], [-0.5], [0], "stop")
    group = build_group(prompt, [completion], [[3.0, 4.0]], ReverseDigits(rewards=[first, second]), completed_version=0)
    assert group.rewards.tolist() == [4.0]  # 2 * 3 - 0.5 * 4
    assert group.reward_components.tolist() == [[3.0, 4.0]]


def test_a_sample_record_tells_prompt_from_response():
    prompt = Prompt(0, Example("p", "", "toy", 0), 0, (7, 8), 0, 0, 0)
    group = build_group(
        prompt,
        [Completion(0, [5], [-0.5], [2], "stop"), Completion(1, [6, 1], [-0.5, -0.5], [2, 3], "stop")],
        [[0.0], [1.0]],
        ReverseDigits(rewards=[FirstNumber()]),
        completed_version=3,
    )
    record = sample_record(group, lambda ids: " ".join(map(str, ids)), 1)
    assert (record["prompt"], record["completion"]) == ("7 8", "6 1")
    assert (record["first_version"], record["last_version"]) == (2, 3)
    assert record["reward_components"] == {"first": 1.0}


def truncate(*request_ids: int) -> Callable[[GenerationRequest, int], Completion]:
    return lambda request, version: answer(
        request, version, finish_reason="length" if request.request_id in request_ids else "stop"
    )


def test_truncated_responses_are_trained_by_default():
    with Run(truncate(0)) as run:
        group = min(run.take(), key=lambda g: g.group_id)
    assert group.truncated.tolist() == [True, False]
    assert group.num_trained_tokens == 4


def test_masked_truncated_responses_train_no_token_but_stay_in_the_group():
    with Run(truncate(0), truncated="mask") as run:
        group = min(run.take(), key=lambda g: g.group_id)
    assert group.group_size == 2
    assert group.loss_mask.tolist() == [False] * 5 + [False, False, False, True, True]
    assert group.num_sampled_tokens == 4


def test_dropped_truncated_responses_leave_the_group():
    size = 3

    def respond(request: GenerationRequest, version: int) -> Completion:
        reason = "length" if request.request_id % size == 0 else "stop"
        return answer(request, version, token_ids=[request.request_id % size, 1], finish_reason=reason)

    run = Run(respond, truncated="drop")
    run.worker._config = RolloutConfig(size, SamplingParams(max_new_tokens=4), truncated="drop")
    with run:
        groups = run.take()
    assert all(g.rewards.tolist() == [1.0, 2.0] for g in groups)
    assert all(not bool(g.truncated.any()) for g in groups)


def test_a_group_with_too_few_finished_members_is_dropped_and_counted():
    with Run(truncate(0), truncated="drop", prompts=Prompts(4)) as run:  # one of two members left of group 0
        groups = run.take()
        assert sorted(g.group_id for g in groups) == [1, 2, 3]
        assert run.pool.ledger.count("dropped", "truncated") == 1


def test_zero_variance_groups_are_kept_by_default():
    with Run(lambda r, v: answer(r, v, token_ids=[1, 1])) as run:
        assert all(g.rewards.tolist() == [1.0, 1.0] for g in run.take())


def test_zero_variance_groups_can_be_dropped_and_are_counted():
    respond = lambda r, v: answer(r, v, token_ids=[1 if r.request_id < GROUP_SIZE else r.request_id % 2, 1])  # noqa: E731
    with Run(respond, zero_variance="drop", prompts=Prompts(4)) as run:
        assert sorted(g.group_id for g in run.take()) == [1, 2, 3]
        assert run.pool.ledger.count("dropped", "zero variance") == 1


def test_a_group_with_an_aborted_member_fails_and_is_counted():
    def respond(request: GenerationRequest, version: int) -> Completion:
        if request.request_id == 0:
            return answer(request, version, token_ids=[], behavior_logprobs=[], token_versions=[], finish_reason="abort")
        return answer(request, version)

    with Run(respond, prompts=Prompts(4)) as run:
        assert sorted(g.group_id for g in run.take()) == [1, 2, 3]
        assert run.pool.ledger.count("failed", "aborted member") == 1


def test_a_group_whose_reward_failed_is_counted_and_makes_room():
    with Run(scorer=DirectScorer(skip=[1]), prompts=Prompts(4)) as run:
        assert sorted(g.group_id for g in run.take()) == [0, 2, 3]
        assert run.pool.ledger.count("failed", "reward") == 1


def test_tokens_of_dropped_groups_are_accounted():
    with Run(truncate(*range(6)), truncated="drop") as run:
        run.wait_settled(3)
    assert run.pool.ledger.tokens("dropped", "truncated") == 12  # 3 groups x 2 members x 2 tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": 10_000}, "request 10000 .* not outstanding"),
        ({"behavior_logprobs": [float("nan"), -1.0]}, "NaN"),
        ({"behavior_logprobs": [float("-inf"), -1.0]}, "infinite"),
        ({"behavior_logprobs": [0.5, -1.0]}, "above 0"),
        ({"behavior_logprobs": [-1.0]}, "2 tokens, 1 log-probs, 2 versions"),
        ({"token_versions": [0]}, "2 tokens, 2 log-probs, 1 versions"),
        ({"token_ids": [], "behavior_logprobs": [], "token_versions": []}, "no tokens"),
    ],
    ids=["unknown id", "nan", "minus infinity", "positive", "short log-probs", "short versions", "empty"],
)
def test_an_answer_that_cannot_be_trained_on_ends_the_run(changes, message):
    with Run(lambda request, version: answer(request, version, **changes)) as run:
        fault = run.wait_fault()
    assert isinstance(fault, EngineError)
    assert fault.__notes__ == ["Raised in lit-asyncrl's rollout collector."]
    with pytest.raises(EngineError, match=message):
        raise fault


def test_a_second_answer_to_one_request_ends_the_run():
    with Run(lambda request, version: answer(request, version, request_id=0)) as run:
        assert "request 0" in str(run.wait_fault())


def test_a_reward_that_raises_ends_the_run_with_its_error():
    class Broken:
        def score(self, task, completions, example):
            raise RewardError("the reward 'first' raised")

    with Run(scorer=Broken()) as run:
        assert isinstance(run.wait_fault(), RewardError)


def test_a_prompt_source_that_raises_ends_the_run_with_its_error():
    class Broken:
        ended = False

        def next_prompts(self, num_prompts):
            raise OSError("disk gone")

    with Run(prompts=Broken()) as run:
        fault = run.wait_fault()
    assert isinstance(fault, OSError)
    assert fault.__notes__ == ["Raised in lit-asyncrl's rollout dispatcher."]


def test_a_prompt_source_that_ends_gives_its_room_back():
    with Run(prompts=Prompts(BATCH_GROUPS)) as run:
        assert len(run.take()) == BATCH_GROUPS
        run.supervisor.wait_for(
            Changed(), lambda: run.worker.exhausted, timeout_s=TIMEOUT_S, who="test", what="the end of the prompts"
        )
        assert run.pool.stats()["reserved_groups"] == 0


def test_outstanding_prompts_are_those_without_a_group_in_the_pool():
    respond_only_first = ShuffledEngine(answer, BATCH_GROUPS * GROUP_SIZE, lambda held: held[:GROUP_SIZE])
    with Run(engine=respond_only_first) as run:
        run.supervisor.wait_for(Changed(), lambda: len(run.pool) == 1, timeout_s=TIMEOUT_S, who="test", what="one group")
        with run.worker.frozen():
            assert [group.prompt.group_id for group in run.worker.open_groups()] == [1, 2]


def test_stopping_ends_every_thread():
    run = Run()
    before = threading.active_count()
    with run:
        run.take()
    assert threading.active_count() == before
    with pytest.raises(StopRequested):
        run.supervisor.raise_if_stopping()


def test_the_engine_s_idle_time_counts_while_nothing_is_in_flight():
    with Run() as run:
        run.take()
        before = run.worker.idle_s
        run.supervisor.wait_for(Changed(), lambda: run.worker.idle_s > before, timeout_s=TIMEOUT_S, who="test", what="idle time")


def test_tokens_of_members_are_counted_before_their_group_is_complete():
    first_of_each = ShuffledEngine(answer, BATCH_GROUPS * GROUP_SIZE, lambda held: held[::GROUP_SIZE])
    with Run(engine=first_of_each) as run:
        ledger = run.pool.ledger
        run.supervisor.wait_for(
            Changed(), lambda: ledger.tokens("in_flight") == 6, timeout_s=TIMEOUT_S, who="test", what="three members"
        )
        assert ledger.count("in_flight") == BATCH_GROUPS


def test_dispatched_groups_are_compared_with_trained_ones():
    with Run(truncate(0, 1), truncated="drop", prompts=Prompts(4)) as run:  # group 0 leaves: 2 of 8 responses
        run.take()
        run.pool.set_policy_version(1)
        means = run.pool.ledger.bias.means()
    assert means["length"] == {"dispatched": 2.0, "trained": 2.0}
    assert means["reward"] == {"dispatched": 0.5, "trained": 0.5}


def test_a_complete_group_waits_for_the_proof_of_the_weights_that_sampled_it():
    with Run(lambda request, version: answer(request, 1)) as run:
        run.pool.set_policy_version(1)
        run.supervisor.wait_for(
            Changed(),
            lambda: len(run.worker._complete) == BATCH_GROUPS,
            timeout_s=TIMEOUT_S,
            who="test",
            what="groups",
        )
        assert len(run.pool) == 0
        run.served_version = 1
        assert len(run.pool.take(1, None, TIMEOUT_S)) == BATCH_GROUPS


def test_the_time_that_rewards_take_is_no_generation():
    class Slow(DirectScorer):
        def score(self, *arguments):
            run.served_version = 3  # three updates meanwhile
            return super().score(*arguments)

    run = Run(scorer=Slow())
    with run:
        run.supervisor.wait_for(
            Changed(), lambda: len(run.pool) == BATCH_GROUPS, timeout_s=TIMEOUT_S, who="test", what="scored groups"
        )
        assert run.served_version == 3
        run.pool.set_policy_version(3)
        first = run.pool.take(3, None, TIMEOUT_S)[0].group
    assert first.completed_version == 0
    assert set(first.token_versions[first.token_versions >= 0].tolist()) == {0}


def test_what_unproved_weights_sampled_fails_and_is_never_pooled():
    run = Run(lambda request, version: answer(request, token_versions=[0, 1]))
    with run:
        run.pool.set_policy_version(1)
        run.supervisor.wait_for(
            Changed(),
            lambda: len(run.worker._complete) == BATCH_GROUPS,
            timeout_s=TIMEOUT_S,
            who="test",
            what="groups",
        )
    assert run.worker.fail_unproved(1, UNPROVED) == BATCH_GROUPS
    assert (len(run.pool), run.pool.ledger.count("failed", UNPROVED)) == (0, BATCH_GROUPS)
    assert run.pool.ledger.tokens("failed", UNPROVED) == BATCH_GROUPS * GROUP_SIZE * 2
