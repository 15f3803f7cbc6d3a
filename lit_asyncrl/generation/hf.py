"""The embedded engine: plain transformers, in its own process (asynchronous) or in the caller's (synchronous, notebooks)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lit_asyncrl.errors import ConfigurationError, EngineError
from lit_asyncrl.generation.hf_core import EngineCounters, EngineSettings
from lit_asyncrl.generation.hf_inline import InlineBackend
from lit_asyncrl.generation.hf_process import ProcessBackend
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.policy import Dtype, resolve_policy_path
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, NamedTensors


class HFEngine(GenerationEngine):
    """Continuous-slot decoding of a transformers model; weights arrive in flight between two decode steps.

    Args:
        mode: `process` decodes while the trainer trains; `inline` decodes in the trainer's process, inside `completions`.
        num_slots: most responses decoded at once (training and evaluation each).
        num_threads: torch threads of the engine's process; `inline` uses the trainer's.
        device: torch device of the served copy, such as `cuda:1`; weights travel through host memory (only run on CPUs so far).
        dtype: of the served copy of the weights; `bfloat16` rounds them.
        attn_implementation: of the served model.
        start_timeout_s: longest time to load the model.
        trust_remote_code: whether code in the model's folder may run.

    Example:
        >>> engine = HFEngine(mode="inline", num_slots=16)
        >>> engine.num_threads
        0
    """

    def __init__(
        self,
        mode: Literal["process", "inline"] = "process",
        num_slots: int = 128,
        num_threads: int = 1,
        device: str = "cpu",
        dtype: Dtype = "float32",
        attn_implementation: Literal["sdpa", "eager"] = "sdpa",
        start_timeout_s: float = 120.0,
        trust_remote_code: bool = False,
    ) -> None:
        for name, value in (("num_slots", num_slots), ("num_threads", num_threads), ("start_timeout_s", start_timeout_s)):
            if not value > 0:
                raise ConfigurationError(f"engine.{name} must be positive, got {value}.")
        if mode not in ("process", "inline"):
            raise ConfigurationError(f"engine.mode must be 'process' or 'inline', got {mode!r}.")
        self.mode = mode
        self.num_slots = num_slots
        self._num_threads = num_threads
        self._device = device
        self._dtype: Dtype = dtype
        self.rounds_weights = dtype != "float32"
        self._attn_implementation = attn_implementation
        self._start_timeout_s = start_timeout_s
        self._trust_remote_code = trust_remote_code
        self._backend: InlineBackend | ProcessBackend | None = None
        self._final_counters = EngineCounters()
        self._has_weights = False

    def start(
        self, policy_path: str, *, eos_token_ids: Sequence[int], probe_ids: Sequence[int], max_model_len: int | None
    ) -> None:
        """See `GenerationEngine.start`. A stopped engine can be started again; counters begin anew."""
        if self._backend is not None:
            raise EngineError("The generation engine is already started. Call stop() first.")
        settings = EngineSettings(
            policy_path=resolve_policy_path(policy_path),
            eos_token_ids=tuple(eos_token_ids),
            probe_ids=tuple(probe_ids),
            max_model_len=max_model_len,
            num_slots=self.num_slots,
            num_threads=self._num_threads,
            device=self._device,
            dtype=self._dtype,
            attn_implementation=self._attn_implementation,
            trust_remote_code=self._trust_remote_code,
        )
        self._has_weights = False
        self._backend = InlineBackend(settings) if self.mode == "inline" else ProcessBackend(settings, self._start_timeout_s)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`.

        Raises:
            ConfigurationError: a request cannot be sampled: restricted sampling in training, no room for its tokens.
        """
        backend = self._running()
        assert self._has_weights, "submit before the first begin_update"
        for request in requests:
            _check_request(request, backend.max_model_len)
        backend.submit(requests)

    def completions(self, timeout_s: float) -> list[Completion]:
        """See `GenerationEngine.completions`."""
        return self._running().take("train", timeout_s)

    def evaluation_completions(self, timeout_s: float) -> list[Completion]:
        """See `GenerationEngine.evaluation_completions`."""
        return self._running().take("evaluation", timeout_s)

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """See `GenerationEngine.begin_update`."""
        self._running().begin_update(version, weights)
        self._has_weights = True

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """See `GenerationEngine.finish_update`."""
        return self._running().finish_update(timeout_s)

    def pause(self) -> None:
        """See `GenerationEngine.pause`."""
        self._running().set_paused(True)

    def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        self._running().set_paused(False)

    def stop(self) -> None:
        """See `GenerationEngine.stop`."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.stop()
            self._final_counters = backend.counters

    @property
    def num_threads(self) -> int:
        """CPU threads beside the trainer's own."""
        return self._num_threads if self.mode == "process" else 0

    @property
    def generated_tokens(self) -> int:
        """Training tokens sampled since the last start, unfinished responses included."""
        return self._counters.generated_tokens

    @property
    def busy_s(self) -> float:
        """Seconds spent decoding since the last start."""
        return self._counters.busy_s

    @property
    def idle_s(self) -> float:
        """Seconds without anything to decode since the last start; 0 in the trainer's process."""
        return self._counters.idle_s

    @property
    def _counters(self) -> EngineCounters:
        backend = self._backend
        return self._final_counters if backend is None else backend.counters

    def _running(self) -> InlineBackend | ProcessBackend:
        backend = self._backend
        if backend is None:
            raise EngineError("The generation engine is not running. Call start() first.")
        return backend


def _check_request(request: GenerationRequest, max_model_len: int) -> None:
    sampling = request.sampling
    if request.purpose == "train" and sampling.is_restricted:
        raise ConfigurationError(
            f"top_p, top_k and min_p must be 1, 0 and 0 in training, got {sampling.top_p}, {sampling.top_k} and "
            f"{sampling.min_p} (request {request.request_id}). A cut distribution is not the one whose log-probs the trainer "
            "computes, so every ratio would be biased: restrict evaluation only."
        )
    if not request.prompt_ids:
        raise ConfigurationError(f"prompt_ids must hold at least one id, got none (request {request.request_id}).")
    if sampling.max_new_tokens < 1:
        raise ConfigurationError(
            f"max_new_tokens must be at least 1, got {sampling.max_new_tokens} (request {request.request_id})."
        )
    if not sampling.temperature >= 0:
        raise ConfigurationError(f"temperature must be at least 0, got {sampling.temperature} (request {request.request_id}).")
    needed = len(request.prompt_ids) + sampling.max_new_tokens
    if needed > max_model_len:
        raise ConfigurationError(
            f"Prompt and max_new_tokens together must fit into max_model_len = {max_model_len}, got {len(request.prompt_ids)} + "
            f"{sampling.max_new_tokens} (request {request.request_id}). Shorten the prompt or max_new_tokens."
        )
