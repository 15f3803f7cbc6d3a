"""The vLLM backend against a client in memory: the gate, taking back, pauses, deliveries that fail, engines that hang or die."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_asyncrl.errors import ConfigurationError, EngineDiedError, EngineError, WeightSyncError
from lit_asyncrl.generation import vllm_backend
from lit_asyncrl.generation.rollout import sample_seed
from lit_asyncrl.generation.vllm import VLLMEngine
from lit_asyncrl.generation.vllm_backend import BackendSettings, VLLMBackend
from lit_asyncrl.generation.vllm_interface import Sampled, parse_version
from lit_asyncrl.types import Completion, Example, GenerationRequest, Prompt, Purpose, SamplingParams

PROMPT = (3, 4, 5)
EOS = 1
TOKEN = 7


class FakeVLLM:
    """A `VLLMClient` that samples token 7 of at most `slots` requests at a time, up to `limit` tokens of each.

    Attributes:
        sent: every request as (id, prompt, params, salt, label of the weights when it came).
        asked: names of the other calls, in order.
        faults: by method name, an exception to raise, or None to hang.
    """

    max_model_len, world_size = 64, 1

    def __init__(self, slots: int) -> None:
        self.sent: list[tuple[str, list[int], dict[str, Any], str | None, str]] = []
        self.asked: list[Any] = []
        self.faults: dict[str, Exception | None] = {}
        self.limit, self.label, self.paused, self.stops = 10**6, "default", False, 0
        self._slots = slots
        self._standing = False  # no request gets a slot
        self._live: dict[str, None] = {}
        self._running: set[str] = set()
        self._aborted: set[str] = set()

    async def generate(
        self, request_id: str, token_ids: Sequence[int], params: dict[str, Any], salt: str | None, begun: Any = None
    ) -> Sampled:
        if request_id.startswith("check"):  # five likeliest tokens, one nat apart at temperature 1
            return Sampled([0], [0.0], [-1], "length", {i: -i / params["temperature"] for i in range(5)})
        self.sent.append((request_id, list(token_ids), params, salt, self.label))
        sampled = Sampled([], [], [], "length")
        self._live[request_id] = None
        while len(sampled.token_ids) < params["max_tokens"]:
            await self._ask("generate")
            if request_id in self._aborted:
                sampled.finish_reason = "abort"
                break
            if not self._standing and len(self._running) < self._slots:
                self._running.add(request_id)
            if (
                request_id in self._running
                and not self.paused
                and len(token_ids) - len(PROMPT) + len(sampled.token_ids) < self.limit
            ):
                sampled.token_ids.append(TOKEN)
                sampled.logprobs.append(-0.5)
                sampled.versions.append(parse_version(self.label))
                begun(lambda: Sampled(list(sampled.token_ids), list(sampled.logprobs), list(sampled.versions), ""))
            await asyncio.sleep(0.001)
        del self._live[request_id]
        self._running.discard(request_id)
        return sampled

    async def _ask(self, name: str, *arguments: Any) -> None:
        if name != "generate":
            self.asked.append((name, *arguments) if arguments else name)
        if name in self.faults:
            if (error := self.faults[name]) is not None:
                raise error
            await asyncio.sleep(3600)

    async def start(self) -> None:
        await self._ask("start")

    async def stop(self) -> None:
        self.stops += 1

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        await self._ask("score")
        return [-1.0] * (len(token_ids) - 1)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._aborted.update(request_ids)

    async def pause(self, mode: str, clear_cache: bool) -> None:
        self._standing = True
        self.paused = mode == "keep"
        await self._ask("pause", mode, clear_cache)
        while mode == "wait" and self._running:
            await asyncio.sleep(0.001)

    async def resume(self) -> None:
        await self._ask("resume")
        self.paused = self._standing = False

    async def init_transfer(self, info: dict[str, Any]) -> None:
        await self._ask("init_transfer")

    async def start_update(self) -> None:
        await self._ask("start_update")

    async def update(self, info: dict[str, Any]) -> None:
        await self._ask("update")

    async def finish_update(self, version: str) -> None:
        await self._ask("finish_update")
        self.label = version

    async def set_version(self, version: str) -> None:
        self.label = version

    async def version(self) -> str:
        await self._ask("version")
        return self.label


class FakeSender:
    """Two chunks, the second one read while vLLM stands still."""

    closed = False

    def stage(self, weights: Any) -> bool:
        return False

    def send(self, client: Any, weights: Any) -> None:
        client.start_weight_update()
        client.update_weights({})
        client.finish_weight_update()

    def close(self) -> None:
        self.closed = True


Start = Callable[..., VLLMBackend]


@pytest.fixture
def vllm() -> FakeVLLM:
    return FakeVLLM(slots=2)


@pytest.fixture
def start(vllm: FakeVLLM) -> Iterator[Start]:
    backends: list[VLLMBackend] = []

    def started(in_flight: Any = "keep", prefix_cache: Any = "salt", response_timeout_s: float = 10.0) -> VLLMBackend:
        settings = BackendSettings((EOS,), (3, 4, 5), 4, in_flight, prefix_cache, 10.0, response_timeout_s)
        backends.append(VLLMBackend(vllm, FakeSender(), settings))
        return backends[-1]

    yield started
    for backend in backends:
        backend.stop()


def _requests(ids: Sequence[int], max_new_tokens: int = 6, purpose: Purpose = "train") -> list[GenerationRequest]:
    return [GenerationRequest(i, PROMPT, SamplingParams(max_new_tokens=max_new_tokens), i, purpose) for i in ids]


def _update(backend: VLLMBackend, version: int) -> None:
    backend.begin_update(version, {"a": torch.zeros(1)})
    backend.finish_update(10.0)


def _drain(backend: VLLMBackend, count: int, purpose: Purpose = "train") -> list[Completion]:
    finished: list[Completion] = []
    while len(finished) < count:
        batch = backend.take(purpose, 10.0)
        assert batch, "no completion within the timeout"
        finished += batch
    return sorted(finished, key=lambda completion: completion.request_id)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.001)


def _stand_at(vllm: FakeVLLM, backend: VLLMBackend, tokens: int, number: int) -> None:
    """Submit requests and wait until those vLLM decodes have sampled so many tokens and the slots are taken."""
    vllm.limit = tokens
    backend.submit(_requests(range(number)))
    _until(lambda: len(vllm._live) == min(number, 4))  # 4 slots, of which 2 are decoded
    _until(lambda: len(backend._requests._begun) == min(number, 2))


# ---------------------------------------------------------------- the gate and the salts


def test_vllm_is_given_no_more_requests_than_there_are_slots(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    _stand_at(vllm, backend, 1, 20)
    assert len(vllm.sent) == 4


def test_no_request_goes_out_under_a_salt_of_older_weights(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    _stand_at(vllm, backend, 2, 20)
    _update(backend, 1)
    vllm.limit = 10**6
    _drain(backend, 20)
    salts: dict[str, set[str | None]] = {}
    for _, _, _, salt, label in vllm.sent:
        salts.setdefault(label, set()).add(salt)
    assert sorted(salts) == ["0", "1"]
    assert len(salts["0"]) == len(salts["1"]) == 1
    assert salts["0"] != salts["1"]


def test_requests_whose_prompt_was_not_read_are_taken_back_and_go_again_under_the_new_weights(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    _stand_at(vllm, backend, 2, 4)
    _update(backend, 1)
    vllm.limit = 10**6
    completions = _drain(backend, 4)
    assert [set(completion.token_versions) for completion in completions] == [{0, 1}, {0, 1}, {1}, {1}]
    assert [(sent[0], sent[-1]) for sent in vllm.sent] == [
        ("0-train-0", "0"),
        ("1-train-0", "0"),
        ("2-train-0", "0"),
        ("3-train-0", "0"),
        ("2-train-1", "1"),
        ("3-train-1", "1"),
    ]


def test_a_version_sent_again_after_a_failed_delivery_has_a_salt_of_its_own(vllm: FakeVLLM, start: Start):
    backend = start()
    vllm.faults["update"] = ValueError("no")
    backend.begin_update(5, {})
    with pytest.raises(WeightSyncError):
        backend.finish_update(10.0)
    backend.submit(_requests([0]))
    _drain(backend, 1)
    vllm.faults.clear()
    _update(backend, 5)
    backend.submit(_requests([1]))
    _drain(backend, 1)
    assert vllm.sent[0][3] != vllm.sent[1][3]


def test_without_salt_requests_have_none(vllm: FakeVLLM, start: Start):
    backend = start(prefix_cache="keep")
    _update(backend, 0)
    backend.submit(_requests([0]))
    _drain(backend, 1)
    assert vllm.sent[0][3] is None


@pytest.mark.parametrize(
    ("in_flight", "prefix_cache", "asked"),
    [
        ("keep", "salt", ("pause", "keep", False)),
        ("restart", "salt", ("pause", "keep", True)),
        ("wait", "salt", ("pause", "wait", False)),
        ("wait", "reset", ("pause", "wait", True)),
    ],
)
def test_the_policy_decides_how_vllm_is_paused(vllm: FakeVLLM, start: Start, in_flight: str, prefix_cache: str, asked: Any):
    _update(start(in_flight, prefix_cache), 0)
    assert [call for call in vllm.asked if call[0] == "pause"] == [asked]


def test_wait_lets_responses_end_and_keeps_the_others_back(vllm: FakeVLLM, start: Start):
    backend = start("wait")
    _update(backend, 0)
    _stand_at(vllm, backend, 2, 6)
    backend.submit(_requests([9]))
    threading.Timer(0.05, lambda: setattr(vllm, "limit", 10**6)).start()
    _update(backend, 1)
    versions = [set(completion.token_versions) for completion in _drain(backend, 7)]
    assert versions == [{0}, {0}, {1}, {1}, {1}, {1}, {1}]


def test_evaluation_goes_before_training_and_older_requests_before_younger_ones(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    _stand_at(vllm, backend, 1, 4)
    backend.submit([*_requests([8, 6]), *_requests([7, 5], purpose="evaluation")])
    vllm.limit = 10**6
    _drain(backend, 6)
    assert [sent[0] for sent in vllm.sent[4:]] == ["5-evaluation-0", "7-evaluation-0", "6-train-0", "8-train-0"]


# ---------------------------------------------------------------- pause


def test_a_paused_response_keeps_its_tokens_and_goes_on_with_the_rest_of_its_budget_and_another_seed(
    vllm: FakeVLLM, start: Start
):
    backend = start()
    _update(backend, 0)
    _stand_at(vllm, backend, 2, 1)
    _until(lambda: list(vllm._live) == ["0-train-0"])
    backend.set_paused(True)
    _until(lambda: not vllm._live)
    _update(backend, 1)
    vllm.limit = 10**6
    backend.set_paused(False)
    (completion,) = _drain(backend, 1)
    done = len(vllm.sent[1][1]) - len(PROMPT)  # tokens that had come back
    assert 1 <= done <= 2
    assert completion.token_ids == [TOKEN] * 6
    assert completion.token_versions == [0] * done + [1] * (6 - done)
    assert completion.finish_reason == "length"
    assert vllm.sent[1][2]["max_tokens"] == 6 - done
    assert vllm.sent[1][2]["seed"] != vllm.sent[0][2]["seed"]


def test_evaluation_is_sampled_while_training_is_paused(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    backend.set_paused(True)
    backend.submit([*_requests([0]), *_requests([1], purpose="evaluation")])
    assert [completion.request_id for completion in _drain(backend, 1, "evaluation")] == [1]
    assert [sent[0] for sent in vllm.sent] == ["1-evaluation-0"]


def test_training_tokens_are_counted_and_evaluation_tokens_are_not(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    backend.submit([*_requests([0, 1]), *_requests([2], purpose="evaluation")])
    _drain(backend, 2)
    _drain(backend, 1, "evaluation")
    assert backend.generated_tokens == 12


# ---------------------------------------------------------------- parts of responses


def _tokens(count: int, token: int = 9, version: int = 3) -> Completion:
    return Completion(0, [token] * count, [-0.25] * count, [version] * count, "abort")


def _partial_request(partial: Completion, max_new_tokens: int = 6) -> GenerationRequest:
    return GenerationRequest(0, PROMPT, SamplingParams(max_new_tokens=max_new_tokens), 0, partial=partial)


def test_unfinished_training_responses_are_given_with_the_version_of_every_token(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    _stand_at(vllm, backend, 2, 2)
    _until(lambda: backend.generated_tokens == 4)
    _update(backend, 1)
    vllm.limit = 3
    _until(lambda: backend.generated_tokens == 6)
    partials = sorted(backend.partial_completions(), key=lambda partial: partial.request_id)
    assert partials == [Completion(i, [TOKEN] * 3, [-0.5] * 3, [0, 0, 1], "abort") for i in range(2)]


def test_responses_without_a_token_and_evaluation_responses_are_not_among_the_partial_ones(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    vllm.limit = 1
    backend.submit(_requests([5], purpose="evaluation"))
    _until(lambda: bool(backend._requests._begun))
    vllm.limit = 0
    backend.submit(_requests([0, 1]))
    _until(lambda: len(vllm._live) == 3)
    assert backend.partial_completions() == []


def test_finished_responses_that_nobody_took_are_among_the_partial_ones_until_they_are_taken(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    backend.submit(_requests([0]))
    _until(lambda: bool(backend._finished["train"]))
    (finished,) = backend.partial_completions()
    assert finished.finish_reason == "length"
    assert _drain(backend, 1) == [finished]
    assert backend.partial_completions() == []


def test_partial_responses_outlive_the_engine_s_death_and_stop_and_stay_counted(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    _stand_at(vllm, backend, 2, 2)
    _until(lambda: backend.generated_tokens == 4)
    vllm.faults["generate"] = EngineDiedError("killed")
    with pytest.raises(EngineDiedError, match="killed"):
        backend.take("train", 10.0)
    for _ in range(2):
        assert sorted((p.request_id, len(p.token_ids)) for p in backend.partial_completions()) == [(0, 2), (1, 2)]
        assert backend.generated_tokens == 4
        backend.stop()


def test_a_request_goes_on_after_its_partial_with_the_rest_of_its_budget_and_a_moved_seed(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 4)
    backend.submit([_partial_request(_tokens(2))])
    (completion,) = _drain(backend, 1)
    assert completion == Completion(0, [9, 9] + [TOKEN] * 4, [-0.25] * 2 + [-0.5] * 4, [3, 3] + [4] * 4, "length")
    _, prompt, params, _, _ = vllm.sent[0]
    assert prompt == [*PROMPT, 9, 9]
    assert params["max_tokens"] == 4
    assert params["seed"] != _partial_request(_tokens(2)).seed
    assert backend.generated_tokens == 4  # the two were sampled by another engine


def test_responses_of_a_group_that_go_on_have_seeds_of_their_own(vllm: FakeVLLM, start: Start):
    """Whatever index and number of sampled tokens: as many seeds as responses."""
    prompt = Prompt(0, Example("p", "a", "t", 0), 0, tuple(PROMPT), 0, 0, 7)
    backend = start()
    _update(backend, 4)
    pairs = [(index, done) for index in range(4) for done in range(1, 5)]
    for number, (index, done) in enumerate(pairs):
        partial = replace(_tokens(done), request_id=number)
        request = replace(_partial_request(partial), request_id=number, seed=sample_seed(prompt, index))
        backend.submit([request])
    _drain(backend, len(pairs))
    seeds = {params["seed"] for _, _, params, _, _ in vllm.sent}
    assert len(seeds) == len(pairs)
    assert seeds.isdisjoint(sample_seed(prompt, index) for index in range(10))


@pytest.mark.parametrize(("partial", "reason"), [(_tokens(6), "length"), (_tokens(2, token=EOS), "stop")])
def test_a_partial_that_has_ended_is_answered_as_it_is(vllm: FakeVLLM, start: Start, partial: Completion, reason: str):
    backend = start()
    _update(backend, 4)
    backend.submit([_partial_request(partial)])
    (completion,) = _drain(backend, 1)
    assert (completion.token_ids, completion.token_versions) == (partial.token_ids, partial.token_versions)
    assert completion.finish_reason == reason
    assert vllm.sent == []


# ---------------------------------------------------------------- deliveries that fail


@pytest.mark.parametrize("method", ["pause", "start_update", "update", "finish_update"])
def test_a_call_that_raises_in_an_update_is_named_and_generation_goes_on(vllm: FakeVLLM, start: Start, method: str):
    backend = start()
    _update(backend, 0)
    vllm.faults[method] = RuntimeError("the reason")
    backend.begin_update(1, {})
    with pytest.raises(WeightSyncError, match=r"version 1.*RuntimeError: the reason"):
        backend.finish_update(10.0)
    assert vllm.asked.count("resume") == 2
    backend.submit(_requests([0]))
    assert len(_drain(backend, 1)) == 1


def test_tokens_after_a_failed_delivery_carry_its_version_not_the_proved_one(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    vllm.faults["finish_update"] = RuntimeError("torn")
    backend.begin_update(1, {})
    with pytest.raises(WeightSyncError):
        backend.finish_update(10.0)
    backend.submit(_requests([0]))
    assert set(_drain(backend, 1)[0].token_versions) == {1}


def test_a_good_update_after_a_refused_one_is_served(vllm: FakeVLLM, start: Start):
    backend = start()
    vllm.faults["update"] = ValueError("refused")
    backend.begin_update(1, {})
    with pytest.raises(WeightSyncError):
        backend.finish_update(10.0)
    vllm.faults.clear()
    backend.begin_update(2, {})
    assert backend.finish_update(10.0).version == 2


def test_an_engine_that_stays_paused_has_failed(vllm: FakeVLLM, start: Start):
    backend = start()
    _update(backend, 0)
    vllm.faults["resume"] = RuntimeError("stuck")
    backend.begin_update(1, {})
    with pytest.raises(WeightSyncError, match="stuck"):
        backend.finish_update(10.0)
    with pytest.raises(EngineError, match="stuck"):
        backend.take("train", 10.0)


def test_the_first_fault_of_a_delivery_is_reported_also_when_resuming_fails_too(vllm: FakeVLLM, start: Start):
    backend = start()
    vllm.faults |= {"update": RuntimeError("first"), "resume": RuntimeError("second")}
    backend.begin_update(1, {})
    with pytest.raises(WeightSyncError, match="first"):
        backend.finish_update(10.0)


def test_begin_update_returns_when_the_weights_were_read_and_before_they_are_proved(vllm: FakeVLLM, start: Start):
    backend = start()
    vllm.faults["score"] = None
    backend.begin_update(1, {})
    assert "finish_update" in vllm.asked
    with pytest.raises(WeightSyncError, match=r"version 1 within 0\.1 s"):
        backend.finish_update(0.1)
    with pytest.raises(WeightSyncError, match="version 1 was not answered"):
        backend.begin_update(2, {})


def test_weights_that_cannot_be_staged_leave_no_update_behind(start: Start, monkeypatch: pytest.MonkeyPatch):
    backend = start()
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="no room"):
        patch.setattr(FakeSender, "stage", _raise_no_room)
        backend.begin_update(1, {})
    _update(backend, 2)


def _raise_no_room(self: FakeSender, weights: Any) -> bool:
    raise ValueError("no room")


# ---------------------------------------------------------------- life


@pytest.mark.parametrize("method", ["pause", "update", "resume"])
def test_an_engine_that_hangs_in_an_update_is_given_up_after_the_response_timeout(vllm: FakeVLLM, start: Start, method: str):
    backend = start(response_timeout_s=0.1)
    vllm.faults[method] = None
    backend.begin_update(1, {})
    with pytest.raises(WeightSyncError, match=r"within 0\.1 s, and did not"):
        backend.finish_update(10.0)


def test_an_engine_without_any_sign_of_life_in_an_update_has_died(vllm: FakeVLLM, start: Start, monkeypatch: pytest.MonkeyPatch):
    backend = start(response_timeout_s=0.1)
    monkeypatch.setattr(vllm_backend, "HEARTBEAT_S", 0.1)
    vllm.faults |= {"pause": None, "resume": None, "version": None}
    backend.begin_update(1, {})
    with pytest.raises(EngineDiedError, match=r"within 0\.1 s, and did not"):
        backend.finish_update(10.0)


def test_silence_is_counted_from_the_last_answer(vllm: FakeVLLM, start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_backend, "HEARTBEAT_S", 0.01)
    backend = start()
    vllm.faults["version"] = None
    _until(lambda: backend.silent_s > 0.2)
    vllm.faults.clear()
    backend.set_paused(False)
    assert backend.silent_s < 0.1


def test_a_hang_is_noticed_by_the_heartbeat_though_nobody_waits_for_an_answer(
    vllm: FakeVLLM, start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(vllm_backend, "HEARTBEAT_S", 0.01)
    backend = start(response_timeout_s=0.1)
    vllm.faults["version"] = None
    with pytest.raises(EngineDiedError, match=r"sign of life within 0\.1 s"):
        backend.take("train", 10.0)
    with pytest.raises(EngineError, match="sign of life"):
        backend.submit(_requests([0]))


def test_a_death_ends_an_update_that_drains(vllm: FakeVLLM, start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_backend, "HEARTBEAT_S", 0.01)
    backend = start("wait", response_timeout_s=0.1)
    _stand_at(vllm, backend, 2, 2)
    threading.Timer(0.05, lambda: vllm.faults.update({"version": None})).start()
    backend.begin_update(1, {})
    with pytest.raises(EngineDiedError, match="sign of life"):
        backend.finish_update(10.0)


def test_a_request_that_fails_ends_the_engine_with_its_cause(vllm: FakeVLLM, start: Start):
    backend = start()
    vllm.faults["generate"] = RuntimeError("kernel crashed")
    backend.submit(_requests([0]))
    with pytest.raises(EngineError, match="RuntimeError: kernel crashed"):
        backend.take("train", 10.0)


def test_a_start_that_fails_stops_the_client_and_raises_its_error(vllm: FakeVLLM, start: Start):
    vllm.faults["start"] = EngineError("no such model")
    before = threading.active_count()
    with pytest.raises(EngineError, match="no such model"):
        start()
    assert vllm.stops == 1
    assert threading.active_count() == before


def test_raw_logprobs_are_refused_at_start(vllm: FakeVLLM, start: Start, monkeypatch: pytest.MonkeyPatch):
    async def raw(self: FakeVLLM, *arguments: Any) -> Sampled:
        return Sampled([0], [0.0], [-1], "length", {i: -float(i) for i in range(5)})

    monkeypatch.setattr(FakeVLLM, "generate", raw)
    with pytest.raises(EngineError, match="logprobs_mode must be processed_logprobs"):
        start()


def test_stop_is_idempotent_ends_waits_and_threads_and_a_hanging_delivery(vllm: FakeVLLM, start: Start):
    before = threading.active_count()
    backend = start(response_timeout_s=60.0)
    vllm.faults["score"] = None
    backend.begin_update(1, {})
    raised: list[EngineError] = []

    def wait() -> None:
        try:
            backend.take("train", 30.0)
        except EngineError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    started = time.monotonic()
    backend.stop()
    backend.stop()
    thread.join(10.0)
    assert time.monotonic() - started < 5.0
    assert "was stopped" in str(raised[0])
    assert vllm.stops == 1
    assert threading.active_count() == before


# ---------------------------------------------------------------- what the engine refuses before vLLM is imported


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_slots": 0}, r"engine\.num_slots must be positive, got 0"),
        ({"kv_cache_gib": 0.0}, r"engine\.kv_cache_gib must be positive, got 0\.0"),
        ({"in_flight": "keep", "prefix_cache": "reset"}, r"engine\.prefix_cache must be 'salt' or 'keep' with in_flight 'keep'"),
        ({"engine_args": {"seed": 3}}, r"engine\.engine_args must leave out what the engine sets itself, got \['seed'\]"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        VLLMEngine(**settings)


def test_calls_before_start_and_after_stop_are_errors_and_stop_is_not():
    engine = VLLMEngine()
    engine.stop()
    with pytest.raises(EngineError, match="not running"):
        engine.completions(0.1)
