"""SIGTERM and Ctrl-C in any window: saved, ended in seconds, no process left; killed processes take nobody hostage."""

from __future__ import annotations

import contextlib
import importlib.metadata
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
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from policies import save_policy
from runs import inline_rollout, make_data, make_module, make_trainer

import lit_asyncrl
from lit_asyncrl.callbacks import AsyncRollout, RunReport
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


@pytest.mark.parametrize("schedule", [{"val_check_interval": 3}, {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_start"])
@pytest.mark.parametrize(
    "watcher",
    [
        lambda folder: ModelCheckpoint(dirpath=folder, monitor="val/heldout/accuracy", mode="max", filename="best"),
        lambda folder: EarlyStopping("val/heldout/accuracy", mode="max"),
    ],
    ids=["ModelCheckpoint", "EarlyStopping"],
)
def test_a_signal_before_the_first_evaluation_ends_is_no_fault_to_callbacks_that_watch_it(
    policy, tmp_path, watcher, hook, schedule
):
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1000, save_last=True)
    callbacks = [inline_rollout(), SignalAt(hook, signal.SIGTERM), watcher(tmp_path), saver]
    module, data = make_module(policy), make_data(updates_per_epoch=3)
    arguments = {"max_steps": 6, "enable_checkpointing": True, "limit_val_batches": 1.0} | schedule
    make_trainer(tmp_path, callbacks, **arguments).fit(module, data)
    assert data.supervisor.stop_reason == "SIGTERM"
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["lit_asyncrl"]["policy_version"] == module.policy_version < 6
    assert not (tmp_path / "best.ckpt").exists()


def test_a_signal_ends_a_run_before_its_least_number_of_updates(policy, tmp_path):
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1000, save_last=True)
    callbacks = [inline_rollout(), SignalAt("on_train_batch_start", signal.SIGTERM), saver]
    module, data = make_module(policy), make_data(updates_per_epoch=3)
    make_trainer(tmp_path, callbacks, max_steps=50, min_steps=40, min_epochs=9, enable_checkpointing=True).fit(module, data)
    assert data.supervisor.stop_reason == "SIGTERM"
    assert module.policy_version < 5
    assert (tmp_path / "last.ckpt").exists()


def test_an_evaluation_that_was_broken_off_is_not_in_the_summary(policy, tmp_path):
    report = RunReport()

    class Late(SignalAt):
        def send(self, trainer, *arguments, **_kwargs):
            if trainer.global_step >= 2:
                super().send(trainer)

    _run(policy, tmp_path, Late("on_validation_start", signal.SIGTERM), report)
    assert [evaluation["policy_version"] for evaluation in report.summary["evaluations"]] == [1]
    assert report.summary["policy_version"] == 2


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
    handlers = SignalHandlers(supervisor, on_leave=lambda: None)
    thread = threading.Thread(target=handlers.install)
    thread.start()
    thread.join(5.0)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
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
    rollout = AsyncRollout(
        engine=HFEngine(num_slots=8), max_restarts=0, evaluate_first=False, evaluate_last=False, trainer_threads=1
    )
    trainer = make_trainer(tmp_path, [rollout, killer], max_steps=10_000)
    with pytest.raises(EngineError, match="SIGKILL"):
        trainer.fit(make_module(policy), make_data(max_policy_age=2))
    assert time.monotonic() - killer.at < 10.0


# ------------------------------------------------------------------ the command


class Server:
    """Runs of `lit-asyncrl`, forked from one process that has imported everything (`windows.py`)."""

    def __init__(self) -> None:
        paths = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[1] / "windows.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._line() == "ready"

    def run(self, **order: object) -> int:
        """Begin a run; gives its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def exit_code(self) -> int:
        """Of the run that was begun last."""
        return int(self._line())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


class Run:
    """A run of three updates that a test stops in one window."""

    def __init__(self, server: Server, policy: str, folder: Path, window: str, mode: str, grace_s: float) -> None:
        self._server = server
        self.folder = folder
        config = {
            "seed_everything": 0,
            "trainer": {
                "accelerator": "cpu",
                "max_steps": 3,
                "val_check_interval": 2,
                "limit_val_batches": 1.0,
                "enable_progress_bar": False,
                "default_root_dir": str(folder),
                "logger": False,
                "callbacks": [
                    {
                        "class_path": "AsyncRollout",
                        "init_args": {
                            "engine": {"class_path": "windows.WindowEngine", "init_args": {"mode": mode}},
                            "trainer_threads": 1,
                            "grace_s": grace_s,
                        },
                    },
                    {"class_path": "windows.WindowCallback"},
                    {
                        "class_path": "ModelCheckpoint",
                        "init_args": {"dirpath": str(folder), "every_n_train_steps": 2, "save_last": True},
                    },
                ],
            },
            "model": {"policy": {"path": policy}},
            "data": {
                "task": {"class_path": "windows.WindowTask"},
                "batch_groups": 2,
                "group_size": 2,
                "max_policy_age": 0,
                "reward_timeout_s": 60.0,
                "sampling": {"max_new_tokens": 4},
                "sampler": {"class_path": "FifoSampler"},
                "evaluation": {"heldout": {"num_prompts": 2, "final_num_prompts": 2}},
            },
        }
        file = folder / "run.yaml"
        file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        self.screen = folder / "screen"
        environment = {"LIT_WINDOW": window, "LIT_WINDOW_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
        self.pid = server.run(arguments=["fit", "--config", str(file)], environment=environment, screen=str(self.screen))
        wait_until(lambda: (folder / "reached").exists() or not self._is_running(), STARTED_S)
        assert (folder / "reached").exists(), self.text
        self.children = psutil.Process(self.pid).children(recursive=True)

    def _is_running(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        return False

    @property
    def text(self) -> str:
        return self.screen.read_text(encoding="utf-8") if self.screen.exists() else ""

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def release(self) -> None:
        (self.folder / "release").touch()

    def end(self) -> int:
        killer = threading.Timer(ENDED_S, lambda: os.kill(self.pid, signal.SIGKILL))
        killer.start()
        code = self._server.exit_code()
        killer.cancel()
        return code

    @property
    def saved_version(self) -> int | None:
        file = self.folder / "last.ckpt"
        return torch.load(file, weights_only=True)["lit_asyncrl"]["policy_version"] if file.exists() else None

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in self.children), ENDED_S)
        names = {path.name for path in self.folder.iterdir() if path.suffix != ".ckpt"}
        assert names <= {"reached", "release", "run.yaml", "config.yaml", "screen"}


@pytest.fixture
def start(server, policy, tmp_path):
    """Begin a run and wait until it is in a window."""
    runs: list[Run] = []

    def start(window: str, mode: str = "inline", grace_s: float = 30.0) -> Run:
        runs.append(Run(server, policy, tmp_path, window, mode, grace_s))
        return runs[-1]

    yield start
    for run in runs:
        run.release()
        for process in run.children:
            if process.is_running():
                process.kill()


NOTHING = {None, 0}
WINDOWS = {  # window: the version that is saved
    "set-up": NOTHING,
    "engine start": NOTHING,
    "rehearsal": NOTHING,
    "first evaluation": NOTHING,
    "prompt": NOTHING,
    "generation": NOTHING,
    "reward": NOTHING,
    "weight update": {1},
    "delivery": {1},
    "optimizer step": {2},
    "evaluation": {2},
    "save": {2},
    "evaluation at the end": {3},
    "shut-down": {3},
}


QUICK = ("set-up", "generation", "reward", "weight update", "save")
"""Windows that every run of the tests hits; the others are slow."""


@pytest.mark.parametrize("window", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in WINDOWS])
def test_sigterm_in_a_window_ends_the_command_with_143_and_saves_what_was_learnt(start, window):
    run = start(window)
    run.send(signal.SIGTERM)
    run.release()
    assert run.end() == 143, run.text
    assert run.saved_version in WINDOWS[window], run.text
    assert "Traceback" not in run.text
    run.assert_nothing_left()


@pytest.mark.parametrize("window", ["set-up", "engine start", "reward", "save"])
def test_ctrl_c_in_a_window_ends_the_command_with_130(start, window):
    run = start(window)
    run.send(signal.SIGINT)
    run.release()
    assert run.end() == 130, run.text
    assert "Traceback" not in run.text
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_run_that_hangs_after_sigterm_is_left_when_the_grace_is_used_up(start):
    run = start("save", mode="process", grace_s=1.0)
    assert any("lit_asyncrl.generation.hf_worker" in child.cmdline() for child in run.children)
    run.send(signal.SIGTERM)  # and no release: the save does not end
    assert run.end() == 143, run.text
    assert "AsyncRollout.grace_s: 1)" in run.text
    assert "windows.py" in run.text  # where it was
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("window", ["optimizer step", "evaluation", "save"])
def test_a_second_ctrl_c_leaves_at_once(start, window):
    run = start(window, mode="process")
    next(c for c in run.children if "lit_asyncrl.generation.hf_worker" in c.cmdline()).suspend()  # cannot notice anything
    run.send(signal.SIGINT)
    wait_until(lambda: psutil.Process(run.pid).status() == psutil.STATUS_SLEEPING, ENDED_S)
    run.send(signal.SIGINT)
    assert run.end() == 130, run.text
    run.assert_nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_during_the_imports_ends_the_command_quietly(tmp_path, number, code):
    (tmp_path / "torch.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'reached')!r}).touch()\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "lit_asyncrl", "fit", "--config", "smoke"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])},
    )
    wait_until((tmp_path / "reached").exists, STARTED_S)
    process.send_signal(number)
    output, _ = process.communicate(timeout=ENDED_S)
    assert (process.returncode, output) == (code, "")


def test_the_command_begins_with_the_launcher_that_takes_signals_over():
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="lit-asyncrl")
    launcher = (Path(lit_asyncrl.__file__).parent / "__main__.py").read_text(encoding="utf-8")
    assert entry.value in ("lit_asyncrl.__main__:main", "lit_asyncrl.cli:main")  # the latter: installed before it was moved
    assert launcher.index("signal.signal") < launcher.index("from lit_asyncrl.cli")


def test_a_killed_trainer_leaves_no_engine_and_no_name_in_shared_memory(start):
    run = start("save", mode="process")
    assert run.children
    assert "/dev/shm/" not in Path(f"/proc/{run.pid}/maps").read_text(encoding="utf-8")
    run.send(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    run.assert_nothing_left()


@pytest.mark.slow  # the real command on the packaged model; the windows above are of runs forked from one process
def test_sigterm_ends_the_installed_command_with_143_and_a_summary(tmp_path):
    arguments = ["fit", "--config", "smoke", "--trainer.max_steps=1000000", f"--trainer.logger.init_args.save_dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lit_asyncrl", *arguments, f"--data.save_rollouts={tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    rollouts = tmp_path / "rollouts.jsonl"
    wait_until(lambda: process.poll() is not None or (rollouts.is_file() and rollouts.stat().st_size > 0), STARTED_S)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=ENDED_S)
    assert process.returncode == 143, output
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text(encoding="utf-8"))["stopped_by"] == "SIGTERM"
    assert list(tmp_path.rglob("last.ckpt"))


def wait_until(predicate: Callable[[], bool], timeout_s: float) -> None:
    """Poll what another process does."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)
