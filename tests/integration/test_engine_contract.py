"""What every generation engine does, in one file for all of them: real models, real weights, real processes.

The reference is a plain transformers forward. Each engine is started once for the whole file, and once more by the last test.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from lit_asyncrl.errors import ConfigurationError, EngineError, WeightSyncError
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.policy import load_model, load_tokenizer, named_weights
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, Purpose, SamplingParams

EOS_IDS = (1, 2)
MAX_MODEL_LEN = 96
BUDGET = 24
SLOTS = 8
# A block of 32 tokens and a rest, so that engines that cache prefixes have something to share.
PROMPTS = [tuple(3 + (7 * i + j) % 50 for j in range(35)) for i in range(3)]


def _inline(url: str) -> GenerationEngine:
    return HFEngine(mode="inline", num_slots=SLOTS)


def _process(url: str) -> GenerationEngine:
    return HFEngine(mode="process", num_slots=SLOTS)


def _vllm(url: str) -> GenerationEngine:
    from lit_asyncrl.generation.vllm import VLLMEngine

    return VLLMEngine(num_slots=SLOTS, kv_cache_gib=0.05)


def _server(url: str) -> GenerationEngine:
    from lit_asyncrl.generation.vllm_server import VLLMServerEngine

    return VLLMServerEngine(urls=[url], num_slots=SLOTS)


def _needs_vllm(make: Callable[[str], GenerationEngine]) -> Any:
    return pytest.param(make, marks=[pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)], id=make.__name__[1:])


ENGINES = [pytest.param(_inline, id="inline"), pytest.param(_process, id="process"), _needs_vllm(_vllm), _needs_vllm(_server)]


class Served:
    """An engine with the weights it was given, version by version."""

    def __init__(self, engine: GenerationEngine, folder: str) -> None:
        self.engine = engine
        self.models: dict[int, Any] = {}
        self._folder = folder
        self._request_ids = 0

    def start(self) -> None:
        self.engine.start(self._folder, eos_token_ids=EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=MAX_MODEL_LEN)
        self.update(load_model(self._folder))

    def update(self, model: Any) -> DeliveryReport:
        version = len(self.models)
        self.models[version] = model
        self.engine.begin_update(version, named_weights(model))
        return self.engine.finish_update(60.0)

    def requests(self, number: int, purpose: Purpose = "train", seed: int = 0, **sampling: Any) -> list[GenerationRequest]:
        params = SamplingParams(**({"max_new_tokens": BUDGET} | sampling))
        first, self._request_ids = self._request_ids, self._request_ids + number
        return [GenerationRequest(first + i, PROMPTS[i % len(PROMPTS)], params, seed + i, purpose) for i in range(number)]

    def sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Submit, and return the completions in the order of the requests."""
        self.engine.submit(requests)
        return self.drain(len(requests), requests[0].purpose)

    def drain(self, number: int, purpose: Purpose = "train") -> list[Completion]:
        take = self.engine.completions if purpose == "train" else self.engine.evaluation_completions
        finished: list[Completion] = []
        while len(finished) < number:
            batch = take(60.0)
            assert batch, "no completion within the timeout"
            finished += batch
        return sorted(finished, key=lambda completion: completion.request_id)

    def expected(self, request: GenerationRequest, completion: Completion) -> torch.Tensor:
        """Every token's log-prob by a plain forward of its version."""
        versions = {
            version: tiny_models.token_logprobs(
                self.models[version], request.prompt_ids, completion.token_ids, request.sampling.temperature or 1.0
            )
            for version in set(completion.token_versions)
        }
        return torch.stack([versions[version][t] for t, version in enumerate(completion.token_versions)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("policy")
    load_tokenizer("tiny-reverse10").save_pretrained(folder)  # a server does not start without one
    return tiny_models.save_llama(folder, head_dim=32, vocab_size=64, max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, folder: str) -> Iterator[Served]:
    with _serving(folder) if request.param is _server else contextlib.nullcontext("") as url:
        served = Served(request.param(url), folder)
        served.start()
        yield served
        served.engine.stop()


@contextlib.contextmanager
def _serving(folder: str) -> Iterator[str]:
    """A vLLM server on loopback; yields its address."""
    tool = Path(__file__).parents[2] / "tools" / "serve_vllm.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(tool), "--model", folder, "--port", "0", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--", "--enforce-eager", "--max-num-seqs", str(SLOTS + 1)]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as server,
    ):
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        log.seek(0)
        assert url, log.read()[-3000:]
        yield url
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_every_token_of_the_same_weights_has_a_ratio_of_one(served: Served, temperature: float):
    requests = served.requests(24, temperature=temperature)
    for request, completion in zip(requests, served.sample(requests), strict=True):
        ratio = (served.expected(request, completion) - torch.tensor(completion.behavior_logprobs)).exp()
        assert (ratio - 1).abs().max() <= 1e-3


def test_temperature_zero_takes_the_likeliest_token_and_gives_logprobs_of_temperature_one(served: Served):
    (request,) = requests = served.requests(1, temperature=0.0)
    (completion,) = served.sample(requests)
    model = served.models[completion.token_versions[0]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*request.prompt_ids, *completion.token_ids]])).logits[0]
    assert completion.token_ids == logits[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist()
    torch.testing.assert_close(
        torch.tensor(completion.behavior_logprobs), served.expected(request, completion), atol=1e-4, rtol=0
    )


def test_a_response_ends_with_the_first_of_several_end_ids_or_with_its_budget(served: Served):
    completions = served.sample(served.requests(60))
    ended_by = {completion.token_ids[-1] for completion in completions if completion.finish_reason == "stop"}
    assert ended_by == set(EOS_IDS)
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(EOS_IDS)
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == BUDGET
            assert completion.token_ids[-1] not in EOS_IDS
        else:
            assert completion.finish_reason == "stop"
            assert completion.token_ids[-1] in EOS_IDS


def test_lists_of_a_completion_have_one_entry_per_token(served: Served):
    for completion in served.sample(served.requests(12)):
        assert len(completion.token_ids) == len(completion.behavior_logprobs) == len(completion.token_versions)


def test_a_budget_of_one_token_gives_one_token(served: Served):
    assert [len(completion.token_ids) for completion in served.sample(served.requests(3, max_new_tokens=1))] == [1, 1, 1]


def test_the_same_seed_gives_the_same_tokens_and_samples_of_one_prompt_differ(served: Served):
    first, second = (served.sample(served.requests(12, seed=5)) for _ in range(2))
    assert [completion.token_ids for completion in first] == [completion.token_ids for completion in second]
    assert len({tuple(completion.token_ids) for completion in first[:: len(PROMPTS)]}) == 4


@pytest.mark.parametrize("restriction", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_restricted_sampling_is_refused_in_training(served: Served, restriction: dict[str, Any]):
    with pytest.raises(ConfigurationError, match="top_p, top_k and min_p must be 1, 0 and 0 in training"):
        served.engine.submit(served.requests(1, **restriction))


def test_restricted_sampling_is_done_in_evaluation(served: Served):
    restricted, greedy = (
        served.sample(served.requests(3, "evaluation", **sampling)) for sampling in ({"top_k": 1}, {"temperature": 0.0})
    )
    assert [completion.token_ids for completion in restricted] == [completion.token_ids for completion in greedy]


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        (PROMPTS[0], SamplingParams(max_new_tokens=62), r"max_model_len = 96, got 35 \+ 62"),
        (PROMPTS[0], SamplingParams(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
        (PROMPTS[0], SamplingParams(temperature=-1.0), r"temperature must be at least 0, got -1\.0"),
        ((), SamplingParams(), "prompt_ids must hold at least one id"),
    ],
)
def test_a_request_that_cannot_be_sampled_is_refused(served: Served, prompt: Any, sampling: SamplingParams, message: str):
    with pytest.raises(ConfigurationError, match=message):
        served.engine.submit([GenerationRequest(10**6, prompt, sampling, 0)])


def test_training_tokens_are_counted_and_evaluation_tokens_are_not(served: Served):
    before = served.engine.generated_tokens
    served.sample(served.requests(3, "evaluation"))
    completions = served.sample(served.requests(5))
    assert served.engine.generated_tokens - before == sum(len(completion.token_ids) for completion in completions)


def test_evaluation_and_training_completions_come_out_apart(served: Served):
    training, evaluation = served.requests(5), served.requests(4, "evaluation")
    served.engine.submit([*training, *evaluation])
    assert [c.request_id for c in served.drain(4, "evaluation")] == [request.request_id for request in evaluation]
    assert [c.request_id for c in served.drain(5)] == [request.request_id for request in training]


def test_without_work_completions_are_empty_when_the_time_is_up(served: Served):
    assert served.engine.completions(0.01) == []


def test_evaluation_goes_on_while_training_is_paused(served: Served):
    served.engine.pause()
    training = served.requests(3)
    served.engine.submit([*training, *served.requests(2, "evaluation")])
    assert len(served.drain(2, "evaluation")) == 2
    assert served.engine.completions(0.05) == []
    served.engine.resume()
    assert [c.request_id for c in served.drain(3)] == [request.request_id for request in training]


def test_an_update_is_answered_with_its_version_and_the_probe_s_logprobs_under_the_new_weights(served: Served):
    model = tiny_models.perturbed(served.models[0])
    report = served.update(model)
    expected = tiny_models.token_logprobs(model, tiny_models.PROBE_IDS[:1], list(tiny_models.PROBE_IDS[1:]))
    assert report.version == len(served.models) - 1
    assert report.pause_s >= 0
    torch.testing.assert_close(torch.tensor(report.probe_logprobs), expected, atol=1e-4, rtol=0)


def test_tokens_of_a_response_in_flight_carry_the_version_that_sampled_them(served: Served):
    # Whether an update falls into a response, and not between two, is a matter of timing.
    assert any(_update_among_responses(served, seed) for seed in range(10, 15)), "no update fell into a response"


def _update_among_responses(served: Served, seed: int) -> bool:
    """Update while responses are in flight, check every token, and say whether one response holds both versions."""
    requests = served.requests(300)
    served.engine.submit(requests)
    early = served.engine.completions(60.0)  # responses are in flight, and requests wait for a slot
    old = len(served.models) - 1
    served.update(tiny_models.perturbed(served.models[0], seed=seed))
    completions = sorted([*early, *served.drain(300 - len(early))], key=lambda completion: completion.request_id)
    kinds = {tuple(sorted(set(c.token_versions))) for c in completions}
    assert {(old,), (old + 1,)} <= kinds <= {(old,), (old, old + 1), (old + 1,)}
    for request, completion in zip(requests, completions, strict=True):
        before = completion.token_versions.count(old)
        assert completion.token_versions == [old] * before + [old + 1] * (len(completion.token_ids) - before)
        if before in (0, len(completion.token_ids)):
            exact = slice(None)
        else:
            exact = slice(0, before)  # what follows reads keys and values of the old weights too
        torch.testing.assert_close(
            torch.tensor(completion.behavior_logprobs)[exact],
            served.expected(request, completion)[exact],
            atol=1e-4,
            rtol=0,
        )
    return (old, old + 1) in kinds


def test_a_response_paused_across_an_update_goes_on_with_its_tokens_and_the_rest_of_its_budget(served: Served):
    assert any(_update_while_paused(served, seed) for seed in range(20, 25)), "no pause fell into a response"


def _update_while_paused(served: Served, seed: int) -> bool:
    """Update while responses stand still, check every token, and say whether one response holds both versions."""
    requests = served.requests(60)
    served.engine.submit(requests)
    early = served.engine.completions(60.0)
    served.engine.pause()
    old = len(served.models) - 1
    served.update(tiny_models.perturbed(served.models[0], seed=seed))
    served.engine.resume()
    completions = sorted([*early, *served.drain(60 - len(early))], key=lambda completion: completion.request_id)
    for request, completion in zip(requests, completions, strict=True):
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] in EOS_IDS else "length")
        assert len(completion.token_ids) <= BUDGET
        before = completion.token_versions.count(old)
        torch.testing.assert_close(
            torch.tensor(completion.behavior_logprobs)[:before],
            served.expected(request, completion)[:before],
            atol=1e-4,
            rtol=0,
        )
    return any(set(c.token_versions) == {old, old + 1} for c in completions)


def test_a_refused_update_is_an_error_and_the_next_good_one_is_served(served: Served):
    with pytest.raises(WeightSyncError):
        served.engine.begin_update(90, {"nonsense": torch.zeros(3)})
        served.engine.finish_update(60.0)
    model = served.models[0]
    report = served.update(model)
    expected = tiny_models.token_logprobs(model, tiny_models.PROBE_IDS[:1], list(tiny_models.PROBE_IDS[1:]))
    torch.testing.assert_close(torch.tensor(report.probe_logprobs), expected, atol=1e-4, rtol=0)
    assert len(served.sample(served.requests(3))) == 3


def test_a_started_engine_cannot_be_started_again_before_it_is_stopped(served: Served):
    with pytest.raises(EngineError, match="already started"):
        served.start()


def test_stop_is_idempotent_ends_every_call_and_the_engine_can_be_started_again(served: Served):
    tokens = served.engine.generated_tokens
    served.engine.stop()
    served.engine.stop()
    assert served.engine.generated_tokens == tokens
    for call in (lambda: served.engine.completions(0.1), lambda: served.engine.submit(served.requests(1)), served.engine.pause):
        with pytest.raises(EngineError, match="not running"):
            call()
    served.models.clear()
    served.start()
    assert set(served.sample(served.requests(3))[0].token_versions) == {0}
