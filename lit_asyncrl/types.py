"""The carriers of data, from prompt to training batch: every field with its shape, dtype, unit and who fills it.

    Example -> Prompt -> GenerationRequest -> Completion -> TrajectoryGroup -> MicroBatch (of a TrainBatch)

Dimensions: G members of a group, P groups, B trajectories of a micro-batch, T padded tokens, L ragged tokens (members
concatenated), R reward functions. This module needs torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end-of-sequence id was sampled; `length`: the budget ran out (a *truncated* response); `abort`: cancelled."""

Purpose = Literal["train", "evaluation"]

InFlight = Literal["keep", "wait", "restart"]
"""What becomes of responses in flight when weights arrive: go on with their cache, end first, or recompute their cache."""

PrefixCache = Literal["salt", "reset", "keep"]
"""What becomes of cached prompts when weights arrive: hidden from later requests, dropped, or shared across updates."""


@dataclass(frozen=True, slots=True)
class Example:
    """One item of a task, before tokenization. Filled by a `Task`; plain types only, so that it can be stored and sent.

    Attributes:
        prompt: plain text, or chat messages (`{"role": ..., "content": ...}`) for the tokenizer's chat template.
        answer: what the reward functions compare with (plain Python value).
        task: name of the task that made it.
        index: position within the task's split; the same index always gives the same example.
        source: where a person finds it, such as `train.jsonl:17`, for messages; empty for procedural tasks.
    """

    prompt: str | list[dict[str, str]]
    answer: Any
    task: str
    index: int
    source: str = ""

    def __str__(self) -> str:
        return self.source or f"example {self.index} of task {self.task!r}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized example with its identity in the run. Filled by the prompt source.

    Attributes:
        group_id: unique per (prompt, epoch, attempt) within a run, rising in dispatch order.
        example: the example behind it.
        source_index: index in the prompt source's task (differs from `example.index` when tasks are mixed).
        token_ids: the prompt's ids, at least one.
        epoch: how often the training split had been passed through before this dispatch, from 0.
        attempt: how often this prompt was dispatched again within the epoch, from 0.
        seed: 64-bit seed derived from (run seed, task, index, epoch, attempt); sample i of the group uses `seed` and i.
    """

    group_id: int
    example: Example
    source_index: int
    token_ids: tuple[int, ...]
    epoch: int
    attempt: int
    seed: int


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled.

    Attributes:
        temperature: logits are divided by it; 0 is greedy (log-probs are then those of temperature 1).
        max_new_tokens: response budget in tokens, the end-of-sequence token included.
        top_p, top_k, min_p: restrictions of the distribution; for evaluation only, since in training they make the
            recorded log-probs those of another distribution than the trainer's.
    """

    temperature: float = 1.0
    max_new_tokens: int = 32
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def is_restricted(self) -> bool:
        """Whether top-p, top-k or min-p cuts the distribution."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to sample. Filled by the rollout worker or the evaluation.

    Attributes:
        request_id: unique per engine.
        prompt_ids: the prompt, at least one id.
        sampling: how; the budget is that of the whole response.
        seed: of its random stream.
        purpose: training or evaluation.
        partial: what an engine that is gone had sampled of the response: these tokens come first in the answer, as they are, and
            count into the budget; sampling goes on after them. None: from the beginning.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    purpose: Purpose = "train"
    partial: Completion | None = None


@dataclass(slots=True)
class Completion:
    """What an engine sampled for one request; the three lists have one entry per sampled token.

    Attributes:
        request_id: of the request it answers.
        token_ids: sampled ids, the end-of-sequence id included when `finish_reason` is `stop`.
        behavior_logprobs: nats, after temperature, as computed when the token was sampled.
        token_versions: `policy_version` of the weights that sampled the token.
        finish_reason: reported by the engine, never inferred from ids.
    """

    request_id: int
    token_ids: list[int]
    behavior_logprobs: list[float]
    token_versions: list[int]
    finish_reason: FinishReason


class Response(str):
    """A decoded response, special tokens removed: text that also knows how many tokens were sampled for it.

    Attributes:
        num_tokens: sampled tokens, the end-of-sequence token included.
    """

    num_tokens: int

    def __new__(cls, text: str, num_tokens: int) -> Response:
        """A string like `text`."""
        response = super().__new__(cls, text)
        response.num_tokens = num_tokens
        return response

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        """For pickle."""
        return str(self), self.num_tokens


@dataclass(slots=True)
class TrajectoryGroup:
    """The G trajectories of one prompt: the unit of pool, samplers and baselines. Filled by the rollout worker.

    Members are concatenated: member i owns `lengths[i]` consecutive tokens (prompt and response) of the L flat ones.
    `loss_mask` may hold several trained segments per member (tool use, several turns).

    Attributes:
        group_id, prompt_index, epoch: identity; `task` names the task.
        token_ids: [L] int64.
        loss_mask: [L] bool, True = trained token (end-of-sequence included). Set by the engine's output, never inferred.
        behavior_logprobs: [L] float32 nats; 0 where the engine sampled nothing.
        token_versions: [L] int32; -1 where the engine sampled nothing.
        lengths: [G] int64 tokens per member.
        rewards: [G] float32, weighted sum of the task's reward functions.
        reward_components: [G, R] float32, each function's unweighted value, in the order of `reward_names`.
        correct: [G] bool, whether the task's accuracy criterion is met.
        truncated: [G] bool, finish reason `length`.
        completed_version: version served when the last member finished (PACE's c).
    """

    group_id: int
    prompt_index: int
    epoch: int
    task: str
    token_ids: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    token_versions: Tensor
    lengths: Tensor
    rewards: Tensor
    reward_components: Tensor
    correct: Tensor
    truncated: Tensor
    completed_version: int
    reward_names: tuple[str, ...] = ()

    @property
    def group_size(self) -> int:
        """G."""
        return int(self.lengths.numel())

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that an engine sampled, trained or not."""
        return int((self.token_versions >= 0).sum())

    @property
    def num_trained_tokens(self) -> int:
        """Tokens with `loss_mask` set."""
        return int(self.loss_mask.sum())


class GroupOutcome(NamedTuple):
    """What came out of one prompt, for comparing the groups that are trained with all that were dispatched.

    Attributes:
        num_responses: responses of the group.
        num_tokens: tokens sampled for them.
        reward_sum: sum of their rewards.
        num_correct: how many of them meet the task's accuracy criterion.
    """

    num_responses: int
    num_tokens: int
    reward_sum: float
    num_correct: int


@dataclass
class MicroBatch:
    """Whole groups, right-padded: the unit of one forward and backward. Filled by `pool.collate`, which alone pads.

    Everything is aligned to tokens: entry [b, t] speaks of token t of trajectory b, whose log-prob comes from the logits at
    t - 1. Token 0 is never trained.

    Attributes:
        input_ids: [B, T] int64, padded with 0.
        attention_mask: [B, T] bool, True = real token.
        loss_mask: [B, T] bool, True = trained token.
        behavior_logprobs: [B, T] float32 nats, 0 where not sampled.
        token_versions: [B, T] int32, -1 where not sampled.
        rewards: [B] float32.
        group_index: [B] int64 in [0, P): which group of this micro-batch a trajectory belongs to; groups are contiguous.
        temperature: of the sampler; the trainer divides its logits by it.
        logprobs: [B, T] float32 or None: log-probs under the current policy already computed by PACE's re-scoring.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    token_versions: Tensor
    rewards: Tensor
    group_index: Tensor
    temperature: float
    logprobs: Tensor | None = None

    @property
    def num_trajectories(self) -> int:
        """B."""
        return int(self.input_ids.shape[0])

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on another device."""
        tensors: dict[str, Any] = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


@dataclass
class TrainBatch:
    """What one optimizer update trains on: micro-batches of whole groups, and what the log needs to know of them.

    Attributes:
        micro_batches: see `MicroBatch`.
        num_trajectories, num_trained_tokens: of the whole batch: the denominators of every aggregation. Trajectories
            without a trained token are counted neither here nor in a mean over sequences.
        stats: numbers about the batch for the log (`pool/...`, `reward/...`), keys as in `docs/metrics.md`.
        histograms: named 1-d tensors for TensorBoard.
    """

    micro_batches: list[MicroBatch]
    num_trajectories: int
    num_trained_tokens: int
    stats: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Tensor] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """The engine's answer to a weight update.

    Attributes:
        version: the `policy_version` it serves.
        probe_logprobs: nats per probe token after the first, under the new weights at temperature 1.
        pause_s: seconds for which decoding stood still: from the end of a decode step, or of the drain that was asked for, until
            the next step may begin.
    """

    version: int
    probe_logprobs: Sequence[float]
    pause_s: float


NamedTensors = Mapping[str, torch.Tensor]
"""Weights by their Hugging Face parameter names, tied tensors once."""


@dataclass(slots=True)
class StepStats:
    """What the module knows of the update in progress; callbacks read it in `on_before_optimizer_step`.

    Attributes:
        log_weights: [B] raw sequence log-weights of every trajectory of the batch that trains a token, nats.
        ess, ess_ratio: effective sample size in trajectories, and over B; of the raw weights, over the whole batch.
        lr_scale: factor applied to this step's learning rate (1 unless a callback scales it).
        grad_norm: norm of the gradient before clipping.
        metrics: further numbers for the log, keys as in `docs/metrics.md`.
    """

    log_weights: Tensor
    ess: float
    ess_ratio: float
    lr_scale: float = 1.0
    grad_norm: float = float("nan")
    metrics: dict[str, float] = field(default_factory=dict)
