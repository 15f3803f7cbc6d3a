"""Start and stop: runs in one process leave nothing, and twenty of them leave no more than one."""

from __future__ import annotations

import gc
import json
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import psutil
import pytest
import torch
from policies import save_policy
from runs import LongAnswer, make_data, make_module, make_trainer

from lit_asyncrl.callbacks import AsyncRollout
from lit_asyncrl.errors import RewardError
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.tasks import MathVerify
from lit_asyncrl.tasks.digits import ReverseDigits
from lit_asyncrl.types import Example

CYCLES = 20
WARM_UP = 3
ENDED_S = 20.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class Raising(RewardFn):
    """A reward that fails."""

    name = "raising"

    def __call__(self, completion: str, example: Example) -> float:
        raise KeyError("lost")


class Interrupt(pl.Callback):
    """Asks for the run's end as Ctrl-C does."""

    def on_train_batch_start(self, trainer, *_):
        trainer.datamodule.supervisor.request_stop("SIGINT")


class Things:
    """What this process holds: threads, children, descriptors by kind, shared memory and temporary files by name."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.threads = {t.name for t in threading.enumerate()}
        self.num_threads = self.process.num_threads()
        self.children = self.process.children(recursive=True)
        self.num_fds = self.process.num_fds()
        self.sockets = sorted(path for path in self._links() if path.startswith(("socket:", "pipe:", "/memfd:")))
        # Other programs of the machine use it too: Python's multiprocessing, which nothing here does, names its own so.
        self.shared = {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}
        self.temporary = set(Path(tempfile.gettempdir()).iterdir())

    def _links(self) -> list[str]:
        links = []
        for entry in Path("/proc/self/fd").iterdir():
            try:
                links.append(str(entry.readlink()))
            except OSError:
                continue  # the descriptor of the listing itself
        return links


def run(policy: str, folder: Path, mode: str, *callbacks: pl.Callback, reward: RewardFn | None = None, **data) -> None:
    """Two updates, with math-verify's process beside the engine's."""
    rewards = [reward] if reward else [LongAnswer(), MathVerify(timeout_s=30.0, weight=0.0)]
    rollout = AsyncRollout(engine=HFEngine(mode=mode, num_slots=8), evaluate_first=False, evaluate_last=False, trainer_threads=1)
    trainer = make_trainer(folder, [rollout, *callbacks], max_steps=2)
    trainer.fit(make_module(policy), make_data(task=ReverseDigits(3, 5, rewards=rewards), reward_timeout_s=60.0, **data))


def wait_until(predicate: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + ENDED_S
    while not predicate() and time.monotonic() < deadline:
        time.sleep(0.02)
    return predicate()


def assert_nothing_left(before: Things) -> None:
    gc.collect()
    assert wait_until(lambda: set(Things().threads) <= before.threads), Things().threads - before.threads
    after = Things()
    assert after.children == before.children
    assert after.sockets == before.sockets
    assert after.shared <= before.shared
    assert after.temporary - before.temporary == set()


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path_factory, monkeypatch):
    """Of this process and its children, so that what others leave in the machine's does not count."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)


@pytest.fixture(scope="module")
def warm(policy, tmp_path_factory):
    """What a first run loads for good is there."""
    run(policy, tmp_path_factory.mktemp("warm"), "inline")


@pytest.mark.slow
def test_a_run_that_succeeds_leaves_nothing(warm, policy, tmp_path):
    before = Things()
    run(policy, tmp_path, "process")
    assert_nothing_left(before)


@pytest.mark.slow
def test_a_run_that_fails_leaves_nothing(warm, policy, tmp_path):
    before = Things()
    with pytest.raises(RewardError):
        run(policy, tmp_path, "process", reward=Raising())
    assert_nothing_left(before)


@pytest.mark.slow
def test_a_run_that_is_interrupted_leaves_nothing(warm, policy, tmp_path):
    before = Things()
    run(policy, tmp_path, "process", Interrupt())
    assert_nothing_left(before)


def test_two_fits_of_the_same_objects_train_on(warm, policy, tmp_path):
    module, data = make_module(policy), make_data()
    versions = []
    for _ in range(2):
        rollout = AsyncRollout(engine=HFEngine(mode="inline", num_slots=8), evaluate_first=False, evaluate_last=False)
        make_trainer(tmp_path, [rollout], max_steps=2).fit(module, data)
        versions.append(module.policy_version)
    assert versions == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inline", "process"])
def test_twenty_cycles_hold_no_more_than_the_first(warm, policy, tmp_path, mode):
    """Threads, descriptors and shared memory exactly; memory within 1 MiB a cycle, the noise of the allocator."""
    for _ in range(WARM_UP):
        run(policy, tmp_path, mode, reward=LongAnswer())
    gc.collect()
    before, before_rss = Things(), psutil.Process().memory_info().rss
    for _ in range(CYCLES):
        run(policy, tmp_path, mode, reward=LongAnswer())
    assert_nothing_left(before)
    after = Things()
    assert after.num_threads <= before.num_threads
    assert after.num_fds <= before.num_fds
    growth = (psutil.Process().memory_info().rss - before_rss) / CYCLES / 2**20
    print(f"{growth:.2f} MiB a cycle")
    assert growth < 1.0
    assert torch.get_num_threads() == 1


def test_a_verifying_process_that_computes_ends_with_its_parent():
    """The pipe's end closes as at the parent's death; the power tower never returns to Python."""
    reward = MathVerify(timeout_s=30.0)
    reward("1", Example("p", "1", "t", 0))
    process = reward._worker._process
    request = {"answer": "72", "completion": "$9^{9^{9^{9}}}$", "limit_s": 600.0}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    assert wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_RUNNING)
    process.stdin.close()
    assert process.wait(ENDED_S) in (0, -signal.SIGIO)  # 0: it had not begun
    reward.close()
