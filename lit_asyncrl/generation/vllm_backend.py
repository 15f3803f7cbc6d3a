"""The trainer's side of a vLLM engine: an event loop in a thread, requests in flight, weight updates between two decode steps.

    submit --> task per request --gate--> client.generate --> finished completions --> take
    begin_update --> sync thread: stage, close the gate, pause, stream, resume, open the gate, probe --> finish_update

`vllm_requests.py` has the requests and their gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from lit_asyncrl.errors import AsyncRLError, EngineError, WeightSyncError
from lit_asyncrl.generation.vllm_interface import VLLMClient, parse_version
from lit_asyncrl.generation.vllm_requests import VLLMRequests
from lit_asyncrl.generation.vllm_sender import WeightSender
from lit_asyncrl.supervisor import POLL_S
from lit_asyncrl.types import (
    Completion,
    DeliveryReport,
    GenerationRequest,
    InFlight,
    NamedTensors,
    PrefixCache,
    Purpose,
)
from lit_asyncrl.waits import Changed, Flag, start_thread

STOP_TIMEOUT_S = 15.0
"""Longest time to end vLLM's processes."""
HEARTBEAT_S = 2.0
"""How often an engine that has work is asked for a sign of life."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """How a `VLLMBackend` runs.

    Attributes:
        eos_token_ids, probe_ids: as in `GenerationEngine.start`.
        num_slots: responses that vLLM decodes at once.
        in_flight, prefix_cache: what becomes of responses and cached prefixes when weights change.
        start_timeout_s: longest time until vLLM is ready.
        response_timeout_s: longest time for one answer of vLLM; without one it counts as hung.
    """

    eos_token_ids: tuple[int, ...]
    probe_ids: tuple[int, ...]
    num_slots: int
    in_flight: InFlight
    prefix_cache: PrefixCache
    start_timeout_s: float
    response_timeout_s: float


class VLLMBackend:
    """A running vLLM behind a `VLLMClient`. Thread-safe.

    Raises:
        EngineError: not ready in time, or it cannot serve the model.
    """

    def __init__(self, client: VLLMClient, sender: WeightSender, settings: BackendSettings) -> None:
        self._client = client
        self._sender = sender
        self._settings = settings
        self._changed = Changed()
        self._finished: dict[Purpose, list[Completion]] = {"train": [], "evaluation": []}
        self._failure: BaseException | None = None
        self._stopping = False
        self._pending_version: int | None = None
        self._update: Future[DeliveryReport] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[Future[Any]] = set()
        self._requests = VLLMRequests(
            client,
            eos_token_ids=settings.eos_token_ids,
            num_slots=settings.num_slots,
            spawn=self._spawn,
            finished=self._finish,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread(self._loop.run_forever, "vllm-loop")
        self._sync = ThreadPoolExecutor(1, thread_name_prefix="vllm-sync")
        try:
            self.call(self._start(), settings.start_timeout_s + STOP_TIMEOUT_S)
        except BaseException:
            self.stop()  # also when interrupted from the keyboard
            raise

    @property
    def generated_tokens(self) -> int:
        """Training tokens that vLLM reported so far."""
        return self._requests.generated_tokens

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and response together."""
        return self._client.max_model_len

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._raise_if_dead()
        self._loop.call_soon_threadsafe(self._requests.begin, list(requests))

    def take(self, purpose: Purpose, timeout_s: float) -> list[Completion]:
        """Finished completions of one purpose; waits at most `timeout_s` for the first."""
        with self._changed:
            self._changed.wait_until(lambda: bool(self._finished[purpose] or self._failure or self._stopping), timeout_s)
            self._raise_if_dead()
            taken, self._finished[purpose] = self._finished[purpose], []
        return taken

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """Copy the weights out and start the delivery; returns when `weights` may change."""
        self._raise_if_dead()
        if self._pending_version is not None:
            raise WeightSyncError(
                f"Version {version} must follow a finished update, but version {self._pending_version} was not answered: "
                "writing now could mix the two."
            )
        read = Flag()
        if self._sender.stage(weights):
            read.set()
        self._pending_version = version
        self._update = self._sync.submit(self._deliver, version, weights, read)
        while not read.wait(POLL_S) and not self._update.done():
            pass  # the verdict, also that of a fault, belongs to finish_update

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """Wait for the delivery's report; after a timeout it may be called again."""
        version, update = self._pending_version, self._update
        assert version is not None and update is not None, "finish_update without begin_update"
        try:
            report = update.result(timeout_s)
        except FutureTimeoutError as error:
            if not update.done():
                raise WeightSyncError(
                    f"The vLLM engine must load version {version} within {timeout_s:.1f} s, and has not answered. "
                    "Is it stopped, or a decode step longer than that?"
                ) from error
            self._pending_version = None
            raise WeightSyncError(f"vLLM must load version {version}, and gave no answer: {error}") from error
        except Exception as error:
            self._pending_version = None
            raise WeightSyncError(f"vLLM must load version {version}, and refused: {_innermost(error)}") from error
        self._pending_version = None
        return report

    def set_paused(self, paused: bool) -> None:
        """Let training responses stand still (taken back from vLLM, sampled tokens kept), or go on."""
        self._raise_if_dead()
        self.call(self._set_paused(paused), self._settings.response_timeout_s)

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float | None) -> Any:
        """Run a coroutine on the loop and wait for it; without a limit, until the engine answers, fails or is stopped.

        Raises:
            EngineError: no answer in time, or the engine has failed or was stopped meanwhile.
        """
        if self._stopping or self._failure is not None:
            coroutine.close()
            self._raise_if_dead()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._calls.add(future)
        try:
            if self._stopping or self._failure is not None:  # since then
                future.cancel()
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise EngineError(
                f"The vLLM engine must answer within {timeout_s:.1f} s, and did not. It hangs or is stopped."
            ) from error
        except CancelledError:
            self._raise_if_dead()
            raise
        finally:
            self._calls.discard(future)

    def stop(self) -> None:
        """End vLLM, tasks and threads; idempotent; never raises."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
        self._end_calls()
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        self._sync.shutdown(wait=True, cancel_futures=True)
        if not self._thread.is_alive():
            self._loop.close()
        self._sender.close()

    # ---------------------------------------------------------------- tasks (event loop)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _finish(self, purpose: Purpose, completion: Completion) -> None:
        with self._changed:
            self._finished[purpose].append(completion)
            self._changed.notify_all()

    async def _set_paused(self, paused: bool) -> None:
        if paused:
            await self._requests.hold_training()
        else:
            self._requests.release_training()

    # ---------------------------------------------------------------- weight updates

    def _deliver(self, version: int, weights: NamedTensors, read: Flag) -> DeliveryReport:
        """In the sync thread: the whole delivery but the verdict; `read` is set when `weights` are not needed any more."""
        timeout_s = self._settings.response_timeout_s
        started = time.perf_counter()
        try:
            with self._standing_still():
                try:
                    self._sender.send(SyncClient(self, version), weights)
                except BaseException:
                    # Weights of unknown state are served from here on: their tokens must not pass for those of a proved version.
                    with contextlib.suppress(Exception):
                        self.call(self._client.set_version(str(version)), timeout_s)
                    raise
        finally:
            read.set()
        pause_s = time.perf_counter() - started
        reported = self.call(self._client.version(), timeout_s)
        probe = self.call(self._client.score(self._settings.probe_ids), timeout_s)
        return DeliveryReport(parse_version(reported), probe, pause_s)

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Generation paused meanwhile, and resumed whatever happens: paused, every request would wait for ever."""
        timeout_s = self._settings.response_timeout_s
        fault: BaseException | None = None
        try:
            # Draining takes as long as the longest response: that is no hang while the engine gives signs of life.
            self.call(self._pause(), None if self._settings.in_flight == "wait" else timeout_s)
            yield
        except BaseException as error:
            fault = error
            raise
        finally:
            try:
                self.call(self._resume(), timeout_s)
            except Exception as error:
                self._fail(error)
                if fault is None:
                    raise

    async def _pause(self) -> None:
        settings = self._settings
        self._requests.close_gate()
        drain = settings.in_flight == "wait"
        clear = settings.in_flight == "restart" or settings.prefix_cache == "reset"
        await self._client.pause("wait" if drain else "keep", clear)
        # A prompt not yet read would be read by the new weights, under the salt of the old ones.
        await self._requests.take_back_unread(drained=drain)

    async def _resume(self) -> None:
        await self._client.resume()
        # Never used before: not by a delivery that failed, nor by another trainer of a server.
        self._requests.open_gate(secrets.token_hex(8) if self._settings.prefix_cache == "salt" else None)

    # ---------------------------------------------------------------- life (event loop)

    async def _start(self) -> None:
        await self._client.start()
        await self._check_logprobs()
        self._spawn(self._watch())

    async def _check_logprobs(self) -> None:
        """Log-probs must be of the distribution after temperature: differences between two tokens grow as 1 / temperature."""
        spread = []
        for temperature in (1.0, 0.5):
            params = {
                "temperature": temperature,
                "max_tokens": 1,
                "logprobs": 5,
                "detokenize": False,
                "seed": 0,
                "ignore_eos": True,
            }
            sampled = await self._client.generate(f"check-{temperature}", self._settings.probe_ids, params, None)
            likeliest = sorted(sampled.top_logprobs.values(), reverse=True)[:4]  # of five, one may be the sampled token's
            spread.append(likeliest[0] - likeliest[-1])
        if abs(spread[1] - 2.0 * spread[0]) > 0.05 * spread[1] + 1e-3:
            raise EngineError(
                "vLLM's logprobs_mode must be processed_logprobs, got log-probs without temperature (the likeliest and fourth "
                f"token: {spread[0]:.3f} nats apart at temperature 1, and {spread[1]:.3f} at 0.5 instead of twice as much). "
                "Start the server with --logprobs-mode processed_logprobs."
            )

    async def _watch(self) -> None:
        """Notice an engine that is hung or dead although nobody happens to wait for an answer."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            async with _within(self._settings.response_timeout_s, "a sign of life"):
                await self._client.version()

    async def _end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await self._client.stop()
        await asyncio.wait(tasks, timeout=1.0) if tasks else None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if not self._stopping:
                self._failure = self._failure or error
            self._changed.notify_all()
        self._end_calls()

    def _end_calls(self) -> None:
        """End the waits of other threads for an engine that will not answer any more."""
        for call in list(self._calls):
            call.cancel()

    def _raise_if_dead(self) -> None:
        if self._stopping:
            raise EngineError("The generation engine was stopped.")
        if isinstance(self._failure, AsyncRLError):
            raise self._failure
        if self._failure is not None:
            raise EngineError(f"The vLLM engine failed: {_innermost(self._failure)}") from self._failure


class SyncClient:
    """The four calls of vLLM's `VLLMWeightSyncClient`, blocking, for a sender in a thread; finishing names the version."""

    def __init__(self, backend: VLLMBackend, version: int) -> None:
        self._backend = backend
        self._client = backend._client
        self._timeout_s = backend._settings.response_timeout_s
        self._version = version

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Set the transport up."""
        self._call(self._client.init_transfer(init_info))

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._call(self._client.start_update())

    def update_weights(self, update_info: Any) -> None:
        """Load one chunk."""
        self._call(self._client.update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve what was loaded."""
        self._call(self._client.finish_update(str(self._version)))

    @property
    def world_size(self) -> int:
        """Number of vLLM's workers."""
        return self._client.world_size

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._backend.call(coroutine, self._timeout_s)


@contextlib.asynccontextmanager
async def _within(timeout_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise EngineError(
            f"The vLLM engine must give {what} within {timeout_s:.1f} s, and did not. It hangs or is stopped."
        ) from error


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None and not isinstance(error, AsyncRLError):
        error = error.__cause__
    return f"{error}" if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {error}"
