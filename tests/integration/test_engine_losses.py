"""Engines lost in a run: started anew and told of, given up after `max_restarts`, not missed by a trainer that stood still."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from policies import save_policy
from runs import make_data, make_module, make_trainer

from lit_asyncrl.algorithm.advantages import GroupMean
from lit_asyncrl.callbacks import AsyncRollout, RunReport
from lit_asyncrl.errors import EngineDiedError
from lit_asyncrl.generation.hf import HFEngine

RUN_S = 120.0
"""Longest time for a run here."""
STOPS, STOPPED_S, SILENT_S = 4, 5.0, 1.5
"""How often and how long, in seconds, the trainer stands still, and the silence after which an engine counts as dead."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class KillEngine(pl.Callback):
    """SIGKILL to the engine after an update, as often as there is another one, up to `times`."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.killed: set[int] = set()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.ZombieProcess):  # the one before, not yet waited for
                if len(self.killed) < self.times and "lit_asyncrl.generation.hf_worker" in child.cmdline():
                    self.killed.add(child.pid)
                    child.kill()


def rollout(**arguments) -> AsyncRollout:
    settings = {"evaluate_first": False, "evaluate_last": False, "trainer_threads": 1, "rehearse": False} | arguments
    return AsyncRollout(engine=HFEngine(num_slots=8, num_threads=1), **settings)


def fit(policy, folder, rollout, *callbacks, max_steps=4) -> RunReport:
    report = RunReport()
    trainer = make_trainer(folder, [rollout, report, *callbacks], max_steps=max_steps, logger=CSVLogger(folder))
    trainer.fit(make_module(policy, advantage=GroupMean()), make_data(max_policy_age=1))
    return report


@pytest.mark.slow
def test_a_restart_is_in_the_summary_and_the_closing_table_which_names_it_as_the_cause(policy, tmp_path, capsys):
    with pytest.warns(UserWarning, match=r"started anew \(1 of 3\)"):
        summary = fit(policy, tmp_path, rollout(), KillEngine(1)).summary
    assert summary["policy_version"] == 4
    assert summary["engine_restarts"] == 1
    assert 0 < summary["share_engine_down"] <= 1
    assert summary["bound"].startswith("the engine was started anew once")  # most of so short a run
    table = capsys.readouterr().out
    assert "engine_restarts" in table and "started anew once" in table


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The generation engine is started anew")
def test_an_engine_that_is_killed_more_often_than_max_restarts_ends_the_run(policy, tmp_path):
    limited, killer = rollout(max_restarts=1), KillEngine(100)
    children = set(psutil.Process().children())
    started = time.monotonic()
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        fit(policy, tmp_path, limited, killer, max_steps=1000)
    assert time.monotonic() - started < RUN_S
    assert len(killer.killed) == 2  # the second is one too many
    assert limited.spent()["engine_restarts"] == 1
    assert set(psutil.Process().children()) <= children


class Progress(pl.Callback):
    """Says in a file that an update was made."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, *_):
        self.file.touch()


def train_beside(policy: str, folder: str) -> None:
    """The run whose trainer is stopped."""
    torch.set_num_threads(1)
    careful = rollout(silent_timeout_s=SILENT_S, sync_timeout_s=2 * SILENT_S)
    report = fit(policy, Path(folder), careful, Progress(Path(folder) / "updated"), max_steps=400)
    (Path(folder) / "result.json").write_text(json.dumps(report.summary), encoding="utf-8")


@pytest.mark.slow
def test_a_trainer_that_stood_still_does_not_take_its_engine_for_dead(policy, tmp_path):
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-c", f"import test_engine_losses as t; t.train_beside({policy!r}, {str(tmp_path)!r})"]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)})
    updated, deadline = tmp_path / "updated", time.monotonic() + RUN_S
    try:
        for _ in range(STOPS):
            updated.unlink(missing_ok=True)
            while not updated.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            assert process.poll() is None and updated.exists()
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)
            process.send_signal(signal.SIGCONT)
        assert process.wait(max(0.0, deadline - time.monotonic())) == 0
    finally:
        process.kill()
        process.wait()
    summary = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (summary["policy_version"], summary["engine_restarts"]) == (400, 0)
