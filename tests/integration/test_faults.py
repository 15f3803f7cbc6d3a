"""Faults, injected through the public interfaces: each ends the run in time with its typed error and cause, or is survived and
counted (docs/reliability.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import threading
import time
import traceback
from pathlib import Path

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from policies import save_policy
from runs import LongAnswer, make_data, make_module, make_trainer

from lit_asyncrl.algorithm.advantages import LeaveOneOut
from lit_asyncrl.callbacks import AsyncRollout
from lit_asyncrl.errors import AsyncRLError, EngineError, RewardError, StallError, WaitTimeoutError, WeightSyncError
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.tasks.digits import ReverseDigits

ENDED_S = 45.0
"""Longest time from the start of a faulty run to its error, in seconds: start-up, and timeouts of a second or two."""
HELD_S = 60.0
"""Longest time that something hangs, in seconds."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def held():
    """What hangs waits for this; released when the test ends."""
    event = threading.Event()
    yield lambda *_args, **_kwargs: event.wait(HELD_S)
    event.set()


@pytest.fixture
def fit(policy, tmp_path):
    """Run a tiny `fit` with a fault in it, check that it ends in time and leaves no thread or process; gives module and data."""

    def fit(engine=None, *, data=None, rollout=None, module=None, callbacks=(), max_steps=3, error=None, match=None, **trainer):
        threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
        callback = AsyncRollout(
            engine=engine or HFEngine(mode="inline", num_slots=8),
            **({"evaluate_first": False, "evaluate_last": False, "trainer_threads": 1} | (rollout or {})),
        )
        policy_module, datamodule = make_module(policy, **(module or {})), make_data(**(data or {}))
        pl_trainer = make_trainer(tmp_path, [callback, *callbacks], max_steps=max_steps, **trainer)
        started = time.monotonic()
        with pytest.raises(error, match=match) if error else contextlib.nullcontext() as caught:
            pl_trainer.fit(policy_module, datamodule)
        assert time.monotonic() - started < ENDED_S
        assert set(psutil.Process().children(recursive=True)) <= children
        left = {t.name for t in set(threading.enumerate()) - threads if t.is_alive()}
        assert left <= {"reward", "rollout-dispatcher", "rollout-collector", "weight publisher", "Thread-1"}, left
        return policy_module, datamodule, caught

    return fit


# ------------------------------------------------------------------ the engine


class Answers(HFEngine):
    """Answers training requests with what a function makes of the right completions."""

    def __init__(self, change) -> None:
        super().__init__(mode="inline", num_slots=8)
        self._change = change

    def completions(self, timeout_s):
        return [changed for completion in super().completions(timeout_s) for changed in self._change(completion)]


def change(**fields):
    return lambda completion: [dataclasses.replace(completion, **{k: f(completion) for k, f in fields.items()})]


GARBAGE = {
    "ids beyond the vocabulary": (change(token_ids=lambda c: [10**6] * len(c.token_ids)), "token"),
    "a negative id": (change(token_ids=lambda c: [-1] * len(c.token_ids)), "token"),
    "too few log-probs": (change(behavior_logprobs=lambda c: c.behavior_logprobs[:-1]), "log-probs"),
    "too many versions": (change(token_versions=lambda c: [*c.token_versions, 0]), "versions"),
    "NaN log-probs": (change(behavior_logprobs=lambda c: [float("nan")] * len(c.token_ids)), "NaN"),
    "infinite log-probs": (change(behavior_logprobs=lambda c: [float("-inf")] * len(c.token_ids)), "infinite"),
    "positive log-probs": (change(behavior_logprobs=lambda c: [1.0] * len(c.token_ids)), "above 0"),
    "no tokens": (change(token_ids=lambda c: [], behavior_logprobs=lambda c: [], token_versions=lambda c: []), "no tokens"),
    "an answer to nobody": (change(request_id=lambda c: 10**6), "not outstanding"),
    "every answer twice": (lambda completion: [completion, completion], "not outstanding"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_an_answer_that_cannot_be_trained_on_names_the_engine(fit, name):
    answer, word = GARBAGE[name]
    fit(Answers(answer), error=EngineError, match=word)


def test_tokens_of_a_version_that_was_never_sent_are_refused(fit):
    fit(Answers(change(token_versions=lambda c: [99] * len(c.token_ids))), error=AsyncRLError, data={"data_timeout_s": 2.0})


def test_an_engine_that_never_answers_ends_the_run_after_data_timeout_s(fit):
    fit(
        Answers(lambda completion: []),
        data={"data_timeout_s": 1.0},
        error=WaitTimeoutError,
        match=r"data\.data_timeout_s must cover .* got 1\.0 s",
    )


def test_an_engine_that_answers_too_late_is_a_stall_that_names_every_wait(fit):
    fit(
        Answers(lambda completion: []),
        rollout={"stall_timeout_s": 2.0, "sync_timeout_s": 2.0},
        data={"data_timeout_s": 60.0},
        error=StallError,
        match=r"AsyncRollout\.stall_timeout_s .* no progress .*trainer \(batch\) for 2 groups",
    )


def test_an_engine_that_raises_ends_the_run_with_its_own_error(fit):
    def broken(completion):
        raise ZeroDivisionError("in the engine")

    *_, caught = fit(Answers(broken), error=ZeroDivisionError, match="in the engine")
    assert "Raised in lit-asyncrl's rollout collector." in caught.value.__notes__


class Stalls(HFEngine):
    """A transport that stalls in one call from the given version on."""

    def __init__(self, call: str, wait, version: int = 1) -> None:
        super().__init__(mode="inline", num_slots=8)
        self._call, self._wait, self._version, self._sent = call, wait, version, 0

    def begin_update(self, version, weights):
        self._sent = version
        self._stall("begin_update")
        super().begin_update(version, weights)

    def finish_update(self, timeout_s):
        self._stall("finish_update")
        return super().finish_update(timeout_s)

    def _stall(self, call):
        if call == self._call and self._sent >= self._version:
            self._wait()


def test_a_transport_that_does_not_confirm_ends_the_run_after_sync_timeout_s(fit, held):
    fit(
        Stalls("finish_update", held),
        rollout={"sync_timeout_s": 1.0},
        data={"max_policy_age": 2},
        error=WaitTimeoutError,
        match="trainer waited 2.0 s for the delivery of weights",
    )


@pytest.mark.slow
def test_a_transport_that_blocks_the_trainer_is_a_stall_that_names_its_line(fit, held):
    fit(
        Stalls("begin_update", held),
        rollout={"stall_timeout_s": 1.5, "sync_timeout_s": 1.0, "grace_s": 0.5},
        error=StallError,
        match=r"no progress .*test_faults\.py",
    )


@pytest.mark.slow
def test_an_engine_process_that_stands_still_ends_the_run_after_sync_timeout_s(fit):
    class StandStill(pl.Callback):
        def on_before_optimizer_step(self, trainer, *_):
            if trainer.global_step == 1:
                engine(psutil.Process()).suspend()

    rollout = {"sync_timeout_s": 1.5}
    fit(HFEngine(num_slots=8), rollout=rollout, callbacks=[StandStill()], error=WeightSyncError, match="within 1.5 s")


def engine(process):
    return next(c for c in process.children() if "lit_asyncrl.generation.hf_worker" in c.cmdline())


# ------------------------------------------------------------------ rewards


class Reward(RewardFn):
    """Does what a function says."""

    name = "faulty"

    def __init__(self, action) -> None:
        self._action = action

    def __call__(self, completion, example):
        return self._action(completion, example)


def rewarded(action, **data):
    return {"task": ReverseDigits(3, 5, rewards=[Reward(action)])} | data


def raising(completion, example):
    raise KeyError("lost")


@pytest.mark.parametrize(
    "value", [None, "1", [1.0, 0.0], float("nan"), 1e39], ids=["None", "text", "a list", "NaN", "beyond float32"]
)
def test_a_reward_that_returns_no_number_ends_the_run(fit, value):
    fit(data=rewarded(lambda *_: value), error=RewardError, match="reward 'faulty' of task 'reverse_digits' .example")


def test_a_reward_that_raises_ends_the_run_with_its_cause(fit):
    *_, caught = fit(data=rewarded(raising), error=RewardError, match="raised KeyError")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_reward_that_hangs_ends_the_run_after_reward_timeout_s(fit, held):
    fit(data=rewarded(held, reward_timeout_s=0.5), error=RewardError, match=r"data\.reward_timeout_s must suffice .* 0\.5 s")


@pytest.mark.filterwarnings("ignore:A group is left out")
def test_a_reward_that_fails_at_times_is_survived_and_counted_where_that_is_asked_for(fit):
    calls = iter(range(10**6))

    def at_times(completion, example):
        return raising(completion, example) if next(calls) in (0, 5) else float(len(completion))

    module, data, _ = fit(data=rewarded(at_times, on_reward_error="skip"))
    assert module.policy_version == 3
    assert data.scorer.num_failed == 2
    failed = [row for row in data.pool.ledger.rows() if row.state == "failed"]
    assert [(row.reason, row.prompts) for row in failed] == [("reward", 2)]


@pytest.mark.filterwarnings("ignore:A group is left out")
def test_a_reward_that_hangs_at_times_is_survived_and_counted_where_that_is_asked_for(fit, held):
    calls = iter(range(10**6))

    def at_times(completion, example):
        if next(calls) == 2:
            held()
        return float(len(completion))

    module, data, _ = fit(data=rewarded(at_times, on_reward_error="skip", reward_timeout_s=0.5))
    assert module.policy_version == 3
    failed = [row for row in data.pool.ledger.rows() if row.state == "failed"]
    assert [(row.reason, row.prompts) for row in failed] == [("reward", 1)]


def test_a_reward_that_leaks_is_survived_and_its_memory_is_seen(fit):
    from lit_asyncrl.callbacks.report import _memory_mib

    leaked: list[bytearray] = []
    before = _memory_mib()
    module, *_ = fit(data=rewarded(lambda *_: leaked.append(bytearray(b"x") * 2**21) or float(len(leaked))))
    assert module.policy_version == 3
    assert _memory_mib() - before > len(leaked)  # 2 MiB each, half of it asked for


# ------------------------------------------------------------------ prompts


class Task(ReverseDigits):
    """Whose examples do what a function says, from one index of one split on."""

    def __init__(self, action, split="train", after=4) -> None:
        super().__init__(3, 5, rewards=[LongAnswer()])
        self._action, self._split, self._after, self._armed, self._given = action, split, after, False, 0

    def arm(self):
        """The checks before the run read examples too."""
        self._armed = True

    def train_example(self, index):
        return self._do("train", super().train_example(index))

    def heldout_example(self, index):
        return self._do("heldout", super().heldout_example(index))

    def _do(self, split, example):
        if self._armed and split == self._split:
            self._given += 1
            if self._given > self._after:
                self._action()
        return example


class Arm(pl.Callback):
    """Let the task's fault come: the run has begun."""

    def __init__(self, task) -> None:
        self._task = task

    def on_fit_start(self, *_):
        self._task.arm()


def test_a_task_that_raises_ends_the_run_with_its_own_error(fit):
    def broken():
        raise ZeroDivisionError("in the task")

    task = Task(broken)
    *_, caught = fit(data={"task": task}, callbacks=[Arm(task)], error=ZeroDivisionError, match="in the task")
    assert "Raised in lit-asyncrl's rollout dispatcher." in caught.value.__notes__


@pytest.mark.slow
def test_a_task_that_blocks_is_a_stall_that_names_its_line(fit, held):
    task = Task(held)
    fit(
        data={"task": task},
        callbacks=[Arm(task)],
        rollout={"stall_timeout_s": 1.5, "sync_timeout_s": 1.0, "grace_s": 0.5},
        error=StallError,
        match=r"no sign of life of the rollout dispatcher .*test_faults\.py:\d+ in <lambda>",
    )


def test_a_task_that_blocks_the_trainer_is_a_stall_that_names_its_line(fit, held):
    task = Task(held, "heldout", after=0)
    fit(
        data={"task": task},
        callbacks=[Arm(task)],
        rollout={"stall_timeout_s": 1.5, "sync_timeout_s": 1.0, "grace_s": 0.5, "evaluate_first": True},
        error=StallError,
        match=r"no progress .*test_faults\.py",
    )


@pytest.mark.filterwarnings("ignore:The prompts have ended")
def test_prompts_that_end_end_the_run_without_an_error(fit):
    class Short(ReverseDigits):
        num_train = 6  # prompts: three batches of 2

    module, *_ = fit(data={"task": Short(3, 5, rewards=[LongAnswer()]), "max_prompt_epochs": 1}, max_steps=100)
    assert module.policy_version == 3


# ------------------------------------------------------------------ the update


class Gradients(pl.Callback):
    """Gradients that are not finite, in the updates with these numbers."""

    def __init__(self, value: float, updates) -> None:
        self._value, self._updates, self._update = value, updates, -1

    def on_train_batch_start(self, trainer, pl_module, *_):
        self._update += 1
        if not hasattr(self, "_hook"):
            self._hook = next(pl_module.parameters()).register_hook(self._spoil)

    def _spoil(self, gradient):
        return torch.full_like(gradient, self._value) if self._update in self._updates else gradient


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["NaN", "infinite"])
def test_a_gradient_that_is_not_finite_is_a_counted_skip(fit, value):
    module, data, _ = fit(
        module={"advantage": LeaveOneOut()},
        callbacks=[Gradients(value, {1})],
        max_steps=-1,
        max_epochs=1,
        data={"updates_per_epoch": 4},
    )
    assert (module.policy_version, module.num_skipped) == (3, 1)  # 4 batches, of which one is skipped
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert [row.prompts for row in data.pool.ledger.rows() if row.reason == "skipped_update"] == [2]


def test_gradients_that_stay_not_finite_end_the_run(fit):
    fit(
        module={"advantage": LeaveOneOut()},
        callbacks=[Gradients(float("nan"), range(1, 10**6))],
        max_steps=100,
        error=AsyncRLError,
        match="11 updates in a row were skipped",
    )


def test_weights_that_are_not_finite_end_the_run(fit):
    class Spoil(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, *_):
            with torch.no_grad():
                next(pl_module.parameters()).fill_(float("nan"))

    fit(callbacks=[Spoil()], error=AsyncRLError, data={"data_timeout_s": 5.0})


# ------------------------------------------------------------------ saving


class FullDisk(pl.Callback):
    """No file may grow beyond so many bytes while a checkpoint is written."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def on_save_checkpoint(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._max_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def file_limit():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_ends_the_run_and_keeps_the_checkpoint_before(fit, tmp_path, file_limit):
    class Later(FullDisk):
        def on_save_checkpoint(self, trainer, *_):
            if trainer.global_step > 1:
                super().on_save_checkpoint()

    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=0, save_last=True)
    fit(callbacks=[Later(4096), saver], enable_checkpointing=True, error=(AsyncRLError, OSError, RuntimeError))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["lit_asyncrl"]["policy_version"] == 1


def test_a_folder_that_cannot_be_written_any_more_ends_the_run_with_its_name(fit, tmp_path):
    class Lost(pl.Callback):
        """The folder's name is taken by a file: what a removed mount looks like, to root too."""

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                (tmp_path / "checkpoints").touch()

    saver = ModelCheckpoint(dirpath=tmp_path / "checkpoints", every_n_train_steps=1)
    fit(callbacks=[Lost(), saver], enable_checkpointing=True, error=(AsyncRLError, OSError), match="checkpoints")


def test_the_cause_is_not_hidden_by_what_follows_from_it(fit):
    """The first fault wins: the reward's, not the trainer's wait that ends because of it."""
    *_, caught = fit(data=rewarded(raising), error=RewardError)
    assert [note.partition(" rollout ")[0] for note in caught.value.__notes__] == ["Raised in lit-asyncrl's"]
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert (frames[-1].name, Path(frames[-1].filename).name) == ("raising", Path(__file__).name)
