"""Decodes many responses at once with a plain transformers model: continuous slots, no `generate`.

    waiting requests --prefill of a free row--> live rows [0, n) --one token per row and step--> finished completions

Live rows are always the first n: a finished row is given to a waiting request at once, or the last row moves into the hole, so
that a step's cost follows the number of live responses. Prefill stores the prompt but its last token, which the next step
feeds like any other: sampling happens in one place. Nothing here loops over rows per token. A request with a `partial` begins
after it: prompt and partial are prefilled together, and the uniform of a token depends on its position alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_asyncrl.generation.sampling import Restriction, request_uniforms, sample_tokens
from lit_asyncrl.generation.slot_cache import SlotCache
from lit_asyncrl.generation.slot_prefill import Prefiller
from lit_asyncrl.types import Completion, FinishReason, GenerationRequest


class Increments(NamedTuple):
    """What was sampled for unfinished responses since the last time; the responses' tokens are concatenated.

    Attributes:
        request_ids: of the responses.
        lengths: new tokens of each.
        token_ids, logprobs, versions: [sum of lengths] each, int64, float32 (nats), int32.
    """

    request_ids: list[int]
    lengths: list[int]
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


class SlotDecoder:
    """Slots of one model; not thread-safe.

    Args:
        model: causal language model in evaluation mode; shared, its weights may change between steps.
        num_slots: most responses decoded at once.
        eos_token_ids: ids that end a response.
        max_model_len: most tokens of prompt and response.
        recomputes: whether live rows get their cache anew after the weights have changed; else they keep it.
        mixes_prefixes: whether prompts computed ahead of their slot are used after the weights have changed.

    Attributes:
        num_tokens: sampled so far, those of requests' `partial` left out.
        admits: whether waiting requests get rows; while False, live rows finish and nothing else happens.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_slots: int,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        recomputes: bool = False,
        mixes_prefixes: bool = False,
    ) -> None:
        self.num_tokens = 0
        self.admits = True
        self._model = model
        self._version = -1
        self._recomputes = recomputes
        self._num_slots = num_slots
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        self._cache = SlotCache(num_slots, max_model_len)
        self._prefiller = Prefiller(model, mixes_versions=mixes_prefixes)
        self._waiting: deque[GenerationRequest] = deque()
        self._ended: list[Completion] = []  # of requests that needed no token; for the next step to return
        self._live: list[GenerationRequest | None] = []  # row -> request; None: a hole until the next step
        self._num_greedy = 0
        self._num_restricted = 0
        self._is_eos = torch.zeros(model.config.get_text_config().vocab_size, dtype=torch.bool, device=self._device)
        self._is_eos[list(eos_token_ids)] = True
        integers = dict.fromkeys(("last_id", "length", "count", "reported", "budget", "top_k"), torch.int64)
        reals = dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32)
        # What a row is: every tensor's first dimension is the row.
        self._rows = {
            name: torch.zeros(num_slots, dtype=dtype, device=self._device)
            for name, dtype in (integers | reals | {"greedy": torch.bool}).items()
        }
        self._tokens = {
            name: torch.zeros(num_slots, 0, dtype=dtype, device=self._device)
            for name, dtype in (
                ("uniforms", torch.float64),
                ("ids", torch.int64),
                ("logprobs", torch.float32),
                ("versions", torch.int32),
            )
        }

    @property
    def has_work(self) -> bool:
        """Whether a step would sample or return anything."""
        return bool(self._ended) or (self.admits and bool(self._waiting)) or any(request is not None for request in self._live)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; those submitted together are admitted in the order of their ids."""
        for request in sorted(requests, key=lambda request: request.request_id):
            ended = self._ended_before(request)
            if ended is None:
                self._waiting.append(request)
            else:
                self._ended.append(ended)

    def partial_completions(self) -> list[Completion]:
        """What is known of requests that no step has returned: copies, with at least one token each."""
        live = [self._completion(row, request, "abort") for row, request in enumerate(self._live) if request is not None]
        waiting = [
            replace(request.partial, request_id=request.request_id, finish_reason="abort")
            for request in self._waiting
            if request.partial is not None
        ]
        ended = [replace(completion, finish_reason="abort") for completion in self._ended]
        return [completion for completion in (*live, *waiting, *ended) if completion.token_ids]

    @torch.inference_mode()
    def take_increments(self) -> Increments:
        """What was sampled for unfinished responses since the last call; those of requests' `partial` left out."""
        live = {row: request.request_id for row, request in enumerate(self._live) if request is not None}
        rows = torch.tensor(list(live), dtype=torch.int64, device=self._device)
        begin, end = self._rows["reported"][rows], self._rows["count"][rows]
        first, last = (int(begin.min()), int(end.max())) if live else (0, 0)
        columns = torch.arange(first, last, device=self._device)
        is_new = (columns >= begin.unsqueeze(1)) & (columns < end.unsqueeze(1))
        self._rows["reported"][rows] = end
        ids, logprobs, versions = (
            self._tokens[name][:, first:last][rows][is_new].cpu().numpy() for name in ("ids", "logprobs", "versions")
        )
        return Increments(list(live.values()), (end - begin).tolist(), ids, logprobs, versions)

    @torch.inference_mode()
    def step(self, version: int) -> list[Completion]:
        """Admit what fits, sample one token per live row, and return what has finished.

        Args:
            version: `policy_version` of the model's present weights, recorded with each token.
        """
        if version != self._version:
            if self._recomputes:
                self._recompute(version)
            self._version = version
        self._admit(version)
        returned, self._ended = self._ended, []
        n = len(self._live)
        if n == 0:
            return returned
        rows = {name: tensor[:n] for name, tensor in self._rows.items()}
        ids, logprobs = self._sample(rows, self._forward(rows))
        column = rows["count"].unsqueeze(1)
        self._tokens["ids"][:n].scatter_(1, column, ids.unsqueeze(1))
        self._tokens["logprobs"][:n].scatter_(1, column, logprobs.unsqueeze(1))
        self._tokens["versions"][:n].scatter_(1, column, version)
        rows["last_id"].copy_(ids)
        rows["length"].add_(1)
        rows["count"].add_(1)
        self.num_tokens += n
        ended = self._is_eos[ids]
        finished = (ended | (rows["count"] >= rows["budget"])).nonzero().squeeze(1).tolist()
        return returned + [self._finish(row, ended_by_eos=bool(ended[row])) for row in finished]

    def _recompute(self, version: int) -> None:
        """Fill the cache of every live row anew; all else of a row stays, the place in its random stream included."""
        length, count = self._rows["length"].tolist(), self._rows["count"].tolist()
        # Longest first: rows of like length share a forward, which pads to its longest.
        live = sorted(
            ((row, request) for row, request in enumerate(self._live) if request is not None), key=lambda item: -length[item[0]]
        )
        prefixes = [(*request.prompt_ids, *self._tokens["ids"][row, : count[row]].tolist())[:-1] for row, request in live]
        # A prefiller of its own: nothing that was computed before is used, and nothing is left for the queue.
        Prefiller(self._model).load(self._cache, [row for row, _ in live], prefixes, (), version)

    def _forward(self, rows: dict[str, Tensor]) -> Tensor:
        """Logits [n, V] float32 after each row's last token."""
        length = rows["length"]
        longest = int(length.max()) + 1
        self._cache.reserve(len(self._live), longest)
        self._cache.begin_step(length, longest)
        beyond = torch.arange(longest, device=self._device) > length.unsqueeze(1)
        # Additive, since the eager implementation adds what it is given; transformers takes a 4-d mask as it is.
        mask = torch.zeros(beyond.shape, dtype=self._dtype, device=self._device).masked_fill_(beyond, -torch.inf)
        output = self._model(
            input_ids=rows["last_id"].unsqueeze(1),
            attention_mask=mask[:, None, None, :],
            position_ids=length.unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits[:, -1].float()

    def _sample(self, rows: dict[str, Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
        n = logits.shape[0]
        return sample_tokens(
            logits,
            rows["temperature"],
            self._tokens["uniforms"][:n].gather(1, rows["count"].unsqueeze(1)).squeeze(1),
            greedy=rows["greedy"] if self._num_greedy else None,
            restriction=Restriction(rows["top_p"], rows["top_k"], rows["min_p"]) if self._num_restricted else None,
        )

    def _finish(self, row: int, *, ended_by_eos: bool) -> Completion:
        request = self._live[row]
        assert request is not None, row
        self._live[row] = None
        self._num_greedy -= request.sampling.temperature == 0
        self._num_restricted -= request.sampling.is_restricted
        return self._completion(row, request, "stop" if ended_by_eos else "length")

    def _completion(self, row: int, request: GenerationRequest, reason: FinishReason) -> Completion:
        count = int(self._rows["count"][row])
        return Completion(
            request_id=request.request_id,
            token_ids=self._tokens["ids"][row, :count].tolist(),
            behavior_logprobs=self._tokens["logprobs"][row, :count].tolist(),
            token_versions=self._tokens["versions"][row, :count].tolist(),
            finish_reason=reason,
        )

    def _ended_before(self, request: GenerationRequest) -> Completion | None:
        """The answer to a request whose `partial` is whole; None if there is something to sample."""
        partial = request.partial
        if partial is None or not partial.token_ids:
            return None
        if self._is_eos[partial.token_ids[-1]]:
            return replace(partial, request_id=request.request_id, finish_reason="stop")
        if len(partial.token_ids) >= request.sampling.max_new_tokens:
            return replace(partial, request_id=request.request_id, finish_reason="length")
        return None

    def _admit(self, version: int) -> None:
        """Give free rows to waiting requests, lowest row first; close the holes that are left."""
        holes = [row for row, request in enumerate(self._live) if request is None]
        free = holes + list(range(len(self._live), self._num_slots))
        rows = free[: len(self._waiting) if self.admits else 0]
        admitted = [self._waiting.popleft() for _ in rows]
        if admitted:
            self._live.extend([None] * (max(rows) + 1 - len(self._live)))
            for row, request in zip(rows, admitted, strict=True):
                self._live[row] = request
            self._write_rows(rows, admitted)
            prefixes = [_tokens_so_far(request)[:-1] for request in admitted]
            self._cache.reserve(len(self._live), max(map(len, prefixes)) + 1)
            upcoming = (_tokens_so_far(request)[:-1] for request in self._waiting)
            self._prefiller.load(self._cache, rows, prefixes, upcoming, version)
        self._close_holes(holes[len(rows) :])
        if not self._live:
            self._cache.release()
        if not self._waiting:
            self._prefiller.release()

    def _write_rows(self, rows: list[int], requests: list[GenerationRequest]) -> None:
        samplings = [request.sampling for request in requests]
        budget = max(sampling.max_new_tokens for sampling in samplings)
        for name, tensor in self._tokens.items():
            if tensor.shape[1] < budget:
                self._tokens[name] = torch.nn.functional.pad(tensor, (0, budget - tensor.shape[1]))
        index = torch.tensor(rows, device=self._device)
        counts = [0 if request.partial is None else len(request.partial.token_ids) for request in requests]
        values: dict[str, list[Any]] = {
            "last_id": [_tokens_so_far(request)[-1] for request in requests],
            "length": [len(_tokens_so_far(request)) - 1 for request in requests],
            "count": counts,
            "reported": counts,
            "budget": [sampling.max_new_tokens for sampling in samplings],
            "temperature": [sampling.temperature or 1.0 for sampling in samplings],
            "greedy": [sampling.temperature == 0 for sampling in samplings],
            "top_p": [sampling.top_p for sampling in samplings],
            "top_k": [sampling.top_k for sampling in samplings],
            "min_p": [sampling.min_p for sampling in samplings],
        }
        for name, column in values.items():
            target = self._rows[name]
            target[index] = torch.tensor(column, dtype=target.dtype, device=self._device)
        for row, request in zip(rows, requests, strict=True):
            uniforms = request_uniforms(request.seed, request.sampling.max_new_tokens)
            self._tokens["uniforms"][row, : uniforms.shape[0]] = uniforms
            if (partial := request.partial) is not None:
                count = len(partial.token_ids)
                self._tokens["ids"][row, :count] = torch.tensor(partial.token_ids, device=self._device)
                self._tokens["logprobs"][row, :count] = torch.tensor(partial.behavior_logprobs, device=self._device)
                self._tokens["versions"][row, :count] = torch.tensor(partial.token_versions, device=self._device)
        self._num_greedy += sum(values["greedy"])
        self._num_restricted += sum(sampling.is_restricted for sampling in samplings)

    def _close_holes(self, holes: list[int]) -> None:
        """Move the last live rows into `holes` (ascending) and shorten the live part."""
        if not holes:
            return
        n = len(self._live) - len(holes)
        targets = [row for row in holes if row < n]
        sources = [row for row in range(n, len(self._live)) if self._live[row] is not None]
        if targets:
            source, target = torch.tensor([sources, targets], device=self._device).unbind(0)
            for tensor in (*self._rows.values(), *self._tokens.values()):
                tensor[target] = tensor[source]
            self._cache.move(source, target, int(self._rows["length"][target].max()))
            for source_row, target_row in zip(sources, targets, strict=True):
                self._live[target_row] = self._live[source_row]
        del self._live[n:]


def _tokens_so_far(request: GenerationRequest) -> tuple[int, ...]:
    """Prompt and `partial`."""
    return request.prompt_ids if request.partial is None else (*request.prompt_ids, *request.partial.token_ids)
