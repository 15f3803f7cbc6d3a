"""Ways in which new weights do not arrive, against the real vLLM: each is caught before a token of theirs could be trained."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_models
import torch

from lit_asyncrl.errors import WeightSyncError
from lit_asyncrl.generation.publisher import WeightPublisher
from lit_asyncrl.generation.vllm import VLLMEngine
from lit_asyncrl.generation.vllm_client import LocalClient
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import NamedTensors

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

Prove = Callable[..., WeightPublisher]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("policy"), head_dim=32)


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[VLLMEngine]:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # lets a test change a function inside vLLM's worker
    engine = VLLMEngine(num_slots=8, kv_cache_gib=0.1, response_timeout_s=5.0)
    engine.start(folder, eos_token_ids=tiny_models.EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=64)
    yield engine
    engine.stop()
    del os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"]


@pytest.fixture
def model(folder: str) -> Any:
    return load_model(folder)


@pytest.fixture
def prove(engine: VLLMEngine, model: Any) -> Iterator[Prove]:
    """Publishes the model's weights as the next version and waits for the verdict."""
    made: list[WeightPublisher] = []

    def prove(version: int, *, rehearse: bool = False) -> WeightPublisher:
        publisher = WeightPublisher(engine, supervisor=Supervisor(), timeout_s=10.0)
        made.append(publisher)
        if rehearse:
            publisher.rehearse(version, named_weights(model), lambda changed: _probe(model, changed))
        publisher.publish(version, named_weights(model), _probe(model, {}))
        publisher.wait_delivered()
        return publisher

    yield prove
    for publisher in made:
        publisher.close()


def _probe(model: Any, changed: NamedTensors) -> list[float]:
    row = torch.tensor([tiny_models.PROBE_IDS])
    with torch.no_grad():
        logits = torch.func.functional_call(model, dict(changed), kwargs={"input_ids": row}).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, row[0, 1:, None]).squeeze(1).tolist()


def _move(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)


def _pieces(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the message that describes a chunk on its way to vLLM."""
    update = LocalClient.update

    async def changed(self: LocalClient, info: dict[str, Any]) -> None:
        await update(self, info | {"pieces": change(info["pieces"])})

    monkeypatch.setattr(LocalClient, "update", changed)


def _in_worker(engine: VLLMEngine, function: Callable[[Any], None]) -> None:
    """Run a function inside vLLM's worker, which changes what the product does there."""
    backend = engine._backend
    assert backend is not None
    backend.call(backend._client._llm.collective_rpc(function), 10.0)  # type: ignore[attr-defined]


def _break_tied_head(worker: Any) -> None:
    from lit_asyncrl.generation import vllm_transfer

    vllm_transfer.whole_refresh_heads = vllm_transfer.refresh_heads  # type: ignore[attr-defined]
    vllm_transfer.refresh_heads = lambda model: None


def _mend_tied_head(worker: Any) -> None:
    from lit_asyncrl.generation import vllm_transfer

    vllm_transfer.refresh_heads = vllm_transfer.whole_refresh_heads  # type: ignore[attr-defined]


def test_a_whole_delivery_is_proved_after_a_rehearsal(prove: Prove):
    publisher = prove(0, rehearse=True)
    assert publisher.served_version == 0


def test_a_tied_head_left_stale_is_caught(prove: Prove, engine: VLLMEngine, model: Any):
    _in_worker(engine, _break_tied_head)
    try:
        with pytest.raises(WeightSyncError, match="log-probs"):
            prove(1, rehearse=True)
        _move(model)
        with pytest.raises(WeightSyncError, match="log-probs"):
            prove(2)
    finally:
        _in_worker(engine, _mend_tied_head)


def test_one_tensor_skipped_is_caught_and_named(prove: Prove, monkeypatch: pytest.MonkeyPatch):
    prove(3)
    _pieces(lambda pieces: [p for p in pieces if p["name"] != "model.layers.1.self_attn.k_proj.weight"], monkeypatch)
    with pytest.raises(WeightSyncError, match=r"1 missing \['model.layers.1.self_attn.k_proj.weight'\]"):
        prove(4)


def test_a_renamed_tensor_is_caught_and_named(prove: Prove, monkeypatch: pytest.MonkeyPatch):
    _pieces(lambda pieces: [p | {"name": p["name"].replace("up_proj", "upward_proj")} for p in pieces], monkeypatch)
    with pytest.raises(WeightSyncError, match="upward_proj"):
        prove(5)


def test_a_transport_that_acknowledges_without_writing_is_caught(prove: Prove, model: Any, monkeypatch: pytest.MonkeyPatch):
    prove(6)
    _move(model)

    async def acknowledge(self: LocalClient, info: dict[str, Any]) -> None:
        return None

    monkeypatch.setattr(LocalClient, "update", acknowledge)
    with pytest.raises(WeightSyncError, match="last chunk, got 0 tensors"):
        prove(7)


def test_bytes_that_were_never_written_fail_their_checksum(prove: Prove, model: Any, monkeypatch: pytest.MonkeyPatch):
    prove(8)
    _move(model)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: self)
    with pytest.raises(WeightSyncError, match=r"checksum of model\.embed_tokens\.weight"):
        prove(9)


def test_a_truncated_chunk_is_caught(prove: Prove, monkeypatch: pytest.MonkeyPatch):
    _pieces(lambda pieces: [*pieces[:-1], pieces[-1] | {"offset": pieces[-1]["offset"] + 4096}], monkeypatch)
    with pytest.raises(WeightSyncError, match="must hold"):
        prove(10)


def test_the_next_whole_delivery_after_failed_ones_is_proved(prove: Prove):
    assert prove(11, rehearse=True).served_version == 11


def test_an_engine_left_paused_is_caught_within_the_timeout(prove: Prove, monkeypatch: pytest.MonkeyPatch):
    resume = LocalClient.resume

    async def stay_paused(self: LocalClient) -> None:
        return None

    monkeypatch.setattr(LocalClient, "resume", stay_paused)
    with pytest.raises(WeightSyncError, match=r"within \d+\.\d s"):
        prove(12)
    monkeypatch.setattr(LocalClient, "resume", resume)
