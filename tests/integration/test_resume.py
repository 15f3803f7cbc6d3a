"""A run goes on from its checkpoint, wherever it ended: responses in flight, random numbers, ends of epochs and runs, kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from policies import PACKAGED, save_policy
from runs import LongAnswer, inline_rollout, make_data, make_module, make_trainer

from lit_asyncrl.callbacks import AsyncRollout
from lit_asyncrl.checkpoint_io import AtomicCheckpointIO
from lit_asyncrl.checkpoints import newest_checkpoint, read_checkpoint
from lit_asyncrl.cli import run
from lit_asyncrl.errors import CheckpointError
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.tasks.digits import ReverseDigits
from lit_asyncrl.types import SamplingParams

NUM_PROMPTS = 60
KILLS = 2
RUN_S = 180.0
"""Longest time for one part of a run that is killed."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def fit(policy, folder, *callbacks, max_steps=4, data=None, ckpt_path=None, **arguments):
    module, data = make_module(policy), data or make_data()
    trainer = make_trainer(folder, [inline_rollout(), *callbacks], max_steps=max_steps, **arguments)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, data, trainer


class SaveAt(pl.Callback):
    """Saves a checkpoint in the midst of the run, once something is in flight."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_members = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not self.path.exists():
            trainer.save_checkpoint(self.path)
            trainer.strategy.checkpoint_io.wait()
            self.num_members = len(read_checkpoint(str(self.path))["RolloutDataModule"]["members"]["lengths"])
            if not self.num_members:
                self.path.unlink()


def long_data(**arguments):
    """Enough tokens in flight for a checkpoint to find some."""
    return make_data(**({"max_policy_age": 3, "sampling": SamplingParams(max_new_tokens=24)} | arguments))


@pytest.fixture(scope="module")
def in_flight(policy, tmp_path_factory):
    """A checkpoint with responses in flight, and how many."""
    saver = SaveAt(tmp_path_factory.mktemp("in flight") / "half.ckpt")
    fit(policy, saver.path.parent, saver, max_steps=30, data=long_data())
    assert saver.num_members
    return str(saver.path), saver.num_members


# ------------------------------------------------------------------ responses in flight


def test_responses_in_flight_go_on_and_every_prompt_is_settled_once(policy, tmp_path, in_flight):
    path, _ = in_flight
    saved = read_checkpoint(path)["RolloutDataModule"]
    tokens = sum(row[2] for row in saved["pool"]["ledger"]["open"].tolist() if row[1] == 0)  # pending
    assert tokens == int(saved["members"]["lengths"].sum()) > 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*sampled again")
        _, data, _ = fit(policy, tmp_path, data=long_data(), max_steps=36, ckpt_path=path)
    ledger = data.pool.ledger
    assert sum(row.prompts for row in ledger.rows()) == ledger.num_dispatched == data.prompts.state_dict()["next_group_id"]
    interrupted = {row[1]: row[3] for row in saved["pool"]["ledger"]["settled"]}.get("interrupted", 0)
    assert ledger.tokens("dropped", "interrupted") == interrupted
    assert ledger.count("pending") == 0


@pytest.mark.parametrize(
    ("change", "key"),
    [({"group_size": 3}, "group_size"), ({"sampling": SamplingParams(max_new_tokens=20)}, "sampling.max_new_tokens")],
)
def test_responses_in_flight_of_other_settings_are_sampled_again_with_a_warning(policy, tmp_path, in_flight, change, key):
    path, number = in_flight
    steps = read_checkpoint(path)["lit_asyncrl"]["policy_version"] + 3
    with pytest.warns(UserWarning, match=rf"data\.{key} is .*{number} responses of groups that were not complete"):
        _, data, _ = fit(policy, tmp_path, data=long_data(**change), max_steps=steps, ckpt_path=path)
    ledger = data.pool.ledger
    assert ledger.tokens("dropped", "interrupted") >= read_checkpoint(path)["RolloutDataModule"]["members"]["lengths"].sum()
    assert sum(row.prompts for row in ledger.rows()) == ledger.num_dispatched


def test_another_temperature_than_the_checkpoint_s_is_refused(policy, tmp_path, in_flight):
    path, _ = in_flight
    data = long_data(sampling=SamplingParams(temperature=0.5, max_new_tokens=24))
    with pytest.raises(CheckpointError, match=r"data\.sampling\.temperature must be that of the checkpoint, 1, got 0\.5"):
        fit(policy, tmp_path, data=data, ckpt_path=path)


# ------------------------------------------------------------------ ends, random numbers, files


def test_a_finished_run_resumed_with_its_own_max_steps_ends_at_once_and_with_more_goes_on(policy, tmp_path):
    path = str(tmp_path / "end.ckpt")
    _, _, trainer = fit(policy, tmp_path / "first", max_steps=2)
    trainer.save_checkpoint(path)
    module, data, _ = fit(policy, tmp_path / "same", max_steps=2, ckpt_path=path)
    assert (module.policy_version, data.pool.ledger.count("trained")) == (2, 4)
    module, data, _ = fit(policy, tmp_path / "more", max_steps=3, ckpt_path=path)
    assert (module.policy_version, data.pool.ledger.count("trained")) == (3, 6)


def test_a_run_resumed_at_the_end_of_an_epoch_goes_on_with_the_next(policy, tmp_path):
    saver = ModelCheckpoint(tmp_path / "saved", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1)
    settings = {"updates_per_epoch": 2}
    whole, _, _ = fit(policy, tmp_path, saver, data=make_data(**settings), enable_checkpointing=True)
    (first, _) = sorted((tmp_path / "saved").glob("*.ckpt"), key=lambda path: version(path))
    assert version(first) == 2
    resumed, data, _ = fit(policy, tmp_path, data=make_data(**settings), ckpt_path=str(first))
    assert data.pool.ledger.count("trained") == 8
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def version(path: Path) -> int:
    return read_checkpoint(str(path))["lit_asyncrl"]["policy_version"]


class StopAt(pl.Callback):
    """Asks for the run's end in one hook, at one version."""

    def __init__(self, hook: str, version: int) -> None:
        self.version = version
        setattr(self, hook, self.stop)

    def stop(self, trainer, pl_module, *_):
        if pl_module.policy_version == self.version:
            trainer.datamodule.supervisor.request_stop("SIGTERM")


@pytest.mark.parametrize(
    ("hook", "version"),
    [("on_train_batch_start", 3), ("on_train_batch_end", 4), ("on_train_epoch_start", 3), ("on_train_batch_end", 6)],
)
def test_a_run_of_epochs_that_was_stopped_makes_all_of_them(policy, tmp_path, hook, version):
    arguments = {"max_steps": -1, "max_epochs": 3, "enable_checkpointing": True}
    first, _, _ = fit(policy, tmp_path, StopAt(hook, version), data=make_data(updates_per_epoch=3), **arguments)
    assert first.policy_version < 9
    path = str(tmp_path / "checkpoints" / "last.ckpt")
    resumed, _, _ = fit(policy, tmp_path, data=make_data(updates_per_epoch=3), ckpt_path=path, **arguments)
    assert resumed.policy_version == 9


def test_the_last_checkpoint_of_another_run_keeps_its_name(policy, tmp_path):
    for _ in range(2):
        saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1000, save_last=True)
        _, _, trainer = fit(policy, tmp_path, saver, max_steps=2, enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last-v1.ckpt", "last.ckpt"]
    assert newest_checkpoint(trainer) == saver.last_model_path == str(tmp_path / "last-v1.ckpt")


def test_two_model_checkpoints_of_one_folder_keep_the_files_of_both(policy, tmp_path):
    newest = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=1)
    linked = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1, save_last="link")
    fit(policy, tmp_path, newest, linked, max_steps=4, enable_checkpointing=True)
    assert Path(newest.best_model_path).is_file()
    assert Path(linked.best_model_path).is_file()
    assert newest.best_model_path != linked.best_model_path


def test_a_state_that_could_not_be_read_again_ends_the_run_at_its_save(policy, tmp_path):
    class Foreign(pl.Callback):
        def state_dict(self):
            return {"best": np.float64(0.5)}

    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1)
    with pytest.raises(CheckpointError, match=r"plain Python alone, got numpy\.float64 at callbacks\..*Foreign\.best"):
        fit(policy, tmp_path, Foreign(), saver, enable_checkpointing=True)


def test_random_generators_go_on_in_a_resumed_run(policy, tmp_path):
    class Draw(pl.Callback):
        def __init__(self) -> None:
            self.drawn: list[tuple[float, float, float]] = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))

    whole, resumed = Draw(), Draw()
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    fit(policy, tmp_path, whole, saver, enable_checkpointing=True)
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    half = next(path for path in (tmp_path / "saved").glob("*.ckpt") if version(path) == 2)
    fit(policy, tmp_path, resumed, ckpt_path=str(half))
    assert resumed.drawn == whole.drawn[2:]


def test_a_disk_without_room_ends_the_run_and_leaves_the_checkpoint_before(policy, tmp_path):
    class Full(AtomicCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if checkpoint["global_step"] > 1:
                path = "/dev/full/no.ckpt"  # no folder: the system refuses it
            super().save_checkpoint(checkpoint, path, storage_options)

    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=1)
    with pytest.raises(CheckpointError, match=r"could not be written \(NotADirectoryError|FileExistsError"):
        fit(policy, tmp_path, saver, enable_checkpointing=True, plugins=[Full()])
    (left,) = (tmp_path / "saved").iterdir()
    assert version(left) == 1


def test_last_goes_on_with_the_run_before_and_begins_where_there_is_none(policy, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lit-asyncrl"])
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "inline.yaml"
    engine = {"class_path": "HFEngine", "init_args": {"mode": "inline"}}
    settings = {"evaluate_first": False, "evaluate_last": False, "engine": engine}
    callbacks = [
        {"class_path": "AsyncRollout", "init_args": settings},
        {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1, "save_last": True}},
    ]
    config.write_text(json.dumps({"trainer": {"callbacks": callbacks}}), encoding="utf-8")
    arguments = [
        *("fit", "--config", "smoke", f"--model.policy.path={PACKAGED}", f"--trainer.logger.init_args.save_dir={tmp_path}"),
        *("--config", str(config), "--data.batch_groups=2", "--data.group_size=2", "--data.sampling.max_new_tokens=6"),
        *("--data.task.min_digits=3", "--data.task.max_digits=5", "--ckpt_path=last", "--trainer.limit_val_batches=0"),
        "--data.max_policy_age=1",
    ]
    with pytest.warns(UserWarning, match="no whole checkpoint is in"):
        first = run([*arguments, "--trainer.max_steps=2"])
    assert first.model.policy_version == 2
    second = run([*arguments, "--trainer.max_steps=3"])
    assert second.datamodule.pool.ledger.count("trained") == 6  # the first run's four groups among them


# ------------------------------------------------------------------ kill -9


class Trained(pl.Callback):
    """The groups that were trained, in the checkpoint too."""

    def __init__(self) -> None:
        self.group_ids: list[int] = []

    def on_fit_start(self, trainer, pl_module):
        trainer.datamodule.pool.ledger.on_settled(self._settled)

    def _settled(self, group_id: int, state: str) -> None:
        if state == "trained":
            self.group_ids.append(group_id)

    def state_dict(self):
        return {"group_ids": list(self.group_ids)}

    def load_state_dict(self, state_dict):
        self.group_ids = list(state_dict["group_ids"])


def train_all(policy: str, folder: str) -> None:
    """One process of the run: goes on with the newest checkpoint, to the end of the prompts."""
    torch.set_num_threads(1)
    trained = Trained()
    saver = ModelCheckpoint(Path(folder) / "saved", every_n_train_steps=1, save_last=True, save_top_k=1)
    engine = HFEngine(num_slots=8)
    rollout = AsyncRollout(engine=engine, evaluate_first=False, evaluate_last=False, rehearse=False, trainer_threads=1)
    data = long_data(task=ReverseDigits(3, 5, rewards=[LongAnswer()], num_train=NUM_PROMPTS), max_prompt_epochs=1)
    trainer = make_trainer(Path(folder), [rollout, trained, saver], max_steps=1000, enable_checkpointing=True)
    trainer.fit(make_module(policy), data, ckpt_path=newest_checkpoint(trainer))
    rows = [[row.state, row.reason, row.prompts, row.tokens] for row in data.pool.ledger.rows()]
    result = {"rows": rows, "trained": trained.group_ids, "dispatched": data.pool.ledger.num_dispatched}
    (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")


def last_save(folder: Path) -> float:
    """When the newest checkpoint was written; those that a run removes meanwhile do not count."""
    newest = 0.0
    for path in folder.glob("*.ckpt"):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, path.stat().st_mtime)
    return newest


def kill_tree(process: subprocess.Popen) -> None:
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in tree:
        each.kill()
    psutil.wait_procs(tree, timeout=RUN_S)


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_trains_every_prompt_once(policy, tmp_path):
    random.seed(3)
    result = tmp_path / "result.json"
    command = [sys.executable, "-c", f"import test_resume; test_resume.train_all({policy!r}, {str(tmp_path)!r})"]
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    for kill in range(KILLS + 1):
        marker = last_save(tmp_path / "saved")
        process = subprocess.Popen(command, env=environment)
        deadline, delay = time.monotonic() + RUN_S, random.uniform(0.0, 1.0)
        while process.poll() is None and time.monotonic() < deadline:
            if kill < KILLS and last_save(tmp_path / "saved") > marker:  # it got on: it may be killed
                time.sleep(delay)
                break
            time.sleep(0.02)
        if process.poll() is None:
            kill_tree(process)
    assert process.returncode == 0
    settled = json.loads(result.read_text(encoding="utf-8"))
    assert settled["dispatched"] == NUM_PROMPTS == sum(row[2] for row in settled["rows"])
    assert all(row[0] in ("trained", "dropped", "waiting") for row in settled["rows"] if row[2])
    assert len(settled["trained"]) == len(set(settled["trained"])) == sum(r[2] for r in settled["rows"] if r[0] == "trained")
    assert all(path.suffix == ".ckpt" for path in (tmp_path / "saved").iterdir())  # no temporary file
