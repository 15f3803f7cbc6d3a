"""The embedded engine without its surroundings: one model, a decoder for training and one for evaluation, weights, probe.

Runs in the engine's process (`hf_worker.py`) or in the caller's (`hf_inline.py`). Not thread-safe. While evaluation requests
exist only they are decoded; training responses keep their rows and cache. An update has two halves, since `in_flight: wait`
puts decode steps between them: `begin_update` takes the weights, `try_update` loads them when their time has come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lit_asyncrl import policy
from lit_asyncrl.errors import ConfigurationError, WeightSyncError
from lit_asyncrl.generation import slot_attention
from lit_asyncrl.generation.hf_decoder import Increments, SlotDecoder
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, InFlight, NamedTensors, PrefixCache, Purpose

PURPOSES: tuple[Purpose, Purpose] = ("train", "evaluation")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What it takes to build an `EngineCore`; plain types, sent to the engine's process.

    Attributes:
        policy_path, eos_token_ids, probe_ids, max_model_len: as in `GenerationEngine.start`.
        num_slots: most responses decoded at once, for each purpose.
        num_threads: torch threads of the engine's process.
        device: torch device of the served model.
        dtype, attn_implementation, trust_remote_code: as in `policy.load_model`.
        in_flight, prefix_cache: as in `HFEngine`.
    """

    policy_path: str
    eos_token_ids: tuple[int, ...]
    probe_ids: tuple[int, ...]
    max_model_len: int | None
    num_slots: int
    num_threads: int
    device: str
    dtype: policy.Dtype
    attn_implementation: Literal["sdpa", "eager"]
    trust_remote_code: bool
    in_flight: InFlight
    prefix_cache: PrefixCache


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Running totals: training tokens sampled (unfinished responses included), seconds decoding, seconds without work."""

    generated_tokens: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0


class EngineCore:
    """See the module.

    Raises:
        ConfigurationError: the model cannot be loaded or decoded, or does not fit the settings.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.version = -1
        self.busy_s = 0.0
        self._paused = False
        self._waits = settings.in_flight == "wait"
        self._pending: tuple[int, NamedTensors] | None = None
        loaded: Any = policy.load_model(
            settings.policy_path,
            dtype=settings.dtype,
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
        )
        self._model = loaded.requires_grad_(False).to(settings.device)
        if settings.attn_implementation == "sdpa":
            self._model.set_attn_implementation(slot_attention.NAME)
        self.max_model_len = _check_lengths(self._model, settings.max_model_len)
        _check_ids(self._model, settings)
        self._parameters = dict(self._model.named_parameters())
        self._probe_ids = torch.tensor([settings.probe_ids], device=self._model.device)
        self._decoders = {
            purpose: SlotDecoder(
                self._model,
                num_slots=settings.num_slots,
                eos_token_ids=settings.eos_token_ids,
                max_model_len=self.max_model_len,
                # With `wait` only paused responses are live when the weights change.
                recomputes=settings.in_flight != "keep",
                mixes_prefixes=settings.prefix_cache == "keep",
            )
            for purpose in PURPOSES
        }

    @property
    def generated_tokens(self) -> int:
        """Training tokens sampled so far."""
        return self._decoders["train"].num_tokens

    @property
    def has_work(self) -> bool:
        """Whether `step` would decode anything."""
        return self._next_purpose() is not None

    @property
    def pending_version(self) -> int | None:
        """Version taken by `begin_update` and not loaded yet."""
        return None if self._pending is None else self._pending[0]

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, each with the decoder of its purpose."""
        for purpose, decoder in self._decoders.items():
            decoder.submit([request for request in requests if request.purpose == purpose])

    def partial_completions(self) -> list[Completion]:
        """Training responses that no step has returned, as far as they are."""
        return self._decoders["train"].partial_completions()

    def take_increments(self) -> Increments:
        """What was sampled for unfinished training responses since the last call."""
        return self._decoders["train"].take_increments()

    def set_paused(self, paused: bool) -> None:
        """Let training responses stand still, or go on."""
        self._paused = paused

    def step(self) -> tuple[Purpose, list[Completion]]:
        """One decode step of the purpose whose turn it is. Call only while `has_work`."""
        purpose = self._next_purpose()
        assert purpose is not None, "step without work"
        started = time.perf_counter()
        finished = self._decoders[purpose].step(self.version)
        self.busy_s += time.perf_counter() - started
        return purpose, finished

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """Note weights for `try_update`; with `wait`, no request is admitted until they are loaded.

        Args:
            version: `policy_version` of the weights; while requests are queued or in flight the same version must mean the same
                weights, since it alone tells whose the cached states are.
            weights: by Hugging Face name, every parameter of the model exactly once; must not change until loaded.

        Raises:
            WeightSyncError: names or shapes differ from the model's, or the update before is not loaded; nothing changes then.
        """
        if self._pending is not None:
            raise WeightSyncError(
                f"Version {version} must follow a finished update, but version {self._pending[0]} still waits for responses."
            )
        self._check_weights(version, weights)
        self._pending = (version, weights)
        self._set_admission(not self._waits)

    @torch.inference_mode()
    def try_update(self) -> DeliveryReport | None:
        """Load the noted weights (rounded to the engine's dtype) and score the probe with them.

        Returns:
            None if nothing is noted, or with `wait` while responses that are not paused are in flight.
        """
        if self._pending is None or (self._waits and self.has_work):
            return None
        started = time.perf_counter()
        version, weights = self._pending
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
        self.version = version
        self._pending = None
        self._set_admission(True)
        logits = self._model(input_ids=self._probe_ids).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, self._probe_ids[0, 1:, None]).squeeze(1)
        return DeliveryReport(version, logprobs.tolist(), pause_s=time.perf_counter() - started)

    def _set_admission(self, admits: bool) -> None:
        for decoder in self._decoders.values():
            decoder.admits = admits

    def _next_purpose(self) -> Purpose | None:
        if self._decoders["evaluation"].has_work:
            return "evaluation"
        return "train" if self._decoders["train"].has_work and not self._paused else None

    def _check_weights(self, version: int, weights: NamedTensors) -> None:
        missing = sorted(self._parameters.keys() - weights.keys())
        unknown = sorted(weights.keys() - self._parameters.keys())
        misshapen = [
            f"{name}: {list(weights[name].shape)} for {list(parameter.shape)}"
            for name, parameter in self._parameters.items()
            if name in weights and weights[name].shape != parameter.shape
        ]
        if missing or unknown or misshapen:
            raise WeightSyncError(
                f"Weights of version {version} must be every parameter of the engine's model once, got {len(missing)} missing "
                f"{missing[:3]}, {len(unknown)} unknown {unknown[:3]}, {len(misshapen)} of another shape {misshapen[:3]}. "
                "Give trainer and engine the same model folder."
            )


def _check_lengths(model: Any, max_model_len: int | None) -> int:
    """The tokens a response may reach, and a refusal of layers whose cache is not one key and value per token."""
    context = policy.context_length(model)
    length = max_model_len if max_model_len is not None else context
    if length is None:
        raise ConfigurationError("max_model_len must be given, got None (the model's config names no context length).")
    if context is not None and length > context:
        raise ConfigurationError(
            f"max_model_len must be at most the model's context of {context} tokens, got {length}. "
            "Shorten prompts or max_new_tokens."
        )
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    windowed = window is not None and ("sliding_attention" in kinds or not kinds) and length > window
    if windowed or kinds - {"full_attention", "sliding_attention"}:
        raise ConfigurationError(
            f"model.policy.path must hold a model whose layers attend to all {length} tokens, got {sorted(kinds)} "
            f"(sliding window {window}). Take the vLLM engine for this model, or lengths within the window."
        )
    return length


def _check_ids(model: Any, settings: EngineSettings) -> None:
    vocab_size = model.config.get_text_config().vocab_size
    ids = (*settings.eos_token_ids, *settings.probe_ids)
    if not settings.eos_token_ids or len(settings.probe_ids) < 2 or not all(0 <= i < vocab_size for i in ids):
        raise ConfigurationError(
            f"eos_token_ids must hold at least one id and probe_ids at least two, all below the vocabulary size {vocab_size}, "
            f"got {settings.eos_token_ids} and {settings.probe_ids}."
        )
