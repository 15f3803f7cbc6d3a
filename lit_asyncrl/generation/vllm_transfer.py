"""How weights reach vLLM: transports by name, and the receiving end of `shared_memory` inside vLLM's workers.

`register` is the entry point (`vllm.general_plugins`) that every vLLM process calls: it makes `shared_memory` known, and lets the
processes of an engine of ours end with their trainer. `nccl` and `ipc` are vLLM's own, driven through its trainer-side classes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from lit_asyncrl.generation.vllm_chunks import Piece, read_pieces
from lit_asyncrl.generation.vllm_client import FAILURE_PREFIX
from lit_asyncrl.types import NamedTensors
from lit_asyncrl.waits import start_thread

TRAINER_PID = "LIT_ASYNCRL_TRAINER_PID"
"""Environment variable by which an engine's processes know their trainer."""
BACKEND = "shared_memory"


def register() -> None:
    """Entry point of vLLM's plugin mechanism; called once in every vLLM process, cheap."""
    if BACKEND not in WeightTransferEngineFactory._registry:  # it refuses a second registration, and has no query
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, SharedMemoryReceiver.__name__)
    trainer = int(os.environ.get(TRAINER_PID, os.getpid()))
    if trainer != os.getpid():
        _follow(trainer)
        # At each update it warns of layers without weights of their own (rotary embeddings, tied heads).
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        logging.getLogger("vllm").addHandler(FailureFile(os.environ["VLLM_RPC_BASE_PATH"]))


def _follow(trainer: int) -> None:
    """Leave signals to the trainer, which stops its engine in order, and end when the trainer is gone (kill -9)."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    descriptor = os.pidfd_open(trainer)

    def wait() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        shutil.rmtree(os.environ["VLLM_RPC_BASE_PATH"], ignore_errors=True)
        os._exit(1)

    start_thread(wait, "trainer-watch")


class FailureFile(logging.Handler):
    """Leaves the error that ends a vLLM process where the trainer finds it: vLLM itself only prints it.

    Args:
        folder: of the engine's sockets.
    """

    ENDINGS = ("failed to start", "fatal error", "WorkerProc failed")

    def __init__(self, folder: str) -> None:
        super().__init__(logging.ERROR)
        self._folder = Path(folder)

    def emit(self, record: logging.LogRecord) -> None:
        """One file, named by the time, so that the first is the cause."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and any(ending in record.getMessage() for ending in self.ENDINGS):
            file = self._folder / f"{FAILURE_PREFIX}{time.time_ns()}"
            with contextlib.suppress(OSError):
                file.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every message says where its chunk lies."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """One chunk: the file, its pieces (`vllm_chunks.Piece` as dicts), and whether it is the update's last."""

    path: str
    pieces: list[dict[str, Any]]
    is_last: bool


class SharedMemoryReceiver(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads chunks with vLLM's layer-wise reload; compares checksums, and names and shapes with the first update's.

    The first update is proved by the rehearsal, tensor group by tensor group; each later one must bring the same tensors.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._expected: dict[str, tuple[int, ...]] = {}
        self._received: dict[str, tuple[int, ...]] = {}
        self._partial: dict[str, Tensor] = {}
        self._is_whole = False
        self._loading = False

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Nothing to rendezvous."""

    def start_weight_update(self) -> None:
        """Prepare the layer-wise reload; an update that was left half-way is closed first."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._loading:
            self._finalize()
        self._received, self._partial, self._is_whole = {}, {}, False
        initialize_layerwise_reload(self.model)
        self._loading = True

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load one chunk.

        Raises:
            ValueError: a checksum differs, the chunk is short, a tensor comes twice, or the model has no such tensor.
        """
        try:
            self.model.load_weights(self._whole_tensors(update_info))
        except BaseException:
            self._finalize()  # vLLM ends the session now: leave a model that can run, whose weights nobody will trust
            raise
        self._is_whole = update_info.is_last

    def finish_weight_update(self) -> None:
        """Make the loaded weights the served ones.

        Raises:
            ValueError: the last chunk did not come (an update that is given up), or tensors are missing, unknown or of another
                shape than in the first update. vLLM keeps the update open then; calling again ends it.
        """
        if not self._loading:
            return
        self._finalize()
        if self._partial:
            raise ValueError(f"tensors must be whole, got part of {sorted(self._partial)[:3]}")
        if not self._is_whole:
            raise ValueError(f"an update must end with its last chunk, got {len(self._received)} tensors without it")
        expected, received = self._expected, self._received
        if expected and expected != received:
            missing = sorted(expected.keys() - received.keys())
            unknown = sorted(received.keys() - expected.keys())
            misshapen = sorted(name for name in expected.keys() & received.keys() if expected[name] != received[name])
            raise ValueError(
                f"an update must bring the tensors of the first one, got {len(missing)} missing {missing[:3]}, {len(unknown)} "
                f"unknown {unknown[:3]}, {len(misshapen)} of another shape {misshapen[:3]}"
            )
        self._expected = received

    def shutdown(self) -> None:
        """Nothing is held open between chunks."""

    def _whole_tensors(self, update_info: SharedMemoryUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        for piece, elements in read_pieces(update_info.path, update_info.pieces):
            if piece.name in self._received:
                raise ValueError(f"a tensor must come once in an update, got {piece.name} twice")
            if (tensor := self._assemble(piece, elements)) is not None:
                self._received[piece.name] = piece.shape
                yield piece.name, tensor

    def _assemble(self, piece: Piece, elements: Tensor) -> Tensor | None:
        """The whole tensor once its last piece is there. A copy: vLLM holds it until its layer is complete, chunks later."""
        numel = int(torch.Size(piece.shape).numel())
        if piece.numel == numel:
            return elements.to(self.device, copy=True).view(piece.shape)
        if piece.start == 0:
            self._partial[piece.name] = torch.empty(numel, dtype=elements.dtype, device=self.device)
        self._partial[piece.name][piece.start : piece.start + piece.numel] = elements
        return self._partial.pop(piece.name).view(piece.shape) if piece.start + piece.numel == numel else None

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._loading = False
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_heads(self.model)


def refresh_heads(model: torch.nn.Module) -> None:
    """Repack embeddings and heads: a head tied to the embedding keeps its packed copy of the old weights on a CPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):  # ParallelLMHead is one
            module.quant_method.process_weights_after_loading(module)


class NamedSource(WeightSource):
    """The trainer's weights as vLLM's trainer-side classes read them, cast to the dtype that is served."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.weights: NamedTensors = {}
        self._dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of every tensor."""
        return [ParamMeta(name, self._wire(tensor), tuple(tensor.shape)) for name, tensor in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            yield name, tensor.detach().to(self._wire(tensor))

    def _wire(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype


def device_sender(
    backend: str, client: Any, weights: NamedTensors, dtype: torch.dtype, world_size: int
) -> tuple[Any, NamedSource]:
    """vLLM's own trainer-side sender for GPUs, connected to the engine.

    Args:
        backend: `nccl` or `ipc`.
        client: has the four methods of vLLM's `VLLMWeightSyncClient`.
        weights: the trainer's, on a GPU.
        dtype: that is served.
        world_size: of vLLM's workers and the trainer together (`nccl`).

    Returns:
        The sender (call `send_weights()` for each update) and the source it reads.
    """
    source = NamedSource(dtype)
    source.weights = weights
    info: Any
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_open_port

        info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=get_open_port(), world_size=world_size)
    else:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(rank=0, packed=True)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source), source
