"""EssLrScale: this step's rate is scaled, and nothing else ever sees the scaled rate."""

from __future__ import annotations

import math
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from policies import save_policy
from runs import inline_rollout, make_data, make_module, make_trainer

from lit_asyncrl.callbacks import EssLrScale
from lit_asyncrl.callbacks.step_rate import StepRateCallback, scale_rate
from lit_asyncrl.errors import ConfigurationError

BASE = 0.1
DECAY = 0.9


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class RecordingSGD(torch.optim.SGD):
    """Plain SGD that notes the rate each step used."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.used: list[float] = []

    def step(self, closure=None):
        if closure is not None:
            closure()  # where Lightning calls the hooks
        self.used.append(self.param_groups[0]["lr"])
        return super().step()


class FixedEss(pl.Callback):
    """Gives every update the weights 1, 1 and 4, whose ESS ratio is 2/3, before EssLrScale reads them."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.step.log_weights = torch.tensor([0.0, 0.0, math.log(4.0)])


class Watch(pl.Callback):
    """Notes rate and checkpointed rate after each update, and the scale."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.saved: list[float] = []
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.saved.append(trainer._checkpoint_connector.dump_checkpoint()["optimizer_states"][0]["param_groups"][0]["lr"])
        self.scales.append(pl_module.step.lr_scale)


@pytest.fixture(scope="module")
def twenty_updates(policy, tmp_path_factory):
    optimizers: list[RecordingSGD] = []

    def make_optimizer(params):
        optimizers.append(RecordingSGD(params, lr=BASE))
        return optimizers[-1]

    module = make_module(
        policy,
        optimizer=make_optimizer,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY),
    )
    watch, scale = Watch(), EssLrScale()
    trainer = make_trainer(tmp_path_factory.mktemp("run"), [inline_rollout(), FixedEss(), scale, watch], max_steps=20)
    trainer.fit(module, make_data())
    return optimizers[0], watch, scale


def test_each_of_20_updates_uses_the_scheduled_rate_times_the_scale(twenty_updates):
    optimizer, _, _ = twenty_updates
    # ESS ratio 2/3 and the square-root rule: sqrt(2/3) = 0.81650
    expected = [BASE * DECAY**t * math.sqrt(2 / 3) for t in range(20)]
    assert optimizer.used == pytest.approx(expected, rel=1e-6)


def test_the_schedule_is_that_of_an_unscaled_run(twenty_updates):
    _, watch, _ = twenty_updates
    assert watch.rates == pytest.approx([BASE * DECAY ** (t + 1) for t in range(20)], rel=1e-9)


def test_no_checkpoint_holds_the_scaled_rate(twenty_updates):
    _, watch, _ = twenty_updates
    assert watch.saved == watch.rates


def test_the_scale_is_reported(twenty_updates):
    _, watch, _ = twenty_updates
    assert watch.scales == pytest.approx([math.sqrt(2 / 3)] * 20)


def test_the_hook_is_gone_after_the_run(twenty_updates):
    optimizer, _, scale = twenty_updates
    assert not optimizer._optimizer_step_post_hooks
    assert scale.state_dict() == {}


@pytest.mark.parametrize("arguments", [{"reference_ratio": 0.0}, {"reference_ratio": 1.5}, {"floor": -0.1}, {"floor": 2.0}])
def test_impossible_arguments_are_refused(arguments):
    with pytest.raises(ConfigurationError, match=f"EssLrScale.{next(iter(arguments))}"):
        EssLrScale(**arguments)


def test_all_impossible_arguments_are_told_at_once():
    with pytest.raises(ConfigurationError, match=r"reference_ratio.*floor.*rule"):
        EssLrScale(reference_ratio=2.0, floor=-1.0, rule="cube")


def test_a_second_one_is_refused(policy, tmp_path):
    trainer = make_trainer(tmp_path, [inline_rollout(), EssLrScale(), EssLrScale()])
    with pytest.raises(ConfigurationError, match="one EssLrScale at most, got 2"):
        trainer.fit(make_module(policy), make_data())


def step(optimizer, *scales: float) -> float:
    """One step under these scales; returns the rate that it used."""
    for scale in scales:
        scale_rate(optimizer, scale)
    optimizer.step(lambda: None)
    return optimizer.used[-1]


def test_several_scales_multiply_and_the_base_rate_comes_back():
    optimizer = RecordingSGD([torch.nn.Parameter(torch.zeros(1))], BASE)
    callbacks = [StepRateCallback(), StepRateCallback()]
    trainer = SimpleNamespace(optimizers=[optimizer])
    for callback in callbacks:
        callback.on_train_start(trainer, None)
    assert step(optimizer, 0.5, 0.4) == pytest.approx(BASE * 0.2)
    assert optimizer.param_groups[0]["lr"] == BASE
    assert step(optimizer) == BASE


def test_an_exception_within_a_step_leaves_the_base_rate():
    optimizer = RecordingSGD([torch.nn.Parameter(torch.zeros(1))], BASE)
    callback, trainer = StepRateCallback(), SimpleNamespace(optimizers=[optimizer])
    callback.on_train_start(trainer, None)
    scale_rate(optimizer, 0.5)
    callback.on_exception(trainer, None, RuntimeError())
    assert optimizer.param_groups[0]["lr"] == BASE
    assert not optimizer._optimizer_step_post_hooks
