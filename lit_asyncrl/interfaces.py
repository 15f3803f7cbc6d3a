"""What the parts meet through: small abstract classes for what the command line selects, protocols for internal seams.

Abstract classes (short names resolve on the command line): `Task`, `RewardFn`, `GenerationEngine`, `Objective`, `Advantage`.
Protocols (internal): `PrefixScorer`, `TrajectorySink`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lit_asyncrl.types import (
    Completion,
    DeliveryReport,
    Example,
    GenerationRequest,
    GroupOutcome,
    NamedTensors,
    Prompt,
    TrajectoryGroup,
)


class RewardFn(ABC):
    """A reward for one response.

    Attributes:
        name: key under which its mean is logged (`reward/<name>`).
        weight: factor in the weighted sum that is trained on.
    """

    name: str = "reward"
    weight: float = 1.0

    @abstractmethod
    def __call__(self, completion: str, example: Example) -> float:
        """Score one decoded response (special tokens removed). Must return a finite number; may raise.

        In a run, `completion` is a `Response`, which also has its `num_tokens`.
        """

    def start(self) -> None:
        """Start what the reward needs (processes), so that the first response does not wait for it. Called before a run."""

    def close(self) -> None:
        """Release what the reward holds (processes, files). Called once when the run ends."""


class Task(ABC):
    """Prompts with verifiable rewards. Examples are a function of (seed, split, index): nothing is stored or downloaded.

    Attributes:
        name: unique among the tasks of a run.
        rewards: reward functions, summed with their weights.
    """

    name: str
    rewards: Sequence[RewardFn]

    @property
    @abstractmethod
    def num_train(self) -> int:
        """Number of training examples: one epoch."""

    @property
    @abstractmethod
    def num_heldout(self) -> int:
        """Number of held-out examples, disjoint from training ones by prompt."""

    @abstractmethod
    def train_example(self, index: int) -> Example:
        """Training example `index` in [0, num_train)."""

    @abstractmethod
    def heldout_example(self, index: int) -> Example:
        """Held-out example `index` in [0, num_heldout)."""

    def is_correct(self, components: Sequence[float]) -> bool:
        """The accuracy criterion, from the reward functions' unweighted values: by default the first one is at least 1."""
        return components[0] >= 1.0

    def setup(self) -> None:
        """Read and check files; called once before anything starts. Raises `DataError` naming file and line."""

    def start(self) -> None:
        """Start what the rewards need; called before a run, after `setup`."""
        for reward in self.rewards:
            reward.start()

    def close(self) -> None:
        """Release the rewards' resources."""
        for reward in self.rewards:
            reward.close()


class GenerationEngine(ABC):
    """Samples responses in the background with the weights it was last given. Thread-safe; every wait is bounded.

    Life: constructor (cheap) -> `start` -> `begin_update`/`finish_update` once for the first weights -> requests -> `stop`.
    Requests of purpose `evaluation` are decoded before training ones or beside them, and answered apart from them.

    Attributes:
        rounds_weights: whether it serves a rounded copy (bfloat16), so that its log-probs differ from the trainer's by noise.
    """

    rounds_weights: bool = False

    @abstractmethod
    def start(
        self, policy_path: str, *, eos_token_ids: Sequence[int], probe_ids: Sequence[int], max_model_len: int | None
    ) -> None:
        """Load the model of the Hugging Face folder and be ready.

        Args:
            policy_path: folder with config (and weights, which the first update replaces).
            eos_token_ids: ids that end a response; at least one.
            probe_ids: sequence scored after each weight update to prove the delivery; at least two ids.
            max_model_len: tokens of prompt and response that the engine must be able to hold; None: the model's context.

        Raises:
            EngineError: not ready within the engine's own start timeout, or the model cannot be loaded.
        """

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; returns at once. Sent together, they are decoded together."""

    @abstractmethod
    def completions(self, timeout_s: float) -> list[Completion]:
        """Finished **training** completions in order of completion; waits at most `timeout_s` for the first. May be empty."""

    @abstractmethod
    def evaluation_completions(self, timeout_s: float) -> list[Completion]:
        """As `completions`, for requests of purpose `evaluation`."""

    @abstractmethod
    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """Copy the weights out and tell the engine to load them between two decode steps; returns when `weights` may change.

        What becomes of requests in flight and of cached prompts is the engine's to say (`in_flight`, `prefix_cache`). One
        update at a time: call `finish_update` before the next.
        """

    @abstractmethod
    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """Wait until the weights of `begin_update` are served and scored on the probe.

        Raises:
            WeightSyncError: no answer within `timeout_s`, or the engine could not load them.
        """

    def partial_completions(self) -> list[Completion]:
        """Responses that are not finished, of training, as far as the engine has reported them; returns at once.

        Each can be given to a request as its `partial`, after a crash or in a resumed run. Tokens sampled since the last report
        (a fraction of a second, or a few tokens) are not in them. An engine that cannot say gives none.

        Returns:
            Copies, with at least one token each and the finish reason `abort`.
        """
        return []

    @property
    def lost_tokens(self) -> int:
        """Tokens of `generated_tokens` that no completion will hold: those lost with an engine that died."""
        return 0

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last sign of life; 0 where it cannot fall silent (in the trainer's process)."""
        return 0.0

    @abstractmethod
    def pause(self) -> None:
        """Stop decoding training requests (sampled tokens kept); evaluation goes on. Returns when they stand still."""

    @abstractmethod
    def resume(self) -> None:
        """Undo `pause`."""

    @abstractmethod
    def stop(self) -> None:
        """End everything the engine started; idempotent; never raises for an engine that is already dead."""

    @property
    @abstractmethod
    def num_threads(self) -> int:
        """CPU threads the engine uses beside the trainer's own (0 for an engine in the trainer's process)."""

    @property
    @abstractmethod
    def generated_tokens(self) -> int:
        """Training tokens sampled so far, unfinished responses included (as last reported)."""


class Objective(ABC):
    """Turns log-ratios into the detached weights omega of the one estimator (docs/methods.md).

    Attributes:
        trajectory_level: whether omega is one number per trajectory (then exact OPOB can use it).
        needs_batch_logprobs: whether coefficients depend on the whole batch's log-probs.
    """

    trajectory_level: bool = False
    needs_batch_logprobs: bool = False

    @abstractmethod
    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """Weights of A * grad log pi.

        Args:
            log_ratio: [B, T] float32 nats, `logprobs - behavior_logprobs`; 0 where not trained.
            loss_mask: [B, T] bool.
            advantages: [B] float32.
            group_index: [B] int64.

        Returns:
            [B, T] float32, detached; values outside `loss_mask` are ignored.
        """


class Advantage(ABC):
    """Turns the rewards of whole groups into advantages.

    Attributes:
        score_norm: which per-trajectory squared score norms it needs; None for none.
        min_group_size: fewest responses of a prompt that give a signal; 1 for a baseline that does not come from the group.
    """

    score_norm: str | None = None
    min_group_size: int = 2

    @abstractmethod
    def __call__(
        self,
        rewards: Tensor,
        group_index: Tensor,
        *,
        lengths: Tensor,
        log_weights: Tensor,
        score_norms_squared: Tensor | None,
    ) -> Tensor:
        """Advantages [B] float32.

        Args:
            rewards: [B] float32.
            group_index: [B] int64.
            lengths: [B] trained tokens per trajectory.
            log_weights: [B] raw sequence log-ratios, nats.
            score_norms_squared: [B] squared norm of each trajectory's score; None unless `score_norm` asks for it.
        """


class PrefixScorer(Protocol):
    """Scores trajectories under the current policy, for PACE."""

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[Tensor]:
        """Log-probs [L] float32 of every group's flat tokens under the current policy (0 where not sampled)."""
        ...


class PromptStream(Protocol):
    """Where the rollout worker takes its prompts from."""

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        """The next prompts, fewer (down to none) only when the source has ended."""
        ...

    @property
    def ended(self) -> bool:
        """Whether there is no prompt left to give; one that is sent again after a drop can undo it."""
        ...


class RewardScorer(Protocol):
    """Scores decoded responses with bounded waits."""

    def score(self, task: Task, completions: Sequence[str], example: Example) -> list[list[float]] | None:
        """Per response, each reward function's unweighted value; None when the group failed and failures are skipped.

        Raises:
            RewardError: a reward raised, returned a value that is not finite, or took too long.
        """
        ...


class TrajectorySink(Protocol):
    """Where finished groups go: the pool, seen by the rollout worker."""

    def reserve(self, max_groups: int, timeout_s: float) -> int:
        """Admit up to `max_groups` new groups; waits at most `timeout_s`; 0 when none may start."""
        ...

    def release(self, num_groups: int) -> None:
        """Give back reservations of groups that will not be added."""
        ...

    def add(self, group: TrajectoryGroup) -> None:
        """Take over a finished group."""
        ...

    def record(
        self,
        group_id: int,
        state: str,
        *,
        tokens: int | None = None,
        reason: str | None = None,
        outcome: GroupOutcome | None = None,
    ) -> None:
        """Tell the ledger what became of a group (`in_flight`, `scoring`, `dropped`, `failed`).

        Args:
            group_id: of the group.
            state: where it is now.
            tokens: tokens sampled for it so far; None: as told before.
            reason: why, for `dropped` and `failed`.
            outcome: of all its responses, once they are scored.
        """
        ...
