"""The embedded engine in its own process: results, faults, and nothing left behind. Real processes, real transformers."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
import torch

from lit_asyncrl.errors import EngineError, WeightSyncError
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.generation.publisher import WeightPublisher
from lit_asyncrl.generation.transport import SharedTensors
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import Completion, GenerationRequest, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    return load_model(folder)


@pytest.fixture(scope="module")
def shared_engine(folder: str, model: Any) -> Iterator[HFEngine]:
    """For tests that leave the process alive: starting one takes seconds."""
    engine = _started("process", folder, model)
    yield engine
    engine.stop()


@pytest.fixture
def engine(folder: str, model: Any) -> Iterator[HFEngine]:
    engine = _started("process", folder, model)
    yield engine
    engine.stop()


@pytest.fixture
def start(folder: str, model: Any) -> Iterator[Callable[[str], HFEngine]]:
    """Starts an engine with a policy for responses in flight."""
    engines: list[HFEngine] = []

    def started(in_flight: str) -> HFEngine:
        engines.append(_started("process", folder, model, in_flight=in_flight))
        return engines[-1]

    yield started
    for engine in engines:
        engine.stop()


def _started(mode: Any, folder: str, model: Any, **settings: Any) -> HFEngine:
    engine = HFEngine(mode=mode, num_slots=8, **settings)
    engine.start(folder, eos_token_ids=tiny_models.EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=64)
    engine.begin_update(0, named_weights(model))
    engine.finish_update(10.0)
    return engine


def _requests(count: int, purpose: Any = "train") -> list[GenerationRequest]:
    return [GenerationRequest(i, (5, 6, 3 + i % 9), SamplingParams(max_new_tokens=20), i, purpose) for i in range(count)]


def _drain(take: Callable[[float], list[Completion]], count: int) -> list[Completion]:
    finished: list[Completion] = []
    while len(finished) < count:
        batch = take(10.0)
        assert batch, "no completion within the timeout"
        finished += batch
    return sorted(finished, key=lambda completion: completion.request_id)


def _workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "lit_asyncrl.generation.hf_worker" in child.cmdline()]


def _seconds_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "condition not met in time"
        time.sleep(0.01)
    return time.monotonic() - started


def test_the_process_samples_exactly_what_the_inline_engine_samples(shared_engine: HFEngine, folder: str, model: Any):
    inline = _started("inline", folder, model)
    inline.submit(_requests(40))
    shared_engine.submit(_requests(40))
    assert _drain(shared_engine.completions, 40) == _drain(inline.completions, 40)
    inline.stop()


def test_an_update_is_proved_by_the_logprobs_of_the_new_weights(shared_engine: HFEngine, model: Any):
    weights = {name: tensor + 0.05 for name, tensor in named_weights(model).items()}
    shared_engine.begin_update(5, weights)
    report = shared_engine.finish_update(10.0)
    changed = type(model)(model.config)
    changed.load_state_dict(weights, strict=False)
    expected = tiny_models.token_logprobs(changed.eval(), tiny_models.PROBE_IDS[:1], list(tiny_models.PROBE_IDS[1:]))
    assert report.version == 5
    torch.testing.assert_close(torch.tensor(report.probe_logprobs), expected, atol=1e-5, rtol=0)


def test_a_refused_update_leaves_the_engine_serving(shared_engine: HFEngine, model: Any):
    shared_engine.begin_update(6, {"nonsense": torch.zeros(3)})
    with pytest.raises(WeightSyncError, match=r"version 6.*unknown \['nonsense'\]"):
        shared_engine.finish_update(10.0)
    shared_engine.begin_update(7, named_weights(model))
    assert shared_engine.finish_update(10.0).version == 7


def test_evaluation_goes_on_while_training_is_paused(shared_engine: HFEngine):
    shared_engine.pause()
    shared_engine.submit([*_requests(3), GenerationRequest(9, (5,), SamplingParams(top_k=2), 0, "evaluation")])
    assert len(_drain(shared_engine.evaluation_completions, 1)) == 1
    assert shared_engine.completions(0.05) == []
    shared_engine.resume()
    assert len(_drain(shared_engine.completions, 3)) == 3


@pytest.mark.parametrize("in_flight", [pytest.param("wait", marks=pytest.mark.slow), "restart"])
def test_every_token_has_the_logprob_of_its_version_around_an_update(
    start: Callable[[str], HFEngine], model: Any, in_flight: str
):
    engine = start(in_flight)
    changed = type(model)(model.config)
    changed.load_state_dict({name: tensor * 1.1 for name, tensor in model.state_dict().items()})
    requests = _requests(400)
    engine.submit(requests)
    early = engine.completions(10.0)  # responses are in flight, and requests wait for a slot
    engine.begin_update(1, named_weights(changed))
    engine.finish_update(10.0)
    completions = [*early, *_drain(engine.completions, 400 - len(early))]
    versions = {tuple(sorted(set(completion.token_versions))) for completion in completions}
    assert versions == ({(0,), (1,)} if in_flight == "wait" else {(0,), (0, 1), (1,)})
    for completion in completions:
        prompt = requests[completion.request_id].prompt_ids
        plain = [tiny_models.token_logprobs(m, prompt, completion.token_ids) for m in (model, changed.eval())]
        expected = torch.stack([plain[version][t] for t, version in enumerate(completion.token_versions)])
        torch.testing.assert_close(torch.tensor(completion.behavior_logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_an_update_that_waits_does_not_wait_for_paused_responses(start: Callable[[str], HFEngine], model: Any):
    engine = start("wait")
    engine.submit(_requests(400))
    early = engine.completions(10.0)
    engine.pause()
    engine.begin_update(1, named_weights(model))
    assert engine.finish_update(10.0).version == 1
    engine.resume()
    completions = [*early, *_drain(engine.completions, 400 - len(early))]
    assert {version for completion in completions for version in completion.token_versions} == {0, 1}


def test_a_transport_that_acknowledges_without_writing_is_caught_by_the_probe(
    shared_engine: HFEngine, model: Any, monkeypatch: pytest.MonkeyPatch
):
    shared_engine.begin_update(8, named_weights(model))
    shared_engine.finish_update(10.0)
    weights = {name: tensor * 1.01 for name, tensor in named_weights(model).items()}
    changed = type(model)(model.config)
    changed.load_state_dict(weights, strict=False)
    probe = tiny_models.token_logprobs(changed.eval(), tiny_models.PROBE_IDS[:1], list(tiny_models.PROBE_IDS[1:])).tolist()
    monkeypatch.setattr(SharedTensors, "write", lambda self, weights: None)
    publisher = WeightPublisher(shared_engine, supervisor=Supervisor(), timeout_s=10.0)
    publisher.publish(9, weights, probe)
    with pytest.raises(WeightSyncError, match="version 9"):
        publisher.wait_delivered()
    publisher.close()


def test_counters_report_tokens_and_where_time_went(shared_engine: HFEngine):
    before = shared_engine.generated_tokens
    shared_engine.submit(_requests(10))
    sampled = sum(len(completion.token_ids) for completion in _drain(shared_engine.completions, 10))
    assert shared_engine.generated_tokens - before == sampled
    assert shared_engine.busy_s > 0
    assert shared_engine.idle_s > 0


@pytest.mark.slow
def test_the_worker_imports_neither_lightning_nor_torchrl():
    code = "import sys, lit_asyncrl.generation.hf_worker; print([m for m in ('lightning', 'torchrl') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == "[]"


def test_a_killed_process_ends_a_waiting_call_within_a_second_and_names_the_signal(engine: HFEngine):
    raised: list[tuple[float, EngineError]] = []

    def wait() -> None:
        try:
            engine.completions(30.0)
        except EngineError as error:
            raised.append((time.monotonic(), error))

    thread = threading.Thread(target=wait)
    thread.start()
    killed = time.monotonic()
    os.kill(_workers()[-1].pid, signal.SIGKILL)
    thread.join(10.0)
    assert raised[0][0] - killed < 1.0
    assert "SIGKILL" in str(raised[0][1])
    with pytest.raises(EngineError, match="SIGKILL"):
        engine.submit(_requests(1))


def test_a_stopped_process_makes_the_delivery_time_out_and_is_ended_by_stop(engine: HFEngine, model: Any):
    worker = _workers()[-1]
    worker.suspend()
    engine.begin_update(1, named_weights(model))
    with pytest.raises(WeightSyncError, match=r"version 1 within 0\.2 s"):
        engine.finish_update(0.2)
    with pytest.raises(WeightSyncError, match="version 1 was not answered"):
        engine.begin_update(2, named_weights(model))
    engine.stop()
    assert not worker.is_running()


def test_signals_to_the_process_group_do_not_end_the_engine(shared_engine: HFEngine):
    worker = _workers()[0]
    worker.send_signal(signal.SIGINT)
    worker.send_signal(signal.SIGTERM)
    shared_engine.submit(_requests(3))
    assert len(_drain(shared_engine.completions, 3)) == 3


@pytest.mark.slow
def test_stop_is_idempotent_leaves_no_process_and_no_descriptor_and_start_works_again(folder: str, model: Any):
    engine = HFEngine()
    process = psutil.Process()
    before = (len(_workers()), process.num_fds(), threading.active_count())
    for _ in range(2):
        engine.start(folder, eos_token_ids=tiny_models.EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=64)
        engine.begin_update(0, named_weights(model))
        engine.finish_update(10.0)
        engine.stop()
        engine.stop()
    assert (len(_workers()), process.num_fds(), threading.active_count()) == before


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_an_engine_error_with_the_cause(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(EngineError, match="no-such-model"):
        HFEngine().start(str(tmp_path), eos_token_ids=[1], probe_ids=[3, 4], max_model_len=64)


def test_a_start_that_takes_too_long_ends_with_an_error_and_no_process(folder: str):
    before = len(_workers())
    with pytest.raises(EngineError, match="ready within"):
        HFEngine(start_timeout_s=0.01).start(folder, eos_token_ids=[1], probe_ids=[3, 4], max_model_len=64)
    assert len(_workers()) == before


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_worker(folder: str):
    code = f"""
import sys, time
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.generation.publisher import WeightPublisher
from lit_asyncrl.generation.transport import SharedTensors
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.types import GenerationRequest, SamplingParams
engine = HFEngine()
engine.start({folder!r}, eos_token_ids=[1], probe_ids=[3, 4], max_model_len=128)
engine.begin_update(0, named_weights(load_model({folder!r})))
engine.submit([GenerationRequest(i, (5,), SamplingParams(max_new_tokens=100), i) for i in range(100_000)])
print("decoding", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "decoding\n"
        worker = psutil.Process(trainer.pid).children()[0]
        trainer.kill()
    assert _seconds_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE) < 5.0
