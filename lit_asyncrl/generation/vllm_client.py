"""The client of a vLLM on this host: `AsyncLLM`, its processes, and what they must not leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lit_asyncrl.errors import AsyncRLError, ConfigurationError, EngineDiedError, EngineError
from lit_asyncrl.generation.vllm_interface import FIRST_TOKEN_ONLY, Begun, PauseMode, Sampled, SoFar, versions_of

FAILURE_PREFIX = "failure-"
"""Of files in which vLLM's processes leave the error that ended them (`vllm_transfer.FailureFile`)."""
CPU_BLOCK_TOKENS = 32
"""Tokens of a block of the prefix cache with a CPU build; its own 128 would leave shorter prompts unshared."""
CPU_STEP_TOKENS = 2048
"""Tokens of one step of a CPU build, or the longest response if that is more."""
T = TypeVar("T")


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
        self._update_open = False
        self._stopped = False
        self._folder = ""
        self._others: set[psutil.Process] | None = None  # processes of the trainer's that are not vLLM's
        self._children: list[psutil.Process] = []

    async def start(self) -> None:
        """See `VLLMClient.start`."""
        self._folder = tempfile.mkdtemp(prefix="lit-asyncrl-")
        self._others = set(psutil.Process().children(recursive=True))
        environment = self._environment | {
            "VLLM_RPC_BASE_PATH": self._folder,
            "TMPDIR": self._folder,  # vLLM's processes leave files behind
            "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, round(self._start_timeout_s))),
            "LIT_ASYNCRL_TRAINER_PID": str(os.getpid()),
        }
        try:
            with _environment(environment):
                async with asyncio.timeout(self._start_timeout_s):
                    # In another thread, so that `stop` can end a start that takes too long.
                    self._llm = await asyncio.to_thread(self._build)
        except AsyncRLError:
            raise
        except TimeoutError as error:
            raise EngineError(
                f"vLLM must be ready within engine.start_timeout_s = {self._start_timeout_s:g} s, and is not. "
                "Raise start_timeout_s, or look for the reason in vLLM's log."
            ) from error
        except Exception as error:
            reason = self._reported_failure() or _reason(error)
            raise EngineError(f"vLLM cannot start with the model {self._engine_args['model']!r}: {reason}") from error
        self._children = self._new_children()
        _forget_shared_memory(self._children)  # all have it open: it lives as long as they do, however they end
        self.max_model_len = int(self._llm.model_config.max_model_len)
        self.world_size = int(self._llm.vllm_config.parallel_config.world_size)

    def _build(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        platform = cpu_arguments(self._engine_args["max_model_len"]) if current_platform.is_cpu() else {}
        if unknown := sorted(self._engine_args.keys() - {f.name for f in dataclasses.fields(AsyncEngineArgs)}):
            raise ConfigurationError(
                f"engine.engine_args must be arguments of vLLM's AsyncEngineArgs, got {unknown}. Leave them out."
            )
        arguments = AsyncEngineArgs(**(platform | self._engine_args))
        config = arguments.create_engine_config()
        check_attention(self._engine_args["model"], config.model_config.get_head_size())
        if self._stopped:  # while vLLM was imported
            raise EngineError("The generation engine was stopped.")
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)
        if self._stopped:  # before its processes could be seen
            llm.shutdown(timeout=0)
        return llm

    async def stop(self) -> None:
        """See `VLLMClient.stop`."""
        self._stopped = True
        llm, self._llm = self._llm, None
        with contextlib.suppress(AttributeError):
            llm.engine_core.resources.engine_dead = True  # no news: vLLM would warn of it
        self._children = self._children or self._new_children()  # of a start that is under way, or that failed
        _forget_shared_memory(self._children)
        self._end_children()  # they ignore signals but the last one, and a stopped one would not hear vLLM's own message
        if llm is not None:
            with contextlib.suppress(Exception):
                llm.shutdown(timeout=0)
            llm.shutdown = _nothing  # its destructor calls it again, at the interpreter's end with half of Python gone
        shutil.rmtree(self._folder, ignore_errors=True)

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: dict[str, Any],
        salt: str | None,
        begun: Begun | None = None,
    ) -> Sampled:
        """See `VLLMClient.generate`."""
        sampled = Sampled([], [], [], "")
        async for output in self._outputs(request_id, token_ids, params, salt):
            completion, flat = output.outputs[0], output.outputs[0].logprobs
            first = flat.start_indices if flat is not None else []
            if len(first) == 1 and not sampled.token_ids:
                sampled.top_logprobs = dict(zip(flat.token_ids, flat.logprobs, strict=True))
            sampled.token_ids += completion.token_ids
            sampled.logprobs += [flat.logprobs[start] for start in first]
            spans = completion.weight_versions or ()  # with the last output, for all tokens
            sampled.versions += versions_of((span.version, span.start, span.end) for span in spans)
            sampled.finish_reason = str(completion.finish_reason)
            if begun is not None:
                begun(self._so_far(request_id))
        return sampled

    def _so_far(self, request_id: str) -> SoFar | None:
        """vLLM's own record of a response, in this process, which it keeps up to date at each step; None when it has ended."""
        processor = self._llm.output_processor
        state = next((processor.request_states.get(name) for name in processor.external_req_ids.get(request_id, ())), None)
        if state is None:
            return None

        def so_far() -> Sampled:
            flat, spans = state.logprobs_processor.logprobs, state._weight_version_spans() or ()
            return Sampled(
                list(state.detokenizer.output_token_ids),
                [flat.logprobs[start] for start in flat.start_indices],
                versions_of((span.version, span.start, span.end) for span in spans),
                "",
            )

        return so_far

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `VLLMClient.score`."""
        params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0, "detokenize": False, "ignore_eos": True}
        scored: Any = None
        async for output in self._outputs("probe", token_ids, params, "probe"):
            scored = scored or output.prompt_logprobs
        return [scored[i][token].logprob for i, token in enumerate(token_ids) if i > 0]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `VLLMClient.abort`."""
        await self._ask(self._llm.abort(list(request_ids)))

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """See `VLLMClient.pause`."""
        await self._ask(self._llm.pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        """See `VLLMClient.resume`. After an update that failed, vLLM must be able to run, and to begin another one."""
        if self._update_open:
            with contextlib.suppress(Exception):  # it refuses where tensors are missing, but puts the layers together first
                await self._ask(self._llm.finish_weight_update())
            with contextlib.suppress(Exception):  # a chunk that cannot be read ends what is still open: there is no call for it
                await self.update({})
            self._update_open = False
        await self._ask(self._llm.resume_generation())

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """See `VLLMClient.init_transfer`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._ask(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)))

    async def start_update(self) -> None:
        """See `VLLMClient.start_update`."""
        self._update_open = True
        await self._ask(self._llm.start_weight_update())

    async def update(self, info: dict[str, Any]) -> None:
        """See `VLLMClient.update`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._ask(self._llm.update_weights(WeightTransferUpdateRequest(update_info=info)))

    async def finish_update(self, version: str) -> None:
        """See `VLLMClient.finish_update`."""
        await self._ask(self._llm.finish_weight_update(version))
        self._update_open = False

    async def set_version(self, version: str) -> None:
        """See `VLLMClient.set_version`."""
        await self._ask(self._llm.update_weight_version(version))

    async def version(self) -> str:
        """See `VLLMClient.version`."""
        return str(await self._ask(self._llm.get_weight_version()))

    async def _outputs(
        self, request_id: str, token_ids: Sequence[int], params: dict[str, Any], salt: str | None
    ) -> AsyncIterator[Any]:
        """vLLM's outputs: the first token's, and the rest."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            **params, flat_logprobs=True, output_kind=RequestOutputKind.DELTA, stream_interval=FIRST_TOKEN_ONLY
        )
        with self._told():
            async for output in self._llm.generate(tokens_input(list(token_ids), cache_salt=salt), sampling, request_id):
                yield output

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Put vLLM's death in words: its own error points to a stack trace on the screen."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            cause = self._reported_failure() or "without a word, as when it is killed (by hand, or for lack of memory)"
            raise EngineDiedError(f"vLLM's engine process died: {cause}") from error
        except Exception as error:
            if (words := _worker_s_words(str(error))) != str(error):
                raise EngineError(words) from error
            raise

    async def _ask(self, answer: Awaitable[T]) -> T:
        with self._told():
            return await answer

    def _reported_failure(self) -> str:
        """The error that the first of vLLM's processes to fail has left, in words; empty if there is none."""
        first = min(Path(self._folder).glob(f"{FAILURE_PREFIX}*"), key=lambda path: path.name, default=None)
        return "" if first is None else _worker_s_words(first.read_text(encoding="utf-8", errors="replace"))

    def _new_children(self) -> list[psutil.Process]:
        if self._others is None:
            return []
        return [c for c in psutil.Process().children(recursive=True) if c not in self._others and not _is_foreign(c)]

    def _end_children(self) -> None:
        for child in self._children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(self._children, timeout=5.0)
        self._children = []


def check_attention(model: str, head_size: int) -> None:
    """Refuse a model whose attention vLLM's CPU kernels cannot run: they would fail at the first request.

    Raises:
        ConfigurationError: naming the sizes that work.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        supported = CPUAttentionBackend.get_supported_head_sizes()
        if head_size not in supported:
            raise ConfigurationError(
                f"model.policy.path must be a model whose attention heads have one of the sizes {supported} for vLLM on a CPU, "
                f"got {head_size} ({model!r}). Take the embedded engine (HFEngine), or a model with another head_dim."
            )


def cpu_arguments(max_model_len: int | None) -> dict[str, Any]:
    """Engine arguments of a CPU build, unless the user gives others.

    A prompt is read in one step: vLLM sets a response's random generator back after a part of one, which no CPU generator can.
    """
    step = {} if max_model_len is None else {"max_num_batched_tokens": max(CPU_STEP_TOKENS, max_model_len)}
    return {"block_size": CPU_BLOCK_TOKENS, "enable_chunked_prefill": False} | step


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


def _forget_shared_memory(processes: Sequence[psutil.Process]) -> None:
    """Remove the names under /dev/shm of what vLLM's processes share: segments and semaphores.

    Killed processes remove nothing, and multiprocessing's tracker, which would, may be killed with them.
    """
    for name in {name for process in processes for name in shared_memory_of(process)} - shared_memory_of(psutil.Process()):
        with contextlib.suppress(FileNotFoundError):  # removed by another one
            Path("/dev/shm", name).unlink()
            kind, prefix = ("semaphore", "sem.") if name.startswith("sem.") else ("shared_memory", "")
            resource_tracker.unregister(f"/{name.removeprefix(prefix)}", kind)


def shared_memory_of(process: psutil.Process) -> set[str]:
    """Names under /dev/shm of multiprocessing's segments and semaphores that a process has mapped.

    By inode: a process that makes a semaphore maps it under another name, which is gone.
    """
    with contextlib.suppress(OSError):  # the process has ended
        lines = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        mapped = {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
        entries = [entry for entry in os.scandir("/dev/shm") if entry.name.startswith(("psm_", "sem.mp-"))]
        return {entry.name for entry in entries if entry.inode() in mapped}
    return set()


def _nothing(*arguments: Any, **named: Any) -> None:
    """Instead of a method that must not run any more."""


def _is_foreign(process: psutil.Process) -> bool:
    """Whether it is not vLLM's, though started meanwhile.

    Such are multiprocessing's resource tracker, which belongs to the whole trainer and cleans up at its end, and whatever has a
    session of its own, such as a reward's process.
    """
    with contextlib.suppress(psutil.Error, OSError):
        return os.getsid(process.pid) != os.getsid(0) or any("resource_tracker" in part for part in process.cmdline())
    return False


def _worker_s_words(text: str) -> str:
    """A worker's own message out of vLLM's."""
    found = re.search(r"Worker failed with error '(.*)', please check", text, re.DOTALL)
    return found[1] if found else text


def _reason(error: BaseException) -> str:
    """The innermost cause in words: vLLM wraps a worker's error several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
