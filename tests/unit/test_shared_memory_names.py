"""Nothing that a run makes has a name in /dev/shm, where a SIGKILL would leave it."""

from __future__ import annotations

import multiprocessing.synchronize

import pytest
from tqdm import tqdm

from lit_asyncrl.callbacks.async_rollout import lock_bars_in_process
from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.supervisor import Supervisor


@pytest.fixture
def named(monkeypatch):
    """Semaphores between processes, each of which has such a name, as they are made."""
    made: list[object] = []
    make = multiprocessing.synchronize.SemLock.__init__

    def counted(self, *arguments, **keywords):
        made.append(self)
        make(self, *arguments, **keywords)

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", counted)
    return made


def test_a_pool_has_none(named):
    TrajectoryPool(batch_groups=2, sampler=PaceSampler(), max_policy_age=1, supervisor=Supervisor())
    assert named == []


def test_a_progress_bar_has_none(named, monkeypatch):
    monkeypatch.delattr(tqdm, "_lock", raising=False)
    lock_bars_in_process()
    with tqdm(total=1, disable=False, leave=False) as bar:
        bar.update()
    assert named == []


def test_a_lock_that_somebody_gave_to_progress_bars_stays(monkeypatch):
    theirs = object()
    monkeypatch.setattr(tqdm, "_lock", theirs, raising=False)
    lock_bars_in_process()
    assert tqdm._lock is theirs
