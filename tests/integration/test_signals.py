"""SIGTERM and Ctrl-C in any window: saved, ended in seconds, no process left; killed processes take nobody hostage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from policies import save_policy
from runs import inline_rollout, make_data, make_module, make_trainer

from lit_asyncrl.callbacks import AsyncRollout
from lit_asyncrl.callbacks.signals import SignalHandlers
from lit_asyncrl.cli import main
from lit_asyncrl.errors import EngineError, StopRequested
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.supervisor import Supervisor

STARTED_S = 120.0
"""Longest time for a run to make its first updates on a busy machine."""
ENDED_S = 30.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


# ------------------------------------------------------------------ in this process: every window


class SignalAt(pl.Callback):
    """Sends a signal to this process in one hook of the second update."""

    def __init__(self, hook: str, number: signal.Signals) -> None:
        self.number = number
        self.sent = False
        setattr(self, hook, self.send)

    def send(self, trainer, *_args, **_kwargs) -> None:
        if not self.sent and (trainer.global_step >= 1 or trainer.state.fn != "fit"):
            self.sent = True
            os.kill(os.getpid(), self.number)


def interrupt_evaluation_at(version: int, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """SIGTERM at the start of the AsyncRollout's own evaluation at that version."""
    rollout = trainer.callbacks[0]
    evaluate = rollout.evaluate

    def interrupted(batch):
        if module.policy_version == version:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(batch)

    rollout.evaluate = interrupted


def _run(policy, folder, *callbacks, **rollout):
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=1000, save_last=True)
    module, data = make_module(policy), make_data()
    trainer = make_trainer(
        folder,
        [inline_rollout(**rollout), *callbacks, saver],
        max_steps=3,
        enable_checkpointing=True,
        val_check_interval=1,
        limit_val_batches=1.0,
    )
    trainer.fit(module, data)
    return module, data


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    "hook",
    ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_end"],
)
def test_a_signal_in_any_window_saves_what_was_learnt(policy, tmp_path, hook, number):
    before = signal.getsignal(number)
    callback = SignalAt(hook, number)
    module, data = _run(policy, tmp_path, callback, evaluate_last=True)
    assert callback.sent
    assert data.supervisor.stop_reason == number.name
    assert module.policy_version < 3
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["lit_asyncrl"]["policy_version"] == module.policy_version
    assert signal.getsignal(number) == before
    assert not any("rollout" in t.name for t in threading.enumerate())


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_a_stopped_run_resumes_to_the_weights_of_the_unbroken_one(policy, tmp_path, hook):
    whole, _ = _run(policy, tmp_path / "whole")
    _run(policy, tmp_path / "first", SignalAt(hook, signal.SIGTERM))
    resumed = make_module(policy)
    trainer = make_trainer(tmp_path, [inline_rollout()], max_steps=3)
    trainer.fit(resumed, make_data(), ckpt_path=str(tmp_path / "first" / "last.ckpt"))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_signal_in_the_first_evaluation_ends_the_run_without_an_update(policy, tmp_path):
    class InEvaluation(SignalAt):
        def setup(self, trainer, pl_module, stage):
            interrupt_evaluation_at(0, trainer, pl_module)

    module, data = _run(policy, tmp_path, InEvaluation("unused", signal.SIGTERM), evaluate_first=True)
    assert module.policy_version == 0
    assert data.supervisor.stop_reason == "SIGTERM"


def test_a_signal_in_the_last_evaluation_saves_the_result(policy, tmp_path):
    class InLastEvaluation(SignalAt):
        def on_train_start(self, trainer, pl_module):
            interrupt_evaluation_at(3, trainer, pl_module)

    module, _ = _run(policy, tmp_path, InLastEvaluation("unused", signal.SIGTERM), evaluate_last=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["lit_asyncrl"]["policy_version"] == module.policy_version == 3


def test_a_signal_in_predict_is_a_stop_request(policy, tmp_path):
    trainer = make_trainer(
        tmp_path, [inline_rollout(), SignalAt("on_predict_batch_start", signal.SIGTERM)], limit_predict_batches=1.0
    )
    with pytest.raises(StopRequested, match="SIGTERM"):
        trainer.predict(make_module(policy), make_data())


def test_a_signal_in_validate_ends_it(policy, tmp_path):
    data = make_data()
    trainer = make_trainer(
        tmp_path, [inline_rollout(), SignalAt("on_validation_batch_start", signal.SIGTERM)], limit_val_batches=1.0
    )
    trainer.validate(make_module(policy), data)
    assert data.supervisor.stop_reason == "SIGTERM"


def test_handlers_are_put_back_after_an_exception(policy, tmp_path):
    class Broken(pl.Callback):
        def on_train_batch_end(self, *_):
            raise ZeroDivisionError("in a user's callback")

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ZeroDivisionError):
        _run(policy, tmp_path, Broken())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_ctrl_c_while_the_engine_starts_exits_with_130(policy, tmp_path, monkeypatch):
    def interrupted(*_args, **_kwargs):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(HFEngine, "start", interrupted)
    monkeypatch.setattr("sys.argv", ["lit-asyncrl"])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "smoke", f"--model.policy.path={policy}", f"--trainer.logger.init_args.save_dir={tmp_path}"])
    signal.signal(signal.SIGINT, before)  # Lightning ignores it from then on
    assert caught.value.code == 130


def test_handlers_are_not_installed_outside_the_main_thread():
    supervisor = Supervisor()
    before = signal.getsignal(signal.SIGTERM)
    handlers = SignalHandlers(supervisor, on_second=lambda: None)
    thread = threading.Thread(target=handlers.install)
    thread.start()
    thread.join(5.0)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_killed_engine_ends_the_run_with_its_cause_in_seconds(policy, tmp_path):
    class Kill(pl.Callback):
        at = 0.0

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                children = [c for c in psutil.Process().children() if "lit_asyncrl.generation.hf_worker" in c.cmdline()]
                assert len(children) == 1
                children[0].kill()
                self.at = time.monotonic()

    killer = Kill()
    rollout = AsyncRollout(engine=HFEngine(num_slots=8), evaluate_first=False, evaluate_last=False, trainer_threads=1)
    trainer = make_trainer(tmp_path, [rollout, killer], max_steps=10_000)
    with pytest.raises(EngineError, match="SIGKILL"):
        trainer.fit(make_module(policy), make_data(max_policy_age=2))
    assert time.monotonic() - killer.at < 10.0


# ------------------------------------------------------------------ the command


class Command:
    """`lit-asyncrl fit` in a process of its own, trained until the test ends it."""

    def __init__(self, policy: str, folder: Path) -> None:
        self.folder = folder
        arguments = [
            *("fit", "--config", "smoke", f"--model.policy.path={policy}", "--trainer.max_steps=1000000"),
            *("--trainer.val_check_interval=1000000", f"--trainer.logger.init_args.save_dir={folder}", "--data.batch_groups=2"),
            *("--data.group_size=2", "--data.evaluation.heldout.final_num_prompts=8", f"--data.save_rollouts={folder}"),
            *("--data.sampling.max_new_tokens=6", "--data.sampler=FifoSampler", "--data.max_policy_age=2"),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lit_asyncrl.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Command:
        wait_until(lambda: self.process.poll() is not None or self.updates >= 3, STARTED_S)
        assert self.process.poll() is None, self.process.communicate()[0]
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        assert any("lit_asyncrl.generation.hf_worker" in child.cmdline() for child in self.children)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        for child in self.children:
            if child.is_running():
                child.kill()

    @property
    def updates(self) -> int:
        file = self.folder / "rollouts.jsonl"
        return (
            int(json.loads(lines[-2])["policy_version"])
            if file.is_file() and len(lines := file.read_text().split("\n")) > 2
            else 0
        )

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=ENDED_S)
        return self.process.returncode, output

    def assert_no_child_left(self) -> None:
        wait_until(lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in self.children), ENDED_S)


def wait_until(predicate: Callable[[], bool], timeout_s: float) -> None:
    """Poll what another process does."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)


def test_sigterm_ends_the_command_with_143_and_a_checkpoint(policy, tmp_path):
    with Command(policy, tmp_path) as command:
        command.process.send_signal(signal.SIGTERM)
        code, output = command.end()
        assert code == 143, output
        (checkpoint,) = tmp_path.rglob("last.ckpt")
        assert torch.load(checkpoint, weights_only=True)["lit_asyncrl"]["policy_version"] >= 3
        (summary,) = tmp_path.rglob("summary.json")
        assert json.loads(summary.read_text(encoding="utf-8"))["stopped_by"] == "SIGTERM"
        command.assert_no_child_left()


@pytest.mark.slow
def test_ctrl_c_ends_the_command_with_130(policy, tmp_path):
    with Command(policy, tmp_path) as command:
        command.process.send_signal(signal.SIGINT)
        code, output = command.end()
        assert code == 130, output
        assert list(tmp_path.rglob("last.ckpt"))
        assert "Traceback" not in output
        command.assert_no_child_left()


def test_a_second_ctrl_c_leaves_at_once(policy, tmp_path):
    with Command(policy, tmp_path) as command:
        engine = next(c for c in command.children if "lit_asyncrl.generation.hf_worker" in c.cmdline())
        engine.suspend()  # the run cannot end by itself: it waits for the engine
        command.process.send_signal(signal.SIGINT)
        command.process.send_signal(signal.SIGINT)
        code, output = command.end()
        assert code == 130, output
        command.assert_no_child_left()


@pytest.mark.slow  # the default suite kills the trainer of a bare engine
def test_a_killed_trainer_leaves_no_engine(policy, tmp_path):
    with Command(policy, tmp_path) as command:
        command.process.kill()
        command.end()
        command.assert_no_child_left()
