"""The embedded engine in the caller's process: what goes beyond test_engine_contract.py."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from lit_asyncrl.errors import EngineError, WeightSyncError
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.types import Completion, GenerationRequest, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def model(folder: str) -> Any:
    return load_model(folder)


@pytest.fixture
def engine(folder: str, model: Any) -> Iterator[HFEngine]:
    engine = HFEngine(mode="inline", num_slots=4)
    engine.start(folder, eos_token_ids=tiny_models.EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=64)
    engine.begin_update(0, named_weights(model))
    engine.finish_update(1.0)
    yield engine
    engine.stop()


def _request(request_id: int, *, max_new_tokens: int = 20, purpose: Any = "train", **sampling: Any) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return GenerationRequest(request_id, (5, 6, 7), params, seed=request_id, purpose=purpose)


def _drain(engine: HFEngine, count: int) -> list[Completion]:
    finished: list[Completion] = []
    while len(finished) < count:
        batch = engine.completions(5.0)
        assert batch, "no completion within the timeout"
        finished += batch
    return finished


def test_training_tokens_are_the_same_with_and_without_evaluation_between(engine: HFEngine):
    engine.submit([_request(i) for i in range(4)])
    first = engine.completions(5.0)
    engine.submit([_request(100 + i, purpose="evaluation", top_p=0.5) for i in range(6)])
    with_evaluation = {c.request_id: c.token_ids for c in [*first, *_drain(engine, 4 - len(first))]}
    engine.submit([_request(i) for i in range(4)])
    without = {c.request_id: c.token_ids for c in _drain(engine, 4)}
    assert with_evaluation == without


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(engine: HFEngine, model: Any):
    weights = dict(named_weights(model))
    weights.pop("model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"1 missing \['model\.norm\.weight'\]"):
        engine.begin_update(1, weights)
    engine.submit([_request(0)])
    assert set(engine.completions(5.0)[0].token_versions) == {0}


def test_a_thread_that_decodes_makes_way_for_an_update(engine: HFEngine, model: Any):
    engine.submit([_request(i, max_new_tokens=50) for i in range(80)])
    finished: list[Completion] = []
    thread = threading.Thread(target=lambda: finished.extend(_drain(engine, 80)))
    thread.start()
    for version in range(1, 6):
        engine.begin_update(version, named_weights(model))
        engine.finish_update(1.0)
    thread.join(30.0)
    assert not thread.is_alive()
    assert len({version for completion in finished for version in completion.token_versions}) > 1


def test_a_model_with_an_effective_sliding_window_is_refused(tmp_path: Path):
    folder = tiny_models.save_qwen3(
        tmp_path, use_sliding_window=True, sliding_window=16, layer_types=["full_attention", "sliding_attention"]
    )
    with pytest.raises(EngineError, match="sliding window 16"):
        HFEngine(mode="inline").start(folder, eos_token_ids=[1], probe_ids=[3, 4], max_model_len=64)


def test_a_bfloat16_engine_rounds_the_weights_it_gets(folder: str, model: Any):
    engine = HFEngine(mode="inline", dtype="bfloat16")
    engine.start(folder, eos_token_ids=tiny_models.EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=64)
    engine.begin_update(0, named_weights(model))
    rounded = load_model(folder, dtype="bfloat16")
    expected = tiny_models.token_logprobs(rounded, tiny_models.PROBE_IDS[:1], list(tiny_models.PROBE_IDS[1:]))
    torch.testing.assert_close(torch.tensor(engine.finish_update(1.0).probe_logprobs), expected, atol=1e-5, rtol=0)
    engine.stop()
