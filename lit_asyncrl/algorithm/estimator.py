"""The one policy-gradient estimator, of which every method is an instance:

    gradient = sum_i sum_t c_i * omega_it * A_i * grad log pi(y_it)

omega comes from an `Objective`, A from an `Advantage`, c from the aggregation. The loss is minus the weighted sum of log-probs
with the three factors detached, so that `.grad` is what an optimizer that minimizes expects; a `Regularizer` may add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lit_asyncrl.algorithm.advantages import OPOB
from lit_asyncrl.algorithm.aggregation import Aggregation, aggregation_problems, token_scales
from lit_asyncrl.algorithm.clip_losses import ProximalObjective
from lit_asyncrl.algorithm.exact_gradients import BatchBaseline, Formed, form_batched, form_per_trajectory, trainable
from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.method import Method
from lit_asyncrl.algorithm.micro_batches import trained_counts
from lit_asyncrl.algorithm.mismatch import Mismatch
from lit_asyncrl.algorithm.regularizers import Regularizer, kl_estimate
from lit_asyncrl.algorithm.score_norms import check_supported, logit_proxy
from lit_asyncrl.algorithm.scored import MicroBatchStats, Scored, TrainedRows, no_stats
from lit_asyncrl.algorithm.weights import k3_sum
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Advantage, Objective
from lit_asyncrl.types import MicroBatch

Backward = Callable[[Tensor], None]


class PolicyGradient:
    """Forms the gradient of batches made of micro-batches of whole groups.

    Args:
        objective: gives omega.
        advantage: gives A.
        aggregation: gives c, see `token_scales`.
        max_response_length: tokens, for aggregation `constant-length` alone.
        regularizer: what else is in the loss.

    Raises:
        ConfigurationError: unknown aggregation, or an advantage that the objective's weights do not go with; all at once.
    """

    def __init__(
        self,
        objective: Objective,
        advantage: Advantage,
        aggregation: Aggregation = "sequence-mean-token-mean",
        max_response_length: int | None = None,
        regularizer: Regularizer = Regularizer(),  # noqa: B008 - frozen
    ) -> None:
        self.method = Method(objective, advantage)
        problems = aggregation_problems(aggregation, max_response_length) + self.method.problems()
        if problems:
            raise ConfigurationError(" ".join(problems))
        self.aggregation: Aggregation = aggregation
        self.max_response_length = max_response_length
        self.regularizer = regularizer

    @property
    def objective(self) -> Objective:
        """What gives omega."""
        return self.method.objective

    @property
    def advantage(self) -> Advantage:
        """What gives A."""
        return self.method.advantage

    @property
    def needs_proximal(self) -> bool:
        """Whether the log-probs at the start of the batch are needed in each of its updates."""
        return isinstance(self.objective, ProximalObjective)

    def check_supported(self, model: nn.Module) -> None:
        """Refuse a model whose score norms cannot be formed as asked. Raises `ConfigurationError`."""
        if self.advantage.score_norm == "batched":
            check_supported(model)

    @torch.no_grad()
    def with_logprobs(self, model: nn.Module, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with their log-probs under `model` (detached), where they were not handed on."""
        return [
            part if part.logprobs is not None else replace(part, logprobs=token_logprobs(model, part).logprobs)
            for part in micro_batches
        ]

    def gradient(
        self, model: nn.Module, micro_batches: Sequence[MicroBatch], *, backward: Backward, reference: nn.Module | None = None
    ) -> list[MicroBatchStats]:
        """Add the gradient of a whole batch (of one update) to the parameters' `.grad`, whatever its micro-batches are.

        Args:
            model: Hugging Face causal language model.
            micro_batches: whole groups.
            backward: differentiates a scalar into `.grad`. Not called with score norms `batched`, where the gradient is formed
                from the layers' records, except for the regularizer.
            reference: frozen model that the KL penalty is measured to; None: none.
        """
        num_trajectories, num_trained_tokens = trained_counts(micro_batches)
        method, late = self.method.for_batch(model, micro_batches), None
        advantage = method.advantage
        if isinstance(advantage, OPOB) and method.has_batch_baseline and method.is_exact and len(micro_batches) > 1:
            late = BatchBaseline(advantage, trainable(model))
            method = replace(method, advantage=advantage.with_baseline(0.0))
        parts: list[tuple[MicroBatch, Formed | None, float | None]] = []
        for part in micro_batches:
            formed, kl = self._form(model, part, method, (num_trajectories, num_trained_tokens), backward, reference, late)
            parts.append((part, formed, kl))
        if late is not None:
            late.settle([formed for _, formed, _ in parts if formed is not None])
        return [no_stats(part) if formed is None else self._stats(formed, kl) for part, formed, kl in parts]

    def accumulate(
        self,
        model: nn.Module,
        micro_batch: MicroBatch,
        *,
        num_trajectories: int,
        num_trained_tokens: int,
        backward: Backward,
        reference: nn.Module | None = None,
    ) -> MicroBatchStats:
        """Add one micro-batch's part of the gradient; what a method takes from the batch, it takes from this micro-batch.

        A trajectory without a trained token has a reward, and therefore a part in the group's mean and deviation, but neither
        gradient nor weight; a micro-batch of such alone leaves model and gradients untouched.

        Args:
            model: as in `gradient`.
            micro_batch: whole groups.
            num_trajectories, num_trained_tokens: of the whole batch, see `TrainBatch`.
            backward: as in `gradient`.
            reference: as in `gradient`.
        """
        counts = (num_trajectories, num_trained_tokens)
        formed, kl = self._form(model, micro_batch, self.method, counts, backward, reference, None)
        return no_stats(micro_batch) if formed is None else self._stats(formed, kl)

    def _form(
        self,
        model: nn.Module,
        micro_batch: MicroBatch,
        method: Method,
        counts: tuple[int, int],
        backward: Backward,
        reference: nn.Module | None,
        late: BatchBaseline | None,
    ) -> tuple[Formed | None, float | None]:
        """Form the micro-batch's gradient. Returns it, None if nothing is trained, and the summed KL to the reference."""
        trained = TrainedRows.of(micro_batch)
        if not len(trained.rows):
            return None, None
        batch = trained.batch
        scales = token_scales(
            self.aggregation,
            batch.loss_mask.sum(-1),
            num_trajectories=counts[0],
            num_trained_tokens=counts[1],
            max_response_length=self.max_response_length,
        )
        with torch.no_grad():
            reference_logprobs = None if reference is None else token_logprobs(reference, batch).logprobs
        if method.advantage.score_norm == "batched":
            formed = form_batched(method, model, trained, scales, late)
        elif method.advantage.score_norm == "per_trajectory":
            formed = form_per_trajectory(method, model, trained, scales, backward, late)
        else:
            formed = self._form_plain(model, method, trained, scales, reference_logprobs, backward)
        if method.is_exact and self.regularizer.acts:
            forward = token_logprobs(model, batch, entropy_gradient=True)
            loss = self.regularizer.loss(forward.logprobs, forward.entropy, reference_logprobs, scales, batch.loss_mask)
            backward(loss)
            formed.loss += float(loss.detach())
        if reference_logprobs is None:
            return formed, None
        log_ratio = (formed.scored.logprobs - reference_logprobs)[batch.loss_mask].double()
        return formed, float(kl_estimate(log_ratio, self.regularizer.kl_estimator).sum())

    def _form_plain(
        self,
        model: nn.Module,
        method: Method,
        trained: TrainedRows,
        scales: Tensor,
        reference_logprobs: Tensor | None,
        backward: Backward,
    ) -> Formed:
        """One forward and one backward of the weighted log-probs, regularization included."""
        batch, mask = trained.batch, trained.batch.loss_mask
        forward = token_logprobs(
            model,
            batch,
            need_energy=method.advantage.score_norm is not None,
            entropy_gradient=self.regularizer.entropy_coefficient != 0,
        )
        scored = Scored.of(trained, forward)
        norms = None if forward.energy is None else logit_proxy(forward.energy, mask)
        advantages = method.advantages(scored, norms)
        omega = method.omega(scored, advantages)
        factors = omega * (scales.to(omega.dtype) * advantages)[:, None]
        loss = -(factors[mask] * forward.logprobs[mask]).sum()
        if self.regularizer.acts:
            loss = loss + self.regularizer.loss(forward.logprobs, forward.entropy, reference_logprobs, scales, mask)
        backward(loss)
        return Formed(scored, advantages, omega, norms, method.baselines(scored, norms), float(loss.detach()))

    def _stats(self, formed: Formed, reference_kl_sum: float | None) -> MicroBatchStats:
        scored = formed.scored
        mask, log_ratio = scored.batch.loss_mask, scored.log_ratio
        num_clipped, weight_sum, removed_sum = self.method.clipping(scored, formed.omega)
        return MicroBatchStats(
            rows=scored.rows,
            log_weights_B=scored.log_weights,
            lengths=scored.lengths,
            advantages=formed.advantages,
            baselines=formed.baselines,
            score_norms_squared=formed.norms,
            loss=formed.loss,
            num_tokens=int(scored.lengths.sum()),
            num_clipped=num_clipped,
            log_ratio_sum=float(log_ratio.sum(dtype=torch.float64)),
            k3_sum=float(k3_sum(log_ratio, mask)),
            entropy_sum=float(scored.entropy[mask].sum(dtype=torch.float64)),
            reference_kl_sum=reference_kl_sum,
            weight_sum=weight_sum,
            removed_sum=removed_sum,
            mismatch=Mismatch.of(log_ratio, mask, scored.batch.token_versions),
        )
