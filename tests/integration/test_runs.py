"""Complete runs through the Python API with the engine in this process: order, ages, determinism, resume, loggers."""

from __future__ import annotations

import json
import threading
import time
import warnings

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from policies import save_policy
from runs import LongAnswer, inline_rollout, make_data, make_module, make_trainer

from lit_asyncrl.callbacks import EssLrScale, RunReport
from lit_asyncrl.errors import AsyncRLError, CheckpointError, ConfigurationError, RewardError, WaitTimeoutError
from lit_asyncrl.evaluation import EvaluationSet
from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.module import PolicyModule
from lit_asyncrl.tasks.digits import ReverseDigits, SortDigits
from lit_asyncrl.types import SamplingParams


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class Events(pl.Callback):
    """Notes updates, and the ages and prompts of every batch."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.ages: list[tuple[float, float]] = []
        self.trained: list[list[float]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        stats = batch.stats
        self.ages.append((stats["pool/policy_age_mean"], stats["pool/policy_age_max"]))
        self.trained.append([float(m.input_ids.sum()) for m in batch.micro_batches])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.order.append(f"update {pl_module.policy_version}")


def weights_of(module: PolicyModule) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def assert_bit_equal(one: PolicyModule, other: PolicyModule) -> None:
    for a, b in zip(weights_of(one), weights_of(other), strict=True):
        assert torch.equal(a, b)


def wait_until(predicate, timeout_s: float) -> None:
    """Poll for the end of threads that nobody joins."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.01)


def spy_on_take(data, order: list[str]) -> None:
    """Note every batch taken, with the policy version it is taken at."""
    setup = data.setup

    def spied_setup(stage):
        setup(stage)
        take = data.pool.take

        def spied_take(policy_version, *rest):
            taken = take(policy_version, *rest)
            order.append(f"take at {policy_version}")
            return taken

        data.pool.take = spied_take

    data.setup = spied_setup


def fit(policy, folder, *callbacks, max_steps=4, data=None, rollout=None, module=None, ckpt_path=None, **trainer):
    module = module or make_module(policy)
    data = data or make_data()
    trainer = make_trainer(folder, [rollout or inline_rollout(), *callbacks], max_steps=max_steps, **trainer)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, data, trainer


# ------------------------------------------------------------------ order and ages


def test_a_batch_is_not_taken_before_the_update_before_it(policy, tmp_path):
    events, data = Events(), make_data(max_policy_age=2)
    spy_on_take(data, events.order)
    fit(policy, tmp_path, events, data=data)
    assert events.order == [entry for t in range(4) for entry in (f"take at {t}", f"update {t + 1}")]


def test_a_new_epoch_of_the_loader_takes_no_batch_ahead(policy, tmp_path):
    events, data = Events(), make_data(updates_per_epoch=2)
    spy_on_take(data, events.order)
    fit(policy, tmp_path, events, data=data)
    assert events.order == [entry for t in range(4) for entry in (f"take at {t}", f"update {t + 1}")]


def test_synchronous_training_has_age_zero_everywhere(policy, tmp_path):
    events = Events()
    fit(policy, tmp_path, events)
    assert events.ages == [(0.0, 0.0)] * 4


@pytest.mark.parametrize("lag", [1, 3])
def test_a_forced_lag_gives_exact_ages(policy, tmp_path, lag):
    events = Events()
    fit(
        policy,
        tmp_path,
        events,
        max_steps=6,
        rollout=inline_rollout(publish_lag=lag),
        data=make_data(max_policy_age=lag),
    )
    assert events.ages == [(float(min(lag, t)), float(min(lag, t))) for t in range(6)]


def test_an_age_bound_is_never_exceeded(policy, tmp_path):
    events = Events()
    fit(policy, tmp_path, events, max_steps=8, data=make_data(max_policy_age=2, age_measure="oldest"))
    assert max(age for _, age in events.ages) <= 2


# ------------------------------------------------------------------ determinism


def test_a_synchronous_run_repeats_bit_for_bit(policy, tmp_path):
    one, _, _ = fit(policy, tmp_path / "1")
    other, _, _ = fit(policy, tmp_path / "2")
    assert_bit_equal(one, other)


def test_another_seed_gives_another_run(policy, tmp_path):
    one, _, _ = fit(policy, tmp_path / "1", data=make_data(seed=0))
    other, _, _ = fit(policy, tmp_path / "2", data=make_data(seed=1))
    assert not all(torch.equal(a, b) for a, b in zip(weights_of(one), weights_of(other), strict=True))


def test_evaluation_changes_neither_prompts_nor_weights(policy, tmp_path):
    without, with_it = Events(), Events()
    one, _, _ = fit(policy, tmp_path / "1", without)
    other, _, _ = fit(
        policy,
        tmp_path / "2",
        with_it,
        rollout=inline_rollout(evaluate_first=True, evaluate_last=True),
        val_check_interval=1,
        limit_val_batches=1.0,
    )
    assert with_it.trained == without.trained
    assert_bit_equal(one, other)


def test_every_evaluation_is_of_the_version_it_is_logged_with(policy, tmp_path):
    report = RunReport()
    rollout = inline_rollout(evaluate_first=True, evaluate_last=True, publish_lag=2)
    fit(
        policy,
        tmp_path,
        report,
        rollout=rollout,
        data=make_data(max_policy_age=2),
        val_check_interval=2,
        limit_val_batches=1.0,
    )
    assert [e["policy_version"] for e in report.summary["evaluations"]] == [2, 4]
    assert rollout.first_results["heldout"].version == 0
    assert rollout.last_results["heldout"].version == 4


# ------------------------------------------------------------------ checkpoint and resume


@pytest.mark.parametrize("stop_after", [2, 3])
def test_a_resumed_synchronous_run_is_bit_equal_to_the_unbroken_one(policy, tmp_path, stop_after):
    settings = {"updates_per_epoch": 3}
    whole, _, _ = fit(policy, tmp_path / "whole", EssLrScale(), max_steps=5, data=make_data(**settings))
    _, _, trainer = fit(policy, tmp_path / "first", EssLrScale(), max_steps=stop_after, data=make_data(**settings))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, data, _ = fit(
        policy,
        tmp_path / "second",
        EssLrScale(),
        max_steps=5,
        data=make_data(**settings),
        ckpt_path=str(tmp_path / "half.ckpt"),
    )
    assert resumed.policy_version == 5
    assert data.pool.ledger.count("trained") == 10  # 5 updates x 2 groups, the first part's included
    assert_bit_equal(whole, resumed)


def test_a_resumed_asynchronous_run_loses_no_prompt(policy, tmp_path):
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_last=True)
    fit(policy, tmp_path, saver, max_steps=4, data=make_data(max_policy_age=3), enable_checkpointing=True)
    _, data, _ = fit(policy, tmp_path, max_steps=8, data=make_data(max_policy_age=3), ckpt_path=str(tmp_path / "last.ckpt"))
    ledger = data.pool.ledger
    assert ledger.count("trained") == 16  # 8 updates x 2 groups
    assert sum(row.prompts for row in ledger.rows()) == ledger.num_dispatched
    assert ledger.num_dispatched == data.prompts.state_dict()["next_group_id"]


def test_a_checkpoint_loads_without_running_pickled_code(policy, tmp_path):
    _, _, trainer = fit(policy, tmp_path, data=make_data(max_policy_age=2))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    content = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert content["lit_asyncrl"]["policy_version"] == 4


def test_a_resumed_run_reports_the_accuracy_before_its_first_part(policy, tmp_path):
    rollout = inline_rollout(evaluate_first=True)
    _, _, trainer = fit(policy, tmp_path, rollout=rollout, max_steps=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    second = inline_rollout(evaluate_first=True)
    fit(policy, tmp_path, rollout=second, max_steps=2, ckpt_path=str(tmp_path / "run.ckpt"))
    assert second.first_results["heldout"].metrics == rollout.first_results["heldout"].metrics
    assert second.first_results["heldout"].version == 0


# ------------------------------------------------------------------ reports and loggers


def test_a_logger_without_text_is_warned_of_once(policy, tmp_path):
    logger = CSVLogger(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(policy, tmp_path, RunReport(histograms_every=1, samples_every=1), logger=logger)
    assert sum("takes no text" in str(w.message) for w in caught) == 1
    assert "weights/ess_ratio" in (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text(encoding="utf-8")


def test_a_run_without_a_logger_leaves_its_summary_in_the_root_folder(policy, tmp_path):
    report = RunReport()
    fit(policy, tmp_path, report)
    assert report.summary["policy_version"] == 4
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["policy_version"] == 4


def test_saved_rollouts_hold_one_group_per_update(policy, tmp_path):
    fit(policy, tmp_path, data=make_data(save_rollouts=str(tmp_path / "rollouts")))
    lines = (tmp_path / "rollouts" / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["policy_version"] for r in records] == [t for t in range(4) for _ in range(2)]  # 2 members
    assert all(r["prompt"].startswith("r") and r["completion"] is not None for r in records)


def test_two_runs_follow_each_other_in_one_process(policy, tmp_path):
    rollout, data, module = inline_rollout(), make_data(), make_module(policy)
    fit(policy, tmp_path, rollout=rollout, data=data, module=module, max_steps=2)
    fit(policy, tmp_path, rollout=rollout, data=data, module=module, max_steps=2)
    assert module.policy_version == 4


def test_a_run_leaves_no_thread_and_no_process(policy, tmp_path):
    processes = set(psutil.Process().children(recursive=True))
    fit(policy, tmp_path)
    names = [t.name for t in threading.enumerate()]
    assert not any("rollout" in name or "publisher" in name for name in names)
    assert set(psutil.Process().children(recursive=True)) <= processes


def test_torch_threads_are_given_back(policy, tmp_path):
    before = torch.get_num_threads()
    fit(policy, tmp_path, rollout=inline_rollout(trainer_threads=2))
    assert torch.get_num_threads() == before


# ------------------------------------------------------------------ ends


def test_a_run_ends_with_its_prompts(policy, tmp_path):
    task = ReverseDigits(3, 5, rewards=[LongAnswer()], num_train=5)
    module, data, _ = fit(policy, tmp_path, max_steps=100, data=make_data(task=task, max_prompt_epochs=1, max_policy_age=2))
    assert module.policy_version == 2  # 5 prompts are two batches of 2 groups
    assert len(data.pool) == 1


class Nothing(RewardFn):
    """NaN, an exception, or no end at all."""

    name = "broken"

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.released = threading.Event()

    def __call__(self, completion, example):
        if self.kind == "raises":
            raise KeyError("no such answer")
        if self.kind == "hangs":
            self.released.wait(60.0)
        return float("nan")

    def close(self) -> None:
        self.released.set()


@pytest.mark.parametrize(
    ("kind", "message"), [("raises", "no such answer"), ("nan", "nan"), ("hangs", "0.2")], ids=["raises", "NaN", "hangs"]
)
def test_a_broken_reward_ends_the_run_with_its_cause(policy, tmp_path, kind, message):
    reward = Nothing(kind)
    with pytest.raises(RewardError, match=f"broken.*{message}|{message}.*broken"):
        fit(policy, tmp_path, data=make_data(task=ReverseDigits(3, 5, rewards=[reward]), reward_timeout_s=0.2))
    reward.close()


def test_a_broken_reward_is_counted_where_it_is_to_be_skipped(policy, tmp_path):
    class Sometimes(LongAnswer):
        def __call__(self, completion, example):
            if example.index == 1:
                raise KeyError("no such answer")
            return super().__call__(completion, example)

    data = make_data(task=ReverseDigits(3, 5, rewards=[Sometimes()]), on_reward_error="skip")
    fit(policy, tmp_path, data=data, max_steps=3)
    assert data.pool.ledger.count("failed", "reward") == 1


def test_a_batch_that_never_comes_ends_the_run_within_its_timeout(policy, tmp_path):
    data = make_data(zero_variance="drop", task=ReverseDigits(3, 5, rewards=[Zero()]), data_timeout_s=0.5)
    with pytest.raises(WaitTimeoutError, match=r"data\.data_timeout_s.*dropped \(zero variance\).*2 groups in the pool"):
        fit(policy, tmp_path, data=data)


def test_a_run_resumed_with_another_task_is_refused(policy, tmp_path):
    _, _, trainer = fit(policy, tmp_path, max_steps=2)
    path = str(tmp_path / "first.ckpt")
    trainer.save_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"data\.task must be that of the checkpoint.*sort_digits"):
        fit(policy, tmp_path, data=make_data(task=SortDigits(3, 5, rewards=[Zero()])), ckpt_path=path)


def test_training_that_ends_between_checkpoints_updates_the_last_one(policy, tmp_path):
    every_three = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3, save_last=True)
    fit(policy, tmp_path, every_three, max_steps=4, enable_checkpointing=True)
    (last,) = (tmp_path / "checkpoints").glob("last*.ckpt")
    assert torch.load(last, weights_only=True)["lit_asyncrl"]["policy_version"] == 4


def test_skipped_updates_are_logged_to_tensorboard_too(policy, tmp_path):
    data = make_data(truncated="mask", sampling=SamplingParams(max_new_tokens=1))
    logger = TensorBoardLogger(tmp_path)
    with pytest.raises(AsyncRLError, match=r"updates in a row were skipped.*no token to train"):
        fit(policy, tmp_path, RunReport(histograms_every=1), data=data, logger=logger)


class Zero(RewardFn):
    """0 for everything."""

    def __call__(self, completion, example):
        return 0.0


def test_a_callback_that_raises_leaves_nothing_behind(policy, tmp_path):
    class Broken(pl.Callback):
        def on_train_batch_end(self, *_):
            raise ZeroDivisionError("in a user's callback")

    reward, before = Closable(), threading.active_count()
    with pytest.raises(ZeroDivisionError):
        fit(policy, tmp_path, Broken(), data=make_data(task=ReverseDigits(3, 5, rewards=[reward])))
    wait_until(lambda: threading.active_count() <= before, 5.0)
    assert reward.closed


class Closable(LongAnswer):
    """Notes that it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_validation_needs_no_fit(policy, tmp_path):
    module = make_module(policy)
    trainer = make_trainer(tmp_path, [inline_rollout()], limit_val_batches=1.0)
    (metrics,) = trainer.validate(module, make_data())
    assert 0.0 <= metrics["val/heldout/accuracy"] <= 1.0


def test_named_sets_are_evaluated_each_with_its_own_sampling(policy, tmp_path):
    sets = {
        "greedy": EvaluationSet(num_prompts=4, final_num_prompts=4),
        "sampled": EvaluationSet(num_prompts=2, final_num_prompts=2, num_samples=4, temperature=0.8, top_k=5, max_new_tokens=3),
    }
    trainer = make_trainer(tmp_path, [inline_rollout()], limit_test_batches=1.0)
    results = trainer.test(make_module(policy), make_data(evaluation=sets))
    metrics = {key: value for result in results for key, value in result.items()}
    assert metrics["test/sampled/response_length"] <= 3
    assert "test/sampled/pass@4" in metrics and "test/greedy/accuracy" in metrics


@pytest.mark.parametrize("interval", ["missing module", "missing data"])
def test_the_rollout_runs_with_its_module_and_datamodule_alone(policy, tmp_path, interval):
    class Other(pl.LightningModule):
        def configure_optimizers(self):
            return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

        def training_step(self, batch, batch_idx):
            return None

    module = Other() if interval == "missing module" else make_module(policy)
    trainer = make_trainer(tmp_path, [inline_rollout()])
    with pytest.raises(ConfigurationError, match="AsyncRollout must run with PolicyModule and RolloutDataModule"):
        if interval == "missing module":
            trainer.fit(module, torch.utils.data.DataLoader([0, 1]))
        else:
            trainer.fit(module, torch.utils.data.DataLoader([0, 1]))
