"""A micro-batch after its forward pass: what the estimator's factors are made of, and what the log wants to know of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lit_asyncrl.algorithm.logprobs import TokenLogprobs
from lit_asyncrl.algorithm.micro_batches import select
from lit_asyncrl.algorithm.mismatch import Mismatch
from lit_asyncrl.algorithm.weights import log_ratios, sequence_log_weights
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
        loss: sum of the loss's terms, regularization included; those of all micro-batches add up to the batch's loss.
        num_tokens: trained tokens.
        num_clipped: trained tokens whose weight is below their full ratio; 0 for objectives without ratio.
        log_ratio_sum, k3_sum, entropy_sum: over trained tokens, nats, float64.
        reference_kl_sum: estimated KL to the reference over trained tokens, nats; None without a reference.
        weight_sum, removed_sum: over trained tokens, of their full ratio, and of what truncation, mask or clip takes from it.
        mismatch: absolute log-ratios by cause.
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
    reference_kl_sum: float | None = None
    weight_sum: float = 0.0
    removed_sum: float = 0.0
    mismatch: Mismatch = field(default_factory=Mismatch)


@dataclass
class Scored:
    """A micro-batch and its log-probs, reduced to the N trajectories with a trained token.

    Attributes:
        whole: the micro-batch as it came: rewards of untrained trajectories count in their group.
        rows: [N] positions of the trained trajectories in `whole`.
        batch: `whole` without the others.
        logprobs, entropy: [N, T] nats, detached.
        log_ratio: [N, T] nats, 0 where not trained.
        log_weights: [N] sum of `log_ratio`.
        lengths: [N] trained tokens.
    """

    whole: MicroBatch
    rows: Tensor
    batch: MicroBatch
    logprobs: Tensor
    entropy: Tensor
    log_ratio: Tensor
    log_weights: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, trained: TrainedRows, forward: TokenLogprobs) -> Scored:
        """Put trajectories and their forward pass together."""
        batch, logprobs = trained.batch, forward.logprobs.detach()
        log_ratio = log_ratios(logprobs, batch.behavior_logprobs, batch.loss_mask)
        return cls(
            whole=trained.whole,
            rows=trained.rows,
            batch=batch,
            logprobs=logprobs,
            entropy=forward.entropy.detach(),
            log_ratio=log_ratio,
            log_weights=sequence_log_weights(log_ratio, batch.loss_mask),
            lengths=batch.loss_mask.sum(-1),
        )

    def spread(self, values: Tensor) -> Tensor:
        """Values [N] of the trained trajectories as values of all of `whole`, 0 for the others."""
        return values.new_zeros(self.whole.num_trajectories).index_copy(0, self.rows, values)

    def weighted_logprobs(self, factors: Tensor) -> float:
        """sum_i factors[i] * (summed trained log-probs of trajectory i)."""
        sums = self.logprobs.double().masked_fill(~self.batch.loss_mask, 0.0).sum(-1)
        return float((factors * sums).sum())


@dataclass
class TrainedRows:
    """The trajectories of a micro-batch that have a trained token: what is fed to the model."""

    whole: MicroBatch
    rows: Tensor
    batch: MicroBatch

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> TrainedRows:
        """Leave the others out, and the padding that they needed. `batch` means nothing where `rows` is empty."""
        rows = micro_batch.loss_mask.any(-1).nonzero().squeeze(-1)
        whole = len(rows) in (0, micro_batch.num_trajectories)
        return cls(micro_batch, rows, micro_batch if whole else select(micro_batch, rows))


def trajectory_weights(omega: Tensor, loss_mask: Tensor) -> Tensor:
    """[N] float64: a trajectory-level omega, read at the first trained token."""
    return omega.gather(1, loss_mask.int().argmax(-1, keepdim=True)).squeeze(-1).double()


def no_stats(micro_batch: MicroBatch) -> MicroBatchStats:
    """The statistics of a micro-batch without trained tokens."""
    rows, values = micro_batch.group_index[:0], micro_batch.rewards[:0]
    return MicroBatchStats(rows, values, rows, values, None, None, 0.0, 0, 0, 0.0, 0.0, 0.0)
