"""One vLLM server over HTTP: its routes, with a time limit on every call and errors that say which server, which route and why.

The routes are those of vLLM 0.32 in development mode (weight updates, pause) and of `--enable-scale-out` (token ids in, token ids
out). Nothing here imports vLLM: a trainer without it can use a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lit_asyncrl.errors import ConfigurationError, EngineDiedError, EngineError
from lit_asyncrl.generation.vllm_interface import FIRST_TOKEN_ONLY, Begun, PauseMode, Sampled, versions_of

if TYPE_CHECKING:
    from aiohttp import ClientSession

T = TypeVar("T")
log = logging.getLogger(__name__)

POLL_S = 0.2
"""Time between two tries to reach a server that is still starting."""
STOP_TIMEOUT_S = 2.0
"""Longest wait for an answer when nobody needs it any more."""
ID_PREFIX = "generate-tokens-"
"""What the server puts before a request's id, and wants to be given to abort it."""
LONGEST_REASON = 600  # characters of a server's message that go into ours


class ServerError(EngineError):
    """The server answered, with an error.

    Attributes:
        status: of HTTP.
        reason: the server's message.
    """

    def __init__(self, url: str, route: str, status: int, reason: str) -> None:
        super().__init__(f"The vLLM server at {url} refused {route} ({status}): {reason}")
        self.status = status
        self.reason = reason


class ServerConnection:
    """Connections to one server; belongs to one event loop.

    Args:
        url: such as `http://127.0.0.1:8000`.
        api_key: sent as bearer token; None: none.
        timeout_s: longest wait for an answer, except for a response's tokens: those may take any time, and the backend looks
            meanwhile whether the engine lives.

    Attributes:
        in_flight: responses being sampled here.
        world_size: vLLM's workers, known from `vllm_server_checks`.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self.url = url
        self.in_flight = 0
        self.world_size = 1
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._session: ClientSession | None = None
        self._update_open = False

    async def open(self, timeout_s: float) -> None:
        """Return when the server answers that it is healthy; one that is still starting is waited for.

        Raises:
            EngineError: not healthy in time.
        """
        import aiohttp  # takes longer to import than this package's other modules, and only a run with a server needs it

        self._session = aiohttp.ClientSession(
            # All requests at once, control calls too. Each on its own connection: the server closes idle ones, and any one after
            # an error, and a request that meets a closing connection is lost.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers={} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"},
        )
        deadline, told = time.monotonic() + timeout_s, False
        while True:
            try:
                await self.call("GET", "/health", timeout_s=max(POLL_S, deadline - time.monotonic()))
                return
            except EngineError as error:
                if not told:
                    log.warning("Waiting up to %.0f s for the vLLM server at %s. %s", timeout_s, self.url, error)
                    told = True
                if time.monotonic() + POLL_S > deadline:
                    raise ConfigurationError(
                        f"engine.urls must name vLLM servers that are up, got {self.url}, not healthy within {timeout_s:.1f} s. "
                        "Start it (tools/serve_vllm.py does, on one host), or raise engine.start_timeout_s if it still loads. "
                        f"{error}"
                    ) from error
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Leave the server scheduling, end what is still sampled for us, and close; never raises."""
        session = self._session
        if session is not None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self.resume()
            self._session = None
            await session.close()

    async def call(self, method: str, route: str, body: Any = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """One exchange of JSON.

        Args:
            method: of HTTP.
            route: path and query.
            body: sent as JSON; None: no body.
            timeout_s: longest wait; None: the connection's; infinite: no limit.

        Raises:
            ServerError: any status but 200.
            EngineDiedError: no connection, or no answer in time.
            EngineError: no JSON.
        """
        text = await self._text(method, route, body, self._timeout_s if timeout_s is None else timeout_s)
        return self._read(lambda: dict(json.loads(text)) if text else {}, "JSON", text)

    async def _text(self, method: str, route: str, body: Any, limit_s: float, begun: Begun | None = None) -> str:
        """The body of an answer; `begun` is called when its first part is here."""
        import aiohttp

        if self._session is None:
            raise EngineError(f"The connection to the vLLM server at {self.url} is closed.")
        limit = aiohttp.ClientTimeout(total=None if limit_s == float("inf") else limit_s, sock_connect=self._timeout_s)
        exchange = self._session.request(method, self.url + route, json=body, timeout=limit, allow_redirects=False)
        try:
            async with exchange as response:
                first = await response.content.readany()
                if begun is not None and response.status == 200:
                    begun(None)
                text = (first + await response.content.read()).decode(errors="replace")
                if response.status != 200:
                    raise ServerError(self.url, f"{method} {route}", response.status, reason_of(text))
                return text
        except TimeoutError as error:
            limit_s = self._timeout_s if isinstance(error, aiohttp.ConnectionTimeoutError) else limit_s
            raise EngineDiedError(
                f"The vLLM server at {self.url} must answer {method} {route} within {limit_s:.1f} s, and did not. It hangs or is "
                "stopped."
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDiedError(
                f"The connection to the vLLM server at {self.url} failed at {method} {route}: {type(error).__name__}: {error}"
            ) from error

    # ---------------------------------------------------------------- sampling

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: dict[str, Any],
        salt: str | None,
        begun: Begun | None = None,
    ) -> Sampled:
        """See `VLLMClient.generate`. The answer comes in two parts: the first token, and the rest."""
        body = {
            "request_id": request_id,
            "token_ids": list(token_ids),
            "sampling_params": params | {"stream_interval": FIRST_TOKEN_ONLY},
            "cache_salt": salt,
            "stream": True,
        }
        self.in_flight += 1
        try:
            text = await self._text("POST", "/inference/v1/generate", body, float("inf"), begun)
        finally:
            self.in_flight -= 1
        events = self._read(lambda: events_of(text), "events in JSON", text)
        for event in events:
            if "error" in event:
                raise ServerError(self.url, "POST /inference/v1/generate", 200, reason_of(json.dumps(event)))
        return self._read(lambda: sampled_from(events), "token ids, log-probs and weight versions", text)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `VLLMClient.score`."""
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
        body = {"token_ids": list(token_ids), "sampling_params": params, "cache_salt": "probe"}
        answer = await self.call("POST", "/inference/v1/generate", body)
        return self._read(
            lambda: [float(answer["prompt_logprobs"][i][str(token_ids[i])]["logprob"]) for i in range(1, len(token_ids))],
            "prompt_logprobs of every token",
            answer,
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests."""
        await self.call("POST", "/abort_requests", {"request_ids": [ID_PREFIX + name for name in request_ids]})

    # ---------------------------------------------------------------- control

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """See `VLLMClient.pause`."""
        limit = float("inf") if mode == "wait" else None  # draining lasts as long as the longest response
        await self.call("POST", f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}", timeout_s=limit)

    async def resume(self) -> None:
        """See `VLLMClient.resume`. After an update that failed, here or at another server, the model must be whole first."""
        if self._update_open:
            await self.give_up_update()
        await self.call("POST", "/resume")

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """See `VLLMClient.init_transfer`."""
        await self.call("POST", "/init_weight_transfer_engine", {"init_info": info})

    async def start_update(self) -> None:
        """See `VLLMClient.start_update`."""
        self._update_open = True
        await self.call("POST", "/start_weight_update")

    async def give_up_update(self) -> None:
        """End an update that was left half-way: the model can run, with weights that are nobody's. vLLM has no route for it."""
        with contextlib.suppress(ServerError):  # it refuses where tensors are missing, but puts the layers together first
            await self.call("POST", "/finish_weight_update")
        with contextlib.suppress(ServerError):  # a chunk that cannot be read ends what is still open
            await self.call("POST", "/update_weights", {"update_info": {}})
        self._update_open = False

    async def update(self, info: Any) -> None:
        """See `VLLMClient.update`."""
        await self.call("POST", "/update_weights", {"update_info": info})

    async def finish_update(self, version: str) -> None:
        """See `VLLMClient.finish_update`."""
        await self.call("POST", "/finish_weight_update", {"weight_version": version})
        self._update_open = False

    async def set_version(self, version: str) -> None:
        """See `VLLMClient.set_version`."""
        await self.call("POST", "/update_weight_version", {"new_version": version})

    async def version(self) -> str:
        """See `VLLMClient.version`."""
        answer = await self.call("GET", "/weight_info")
        return self._read(lambda: str(answer["weight_version"]), "weight_version", answer)

    def _read(self, value: Callable[[], T], contract: str, answer: Any) -> T:
        """What `value` takes from an answer.

        Raises:
            EngineError: it is not there.
        """
        try:
            return value()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"The vLLM server at {self.url} must answer with {contract}, got {str(answer)[:200]!r} "
                f"({type(error).__name__}: {error}). Is it vLLM 0.32?"
            ) from error


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream of events."""
    lines = (line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:"))
    return [dict(json.loads(line)) for line in lines if line != "[DONE]"]


def sampled_from(events: Sequence[dict[str, Any]]) -> Sampled:
    """What the events of one response say together.

    Raises:
        LookupError, TypeError, ValueError: something is missing, such as the end.
    """
    sampled = Sampled([], [], [], "")
    for choice in (choice for event in events for choice in event["choices"]):
        content = (choice["logprobs"] or {}).get("content") or []
        if not sampled.token_ids and len(content) == 1:
            sampled.top_logprobs = {int(top["token_id"]): float(top["logprob"]) for top in content[0]["top_logprobs"]}
        sampled.token_ids += choice["token_ids"] or []
        sampled.logprobs += [float(entry["logprob"]) for entry in content]
        spans = choice["weight_versions"] or ()  # with the last event, for all tokens
        sampled.versions += versions_of((span["version"], span["start"], span["end"]) for span in spans)
        sampled.finish_reason = choice["finish_reason"] or ""
    if not sampled.finish_reason:
        raise ValueError("the response ends without a finish_reason")
    return sampled


def reason_of(text: str) -> str:
    """The message in an error's body, of which vLLM and its web framework have several forms; of a worker's error, its own."""
    try:
        body: Any = json.loads(text)
    except ValueError:
        body = text
    for key in ("error", "detail", "message"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    reason = str(body).strip()
    if worker := re.search(r"Worker failed with error '(.*)', please check", reason, re.DOTALL):
        reason = worker[1]
    return reason[:LONGEST_REASON] or "no reason given"
