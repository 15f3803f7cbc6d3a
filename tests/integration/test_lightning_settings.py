"""Lightning's settings: what cannot do here what it says is refused before anything starts; the end of the data is no fault."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from policies import save_policy
from runs import LongAnswer, inline_rollout, make_data, make_module, make_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_asyncrl.callbacks import RunReport
from lit_asyncrl.cli import join_rollouts
from lit_asyncrl.datamodule import RolloutDataModule
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.tasks.digits import ReverseDigits


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize(
    ("callbacks", "arguments", "words"),
    [
        ([], {"overfit_batches": 1}, "trainer.overfit_batches must be left out, got 1"),
        ([], {"limit_val_batches": 0.5}, "trainer.limit_val_batches must be 0, 1.0 or a number of held-out sets, got 0.5"),
        (
            [],
            {"val_check_interval": 101, "check_val_every_n_epoch": 1},
            "trainer.val_check_interval must be at most data.updates_per_epoch, 100 updates, got 101",
        ),
        ([EMAWeightAveraging()], {}, "must not hold EMAWeightAveraging"),
        ([StochasticWeightAveraging(1e-3)], {}, "must not hold StochasticWeightAveraging"),
        ([ModelCheckpoint(train_time_interval=timedelta(seconds=1))], {}, "train_time_interval must be left out, got 0:00:01"),
    ],
)
def test_a_setting_that_cannot_do_what_it_says_is_refused(policy, tmp_path, callbacks, arguments, words):
    rollout = inline_rollout()
    arguments = {"enable_checkpointing": True, "limit_val_batches": 1.0} | arguments
    with pytest.raises(ConfigurationError, match=words.replace(".", r"\.")):
        make_trainer(tmp_path, [rollout, *callbacks], **arguments).fit(make_module(policy), make_data())
    assert rollout._parts is None  # nothing was started


def test_a_scheduler_that_needs_a_metric_is_refused(policy, tmp_path):
    module = make_module(policy, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ConfigurationError, match=r"model\.lr_scheduler must be .* got ReduceLROnPlateau"):
        make_trainer(tmp_path, [inline_rollout()]).fit(module, make_data())


def test_early_stopping_is_no_fault_where_the_prompts_end_before_the_first_evaluation(policy, tmp_path):
    stopper = EarlyStopping("val/heldout/accuracy", mode="max")
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1000, save_last=True)
    task = ReverseDigits(3, 5, rewards=[LongAnswer()], num_train=12)
    data = make_data(updates_per_epoch=10**6, max_prompt_epochs=1, task=task)
    arguments = {"val_check_interval": 1.0, "check_val_every_n_epoch": 1, "limit_val_batches": 1.0, "enable_checkpointing": True}
    module = make_module(policy)
    make_trainer(tmp_path, [inline_rollout(), stopper, saver], max_steps=10**6, min_steps=10**5, **arguments).fit(module, data)
    assert 0 < module.policy_version < 100
    assert (tmp_path / "last.ckpt").exists()


def test_a_fast_run_for_development_leaves_the_checkpoint_that_is_there(policy, tmp_path):
    (tmp_path / "last.ckpt").write_bytes(b"precious")
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    make_trainer(tmp_path, [inline_rollout(), saver], enable_checkpointing=True, fast_dev_run=2).fit(
        make_module(policy), make_data()
    )
    assert (tmp_path / "last.ckpt").read_bytes() == b"precious"


def test_zero_means_never_in_the_report(policy, tmp_path):
    report = RunReport(histograms_every=0, samples_every=0)
    make_trainer(tmp_path, [inline_rollout(), report], log_every_n_steps=0).fit(make_module(policy), make_data())
    assert report.summary["policy_version"] == 2


@pytest.mark.parametrize(
    ("before", "step", "every", "reached"),
    [(0, 1, 1, True), (2, 4, 3, True), (3, 5, 3, False), (5, 9, 3, True), (4, 4, 2, True), (0, 4, 0, False)],
)
def test_a_multiple_of_updates_is_reached_within_a_batch(policy, before, step, every, reached):
    module = make_module(policy)
    module._step_before, module._trainer = before, SimpleNamespace(global_step=step)
    assert module.reached(every) is reached


def test_one_callback_may_be_given_without_a_list():
    rollout = Namespace(class_path="lit_asyncrl.callbacks.AsyncRollout", init_args=Namespace())
    assert join_rollouts(rollout) == [rollout]
    assert join_rollouts(None) is None


# ------------------------------------------------------------------ several updates a batch, and batches that are left out


@pytest.mark.parametrize(("updates_per_batch", "saved"), [(1, [4, 8, 12]), (2, [4, 8, 12]), (3, [6, 9, 12])])
def test_a_model_checkpoint_passes_over_no_interval(policy, tmp_path, updates_per_batch, saved):
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    module = make_module(policy, updates_per_batch=updates_per_batch)
    data = make_data(batch_groups=6, max_policy_age=2)
    make_trainer(tmp_path, [inline_rollout(), saver], max_steps=12, enable_checkpointing=True).fit(module, data)
    steps = sorted(int(path.stem.removeprefix("step=")) for path in tmp_path.glob("step=*.ckpt"))
    assert steps == saved


class NaNReward(pl.Callback):
    """Makes one of the second batch's updates impossible."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            batch.micro_batches[0].rewards[0] = float("nan")


def test_evaluations_and_updates_have_one_axis(policy, tmp_path):
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    callbacks = [inline_rollout(), RunReport(), NaNReward()]
    module = make_module(policy, updates_per_batch=2)
    data = make_data(batch_groups=4, max_policy_age=2)
    arguments = {"logger": logger, "val_check_interval": 2, "limit_val_batches": 1.0}
    make_trainer(tmp_path, callbacks, max_steps=9, **arguments).fit(module, data)
    assert module.num_skipped == 1
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    evaluated = [point.step for point in events.Scalars("val/heldout/accuracy")]
    assert set(evaluated) <= {point.step for point in events.Scalars("reward/mean")}
    assert evaluated == sorted(set(evaluated))


def test_a_batch_that_a_module_leaves_out_is_a_skipped_one(policy, tmp_path):
    module, data = make_module(policy), make_data(updates_per_epoch=3, data_timeout_s=60.0)
    module.on_train_batch_start = lambda batch, batch_idx: -1 if (module.current_epoch, batch_idx) == (0, 1) else None
    make_trainer(tmp_path, [inline_rollout()], max_steps=4).fit(module, data)
    assert module.policy_version == 4
    assert data.pool.ledger.count("dropped", "skipped_update") == 2


def test_another_class_of_datamodule_begins_its_prompts_anew_with_a_warning(policy, tmp_path):
    class Mine(RolloutDataModule):
        pass

    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1000, save_last=True)
    make_trainer(tmp_path, [inline_rollout(), saver], enable_checkpointing=True).fit(make_module(policy), make_data())
    data = make_data()
    mine = Mine(
        task=data.task, batch_groups=2, group_size=2, sampling=data.sampling, max_policy_age=0, evaluation=data.evaluation
    )
    with pytest.warns(UserWarning, match=r"no state of .*Mine.*: prompts and pool begin anew"):
        make_trainer(tmp_path, [inline_rollout()], max_steps=3).fit(
            make_module(policy), mine, ckpt_path=str(tmp_path / "last.ckpt")
        )
