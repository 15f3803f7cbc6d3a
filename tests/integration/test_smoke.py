"""The main job in small, through the command line: fit, resume, validate, test, predict, export, and all they leave behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from policies import PACKAGED
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_asyncrl.checkpoints import read_checkpoint
from lit_asyncrl.cli import main, run
from lit_asyncrl.policy import load_model, load_tokenizer

MAX_STEPS = 6
SUMMARY_KEYS = {
    *("accuracy_before", "accuracy_after", "policy_version", "wall_s", "generated_tokens", "trained_tokens"),
    *("generated_tokens_per_s", "trained_tokens_per_s", "policy_age_mean", "policy_age_max", "ess_ratio_mean"),
    *("mixed_version_share", "groups_rejected", "tokens_rescored", "seed", "config_path"),
}


def arguments(folder: Path) -> list[str]:
    """The smoke config with a smaller batch, few updates, and small evaluations."""
    return [
        *("--config", "smoke", f"--model.policy.path={PACKAGED}", f"--trainer.logger.init_args.save_dir={folder}"),
        *(f"--trainer.max_steps={MAX_STEPS}", "--trainer.val_check_interval=3", "--data.batch_groups=4"),
        *("--data.evaluation.heldout.num_prompts=8", "--data.evaluation.heldout.final_num_prompts=16"),
        *("--data.task.min_digits=3", "--data.task.max_digits=6", "--data.sampling.max_new_tokens=10"),
    ]


REPORT_OFTEN = """
trainer:
  callbacks:
    - class_path: AsyncRollout
    - class_path: EssLrScale
    - class_path: RunReport
      init_args:
        histograms_every: 2
        samples_every: 3
    - class_path: ModelCheckpoint
      init_args:
        every_n_train_steps: 3
        save_last: true
"""

INLINE = """
trainer:
  callbacks:
    - class_path: AsyncRollout
      init_args:
        engine:
          class_path: HFEngine
          init_args:
            mode: inline
data:
  max_policy_age: {max_policy_age}
"""


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One run with the engine in its own process."""
    folder = tmp_path_factory.mktemp("smoke")
    config = write(folder, "often.yaml", REPORT_OFTEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["lit-asyncrl"])
        cli = run(["fit", *arguments(folder), "--config", config])
    left = [c for c in psutil.Process().children(recursive=True) if "lit_asyncrl.generation.hf_worker" in c.cmdline()]
    log_dir = folder / "smoke" / "version_0"
    return SimpleNamespace(
        cli=cli,
        left=left,
        log_dir=log_dir,
        folder=folder,
        summary=json.loads((log_dir / "summary.json").read_text(encoding="utf-8")),
        checkpoint=str(log_dir / "checkpoints" / "last.ckpt"),
    )


@pytest.fixture
def command(smoke, monkeypatch, tmp_path):
    """Run a subcommand with the smoke run's last checkpoint and the engine in this process; give what `main` made."""

    def call(subcommand: str, *more: str, max_policy_age: int = 0):
        monkeypatch.setattr("sys.argv", ["lit-asyncrl"])
        monkeypatch.chdir(tmp_path)
        config = write(tmp_path, "inline.yaml", INLINE.format(max_policy_age=max_policy_age))
        return run([subcommand, *arguments(tmp_path), "--config", config, f"--ckpt_path={smoke.checkpoint}", *more])

    return call


# ------------------------------------------------------------------ fit


def test_the_summary_has_every_key(smoke):
    assert set(smoke.summary) >= SUMMARY_KEYS


def test_the_summary_s_numbers_are_those_of_the_run(smoke):
    summary = smoke.summary
    assert summary["policy_version"] == MAX_STEPS
    assert summary["seed"] == 0
    assert summary["config_path"] == str(smoke.log_dir / "config.yaml")
    assert 0.0 <= summary["accuracy_before"] <= 1.0
    assert 0.0 < summary["ess_ratio_mean"] <= 1.0
    assert 0.0 <= summary["policy_age_mean"] <= summary["policy_age_max"] <= 4
    assert summary["generated_tokens"] >= summary["trained_tokens"] > 0
    assert summary["generated_tokens_per_s"] == pytest.approx(summary["generated_tokens"] / summary["wall_s"], rel=0.01)
    assert summary["evaluation_before"]["heldout"]["policy_version"] == 0
    assert summary["evaluation_after"]["heldout"]["policy_version"] == MAX_STEPS
    assert [e["policy_version"] for e in summary["evaluations"]] == [3, 6]


def test_the_ledger_accounts_for_every_prompt_and_every_generated_token(smoke):
    rows = smoke.summary["ledger"].values()
    assert smoke.summary["ledger"]["trained"]["prompts"] == MAX_STEPS * 4
    assert sum(row["prompts"] for row in rows) == smoke.cli.datamodule.pool.ledger.num_dispatched
    # responses that were not finished when the run ended are generated but not in the ledger
    assert sum(row["tokens"] for row in rows) <= smoke.summary["generated_tokens"]


def test_nothing_is_left_running(smoke):
    assert not smoke.left


@pytest.fixture(scope="module")
def events(smoke):
    accumulator = EventAccumulator(str(smoke.log_dir), size_guidance={"histograms": 0, "tensors": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def test_scalars_are_grouped_by_area(events):
    scalars = events.Tags()["scalars"]
    areas = {name.split("/")[0] for name in scalars if "/" in name}
    assert areas >= {"reward", "policy", "weights", "control", "pool", "time", "throughput", "val"}
    assert {name for name in scalars if "/" not in name} <= {"epoch", "loss", "hp_metric"}


def test_scalars_are_logged_at_every_update_and_finite(events):
    for name in ("reward/mean", "weights/ess_ratio", "pool/policy_age_mean", "control/lr_scale", "control/grad_norm"):
        points = events.Scalars(name)
        assert [p.step for p in points] == list(range(1, MAX_STEPS + 1)), name
        assert all(math.isfinite(p.value) for p in points), name


def test_histograms_of_ages_and_weights_are_logged(events):
    histograms = events.Tags()["histograms"]
    assert "weights/sequence_log_weight" in histograms
    assert any("age" in name for name in histograms)
    assert [h.step for h in events.Histograms("weights/sequence_log_weight")] == [2, 4, 6]


def test_sample_completions_are_logged_as_text(events):
    (tag,) = [name for name in events.Tags()["tensors"] if name.startswith("samples/train")]
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]
    assert len(texts) == 2  # updates 3 and 6
    assert "reward" in texts[0] and "r" in texts[0]


def test_the_config_is_saved_and_can_be_run_again(smoke):
    assert "ReverseDigits" in (smoke.log_dir / "config.yaml").read_text(encoding="utf-8")


def test_checkpoints_hold_version_pool_and_base_rate(smoke):
    content = read_checkpoint(smoke.checkpoint)
    assert content["lit_asyncrl"]["policy_version"] == MAX_STEPS
    assert content["optimizer_states"][0]["param_groups"][0]["lr"] == 3e-4
    assert "pool" in content["RolloutDataModule"]


# ------------------------------------------------------------------ the other subcommands


@pytest.mark.parametrize(("subcommand", "prefix"), [("validate", "val"), ("test", "test")])
def test_a_checkpoint_is_evaluated_as_the_run_evaluated_it(command, smoke, subcommand, prefix):
    cli = command(subcommand)
    accuracy = float(cli.trainer.callback_metrics[f"{prefix}/heldout/accuracy"])
    assert accuracy == pytest.approx(smoke.summary["accuracy_after"])


def test_predict_writes_completions_with_rewards(command, tmp_path):
    command("predict", "--trainer.callbacks+=PredictionWriter")
    records = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(records) == 16
    assert set(records[0]) >= {"set", "prompt", "answer", "completion", "reward", "reward_components", "correct"}
    assert all(r["policy_version"] == MAX_STEPS for r in records)


@pytest.fixture
def exported(smoke, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lit-asyncrl"])
    main(["export", f"--ckpt_path={smoke.checkpoint}", f"--output_dir={tmp_path / 'exported'}"])
    return str(tmp_path / "exported")


def test_a_folder_that_cannot_be_written_is_refused_before_the_export(smoke, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lit-asyncrl"])
    with pytest.raises(SystemExit) as caught:
        main(["export", f"--ckpt_path={smoke.checkpoint}", "--output_dir=/proc/no/such"])
    assert caught.value.code == 2
    assert "output_dir must be a folder that can be written" in capsys.readouterr().err


def test_an_exported_policy_has_the_checkpoint_s_logprobs(smoke, exported):
    ids = torch.tensor([[3, 7, 5, 9, 4, 1]])
    trained = smoke.cli.model.model
    with torch.no_grad():
        torch.testing.assert_close(load_model(exported)(input_ids=ids).logits, trained(input_ids=ids).logits, rtol=0.0, atol=1e-6)


def test_an_exported_policy_is_a_whole_folder(exported):
    names = {file.name for file in Path(exported).iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert load_tokenizer(exported)("r12=")["input_ids"] == load_tokenizer(PACKAGED)("r12=")["input_ids"]


def test_a_run_is_resumed_from_its_checkpoint(smoke, command):
    dispatched = smoke.cli.datamodule.pool.ledger.num_dispatched
    trained = smoke.summary["ledger"]["trained"]["prompts"]
    cli = command("fit", f"--trainer.max_steps={MAX_STEPS + 2}", max_policy_age=4)
    assert cli.model.policy_version == MAX_STEPS + 2
    ledger = cli.datamodule.pool.ledger
    assert ledger.count("trained") == trained + 2 * 4
    assert ledger.num_dispatched >= dispatched - 4 * 5  # what the checkpoint, one save earlier at most, knew of
    assert sum(row.prompts for row in ledger.rows()) == ledger.num_dispatched


def test_a_command_without_ends_with_usage(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lit-asyncrl"])
    with pytest.raises(SystemExit) as caught:
        main(["export"])
    assert caught.value.code == 2
    assert "ckpt_path" in capsys.readouterr().err
