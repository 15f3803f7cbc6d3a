"""What the vLLM backend asks of vLLM, and the client that runs it on this host (`AsyncLLM`)."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil

from lit_asyncrl.errors import EngineError

PauseMode = Literal["keep", "wait", "abort"]
UNKNOWN_VERSION = -1
"""Of tokens sampled before the first weights were delivered."""


@dataclass(slots=True)
class Sampled:
    """What came back for one request; the lists have one entry per token.

    Attributes:
        token_ids: sampled ids, the end-of-sequence id included.
        logprobs: nats, after temperature.
        versions: `policy_version` of the weights that sampled the token.
        finish_reason: `stop`, `length` or `abort`.
        top_logprobs: log-probs of the likeliest first tokens by id, when asked for.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    top_logprobs: dict[int, float] = field(default_factory=dict)


class VLLMClient(Protocol):
    """vLLM's interface as far as it is used here; every method belongs to the backend's event loop.

    Sampling parameters are plain dicts with the names of vLLM's `SamplingParams`.
    """

    max_model_len: int
    world_size: int

    async def start(self) -> None:
        """Be ready, or raise `EngineError`/`ConfigurationError`."""
        ...

    async def stop(self) -> None:
        """End what `start` began; never raises."""
        ...

    async def generate(self, request_id: str, token_ids: Sequence[int], params: dict[str, Any], salt: str | None) -> Sampled:
        """Sample one response."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a sequence's tokens after the first, nats at temperature 1."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; `generate` then returns what was sampled, with `abort`."""
        ...

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Stop scheduling."""
        ...

    async def resume(self) -> None:
        """Schedule again."""
        ...

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Set the weight transport up."""
        ...

    async def start_update(self) -> None:
        """Begin a weight update."""
        ...

    async def update(self, info: dict[str, Any]) -> None:
        """Load one chunk."""
        ...

    async def finish_update(self, version: str) -> None:
        """Serve the weights, under this version."""
        ...

    async def set_version(self, version: str) -> None:
        """Change the version that is recorded with tokens."""
        ...

    async def version(self) -> str:
        """The version that is recorded with tokens."""
        ...


def parse_version(label: str) -> int:
    """`policy_version` of vLLM's label, which is text of its own choice before the first update."""
    return int(label) if label.isdigit() else UNKNOWN_VERSION


class LocalClient:
    """`AsyncLLM` in this process, its engine core and workers in processes of their own.

    Args:
        engine_args: of vLLM's `AsyncEngineArgs`.
        environment: variables that vLLM's processes see; restored after the start.
        start_timeout_s: longest time until it is ready.
    """

    world_size = 1

    def __init__(self, engine_args: dict[str, Any], environment: dict[str, str], start_timeout_s: float) -> None:
        self.max_model_len = 0
        self._engine_args = engine_args
        self._environment = environment
        self._start_timeout_s = start_timeout_s
        self._llm: Any = None
        self._folder = ""
        self._children: list[psutil.Process] = []
        self._segments: set[str] = set()

    async def start(self) -> None:
        """See `VLLMClient.start`."""
        self._folder = tempfile.mkdtemp(prefix="lit-asyncrl-")
        before = set(psutil.Process().children(recursive=True))
        environment = self._environment | {
            "VLLM_RPC_BASE_PATH": self._folder,
            "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, round(self._start_timeout_s))),
            "LIT_ASYNCRL_TRAINER_PID": str(os.getpid()),
        }
        try:
            with _environment(environment):
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.v1.engine.async_llm import AsyncLLM

                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._engine_args))
        except BaseException as error:
            self._children = [child for child in psutil.Process().children(recursive=True) if child not in before]
            self._end_children()
            if isinstance(error, Exception):
                raise EngineError(f"The vLLM engine cannot start: {_reason(error)}") from error
            raise
        self._children = [
            child for child in psutil.Process().children(recursive=True) if child not in before and not _is_tracker(child)
        ]
        self._segments = {name for child in self._children for name in _shared_segments(child)}
        self.max_model_len = int(self._llm.model_config.max_model_len)
        parallel = self._llm.vllm_config.parallel_config
        self.world_size = int(parallel.world_size)

    async def stop(self) -> None:
        """See `VLLMClient.stop`."""
        llm, self._llm = self._llm, None
        self._end_children()  # they ignore signals but the last one, and a stopped one would not hear vLLM's own message
        if llm is not None:
            with contextlib.suppress(Exception):
                llm.shutdown(timeout=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        for name in self._segments:  # killed processes remove nothing, and multiprocessing would only at the trainer's end
            Path("/dev/shm", name).unlink(missing_ok=True)
            resource_tracker.unregister(f"/{name}", "shared_memory")
        self._segments = set()

    async def generate(self, request_id: str, token_ids: Sequence[int], params: dict[str, Any], salt: str | None) -> Sampled:
        """See `VLLMClient.generate`."""
        output = await self._final_output(request_id, token_ids, params, salt)
        completion = output.outputs[0]
        versions: list[int] = []
        for span in completion.weight_versions or ():
            versions += [parse_version(span.version)] * (span.end - span.start)
        flat = completion.logprobs
        first = flat.start_indices if flat is not None else []
        return Sampled(
            token_ids=list(completion.token_ids),
            logprobs=[flat.logprobs[start] for start in first],
            versions=versions,
            finish_reason=str(completion.finish_reason),
            top_logprobs=dict(zip(flat.token_ids, flat.logprobs, strict=True)) if flat is not None and len(first) == 1 else {},
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `VLLMClient.score`."""
        params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0, "detokenize": False, "ignore_eos": True}
        output = await self._final_output("probe", token_ids, params, None)
        scored = output.prompt_logprobs
        return [scored[i][token].logprob for i, token in enumerate(token_ids) if i > 0]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `VLLMClient.abort`."""
        await self._llm.abort(list(request_ids))

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """See `VLLMClient.pause`."""
        await self._llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """See `VLLMClient.resume`."""
        await self._llm.resume_generation()

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """See `VLLMClient.init_transfer`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def start_update(self) -> None:
        """See `VLLMClient.start_update`."""
        await self._llm.start_weight_update()

    async def update(self, info: dict[str, Any]) -> None:
        """See `VLLMClient.update`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish_update(self, version: str) -> None:
        """See `VLLMClient.finish_update`."""
        await self._llm.finish_weight_update(version)

    async def set_version(self, version: str) -> None:
        """See `VLLMClient.set_version`."""
        await self._llm.update_weight_version(version)

    async def version(self) -> str:
        """See `VLLMClient.version`."""
        return str(await self._llm.get_weight_version())

    async def _final_output(self, request_id: str, token_ids: Sequence[int], params: dict[str, Any], salt: str | None) -> Any:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(**params, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = self._llm.generate(tokens_input(list(token_ids), cache_salt=salt), sampling, request_id)
        return [output async for output in outputs][-1]

    def _end_children(self) -> None:
        for child in self._children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(self._children, timeout=5.0)
        self._children = []


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for vLLM's processes, which inherit the trainer's when they are made."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _shared_segments(process: psutil.Process) -> set[str]:
    """Names under /dev/shm that the process has mapped."""
    with contextlib.suppress(psutil.Error):
        return {Path(m.path).name for m in process.memory_maps() if m.path.startswith("/dev/shm/psm_")}
    return set()


def _is_tracker(process: psutil.Process) -> bool:
    """Whether it is multiprocessing's resource tracker, which belongs to the whole trainer and cleans up at its end."""
    with contextlib.suppress(psutil.Error):
        return any("resource_tracker" in part for part in process.cmdline())
    return False


def _reason(error: BaseException) -> str:
    """The innermost cause in words: vLLM wraps a worker's error several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
