"""Gradients with exact score norms, which are formed on the way: `batched` in one backward, `per_trajectory` in one for each.

With k_i = c_i omega_i / sigma and values V_i (rewards, for one baseline per group), sum_i k_i (V_i - b) S_i is
sum_i k_i V_i S_i - b sum_i k_i S_i: where b needs norms that come later, both sums are kept until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_asyncrl.algorithm.advantages import OPOB
from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.method import Method, batch_baseline
from lit_asyncrl.algorithm.micro_batches import select
from lit_asyncrl.algorithm.score_norms import BatchedScores
from lit_asyncrl.algorithm.scored import Scored, TrainedRows, trajectory_weights
from lit_asyncrl.types import MicroBatch


@dataclass
class Formed:
    """A micro-batch whose part of the gradient has been added.

    Attributes:
        scored: the micro-batch.
        advantages, omega: its factors, [N] and [N, T].
        norms, baselines: [N] squared score norms and OPOB's baselines; None for other advantages.
        loss: its part of the loss.
        weights: [N] float64, c omega of each trajectory, where score norms are exact; else None.
    """

    scored: Scored
    advantages: Tensor
    omega: Tensor
    norms: Tensor | None
    baselines: Tensor | None
    loss: float
    weights: Tensor | None = None


class BatchBaseline:
    """A baseline of the whole batch that is known when all norms are: keeps sum_i k_i S_i, and corrects the gradient by it.

    The micro-batches are formed with a baseline of 0 before.

    Args:
        advantage: OPOB with scope `batch`.
        parameters: the model's trainable ones.
    """

    def __init__(self, advantage: OPOB, parameters: Sequence[nn.Parameter]) -> None:
        self._advantage = advantage
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, scores: BatchedScores, factors: Tensor) -> None:
        """Add sum_i factors[i] S_i."""
        gradients = [p.grad for p in self._parameters]
        _set_gradients(self._parameters, self._sums)
        scores.accumulate(factors)
        self._sums = [p.grad for p in self._parameters]
        _set_gradients(self._parameters, gradients)

    def add_sums(self, sums: Sequence[Tensor]) -> None:
        """Add sums that are formed."""
        self._sums = [new if old is None else old.add_(new) for old, new in zip(self._sums, sums, strict=True)]

    def settle(self, parts: Sequence[Formed]) -> None:
        """Subtract the baseline from gradient, advantages and loss of all micro-batches.

        The gradient to be minimized is -sum_i k_i (V_i - b) S_i; with a baseline of 0, b sum_i k_i S_i is missing in it.
        """
        if not parts:
            return
        baseline = batch_baseline(self._advantage, [p.scored for p in parts], [p.norms for p in parts if p.norms is not None])
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if total is not None:
                assert parameter.grad is not None, "formed with the sum"
                parameter.grad.add_(total, alpha=baseline)
        for part in parts:
            assert part.weights is not None, "score norms are exact"
            part.advantages = part.advantages - baseline
            part.baselines = torch.full_like(part.weights, baseline)
            part.loss += baseline * part.scored.weighted_logprobs(part.weights)


def form_batched(
    method: Method, model: nn.Module, trained: TrainedRows, scales: Tensor, batch_baseline: BatchBaseline | None
) -> Formed:
    """Exact norms and gradient from one forward and one backward."""
    batch = trained.batch
    with BatchedScores(model, batch.num_trajectories) as scores:
        forward = token_logprobs(model, batch, share_prefix=False)
        scores.backward(forward.logprobs[batch.loss_mask].sum())
    scored = Scored.of(trained, forward)
    norms = scores.norms_squared()
    advantages = method.advantages(scored, norms)
    omega = method.omega(scored, advantages) if batch_baseline is None else method.checked_omega(scored, advantages)
    weights = scales * trajectory_weights(omega, batch.loss_mask)
    scores.accumulate(-weights * advantages)
    if batch_baseline is not None:
        batch_baseline.add(scores, weights)
    loss = -scored.weighted_logprobs(weights * advantages)
    return Formed(scored, advantages, omega, norms, method.baselines(scored, norms), loss, weights)


def form_per_trajectory(
    method: Method,
    model: nn.Module,
    trained: TrainedRows,
    scales: Tensor,
    backward: Callable[[Tensor], None],
    batch_baseline: BatchBaseline | None,
) -> Formed:
    """Exact norms from one backward per trajectory, and the gradient from two sums.

    A forward pass without gradient gives the weights beforehand.
    """
    advantage, batch = method.advantage, trained.batch
    assert isinstance(advantage, OPOB), "refused by Method.problems"
    with torch.no_grad():
        forward = token_logprobs(model, batch)
    scored = Scored.of(trained, forward)
    whole, rows = trained.whole, trained.rows
    values = advantage.values(whole.rewards, whole.group_index)[rows]
    omega = method.checked_omega(scored, values.to(scored.logprobs.dtype))
    weights = scales * trajectory_weights(omega, batch.loss_mask)
    factors = weights * advantage.scales(whole.rewards, whole.group_index)[rows]
    parameters = trainable(model)
    total = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    norms = torch.full_like(values, torch.nan)  # not known yet
    scope = advantage.scope_index(whole.group_index)[rows]
    for name in scope.unique():
        members = (scope == name).nonzero().squeeze(-1)
        sums = [torch.zeros_like(p) for p in parameters]
        for i in members.tolist():
            norms[i] = _backward_score(model, batch, i, parameters, backward)
            scores = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            torch._foreach_add_(total, scores, alpha=-float(factors[i] * values[i]))
            torch._foreach_add_(sums, scores, alpha=float(factors[i]))
        if batch_baseline is None:
            baselines = method.baselines(scored, norms)  # NaN for groups whose norms are missing
            assert baselines is not None
            torch._foreach_add_(total, sums, alpha=float(baselines[members[0]]))
        else:
            batch_baseline.add_sums(sums)
    _set_gradients(parameters, total)
    advantages = method.advantages(scored, norms)
    loss = -scored.weighted_logprobs(weights * advantages)
    return Formed(scored, advantages, omega, norms, method.baselines(scored, norms), loss, weights)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters with a gradient."""
    return [p for p in model.parameters() if p.requires_grad]


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _backward_score(
    model: nn.Module, batch: MicroBatch, row: int, parameters: list[nn.Parameter], backward: Callable[[Tensor], None]
) -> Tensor:
    """Leave the score of one trajectory in `.grad`; returns its squared norm."""
    for parameter in parameters:
        parameter.grad = None
    single = select(batch, torch.tensor([row], device=batch.input_ids.device))
    logprobs = token_logprobs(model, single).logprobs
    backward(logprobs[single.loss_mask].sum())
    return torch.stack([p.grad.double().square().sum() for p in parameters if p.grad is not None]).sum()
