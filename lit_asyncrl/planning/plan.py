"""What a configured run will look like: its predicted staleness, and what is wrong with its settings."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lit_asyncrl.callbacks.async_rollout import check_settings
from lit_asyncrl.callbacks.report import find_rollout
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.planning.rates import GivenRates, Rates, measure_rates, summary_rates
from lit_asyncrl.pool.admission import admission_limit
from lit_asyncrl.simulation.lengths import LengthSummary, summarize
from lit_asyncrl.simulation.report import Row, rows
from lit_asyncrl.simulation.settings import SimulationResult, SimulationSettings
from lit_asyncrl.simulation.simulator import simulate

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lit_asyncrl.datamodule import RolloutDataModule
    from lit_asyncrl.module import PolicyModule

MAX_LENGTH_BIAS = 0.02
MAX_LOST_SHARE = 0.25
MIN_BUSY = 0.7
"""Limits beyond which a prediction is worth a warning."""

MAX_OUTSTANDING = 1_000_000
"""Responses outstanding at once above which nothing is simulated: a run would queue them all at its start."""


@dataclass(frozen=True)
class Plan:
    """A prediction.

    Attributes:
        rates: what it rests on.
        rows: the table.
        warnings: what a user should change, in words.
    """

    rates: Rates
    rows: list[Row]
    warnings: list[str]

    def text(self) -> str:
        """Table and warnings."""
        lines = [f"rates: {self.rates.source}", *(row.text() for row in self.rows)]
        return "\n".join(lines + [f"warning: {warning}" for warning in self.warnings])


def plan_run(
    trainer: Trainer,
    module: PolicyModule,
    data: RolloutDataModule,
    given: GivenRates,
    *,
    summary: str | None = None,
    num_slots: int | None = None,
) -> Plan:
    """Find the rates, and simulate.

    Args:
        trainer, module, data: as LightningCLI made them. Only a measurement starts anything.
        given: what the user knows.
        summary: `summary.json` of an earlier run that has the rest; None: the rest is measured.
        num_slots: responses decoded at once; None: as the engine says.

    Raises:
        ConfigurationError: the run would be refused, or would wait for ever.
    """
    rollout = find_rollout(trainer)
    check_settings(rollout, trainer, module, data)
    _check_prompts(data)
    slots = num_slots if num_slots is not None else getattr(rollout.engine, "num_slots", None)
    if slots is None:
        raise ConfigurationError(
            f"num_slots must be given for {type(rollout.engine).__name__}, got None (how many responses it decodes at once)."
        )
    budget, lag = data.sampling.max_new_tokens, rollout.publish_lag
    found: Rates | None = None
    if summary is not None:
        found = summary_rates(summary, slots, data.group_size, given.shape, budget)
    elif not given.is_complete:
        found = measure_rates(module, data, rollout, slots)
    plan = make_plan(
        data, given.over(found, budget), num_slots=slots, publish_lag=lag, updates_per_batch=module.updates_per_batch
    )
    if module.updates_per_batch > 1:
        plan.warnings.append(
            f"model.updates_per_batch {module.updates_per_batch} is not simulated: a batch counts as one update, so "
            "ages, staleness and bounds are in batches, and within a batch ages rise by up to "
            f"{module.updates_per_batch - 1} updates."
        )
    return plan


def _check_prompts(data: RolloutDataModule) -> None:
    if data.max_prompt_epochs is None:
        return
    data.task.setup()
    prompts = data.task.num_train * data.max_prompt_epochs
    if prompts < data.batch_groups:
        raise ConfigurationError(
            f"data.task must give at least {data.batch_groups} prompts, got {prompts} (data.max_prompt_epochs "
            f"{data.max_prompt_epochs}): the first batch would never be complete. Give more prompts, or lower data.batch_groups."
        )


def make_plan(
    data: RolloutDataModule,
    rates: Rates,
    *,
    num_slots: int,
    publish_lag: int,
    updates_per_batch: int = 1,
    num_updates: int = 300,
    seed: int = 0,
) -> Plan:
    """Simulate the run of a datamodule's settings, with a copy of its sampler.

    Args:
        data: the settings; nothing of it is started or changed.
        rates: of engine and trainer.
        num_slots: responses decoded at once.
        publish_lag: of `AsyncRollout`.
        updates_per_batch: of `PolicyModule`; what is simulated is one update a batch, which takes as long as they all.
        num_updates: simulated updates.
        seed: of the simulation.

    Raises:
        ConfigurationError: a run with these settings would be refused, or wait for ever.
    """
    limit = admission_limit(
        data.batch_groups, data.max_policy_age, data.capacity_groups, publish_lag, updates_per_batch=updates_per_batch
    )
    if limit * data.group_size > MAX_OUTSTANDING:
        key = "data.capacity_groups" if data.max_policy_age is None else "data.max_policy_age"
        value = data.capacity_groups if data.max_policy_age is None else data.max_policy_age
        raise ConfigurationError(
            f"{key} must leave at most {MAX_OUTSTANDING:,} responses outstanding, got {value} ({limit:,} groups of "
            f"{data.group_size}, all of which a run would queue at its start). Lower it, or set data.max_policy_age to null for "
            "no bound."
        )
    settings = SimulationSettings(
        batch_groups=data.batch_groups,
        group_size=data.group_size,
        num_slots=num_slots,
        token_s=rates.token_s,
        train_s=rates.train_s * updates_per_batch,
        lengths=rates.lengths,
        max_policy_age=None if data.max_policy_age is None else publish_lag + limit // data.batch_groups - 1,  # in batches
        age_measure=data.age_measure,
        capacity_groups=data.capacity_groups,
        publish_lag=publish_lag,
        seed=seed,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of a few entries
    try:
        result = simulate(settings, copy.deepcopy(data.sampler), num_updates=num_updates)
    finally:
        torch.set_num_threads(threads)
    lengths = summarize(rates.lengths, data.group_size)
    inputs = [
        Row("time per token of one response", 1e3 * rates.token_s, "ms"),
        Row("time per update of the trainer", rates.train_s, "s"),
        Row("response length, mean", lengths.mean_tokens, "tokens"),
        Row("response length, 99th percentile", lengths.p99_tokens, "tokens"),
    ]
    return Plan(rates, inputs + rows(settings, result, lengths), _warnings(settings, result, lengths, limit))


def _warnings(settings: SimulationSettings, result: SimulationResult, lengths: LengthSummary, limit: int) -> list[str]:
    return [
        text
        for text in (
            _unreachable(settings, result),
            _too_few_outstanding(settings, limit),
            _bounded_length(settings, result, lengths),
            _lost(settings, result),
            _biased(result),
            _idle(settings, result),
        )
        if text
    ]


def _unreachable(settings: SimulationSettings, result: SimulationResult) -> str:
    bound = settings.max_policy_age
    if bound is None or result.policy_age_max >= bound:
        return ""
    return (
        f"data.max_policy_age {bound} cannot be reached: at these rates no token gets older than {result.policy_age_max} "
        "updates, and a bound of that size gives the same run."
    )


def _too_few_outstanding(settings: SimulationSettings, limit: int) -> str:
    outstanding = limit * settings.group_size
    if outstanding >= settings.num_slots:
        return ""
    key = "data.capacity_groups" if settings.max_policy_age is None else "data.max_policy_age"
    return (
        f"{key} lets {outstanding} responses be outstanding, fewer than the engine's {settings.num_slots} slots: the others "
        f"stay empty. Raise {key}, or give fewer slots."
    )


def _bounded_length(settings: SimulationSettings, result: SimulationResult, lengths: LengthSummary) -> str:
    bound = settings.max_policy_age
    if bound is None or bound == 0:  # at 0 no weights are swapped while a response is generated
        return ""
    updates = lengths.p99_tokens * settings.token_s / (result.elapsed_s / result.updates)
    allowed = bound - settings.publish_lag
    longest = allowed if settings.age_measure == "oldest" else 2 * allowed  # a mean age is half of the oldest
    if updates <= longest:
        return ""
    tokens = longest * lengths.p99_tokens / updates
    return (
        f"data.max_policy_age {bound} ({settings.age_measure}) bounds response length: the longest 1 % of responses take "
        f"{updates:.1f} updates, and one of more than about {tokens:.0f} tokens is over age when it ends. Raise it, set "
        "data.age_measure: mean, or set it to null with PaceSampler."
    )


def _lost(settings: SimulationSettings, result: SimulationResult) -> str:
    lost = result.rejected_share + result.over_age_share
    if lost <= MAX_LOST_SHARE:
        return ""
    key = "data.capacity_groups" if settings.max_policy_age is None else "data.max_policy_age"
    return (
        f"{lost:.0%} of the groups are generated in vain ({result.rejected_share:.0%} rejected, {result.over_age_share:.0%} over "
        f"age). Give the trainer more of the machine, fewer slots to the engine, or a lower {key}."
    )


def _biased(result: SimulationResult) -> str:
    if abs(result.length_bias) <= MAX_LENGTH_BIAS:
        return ""
    return (
        f"trained responses are {abs(result.length_bias):.1%} {'shorter' if result.length_bias < 0 else 'longer'} than generated "
        "ones, because of what is dropped. See docs/staleness.md."
    )


def _idle(settings: SimulationSettings, result: SimulationResult) -> str:
    if settings.max_policy_age == settings.publish_lag or min(result.trainer_busy, result.slots_busy) >= MIN_BUSY:
        return ""  # a synchronous loop alternates
    if result.trainer_busy < result.slots_busy:
        return f"generation-bound: the trainer works {result.trainer_busy:.0%} of the time. Give generation more of the machine."
    return f"train-bound: the slots are busy {result.slots_busy:.0%} of the time. Fewer slots, or more of the machine to train."
