"""An objective with an advantage: the factors omega and A of a scored micro-batch, and what does not go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lit_asyncrl.algorithm.advantages import OPOB
from lit_asyncrl.algorithm.clip_losses import BatchObjective, ProximalObjective
from lit_asyncrl.algorithm.logprobs import TokenLogprobs, token_logprobs
from lit_asyncrl.algorithm.score_norms import logit_proxy
from lit_asyncrl.algorithm.scored import Scored, TrainedRows
from lit_asyncrl.algorithm.weights import MAX_LOG_WEIGHT, RatioKind, full_log_weights, log_ratios
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Advantage, Objective
from lit_asyncrl.types import MicroBatch


@dataclass(frozen=True)
class Method:
    """What is trained, apart from the aggregation."""

    objective: Objective
    advantage: Advantage

    @property
    def is_exact(self) -> bool:
        """Whether score norms come from the parameters' gradients, which are then formed on the way."""
        return self.advantage.score_norm in ("batched", "per_trajectory")

    @property
    def has_batch_baseline(self) -> bool:
        """Whether one baseline is of the whole batch."""
        return isinstance(self.advantage, OPOB) and self.advantage.scope == "batch"

    def problems(self) -> list[str]:
        """What contradicts what; messages."""
        problems = []
        name, advantage = type(self.objective).__name__, self.advantage
        setting = f"model.advantage.init_args.score_norm is {advantage.score_norm!r}"
        if self.is_exact and not self.objective.trajectory_level:
            problems.append(
                f"model.objective must have one weight per trajectory where score norms are exact, got {name} ({setting}). "
                "Set score_norm to logit_proxy, or choose a trajectory-level objective such as SequenceTIS."
            )
        if advantage.score_norm == "per_trajectory" and not isinstance(advantage, OPOB):
            problems.append(
                f"model.advantage must be OPOB where score_norm is per_trajectory, got {type(advantage).__name__}. "
                "Set its score_norm to batched or logit_proxy."
            )
        if self.objective.needs_batch_logprobs and not isinstance(self.objective, BatchObjective | ProximalObjective):
            problems.append(
                f"model.objective must be a BatchObjective or a ProximalObjective if it needs_batch_logprobs, got {name}. "
                "Derive it from one of them (lit_asyncrl.algorithm.clip_losses)."
            )
        comes_late = advantage.score_norm == "per_trajectory" or (self.is_exact and self.has_batch_baseline)
        if comes_late and getattr(self.objective, "uses_advantages", False):
            problems.append(_late_advantages(name))
        return problems

    def advantages(self, scored: Scored, norms: Tensor | None) -> Tensor:
        """A of the trained trajectories, [N]."""
        return self.advantage(
            scored.whole.rewards,
            scored.whole.group_index,
            lengths=scored.spread(scored.lengths),
            log_weights=scored.spread(scored.log_weights),
            score_norms_squared=None if norms is None else scored.spread(norms),
        )[scored.rows]

    def omega(self, scored: Scored, advantages: Tensor) -> Tensor:
        """The weights [N, T], detached."""
        batch = scored.batch
        arguments = (scored.log_ratio, batch.loss_mask, advantages, batch.group_index)
        if isinstance(self.objective, ProximalObjective) and batch.logprobs is not None:
            proximal = log_ratios(batch.logprobs.to(scored.logprobs.dtype), batch.behavior_logprobs, batch.loss_mask)
            return self.objective.coefficients(*arguments, proximal).detach()
        return self.objective.coefficients(*arguments).detach()

    def checked_omega(self, scored: Scored, advantages: Tensor) -> Tensor:
        """As `omega`, which must not depend on the advantages, since they are not known yet.

        Raises:
            ConfigurationError: it does.
        """
        omega, mask = self.omega(scored, advantages), scored.batch.loss_mask
        if not torch.equal(omega[mask], self.omega(scored, torch.zeros_like(advantages))[mask]):
            raise ConfigurationError(_late_advantages(type(self.objective).__name__))
        return omega

    def baselines(self, scored: Scored, norms: Tensor | None) -> Tensor | None:
        """OPOB's baseline of each trained trajectory, [N] float64; None for other advantages."""
        if norms is None or not isinstance(self.advantage, OPOB):
            return None
        whole, rows = scored.whole, scored.rows
        return self.advantage.baselines(
            self.advantage.values(whole.rewards, whole.group_index)[rows],
            self.advantage.scope_index(whole.group_index)[rows],
            lengths=scored.lengths,
            log_weights=scored.log_weights,
            score_norms_squared=norms,
        )

    def clipping(self, scored: Scored, omega: Tensor) -> tuple[int, float, float]:
        """What truncation, mask or clip does to the weights of trained tokens.

        Returns:
            Number of tokens whose weight is below what their ratio gives, sum of the full ratios, and sum of what is taken away.
        """
        default: RatioKind = "product" if self.objective.trajectory_level else "token"
        kind = getattr(self.objective, "ratio", default)
        mask = scored.batch.loss_mask
        full = full_log_weights(kind, scored.log_ratio, mask).double().expand_as(mask)
        weights = full.clamp(max=MAX_LOG_WEIGHT).exp()
        removed = (weights - omega.double()).clamp(min=0.0)
        return int(((omega.double().log() < full - 1e-5) & mask).sum()), float(weights[mask].sum()), float(removed[mask].sum())

    def for_batch(self, model: nn.Module, micro_batches: Sequence[MicroBatch]) -> Method:
        """The method with what it takes from the whole batch, from a pass without gradient where it takes something.

        One micro-batch that holds the batch needs no such pass. Log-probs that were handed on (`MicroBatch.logprobs`) are used.
        A baseline from exact norms is not found here: it comes last, see `exact_gradients`.
        """
        couples = self.has_batch_baseline and not self.is_exact
        if len(micro_batches) == 1 or not (couples or isinstance(self.objective, BatchObjective)):
            return self
        method = self
        trained = [TrainedRows.of(part) for part in micro_batches if part.loss_mask.any()]
        with torch.no_grad():
            forwards = [self._forward(model, part.batch) for part in trained]
        parts = [Scored.of(rows, forward) for rows, forward in zip(trained, forwards, strict=True)]
        norms = [
            None if forward.energy is None else logit_proxy(forward.energy, part.batch.loss_mask)
            for part, forward in zip(parts, forwards, strict=True)
        ]
        if couples and parts:
            method = replace(method, advantage=method._with_batch_baseline(parts, norms))
        if isinstance(self.objective, BatchObjective) and parts:
            advantages = [method.advantages(part, norm) for part, norm in zip(parts, norms, strict=True)]
            masks = [part.batch.loss_mask for part in parts]
            objective = self.objective.for_batch(
                torch.cat([part.log_ratio[mask] for part, mask in zip(parts, masks, strict=True)]),
                torch.cat([a[:, None].expand_as(mask)[mask] for a, mask in zip(advantages, masks, strict=True)]),
            )
            method = replace(method, objective=objective)
        return method

    def _forward(self, model: nn.Module, batch: MicroBatch) -> TokenLogprobs:
        if batch.logprobs is not None and self.advantage.score_norm is None:
            return TokenLogprobs(batch.logprobs, batch.logprobs, None)
        return token_logprobs(model, batch, need_energy=self.advantage.score_norm is not None)

    def _with_batch_baseline(self, parts: Sequence[Scored], norms: Sequence[Tensor | None]) -> OPOB:
        assert isinstance(self.advantage, OPOB), "only OPOB has a batch baseline"
        return self.advantage.with_baseline(batch_baseline(self.advantage, parts, [n for n in norms if n is not None]))


def batch_baseline(advantage: OPOB, parts: Sequence[Scored], norms: Sequence[Tensor]) -> float:
    """OPOB's one baseline of a batch from all of its scored micro-batches."""
    values = torch.cat([advantage.values(p.whole.rewards, p.whole.group_index)[p.rows] for p in parts])
    return float(
        advantage.baselines(
            values,
            torch.zeros_like(values, dtype=torch.long),
            lengths=torch.cat([p.lengths for p in parts]),
            log_weights=torch.cat([p.log_weights for p in parts]),
            score_norms_squared=torch.cat(list(norms)),
        )[0]
    )


def _late_advantages(name: str) -> str:
    return (
        "model.objective must not look at the advantages where score_norm is per_trajectory, or exact with scope batch, got "
        f"{name} (the baseline is known last). Set model.advantage.init_args.score_norm to logit_proxy, or to batched with scope "
        "group."
    )
