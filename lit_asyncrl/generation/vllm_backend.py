"""The trainer's side of a vLLM engine: an event loop in a thread, requests in flight, weight updates between two decode steps.

    submit --> task per request --gate--> client.generate --> finished completions --> take
    begin_update --> thread of `vllm_updates.py` --> finish_update

`vllm_requests.py` has the requests and their gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

from lit_asyncrl.errors import AsyncRLError, EngineDiedError, EngineError
from lit_asyncrl.generation.vllm_interface import VLLMClient
from lit_asyncrl.generation.vllm_requests import VLLMRequests
from lit_asyncrl.generation.vllm_sender import WeightSender
from lit_asyncrl.generation.vllm_updates import UpdatePolicy, VLLMUpdates, innermost
from lit_asyncrl.types import (
    Completion,
    DeliveryReport,
    GenerationRequest,
    InFlight,
    NamedTensors,
    PrefixCache,
    Purpose,
)
from lit_asyncrl.waits import Changed, start_thread

T = TypeVar("T")

STOP_TIMEOUT_S = 15.0
"""Longest time to end vLLM's processes."""
HEARTBEAT_S = 2.0
"""How often the engine is asked for a sign of life; also the longest wait for one when another answer fails to come."""
READ_TIMEOUT_S = 5.0
"""Longest wait for the event loop when something of it is read."""


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
        self._settings = settings
        self._changed = Changed()
        self._finished: dict[Purpose, list[Completion]] = {"train": [], "evaluation": []}
        self._failure: BaseException | None = None
        self._stopping = False
        self._last_sign = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[Future[Any]] = set()
        self._requests = VLLMRequests(
            client,
            eos_token_ids=settings.eos_token_ids,
            num_slots=settings.num_slots,
            spawn=self._spawn,
            finished=self._finish,
        )
        policy = UpdatePolicy(settings.in_flight, settings.prefix_cache, settings.probe_ids, settings.response_timeout_s)
        self._updates = VLLMUpdates(client, sender, self._requests, policy, call=self.call, fail=self._fail)
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread(self._loop.run_forever, "vllm-loop")
        try:
            self.call(self._start(), settings.start_timeout_s + STOP_TIMEOUT_S)
        except BaseException:
            self.stop()  # also when interrupted from the keyboard
            raise

    @property
    def generated_tokens(self) -> int:
        """Training tokens sampled so far, as far as they are known here."""
        return self._read(lambda: self._requests.generated_tokens)

    def partial_completions(self) -> list[Completion]:
        """Training responses that were not taken, finished or not, as far as known here; also of an engine that has ended."""
        return self._read(self._untaken)

    @property
    def silent_s(self) -> float:
        """Seconds since vLLM last answered anything; up to `HEARTBEAT_S` and an answer's time for one that is well."""
        return time.monotonic() - self._last_sign

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
        """See `VLLMUpdates.begin`."""
        self._raise_if_dead()
        self._updates.begin(version, weights)

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """See `VLLMUpdates.finish`."""
        return self._updates.finish(timeout_s)

    def set_paused(self, paused: bool) -> None:
        """Let training responses stand still (taken back from vLLM, sampled tokens kept), or go on."""
        self._raise_if_dead()
        self.call(self._set_paused(paused), self._settings.response_timeout_s)

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float | None) -> Any:
        """Run a coroutine on the loop and wait for it; without a limit, until the engine answers, fails or is stopped.

        Raises:
            EngineDiedError: no answer in time, nor any other sign of life.
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
            result = future.result(timeout_s)
            self._last_sign = time.monotonic()
            return result
        except FutureTimeoutError as error:
            if future.done():
                raise
            future.cancel()
            kind, state = (
                (EngineError, "It answers other calls") if self._is_alive() else (EngineDiedError, "It hangs or is stopped")
            )
            raise kind(f"The vLLM engine must answer within {timeout_s:.1f} s, and did not. {state}.") from error
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
        self._updates.close()
        if not self._thread.is_alive():
            self._loop.close()

    def _is_alive(self) -> bool:
        """Ask for a sign of life: a paused engine gives one, a stopped process does not."""
        sign = asyncio.run_coroutine_threadsafe(self._client.version(), self._loop)
        try:
            sign.result(HEARTBEAT_S)
        except Exception:  # noqa: BLE001 - whatever the reason, it gave none
            sign.cancel()
            return False
        self._last_sign = time.monotonic()
        return True

    def _read(self, value: Callable[[], T]) -> T:
        """What belongs to the event loop, read there; here when the loop has ended or does not come round."""
        answer: Future[T] = Future()
        with contextlib.suppress(RuntimeError, FutureTimeoutError):  # the loop is closed, or ends just now
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(lambda: answer.set_result(value()))
                return answer.result(READ_TIMEOUT_S)
        return value()

    # ---------------------------------------------------------------- tasks (event loop)

    def _untaken(self) -> list[Completion]:
        with self._changed:
            return [*self._finished["train"], *self._requests.partial_completions()]

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
            self._last_sign = time.monotonic()

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
            raise EngineError(f"The vLLM engine failed: {innermost(self._failure)}") from self._failure


@contextlib.asynccontextmanager
async def _within(timeout_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise EngineDiedError(
            f"The vLLM engine must give {what} within {timeout_s:.1f} s, and did not. It hangs or is stopped."
        ) from error
