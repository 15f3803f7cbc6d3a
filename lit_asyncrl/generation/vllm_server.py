"""VLLMServerEngine: vLLM servers that run by themselves, on this host or others, reached over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from lit_asyncrl.errors import ConfigurationError, EngineError
from lit_asyncrl.generation.vllm_engine import VLLMEngineBase
from lit_asyncrl.generation.vllm_http import ServerConnection
from lit_asyncrl.generation.vllm_interface import Begun, PauseMode, Sampled, VLLMClient
from lit_asyncrl.generation.vllm_sender import DeviceSender, SharedMemorySender, WeightSender
from lit_asyncrl.generation.vllm_server_checks import (
    Expected,
    api_key,
    check_server,
    check_shared_folder,
    checked_urls,
    vocabulary_of,
)
from lit_asyncrl.policy import Dtype
from lit_asyncrl.types import InFlight, PrefixCache

T = TypeVar("T")
ABORT_RETRY_S = 0.02
"""Time between two tries to abort: a request may still be on its way to the server when the first abort arrives."""
EXACT_DISAGREEMENT = 1e-3
"""Nats by which two servers of float32 weights may differ on the probe: sums in another order."""
ROUNDED_DISAGREEMENT = 0.5
"""The same for 16-bit weights, whose noise depends on what is computed beside (0.3 at most for 135M parameters)."""


class VLLMServerEngine(VLLMEngineBase):
    """vLLM servers that someone else starts and ends; `tools/serve_vllm.py` starts one on this host.

    A server needs vLLM 0.32, `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out`, `--logprobs-mode processed_logprobs`, a
    `--weight-transfer-config` that fits `transport`, and a model of the same shape with its tokenizer; the run's start checks all
    of it. The weights it was started with do not matter: the run delivers its own, and leaves the last ones there. A server left
    paused or in the middle of an update by a run that died is taken over. One run at a time may use a server: two would
    overwrite each other's weights, which the proof of delivery notices.

    With several servers each request goes to the one with the fewest in flight here; pauses and updates go to all at once; they
    must agree on the version they serve and on the probe's log-probs.

    A server answers when a response has ended, so a checkpoint holds of those in flight only what earlier tries of them brought:
    the tokens up to the last time they were taken back (`in_flight: restart`, a pause).

    A failed update raises `WeightSyncError` (see `VLLMEngine`); the next update may succeed. A server that ends, hangs or refuses
    is an `EngineError` for the run. In-flight and prefix-cache policies: as in `VLLMEngine`.

    Args:
        urls: of the servers, such as `http://10.0.0.7:8000`. Whoever reaches a server's port can replace its weights: use
            loopback, or a network you trust.
        dtype: of the served weights, that of the servers.
        transport: `shared_memory` through a file, or `nccl` between GPUs (untested so far, one host).
        shared_folder: where the file is, seen under this path by this process and the servers, which run as the same user
            (in memory, such as /dev/shm, it is fastest); None: a nameless memory file, for servers on this host.
        num_slots: most responses decoded at once, training and evaluation together, on all servers together.
        in_flight, prefix_cache: see `VLLMEngine`.
        checksum_every: compare every received tensor's checksum in each n-th update (`shared_memory`); None: never.
        api_key_env: name of the environment variable with the servers' API key; None: no key. vLLM asks for it where responses
            are sampled, and not where weights are replaced: whoever reaches the port can do that.
        start_timeout_s: longest time until every server is up and checked; those that are still loading are waited for.
        response_timeout_s: longest time for one answer; without one a server counts as hung.
    """

    def __init__(
        self,
        urls: Sequence[str] = ("http://127.0.0.1:8000",),
        dtype: Dtype = "float32",
        transport: Literal["shared_memory", "nccl"] = "shared_memory",
        shared_folder: str | None = None,
        num_slots: int = 64,
        in_flight: InFlight = "keep",
        prefix_cache: PrefixCache = "salt",
        checksum_every: int | None = 1,
        api_key_env: str | None = None,
        start_timeout_s: float = 120.0,
        response_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(
            dtype=dtype,
            num_slots=num_slots,
            in_flight=in_flight,
            prefix_cache=prefix_cache,
            start_timeout_s=start_timeout_s,
            response_timeout_s=response_timeout_s,
        )
        if checksum_every is not None and checksum_every < 1:
            raise ConfigurationError(f"engine.checksum_every must be positive, got {checksum_every}.")
        self.urls = checked_urls(urls)
        self._dtype_name: Dtype = dtype
        self._transport: Literal["shared_memory", "nccl"] = transport
        self._shared_folder = shared_folder
        self._checksum_every = checksum_every
        self._api_key_env = api_key_env

    @property
    def num_threads(self) -> int:
        """0: the servers' threads are not this run's to give."""
        return 0

    def _connect(self, policy_path: str, max_model_len: int | None) -> tuple[VLLMClient, WeightSender]:
        sender: WeightSender
        if self._transport == "nccl":
            sender = DeviceSender("nccl", self._dtype)
        else:
            check_shared_folder(self._shared_folder, self.urls)
            sender = SharedMemorySender(self._dtype, self._shared_folder, self._checksum_every)
        expected = Expected(
            dtype=self._dtype_name,
            transport=self._transport,
            vocab_size=vocabulary_of(policy_path),
            max_model_len=max_model_len,
            num_slots=-(-self.num_slots // len(self.urls)),
        )
        key = api_key(self._api_key_env)
        servers = [ServerConnection(url, key, self._response_timeout_s) for url in self.urls]
        return ServerClient(servers, expected, self._start_timeout_s), sender


class ServerClient:
    """`VLLMClient` over one or several servers.

    Args:
        servers: not yet opened.
        expected: of each server.
        start_timeout_s: longest time until all are healthy.
    """

    def __init__(self, servers: Sequence[ServerConnection], expected: Expected, start_timeout_s: float) -> None:
        self.max_model_len = 0
        self.world_size = 0
        self._servers = list(servers)
        self._expected = expected
        self._start_timeout_s = start_timeout_s
        self._sampled_at: dict[str, ServerConnection] = {}

    async def start(self) -> None:
        """See `VLLMClient.start`."""
        await self._all(lambda server: server.open(self._start_timeout_s))
        self.max_model_len = min(await self._all(lambda server: check_server(server, self._expected)))
        self.world_size = sum(server.world_size for server in self._servers)

    async def stop(self) -> None:
        """See `VLLMClient.stop`."""
        await asyncio.gather(*(server.close() for server in self._servers), return_exceptions=True)

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: dict[str, Any],
        salt: str | None,
        begun: Begun | None = None,
    ) -> Sampled:
        """See `VLLMClient.generate`. The server with the fewest responses in flight samples it."""
        server = min(self._servers, key=lambda candidate: candidate.in_flight)
        self._sampled_at[request_id] = server
        try:
            return await server.generate(request_id, token_ids, params, salt, begun)
        finally:
            del self._sampled_at[request_id]

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `VLLMClient.score`.

        Raises:
            EngineError: two servers differ by more than rounding explains.
        """
        scores: list[list[float]] = await self._all(lambda server: server.score(token_ids))
        limit = EXACT_DISAGREEMENT if self._expected.dtype == "float32" else ROUNDED_DISAGREEMENT
        for server, other in zip(self._servers, scores, strict=True):
            worst = max(range(len(other)), key=lambda i, other=other: abs(other[i] - scores[0][i]))  # type: ignore[misc]
            if not abs(other[worst] - scores[0][worst]) <= limit:
                raise EngineError(
                    f"The servers must serve the same weights: log-probs on the probe may differ by {limit:g} nats, got "
                    f"{scores[0][worst]:.6f} from {self._servers[0].url} and {other[worst]:.6f} from {server.url} at token "
                    f"{worst + 1}."
                )
        return scores[0]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `VLLMClient.abort`. Returns when the requests have ended."""
        while left := {name: self._sampled_at[name] for name in request_ids if name in self._sampled_at}:
            names = {server: [name for name, at in left.items() if at is server] for server in set(left.values())}
            await _together(server.abort(mine) for server, mine in names.items())
            await asyncio.sleep(ABORT_RETRY_S)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """See `VLLMClient.pause`."""
        await self._all(lambda server: server.pause(mode, clear_cache))

    async def resume(self) -> None:
        """See `VLLMClient.resume`."""
        await self._all(lambda server: server.resume())

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """See `VLLMClient.init_transfer`. With `nccl`, each server's workers take the ranks after those of the one before."""
        ranks = 0
        calls = []
        for server in self._servers:
            mine = info | {"rank_offset": info["rank_offset"] + ranks} if "rank_offset" in info else info
            calls.append(server.init_transfer(mine))
            ranks += server.world_size
        await _together(calls)

    async def start_update(self) -> None:
        """See `VLLMClient.start_update`."""
        await self._all(lambda server: server.start_update())

    async def update(self, info: dict[str, Any]) -> None:
        """See `VLLMClient.update`."""
        await self._all(lambda server: server.update(info))

    async def finish_update(self, version: str) -> None:
        """See `VLLMClient.finish_update`."""
        await self._all(lambda server: server.finish_update(version))

    async def set_version(self, version: str) -> None:
        """See `VLLMClient.set_version`."""
        await self._all(lambda server: server.set_version(version))

    async def version(self) -> str:
        """See `VLLMClient.version`; where servers differ, as they do for a moment in an update, all of them: no number."""
        versions = await self._all(lambda server: server.version())
        return versions[0] if len(set(versions)) == 1 else " and ".join(versions)

    async def _all(self, call: Callable[[ServerConnection], Awaitable[T]]) -> list[T]:
        return await _together(call(server) for server in self._servers)


async def _together(calls: Any) -> list[Any]:
    """All calls at once; returns when all have ended, so that none goes on beside the next step.

    Raises:
        Exception: of the first call that failed.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
