"""The embedded engine: plain transformers, in its own process (asynchronous) or in the caller's (synchronous, notebooks)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from lit_asyncrl.errors import ConfigurationError, EngineError
from lit_asyncrl.generation.hf_core import EngineCounters, EngineSettings
from lit_asyncrl.generation.hf_inline import InlineBackend
from lit_asyncrl.generation.hf_process import ProcessBackend
from lit_asyncrl.generation.requests import check_request
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.policy import Dtype, resolve_policy_path
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, InFlight, NamedTensors, PrefixCache

Mode = Literal["process", "inline"]


class HFEngine(GenerationEngine):
    """Continuous-slot decoding of a transformers model; weights arrive between two decode steps.

    What holds for a response that is in flight at an update from version v to w (both purposes, both modes). Its tokens up to
    then stay, with their log-probs and version v; its remaining budget and the rest of its random stream too. Every token's
    `behavior_logprobs` is that at sampling, with the cache the token was sampled with. And by `in_flight`:

    * `keep`: decoding goes on at once, with version w on each further token. These are sampled by weights w reading keys and
      values that weights v computed (those of the last token sampled before the update are already of w). No single version's
      forward gives their log-probs: numeric ratios differ from 1 by that mixture even at age 0. The cheapest.
    * `restart`: before its next token the whole cache of the response is computed again by weights w. Further tokens carry w,
      and their log-probs equal, up to rounding, a plain forward of w over prompt and response, old tokens included. Costs one
      prefill of every live response per update (128 of a 0.8M model on one core: the time of 8 to 15 decode steps), counted in
      `busy_s`, not in `pause_s`; a paused response pays when it goes on, and only if the version is then another than it had.
    * `wait`: live responses end under v, evaluation before training, then w is loaded; requests not begun by then wait, those
      for evaluation too. Every response has one version. Slots run empty meanwhile, so an update takes as long as the longest
      response: `finish_update`'s timeout must allow for it. Paused responses cannot end and are not waited for: `pause()`, before
      or after the update began, never blocks it. One that is resumed under another version than it stopped with goes on as
      under `restart`; it alone can hold two versions.

    A request with a `partial` is begun after it, with a cache that the present weights compute for all of it. Its random stream
    is that of the unbroken response: under the same weights the same tokens follow.

    `prefix_cache` speaks of prompts computed ahead for requests that wait for a slot (and shared by equal prompts):

    * `salt`: only states computed under the present version are used. A response begun after an update holds nothing older.
    * `reset`: the same here: states of one version are held at a time, and the first use after an update drops them.
    * `keep`: they are used after an update too. A response begun then reads a prompt that older weights computed (all but its
      last token), mixing versions as `in_flight: keep` does, also with `wait` and `restart` (the next restart recomputes it).

    Args:
        mode: `process` decodes while the trainer trains; `inline` decodes in the trainer's process, inside `completions`.
        num_slots: most responses decoded at once (training and evaluation each).
        num_threads: torch threads of the engine's process; `inline` uses the trainer's.
        device: torch device of the served copy, such as `cuda:1`; weights travel through host memory (only run on CPUs so far).
        dtype: of the served copy of the weights; `bfloat16` rounds them.
        attn_implementation: of the served model.
        start_timeout_s: longest time to load the model.
        trust_remote_code: whether code in the model's folder may run.
        in_flight: what becomes of responses in flight at an update; see above.
        prefix_cache: what becomes of prompts computed before an update; see above.

    Example:
        >>> engine = HFEngine(mode="inline", num_slots=16)
        >>> engine.num_threads
        0
    """

    def __init__(
        self,
        mode: Mode = "process",
        num_slots: int = 128,
        num_threads: int = 1,
        device: str = "cpu",
        dtype: Dtype = "float32",
        attn_implementation: Literal["sdpa", "eager"] = "sdpa",
        start_timeout_s: float = 120.0,
        trust_remote_code: bool = False,
        in_flight: InFlight = "keep",
        prefix_cache: PrefixCache = "salt",
    ) -> None:
        for name, value in (("num_slots", num_slots), ("num_threads", num_threads), ("start_timeout_s", start_timeout_s)):
            if not value > 0:
                raise ConfigurationError(f"engine.{name} must be positive, got {value}.")
        choices: tuple[tuple[str, object, Any], ...] = (
            ("mode", mode, Mode),
            ("in_flight", in_flight, InFlight),
            ("prefix_cache", prefix_cache, PrefixCache),
        )
        for name, choice, allowed in choices:
            if choice not in get_args(allowed):
                raise ConfigurationError(f"engine.{name} must be one of {', '.join(get_args(allowed))}, got {choice!r}.")
        self.mode = mode
        self.num_slots = num_slots
        self._num_threads = num_threads
        self._device = device
        self._dtype: Dtype = dtype
        self.rounds_weights = dtype != "float32"
        self._attn_implementation = attn_implementation
        self._start_timeout_s = start_timeout_s
        self._trust_remote_code = trust_remote_code
        self._in_flight: InFlight = in_flight
        self._prefix_cache: PrefixCache = prefix_cache
        self._backend: InlineBackend | ProcessBackend | None = None
        self._final: tuple[EngineCounters, list[Completion]] = (EngineCounters(), [])
        self._has_weights = False

    def start(
        self, policy_path: str, *, eos_token_ids: Sequence[int], probe_ids: Sequence[int], max_model_len: int | None
    ) -> None:
        """See `GenerationEngine.start`. A stopped engine can be started again; counters begin anew. `stop` ends a start."""
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
            in_flight=self._in_flight,
            prefix_cache=self._prefix_cache,
        )
        self._has_weights = False
        self._final = (EngineCounters(), [])
        if self.mode == "inline":
            self._backend = InlineBackend(settings)
            return
        self._backend = backend = ProcessBackend(settings)
        try:
            backend.wait_ready(self._start_timeout_s)
        except BaseException:
            self.stop()  # also when interrupted from the keyboard
            raise

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`.

        Raises:
            ConfigurationError: a request cannot be sampled: restricted sampling in training, no room for its tokens.
        """
        backend = self._running()
        assert self._has_weights, "submit before the first begin_update"
        for request in requests:
            check_request(request, backend.max_model_len)
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
        backend = self._backend
        if backend is not None:
            backend.stop()
            self._final = (backend.counters, backend.partial_completions())
            self._backend = None

    def partial_completions(self) -> list[Completion]:
        """See `GenerationEngine.partial_completions`; finished ones that were not taken too; after `stop`, those it ended."""
        backend = self._backend
        return self._final[1] if backend is None else backend.partial_completions()

    @property
    def silent_s(self) -> float:
        """See `GenerationEngine.silent_s`; the process says something each second, but not within a decode step or a prefill."""
        backend = self._backend
        return 0.0 if backend is None else backend.silent_s

    @property
    def num_threads(self) -> int:
        """CPU threads beside the trainer's own."""
        return self._num_threads if self.mode == "process" else 0

    @property
    def generated_tokens(self) -> int:
        """Training tokens sampled since the last start, unfinished responses included, those of requests' `partial` not."""
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
        return self._final[0] if backend is None else backend.counters

    def _running(self) -> InlineBackend | ProcessBackend:
        backend = self._backend
        if backend is None:
            raise EngineError("The generation engine is not running. Call start() first.")
        return backend
