"""Requests of a vLLM engine in flight: a task each, behind a gate that holds them while weights change. Event loop only.

vLLM is given no more requests than there are slots, so that a probe never waits for one of them to end. Those whose prompt it has
not read when weights change are taken back, and go again under the new weights: each prompt is read by the weights whose
prefix-cache salt it carries.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_asyncrl.errors import EngineError
from lit_asyncrl.generation.vllm_interface import Sampled, SoFar, VLLMClient
from lit_asyncrl.seeds import derive_seed
from lit_asyncrl.types import Completion, FinishReason, GenerationRequest, Purpose


@dataclass(slots=True)
class _Pending:
    """A request and what came back for it so far (over several tries when it was taken back)."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    tries: int = 0
    so_far: SoFar | None = None  # of the present try

    def __post_init__(self) -> None:
        if (partial := self.request.partial) is not None:
            self.token_ids += partial.token_ids
            self.logprobs += partial.behavior_logprobs
            self.versions += partial.token_versions

    def completion(self, reason: FinishReason) -> Completion:
        """What came back, and what is known of the present try."""
        more = Sampled([], [], [], "") if self.so_far is None else self.so_far()
        return Completion(
            self.request.request_id,
            self.token_ids + more.token_ids,
            self.logprobs + more.logprobs,
            self.versions + more.versions,
            reason,
        )


class VLLMRequests:
    """Samples responses through a client, over as many tries as they are taken back.

    Args:
        client: vLLM.
        eos_token_ids: ids that end a response.
        num_slots: responses that vLLM decodes at once.
        spawn: runs a coroutine as a task of the loop, and hears of its fault.
        finished: gets each completion with its purpose.

    Attributes:
        salt: of the prefix cache, for requests sent from now on; None for none.
    """

    def __init__(
        self,
        client: VLLMClient,
        *,
        eos_token_ids: Sequence[int],
        num_slots: int,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        finished: Callable[[Purpose, Completion], None],
    ) -> None:
        self._ended_tokens = 0  # of training, of tries that have ended
        self._unfinished: dict[tuple[Purpose, int], _Pending] = {}
        self.salt: str | None = None
        self._client = client
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_slots = num_slots
        self._spawn = spawn
        self._finished = finished
        self._at_vllm: dict[str, Purpose] = {}
        self._begun: set[str] = set()  # those at vLLM whose first token is sampled
        self._waiting: dict[Purpose, list[tuple[int, int, asyncio.Future[None]]]] = {"evaluation": [], "train": []}
        self._ticket_numbers = itertools.count()
        self._admitted = 0  # let go, and not yet at vLLM
        self._updating = False
        self._paused = False

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, in the order of their ids."""
        for request in sorted(requests, key=lambda request: request.request_id):
            pending = self._unfinished[request.purpose, request.request_id] = _Pending(request)
            self._spawn(self._sample(pending))

    @property
    def generated_tokens(self) -> int:
        """Training tokens sampled so far, as far as they are known here, without those of a request's `partial`."""
        tries = (pending.so_far for pending in self._unfinished.values() if pending.request.purpose == "train")
        return self._ended_tokens + sum(len(so_far().token_ids) for so_far in tries if so_far is not None)

    def partial_completions(self) -> list[Completion]:
        """Training responses that are not finished and have at least one token."""
        training = [pending for pending in self._unfinished.values() if pending.request.purpose == "train"]
        return [partial for pending in training if (partial := pending.completion("abort")).token_ids]

    async def hold_training(self) -> None:
        """Take training requests back; none goes until `release_training`."""
        self._paused = True
        await self._all_sent()
        await self._take_back([name for name, purpose in self._at_vllm.items() if purpose == "train"])

    def release_training(self) -> None:
        """Let them go on."""
        self._paused = False
        self._admit()

    def close_gate(self) -> None:
        """Let no request go to vLLM: weights are about to change."""
        self._updating = True

    async def take_back_unread(self, *, drained: bool) -> None:
        """Take back what vLLM has not begun, once it stands still; after a drain, that is everything it still has."""
        await self._all_sent()
        await self._take_back([name for name in self._at_vllm if drained or name not in self._begun])

    def open_gate(self, salt: str | None) -> None:
        """Let requests go again, under this salt."""
        self.salt = salt
        self._updating = False
        self._admit()

    async def _sample(self, pending: _Pending) -> None:
        """Sample a response, over as many tries as it is taken back."""
        request = pending.request
        while not self._is_complete(pending):  # a try may be taken back in the very step that ends the response
            await self._turn(request)
            request_id = f"{request.request_id}-{request.purpose}-{pending.tries}"
            pending.tries += 1
            self._at_vllm[request_id] = request.purpose
            try:
                await self._try(pending, request_id)
            finally:
                del self._at_vllm[request_id]
                self._begun.discard(request_id)
                self._admit()
        del self._unfinished[request.purpose, request.request_id]
        self._finished(request.purpose, pending.completion("stop" if self._ends(pending) else "length"))

    async def _try(self, pending: _Pending, request_id: str) -> None:
        """Sample until the response ends or is taken back; what is known of it stays when vLLM dies."""

        def begun(so_far: SoFar | None) -> None:
            self._begun.add(request_id)
            pending.so_far = so_far

        token_ids = [*pending.request.prompt_ids, *pending.token_ids]
        try:
            sampled = await self._client.generate(request_id, token_ids, self._params(pending), self.salt, begun)
        except BaseException:
            if pending.so_far is not None:
                self._extend(pending, pending.so_far())
            raise
        self._extend(pending, sampled)

    def _is_complete(self, pending: _Pending) -> bool:
        return len(pending.token_ids) >= pending.request.sampling.max_new_tokens or self._ends(pending)

    def _ends(self, pending: _Pending) -> bool:
        return bool(pending.token_ids) and pending.token_ids[-1] in self._eos_token_ids

    def _extend(self, pending: _Pending, sampled: Sampled) -> None:
        count = len(sampled.token_ids)
        if not count == len(sampled.logprobs) == len(sampled.versions):
            raise EngineError(
                f"vLLM must return a log-prob and a version for each token, got {count} tokens, {len(sampled.logprobs)} "
                f"log-probs and {len(sampled.versions)} versions (request {pending.request.request_id})."
            )
        pending.so_far = None
        pending.token_ids += sampled.token_ids
        pending.logprobs += sampled.logprobs
        pending.versions += sampled.versions
        if pending.request.purpose == "train":
            self._ended_tokens += count

    def _params(self, pending: _Pending) -> dict[str, Any]:
        sampling, done = pending.request.sampling, len(pending.token_ids)
        return {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens - done,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            # vLLM starts a generator from the seed: a response that goes on must not see its first random numbers again.
            "seed": derive_seed(pending.request.seed, done) if done else pending.request.seed,
            "stop_token_ids": list(self._eos_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }

    async def _turn(self, request: GenerationRequest) -> None:
        """Wait until vLLM may be given this request."""
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Oldest first: a response that was taken back goes before those that have not begun.
        heapq.heappush(self._waiting[request.purpose], (request.request_id, next(self._ticket_numbers), ticket))
        self._admit()
        await ticket
        self._admitted -= 1

    def _may_go(self, purpose: Purpose) -> bool:
        room = len(self._at_vllm) + self._admitted < self._num_slots
        return room and not self._updating and not (self._paused and purpose == "train")

    def _admit(self) -> None:
        """Let waiting requests go as far as there is room: evaluation first, then the oldest."""
        for purpose, queue in self._waiting.items():
            while queue and self._may_go(purpose):
                ticket = heapq.heappop(queue)[-1]
                if not ticket.done():
                    ticket.set_result(None)
                    self._admitted += 1

    async def _all_sent(self) -> None:
        """Until every request that was let go is with vLLM, where it can be taken back."""
        while self._admitted:
            await asyncio.sleep(0)

    async def _take_back(self, request_ids: list[str]) -> None:
        if request_ids:
            await self._client.abort(request_ids)
        while any(name in self._at_vllm for name in request_ids):
            await asyncio.sleep(0.001)
