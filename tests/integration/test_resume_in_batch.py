"""Several updates of one batch: a run that ends between two of them goes on to the weights of the unbroken one."""

from __future__ import annotations

import os
import signal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from policies import save_policy
from runs import inline_rollout, make_data, make_module, make_trainer

from lit_asyncrl.algorithm.advantages import GroupMean
from lit_asyncrl.checkpoints import read_checkpoint

UPDATES = 8


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class EndAt(pl.Callback):
    """Ends the run before an update, by SIGTERM or by a fault; an odd one of two a batch is the second of its batch."""

    def __init__(self, update: int, *, by_signal: bool) -> None:
        self.update = update
        self.by_signal = by_signal

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if pl_module.policy_version == self.update:
            if not self.by_signal:
                raise ZeroDivisionError("between two updates")
            os.kill(os.getpid(), signal.SIGTERM)


def fit(policy, folder, *callbacks, ckpt_path=None):
    """Four batches of two groups and two updates each, one batch at a time."""
    saver = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)
    module = make_module(policy, updates_per_batch=2, advantage=GroupMean())
    data = make_data(max_policy_age=None, capacity_groups=2)
    trainer = make_trainer(folder, [inline_rollout(), *callbacks, saver], max_steps=UPDATES, enable_checkpointing=True)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, data


@pytest.fixture(scope="module")
def unbroken(policy, tmp_path_factory):
    module, _ = fit(policy, tmp_path_factory.mktemp("unbroken"))
    assert module.policy_version == UPDATES
    return list(module.parameters())


def assert_goes_on(policy, folder, unbroken):
    module, data = fit(policy, folder / "resumed", ckpt_path=str(folder / "last.ckpt"))
    assert module.policy_version == UPDATES
    ledger = data.pool.ledger
    assert ledger.count("trained") == UPDATES == sum(row.prompts for row in ledger.rows())  # 8 groups, each once
    for a, b in zip(unbroken, module.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("update", [2, 3])
def test_a_signal_lets_the_batch_end_and_nothing_is_trained_twice(policy, tmp_path, unbroken, update):
    fit(policy, tmp_path, EndAt(update, by_signal=True))
    assert read_checkpoint(str(tmp_path / "last.ckpt"))["lit_asyncrl"]["policy_version"] == 4
    assert_goes_on(policy, tmp_path, unbroken)


@pytest.mark.parametrize("update", [4, 5])
def test_a_fault_leaves_the_checkpoint_before_the_batch(policy, tmp_path, unbroken, update):
    with pytest.raises(ZeroDivisionError):
        fit(policy, tmp_path, EndAt(update, by_signal=False))
    assert read_checkpoint(str(tmp_path / "last.ckpt"))["lit_asyncrl"]["policy_version"] == 4
    assert_goes_on(policy, tmp_path, unbroken)
