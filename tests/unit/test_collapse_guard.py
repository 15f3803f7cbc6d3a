"""CollapseGuard: when it alarms, what it says, and what it does about it."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from policies import save_policy
from runs import inline_rollout, make_data, make_module, make_trainer

from lit_asyncrl.callbacks import CollapseGuard, EssLrScale
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.module import PolicyModule
from lit_asyncrl.types import StepStats

LOW = (20.0, *[0.0] * 49)
"""Log-weights of 50 trajectories, one of which outweighs the others: ESS ratio 1 / 50 = .02."""

HIGH = (0.0, 0.0)


class Guarded:
    """A guard and what Lightning would give it."""

    def __init__(self, **arguments) -> None:
        self.guard = CollapseGuard(**({"num_updates": 2} | arguments))
        self.module = PolicyModule()
        self.trainer = SimpleNamespace(
            should_stop=False, sanity_checking=False, callback_metrics={}, state=SimpleNamespace(fn="fit")
        )

    def update(self, log_weights, reward: float) -> None:
        self.module.step = StepStats(torch.tensor(log_weights), 0.0, 0.0)
        batch = SimpleNamespace(stats={"reward/mean": reward})
        self.guard.on_train_batch_end(self.trainer, self.module, None, batch, 0)

    def updates(self, *pairs) -> list[int]:
        """Alarms so far after each pair of log-weights and reward."""
        alarms = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for log_weights, reward in pairs:
                self.update(log_weights, reward)
                alarms.append(self.guard.num_alarms)
        return alarms

    def evaluate(self, accuracy: float) -> None:
        self.trainer.callback_metrics["val/heldout/accuracy"] = torch.tensor(accuracy)
        self.guard.on_validation_end(self.trainer, self.module)


def test_low_ess_with_falling_reward_alarms_after_the_number_of_updates():
    # Means of two rewards: 1, 1, .7, .4: below .9 from the third on, while the ESS ratio is low for two updates at the fourth.
    assert Guarded().updates((HIGH, 1.0), (HIGH, 1.0), (HIGH, 1.0), (LOW, 0.4), (LOW, 0.4)) == [0, 0, 0, 0, 1]


def test_low_ess_with_a_steady_reward_is_no_alarm():
    assert Guarded().updates(*[(LOW, 1.0)] * 6)[-1] == 0


def test_a_falling_reward_with_high_ess_is_no_alarm():
    assert Guarded().updates((HIGH, 1.0), (HIGH, 1.0), *[(HIGH, 0.1)] * 6)[-1] == 0


def test_one_high_ratio_between_low_ones_starts_the_count_again():
    rewards = [(HIGH, 1.0), (HIGH, 1.0)]
    assert Guarded().updates(*rewards, (LOW, 0.1), (HIGH, 0.1), (LOW, 0.1), (HIGH, 0.1))[-1] == 0


def test_a_loss_within_the_margin_is_no_alarm():
    assert Guarded(min_drop=0.5).updates((HIGH, 1.0), (HIGH, 1.0), *[(LOW, 0.6)] * 4)[-1] == 0
    assert Guarded(min_drop=0.5).updates((HIGH, 1.0), (HIGH, 1.0), *[(LOW, 0.4)] * 4)[-1] >= 1


def test_the_margin_is_a_share_of_a_negative_reward_too():
    # best -1, margin .1 * 1: -1.05 is within it, -1.2 is not
    assert Guarded().updates((HIGH, -1.0), (HIGH, -1.0), *[(LOW, -1.05)] * 4)[-1] == 0
    assert Guarded().updates((HIGH, -1.0), (HIGH, -1.0), *[(LOW, -1.2)] * 4)[-1] >= 1


def test_the_next_alarm_needs_as_many_low_ratios_again():
    assert Guarded().updates((HIGH, 1.0), (HIGH, 1.0), *[(LOW, 0.1)] * 4)[2:] == [0, 1, 1, 2]


def test_a_falling_evaluation_counts_as_well_as_the_reward():
    guarded = Guarded()
    guarded.evaluate(0.8)
    guarded.evaluate(0.5)
    with pytest.warns(UserWarning, match=r"val/heldout/accuracy has fallen from 0\.8 to 0\.5"):
        for _ in range(2):
            guarded.update(LOW, 1.0)


@pytest.mark.parametrize(("fn", "broken_off"), [("validate", False), ("fit", True)])
def test_evaluations_outside_of_training_and_broken_off_ones_do_not_count(fn, broken_off):
    guarded = Guarded()
    guarded.trainer.state.fn, guarded.trainer.sanity_checking = fn, broken_off
    guarded.evaluate(0.8)
    guarded.evaluate(0.5)
    assert guarded.updates(*[(LOW, 1.0)] * 3)[-1] == 0


def test_an_update_without_trajectories_is_not_looked_at():
    guarded = Guarded()
    assert guarded.updates((HIGH, 1.0), (HIGH, 1.0), ((), 0.0), ((), 0.0), ((), 0.0))[-1] == 0
    assert guarded.updates((HIGH, 1.0), (LOW, 1.0), (LOW, 1.0))[-1] == 0  # no reward of theirs is in the mean


def alarm(guarded: Guarded, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        for log_weights, reward in ((HIGH, 1.0), (HIGH, 1.0), (LOW, 0.1), (LOW, 0.1)):
            guarded.update(log_weights, reward)


def test_the_alarm_says_what_happened_and_what_to_do():
    guarded = Guarded()
    guarded.module.policy_version = 7
    alarm(
        guarded,
        r"policy_version 7 the ESS ratio \(0\.02\) has been under 0\.05 for 2 updates, and the mean reward has fallen from 1 to "
        r"0\.1: the policy is collapsing\. Training goes on unchanged\. Lower data\.max_policy_age",
    )
    assert guarded.trainer.should_stop is False


def test_stop_ends_training():
    guarded = Guarded(action="stop")
    alarm(guarded, "Training stops here")
    assert guarded.trainer.should_stop is True


def test_lower_lr_scales_the_rate_of_later_steps():
    guarded = Guarded(action="lower_lr", lr_factor=0.25)
    alarm(guarded, r"multiplied by 0\.25 from the next update on")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    guarded.guard.on_before_optimizer_step(guarded.trainer, guarded.module, optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert guarded.module.step.metrics == {"control/guard_lr_scale": 0.25, "control/collapse_alarms": 1.0}


def test_a_restored_guard_goes_on_where_it_was():
    pairs = [(HIGH, 1.0), (HIGH, 1.0), (LOW, 0.1), (LOW, 0.1), (LOW, 0.1), (LOW, 0.1)]
    whole, first, second = (Guarded(action="lower_lr") for _ in range(3))
    expected = whole.updates(*pairs)
    half = first.updates(*pairs[:3])
    second.guard.load_state_dict(first.guard.state_dict())
    assert half + second.updates(*pairs[3:]) == expected
    assert second.guard.state_dict() == whole.guard.state_dict()


@pytest.mark.parametrize(
    "arguments",
    [
        {"ess_threshold": 0.0},
        {"ess_threshold": 1.0},
        {"num_updates": 0},
        {"min_drop": -0.1},
        {"min_drop": math.nan},
        {"lr_factor": 0.0},
        {"lr_factor": 1.0},
        {"action": "pray"},
    ],
)
def test_impossible_arguments_are_refused(arguments):
    with pytest.raises(ConfigurationError, match=f"CollapseGuard.{next(iter(arguments))}"):
        CollapseGuard(**arguments)


def test_in_a_run_the_lowered_rate_joins_the_ess_scale_and_the_base_rate_is_restored(tmp_path):
    guard, ess = CollapseGuard(action="lower_lr"), EssLrScale()
    guard.rate_scale = 0.5
    module = make_module(save_policy(tmp_path / "policy"))
    trainer = make_trainer(tmp_path, [inline_rollout(), guard, ess], max_steps=2)
    seen: list[float] = []
    make = module.make_optimizer

    def recorded(params):
        optimizer = make(params)
        optimizer.register_step_post_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
        return optimizer

    module.make_optimizer = recorded
    trainer.fit(module, make_data())
    # The hook above was registered first, before those that restore: 1e-3 * .5 * sqrt(ESS ratio, nearly 1).
    assert seen == pytest.approx([5e-4, 5e-4], rel=1e-3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-3
