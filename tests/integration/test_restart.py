"""The embedded engine's process killed or stopped in mid-response: it is started anew, and every response is completed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import tiny_models
import torch

from lit_asyncrl.errors import EngineDiedError
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.generation.hf_process import ProcessBackend
from lit_asyncrl.generation.publisher import WeightPublisher
from lit_asyncrl.generation.restarting import RestartingEngine
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import Completion, GenerationRequest, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:The generation engine is started anew")
NUMBER, BUDGET = 250, 60
"""Requests that keep 8 slots busy for a second or more, and most tokens for each."""
EOS_IDS = (1,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def models(folder: str) -> list[Any]:
    """Weights of versions 0 and 1."""
    model = load_model(folder)
    return [model, tiny_models.perturbed(model)]


@pytest.fixture
def inner() -> HFEngine:
    return HFEngine(num_slots=8, in_flight="restart")


@pytest.fixture
def engine(inner: HFEngine, folder: str) -> Iterator[RestartingEngine]:
    engine = RestartingEngine(inner, supervisor=Supervisor(), silent_timeout_s=2.5)
    engine.start(folder, eos_token_ids=EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=128)
    yield engine
    engine.stop()


def _worker(inner: HFEngine) -> psutil.Process:
    backend = inner._backend
    assert isinstance(backend, ProcessBackend)
    return psutil.Process(backend._process.pid)


def _probe(model: Any) -> list[float]:
    return tiny_models.token_logprobs(model, tiny_models.PROBE_IDS[:1], list(tiny_models.PROBE_IDS[1:])).tolist()


def _requests() -> list[GenerationRequest]:
    return [GenerationRequest(i, (5, 6, 3 + i % 17), SamplingParams(max_new_tokens=BUDGET), i) for i in range(NUMBER)]


def _until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.01)


def _has_unfinished(engine: RestartingEngine) -> bool:
    """Whether a response is reported that is really unfinished, not only untaken."""
    partials = engine.partial_completions()
    return any(partial.token_ids[-1] not in EOS_IDS and len(partial.token_ids) < BUDGET for partial in partials)


def _drain(engine: RestartingEngine, count: int) -> list[Completion]:
    finished: list[Completion] = []
    deadline = time.monotonic() + 90.0
    while len(finished) < count:
        assert time.monotonic() < deadline, "not all responses came"
        finished += engine.completions(1.0)
    return sorted(finished, key=lambda completion: completion.request_id)


@pytest.mark.parametrize("fault", ["killed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_an_engine_that_dies_in_mid_response_goes_on_where_it_was(
    engine: RestartingEngine, inner: HFEngine, models: list[Any], fault: str
):
    engine.begin_update(0, named_weights(models[0]))
    engine.finish_update(10.0)
    engine.submit(_requests())
    _until(lambda: _has_unfinished(engine))
    early = engine.completions(0.0)
    worker = _worker(inner)
    worker.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    while not engine.needs_weights:  # as the collector does
        early += engine.completions(0.1)
    reported = {partial.request_id: partial for partial in engine.partial_completions()}
    assert not worker.is_running()
    assert engine.lost_tokens == 0  # what is counted is what was reported
    assert engine.generated_tokens == sum(len(c.token_ids) for c in [*early, *reported.values()])
    engine.begin_update(1, named_weights(models[1]))
    engine.finish_update(10.0)
    completions = sorted([*early, *_drain(engine, NUMBER - len(early))], key=lambda c: c.request_id)

    assert [completion.request_id for completion in completions] == list(range(NUMBER))
    assert reported
    for completion in completions:
        partial = reported.get(completion.request_id)
        if partial is None and completion.request_id % 20:
            continue  # enough of those that the death did not touch
        if partial is not None:
            count = len(partial.token_ids)
            assert completion.token_ids[:count] == partial.token_ids
            assert completion.behavior_logprobs[:count] == partial.behavior_logprobs
            assert completion.token_versions == [0] * count + [1] * (len(completion.token_ids) - count)
        prompt = (5, 6, 3 + completion.request_id % 17)
        plain = [tiny_models.token_logprobs(model, prompt, completion.token_ids) for model in models]
        expected = torch.stack([plain[version][t] for t, version in enumerate(completion.token_versions)])
        torch.testing.assert_close(torch.tensor(completion.behavior_logprobs), expected, atol=1e-4, rtol=0)
    assert engine.generated_tokens == sum(len(completion.token_ids) for completion in completions)


@pytest.mark.slow
def test_the_publisher_brings_the_weights_again_and_responses_are_those_of_an_unbroken_run(
    engine: RestartingEngine, inner: HFEngine, models: list[Any], folder: str
):
    publisher = WeightPublisher(engine, supervisor=Supervisor(), needs_weights=lambda: engine.needs_weights)
    publisher.publish(0, named_weights(models[0]), _probe(models[0]))
    publisher.wait_delivered()
    engine.submit(_requests())
    _until(lambda: _has_unfinished(engine))
    os.kill(_worker(inner).pid, signal.SIGKILL)
    finished: list[Completion] = []
    while len(finished) < NUMBER:
        publisher.redeliver_if_lost()
        finished += engine.completions(0.1)
    publisher.close()
    assert engine.restarts == 1

    inline = HFEngine(mode="inline", num_slots=8)
    inline.start(folder, eos_token_ids=EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=128)
    inline.begin_update(0, named_weights(models[0]))
    inline.submit(_requests())
    unbroken: list[Completion] = []
    while len(unbroken) < NUMBER:
        unbroken += inline.completions(10.0)
    inline.stop()
    tokens = [{c.request_id: c.token_ids for c in completions} for completions in (finished, unbroken)]
    assert tokens[0] == tokens[1]


def test_the_error_of_a_dead_process_says_that_it_died(inner: HFEngine, folder: str, models: list[Any]):
    inner.start(folder, eos_token_ids=EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=128)
    _worker(inner).kill()
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        inner.completions(30.0)
    inner.stop()


@pytest.mark.slow
def test_an_idle_engine_gives_signs_of_life_and_a_stopped_one_does_not(inner: HFEngine, folder: str):
    inner.start(folder, eos_token_ids=EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=128)
    _until(lambda: inner.silent_s > 0.5)
    _until(lambda: inner.silent_s < 0.3)
    _worker(inner).suspend()
    _until(lambda: inner.silent_s > 2.5)
    inner.stop()


def test_stop_ends_a_start_under_way(inner: HFEngine, folder: str):
    errors: list[BaseException] = []

    def start() -> None:
        try:
            inner.start(folder, eos_token_ids=EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=128)
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    _until(lambda: inner._backend is not None)
    worker = _worker(inner)
    inner.stop()
    thread.join(10.0)
    assert [str(error) for error in errors] == ["The generation engine was stopped."]
    assert not worker.is_running()
