"""What the two vLLM engines share: a `GenerationEngine` in front of a `VLLMBackend`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from lit_asyncrl.errors import ConfigurationError, EngineError
from lit_asyncrl.generation.requests import check_request
from lit_asyncrl.generation.vllm_backend import BackendSettings, VLLMBackend
from lit_asyncrl.generation.vllm_interface import VLLMClient
from lit_asyncrl.generation.vllm_sender import WeightSender
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.policy import Dtype, resolve_policy_path
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, InFlight, NamedTensors, PrefixCache

MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to this."""


class VLLMEngineBase(GenerationEngine):
    """Not for use by itself: `VLLMEngine` and `VLLMServerEngine` say where vLLM runs (`_connect`).

    Args: as in `VLLMEngine`.
    """

    def __init__(
        self,
        *,
        dtype: Dtype,
        num_slots: int,
        in_flight: InFlight,
        prefix_cache: PrefixCache,
        start_timeout_s: float,
        response_timeout_s: float,
    ) -> None:
        for name, value in (
            ("num_slots", num_slots),
            ("start_timeout_s", start_timeout_s),
            ("response_timeout_s", response_timeout_s),
        ):
            if not value > 0:
                raise ConfigurationError(f"engine.{name} must be positive, got {value}.")
        if in_flight == "keep" and prefix_cache == "reset":
            raise ConfigurationError(
                "engine.prefix_cache must be 'salt' or 'keep' with in_flight 'keep', got 'reset' (responses in flight hold the "
                "blocks that a reset would free). Take salt, which never reuses old blocks either, or in_flight: restart."
            )
        self.num_slots = num_slots
        self.rounds_weights = dtype != "float32"
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._in_flight = in_flight
        self._prefix_cache = prefix_cache
        self._start_timeout_s = start_timeout_s
        self._response_timeout_s = response_timeout_s
        self._backend: VLLMBackend | None = None
        self._final_tokens = 0
        self._final_partials: list[Completion] = []

    @abstractmethod
    def _connect(self, policy_path: str, max_model_len: int | None) -> tuple[VLLMClient, WeightSender]:
        """The client and the transport of one life of the engine; nothing is started yet."""

    def start(
        self, policy_path: str, *, eos_token_ids: Sequence[int], probe_ids: Sequence[int], max_model_len: int | None
    ) -> None:
        """See `GenerationEngine.start`. A stopped engine can be started again; counters begin anew."""
        if self._backend is not None:
            raise EngineError("The generation engine is already started. Call stop() first.")
        settings = BackendSettings(
            eos_token_ids=tuple(eos_token_ids),
            probe_ids=tuple(probe_ids),
            num_slots=self.num_slots,
            in_flight=self._in_flight,
            prefix_cache=self._prefix_cache,
            start_timeout_s=self._start_timeout_s,
            response_timeout_s=self._response_timeout_s,
        )
        self._final_tokens, self._final_partials = 0, []
        client, sender = self._connect(resolve_policy_path(policy_path), max_model_len)
        self._backend = VLLMBackend(client, sender, settings)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`.

        Raises:
            ConfigurationError: a request cannot be sampled: restricted sampling in training, no room for its tokens, a
                temperature that vLLM would not use as it is.
        """
        backend = self._running()
        for request in requests:
            check_request(request, backend.max_model_len)
            if 0 < request.sampling.temperature < MIN_TEMPERATURE:
                raise ConfigurationError(
                    f"temperature must be 0 or at least {MIN_TEMPERATURE} with vLLM, got {request.sampling.temperature} (request "
                    f"{request.request_id}). vLLM would sample at {MIN_TEMPERATURE} without a word: take 0, which is greedy."
                )
        backend.submit(requests)

    def completions(self, timeout_s: float) -> list[Completion]:
        """See `GenerationEngine.completions`."""
        return self._running().take("train", timeout_s)

    def evaluation_completions(self, timeout_s: float) -> list[Completion]:
        """See `GenerationEngine.evaluation_completions`."""
        return self._running().take("evaluation", timeout_s)

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """See `GenerationEngine.begin_update`. Weights beyond one chunk are read until vLLM has loaded them."""
        self._running().begin_update(version, weights)

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """See `GenerationEngine.finish_update`."""
        return self._running().finish_update(timeout_s)

    def pause(self) -> None:
        """See `GenerationEngine.pause`. vLLM cannot hold some requests only: these are taken back, and prefilled anew later."""
        self._running().set_paused(True)

    def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        self._running().set_paused(False)

    def stop(self) -> None:
        """See `GenerationEngine.stop`."""
        backend = self._backend
        if backend is not None:
            self._final_tokens, self._final_partials = backend.generated_tokens, backend.partial_completions()
            self._backend = None
            backend.stop()
            self._final_tokens, self._final_partials = backend.generated_tokens, backend.partial_completions()

    def partial_completions(self) -> list[Completion]:
        """See `GenerationEngine.partial_completions`; finished ones that were not taken too; after `stop`, those it ended."""
        backend = self._backend
        return self._final_partials if backend is None else backend.partial_completions()

    @property
    def silent_s(self) -> float:
        """See `GenerationEngine.silent_s`; vLLM is asked for a sign of life every few seconds."""
        backend = self._backend
        return 0.0 if backend is None else backend.silent_s

    @property
    def generated_tokens(self) -> int:
        """Training tokens sampled since the last start, without those of requests' `partial`."""
        backend = self._backend
        return self._final_tokens if backend is None else backend.generated_tokens

    def _running(self) -> VLLMBackend:
        backend = self._backend
        if backend is None:
            raise EngineError("The generation engine is not running. Call start() first.")
        return backend
