"""Predict staleness, rejection, utilisation and length bias of a setting, with the pool and samplers of a real run.

    python tools/simulate_staleness.py --slots 128 --rho 0.9 --saturated --sampler queue_drop     # beside the closed forms
    python tools/simulate_staleness.py --slots 128 --token-s 0.01 --train-s 2 --max-policy-age 4  # a run with an age bound
    python tools/simulate_staleness.py --slots 256 --rho 1.22 --saturated --compare               # every sampler in turn
    python tools/simulate_staleness.py --slots 128 --rho 0.9 --saturated --updates 62500          # a million groups

Units: lengths in tokens, times in seconds, staleness and ages in optimizer updates. Times are virtual.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable

import torch

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.ranking import FreshestFirstSampler, MaxAgeSampler, TotalStalenessSampler
from lit_asyncrl.pool.sampler import FifoSampler, StalenessSampler
from lit_asyncrl.simulation.lengths import ResponseLengths, summarize
from lit_asyncrl.simulation.queue_drop import QueueDropSampler
from lit_asyncrl.simulation.report import rows
from lit_asyncrl.simulation.settings import SimulationSettings, saturated
from lit_asyncrl.simulation.simulator import simulate

SAMPLERS: dict[str, Callable[[argparse.Namespace], StalenessSampler]] = {
    "fifo": lambda arguments: FifoSampler(),
    "queue_drop": lambda arguments: QueueDropSampler(round(arguments.queue * arguments.batch_groups)),
    "max_age": lambda arguments: MaxAgeSampler(),
    "total": lambda arguments: TotalStalenessSampler(),
    "freshest": lambda arguments: FreshestFirstSampler(),
    "pace": lambda arguments: PaceSampler(gamma=arguments.gamma),
    "pace_absolute": lambda arguments: PaceSampler(scale="absolute"),
}
DROPPING = [name for name in SAMPLERS if name != "fifo"]


def main() -> int:
    """Simulate, and print one table or a comparison."""
    arguments = parse()
    torch.set_num_threads(1)
    gc.freeze()  # what was imported need not be looked at again while groups come and go
    try:
        settings = settings_of(arguments)
        if arguments.compare:
            compare(arguments, settings)
        else:
            predict(arguments, settings)
    except ConfigurationError as error:
        print(f"simulate_staleness: {error}", file=sys.stderr)
        return 2
    return 0


def predict(arguments: argparse.Namespace, settings: SimulationSettings) -> None:
    """One setting in full."""
    started = time.perf_counter()
    result = simulate(
        settings, SAMPLERS[arguments.sampler](arguments), num_updates=arguments.updates, warmup_updates=arguments.warmup
    )
    wall = time.perf_counter() - started
    has_forms = arguments.saturated and arguments.sampler in ("queue_drop", "fifo")
    lengths = summarize(settings.lengths, settings.group_size)
    print(f"{arguments.sampler}, {result.updates} updates of {settings.batch_groups} groups of {settings.group_size}")
    for row in rows(settings, result, lengths, arguments.queue if has_forms else None):
        print(row.text())
    print(f"{result.groups_generated:,} groups, {result.events:,} events in {wall:.1f} s: {result.events / wall:,.0f} events/s")


def compare(arguments: argparse.Namespace, settings: SimulationSettings) -> None:
    """Every sampler that drops, at the same setting."""
    header = ("sampler", "rejected", "length bias", "generation", "waiting", "largest age")
    print("{:<15}{:>10}{:>13}{:>12}{:>10}{:>13}".format(*header))
    for name in DROPPING:
        result = simulate(settings, SAMPLERS[name](arguments), num_updates=arguments.updates, warmup_updates=arguments.warmup)
        print(
            f"{name:<15}{result.rejected_share:>10.1%}{result.length_bias:>+13.1%}{result.generation_staleness:>12.2f}"
            f"{result.waiting_staleness:>10.2f}{result.policy_age_max:>13}",
            flush=True,
        )


def settings_of(arguments: argparse.Namespace) -> SimulationSettings:
    """The settings of the command line."""
    mean, batch = arguments.mean_tokens, arguments.batch_groups * arguments.group_size
    train_s = arguments.train_s
    if arguments.slots < 1:
        raise ConfigurationError(f"--slots must be at least 1, got {arguments.slots}.")
    if train_s is None:
        train_s = arguments.rho * batch * mean * arguments.token_s / arguments.slots
    settings = SimulationSettings(
        batch_groups=arguments.batch_groups,
        group_size=arguments.group_size,
        num_slots=arguments.slots,
        token_s=arguments.token_s,
        train_s=train_s,
        lengths=ResponseLengths(arguments.lengths, mean, arguments.max_tokens, arguments.sigma),
        max_policy_age=arguments.max_policy_age,
        age_measure=arguments.age_measure,
        capacity_groups=arguments.capacity_groups,
        train_jitter=arguments.jitter,
        forgetting_nats=arguments.forgetting,
        seed=arguments.seed,
    )
    return saturated(settings, arguments.queue) if arguments.saturated else settings


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--slots", type=int, default=128, help="responses generated at once")
    add("--batch-groups", type=int, default=16, help="groups per update")
    add("--group-size", type=int, default=8, help="responses per group")
    add("--lengths", choices=("constant", "uniform", "exponential", "lognormal"), default="exponential")
    add("--mean-tokens", type=float, default=256.0, help="mean response length")
    add("--max-tokens", type=float, help="response budget; longer responses are cut")
    add("--sigma", type=float, default=0.7, help="of lognormal lengths")
    add("--token-s", type=float, default=0.01, help="seconds per token of one response")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--train-s", type=float, help="seconds per update")
    rate.add_argument("--rho", type=float, default=0.9, help="instead: generation over training throughput")
    add("--max-policy-age", type=int, help="bound in updates (default: none)")
    add("--age-measure", choices=("mean", "oldest"), default="mean")
    add("--capacity-groups", type=int, help="most outstanding groups (default: as in a run)")
    add("--saturated", action="store_true", help="never hold generation back: the loop of the closed forms")
    add("--queue", type=float, default=1.0, help="capacity of queue_drop, in batches")
    add("--sampler", choices=tuple(SAMPLERS), default="pace")
    add("--compare", action="store_true", help="every sampler that drops, in turn")
    add("--gamma", type=float, default=4.0, help="PACE's exponent")
    add("--forgetting", type=float, default=0.1, help="mean forgetting of a prefix in nats; 0: none is forgotten")
    add("--jitter", type=float, default=0.0, help="half-width of the relative spread of the time per update")
    add("--updates", type=int, default=1000)
    add("--warmup", type=int, default=50, help="updates before the measured ones")
    add("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
