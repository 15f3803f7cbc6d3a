"""Closed forms of staleness in a steady asynchronous loop: what a simulation or a run should come close to.

All of them speak of a *group's* staleness: optimizer updates between the start of its generation and its use. It splits into a
part before the queue (while the group is generated) and a part in the queue.

    rho   generation over training throughput: below 1 the trainer waits for groups, above 1 groups wait or are dropped
    C     responses generated at once; B responses per update; S responses per group; Q queue capacity in updates' worth

Source: Applied Compute's analysis of staleness, known here through two digests that agree; derived again with Little's law. The
exact forms for finite groups per update and for a phase-locked trainer are ours.
"""

from __future__ import annotations

import math


def throughput_ratio(num_slots: int, mean_response_s: float, batch_responses: int, train_s: float) -> float:
    """rho: responses generated over responses trained, each at full speed.

    Args:
        num_slots: responses generated at once.
        mean_response_s: mean seconds that one response takes.
        batch_responses: responses per update.
        train_s: seconds per update.
    """
    return (num_slots / mean_response_s) / (batch_responses / train_s)


def generation_staleness_form(num_slots: int, batch_responses: int, rho: float, tail_ratio: float) -> float:
    """Updates that pass while a group is generated: C * M / (B * max(1, rho)).

    By Little's law a response takes C over the generation throughput; a group takes M times that, since it is complete with its
    longest member.

    Args:
        num_slots: C.
        batch_responses: B.
        rho: of `throughput_ratio`.
        tail_ratio: M, mean over groups of the longest response over the mean response.
    """
    return num_slots * tail_ratio / (batch_responses * max(1.0, rho))


def waiting_staleness_form(rho: float, queue_updates: float | None = None) -> float:
    """Updates that pass while a group waits, smoothed over the phases of generation and training.

    Args:
        rho: of `throughput_ratio`.
        queue_updates: Q, queue capacity over the batch, of a queue that drops its oldest group when it is full; needed above
            rho = 1 only.

    Returns:
        rho below 1, else (2 Q + rho - 1) / (2 rho).

    Raises:
        ValueError: rho above 1 without a capacity: the queue grows without end.
    """
    if rho < 1:
        return rho
    if queue_updates is None:
        raise ValueError(f"queue_updates must be given for rho of 1 and above, got None (rho {rho}).")
    return (2 * queue_updates + rho - 1) / (2 * rho)


def waiting_staleness_finite(rho: float, batch_groups: int) -> float:
    """The rollout-bound form for regular arrivals of a finite number n of groups per update: floor(rho * n) / n."""
    return math.floor(rho * batch_groups) / batch_groups


def waiting_staleness_locked(rho: float, queue_updates: float) -> float:
    """The train-bound form for a trainer with constant time per update: E[ceil(a)], a uniform in [(Q - 1) / rho, Q / rho].

    The oldest batch of the Q batches in the queue has that age, in updates, when it is taken, and a constant train time locks the
    phases of swap and take, so that each group's age is rounded up.

    Example:
        >>> round(waiting_staleness_locked(1.15, 2), 6)  # a in [.870, 1.739]: .15 of .870 is below 1, the rest counts as 2
        1.85
    """
    low, high = (queue_updates - 1) / rho, queue_updates / rho
    total = 0.0
    for k in range(math.floor(low), math.ceil(high)):
        total += (k + 1) * (min(high, k + 1) - max(low, k))
    return total / (high - low)
