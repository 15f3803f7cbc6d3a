"""Runs with the options of a user's config: precision, checkpointing, PACE, truncation, mixtures, monitored checkpoints."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from policies import save_policy
from runs import LongAnswer, inline_rollout, make_data, make_module, make_trainer

from lit_asyncrl.algorithm.advantages import OPOB, GroupMean
from lit_asyncrl.callbacks import EssLrScale, RunReport
from lit_asyncrl.errors import CheckpointError, ConfigurationError
from lit_asyncrl.evaluation import EvaluationSet
from lit_asyncrl.module import PolicyModule
from lit_asyncrl.policy import PolicyConfig
from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.tasks.digits import ReverseDigits, SortDigits
from lit_asyncrl.tasks.mixture import TaskMixture
from lit_asyncrl.types import SamplingParams


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def fit(folder, module, data=None, *callbacks, max_steps=3, ckpt_path=None, **trainer):
    data = data or make_data()
    made = make_trainer(folder, [inline_rollout(), EssLrScale(), *callbacks], max_steps=max_steps, **trainer)
    made.fit(module, data, ckpt_path=ckpt_path)
    return data, made


def test_mixed_precision_keeps_float32_weights(policy, tmp_path):
    module = make_module(policy, advantage=OPOB(score_norm="logit_proxy"))
    fit(tmp_path, module, precision="bf16-mixed", val_check_interval=1, limit_val_batches=1.0)
    assert module.policy_version == 3
    assert {p.dtype for p in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("callbacks", [[], [RunReport()]], ids=["no callback", "report alone"])
def test_training_without_the_rollout_callback_is_refused(policy, tmp_path, callbacks):
    with pytest.raises(ConfigurationError, match=r"trainer\.callbacks must hold AsyncRollout"):
        make_trainer(tmp_path, callbacks).fit(make_module(policy), make_data())


def test_lightning_s_defaults_work(policy, tmp_path):
    """Sanity check, validation at the end of each epoch, logger, checkpoints, progress bar and model summary."""
    module, report = make_module(policy), RunReport()
    trainer = pl.Trainer(accelerator="cpu", max_steps=5, default_root_dir=tmp_path, callbacks=[inline_rollout(), report])
    trainer.fit(module, make_data(updates_per_epoch=3))
    assert module.policy_version == 5
    assert [e["policy_version"] for e in report.summary["evaluations"]] == [3]


def test_a_fast_development_run_makes_one_update(policy, tmp_path):
    module = make_module(policy)
    callbacks = [inline_rollout(), RunReport()]
    trainer = pl.Trainer(accelerator="cpu", fast_dev_run=True, default_root_dir=tmp_path, callbacks=callbacks)
    trainer.fit(module, make_data())
    assert module.policy_version == 1


def test_gradient_checkpointing_gives_the_same_update(policy, tmp_path):
    modules = [
        PolicyModule(
            PolicyConfig(path=policy, gradient_checkpointing=checkpointing),
            advantage=GroupMean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
        for checkpointing in (False, True)
    ]
    for module in modules:
        fit(tmp_path, module, max_steps=1)
    for a, b in zip(*(m.parameters() for m in modules), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_exact_score_norms_refuse_gradient_checkpointing_with_a_remedy(policy, tmp_path):
    module = PolicyModule(PolicyConfig(path=policy, gradient_checkpointing=True))
    with pytest.raises(ConfigurationError, match="logit_proxy"):
        fit(tmp_path, module)


@pytest.mark.parametrize("score_norm", ["batched", "per_trajectory", "logit_proxy"])
def test_every_score_norm_trains(policy, tmp_path, score_norm):
    module = make_module(policy, advantage=OPOB(score_norm=score_norm))
    fit(tmp_path, module)
    assert module.policy_version == 3


def test_pace_trains_without_an_age_bound(policy, tmp_path):
    data = make_data(sampler=PaceSampler(), max_policy_age=None, capacity_groups=12)
    report = RunReport()
    fit(tmp_path, make_module(policy), data, report, max_steps=12)
    ledger = data.pool.ledger
    assert ledger.count("trained") == 24
    assert report.summary["groups_rejected"] == ledger.count("dropped", "rejected")
    assert sum(row.prompts for row in ledger.rows()) == ledger.num_dispatched


@pytest.mark.parametrize("truncated", ["mask", "drop"])
def test_truncated_responses_can_be_left_out(policy, tmp_path, truncated):
    # an untrained model ends a response with about 1/32 a token: most of 40 tokens do end
    data = make_data(truncated=truncated, group_size=4, sampling=SamplingParams(max_new_tokens=40))
    module = make_module(policy)
    fit(tmp_path, module, data)
    assert module.policy_version == 3


def test_a_mixture_trains_and_evaluates_each_task(policy, tmp_path):
    rewards = [LongAnswer()]
    mixture = TaskMixture([ReverseDigits(3, 5, rewards=rewards), SortDigits(3, 5, rewards=rewards)], weights=[1.0, 1.0])
    seen: set[str] = set()

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.update(sample["task"] for sample in batch.samples)

    fit(tmp_path, make_module(policy), make_data(task=mixture, batch_groups=1), Watch(), max_steps=6)
    assert seen == {"reverse_digits", "sort_digits"}


def test_a_held_out_set_may_have_a_task_of_its_own(policy, tmp_path):
    sets = {
        "heldout": EvaluationSet(num_prompts=2, final_num_prompts=2),
        "longer": EvaluationSet(num_prompts=2, final_num_prompts=2, task=ReverseDigits(6, 7, name="reverse_longer")),
    }
    trainer = make_trainer(tmp_path, [inline_rollout()], limit_val_batches=1.0)
    results = trainer.validate(make_module(policy), make_data(evaluation=sets))
    assert {key.split("/")[1] for result in results for key in result} == {"heldout", "longer"}


def test_two_tasks_of_one_name_are_refused(policy, tmp_path):
    sets = {"heldout": EvaluationSet(task=ReverseDigits(6, 7))}
    with pytest.raises(ConfigurationError, match="'reverse_digits' twice"):
        fit(tmp_path, make_module(policy), make_data(evaluation=sets))


def test_a_checkpoint_is_chosen_by_held_out_accuracy(policy, tmp_path):
    saver = ModelCheckpoint(dirpath=tmp_path, monitor="val/heldout/reward", mode="max", filename="best")
    fit(
        tmp_path,
        make_module(policy),
        None,
        saver,
        enable_checkpointing=True,
        val_check_interval=1,
        limit_val_batches=1.0,
    )
    assert saver.best_model_path == str(tmp_path / "best.ckpt")
    assert saver.best_model_score is not None


def test_a_checkpoint_with_more_groups_than_the_pool_holds_is_refused(policy, tmp_path):
    _, trainer = fit(tmp_path, make_module(policy), make_data(max_policy_age=5), max_steps=2)
    data = trainer.datamodule
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert len(data.pool) > 2
    with pytest.raises(CheckpointError, match=r"data\.max_policy_age"):
        fit(tmp_path, make_module(policy), make_data(max_policy_age=0), ckpt_path=str(tmp_path / "run.ckpt"))


def test_a_foreign_checkpoint_is_refused_on_resume(policy, tmp_path):
    module = make_module(policy)
    _, trainer = fit(tmp_path, module, max_steps=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    content = torch.load(tmp_path / "run.ckpt", weights_only=True)
    del content["lit_asyncrl"]
    torch.save(content, tmp_path / "foreign.ckpt")
    with pytest.raises(CheckpointError, match="written by lit-asyncrl"):
        fit(tmp_path, make_module(policy), ckpt_path=str(tmp_path / "foreign.ckpt"))
