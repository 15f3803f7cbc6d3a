"""An engine that dies at chosen calls, under the wrapper that starts it anew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_asyncrl.errors import DeliveryLost, EngineDiedError, EngineError, StopRequested
from lit_asyncrl.generation.publisher import WeightPublisher
from lit_asyncrl.generation.restarting import RestartingEngine
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, NamedTensors, SamplingParams
from lit_asyncrl.waits import Flag

pytestmark = pytest.mark.filterwarnings("ignore:The generation engine is started anew")
BUDGET = 5
ARGUMENTS: dict[str, Any] = {"eos_token_ids": [1], "probe_ids": [3, 4], "max_model_len": None}


class DyingEngine(GenerationEngine):
    """Samples one token of every response in each `completions`; it dies in the calls whose numbers it is given.

    A token tells what it is: id 100 * request + position. `reports_every` steps it reports what it has sampled: tokens since then
    are lost with it, though counted.
    """

    def __init__(self, dies_at: Sequence[int] = (), reports_every: int = 1) -> None:
        self.dies_at = set(dies_at)
        self.calls = 0
        self.starts = 0
        self.stops = 0
        self.sampled = 0  # over all lives
        self.silence = 0.0
        self.start_fault: Exception | None = None
        self.paused = False
        self.version: int | None = None
        self.submitted: list[list[GenerationRequest]] = []  # by life
        self._reports_every = reports_every
        self._requests: dict[tuple[str, int], GenerationRequest] = {}
        self._forget()

    def _forget(self) -> None:
        self._answers: dict[tuple[str, int], Completion] = {}
        self._reported: dict[int, Completion] = {}
        self._requests = {}
        self._steps = 0
        self._count = 0
        self._dead = False
        self.version = None
        self.paused = False

    def start(self, policy_path: str, **arguments: Any) -> None:
        if self.start_fault is not None:
            raise self.start_fault
        assert arguments == ARGUMENTS
        self._forget()
        self.starts += 1
        self.submitted.append([])

    def _call(self) -> None:
        self.calls += 1
        self._dead = self._dead or self.calls in self.dies_at
        if self._dead:
            raise EngineDiedError(f"dead since call {self.calls}")

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        assert self.version is not None, "submit before weights"
        self._call()
        self.submitted[-1] += requests
        for request in requests:
            key = (request.purpose, request.request_id)
            assert key not in self._requests, "submitted twice"
            self._requests[key] = request
            partial = request.partial or Completion(0, [], [], [], "abort")
            self._answers[key] = Completion(
                request.request_id,
                list(partial.token_ids),
                list(partial.behavior_logprobs),
                list(partial.token_versions),
                "abort",
            )

    def _take(self, purpose: str) -> list[Completion]:
        self._call()
        assert self.version is not None, "completions before weights"
        for key, answer in self._answers.items():
            if key[0] == purpose and not (self.paused and purpose == "train") and len(answer.token_ids) < BUDGET:
                answer.token_ids.append(100 * answer.request_id + len(answer.token_ids))
                answer.behavior_logprobs.append(-float(self.starts))
                answer.token_versions.append(self.version)
                self._count += purpose == "train"
                self.sampled += purpose == "train"
        self._steps += 1
        if self._steps % self._reports_every == 0:
            self._reported = {
                key[1]: Completion(key[1], list(a.token_ids), list(a.behavior_logprobs), list(a.token_versions), "abort")
                for key, a in self._answers.items()
                if key[0] == "train" and a.token_ids
            }
        ready = [key for key, answer in self._answers.items() if key[0] == purpose and len(answer.token_ids) == BUDGET]
        for key in ready:
            self._requests.pop(key)
            self._reported.pop(key[1], None)
        return [self._answers.pop(key) for key in ready]

    def completions(self, timeout_s: float) -> list[Completion]:
        return self._take("train")

    def evaluation_completions(self, timeout_s: float) -> list[Completion]:
        return self._take("evaluation")

    def partial_completions(self) -> list[Completion]:
        return list(self._reported.values())

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        self._call()
        self.version = version

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        self._call()
        assert self.version is not None
        return DeliveryReport(self.version, [0.0], 0.0)

    def pause(self) -> None:
        self._call_if_served()
        self.paused = True

    def resume(self) -> None:
        self._call_if_served()
        self.paused = False

    def _call_if_served(self) -> None:
        if self.version is not None:
            self._call()

    def stop(self) -> None:
        self.stops += 1

    @property
    def silent_s(self) -> float:
        return self.silence

    @property
    def num_threads(self) -> int:
        return 3

    @property
    def generated_tokens(self) -> int:
        return self._count


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor()


@pytest.fixture
def started(supervisor: Supervisor) -> Iterator[Callable[..., tuple[RestartingEngine, DyingEngine]]]:
    engines: list[RestartingEngine] = []

    def make(inner: DyingEngine | None = None, **settings: Any) -> tuple[RestartingEngine, DyingEngine]:
        inner = inner or DyingEngine()
        engine = RestartingEngine(inner, supervisor=supervisor, **settings)
        engines.append(engine)
        engine.start("policy", **ARGUMENTS)
        engine.begin_update(0, {})
        engine.finish_update(1.0)
        return engine, inner

    yield make
    for engine in engines:
        engine.stop()


def _requests(count: int, purpose: Any = "train") -> list[GenerationRequest]:
    return [GenerationRequest(i, (3,), SamplingParams(max_new_tokens=BUDGET), i, purpose) for i in range(count)]


def _until_it_needs_weights(engine: RestartingEngine) -> None:
    assert engine._changed.wait_until(lambda: engine.needs_weights, 10.0)


def _deliver(engine: RestartingEngine, version: int) -> None:
    """What the publisher does, in one thread."""
    for _ in range(20):
        engine.begin_update(version, {})
        try:
            engine.finish_update(1.0)
        except DeliveryLost:
            continue
        return
    raise AssertionError("never delivered")


@settings(max_examples=60, deadline=None)
@given(
    dies_at=st.lists(st.integers(3, 40), max_size=6, unique=True),
    reports_every=st.integers(1, 3),
    evaluations=st.integers(0, 3),
)
def test_whatever_call_an_engine_dies_in_every_request_is_answered_once_and_no_token_is_uncounted(
    dies_at: list[int], reports_every: int, evaluations: int
):
    inner = DyingEngine(dies_at, reports_every)
    engine = RestartingEngine(inner, supervisor=Supervisor(), max_restarts=10)
    engine.start("policy", **ARGUMENTS)
    engine.begin_update(0, {})
    engine.finish_update(1.0)
    version, counted = 0, 0
    answers: dict[str, list[Completion]] = {"train": [], "evaluation": []}
    engine.submit(_requests(3))
    engine.submit([*_requests(evaluations, "evaluation")])
    for turn in range(200):
        if engine._is_restarting or engine.needs_weights:
            version += 1
            _deliver(engine, version)
        if turn == 2:
            engine.submit([GenerationRequest(9, (3,), SamplingParams(max_new_tokens=BUDGET), 9)])
        answers["train"] += engine.completions(0.0)
        answers["evaluation"] += engine.evaluation_completions(0.0)
        assert engine.generated_tokens >= counted
        counted = engine.generated_tokens
        if len(answers["train"]) == 4 and len(answers["evaluation"]) == evaluations:
            break
    engine.stop()
    assert sorted(answer.request_id for answer in answers["train"]) == [0, 1, 2, 9]
    assert sorted(answer.request_id for answer in answers["evaluation"]) == list(range(evaluations))
    for answer in answers["train"]:
        # Each token once and in its place, from lives and versions that only rise: what came before a death is as it was.
        assert answer.token_ids == [100 * answer.request_id + i for i in range(BUDGET)]
        assert answer.token_versions == sorted(answer.token_versions)
        assert answer.behavior_logprobs == sorted(answer.behavior_logprobs, reverse=True)
    for requests in inner.submitted:
        for request in requests:
            if request.partial is not None:
                answer = next(a for a in answers["train"] if a.request_id == request.request_id)
                count = len(request.partial.token_ids)
                assert answer.token_versions[:count] == request.partial.token_versions
                assert answer.behavior_logprobs[:count] == request.partial.behavior_logprobs
    assert engine.generated_tokens == inner.sampled == 4 * BUDGET + engine.lost_tokens


def test_what_was_reported_goes_on_and_what_was_not_is_lost(started: Any):
    # Two tokens in two steps are reported; the third is not. Then the engine dies: call 3 submits, 4-6 sample, 7 dies.
    engine, _ = started(DyingEngine([7], reports_every=2))
    engine.submit(_requests(1))
    for _ in range(4):
        engine.completions(0.0)
    _deliver(engine, 1)
    answers: list[Completion] = []
    while not answers:
        answers += engine.completions(0.0)
    assert answers[0].token_versions == [0, 0, 1, 1, 1]
    assert (engine.lost_tokens, engine.generated_tokens) == (1, 6)


def test_what_was_reported_is_there_while_the_engine_is_started_anew(started: Any):
    """So that a checkpoint of those seconds has it."""
    may_start = Flag()

    class Slow(DyingEngine):
        def start(self, policy_path: str, **arguments: Any) -> None:
            assert not self.starts or may_start.wait(20.0)
            super().start(policy_path, **arguments)

    engine, inner = started(Slow())
    engine.submit(_requests(1))
    engine.completions(0.0)
    inner.dies_at = {inner.calls + 1}
    engine.completions(0.0)
    assert engine._is_restarting
    before = [(p.request_id, len(p.token_ids)) for p in engine.partial_completions()]
    assert before == [(0, 1)]
    may_start.set()
    _until_it_needs_weights(engine)
    assert [(p.request_id, len(p.token_ids)) for p in engine.partial_completions()] == before


def test_nothing_is_submitted_and_nothing_answered_until_weights_came(started: Any):
    engine, inner = started(DyingEngine([3]))
    engine.submit(_requests(1))  # dies
    _until_it_needs_weights(engine)
    engine.submit([GenerationRequest(5, (3,), SamplingParams(max_new_tokens=BUDGET), 5)])
    assert engine.completions(0.01) == []
    assert inner.submitted == [[], []]
    engine.begin_update(1, {})
    assert [request.request_id for request in inner.submitted[1]] == [0, 5]


def test_a_delivery_under_way_when_the_engine_dies_is_lost_and_the_next_one_counts(started: Any):
    engine, _ = started(DyingEngine([4]))
    engine.begin_update(1, {})
    with pytest.raises(DeliveryLost):
        engine.finish_update(1.0)
    engine.begin_update(2, {})
    assert engine.finish_update(1.0).version == 2


def test_weights_that_an_engine_dies_of_go_to_the_next_one_in_the_same_call(started: Any):
    engine, inner = started(DyingEngine([3]))
    engine.begin_update(1, {})
    assert (inner.starts, engine.finish_update(1.0).version) == (2, 1)


def test_a_paused_engine_is_paused_after_a_restart(started: Any):
    engine, inner = started(DyingEngine([4]))
    engine.pause()
    engine.completions(0.0)  # dies
    _until_it_needs_weights(engine)
    assert inner.paused


def test_without_restarts_the_error_is_the_engines_own(started: Any):
    engine, inner = started(DyingEngine([3]), max_restarts=0)
    with pytest.raises(EngineDiedError, match="dead since call 3"):
        engine.completions(0.0)
    assert inner.starts == 1


def test_after_the_last_restart_the_error_goes_on(started: Any):
    engine, inner = started(DyingEngine([3, 6]), max_restarts=1)
    engine.completions(0.0)
    _deliver(engine, 1)
    with pytest.raises(EngineDiedError, match="dead since call 6"):
        engine.completions(0.0)
    assert inner.starts == 2


def test_an_error_that_is_no_death_passes(started: Any, monkeypatch: pytest.MonkeyPatch):
    engine, inner = started()

    def refuse(requests: object) -> None:
        raise EngineError("nonsense")

    monkeypatch.setattr(inner, "submit", refuse)
    with pytest.raises(EngineError, match="nonsense"):
        engine.submit(_requests(1))
    assert inner.starts == 1


def test_a_restart_that_fails_reaches_the_supervisor_with_its_cause(started: Any, supervisor: Supervisor):
    engine, inner = started(DyingEngine([3]), max_restarts=2)
    inner.start_fault = EngineError("no room")
    engine.completions(0.0)
    assert engine._changed.wait_until(lambda: supervisor.failure is not None, 10.0)
    with pytest.raises(EngineDiedError, match="no room") as raised:
        engine.completions(0.0)
    assert raised.value.__cause__ is inner.start_fault
    assert supervisor.failure is raised.value
    assert engine.restarts == 2


def test_an_engine_that_stays_silent_is_started_anew(started: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_asyncrl.generation.restarting.CONFIRM_S", 0.0)
    engine, inner = started(silent_timeout_s=5.0)
    inner.silence = 4.0
    engine.completions(0.0)
    assert inner.starts == 1
    inner.silence = 6.0
    engine.completions(0.0)
    _until_it_needs_weights(engine)
    assert inner.starts == 2


def test_a_trainer_that_was_stopped_itself_believes_no_first_look(started: Any):
    engine, inner = started(silent_timeout_s=5.0)
    inner.silence = 100.0
    engine.completions(0.0)
    inner.silence = 0.0
    engine.completions(0.0)
    assert inner.starts == 1


def test_nor_a_look_from_before_the_stop(started: Any, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    engine, inner = started(silent_timeout_s=5.0)
    monkeypatch.setattr("lit_asyncrl.waits.time", clock)
    inner.silence = 6.0
    engine.completions(0.0)
    clock.now_s += 3600.0  # the stop; what the engine has said meanwhile is not read yet
    engine.completions(0.0)
    inner.silence = 0.0
    engine.completions(0.0)
    assert inner.starts == 1


def test_the_time_without_an_engine_ends_with_the_weights_of_the_next_one(started: Any):
    engine, inner = started(DyingEngine([3]))
    assert engine.down_s == 0.0
    inner.silence = 3.0  # it was last heard of 3 s before
    engine.completions(0.0)
    assert engine.down_s >= 3.0
    _deliver(engine, 1)
    down_s = engine.down_s
    engine.completions(0.0)
    assert engine.down_s == down_s


def test_a_restart_is_told_in_words(started: Any):
    engine, _ = started(DyingEngine([3]))
    with pytest.warns(UserWarning, match=r"started anew \(1 of 3\): dead since call 3"):
        engine.completions(0.0)
        _until_it_needs_weights(engine)


class SlowStart(DyingEngine):
    """Its second start waits until it is stopped."""

    def __init__(self) -> None:
        super().__init__([3])
        self.starting, self.stopped = Flag(), Flag()

    def start(self, policy_path: str, **arguments: Any) -> None:
        if self.starts:
            self.starting.set()
            assert self.stopped.wait(10.0)
            raise EngineError("stopped")
        super().start(policy_path, **arguments)

    def stop(self) -> None:
        super().stop()
        if self.starting.is_set():
            self.stopped.set()


def test_stop_ends_a_restart_under_way_and_every_later_call(started: Any, supervisor: Supervisor):
    engine, inner = started(SlowStart())
    engine.completions(0.0)
    assert inner.starting.wait(10.0)
    engine.stop()
    assert not engine._thread.is_alive()
    with pytest.raises(EngineError, match="stopped"):
        engine.completions(0.0)
    engine.stop()
    assert (inner.starts, supervisor.failure) == (1, None)


def test_a_stop_request_ends_the_wait_for_a_restart(started: Any, supervisor: Supervisor):
    engine, inner = started(SlowStart())
    engine.completions(0.0)
    assert inner.starting.wait(10.0)
    supervisor.request_stop("SIGTERM")
    with pytest.raises(StopRequested):
        engine.begin_update(1, {})


def test_no_call_waits_for_a_restart_beyond_its_timeout(started: Any):
    engine, inner = started(SlowStart())
    engine.completions(0.0)
    assert inner.starting.wait(10.0)
    engine.submit(_requests(1))
    assert engine.completions(0.01) == engine.evaluation_completions(0.01) == []


def test_an_answer_given_while_another_thread_sees_the_death_is_not_sampled_again(started: Any):
    """`completions` has its answers, and has not returned, when `submit` finds the engine dead."""
    engine, inner = started(DyingEngine())
    engine.submit(_requests(1))
    for _ in range(BUDGET - 1):
        assert engine.completions(0.0) == []
    inside, go_on = Flag(), Flag()
    take = inner.completions

    def slow(timeout_s: float) -> list[Completion]:
        finished = take(timeout_s)
        inside.set()
        assert go_on.wait(10.0)
        return finished

    engine._inner.completions = slow  # type: ignore[method-assign]
    answers: list[Completion] = []
    thread = threading.Thread(target=lambda: answers.extend(engine.completions(0.0)))
    thread.start()
    assert inside.wait(10.0)
    inner.dies_at = {inner.calls + 1}
    engine.submit([GenerationRequest(7, (3,), SamplingParams(max_new_tokens=BUDGET), 7)])
    go_on.set()
    thread.join(10.0)
    _until_it_needs_weights(engine)
    engine.begin_update(1, {})
    assert [answer.request_id for answer in answers] == [0]
    assert [request.request_id for request in inner.submitted[1]] == [7]


def test_attributes_are_those_of_the_engine_within(started: Any):
    engine, _ = started()
    assert (engine.num_threads, engine.rounds_weights, engine.sampled) == (3, False, 0)


def _publisher(engine: RestartingEngine, supervisor: Supervisor, **settings: Any) -> WeightPublisher:
    return WeightPublisher(
        engine, supervisor=supervisor, timeout_s=5.0, needs_weights=lambda: engine.needs_weights, tolerance=1.0, **settings
    )


def _publish(publisher: WeightPublisher, version: int) -> None:
    publisher.publish(version, {"w": torch.zeros(1)}, [0.0])


def test_the_publisher_sends_again_what_was_lost_with_the_engine(started: Any, supervisor: Supervisor):
    engine, inner = started(DyingEngine([4]))
    delivered: list[int] = []
    publisher = _publisher(engine, supervisor, on_delivered=lambda published, served: delivered.append(served))
    _publish(publisher, 1)  # call 3 begins, 4 dies
    publisher.wait_delivered()
    publisher.close()
    assert (inner.starts, inner.version, publisher.served_version, delivered) == (2, 1, 1, [1])


def test_the_publisher_goes_on_with_a_newer_version_after_a_loss(started: Any, supervisor: Supervisor):
    engine, inner = started(DyingEngine([4]))
    publisher = _publisher(engine, supervisor)
    _publish(publisher, 1)
    _publish(publisher, 2)
    publisher.wait_delivered()
    publisher.close()
    assert (inner.version, publisher.served_version, publisher.deliveries) == (2, 2, 1)


def test_an_engine_that_dies_between_deliveries_gets_the_served_version_again_and_nobody_is_told(
    started: Any, supervisor: Supervisor
):
    engine, inner = started(DyingEngine([5]))
    delivered: list[int] = []
    publisher = _publisher(engine, supervisor, on_delivered=lambda published, served: delivered.append(served))
    _publish(publisher, 1)
    publisher.wait_delivered()
    assert not publisher.redeliver_if_lost()
    engine.completions(0.0)  # dies
    _until_it_needs_weights(engine)
    assert publisher.redeliver_if_lost()
    publisher.wait_delivered()
    publisher.close()
    assert (inner.version, delivered) == (1, [1])


def test_with_a_lag_an_engine_that_dies_gets_the_lagged_version_again(started: Any, supervisor: Supervisor):
    engine, inner = started(DyingEngine([5]))
    publisher = _publisher(engine, supervisor, publish_lag=1)
    _publish(publisher, 1)
    _publish(publisher, 2)  # version 1 is served on
    publisher.wait_delivered()
    engine.completions(0.0)  # dies
    _until_it_needs_weights(engine)
    publisher.redeliver_if_lost()
    publisher.wait_delivered()
    assert inner.version == 1
    with publisher.serve_current():
        assert (inner.version, inner.paused) == (2, True)
    publisher.close()
    assert (inner.version, inner.paused) == (1, False)
