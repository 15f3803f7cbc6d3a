"""How token terms are averaged: the factor c of the estimator, with denominators of the whole batch."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lit_asyncrl.errors import ConfigurationError

Aggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean-token-sum", "constant-length"]


def token_scales(
    aggregation: Aggregation,
    lengths: Tensor,
    *,
    num_trajectories: int,
    num_trained_tokens: int,
    max_response_length: int | None = None,
) -> Tensor:
    """The factor c of every token of a trajectory. The denominators are the whole batch's, so that it may be split at will.

    With N trajectories and T_i trained tokens: `sequence-mean-token-mean` 1 / (N T_i) (GRPO, VCPO), `token-mean`
    1 / sum_i T_i (DAPO), `sequence-mean-token-sum` 1 / N, `constant-length` 1 / (N max_response_length) (Dr. GRPO).

    Args:
        aggregation: which.
        lengths: [B] trained tokens, at least 1 each.
        num_trajectories: N, trajectories with a trained token in the whole batch.
        num_trained_tokens: of the whole batch.
        max_response_length: tokens; for `constant-length` alone.

    Returns:
        [B] float64.
    """
    ones = torch.ones(lengths.shape, dtype=torch.float64, device=lengths.device)
    if aggregation == "sequence-mean-token-mean":
        return ones / (num_trajectories * lengths)
    if aggregation == "token-mean":
        return ones / num_trained_tokens
    if aggregation == "sequence-mean-token-sum":
        return ones / num_trajectories
    assert max_response_length is not None, "constant-length without max_response_length"
    return ones / (num_trajectories * max_response_length)


def aggregation_problems(aggregation: str, max_response_length: int | None) -> list[str]:
    """What is wrong with an aggregation: an unknown one, or a length that is missing, useless or not positive."""
    problems = []
    if aggregation not in get_args(Aggregation):
        problems.append(
            f"model.aggregation must be one of {list(get_args(Aggregation))}, got {aggregation!r}. Choose one of them."
        )
    is_useless = max_response_length is not None and max_response_length <= 0
    if is_useless or (aggregation == "constant-length") != (max_response_length is not None):
        problems.append(
            "model.max_response_length must be a positive number of tokens with aggregation constant-length and unset otherwise, "
            f"got {max_response_length!r} (model.aggregation is {aggregation!r}). Set it to the sampler's max_new_tokens."
        )
    return problems


def check_aggregation(aggregation: str, max_response_length: int | None) -> None:
    """Refuse what `aggregation_problems` finds.

    Raises:
        ConfigurationError: naming the keys.
    """
    problems = aggregation_problems(aggregation, max_response_length)
    if problems:
        raise ConfigurationError(" ".join(problems))
