"""The pool in complete runs: what the samplers do, and an account that closes."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from policies import save_policy
from runs import LongAnswer, inline_rollout, make_data, make_module, make_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_asyncrl.callbacks import AsyncRollout, RunReport
from lit_asyncrl.errors import ConfigurationError, WaitTimeoutError
from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.ranking import FreshestFirstSampler, MaxAgeSampler, TotalStalenessSampler
from lit_asyncrl.pool.sampler import FifoSampler
from lit_asyncrl.tasks.digits import ReverseDigits
from lit_asyncrl.types import SamplingParams
from lit_asyncrl.waits import Changed

CAPACITY = 12
BACKLOG = 6


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class Backlog(pl.Callback):
    """After each update, lets the pool fill up: with groups that were begun under older weights."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        data = trainer.datamodule
        try:
            data.supervisor.wait_for(Changed(), lambda: len(data.pool) >= BACKLOG, timeout_s=10.0, who="test", what="a backlog")
        except WaitTimeoutError:
            pytest.fail("no backlog within 10 s")


def fit(policy, folder, sampler, *callbacks, max_steps=6, logger=False, **settings):
    arguments = {"max_policy_age": None, "capacity_groups": CAPACITY, "sampling": SamplingParams(max_new_tokens=24)} | settings
    data, report, rollout = make_data(sampler=sampler, **arguments), RunReport(histograms_every=2), inline_rollout()
    trainer = make_trainer(folder, [rollout, report, *callbacks], max_steps=max_steps, logger=logger)
    trainer.fit(make_module(policy), data)
    return data, report, rollout


def test_pace_rejects_and_scores_again(policy, tmp_path):
    data, report, _ = fit(policy, tmp_path, PaceSampler(ema_beta=1.0), Backlog())
    assert report.summary["groups_rejected"] > 0
    assert report.summary["tokens_rescored"] > 0
    assert data.pool.ledger.count("dropped", "rejected") == report.summary["groups_rejected"]
    assert data.pool.ledger.count("trained") == 12


def test_first_in_first_out_neither_rejects_nor_scores_again(policy, tmp_path):
    data, report, _ = fit(policy, tmp_path, FifoSampler(), Backlog())
    assert (report.summary["groups_rejected"], report.summary["tokens_rescored"]) == (0, 0)
    assert data.pool.ledger.count("dropped") == 0
    assert data.pool.ledger.bias.metrics() == {"length_bias": 0.0, "reward_bias": 0.0, "difficulty_bias": 0.0}


@pytest.mark.parametrize(
    "sampler",
    [
        TotalStalenessSampler(ema_beta=1.0),
        MaxAgeSampler(ema_beta=1.0),
        FreshestFirstSampler(ema_beta=1.0),
        PaceSampler(ema_beta=1.0, scale="absolute", unit="trajectory"),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_every_other_sampler_rejects_in_a_run(policy, tmp_path, sampler):
    data, _, _ = fit(policy, tmp_path, sampler, Backlog(), group_size=3)
    ledger = data.pool.ledger
    assert ledger.tokens("dropped", "rejected") > 0
    assert ledger.count("trained") == 12
    assert sum(row.prompts for row in ledger.rows()) == ledger.num_dispatched


def test_every_token_that_the_engine_reported_is_in_the_closing_table(policy, tmp_path, capsys):
    _, report, rollout = fit(policy, tmp_path, PaceSampler(ema_beta=1.0), Backlog(), logger=TensorBoardLogger(tmp_path))
    rows = report.summary["ledger"]
    assert sum(row["tokens"] for row in rows.values()) == report.summary["generated_tokens"]
    assert 0 < report.summary["generated_tokens"] <= rollout.engine.generated_tokens
    printed = capsys.readouterr().out
    assert "dropped: rejected" in printed and "tokens/prompt" in printed
    events = EventAccumulator(str(next(tmp_path.glob("lightning_logs/version_0"))), size_guidance={"histograms": 0})
    events.Reload()
    assert events.Scalars("ledger/trained/prompts")[-1].value == 12
    assert {"generation_staleness", "completed_generation_staleness"} <= set(events.Tags()["histograms"])


def test_a_prompt_whose_group_is_dropped_is_sent_again_and_no_more_than_its_tries(policy, tmp_path):
    class Constant(LongAnswer):
        def __call__(self, completion, example):
            return super().__call__(completion, example) if example.index % 2 else 0.0

    task = ReverseDigits(3, 5, rewards=[Constant()], num_train=8)
    data, _, _ = fit(
        policy,
        tmp_path,
        FifoSampler(),
        max_steps=100,
        task=task,
        zero_variance="drop",
        refill="same_prompt",
        max_tries=3,
        max_prompt_epochs=1,
        max_policy_age=4,
        capacity_groups=None,
    )
    ledger = data.pool.ledger
    # four prompts never have a signal: three tries each; the others one to three
    assert ledger.count("dropped", "zero variance") >= 12
    assert ledger.num_dispatched <= 24
    assert ledger.count("pending") == ledger.count("in_flight") == 0
    assert ledger.num_dispatched == data.prompts.state_dict()["next_group_id"]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [({"capacity_groups": 100, "max_policy_age": 2}, "capacity_groups 100"), ({"max_tries": 5}, "max_tries 5")],
)
def test_a_setting_without_effect_is_warned_of(arguments, key):
    with pytest.warns(UserWarning, match=rf"data\.{key} is ignored: .* to use it"):
        make_data(**arguments)


def test_a_start_of_no_lag_is_warned_of():
    with pytest.warns(UserWarning, match="AsyncRollout.publish_lag_start 7 is ignored"):
        AsyncRollout(publish_lag_start=7)


def test_contradictions_of_the_pool_are_refused_when_the_datamodule_is_made():
    with pytest.raises(ConfigurationError, match=r"data\.max_tries must.*data\.capacity_groups must.*target_occupancy must"):
        make_data(max_tries=0, max_policy_age=2, capacity_groups=4, sampler=PaceSampler(target_occupancy=40))
