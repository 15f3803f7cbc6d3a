"""Speed of checkpoints: a pool of 10,000 groups of 16 responses of 64 tokens, with a small model beside it.

    python tools/bench_checkpoint.py                 # budget: 1.5 s written, 0.5 s read, trainer stalled 0.3 s
    python tools/bench_checkpoint.py --groups 1000

snapshot  the pool's part of the checkpoint, made while the trainer waits
save      until the trainer goes on: copies of what training changes
stall     snapshot, save, and the longest time for which the writing thread kept another thread from running
written   snapshot, save, and until the file is whole and on the disk
read      every byte checked, and the content loaded
restored  the pool made from it

Medians over `--repeats`: seconds of the clock, and of the trainer's thread on its core, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from bench_pool import filled_pool, make_group

from lit_asyncrl.checkpoint_io import AtomicCheckpointIO
from lit_asyncrl.checkpoints import read_checkpoint
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.pool.sampler import FifoSampler

TENSORS = ("token_ids", "loss_mask", "behavior_logprobs", "token_versions")
MODEL_PARAMETERS = 1_000_000


def main() -> None:
    """Measure, and print one line for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10_000, help="groups waiting (default: %(default)s)")
    parser.add_argument("--members", type=int, default=16, help="members of a group (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens of a member (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions (default: %(default)s)")
    parser.add_argument("--folder", default=None, help="where to write (default: the system's temporary folder)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    group = make_group(arguments.members, [0] * arguments.tokens)
    groups = (
        replace(group, group_id=i, **{name: getattr(group, name).clone() for name in TENSORS}) for i in range(arguments.groups)
    )
    pool = filled_pool(groups, arguments.groups, 1, FifoSampler())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rounds = [measure(pool, Path(folder) / "last.ckpt", arguments.groups) for _ in range(arguments.repeats)]
        size = (Path(folder) / "last.ckpt").stat().st_size
    print(f"{arguments.groups:,} groups of {arguments.members} members, {arguments.tokens} tokens each: {size / 1e6:.0f} MB")
    for name in rounds[0]:
        clock, core = zip(*(each[name] for each in rounds), strict=True)
        print(
            f"{name:<9}{statistics.median(clock):>8.3f} s   ({min(clock):.3f} to {max(clock):.3f}; {statistics.median(core):.3f})"
        )


class Timer:
    """Seconds of the clock and of this thread since it was made."""

    def __init__(self) -> None:
        self._clock, self._core = time.perf_counter(), time.thread_time()

    def read(self) -> tuple[float, float]:
        """Both."""
        return time.perf_counter() - self._clock, time.thread_time() - self._core


def measure(pool: TrajectoryPool, path: Path, num_groups: int) -> dict[str, tuple[float, float]]:
    """Seconds for each step of one save, and of one resume."""
    writer = AtomicCheckpointIO(beside=lambda: True)
    weights = torch.zeros(3, MODEL_PARAMETERS)  # the model and its optimizer's two moments
    whole, timer = Timer(), Timer()
    state = pool.state_dict()
    times = {"snapshot": timer.read()}
    timer = Timer()
    writer.save_checkpoint({"lit_asyncrl": {}, "weights": weights, "RolloutDataModule": {"pool": state}}, path)
    times["save"] = timer.read()
    longest, last = 0.0, time.perf_counter()
    while writer.is_writing:
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    writer.wait()
    times["stall"] = (
        times["snapshot"][0] + times["save"][0] + longest,
        times["snapshot"][1] + times["save"][1],
    )
    times["written"] = whole.read()

    timer = Timer()
    read = read_checkpoint(str(path))
    times["read"] = timer.read()
    restored = filled_pool((), num_groups, 1, FifoSampler())
    timer = Timer()
    restored.load_state_dict(read["RolloutDataModule"]["pool"])
    times["restored"] = timer.read()
    assert len(restored) == num_groups
    return times


if __name__ == "__main__":
    main()
