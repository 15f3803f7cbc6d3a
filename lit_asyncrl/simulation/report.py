"""A simulation's result as lines of text, beside the closed forms where these speak of the same loop."""

from __future__ import annotations

from dataclasses import dataclass

from lit_asyncrl.algorithm.staleness_forms import (
    generation_staleness_form,
    throughput_ratio,
    waiting_staleness_form,
    waiting_staleness_locked,
)
from lit_asyncrl.simulation.lengths import LengthSummary
from lit_asyncrl.simulation.settings import SimulationResult, SimulationSettings


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table; `closed` is the closed form's value, where there is one."""

    label: str
    value: float
    unit: str
    closed: float | None = None

    def text(self) -> str:
        """The line."""
        value = f"{self.value:.1%}" if self.unit == "%" else f"{self.value:.4g}"
        unit = "" if self.unit == "%" else self.unit
        closed = "" if self.closed is None else f"closed form {self.closed:.3f}"
        return f"  {self.label:<42} {value:>9} {unit:<10} {closed}".rstrip()


def ratio_of(settings: SimulationSettings, lengths: LengthSummary) -> float:
    """rho: generation over training throughput, each at full speed."""
    return throughput_ratio(
        settings.num_slots, lengths.mean_tokens * settings.token_s, settings.batch_responses, settings.train_s
    )


def rows(
    settings: SimulationSettings, result: SimulationResult, lengths: LengthSummary, queue_updates: float | None = None
) -> list[Row]:
    """What a simulation predicts.

    Args:
        settings, result: of the simulation.
        lengths: of `settings.lengths`.
        queue_updates: capacity in batches of a queue that drops its oldest group, for a loop whose slots are never idle: its
            closed forms are added. None: another loop, without closed forms.
    """
    rho = ratio_of(settings, lengths)
    before = waiting = None
    if queue_updates is not None:
        before = generation_staleness_form(settings.num_slots, settings.batch_responses, rho, lengths.tail_ratio)
        is_locked = rho >= 1 and settings.train_jitter == 0
        waiting = (waiting_staleness_locked if is_locked else waiting_staleness_form)(rho, queue_updates)
    total = None if before is None or waiting is None else before + waiting
    return [
        Row("generation over training throughput", rho, ""),
        Row("generation staleness, mean over tokens", result.generation_staleness, "updates"),
        Row("waiting staleness", result.waiting_staleness, "updates", waiting),
        Row("policy age, mean over tokens", result.policy_age, "updates"),
        Row("policy age, largest", result.policy_age_max, "updates"),
        Row("start of a group to its completion", result.start_staleness, "updates", before),
        Row("start of a group to its use", result.start_staleness + result.waiting_staleness, "updates", total),
        Row("groups rejected by the sampler", result.rejected_share, "%"),
        Row("groups dropped over age", result.over_age_share, "%"),
        Row("length bias: trained over generated, - 1", result.length_bias, "%"),
        Row("trainer busy", result.trainer_busy, "%"),
        Row("slots busy", result.slots_busy, "%"),
        Row("time per update", result.elapsed_s / result.updates, "s"),
    ]
