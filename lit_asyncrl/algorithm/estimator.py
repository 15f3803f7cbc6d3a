"""The one policy-gradient estimator, of which every method is an instance:

    gradient = sum_i sum_t c_i * omega_it * A_i * grad log pi(y_it)

omega comes from an `Objective`, A from an `Advantage`, c from the aggregation. The loss is minus the weighted sum of log-probs
with the three factors detached, so that `.grad` is what an optimizer that minimizes expects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lit_asyncrl.algorithm.advantages import OPOB
from lit_asyncrl.algorithm.logprobs import TokenLogprobs, token_logprobs
from lit_asyncrl.algorithm.losses import Aggregation, Reinforce, check_aggregation, token_scales
from lit_asyncrl.algorithm.score_norms import BatchedScores, check_supported, logit_proxy
from lit_asyncrl.algorithm.weights import k3_sum, log_ratios, sequence_log_weights
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Advantage, Objective
from lit_asyncrl.types import MicroBatch


@dataclass
class MicroBatchStats:
    """What one micro-batch contributed, detached. N trajectories: those with a trained token.

    Attributes:
        rows: [N] int64, their positions in the micro-batch.
        log_weights_B: [N] raw sequence log-ratios, nats.
        lengths: [N] int64 trained tokens.
        advantages: [N].
        baselines: [N], of OPOB; else None.
        score_norms_squared: [N] float64, where the advantage asked for them; else None.
        loss: sum of the loss's terms; those of all micro-batches add up to the batch's loss.
        num_tokens: trained tokens.
        num_clipped: trained tokens whose weight is below their (token or trajectory) ratio; 0 for objectives without ratio.
        log_ratio_sum, k3_sum, entropy_sum: over trained tokens, nats, float64.
    """

    rows: Tensor
    log_weights_B: Tensor  # noqa: N815 - dimension suffix, see the design's vocabulary
    lengths: Tensor
    advantages: Tensor
    baselines: Tensor | None
    score_norms_squared: Tensor | None
    loss: float
    num_tokens: int
    num_clipped: int
    log_ratio_sum: float
    k3_sum: float
    entropy_sum: float


@dataclass
class _Evaluation:
    """A micro-batch after its forward pass, reduced to trajectories with a trained token (`rows` of the `whole`)."""

    whole: MicroBatch
    rows: Tensor
    batch: MicroBatch
    logprobs: Tensor
    entropy: Tensor
    log_ratio: Tensor
    log_weights: Tensor
    lengths: Tensor


class PolicyGradient:
    """Forms the gradient of micro-batches of whole groups.

    Args:
        objective: gives omega.
        advantage: gives A.
        aggregation: gives c, see `token_scales`.
        max_response_length: tokens, for aggregation `constant-length` alone.

    Raises:
        ConfigurationError: unknown aggregation, or exact OPOB with an objective whose weights differ within a trajectory.
    """

    def __init__(
        self,
        objective: Objective,
        advantage: Advantage,
        aggregation: Aggregation = "sequence-mean-token-mean",
        max_response_length: int | None = None,
    ) -> None:
        check_aggregation(aggregation, max_response_length)
        if advantage.score_norm in ("batched", "per_trajectory") and not objective.trajectory_level:
            raise ConfigurationError(
                "model.objective must have one weight per trajectory where score norms are exact, got "
                f"{type(objective).__name__} (model.advantage.init_args.score_norm is {advantage.score_norm!r}). "
                "Set score_norm to logit_proxy, or choose a trajectory-level objective such as SequenceTIS."
            )
        if advantage.score_norm == "per_trajectory" and not isinstance(advantage, OPOB):
            raise ConfigurationError(
                "model.advantage must be OPOB where score_norm is per_trajectory, got "
                f"{type(advantage).__name__}. Set its score_norm to batched or logit_proxy."
            )
        self.objective = objective
        self.advantage = advantage
        self.aggregation = aggregation
        self.max_response_length = max_response_length

    def check_supported(self, model: nn.Module) -> None:
        """Refuse a model whose score norms cannot be formed as asked. Raises `ConfigurationError`."""
        if self.advantage.score_norm == "batched":
            check_supported(model)

    def accumulate(
        self,
        model: nn.Module,
        micro_batch: MicroBatch,
        *,
        num_trajectories: int,
        num_trained_tokens: int,
        backward: Callable[[Tensor], None],
    ) -> MicroBatchStats:
        """Add the micro-batch's part of the gradient to the parameters' `.grad`.

        A trajectory without a trained token has a reward, and therefore a part in the group's mean and deviation, but neither
        gradient nor weight; a micro-batch of such alone leaves model and gradients untouched.

        Args:
            model: Hugging Face causal language model.
            micro_batch: whole groups.
            num_trajectories, num_trained_tokens: of the whole batch, see `TrainBatch`.
            backward: differentiates a scalar into `.grad` (the Lightning module's `manual_backward`). Not called with score
                norms `batched`, where the gradient is formed from the layers' records.
        """
        rows = micro_batch.loss_mask.any(-1).nonzero().squeeze(-1)
        if not len(rows):
            return _no_stats(rows, micro_batch.rewards)
        batch = micro_batch if len(rows) == micro_batch.num_trajectories else _select(micro_batch, rows)
        scales = token_scales(
            self.aggregation,
            batch.loss_mask.sum(-1),
            num_trajectories=num_trajectories,
            num_trained_tokens=num_trained_tokens,
            max_response_length=self.max_response_length,
        )
        if self.advantage.score_norm == "batched":
            return self._batched(model, micro_batch, batch, rows, scales)
        if self.advantage.score_norm == "per_trajectory":
            return self._per_trajectory(model, micro_batch, batch, rows, scales, backward)
        need_energy = self.advantage.score_norm is not None
        scored = token_logprobs(model, batch, need_energy=need_energy)
        evaluation = _evaluate(micro_batch, rows, batch, scored)
        norms = logit_proxy(scored.energy, batch.loss_mask) if scored.energy is not None else None
        advantages, omega = self._factors(evaluation, norms)
        factors = omega * (scales.to(omega.dtype) * advantages)[:, None]
        loss = -(factors[batch.loss_mask] * scored.logprobs[batch.loss_mask]).sum()
        backward(loss)
        return self._stats(evaluation, advantages, omega, norms, float(loss.detach()))

    def _factors(self, evaluation: _Evaluation, norms: Tensor | None) -> tuple[Tensor, Tensor]:
        """Advantages [N] and weights omega [N, T], detached."""
        batch, whole, rows = evaluation.batch, evaluation.whole, evaluation.rows

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(whole.num_trajectories).index_copy(0, rows, values)

        advantages = self.advantage(
            whole.rewards,
            whole.group_index,
            lengths=spread(evaluation.lengths),
            log_weights=spread(evaluation.log_weights),
            score_norms_squared=None if norms is None else spread(norms),
        )[rows]
        omega = self.objective.coefficients(evaluation.log_ratio, batch.loss_mask, advantages, batch.group_index)
        return advantages, omega.detach()

    def _batched(self, model: nn.Module, whole: MicroBatch, batch: MicroBatch, rows: Tensor, scales: Tensor) -> MicroBatchStats:
        """Exact norms and gradient from one forward and one backward."""
        with BatchedScores(model, batch.num_trajectories) as scores:
            scored = token_logprobs(model, batch, share_prefix=False)
            scores.backward(scored.logprobs.masked_fill(~batch.loss_mask, 0.0).sum())
        evaluation = _evaluate(whole, rows, batch, scored)
        norms = scores.norms_squared()
        advantages, omega = self._factors(evaluation, norms)
        factors = scales * _per_trajectory_weight(omega, batch.loss_mask) * advantages
        scores.accumulate(-factors)
        return self._stats(evaluation, advantages, omega, norms, _loss(evaluation, factors))

    def _per_trajectory(
        self,
        model: nn.Module,
        whole: MicroBatch,
        batch: MicroBatch,
        rows: Tensor,
        scales: Tensor,
        backward: Callable[[Tensor], None],
    ) -> MicroBatchStats:
        """Exact norms from one backward per trajectory, and the gradient from two accumulators per group.

        With k_i = c_i omega_i / sigma, sum_i k_i (R_i - b) S_i = sum_i k_i R_i S_i - b sum_i k_i S_i, and b, which needs all
        norms of the group, comes last. A forward pass without gradient gives the weights of a whole group beforehand.
        """
        assert isinstance(self.advantage, OPOB), "checked by the constructor"
        with torch.no_grad():
            scored = token_logprobs(model, batch)
        evaluation = _evaluate(whole, rows, batch, scored)
        omega = self.objective.coefficients(
            evaluation.log_ratio, batch.loss_mask, torch.zeros_like(batch.rewards), batch.group_index
        )
        weights = (
            scales
            * _per_trajectory_weight(omega, batch.loss_mask)
            * self.advantage.scales(whole.rewards, whole.group_index)[rows]
        )
        parameters = [p for p in model.parameters() if p.requires_grad]
        kept = [p.grad for p in parameters]
        norms = torch.zeros_like(evaluation.log_weights, dtype=torch.float64)
        for group in batch.group_index.unique():
            members = (batch.group_index == group).nonzero().squeeze(-1)
            with_reward = [torch.zeros_like(p) for p in parameters]
            without = [torch.zeros_like(p) for p in parameters]
            for i in members.tolist():
                norms[i] = _backward_score(model, batch, i, parameters, backward)
                scores = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
                torch._foreach_add_(with_reward, scores, alpha=float(weights[i] * batch.rewards[i]))
                torch._foreach_add_(without, scores, alpha=float(weights[i]))
            baseline = self._baselines(evaluation, norms, members)[0]
            torch._foreach_add_(with_reward, without, alpha=-float(baseline))
            kept = [-new if old is None else old.sub_(new) for old, new in zip(kept, with_reward, strict=True)]
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
        advantages, omega_after = self._factors(evaluation, norms)
        if not torch.equal(omega_after[batch.loss_mask], omega[batch.loss_mask]):
            raise ConfigurationError(
                "model.objective must not look at the advantages where score_norm is per_trajectory, got "
                f"{type(self.objective).__name__}. Set model.advantage.init_args.score_norm to batched or logit_proxy."
            )
        factors = scales * _per_trajectory_weight(omega, batch.loss_mask) * advantages
        return self._stats(evaluation, advantages, omega, norms, _loss(evaluation, factors))

    def _baselines(self, evaluation: _Evaluation, norms: Tensor, members: Tensor) -> Tensor:
        """OPOB's baseline of the given trajectories' groups."""
        assert isinstance(self.advantage, OPOB), "only OPOB has baselines to report"
        return self.advantage.baselines(
            evaluation.batch.rewards[members],
            evaluation.batch.group_index[members],
            lengths=evaluation.lengths[members],
            log_weights=evaluation.log_weights[members],
            score_norms_squared=norms[members],
        )

    def _stats(
        self, evaluation: _Evaluation, advantages: Tensor, omega: Tensor, norms: Tensor | None, loss: float
    ) -> MicroBatchStats:
        rows = evaluation.rows
        mask, log_ratio = evaluation.batch.loss_mask, evaluation.log_ratio
        baselines = None
        if norms is not None and isinstance(self.advantage, OPOB):
            baselines = self._baselines(evaluation, norms, torch.arange(len(rows), device=rows.device))
        num_clipped = 0
        if not isinstance(self.objective, Reinforce):
            reference = evaluation.log_weights[:, None] if self.objective.trajectory_level else log_ratio
            num_clipped = int(((omega.double().log() < reference.double() - 1e-5) & mask).sum())
        return MicroBatchStats(
            rows=rows,
            log_weights_B=evaluation.log_weights,
            lengths=evaluation.lengths,
            advantages=advantages,
            baselines=baselines,
            score_norms_squared=norms,
            loss=loss,
            num_tokens=int(evaluation.lengths.sum()),
            num_clipped=num_clipped,
            log_ratio_sum=float(log_ratio.sum(dtype=torch.float64)),
            k3_sum=float(k3_sum(log_ratio, mask)),
            entropy_sum=float(evaluation.entropy.masked_fill(~mask, 0.0).sum(dtype=torch.float64)),
        )


def _select(batch: MicroBatch, rows: Tensor) -> MicroBatch:
    """The given trajectories (at least one) of a micro-batch, without padding that none of them needs."""
    width = int(batch.attention_mask[rows].sum(-1).max())
    return replace(
        batch,
        input_ids=batch.input_ids[rows, :width],
        attention_mask=batch.attention_mask[rows, :width],
        loss_mask=batch.loss_mask[rows, :width],
        behavior_logprobs=batch.behavior_logprobs[rows, :width],
        token_versions=batch.token_versions[rows, :width],
        rewards=batch.rewards[rows],
        group_index=batch.group_index[rows],
        logprobs=None if batch.logprobs is None else batch.logprobs[rows, :width],
    )


def _evaluate(whole: MicroBatch, rows: Tensor, batch: MicroBatch, scored: TokenLogprobs) -> _Evaluation:
    logprobs = scored.logprobs.detach()
    log_ratio = log_ratios(logprobs, batch.behavior_logprobs, batch.loss_mask)
    return _Evaluation(
        whole=whole,
        rows=rows,
        batch=batch,
        logprobs=logprobs,
        entropy=scored.entropy,
        log_ratio=log_ratio,
        log_weights=sequence_log_weights(log_ratio, batch.loss_mask),
        lengths=batch.loss_mask.sum(-1),
    )


def _per_trajectory_weight(omega: Tensor, loss_mask: Tensor) -> Tensor:
    """[N]: a trajectory-level omega, read at the first trained token."""
    return omega.gather(1, loss_mask.int().argmax(-1, keepdim=True)).squeeze(-1).double()


def _loss(evaluation: _Evaluation, factors: Tensor) -> float:
    sums = evaluation.logprobs.double().masked_fill(~evaluation.batch.loss_mask, 0.0).sum(-1)
    return -float((factors * sums).sum())


def _backward_score(
    model: nn.Module, batch: MicroBatch, row: int, parameters: list[nn.Parameter], backward: Callable[[Tensor], None]
) -> Tensor:
    """Leave the score of one trajectory in `.grad`; returns its squared norm."""
    for parameter in parameters:
        parameter.grad = None
    single = _select(batch, torch.tensor([row], device=batch.input_ids.device))
    logprobs = token_logprobs(model, single).logprobs
    backward(logprobs.masked_fill(~single.loss_mask, 0.0).sum())
    return torch.stack([p.grad.double().square().sum() for p in parameters if p.grad is not None]).sum()


def _no_stats(rows: Tensor, rewards: Tensor) -> MicroBatchStats:
    """The statistics of a micro-batch without trained tokens."""
    empty = rewards.new_zeros(0)
    return MicroBatchStats(
        rows=rows,
        log_weights_B=empty,
        lengths=rows,
        advantages=empty,
        baselines=None,
        score_norms_squared=None,
        loss=0.0,
        num_tokens=0,
        num_clipped=0,
        log_ratio_sum=0.0,
        k3_sum=0.0,
        entropy_sum=0.0,
    )
