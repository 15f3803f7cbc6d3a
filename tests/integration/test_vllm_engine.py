"""The real vLLM on this host: exact log-probs, updates in flight, cached prefixes, faults, and nothing left behind.

What holds for every engine is in test_engine_contract.py. Starting vLLM takes long, so engines are shared as far as possible,
and what becomes of responses in flight, which is decided in the trainer's process, is switched on a running engine.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from lit_asyncrl.errors import ConfigurationError, EngineDiedError, EngineError, WeightSyncError
from lit_asyncrl.generation.vllm import VLLMEngine
from lit_asyncrl.generation.vllm_chunks import ChunkFile
from lit_asyncrl.generation.vllm_client import LocalClient, shared_memory_of
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.types import Completion, GenerationRequest, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

EOS_IDS = (1,)
MAX_MODEL_LEN = 128
BUDGET = 40
SMOLLM2 = "LIT_ASYNCRL_SMOLLM2"
"""Environment variable: a folder that tools/convert_smollm2.py has written."""
# A block of 32 tokens and a rest: every request after the first finds the block in the cache.
PROMPT = tuple(3 + (7 * i) % 50 for i in range(35))


class Served:
    """A running engine, and the weights of every version it was given."""

    def __init__(self, folder: str, **settings: Any) -> None:
        self.engine = VLLMEngine(**({"num_slots": 4, "kv_cache_gib": 0.05} | settings))
        self.models: dict[int, Any] = {}
        self.engine.start(folder, eos_token_ids=EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=MAX_MODEL_LEN)
        self.update(load_model(folder))

    def update(self, model: Any) -> None:
        version = len(self.models)
        self.models[version] = model
        self.engine.begin_update(version, named_weights(model))
        self.engine.finish_update(120.0)

    @contextlib.contextmanager
    def policy(self, in_flight: str, prefix_cache: str = "salt") -> Iterator[None]:
        updates: Any = self.engine._backend._updates  # type: ignore[union-attr]
        before = updates._policy
        updates._policy = dataclasses.replace(before, in_flight=in_flight, prefix_cache=prefix_cache)
        yield
        updates._policy = before

    @property
    def client(self) -> Any:
        return self.engine._backend._client  # type: ignore[union-attr]

    @property
    def newest(self) -> int:
        return len(self.models) - 1

    def sample(self, number: int, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> list[Completion]:
        self.engine.submit(_requests(number, prompt, **sampling))
        return self.drain(number)

    def drain(self, number: int) -> list[Completion]:
        finished: list[Completion] = []
        while len(finished) < number:
            batch = self.engine.completions(120.0)
            assert batch, "no completion within the timeout"
            finished += batch
        return sorted(finished, key=lambda completion: completion.request_id)

    def sample_around_an_update(self, *, mixed: bool = True) -> list[Completion]:
        """More requests than slots, so that some are in flight, some wait inside vLLM, and some here.

        Whether the update comes in time is a matter of chance on a busy machine: more requests are tried until it does.

        Args:
            mixed: whether responses can have tokens of both versions, so that one must.
        """
        for number in (40, 80, 160, 320):
            self.engine.submit(_requests(number))
            early = self.engine.completions(120.0)
            self.update(tiny_models.perturbed(self.models[0], seed=len(self.models)))
            completions = sorted([*early, *self.drain(number - len(early))], key=lambda completion: completion.request_id)
            kinds = [set(completion.token_versions) for completion in completions]
            before, both, after = ({self.newest - 1}, {self.newest - 1, self.newest}, {self.newest})
            if before in kinds and kinds.count(after) > 4 and (both in kinds or not mixed):  # more begin after it than in slots
                return completions
        raise AssertionError("no update came in time")


def _requests(number: int, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> list[GenerationRequest]:
    params = SamplingParams(**({"max_new_tokens": BUDGET} | sampling))
    return [GenerationRequest(i, prompt, params, 100 + i) for i in range(number)]


def _plain(model: Any, completion: Completion, prompt: tuple[int, ...] = PROMPT, temperature: float = 1.0) -> torch.Tensor:
    return tiny_models.token_logprobs(model, prompt, completion.token_ids, temperature)


def _assert_ratios_of_one(served: Served, temperature: float, prompt: tuple[int, ...] = PROMPT, number: int = 16) -> None:
    for completion in served.sample(number, prompt, temperature=temperature):
        expected = _plain(served.models[completion.token_versions[0]], completion, prompt, temperature)
        ratio = (expected - torch.tensor(completion.behavior_logprobs)).exp()
        assert (ratio - 1).abs().max() <= 1e-3


def _assert_equal(completion: Completion, expected: torch.Tensor, part: slice) -> None:
    got = torch.tensor(completion.behavior_logprobs)[part]
    torch.testing.assert_close(got, expected[part], atol=1e-4, rtol=0, msg=lambda m: f"request {completion.request_id}: {m}")


def _smollm2() -> str:
    folder = os.environ.get(SMOLLM2, "")
    if not folder:
        pytest.skip(f"NOT TESTED with SmolLM2: set {SMOLLM2} to a folder that tools/convert_smollm2.py has written.")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("policy")
    return tiny_models.save_qwen3(path, head_dim=32, vocab_size=64, max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def served(folder: str) -> Iterator[Served]:
    """Tied embeddings, float32."""
    served = Served(folder, response_timeout_s=10.0)
    yield served
    served.engine.stop()


# ---------------------------------------------------------------- bad input, before vLLM's processes are started


def _start(folder: str, max_model_len: int | None = MAX_MODEL_LEN, **settings: Any) -> None:
    engine = VLLMEngine(**settings)
    try:
        engine.start(folder, eos_token_ids=EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=max_model_len)
    finally:
        engine.stop()


def test_a_missing_model_is_refused_naming_the_path():
    with pytest.raises(ConfigurationError, match="no-such-model"):
        _start("/no-such-model")


def test_a_head_size_that_vllm_cannot_run_is_refused_with_the_sizes_that_work(tmp_path: Path):
    folder = tiny_models.save_qwen3(tmp_path, head_dim=8)
    with pytest.raises(ConfigurationError, match=r"sizes \[32, 64, .*got 8 .*HFEngine"):
        _start(folder)


def test_an_unknown_architecture_is_an_engine_error_that_names_it(tmp_path: Path, folder: str):
    config = json.loads((Path(folder) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchForCausalLM"], "model_type": "no-such"}))
    with pytest.raises(EngineError, match="no-such"):
        _start(str(tmp_path))


def test_a_max_model_len_beyond_the_context_is_an_engine_error_with_both_numbers(folder: str):
    with pytest.raises(EngineError, match=r"(?s)4096.*128"):
        _start(folder, 4096)


def test_too_little_space_for_one_response_is_refused_with_the_space_it_takes(folder: str):
    # 2 (keys, values) x 2 layers x 2 heads x 32 x 4 bytes x 128 tokens = 131072 bytes, which is 0.000122 GiB.
    with pytest.raises(ConfigurationError, match=r"engine\.kv_cache_gib must hold one response of max_model_len = 128"):
        _start(folder, kv_cache_gib=0.0001)


# ---------------------------------------------------------------- the same weights


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_every_token_has_a_ratio_of_one_with_tied_embeddings(served: Served, temperature: float):
    _assert_ratios_of_one(served, temperature)


def test_a_temperature_that_vllm_would_raise_is_refused(served: Served):
    with pytest.raises(ConfigurationError, match=r"temperature must be 0 or at least 0\.01 with vLLM, got 0\.001"):
        served.engine.submit(_requests(1, temperature=0.001))


# ---------------------------------------------------------------- responses in flight and cached prefixes


def test_keep_goes_on_with_the_old_keys_and_values(served: Served):
    completions = served.sample_around_an_update()
    old, new = (served.models[served.newest - 1], served.models[served.newest])
    for completion in completions:
        before = completion.token_versions.count(served.newest - 1)
        assert completion.token_versions == sorted(completion.token_versions)
        if before == 0:
            _assert_equal(completion, _plain(new, completion), slice(None))
            continue
        _assert_equal(completion, _plain(old, completion), slice(0, before))
        if before < len(completion.token_ids):
            _assert_equal(completion, _mixed(old, new, completion, before), slice(before, None))


def _mixed(old: Any, new: Any, completion: Completion, before: int) -> torch.Tensor:
    """Log-probs where the keys and values of all but the last token sampled before the update are those of the old weights."""
    ids = torch.tensor([[*PROMPT, *completion.token_ids]])
    cached = len(PROMPT) + before - 1
    with torch.no_grad():
        cache = old(input_ids=ids[:, :cached], use_cache=True).past_key_values
        logits = new(input_ids=ids[:, cached:], past_key_values=cache).logits[0, :-1].float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[0, cached + 1 :, None]).squeeze(1)
    return torch.cat([torch.zeros(before), logprobs])


def test_restart_goes_on_as_from_a_clean_prefill_of_the_new_weights(served: Served):
    with served.policy("restart"):
        completions = served.sample_around_an_update()
    old, new = (_plain_of(served, served.newest - 1), _plain_of(served, served.newest))
    for completion in completions:
        before = completion.token_versions.count(served.newest - 1)
        _assert_equal(completion, old(completion), slice(0, before))
        _assert_equal(completion, new(completion), slice(before, None))


def _plain_of(served: Served, version: int) -> Callable[[Completion], torch.Tensor]:
    return lambda completion: _plain(served.models[version], completion)


def test_wait_lets_every_response_end_under_one_version(served: Served):
    with served.policy("wait"):
        completions = served.sample_around_an_update(mixed=False)
    assert {tuple(sorted(set(c.token_versions))) for c in completions} == {(served.newest - 1,), (served.newest,)}
    for completion in completions:
        _assert_equal(completion, _plain(served.models[completion.token_versions[0]], completion), slice(None))


@pytest.mark.parametrize(("in_flight", "prefix_cache"), [("keep", "salt"), ("restart", "reset"), ("wait", "reset")])
def test_a_response_begun_after_an_update_reads_no_prefix_of_old_weights(served: Served, in_flight: str, prefix_cache: str):
    with served.policy(in_flight, prefix_cache):
        completions = served.sample_around_an_update(mixed=False)
    begun_after = [c for c in completions if set(c.token_versions) == {served.newest}]
    for completion in begun_after:
        _assert_equal(completion, _plain(served.models[served.newest], completion), slice(None))


def test_a_prefix_cache_that_is_kept_shows_in_the_logprobs_of_responses_begun_after_an_update(served: Served):
    with served.policy("wait", "keep"):
        completions = served.sample_around_an_update(mixed=False)
    begun_after = [c for c in completions if set(c.token_versions) == {served.newest}]
    first = [abs(c.behavior_logprobs[0] - float(_plain(served.models[served.newest], c)[0])) for c in begun_after]
    assert min(first) > 1e-3


def test_the_samples_of_one_prompt_share_the_prefill(served: Served, monkeypatch: pytest.MonkeyPatch):
    served.update(served.models[0])  # a salt of its own: nothing of this prompt is cached
    outputs, cached = LocalClient._outputs, {}

    async def recorded(self: LocalClient, request_id: str, *arguments: Any) -> AsyncIterator[Any]:
        async for output in outputs(self, request_id, *arguments):
            cached[request_id] = output.num_cached_tokens
            yield output

    monkeypatch.setattr(LocalClient, "_outputs", recorded)
    served.sample(8)
    # The first one reads all 35 tokens; the others find the block of 32.
    assert [cached[f"{i}-train-0"] for i in range(8)] == [0] + [32] * 7


# ---------------------------------------------------------------- parts of responses


def test_partial_responses_have_the_tokens_logprobs_and_versions_of_the_whole_ones(served: Served):
    for number in (40, 80, 160, 320):
        served.engine.submit(_requests(number))
        early = served.engine.completions(120.0)
        served.update(tiny_models.perturbed(served.models[0], seed=len(served.models)))
        partials = served.engine.partial_completions()
        whole = {completion.request_id: completion for completion in [*early, *served.drain(number - len(early))]}
        for partial in partials:
            end, completion = len(partial.token_ids), whole[partial.request_id]
            assert partial.finish_reason == "abort" or partial == completion  # finished, and not taken
            assert partial.token_ids == completion.token_ids[:end]
            assert partial.behavior_logprobs == completion.behavior_logprobs[:end]
            assert partial.token_versions == completion.token_versions[:end]
        if any(len(set(partial.token_versions)) == 2 for partial in partials):
            return
    raise AssertionError("no update came in time")


def test_a_request_with_a_partial_goes_on_after_it_as_from_a_clean_prefill(served: Served):
    begun = [completion for completion in served.sample(12) if len(completion.token_ids) > 3]  # which did not end so early
    partials = {c.request_id: Completion(c.request_id, c.token_ids[:3], [-9.0] * 3, [0] * 3, "abort") for c in begun}
    before = served.engine.generated_tokens
    requests = [dataclasses.replace(r, partial=partials[r.request_id]) for r in _requests(12) if r.request_id in partials]
    served.engine.submit(requests)
    completions = served.drain(len(requests))
    for completion in completions:
        assert completion.token_ids[:3] == partials[completion.request_id].token_ids
        assert completion.behavior_logprobs[:3] == [-9.0] * 3
        assert completion.token_versions == [0] * 3 + [served.newest] * (len(completion.token_ids) - 3)
        assert len(completion.token_ids) <= BUDGET
        _assert_equal(completion, _plain(served.models[served.newest], completion), slice(3, None))
    assert served.engine.generated_tokens - before == sum(len(c.token_ids) - 3 for c in completions)


# ---------------------------------------------------------------- deliveries that are refused


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"model.norm.weight": None}, r"1 missing \['model\.norm\.weight'\]"),
        ({"model.norm.weight": None, "model.norm.scale": torch.ones(32)}, r"model\.norm\.scale|norm"),
        ({"model.embed_tokens.weight": torch.zeros(48, 32)}, "version 90"),
    ],
    ids=["a tensor skipped", "a tensor renamed", "another vocabulary"],
)
def test_weights_of_another_model_are_refused_and_the_next_good_ones_served(served: Served, broken: Any, message: str):
    weights = {name: tensor for name, tensor in (named_weights(served.models[0]) | broken).items() if tensor is not None}
    served.engine.begin_update(90, weights)
    with pytest.raises(WeightSyncError, match=message):
        served.engine.finish_update(60.0)
    served.update(served.models[0])
    _assert_ratios_of_one(served, 1.0)


def test_a_chunk_damaged_on_its_way_is_refused_naming_the_tensor(served: Served, monkeypatch: pytest.MonkeyPatch):
    write = ChunkFile.write_chunk

    def damaged(self: ChunkFile, *arguments: Any, **named: Any) -> list[dict[str, Any]]:
        message = write(self, *arguments, **named)
        with Path(self.path).open("r+b") as file:
            file.seek(message[3]["offset"])
            file.write(b"\x01\x02\x03")
        damaged_names.append(message[3]["name"])
        return message

    damaged_names: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(ChunkFile, "write_chunk", damaged)
        served.engine.begin_update(91, named_weights(served.models[0]))
    with pytest.raises(WeightSyncError, match=f"checksum of {damaged_names[0]} must be"):
        served.engine.finish_update(60.0)
    served.update(served.models[0])


# ---------------------------------------------------------------- faults


def test_a_running_engine_has_no_name_in_shared_memory_that_could_stay_behind(served: Served):
    children = served.client._children
    assert any("/dev/shm/psm_" in mapped.path for child in children for mapped in child.memory_maps())  # memory is shared
    assert [shared_memory_of(child) for child in children] == [set()] * len(children)


def test_signals_to_the_process_group_do_not_end_vllm(served: Served):
    for process in served.client._children:
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
    assert len(served.sample(8)) == 8


def test_a_stopped_engine_times_out_and_is_ended_without_a_trace(served: Served):
    client = served.client
    children, sockets = list(client._children), client._folder
    assert len(children) >= 2
    for process in children:
        process.suspend()
    served.engine.submit(_requests(3))
    served.engine.begin_update(99, named_weights(served.models[0]))
    with pytest.raises(WeightSyncError, match=r"version 99 within 0\.5 s"):
        served.engine.finish_update(0.5)
    started = time.monotonic()
    with pytest.raises(EngineDiedError, match=r"within 10\.0 s, and did not"):
        while not served.engine.completions(60.0):
            pass
    assert time.monotonic() - started < 30.0
    assert served.engine.silent_s > 10.0
    served.engine.stop()
    assert time.monotonic() - started < 45.0
    _assert_gone(children, sockets)


def _assert_gone(children: list[psutil.Process], sockets: str) -> None:
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert not Path(sockets).exists()


# ---------------------------------------------------------------- bfloat16, and death


@pytest.fixture(scope="module")
def rounded(folder: str) -> Iterator[Served]:
    served = Served(folder, dtype="bfloat16")
    yield served
    served.engine.stop()


def _assert_noise_of_bfloat16(served: Served, prompt: tuple[int, ...], number: int) -> None:
    exact = served.models[0]
    reference = type(exact)(exact.config)
    reference.load_state_dict(exact.state_dict())
    reference.to(torch.bfloat16).eval()
    ours, theirs = [], []
    for completion in served.sample(number, prompt):
        expected = _plain(exact, completion, prompt)
        ours.append((torch.tensor(completion.behavior_logprobs) - expected).abs())
        theirs.append((_plain(reference, completion, prompt) - expected).abs())
    assert torch.cat(ours).mean() <= 1.5 * torch.cat(theirs).mean()


def test_bfloat16_is_as_near_to_float32_as_transformers_in_bfloat16(rounded: Served):
    _assert_noise_of_bfloat16(rounded, PROMPT, 32)


def test_a_killed_engine_ends_every_call_with_its_death_and_leaves_nothing(rounded: Served):
    client = rounded.client
    children, sockets = list(client._children), client._folder
    rounded.engine.submit(_requests(4000))
    rounded.engine.completions(60.0)
    children[0].kill()
    started = time.monotonic()
    with pytest.raises(EngineDiedError, match="engine process died"):
        while True:
            rounded.engine.completions(60.0)
    assert time.monotonic() - started < 10.0
    with pytest.raises(EngineDiedError, match="engine process died"):
        rounded.engine.begin_update(5, named_weights(rounded.models[0]))
    partials = rounded.engine.partial_completions()
    assert 1 <= len(partials) <= 6  # 4 slots, and 2 more at vLLM
    rounded.engine.stop()
    assert rounded.engine.partial_completions() == partials
    _assert_gone(children, sockets)


def test_a_model_that_vllm_fails_to_load_is_an_engine_error_with_the_worker_s_own_words(tmp_path: Path, folder: str):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    before = _processes()
    with _shared_meanwhile() as shared, pytest.raises(EngineError, match=r"model\.norm\.weight"):
        _start(str(tmp_path), kv_cache_gib=0.05)
    assert _processes() == before
    assert shared
    assert [name for name in shared if Path("/dev/shm", name).exists()] == []


def test_a_start_that_takes_too_long_is_an_error_that_names_the_key_and_leaves_no_process(folder: str):
    before = _processes()
    with pytest.raises(EngineError, match=r"engine\.start_timeout_s = 2 s"):
        _start(folder, kv_cache_gib=0.05, start_timeout_s=2.0)
    deadline = time.monotonic() + 20.0
    while _processes() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _processes() == before


def _processes() -> set[psutil.Process]:
    """Descendants of this one, but for multiprocessing's resource tracker."""
    descendants = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in part for part in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                descendants.add(process)
    return descendants


@contextlib.contextmanager
def _shared_meanwhile() -> Iterator[set[str]]:
    """Names in shared memory of this process's descendants."""
    names: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            for process in _processes():
                names.update(shared_memory_of(process))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield names
    finally:
        over.set()
        thread.join()


TRAINER = """
import sys
from lit_asyncrl.generation.vllm import VLLMEngine
if __name__ == "__main__":
    engine = VLLMEngine(num_slots=4, kv_cache_gib=0.05)
    print("starting", flush=True)
    try:
        engine.start(sys.argv[1], eos_token_ids=[1], probe_ids=[3, 4], max_model_len=128)
    finally:
        engine.stop()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_trainer_that_ends_while_vllm_starts_leaves_no_process_and_no_shared_memory(folder: str, number: int):
    with _shared_meanwhile() as shared, subprocess.Popen([sys.executable, "-c", TRAINER, folder]) as trainer:
        deadline = time.monotonic() + 120.0
        while not shared and time.monotonic() < deadline:
            time.sleep(0.05)
        descendants = psutil.Process(trainer.pid).children(recursive=True)
        trainer.send_signal(number)
        trainer.wait(60.0)
    assert shared
    assert psutil.wait_procs(descendants, timeout=30.0)[1] == []
    assert [name for name in shared if Path("/dev/shm", name).exists()] == []


def test_a_killed_trainer_leaves_no_vllm(folder: str):
    code = f"""
import json, time
from lit_asyncrl.generation.vllm import VLLMEngine
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.types import GenerationRequest, SamplingParams
if __name__ == "__main__":
    engine = VLLMEngine(num_slots=4, kv_cache_gib=0.05)
    engine.start({folder!r}, eos_token_ids=[1], probe_ids=[3, 4], max_model_len=128)
    engine.begin_update(0, named_weights(load_model({folder!r})))
    engine.finish_update(60.0)
    engine.submit([GenerationRequest(i, (5,), SamplingParams(max_new_tokens=100), i) for i in range(100_000)])
    client = engine._backend._client
    print("started", json.dumps([[c.pid for c in client._children], client._folder]), flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        line = next(line for line in trainer.stdout if line.startswith("started"))
        pids, sockets = json.loads(line.removeprefix("started"))
        children = [psutil.Process(pid) for pid in pids]
        assert len(children) >= 2
        trainer.kill()
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        with contextlib.suppress(AssertionError):
            _assert_gone(children, sockets)
            return
        time.sleep(0.1)
    _assert_gone(children, sockets)


# ---------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    served = Served(_smollm2(), num_slots=16, kv_cache_gib=0.3)
    yield served
    served.engine.stop()


REAL_PROMPT = tuple(range(1000, 1040))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_every_token_of_smollm2_has_a_ratio_of_one(real: Served, temperature: float):
    _assert_ratios_of_one(real, temperature, REAL_PROMPT, 6)


def test_smollm2_in_bfloat16_is_as_near_to_float32_as_transformers_in_bfloat16(real: Served):
    real.engine.stop()  # memory
    served = Served(_smollm2(), dtype="bfloat16", num_slots=16, kv_cache_gib=0.3)
    try:
        _assert_noise_of_bfloat16(served, REAL_PROMPT, 8)
    finally:
        served.engine.stop()
