"""Recorded runs are trained again from their record: to the bit, as far as it goes, and not with other settings."""

from __future__ import annotations

import random
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from policies import save_policy
from runs import LongAnswer, inline_rollout, make_data, make_module, make_trainer

from lit_asyncrl.callbacks import AsyncRollout, EssLrScale
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.evaluation import EvaluationSet
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.sampler import FifoSampler
from lit_asyncrl.recording.replay import ReplayError
from lit_asyncrl.tasks.digits import ReverseDigits
from lit_asyncrl.types import SamplingParams
from lit_asyncrl.waits import Changed

CAPACITY = 12
BACKLOG = 6


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class Backlog(pl.Callback):
    """After each update, lets the pool fill up, so that PACE has something to reject."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        data = trainer.datamodule
        data.supervisor.wait_for(Changed(), lambda: len(data.pool) >= BACKLOG, timeout_s=30.0, who="test", what="a backlog")


class Kept(pl.Callback):
    """Keeps the weights after each update."""

    def __init__(self) -> None:
        self.weights: dict[int, list[torch.Tensor]] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.weights[pl_module.policy_version] = [p.detach().clone() for p in pl_module.parameters()]


def rollout_in_process(**arguments) -> AsyncRollout:
    engine = HFEngine(num_slots=12, num_threads=1)
    return AsyncRollout(engine=engine, evaluate_first=False, evaluate_last=True, trainer_threads=1, **arguments)


def fit(policy, folder, rollout, *callbacks, max_steps=20, **settings):
    arguments = {
        "sampler": PaceSampler(ema_beta=1.0),
        "max_policy_age": None,
        "capacity_groups": CAPACITY,
        "sampling": SamplingParams(max_new_tokens=24),
        "data_timeout_s": 60.0,
    }
    data, kept = make_data(**(arguments | settings)), Kept()
    make_trainer(folder, [rollout, kept, EssLrScale(), *callbacks], max_steps=max_steps).fit(make_module(policy), data)
    return data, kept.weights


def assert_bit_equal(one: dict[int, list[torch.Tensor]], other: dict[int, list[torch.Tensor]]) -> None:
    assert list(one) == list(other)
    for version, weights in one.items():
        for a, b in zip(weights, other[version], strict=True):
            assert torch.equal(a, b), f"weights differ after update {version}"


@pytest.fixture(scope="module")
def recorded(policy, tmp_path_factory):
    """Path of a record of 20 updates with rejections and an evaluation, the run's pool, evaluation and weights."""
    folder = tmp_path_factory.mktemp("recorded")
    path = str(folder / "run.record")
    rollout = rollout_in_process(record_run=path)
    data, weights = fit(policy, folder, rollout, Backlog())
    return path, data, rollout.last_results, weights


def test_a_recorded_run_replays_to_equal_weights_after_every_update(policy, tmp_path, recorded):
    path, data, results, weights = recorded
    assert data.pool.groups_rejected > 0 and data.pool.tokens_rescored > 0
    rollout = rollout_in_process(replay_run=path)
    replayed, again = fit(policy, tmp_path, rollout)
    assert_bit_equal(weights, again)
    assert replayed.pool.groups_rejected == data.pool.groups_rejected
    assert rollout.last_results == results


@pytest.mark.slow
def test_a_recorded_run_of_200_updates_of_the_packaged_model_replays_to_equal_weights(tmp_path):
    path = str(tmp_path / "run.record")
    settings = {"batch_groups": 4, "group_size": 4, "capacity_groups": 24, "task": ReverseDigits(3, 5)}
    data, weights = fit("tiny-reverse", tmp_path, rollout_in_process(record_run=path), Backlog(), max_steps=200, **settings)
    assert data.pool.groups_rejected > 0 and data.pool.tokens_rescored > 0
    _, again = fit("tiny-reverse", tmp_path, rollout_in_process(replay_run=path), max_steps=200, **settings)
    assert_bit_equal(weights, again)


@pytest.mark.parametrize("seed", range(5))
def test_a_record_cut_anywhere_replays_as_far_as_it_goes_or_is_refused(policy, tmp_path, recorded, seed):
    whole = Path(recorded[0]).read_bytes()
    cut = tmp_path / "cut.record"
    cut.write_bytes(whole[: random.Random(seed).randrange(len(whole))])
    try:
        _, again = fit(policy, tmp_path, rollout_in_process(replay_run=str(cut)))
    except ConfigurationError as error:
        assert "header" in str(error)
        return
    assert_bit_equal({version: recorded[3][version] for version in again}, again)


def test_a_replay_of_fewer_updates_ends_there(policy, tmp_path, recorded):
    _, again = fit(policy, tmp_path, rollout_in_process(replay_run=recorded[0]), max_steps=3)
    assert_bit_equal({version: recorded[3][version] for version in (1, 2, 3)}, again)


def test_another_reward_is_named_as_the_first_difference(policy, tmp_path, recorded):
    task = ReverseDigits(3, 5, rewards=[LongAnswer(weight=2.0)])
    with pytest.raises(ReplayError, match=r"Group \d+ .* must have the rewards"):
        fit(policy, tmp_path, rollout_in_process(replay_run=recorded[0]), task=task)


def test_another_seed_is_refused(policy, tmp_path, recorded):
    with pytest.raises(ConfigurationError, match=r"data\.seed"):
        fit(policy, tmp_path, rollout_in_process(replay_run=recorded[0]), seed=1)


def test_a_changed_setting_is_refused_by_its_key_before_anything_starts(policy, tmp_path):
    path, settings = str(tmp_path / "run.record"), {"max_steps": 1}
    recorder, player = inline_rollout(record_run=path), inline_rollout(replay_run=path)
    recorder.configuration = {"model.optimizer.lr": 1e-3, "trainer.max_steps": 1}
    player.configuration = {"model.optimizer.lr": 2e-3, "trainer.max_steps": 1}
    fit(policy, tmp_path, recorder, **settings)
    with pytest.raises(ConfigurationError, match=r"model\.optimizer\.lr must be 0\.001 as in the recorded run, got 0\.002"):
        fit(policy, tmp_path, player, **settings)
    assert not hasattr(player, "worker")


def test_another_task_is_named_as_another_prompt(policy, tmp_path, recorded):
    with pytest.raises(ReplayError, match="prompt of the recorded run"):
        fit(policy, tmp_path, rollout_in_process(replay_run=recorded[0]), task=ReverseDigits(5, 7, rewards=[LongAnswer()]))


def test_a_record_is_never_overwritten(policy, tmp_path, recorded):
    before = Path(recorded[0]).read_bytes()
    with pytest.raises(ConfigurationError, match=r"AsyncRollout\.record_run must name a new file"):
        fit(policy, tmp_path, rollout_in_process(record_run=recorded[0]))
    assert Path(recorded[0]).read_bytes() == before


class Uneven(LongAnswer):
    """No signal for prompts with an even index: their groups are dropped and sent again."""

    def __call__(self, completion, example):
        return super().__call__(completion, example) if example.index % 2 else 0.0


def test_prompts_that_were_sent_again_are_sent_again_under_their_ids(policy, tmp_path):
    settings = {
        "task": ReverseDigits(3, 5, rewards=[Uneven()], num_train=8),
        "zero_variance": "drop",
        "refill": "same_prompt",
        "max_policy_age": 4,
        "capacity_groups": None,
        "max_prompt_epochs": 2,
        "max_steps": 100,
    }
    path = str(tmp_path / "run.record")
    data, weights = fit(policy, tmp_path, inline_rollout(record_run=path), **settings)
    assert data.pool.ledger.count("dropped", "zero variance") > 0 and weights
    replayed, again = fit(policy, tmp_path, inline_rollout(replay_run=path), **settings)
    assert_bit_equal(weights, again)
    # Those dropped after the last batch depend on when a run ends.
    assert 0 < replayed.pool.ledger.count("dropped", "zero variance") <= data.pool.ledger.count("dropped", "zero variance")


@pytest.mark.filterwarnings("ignore:The record .* ends after 4 batches")
def test_a_run_to_the_end_of_its_prompts_replays_to_there_without_an_engine_to_start_anew(policy, tmp_path, monkeypatch):
    settings = {"task": ReverseDigits(3, 5, rewards=[LongAnswer()], num_train=4), "max_prompt_epochs": 2, "max_steps": 100}
    settings |= {"max_policy_age": 1, "capacity_groups": None, "sampler": FifoSampler()}
    path = str(tmp_path / "run.record")
    data, weights = fit(policy, tmp_path, inline_rollout(record_run=path), **settings)
    assert list(weights) == [1, 2, 3, 4]  # 2 epochs of 4 prompts, 2 an update

    def unwanted(*_arguments, **_keywords):
        raise AssertionError("a replay restarts nothing")

    monkeypatch.setattr("lit_asyncrl.callbacks.rollout_parts.RestartingEngine", unwanted)
    replayed, again = fit(policy, tmp_path, inline_rollout(replay_run=path), **settings)
    assert_bit_equal(weights, again)
    assert replayed.pool.ledger.rows() == data.pool.ledger.rows()


def test_groups_that_lost_members_replay_too(policy, tmp_path):
    settings = {"sampler": PaceSampler(ema_beta=1.0, scale="absolute", unit="trajectory"), "group_size": 3, "max_steps": 6}
    path = str(tmp_path / "run.record")
    data, weights = fit(policy, tmp_path, inline_rollout(record_run=path), Backlog(), **settings)
    assert data.pool.ledger.tokens("dropped", "rejected") > 0
    _, again = fit(policy, tmp_path, inline_rollout(replay_run=path), **settings)
    assert_bit_equal(weights, again)


def test_a_lagged_run_with_evaluations_between_updates_replays(policy, tmp_path):
    settings = {"max_policy_age": 3, "capacity_groups": None, "evaluation": {"heldout": EvaluationSet(4, 4)}, "max_steps": 6}
    path = str(tmp_path / "run.record")
    arguments = {"publish_lag": 1, "evaluate_first": True, "evaluate_last": True}
    recorder, player = inline_rollout(record_run=path, **arguments), inline_rollout(replay_run=path, **arguments)
    _, weights = fit(policy, tmp_path, recorder, **settings)
    _, again = fit(policy, tmp_path, player, **settings)
    assert_bit_equal(weights, again)
    assert (player.first_results, player.last_results) == (recorder.first_results, recorder.last_results)


def test_a_resumed_run_is_not_recorded(policy, tmp_path):
    class Save(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "some.ckpt")

    fit(policy, tmp_path, inline_rollout(), Save(), max_steps=2)
    trainer = make_trainer(tmp_path, [inline_rollout(record_run=str(tmp_path / "run.record"))], max_steps=4)
    data = make_data(max_policy_age=None, capacity_groups=CAPACITY, sampler=PaceSampler(ema_beta=1.0))
    with pytest.raises(ConfigurationError, match=r"record_run must be left out in a run that is resumed"):
        trainer.fit(make_module(policy), data, ckpt_path=str(tmp_path / "some.ckpt"))
    assert not (tmp_path / "run.record").exists()
