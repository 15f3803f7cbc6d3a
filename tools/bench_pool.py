"""Speed of the trajectory pool: adding and taking groups, PACE's decision, snapshots.

    python tools/bench_pool.py                      # all parts, with 10,000 groups waiting
    python tools/bench_pool.py --waiting 100000     # grows close to linearly
    python tools/bench_pool.py --members 16 --tokens 64 --batch-groups 16

    throughput  reserve + add + take + update + delivery, one thread, first-in-first-out; groups a second
    decision    PACE ranks every waiting group (half of them interrupted, none scored again) and names a tenth to reject
    scoring     the same with every interrupted prefix scored: the sampler's part, without the policy's forward pass
    snapshot    `state_dict`, writing it, reading it, `load_state_dict`

Medians over `--repeats`, in seconds of this thread on its core, which other programs disturb less than the clock's.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.pool.sampler import FifoSampler, StalenessSampler
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import TrajectoryGroup

PROMPT_LENGTH = 2


def main() -> None:
    """Measure every part and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=10_000, help="groups waiting (default: %(default)s)")
    parser.add_argument("--members", type=int, default=16, help="members of a group (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8, help="sampled tokens of a member (default: %(default)s)")
    parser.add_argument("--batch-groups", type=int, default=64, help="groups of a batch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{arguments.waiting:,} groups of {arguments.members} members, {arguments.tokens} tokens each")
    fresh = make_group(arguments.members, [0] * arguments.tokens)
    interrupted = make_group(arguments.members, [0] * (arguments.tokens // 2) + [1] * (arguments.tokens - arguments.tokens // 2))
    rate = throughput(fresh, arguments.waiting, arguments.batch_groups, arguments.repeats)
    print(f"throughput  {rate:>12,.0f} groups/s  (batches of {arguments.batch_groups})")
    for name, scored in (("decision", False), ("scoring", True)):
        seconds = decision(fresh, interrupted, arguments.waiting, arguments.repeats, scored)
        print(f"{name:<12}{seconds * 1e3:>12.2f} ms")
    for name, seconds in snapshot(fresh, arguments.waiting).items():
        print(f"{name:<12}{seconds:>12.3f} s")


def make_group(num_members: int, versions: list[int]) -> TrajectoryGroup:
    """A group whose members have all the given versions."""
    tokens = torch.tensor(([-1] * PROMPT_LENGTH + versions) * num_members, dtype=torch.int32)
    sampled = tokens >= 0
    rewards = torch.zeros(num_members)
    return TrajectoryGroup(
        group_id=0,
        prompt_index=0,
        epoch=0,
        task="bench",
        token_ids=torch.ones(tokens.numel(), dtype=torch.int64),
        loss_mask=sampled,
        behavior_logprobs=torch.where(sampled, -0.5, 0.0),
        token_versions=tokens,
        lengths=torch.full((num_members,), PROMPT_LENGTH + len(versions)),
        rewards=rewards,
        reward_components=rewards[:, None],
        correct=torch.zeros(num_members, dtype=torch.bool),
        truncated=torch.zeros(num_members, dtype=torch.bool),
        completed_version=max(versions),
        reward_names=("bench",),
    )


def filled_pool(groups: Iterable[TrajectoryGroup], waiting: int, batch_groups: int, sampler: StalenessSampler) -> TrajectoryPool:
    """A pool without an age bound, at version 1, with these groups waiting."""
    pool = TrajectoryPool(
        batch_groups=batch_groups,
        sampler=sampler,
        max_policy_age=None,
        capacity_groups=waiting + batch_groups,
        supervisor=Supervisor(),
    )
    pool.open_admission()
    pool.set_policy_version(1)
    pool.reserve(waiting, 0.0)
    for group in groups:
        pool.add(group)
    return pool


def throughput(group: TrajectoryGroup, waiting: int, batch_groups: int, repeats: int) -> float:
    """Groups a second through a pool that keeps `waiting` groups waiting."""
    rounds = max(1, 4096 // batch_groups)
    pool = filled_pool((replace(group, group_id=i) for i in range(waiting)), waiting, batch_groups, FifoSampler())
    version, next_id, rates = 1, waiting, []
    for _ in range(repeats):
        groups = [replace(group, group_id=next_id + i) for i in range(rounds * batch_groups)]
        next_id += len(groups)
        started = time.thread_time()
        for start in range(0, len(groups), batch_groups):
            pool.reserve(batch_groups, 0.0)
            for new in groups[start : start + batch_groups]:
                pool.add(new)
            pool.take(version, None, 0.0)
            version += 1
            pool.set_policy_version(version)
            pool.delivered(version)
        rates.append(len(groups) / (time.thread_time() - started))
    return statistics.median(rates)


def decision(fresh: TrajectoryGroup, interrupted: TrajectoryGroup, waiting: int, repeats: int, scored: bool) -> float:
    """Seconds for one batch of PACE that rejects a tenth of the pool, by a sampler that knows every group."""

    def score(groups: list[TrajectoryGroup]) -> list[torch.Tensor]:
        return [logprobs for _ in groups]

    logprobs = torch.full((interrupted.token_ids.numel(),), -0.75)
    seconds = []
    for _ in range(repeats):
        groups = (replace(interrupted if i % 2 else fresh, group_id=i) for i in range(waiting))
        pool = filled_pool(groups, waiting, 1, PaceSampler(ema_beta=1.0, target_occupancy=0.9 * waiting))
        pool.set_policy_version(1)  # writes the arrivals
        started = time.thread_time()
        pool.take(1, score if scored else None, 0.0)  # type: ignore[arg-type]
        seconds.append(time.thread_time() - started)
        assert pool.groups_rejected == waiting // 10
    return statistics.median(seconds)


def snapshot(group: TrajectoryGroup, waiting: int) -> dict[str, float]:
    """Seconds for each step of saving and restoring."""
    tensors = ("token_ids", "loss_mask", "behavior_logprobs", "token_versions")
    groups = (replace(group, group_id=i, **{name: getattr(group, name).clone() for name in tensors}) for i in range(waiting))
    pool = filled_pool(groups, waiting, 1, FifoSampler())
    file = io.BytesIO()
    times: dict[str, float] = {}

    def timed(name: str, step: Callable[[], object]) -> object:
        started = time.thread_time()
        result = step()
        times[name] = time.thread_time() - started
        return result

    state = timed("state_dict", pool.state_dict)
    timed("write", lambda: torch.save(state, file))
    file.seek(0)
    read = timed("read", lambda: torch.load(file, weights_only=True))
    restored = filled_pool((), waiting, 1, FifoSampler())
    timed("load", lambda: restored.load_state_dict(read))  # type: ignore[arg-type]
    assert len(restored) == waiting
    return times


if __name__ == "__main__":
    main()
