"""The receiving end of `shared_memory` without a server: which updates it takes, and what it expects of the next one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_asyncrl.generation.vllm_chunks import ChunkFile, plan_chunks

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
WEIGHTS = {"first": torch.ones(4), "second": torch.full((4,), 2.0)}


class Model:
    """Takes what it is given."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.loaded |= dict(weights)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Any:
    reload = pytest.importorskip("vllm.model_executor.model_loader.reload")
    from lit_asyncrl.generation.vllm_transfer import SharedMemoryReceiver

    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(SharedMemoryReceiver, "_finalize", lambda self: setattr(self, "_loading", False))
    monkeypatch.setattr(SharedMemoryReceiver.__mro__[1], "__init__", lambda self: setattr(self, "model", Model()))
    receiver = SharedMemoryReceiver()
    receiver.device = torch.device("cpu")
    return receiver


def _send(receiver: Any, chunks: int) -> None:
    """The first `chunks` of the two chunks of an update, each of which ends at a tensor's boundary."""
    from lit_asyncrl.generation.vllm_transfer import SharedMemoryUpdateInfo

    plan = plan_chunks(WEIGHTS, torch.float32, 64)
    assert [[piece.name for piece in chunk] for chunk in plan] == [["first"], ["second"]]
    file = ChunkFile()
    receiver.start_weight_update()
    for number, chunk in enumerate(plan[:chunks], 1):
        pieces = file.write_chunk(chunk, WEIGHTS, checked=True)
        receiver.receive_weights(SharedMemoryUpdateInfo(file.path, pieces, is_last=number == len(plan)))
    file.close()
    receiver.finish_weight_update()


@pytest.mark.parametrize("chunks", [0, 1])
def test_a_first_update_that_is_given_up_is_not_what_later_ones_must_bring(receiver: Any, chunks: int):
    with pytest.raises(ValueError, match=f"last chunk, got {chunks} tensors"):
        _send(receiver, chunks)
    receiver.finish_weight_update()  # vLLM's second call, which ends the update
    for _ in range(2):
        _send(receiver, 2)
    torch.testing.assert_close(receiver.model.loaded, WEIGHTS)


def test_a_later_update_that_is_given_up_is_refused_too(receiver: Any):
    _send(receiver, 2)
    with pytest.raises(ValueError, match="last chunk, got 1 tensors"):
        _send(receiver, 1)
    _send(receiver, 2)
