"""PolicyModule: the language model as a LightningModule. One `training_step` is one optimizer update over a `TrainBatch`, or
`updates_per_batch` of them over its mini-batches.

The maths is in `lit_asyncrl.algorithm`; this file only deals out mini-batches and steps the optimizer.
Order of one update: forward and backward of every micro-batch -> callbacks' `on_before_optimizer_step` (gradient controls,
learning-rate scale) -> clip to `max_grad_norm` -> optimizer -> scheduler -> `policy_version + 1`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_asyncrl.algorithm.advantages import OPOB
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.losses import Aggregation, SequenceTIS
from lit_asyncrl.algorithm.micro_batches import policy_ages, split_updates, without_over_age
from lit_asyncrl.algorithm.options import OptionCheck
from lit_asyncrl.algorithm.regularizers import ReferenceKL, Regularizer
from lit_asyncrl.algorithm.settings import contradictions
from lit_asyncrl.algorithm.statistics import age_stats, mean_stats, pool_stats
from lit_asyncrl.checkpoint_io import save_passed_over
from lit_asyncrl.checkpoints import rng_states, set_rng_states
from lit_asyncrl.errors import AsyncRLError, CheckpointError, ConfigurationError, StopRequested
from lit_asyncrl.evaluation import EvaluationBatch, EvaluationResult
from lit_asyncrl.interfaces import Advantage, Objective
from lit_asyncrl.loaders import end_training
from lit_asyncrl.policy import (
    PolicyConfig,
    check_vocabulary,
    context_length,
    disable_dropout,
    load_model,
    load_tokenizer,
    named_weights,
    vocabulary_size,
)
from lit_asyncrl.timing import StepTimes
from lit_asyncrl.types import MicroBatch, NamedTensors, StepStats, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_CONSECUTIVE_SKIPS = 10
"""Updates in a row without a finite gradient, or without a token to train, after which the run ends."""


CHECKPOINT_FORMAT = 2
"""Version of what a checkpoint holds; one of another version is refused by name."""


class Evaluate(Protocol):
    """What `validation_step`, `test_step` and `predict_step` call; given by the AsyncRollout callback."""

    def __call__(self, batch: EvaluationBatch) -> EvaluationResult:
        """Sample, score and count one held-out set at one policy version."""
        ...


class PolicyModule(LightningModule):
    """Trains a causal language model by policy gradient on trajectories of older versions of itself.

    Args:
        policy: model folder and how its forward pass runs. Weights are held in float32 whatever the trainer's precision.
        objective: the importance weights (default: sequence-level, truncated at 8: VCPO).
        advantage: the baseline (default: off-policy optimal baseline, exact).
        aggregation: how token terms are averaged; always over the whole batch, whatever the micro-batches.
        optimizer: makes the optimizer from the parameters.
        lr_scheduler: makes the scheduler, stepped once per applied update; None for a constant rate.
        max_grad_norm: the gradient is clipped to this norm after all callbacks have seen it; None: not clipped.
        max_response_length: divisor of the `constant-length` aggregation, in tokens.
        updates_per_batch: optimizer updates made of one batch, each on its own share of the groups. Ages grow from one to the
            next: groups that exceed `data.max_policy_age` are left out.
        reference_kl: KL penalty to a frozen reference model; None: no such model is loaded.
        entropy_bonus: coefficient of the mean entropy in the loss, subtracted.
    """

    def __init__(
        self,
        policy: PolicyConfig = PolicyConfig(),  # noqa: B008 - frozen
        objective: Objective | None = None,
        advantage: Advantage | None = None,
        aggregation: Aggregation = "sequence-mean-token-mean",
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=3e-4, weight_decay=0.01, fused=True),
        lr_scheduler: LRSchedulerCallable | None = None,
        max_grad_norm: float | None = 1.0,
        max_response_length: int | None = None,
        updates_per_batch: int = 1,
        reference_kl: ReferenceKL | None = None,
        entropy_bonus: float = 0.0,
    ) -> None:
        super().__init__()
        check = OptionCheck("model")
        is_clip = max_grad_norm is None or max_grad_norm > 0
        check.require(is_clip, "max_grad_norm", "be above 0", max_grad_norm, "Give null to switch clipping off.")
        check.require(updates_per_batch >= 1, "updates_per_batch", "be at least 1", updates_per_batch, "Usual are 1 to 4.")
        check.require(math.isfinite(entropy_bonus), "entropy_bonus", "be a finite number", entropy_bonus, "0 is none.")
        check.refuse()
        self.automatic_optimization = False
        self.policy = policy
        kl = reference_kl or ReferenceKL(0.0)
        regularizer = Regularizer(kl.coefficient, kl.estimator, entropy_bonus)
        self.estimator = PolicyGradient(
            objective or SequenceTIS(), advantage or OPOB(), aggregation, max_response_length, regularizer
        )
        self.updates_per_batch = updates_per_batch
        self.reference_kl = reference_kl
        self._step_before = 0  # `global_step` before the batch
        self._reference: list[torch.nn.Module] = []  # in a list: no submodule, neither trained nor saved
        self.make_optimizer = optimizer
        self.make_lr_scheduler = lr_scheduler
        self.max_grad_norm = max_grad_norm
        self.policy_version = 0
        self.step: StepStats | None = None
        self.times = StepTimes()
        self._backward_s = 0.0
        self._gradient_was_removed = False
        self.evaluate: Evaluate | None = None
        self._tokenizer: Any = None
        self._consecutive_skips = 0
        self.num_skipped = 0
        self._rng: dict[str, Any] | None = None

    # ---------------------------------------------------------------- the model

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.policy.path, trust_remote_code=self.policy.trust_remote_code)
        return self._tokenizer

    def configure_model(self) -> None:
        """Load the model (once)."""
        if hasattr(self, "model"):
            return
        model = load_model(
            self.policy.path,
            attn_implementation=self.policy.attn_implementation,
            trust_remote_code=self.policy.trust_remote_code,
        )
        check_vocabulary(self.tokenizer, vocabulary_size(model), self.policy.path)
        disable_dropout(model)
        if self.policy.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        self.estimator.check_supported(model)
        if self.reference_kl is not None:
            self._load_reference(self.reference_kl, vocabulary_size(model))
        self.model: PreTrainedModel = model

    def _load_reference(self, reference_kl: ReferenceKL, vocab_size: int) -> None:
        path = reference_kl.path or self.policy.path
        model = load_model(
            path,
            attn_implementation=self.policy.attn_implementation,
            trust_remote_code=self.policy.trust_remote_code,
        )
        if vocabulary_size(model) != vocab_size:
            raise ConfigurationError(
                f"model.reference_kl.path must hold a model with the policy's vocabulary of {vocab_size}, got {path!r} with "
                f"{vocabulary_size(model)}. Use a model of the same family, or leave it out: the policy before training."
            )
        self._reference.append(model.requires_grad_(False))

    def contradictions(self, data: Any) -> list[str]:
        """What of the settings here does not go with a `RolloutDataModule`'s; messages with keys, values and remedies."""
        return contradictions(self.estimator.objective, self.estimator.advantage, self.updates_per_batch, data)

    def context_length(self) -> int | None:
        """The model's context in tokens; None if its config does not say."""
        return context_length(self.model)

    def weights(self) -> NamedTensors:
        """Current weights by Hugging Face name, sharing storage with the model."""
        return named_weights(self.model)

    @torch.no_grad()
    def probe_logprobs(self, ids: Sequence[int], changed: NamedTensors | None = None) -> list[float]:
        """Log-probs (nats) of ids[1:] given their prefixes, in float32: what the engine must reproduce after an update.

        Args:
            ids: the probe.
            changed: weights that take the place of the model's own of the same name.
        """
        row = torch.tensor([list(ids)], device=self.device)
        with torch.autocast(self.device.type, enabled=False):
            output: Any = torch.func.functional_call(
                self.model, dict(changed or {}), kwargs={"input_ids": row, "use_cache": False}
            )
        logits = output.logits[0, :-1].float()
        return torch.log_softmax(logits, -1).gather(-1, row[0, 1:, None])[:, 0].tolist()

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch) -> Tensor:
        """Log-probs [B, T] of a micro-batch under the current policy, without gradient."""
        with self.trainer.precision_plugin.forward_context():
            return token_logprobs(self.model, micro_batch).logprobs

    # ---------------------------------------------------------------- one update

    def configure_optimizers(self) -> Any:
        """Optimizer and, if given, the scheduler.

        Raises:
            ConfigurationError: the scheduler needs a metric.
        """
        optimizer = self.make_optimizer(p for p in self.parameters() if p.requires_grad)
        if self.make_lr_scheduler is None:
            return optimizer
        scheduler = self.make_lr_scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigurationError(
                "model.lr_scheduler must be one that goes by the number of updates, got ReduceLROnPlateau. Take another one, or "
                "CollapseGuard, which lowers the rate when training gets worse."
            )
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, batch: TrainBatch, batch_idx: int) -> None:
        """The updates of one batch, each of which is a logged skip when nothing can be trained or its gradient is not finite."""
        self._step_before = self.trainer.global_step
        updates = split_updates(batch.micro_batches, self.updates_per_batch)
        if self.estimator.needs_proximal and (len(updates) > 1 or len(batch.micro_batches) > 1):
            with self.times.measure("forward"):
                updates = [self.estimator.with_logprobs(self.model, parts) for parts in updates]
        steps, ages, num_over_age = [], [], 0
        for i, parts in enumerate(updates):
            left_out: list[int] = []
            if i > 0:
                parts, left_out = self._later(parts)
                num_over_age += len(left_out)
            ages += [policy_ages(part, self.policy_version) for part in parts]
            before = self.policy_version
            steps.append(self._update(parts))
            if len(updates) > 1:
                self._account(i, left_out, skipped=self.policy_version == before)
        self.step = mean_stats(steps)
        if len(steps) > 1:
            batch.stats |= age_stats(ages, num_over_age)

    def _later(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], list[int]]:
        """The micro-batches of a later update of a batch, and which of its groups, counted through, became too old for it."""
        parts = list(micro_batches)
        if not self.estimator.needs_proximal:  # log-probs that were handed on are of the policy before the first update
            parts = [replace(part, logprobs=None) for part in parts]
        data, young, left_out, number = self.trainer.datamodule, [], [], 0  # type: ignore[attr-defined]
        if data.max_policy_age is None:
            return parts, []
        for part in parts:
            kept, over_age = without_over_age(part, self.policy_version, data.max_policy_age, data.age_measure)
            left_out += [number + group for group in over_age]
            number += int(part.group_index.max()) + 1
            young.append(kept)
        return young, left_out

    def _account(self, update: int, left_out: Sequence[int], *, skipped: bool) -> None:
        """Tell the pool which groups of one of several updates were not trained: group j of a batch is of update j mod n."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        ids = data.batch_ids[update :: self.updates_per_batch]
        over_age = [ids[j] for j in left_out]
        data.pool.leave_out(over_age, "over_age")
        if skipped:
            data.pool.leave_out([group_id for group_id in ids if group_id not in over_age], "skipped_update")

    def _update(self, micro_batches: Sequence[MicroBatch]) -> StepStats:
        """One optimizer update, or a skip."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        started = time.perf_counter()
        self._backward_s = 0.0
        parts = self.estimator.gradient(
            self.model,
            micro_batches,
            backward=self._timed_backward,
            reference=self._reference[0].to(self.device) if self._reference else None,
        )
        self.times.add("forward", time.perf_counter() - started - self._backward_s)
        self.times.add("backward", self._backward_s)
        step = self.step = pool_stats(parts, self.policy_version)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        step.grad_norm = norm
        if not gradients or not math.isfinite(norm):
            self._skip("no token to train" if not gradients else f"a gradient norm of {norm}")
            return step
        with self.times.measure("optimizer"):
            optimizer.step()
        if self._gradient_was_removed:
            self._skip("a callback that removed the gradient")
            return step
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()
        self.policy_version += 1
        self._consecutive_skips = 0
        return step

    def _timed_backward(self, loss: Tensor) -> None:
        started = time.perf_counter()
        self.manual_backward(loss)
        self._backward_s += time.perf_counter() - started

    def _skip(self, reason: str) -> None:
        self.num_skipped += 1
        self._consecutive_skips += 1
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        if self._consecutive_skips > MAX_CONSECUTIVE_SKIPS:
            raise AsyncRLError(
                f"{self._consecutive_skips} updates in a row were skipped, the last at policy_version {self.policy_version} "
                f"for {reason}. "
                "Look at loss_mask, rewards and log-ratios in the log; lower the learning rate if the gradient is not finite."
            )

    def on_train_batch_end(self, outputs: Any, batch: TrainBatch, batch_idx: int) -> None:
        """Save what a ModelCheckpoint would have saved between the updates of this batch."""
        save_passed_over(self.trainer, self.reached)

    def reached(self, every: int) -> bool:
        """Whether the batch just trained, of one update or more, ended at or passed a multiple of `every` updates; 0: never."""
        step = self.trainer.global_step
        return every > 0 and (step % every == 0 or step // every > self._step_before // every)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Clip, after every callback has seen the unclipped gradient; one that set all of it to None asks for a skip."""
        self._gradient_was_removed = all(p.grad is None for p in self.parameters())
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), self.max_grad_norm)

    # ---------------------------------------------------------------- evaluation

    def validation_step(self, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate one held-out set and log its metrics under `val/<set>/`."""
        self._evaluate_and_log(batch, "val")

    def test_step(self, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate one held-out set and log its metrics under `test/<set>/`."""
        self._evaluate_and_log(batch, "test")

    def predict_step(self, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """Completions with rewards of one held-out set, as plain records."""
        return self._evaluation(batch).records

    def _evaluate_and_log(self, batch: EvaluationBatch, area: str) -> None:
        try:
            metrics = self._evaluation(batch).metrics
        except StopRequested:
            if area == "val" and self.trainer.state.fn == "fit":
                end_training(self.trainer)
                self.trainer.sanity_checking = True  # callbacks that watch a metric must not look for this one
            return
        values = {f"{area}/{batch.name}/{key}": value for key, value in metrics.items()}
        if self.trainer.state.fn == "fit":
            values["step"] = float(self.trainer.global_step)  # of the axis; Lightning's own counts batches
        self.log_dict(values, add_dataloader_idx=False, batch_size=1)

    def _evaluation(self, batch: EvaluationBatch) -> EvaluationResult:
        if self.evaluate is None:
            raise ConfigurationError(
                "trainer.callbacks must hold AsyncRollout to evaluate, got none. Add lit_asyncrl.callbacks.AsyncRollout."
            )
        return self.evaluate(batch)

    # ---------------------------------------------------------------- checkpoint

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the version, where the model came from, and the random generators' states."""
        checkpoint["lit_asyncrl"] = {
            "format": CHECKPOINT_FORMAT,
            "policy_version": self.policy_version,
            "policy_path": self.policy.path,
            "num_skipped": self.num_skipped,
            "rng": rng_states(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the version, and keep the random generators' states for the start of training.

        Raises:
            CheckpointError: the file was not written by this version of lit-asyncrl, or is of another model; names it.
        """
        where = "a file" if self._trainer is None else repr(str(self._trainer.ckpt_path))
        if "lit_asyncrl" not in checkpoint:
            raise CheckpointError(f"ckpt_path must name a checkpoint written by lit-asyncrl, got {where}.")
        if (written := checkpoint["lit_asyncrl"].get("format", 1)) != CHECKPOINT_FORMAT:
            raise CheckpointError(
                f"ckpt_path must name a checkpoint of format {CHECKPOINT_FORMAT}, which this version of lit-asyncrl writes, got "
                f"{where} of format {written}. `lit-asyncrl export` reads its policy: start anew with that, or remove the file."
            )
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        saved = {name: tuple(tensor.shape) for name, tensor in checkpoint["state_dict"].items()}
        if other := [name for name in saved if saved[name] != shapes.get(name)]:
            raise CheckpointError(
                f"model.policy.path must hold a model like that of the checkpoint {where} "
                f"({checkpoint['lit_asyncrl']['policy_path']!r}), got {self.policy.path!r}, where {other[0]} is "
                f"{shapes.get(other[0])} and not {saved[other[0]]}. Give its model, or another checkpoint."
            )
        path = checkpoint["lit_asyncrl"]["policy_path"]
        if path != self.policy.path:
            warnings.warn(
                f"model.policy.path is {self.policy.path!r}, and was {path!r} in the checkpoint, whose weights go on.",
                stacklevel=2,
            )
        self.policy_version = int(checkpoint["lit_asyncrl"]["policy_version"])
        self.num_skipped = int(checkpoint["lit_asyncrl"]["num_skipped"])
        self._rng = checkpoint["lit_asyncrl"]["rng"]

    def on_train_start(self) -> None:
        """Let the random generators go on where the checkpoint was written: what ran since then drew from them."""
        if self._rng is not None:
            set_rng_states(self._rng)
            self._rng = None
