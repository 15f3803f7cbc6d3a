"""What a resumed run says of itself: its counts are of the whole run, its end is told, and its files are named where refused."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from policies import save_policy
from runs import inline_rollout, make_data, make_module, make_trainer

from lit_asyncrl.algorithm.advantages import GroupMean
from lit_asyncrl.callbacks import RunReport
from lit_asyncrl.checkpoints import newest_checkpoint, read_checkpoint
from lit_asyncrl.errors import CheckpointError, ConfigurationError

OF_THE_SESSION = {"wall_s", "session_wall_s", "memory_mib", "resumed_at", "generated_tokens_per_s", "trained_tokens_per_s"}
"""Keys of a summary that a pause changes; with shares of time."""
INTERRUPTED = "dropped: interrupted"
"""Tokens that a checkpoint does not hold: those of weights whose delivery is not proved yet. How many is a matter of moments."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def fit(policy, folder, *, max_steps=4, ckpt_path=None, rollout=None, **arguments):
    report, module = RunReport(), make_module(policy, advantage=GroupMean())
    callbacks = [rollout or inline_rollout(), report, ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)]
    trainer = make_trainer(folder, callbacks, max_steps=max_steps, enable_checkpointing=True, logger=CSVLogger(folder))
    trainer.fit(module, make_data(**arguments), ckpt_path=ckpt_path)
    return report, module


def lasting(summary):
    """What a resumed run must have in common with an unbroken one."""
    changed = OF_THE_SESSION | {key for key in summary if key.startswith("share_")} | {"bound", "config_path", "ess_ratio_mean"}
    ledger = {name: row for name, row in summary["ledger"].items() if name != INTERRUPTED}
    interrupted = summary["ledger"].get(INTERRUPTED, {"tokens": 0})["tokens"]
    same = {key: value for key, value in summary.items() if key not in changed}
    return same | {"ledger": ledger, "generated_tokens": summary["generated_tokens"] - interrupted}


@pytest.fixture(scope="module")
def unbroken(policy, tmp_path_factory):
    """The summary of a run of four updates, and its checkpoints by policy version."""
    folder = tmp_path_factory.mktemp("unbroken")
    report, _ = fit(policy, folder, rollout=inline_rollout(evaluate_first=True, evaluate_last=True))
    saved = {read_checkpoint(str(path))["lit_asyncrl"]["policy_version"]: str(path) for path in folder.glob("*.ckpt")}
    return report.summary, saved


def test_a_resumed_run_counts_what_the_sessions_before_it_did(policy, tmp_path, unbroken):
    whole, saved = unbroken
    rollout = inline_rollout(evaluate_first=True, evaluate_last=True)
    summary = fit(policy, tmp_path, rollout=rollout, ckpt_path=saved[2])[0].summary
    assert (whole["resumed_at"], summary["resumed_at"]) == (None, 2)
    assert lasting(summary) == lasting(whole)
    assert summary["ess_ratio_mean"] == pytest.approx(whole["ess_ratio_mean"], abs=1e-9)  # of on-policy weights: 1
    assert whole["wall_s"] == whole["session_wall_s"]
    assert summary["wall_s"] > summary["session_wall_s"] > 0
    assert summary["generated_tokens_per_s"] == pytest.approx(summary["generated_tokens"] / summary["wall_s"], rel=0.01)


def test_every_sampled_token_of_all_sessions_is_in_the_ledger(policy, tmp_path, unbroken):
    summary = fit(policy, tmp_path, ckpt_path=unbroken[1][1])[0].summary
    assert sum(row["tokens"] for row in summary["ledger"].values()) == summary["generated_tokens"]
    assert summary["trained_tokens"] == summary["ledger"]["trained"]["tokens"]


@pytest.mark.parametrize("max_steps", [4, 2])
def test_a_run_with_nothing_left_to_train_says_so_and_sums_up(policy, tmp_path, capsys, unbroken, max_steps):
    whole, saved = unbroken
    rollout = inline_rollout(evaluate_last=True)
    with pytest.warns(UserWarning, match=rf"nothing left to train: the checkpoint is at update 4, .*max_steps is {max_steps}\."):
        report, module = fit(policy, tmp_path, rollout=rollout, ckpt_path=saved[4], max_steps=max_steps)
    (file,) = tmp_path.rglob("summary.json")
    assert json.loads(file.read_text(encoding="utf-8")) == report.summary
    assert module.policy_version == 4
    for key in ("accuracy_before", "accuracy_after", "trained_tokens", "generated_tokens", "ledger", "ess_ratio_mean"):
        assert report.summary[key] == whole[key], key
    assert report.summary["session_wall_s"] == 0 < report.summary["wall_s"]
    assert "tokens/prompt" in capsys.readouterr().out  # the closing table


def test_a_run_that_goes_on_inside_an_epoch_is_not_warned_of_its_loader(policy, tmp_path, unbroken):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not.*resumable")
        fit(policy, tmp_path, ckpt_path=unbroken[1][3])


def other_format(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["lit_asyncrl"]["format"] = 1
    torch.save(content, path)


def other_model(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    name = next(iter(content["state_dict"]))
    content["state_dict"][name] = torch.zeros(3, 3)
    torch.save(content, path)


@pytest.mark.parametrize(("change", "message"), [(other_format, "of format 1"), (other_model, "must hold a model like that of")])
def test_last_goes_past_no_whole_checkpoint_of_another_format_or_model(policy, tmp_path, unbroken, change, message):
    for number in (1, 2):
        path = tmp_path / f"{number}.ckpt"
        path.write_bytes(Path(unbroken[1][number]).read_bytes())
        if number == 2:
            change(path)
        os.utime(path, (1000 + number, 1000 + number))
    trainer = make_trainer(tmp_path, [ModelCheckpoint(tmp_path)], enable_checkpointing=True)
    newest = newest_checkpoint(trainer)
    with pytest.raises(CheckpointError, match=message) as caught:
        fit(policy, tmp_path / "resumed", ckpt_path=newest)
    assert str(tmp_path / "2.ckpt") in str(caught.value)


def test_a_record_that_cannot_be_written_is_refused_before_the_model_is_loaded(policy, tmp_path):
    (tmp_path / "file").touch()
    module = make_module(policy)
    trainer = make_trainer(tmp_path, [inline_rollout(record_run=str(tmp_path / "file" / "run.record"))])
    with pytest.raises(ConfigurationError, match=r"AsyncRollout\.record_run must be a file that can be written.*Not a directory"):
        trainer.fit(module, make_data())
    assert not hasattr(module, "model")
