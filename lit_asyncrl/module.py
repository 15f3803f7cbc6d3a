"""PolicyModule: the language model as a LightningModule. One `training_step` is one optimizer update over a `TrainBatch`.

The maths is in `lit_asyncrl.algorithm`; this file only loops over micro-batches, steps the optimizer, and logs.
Order of one update: forward and backward of every micro-batch -> callbacks' `on_before_optimizer_step` (gradient controls,
learning-rate scale) -> clip to `max_grad_norm` -> optimizer -> scheduler -> `policy_version + 1`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from lit_asyncrl.algorithm.advantages import OPOB
from lit_asyncrl.algorithm.estimator import MicroBatchStats, PolicyGradient
from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.losses import Aggregation, SequenceTIS
from lit_asyncrl.algorithm.weights import effective_sample_size
from lit_asyncrl.errors import AsyncRLError, CheckpointError, ConfigurationError, StopRequested
from lit_asyncrl.evaluation import EvaluationBatch, EvaluationResult
from lit_asyncrl.interfaces import Advantage, Objective
from lit_asyncrl.policy import (
    PolicyConfig,
    check_vocabulary,
    context_length,
    disable_dropout,
    load_model,
    load_tokenizer,
    named_weights,
    resolve_policy_path,
    vocabulary_size,
)
from lit_asyncrl.timing import StepTimes
from lit_asyncrl.types import MicroBatch, NamedTensors, StepStats, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_CONSECUTIVE_SKIPS = 10
"""Updates in a row without a finite gradient, or without a token to train, after which the run ends."""


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
    ) -> None:
        super().__init__()
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigurationError(
                f"model.max_grad_norm must be above 0, got {max_grad_norm}. Give null to switch clipping off."
            )
        self.automatic_optimization = False
        self.policy = policy
        self.estimator = PolicyGradient(objective or SequenceTIS(), advantage or OPOB(), aggregation, max_response_length)
        self.make_optimizer = optimizer
        self.make_lr_scheduler = lr_scheduler
        self.max_grad_norm = max_grad_norm
        self.policy_version = 0
        self.step: StepStats | None = None
        self.times = StepTimes()
        self._backward_s = 0.0
        self.evaluate: Evaluate | None = None
        self._tokenizer: Any = None
        self._consecutive_skips = 0
        self.num_skipped = 0

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
        self.model: PreTrainedModel = model

    def context_length(self) -> int | None:
        """The model's context in tokens; None if its config does not say."""
        return context_length(self.model)

    def weights(self) -> NamedTensors:
        """Current weights by Hugging Face name, sharing storage with the model."""
        return named_weights(self.model)

    @torch.no_grad()
    def probe_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probs (nats) of ids[1:] given their prefixes, in float32: what the engine must reproduce after an update."""
        row = torch.tensor([list(ids)], device=self.device)
        with torch.autocast(self.device.type, enabled=False):
            logits = self.model(input_ids=row, use_cache=False).logits[0, :-1].float()
        return torch.log_softmax(logits, -1).gather(-1, row[0, 1:, None])[:, 0].tolist()

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch) -> Tensor:
        """Log-probs [B, T] of a micro-batch under the current policy, without gradient."""
        with self.trainer.precision_plugin.forward_context():
            return token_logprobs(self.model, micro_batch).logprobs

    # ---------------------------------------------------------------- one update

    def configure_optimizers(self) -> Any:
        """Optimizer and, if given, the scheduler."""
        optimizer = self.make_optimizer(p for p in self.parameters() if p.requires_grad)
        if self.make_lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_lr_scheduler(optimizer)}

    def training_step(self, batch: TrainBatch, batch_idx: int) -> None:
        """One update, or a logged skip when there is nothing to train or the gradient is not finite."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        started = time.perf_counter()
        self._backward_s = 0.0
        parts = [
            self.estimator.accumulate(
                self.model,
                micro_batch,
                num_trajectories=batch.num_trajectories,
                num_trained_tokens=batch.num_trained_tokens,
                backward=self._timed_backward,
            )
            for micro_batch in batch.micro_batches
        ]
        self.times.add("forward", time.perf_counter() - started - self._backward_s)
        self.times.add("backward", self._backward_s)
        self.step = pool_stats(parts)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        self.step.grad_norm = norm
        if not gradients or not torch.isfinite(torch.tensor(norm)):
            self._skip("no token to train" if not gradients else f"a gradient norm of {norm}")
            return
        with self.times.measure("optimizer"):
            optimizer.step()
            scheduler: Any = self.lr_schedulers()
            if scheduler is not None:
                scheduler.step()
        self.policy_version += 1
        self._consecutive_skips = 0

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

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Clip, after every callback has seen the unclipped gradient."""
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
            self.trainer.should_stop = True
            return
        self.log_dict(
            {f"{area}/{batch.name}/{key}": value for key, value in metrics.items()}, add_dataloader_idx=False, batch_size=1
        )

    def _evaluation(self, batch: EvaluationBatch) -> EvaluationResult:
        if self.evaluate is None:
            raise ConfigurationError(
                "trainer.callbacks must hold AsyncRollout to evaluate, got none. Add lit_asyncrl.callbacks.AsyncRollout."
            )
        return self.evaluate(batch)

    # ---------------------------------------------------------------- checkpoint

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the version and where the model came from."""
        checkpoint["lit_asyncrl"] = {
            "policy_version": self.policy_version,
            "policy_path": self.policy.path,
            "num_skipped": self.num_skipped,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the version.

        Raises:
            CheckpointError: the file was not written by lit-asyncrl.
        """
        if "lit_asyncrl" not in checkpoint:
            raise CheckpointError("ckpt_path must name a checkpoint written by lit-asyncrl, got one without its version record.")
        path = checkpoint["lit_asyncrl"]["policy_path"]
        if path != self.policy.path:
            warnings.warn(
                f"model.policy.path is {self.policy.path!r}, and was {path!r} in the checkpoint, whose weights go on.",
                stacklevel=2,
            )
        self.policy_version = int(checkpoint["lit_asyncrl"]["policy_version"])
        self.num_skipped = int(checkpoint["lit_asyncrl"]["num_skipped"])


def pool_stats(parts: Sequence[MicroBatchStats]) -> StepStats:
    """Statistics of the whole batch from those of its micro-batches; one effective sample size over all of them."""
    log_weights = torch.cat([part.log_weights_B for part in parts])
    tokens = sum(part.num_tokens for part in parts)
    if tokens == 0:
        return StepStats(log_weights, 0.0, 0.0)
    ess, ess_ratio = effective_sample_size(log_weights)
    advantages = torch.cat([part.advantages for part in parts])
    weights = log_weights.double().exp()
    metrics = {
        "loss": sum(part.loss for part in parts),
        "policy/entropy": sum(part.entropy_sum for part in parts) / tokens,
        "policy/advantage_abs_mean": float(advantages.abs().mean()),
        "weights/log_ratio_mean": sum(part.log_ratio_sum for part in parts) / tokens,
        "weights/k3_kl": sum(part.k3_sum for part in parts) / tokens,
        "weights/clipped_share": sum(part.num_clipped for part in parts) / tokens,
        "weights/sequence_weight_mean": float(weights.mean()),
        "weights/sequence_weight_max": float(weights.max()),
    }
    baselines = [part.baselines for part in parts if part.baselines is not None]
    if baselines:
        metrics["policy/baseline_mean"] = float(torch.cat(baselines).mean())
    return StepStats(log_weights, float(ess), float(ess_ratio), metrics=metrics)


def export_policy(checkpoint_path: str, output_dir: str, policy_path: str | None = None) -> str:
    """Write the policy of a checkpoint as a Hugging Face folder (model, tokenizer, generation config).

    Args:
        checkpoint_path: a checkpoint written by lit-asyncrl.
        output_dir: folder to write; made if missing.
        policy_path: the model folder the run started from; None: as recorded in the checkpoint.

    Returns:
        The folder.

    Raises:
        CheckpointError: the file is missing, torn or foreign.
    """
    checkpoint = read_checkpoint(checkpoint_path)
    source = resolve_policy_path(policy_path or checkpoint["lit_asyncrl"]["policy_path"])
    model = load_model(source)
    state = checkpoint["state_dict"]
    weights = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # tensors of other shapes
        raise CheckpointError(f"ckpt_path must fit the model in {source!r}, got {checkpoint_path!r} ({error}).") from error
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise CheckpointError(
            f"ckpt_path must fit the model in {source!r}, got unexpected tensors {unexpected[:3]} and missing "
            f"{sorted(missing)[:3]}."
        )
    model.save_pretrained(output_dir)
    load_tokenizer(source).save_pretrained(output_dir)
    return output_dir


def read_checkpoint(path: str) -> dict[str, Any]:
    """The content of a checkpoint, without running any pickled code.

    Raises:
        CheckpointError: the file is missing, torn or foreign.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"ckpt_path must name a whole checkpoint, got {path!r} ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(checkpoint, dict) or "lit_asyncrl" not in checkpoint:
        raise CheckpointError(f"ckpt_path must name a checkpoint written by lit-asyncrl, got {path!r}.")
    return checkpoint
