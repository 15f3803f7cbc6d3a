"""Weight updates of a vLLM engine: a thread that delivers them between two decode steps, and the report for the proof.

begin (trainer) --> sync thread: stage, close the gate, pause, stream, resume, open the gate, probe --> finish (anyone)
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Protocol

from lit_asyncrl.errors import AsyncRLError, EngineDiedError, WeightSyncError
from lit_asyncrl.generation.vllm_interface import VLLMClient, parse_version
from lit_asyncrl.generation.vllm_requests import VLLMRequests
from lit_asyncrl.generation.vllm_sender import WeightSender
from lit_asyncrl.supervisor import POLL_S
from lit_asyncrl.types import DeliveryReport, InFlight, NamedTensors, PrefixCache
from lit_asyncrl.waits import Flag

VLLM_SLEEP_S = 0.02
"""How long vLLM 0.32 has stood still when it answers a pause."""


class Call(Protocol):
    """Runs a coroutine on the engine's loop and waits for its result; no limit: as long as the engine lives."""

    def __call__(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float | None) -> Any:
        """The result, or `EngineError`."""
        ...


@dataclass(frozen=True, slots=True)
class UpdatePolicy:
    """What an update does to everything else.

    Attributes:
        in_flight, prefix_cache: what becomes of responses in flight and of cached prefixes.
        probe_ids: sequence scored after each update.
        response_timeout_s: longest time for one answer of vLLM.
    """

    in_flight: InFlight
    prefix_cache: PrefixCache
    probe_ids: Sequence[int]
    response_timeout_s: float


class VLLMUpdates:
    """Delivers weights, one update at a time.

    Args:
        client: vLLM.
        sender: carries the weights.
        requests: those in flight, with their gate.
        policy: see `UpdatePolicy`.
        call: runs the client's coroutines.
        fail: gets a fault after which the engine cannot go on.
    """

    def __init__(
        self,
        client: VLLMClient,
        sender: WeightSender,
        requests: VLLMRequests,
        policy: UpdatePolicy,
        *,
        call: Call,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._client = client
        self._sender = sender
        self._requests = requests
        self._policy = policy
        self._call = call
        self._fail = fail
        self._pending_version: int | None = None
        self._update: Future[DeliveryReport] | None = None
        self._sync = ThreadPoolExecutor(1, thread_name_prefix="vllm-sync")

    def begin(self, version: int, weights: NamedTensors) -> None:
        """Copy the weights out and start the delivery; returns when `weights` may change."""
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
            pass  # the verdict, also that of a fault, belongs to finish

    def finish(self, timeout_s: float) -> DeliveryReport:
        """Wait for the delivery's report; after a timeout it may be called again.

        Raises:
            EngineDiedError: vLLM died meanwhile, or gives no sign of life.
            WeightSyncError: anything else.
        """
        version, update = self._pending_version, self._update
        assert version is not None and update is not None, "finish without begin"
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
        except EngineDiedError:
            self._pending_version = None
            raise
        except Exception as error:
            self._pending_version = None
            raise WeightSyncError(f"vLLM must load version {version}, and refused: {innermost(error)}") from error
        self._pending_version = None
        return report

    def close(self) -> None:
        """End the thread, once the engine gives or refuses every answer; idempotent."""
        self._sync.shutdown(wait=True, cancel_futures=True)
        self._sender.close()

    # ---------------------------------------------------------------- sync thread

    def _deliver(self, version: int, weights: NamedTensors, read: Flag) -> DeliveryReport:
        """The whole delivery but the verdict; `read` is set when `weights` are not needed any more."""
        timeout_s = self._policy.response_timeout_s
        try:
            with self._standing_still():
                stood_from = time.perf_counter() - VLLM_SLEEP_S
                try:
                    self._sender.send(SyncClient(self._client, self._call, timeout_s, version), weights)
                except BaseException:
                    # Weights of unknown state are served from here on: their tokens must not pass for those of a proved version.
                    with contextlib.suppress(Exception):
                        self._call(self._client.set_version(str(version)), timeout_s)
                    raise
        finally:
            read.set()
        pause_s = time.perf_counter() - stood_from
        reported = self._call(self._client.version(), timeout_s)
        probe = self._call(self._client.score(self._policy.probe_ids), timeout_s)
        return DeliveryReport(parse_version(reported), probe, pause_s)

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Generation paused meanwhile, and resumed whatever happens: paused, every request would wait for ever."""
        timeout_s = self._policy.response_timeout_s
        fault: BaseException | None = None
        try:
            # Draining takes as long as the longest response: that is no hang while the engine gives signs of life.
            self._call(self._pause(), None if self._policy.in_flight == "wait" else timeout_s)
            yield
        except BaseException as error:
            fault = error
            raise
        finally:
            try:
                self._call(self._resume(), timeout_s)
            except Exception as error:
                self._fail(error)
                if fault is None:
                    raise

    # ---------------------------------------------------------------- event loop

    async def _pause(self) -> None:
        policy = self._policy
        self._requests.close_gate()
        drain = policy.in_flight == "wait"
        clear = policy.in_flight == "restart" or policy.prefix_cache == "reset"
        await self._client.pause("wait" if drain else "keep", clear)
        # A prompt not yet read would be read by the new weights, under the salt of the old ones.
        await self._requests.take_back_unread(drained=drain)

    async def _resume(self) -> None:
        await self._client.resume()
        # Never used before: not by a delivery that failed, nor by another trainer of a server.
        self._requests.open_gate(secrets.token_hex(8) if self._policy.prefix_cache == "salt" else None)


class SyncClient:
    """The four calls of vLLM's `VLLMWeightSyncClient`, blocking, for a sender in a thread; finishing names the version."""

    def __init__(self, client: VLLMClient, call: Call, timeout_s: float, version: int) -> None:
        self._client = client
        self._call = call
        self._timeout_s = timeout_s
        self._version = version

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Set the transport up."""
        self._call(self._client.init_transfer(init_info), self._timeout_s)

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._call(self._client.start_update(), self._timeout_s)

    def update_weights(self, update_info: Any) -> None:
        """Load one chunk."""
        self._call(self._client.update(update_info), self._timeout_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve what was loaded."""
        self._call(self._client.finish_update(str(self._version)), self._timeout_s)

    @property
    def world_size(self) -> int:
        """Number of vLLM's workers."""
        return self._client.world_size


def innermost(error: BaseException) -> str:
    """The cause in words: the innermost error, or one of ours."""
    while error.__cause__ is not None and not isinstance(error, AsyncRLError):
        error = error.__cause__
    return f"{error}" if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {error}"
