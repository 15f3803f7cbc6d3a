"""A real vLLM server on loopback, reached over HTTP: tokens, log-probs, versions, updates in flight, and faults."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
import torch

from lit_asyncrl.errors import ConfigurationError, EngineError, WeightSyncError
from lit_asyncrl.generation.vllm_server import VLLMServerEngine
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.types import Completion, GenerationRequest, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

VOCAB_SIZE = 512
"""Large enough that most responses reach their budget: an end-of-sequence id comes once in about 250 tokens."""
SIZES = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}
EOS_IDS = (1, 2)
MAX_MODEL_LEN = 512
PROMPT = (5, 6, 7)
TOOL = Path(__file__).parents[2] / "tools" / "serve_vllm.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("policy"), head_dim=32, **SIZES)


@pytest.fixture(scope="module")
def models(folder: str) -> list[Any]:
    """The model of version v is the first one with every weight multiplied by 1 + v / 10."""
    first = load_model(folder)
    models = []
    for version in range(6):
        model = type(first)(first.config)
        model.load_state_dict({name: w * (1 + version / 10) for name, w in named_weights(first).items()}, strict=False)
        models.append(model.eval())
    return models


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of the one server of this file: a start takes a minute."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(TOOL), "--model", folder, "--port", "0", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--", "--enforce-eager", "--max-num-seqs", "17"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as tool:
        assert tool.stdout is not None and tool.stderr is not None
        # Its log goes to a pipe that nobody needs to read until it ends without an address.
        reader = _Drain(tool.stderr)
        url = tool.stdout.readline().strip()
        assert url, reader.tail()
        yield url, psutil.Process(tool.pid).children()[0]
        tool.terminate()
        tool.wait(60)


class _Drain:
    def __init__(self, stream: Any) -> None:
        import threading

        self._lines: list[str] = []
        self._thread = threading.Thread(target=lambda: self._lines.extend(stream), daemon=True)
        self._thread.start()

    def tail(self) -> str:
        self._thread.join(10.0)
        return "".join(self._lines[-30:])


@pytest.fixture
def start(server: tuple[str, psutil.Process], folder: str, models: list[Any]) -> Iterator[Callable[..., VLLMServerEngine]]:
    """Starts an engine at the server, with version 0 delivered."""
    engines: list[VLLMServerEngine] = []

    def started(eos_ids: tuple[int, ...] = EOS_IDS, **settings: Any) -> VLLMServerEngine:
        engines.append(VLLMServerEngine(urls=[server[0]], **({"num_slots": 8} | settings)))
        engines[-1].start(folder, eos_token_ids=eos_ids, probe_ids=tiny_models.PROBE_IDS, max_model_len=MAX_MODEL_LEN)
        _update(engines[-1], models, 0)
        return engines[-1]

    yield started
    for engine in engines:
        engine.stop()


def _update(engine: VLLMServerEngine, models: list[Any], version: int) -> Any:
    engine.begin_update(version, named_weights(models[version]))
    return engine.finish_update(60.0)


def _requests(count: int, purpose: Any = "train", first: int = 0, **sampling: Any) -> list[GenerationRequest]:
    """Budgets of 10, 20, ... 80 tokens."""
    return [
        GenerationRequest(
            i, (*PROMPT, 3 + i % 9), SamplingParams(**({"max_new_tokens": 10 + 10 * (i % 8)} | sampling)), i, purpose
        )
        for i in range(first, first + count)
    ]


def _sample_around_an_update(engine: VLLMServerEngine, models: list[Any], version: int, *, mixed: bool) -> list[Completion]:
    """Responses of which some were sampled before an update from version 0, and some after it; if `mixed`, one by both.

    Whether the update comes in time is a matter of chance on a busy machine: more requests are tried until it does.
    """
    for count in (16, 32, 64, 128):
        _update(engine, models, 0)
        # When the first has ended, the others of the first eight are under way for a while.
        engine.submit(
            [r for i in range(count) for r in _requests(1, first=i, max_new_tokens=20 if i == 0 else 250 + 10 * (i % 16))]
        )
        finished = _take(engine.completions, 1)
        _update(engine, models, version)
        finished += _take(engine.completions, count - len(finished))
        kinds = [set(completion.token_versions) for completion in finished]
        if {0} in kinds and {version} in kinds and ({0, version} in kinds or not mixed):
            return finished
    raise AssertionError("no update came in time")


def _take(take: Callable[[float], list[Completion]], count: int) -> list[Completion]:
    finished: list[Completion] = []
    while len(finished) < count:
        batch = take(60.0)
        assert batch, "no completion within the timeout"
        finished += batch
    return sorted(finished, key=lambda completion: completion.request_id)


def _errors(completion: Completion, models: list[Any], temperature: float = 1.0) -> dict[int, float]:
    """By version, the largest difference between recorded log-probs and those of a forward over the whole sequence."""
    prompt = (*PROMPT, 3 + completion.request_id % 9)
    largest: dict[int, float] = {}
    for version in set(completion.token_versions):
        exact = tiny_models.token_logprobs(models[version], prompt, completion.token_ids, temperature)
        difference = (exact - torch.tensor(completion.behavior_logprobs)).abs()
        largest[version] = float(difference[torch.tensor(completion.token_versions) == version].max())
    return largest


def _probe(model: Any) -> torch.Tensor:
    return tiny_models.token_logprobs(model, tiny_models.PROBE_IDS[:1], list(tiny_models.PROBE_IDS[1:]))


def _post(url: str, body: Any = None) -> None:
    request = urllib.request.Request(
        url, data=b"" if body is None else json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30):
        pass


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_every_logprob_is_that_of_a_plain_forward(start: Any, models: list[Any], temperature: float):
    engine = start()
    engine.submit(_requests(16, temperature=temperature))
    for completion in _take(engine.completions, 16):
        assert set(completion.token_versions) == {0}
        assert _errors(completion, models, temperature)[0] < 1e-4


def test_responses_end_at_any_of_several_ids_or_at_their_budget(start: Any):
    ends = tuple(range(0, VOCAB_SIZE, 16))  # 32 of 512 ids
    engine = start(ends)
    engine.submit(_requests(24))
    reasons = set()
    for completion in _take(engine.completions, 24):
        reasons.add(completion.finish_reason)
        assert not set(completion.token_ids[:-1]) & set(ends)
        assert (completion.token_ids[-1] in ends) == (completion.finish_reason == "stop")
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 10 + 10 * (completion.request_id % 8)
    assert reasons == {"stop", "length"}


def test_a_seed_gives_the_same_response_again(start: Any):
    engine = start()
    engine.submit(_requests(4))
    first = _take(engine.completions, 4)
    engine.submit(_requests(4))
    assert [c.token_ids for c in _take(engine.completions, 4)] == [c.token_ids for c in first]


def test_an_update_is_proved_by_the_logprobs_of_the_new_weights(start: Any, models: list[Any]):
    report = _update(start(), models, 5)
    assert report.version == 5
    torch.testing.assert_close(torch.tensor(report.probe_logprobs), _probe(models[5]), atol=1e-4, rtol=0)


def test_weights_travel_through_a_folder_that_is_empty_afterwards(start: Any, tmp_path: Path, models: list[Any]):
    engine = start(shared_folder=str(tmp_path))
    report = _update(engine, models, 4)
    torch.testing.assert_close(torch.tensor(report.probe_logprobs), _probe(models[4]), atol=1e-4, rtol=0)
    engine.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("in_flight", ["keep", "restart", "wait"])
def test_an_update_in_flight_does_what_the_policy_says(start: Any, models: list[Any], in_flight: str):
    engine = start(in_flight=in_flight)
    finished = _sample_around_an_update(engine, models, 1, mixed=in_flight != "wait")
    mixed = [completion for completion in finished if set(completion.token_versions) == {0, 1}]
    for completion in finished:
        assert completion.token_versions == sorted(completion.token_versions)
        exact = (0, 1) if in_flight != "keep" or completion not in mixed else (0,)
        assert all(error < 1e-4 for version, error in _errors(completion, models).items() if version in exact)
    assert bool(mixed) == (in_flight != "wait")


def test_with_keep_a_token_after_the_update_is_sampled_over_the_old_cache(start: Any, models: list[Any]):
    engine = start(in_flight="keep")
    finished = _sample_around_an_update(engine, models, 5, mixed=True)
    mixed = [completion for completion in finished if set(completion.token_versions) == {0, 5}]
    assert max(_errors(completion, models)[5] for completion in mixed) > 1e-3


def test_paused_training_stands_still_beside_evaluation_and_goes_on(start: Any, models: list[Any]):
    engine = start()
    engine.submit(_requests(8))
    engine.pause()
    ended = engine.completions(0.0)  # before the pause
    engine.submit(_requests(3, "evaluation", first=100, top_k=5, top_p=0.9))
    assert len(_take(engine.evaluation_completions, 3)) == 3
    assert engine.completions(0.05) == []
    engine.resume()
    finished = ended + _take(engine.completions, 8 - len(ended))
    assert sorted(c.request_id for c in finished) == list(range(8))
    assert all(_errors(completion, models)[0] < 1e-4 for completion in finished)


def test_restricted_sampling_is_refused_in_training(start: Any):
    with pytest.raises(ConfigurationError, match="top_p"):
        start().submit(_requests(1, top_p=0.9))


@pytest.mark.parametrize(
    ("fault", "words"),
    [("missing", "1 missing"), ("unknown", "nonsense"), ("misshapen", "dimension|shape")],
)
def test_a_failed_update_raises_and_the_next_one_succeeds(start: Any, models: list[Any], fault: str, words: str):
    engine = start()
    weights = dict(named_weights(models[1]))
    name = "model.layers.1.mlp.down_proj.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        weights["model.nonsense.weight"] = torch.zeros(3)
    else:
        weights[name] = weights[name].T.contiguous()
    engine.begin_update(1, weights)
    with pytest.raises(WeightSyncError, match=f"version 1, and refused.*{words}"):
        engine.finish_update(60.0)
    report = _update(engine, models, 2)
    assert report.version == 2
    torch.testing.assert_close(torch.tensor(report.probe_logprobs), _probe(models[2]), atol=1e-4, rtol=0)


def test_a_server_left_paused_in_an_update_is_taken_over(start: Any, server: tuple[str, psutil.Process], models: list[Any]):
    url, _ = server
    _post(f"{url}/pause?mode=keep&clear_cache=false")
    _post(f"{url}/start_weight_update")
    engine = start()
    engine.submit(_requests(2))
    assert all(_errors(completion, models)[0] < 1e-4 for completion in _take(engine.completions, 2))


def test_stopping_takes_requests_back_and_another_engine_can_start(start: Any, server: tuple[str, psutil.Process]):
    engine = start()
    engine.submit(_requests(16, max_new_tokens=100))
    engine.stop()
    engine.stop()
    again = start()
    again.submit(_requests(1))
    assert len(_take(again.completions, 1)) == 1


@pytest.mark.parametrize(
    ("settings", "model", "length", "words"),
    [
        ({"dtype": "bfloat16"}, {}, 64, r"engine\.dtype must be that of the server, got bfloat16 and float32.*--dtype bfloat16"),
        ({"transport": "nccl"}, {}, 64, r"engine\.transport .*got nccl and shared_memory.*--weight-transfer-config"),
        ({"num_slots": 17}, {}, 64, r"engine\.num_slots .*got 17 for it and 17.*--max-num-seqs 18"),
        ({}, {}, 513, r"engine\.urls .*513 tokens, got max_model_len 512.*--max-model-len 513"),
        ({}, {"vocab_size": VOCAB_SIZE + 1}, 64, r"vocabulary of 513 ids.*does not know id 512"),
        ({}, {"vocab_size": VOCAB_SIZE - 1}, 64, r"vocabulary of 511 ids.*knows id 511"),
    ],
    ids=["dtype", "transport", "slots", "length", "larger vocabulary", "smaller vocabulary"],
)
def test_a_server_that_does_not_fit_is_refused_at_start(
    server: tuple[str, psutil.Process], tmp_path: Path, settings: Any, model: Any, length: int, words: str
):
    policy = tiny_models.save_qwen3(tmp_path, **({"head_dim": 32} | SIZES | model))
    engine = VLLMServerEngine(urls=[server[0]], **({"num_slots": 8} | settings))
    with pytest.raises(ConfigurationError, match=words):
        engine.start(policy, eos_token_ids=EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=length)


@pytest.mark.parametrize("which", ["server", "engine core"])
def test_a_stopped_server_is_an_error_within_the_timeout(start: Any, server: tuple[str, psutil.Process], which: str):
    _, process = server
    engine = start(response_timeout_s=2.0)
    stopped = process if which == "server" else _engine_core(process)
    stopped.suspend()
    try:
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"within 2\.0 s"):
            while time.monotonic() - began < 20.0:
                engine.completions(1.0)
        assert time.monotonic() - began < 10.0
        engine.stop()
    finally:
        stopped.resume()


def _engine_core(server: psutil.Process) -> psutil.Process:
    return next(child for child in server.children(recursive=True) if "EngineCore" in " ".join(child.cmdline()))


def test_a_killed_server_is_an_error_within_seconds(start: Any, server: tuple[str, psutil.Process], folder: str):
    """The last test of this file: no server is left after it."""
    url, process = server
    engine = start()
    engine.submit(_requests(8, max_new_tokens=100))
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"connection to the vLLM server at {url} failed"):
        while time.monotonic() - began < 20.0:
            engine.completions(1.0)
    assert time.monotonic() - began < 5.0
    with pytest.raises(ConfigurationError, match=f"servers that are up, got {url}"):
        VLLMServerEngine(urls=[url], start_timeout_s=1.0).start(
            folder, eos_token_ids=EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=64
        )
