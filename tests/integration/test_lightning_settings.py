"""Lightning's settings: what cannot do here what it says is refused before anything starts; the end of the data is no fault."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from policies import save_policy
from runs import LongAnswer, inline_rollout, make_data, make_module, make_trainer

from lit_asyncrl.callbacks import RunReport
from lit_asyncrl.cli import join_rollouts
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
    ("last", "step", "every", "due"), [(0, 1, 1, True), (2, 4, 3, True), (3, 5, 3, False), (5, 9, 3, True), (4, 4, 2, True)]
)
def test_a_batch_of_several_updates_passes_over_no_report(last, step, every, due):
    report = RunReport()
    report._last_step = last
    assert report._is_due(step, every) is due


def test_one_callback_may_be_given_without_a_list():
    rollout = Namespace(class_path="lit_asyncrl.callbacks.AsyncRollout", init_args=Namespace())
    assert join_rollouts(rollout) == [rollout]
    assert join_rollouts(None) is None
