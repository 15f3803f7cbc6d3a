"""GradientAlignmentControl in training runs: order of the controls, skips, the schedule, checkpoints and resuming."""

from __future__ import annotations

import json
import math

import lightning.pytorch as pl
import pytest
import torch
from policies import save_policy
from runs import inline_rollout, make_data, make_module, make_trainer
from torch import Tensor

from lit_asyncrl.callbacks import EssLrScale, GradientAlignmentControl
from lit_asyncrl.module import PolicyModule

BASE = 0.1
DECAY = 0.9


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class Aligned(pl.Callback):
    """Gives each update the gradient that a plan names: one fixed direction, another at right angles, or `c`, between both."""

    def __init__(self, plan: str) -> None:
        self.plan = iter(plan)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        letter = next(self.plan)
        for parameter in pl_module.parameters():
            half = parameter.numel() // 2
            values = torch.zeros(parameter.numel())
            values[:half] = float(letter in "ac")
            values[half : 2 * half] = float(letter in "bc")
            parameter.grad = values.view_as(parameter)


class RecordingSGD(torch.optim.SGD):
    """Plain SGD that notes rate and gradient of each step."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.rates: list[float] = []
        self.gradients: list[Tensor | None] = []

    def step(self, closure=None):
        closure()  # where Lightning calls the hooks
        self.rates.append(self.param_groups[0]["lr"])
        gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.gradients.append(torch.cat(gradients) if gradients else None)
        return super().step()


class LowEss(pl.Callback):
    """Weights 1, 1, 4: ESS ratio 2/3."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.step.log_weights = torch.tensor([0.0, 0.0, math.log(4.0)])


class Watch(pl.Callback):
    """Notes version, rate, checkpointed rate and a fingerprint of the weights after each update."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.rates: list[float] = []
        self.saved: list[float] = []
        self.weights: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        optimizer = trainer.optimizers[0]
        self.versions.append(pl_module.policy_version)
        self.rates.append(optimizer.param_groups[0]["lr"])
        saved = trainer._checkpoint_connector.dump_checkpoint()["optimizer_states"][0]["param_groups"][0]
        assert set(saved) == set(optimizer.param_groups[0])
        self.saved.append(saved["lr"])
        self.weights.append(float(sum(p.detach().double().abs().sum() for p in pl_module.parameters())))


def run(policy, folder, plan: str, controls: list[pl.Callback], **arguments) -> tuple[RecordingSGD, Watch, PolicyModule]:
    optimizers: list[RecordingSGD] = []

    def make_optimizer(params):
        optimizers.append(RecordingSGD(params, BASE))
        return optimizers[-1]

    module = make_module(
        policy,
        optimizer=make_optimizer,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY),
        **arguments,
    )
    watch = Watch()
    callbacks = [inline_rollout(), Aligned(plan), LowEss(), *controls, watch]
    make_trainer(folder, callbacks, max_steps=len(plan)).fit(module, make_data())
    return optimizers[0], watch, module


TWENTY = "abababbabababaababab"
"""Repeated letters are aligned with the one before: updates 6 and 14 (from 0) are skipped."""

SKIPS = (6, 14)


@pytest.fixture(scope="module", params=["gac first", "ess first"])
def twenty_updates(request, policy, tmp_path_factory):
    gac, ess = GradientAlignmentControl((0.2, 0.5)), EssLrScale()
    controls: list[pl.Callback] = [gac, ess] if request.param == "gac first" else [ess, gac]
    return run(policy, tmp_path_factory.mktemp("run"), TWENTY, controls)


def test_a_skip_raises_no_policy_version(twenty_updates):
    _, watch, module = twenty_updates
    assert watch.versions == [t + 1 - sum(s <= t for s in SKIPS) for t in range(20)]
    assert (module.policy_version, module.num_skipped) == (18, 2)


def test_a_skip_changes_no_weight(twenty_updates):
    _, watch, _ = twenty_updates
    same = tuple(t for t in range(1, 20) if watch.weights[t] == watch.weights[t - 1])
    assert same == SKIPS


def test_a_skip_does_not_advance_the_schedule_and_the_rate_is_restored_before_it(twenty_updates):
    _, watch, _ = twenty_updates
    assert watch.rates == pytest.approx([BASE * DECAY**version for version in watch.versions], rel=1e-9)


def test_every_checkpoint_holds_the_base_rate(twenty_updates):
    _, watch, _ = twenty_updates
    assert watch.saved == watch.rates


def test_each_step_uses_the_scheduled_rate_times_the_scale(twenty_updates):
    optimizer, watch, _ = twenty_updates
    before = [0, *watch.versions[:-1]]
    # ESS ratio 2/3, square-root rule: sqrt(2/3) = .81650
    assert optimizer.rates == pytest.approx([BASE * DECAY**v * math.sqrt(2 / 3) for v in before], rel=1e-6)


@pytest.mark.parametrize("gac_first", [True, False])
def test_projection_comes_before_the_clip_and_the_clip_before_the_scaled_step(policy, tmp_path, gac_first):
    gac, ess = GradientAlignmentControl((0.2, 1.0)), EssLrScale()
    optimizer, _, module = run(policy, tmp_path, "ac", [gac, ess] if gac_first else [ess, gac], max_grad_norm=1e-3)
    assert module.step.metrics["control/gradient_cosine"] == pytest.approx(math.sqrt(0.5), rel=1e-4)
    first, second = optimizer.gradients
    # beta = .2 / .7071 sqrt(.5 / .96) = .2041, so the norm falls to sqrt(.2041^2 * .5 + .5) = .722 of itself. A clip before that
    # would leave .722e-3.
    assert float(second.norm()) == pytest.approx(1e-3, rel=1e-3)
    assert float(torch.cosine_similarity(first, second, dim=0)) == pytest.approx(0.2, rel=1e-4)
    assert optimizer.rates == pytest.approx([BASE * math.sqrt(2 / 3), BASE * DECAY * math.sqrt(2 / 3)])


def test_the_control_sees_real_gradients_of_several_updates(policy, tmp_path):
    control = GradientAlignmentControl(observe_only=True)
    trainer = make_trainer(tmp_path, [inline_rollout(), control], max_steps=3)
    trainer.fit(make_module(policy), make_data())
    cosines = control.state_dict()["cosines"]
    assert len(cosines) == 2
    assert all(0 < abs(c) <= 1 for c in cosines)


def test_a_run_leaves_a_record_that_another_is_calibrated_by(policy, tmp_path):
    control = GradientAlignmentControl(observe_only=True)
    trainer = make_trainer(tmp_path, [inline_rollout(), control], max_steps=5)
    trainer.fit(make_module(policy), make_data())
    record = tmp_path / "gradient_alignment.json"
    assert json.loads(record.read_text(encoding="utf-8"))["cosines"] == control.state_dict()["cosines"]
    other = GradientAlignmentControl(str(record))
    other.setup(trainer, trainer.lightning_module, "fit")
    low, high = other.thresholds
    assert 0 <= low <= high


def test_the_state_survives_a_checkpoint_file(policy, tmp_path):
    control = GradientAlignmentControl()
    trainer = make_trainer(tmp_path, [inline_rollout(), control], max_steps=2)
    trainer.fit(make_module(policy), make_data())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = GradientAlignmentControl()
    again = make_trainer(tmp_path, [inline_rollout(), resumed], max_steps=4)
    again.fit(make_module(policy), make_data(), ckpt_path=str(tmp_path / "last.ckpt"), weights_only=True)
    assert len(resumed.state_dict()["cosines"]) == 3  # of updates 2, 3 and 4: the third was compared with the second
