"""Every YAML under configs/ parses: complete ones alone, partial ones composed after vcpo.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import build_command

from lit_asyncrl.algorithm.advantages import OPOB, GroupMean
from lit_asyncrl.algorithm.losses import PPOClip, SequenceTIS
from lit_asyncrl.callbacks import AsyncRollout, EssLrScale, RunReport
from lit_asyncrl.cli import AsyncRLCLI, packaged_configs
from lit_asyncrl.strict_yaml import check_yaml_file
from lit_asyncrl.tasks.digits import SortDigits

CONFIGS = sorted(packaged_configs().rglob("*.yaml"))


def _is_complete(path: Path) -> bool:
    """A config that names everything a run needs stands alone; one of a single concern is composed."""
    return {"trainer", "model", "data"} <= set(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.fixture(autouse=True)
def _no_command_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["lit-asyncrl"])  # Lightning warns of arguments beside `args`


def _callback(cli: AsyncRLCLI, kind: type) -> Any:
    return next(c for c in cli.trainer.callbacks if isinstance(c, kind))


def test_there_are_configs():
    assert packaged_configs() / "vcpo.yaml" in CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(packaged_configs())))
def test_every_config_parses(path):
    check_yaml_file(str(path))
    composed = [] if _is_complete(path) else ["--config", "vcpo"]
    cli = build_command(*composed, "--config", str(path))
    assert isinstance(_callback(cli, AsyncRollout), AsyncRollout)
    assert isinstance(_callback(cli, RunReport), RunReport)


def test_the_front_door_is_vcpo_with_pace():
    cli = build_command("--config", "vcpo")
    assert isinstance(cli.model.estimator.objective, SequenceTIS)
    assert isinstance(cli.model.estimator.advantage, OPOB)
    assert type(cli.datamodule.sampler).__name__ == "PaceSampler"
    assert isinstance(_callback(cli, EssLrScale), EssLrScale)
    assert cli.model.max_grad_norm == 1.0


def test_two_configs_compose_left_to_right():
    cli = build_command("--config", "vcpo", "--config", "objective/grpo")
    assert isinstance(cli.model.estimator.objective, PPOClip)
    assert isinstance(cli.model.estimator.advantage, GroupMean)


def test_the_inline_engine_composes_after_vcpo():
    cli = build_command("--config", "vcpo", "--config", "engine/inline")
    assert _callback(cli, AsyncRollout).engine.mode == "inline"
    assert cli.datamodule.max_policy_age == 0


def test_short_class_names_resolve_on_the_command_line():
    cli = build_command("--config", "vcpo", "--model.objective=PPOClip", "--model.advantage=GroupMean", "--data.task=SortDigits")
    assert isinstance(cli.model.estimator.objective, PPOClip)
    assert isinstance(cli.datamodule.task, SortDigits)


def test_arguments_of_a_chosen_class_are_set_on_the_command_line():
    cli = build_command("--config", "vcpo", "--model.objective.max_weight=3.5", "--data.task.min_digits=5")
    assert cli.model.estimator.objective.max_weight == 3.5


def test_changing_a_class_drops_the_arguments_of_the_other():
    cli = build_command("--config", "vcpo", "--model.objective=PPOClip", "--model.advantage=GroupMean")
    assert not hasattr(cli.model.estimator.objective, "max_weight")


def test_a_callback_is_appended_across_files(tmp_path):
    (tmp_path / "more.yaml").write_text("trainer:\n  callbacks+:\n    - class_path: LearningRateMonitor\n", encoding="utf-8")
    cli = build_command("--config", "vcpo", "--config", str(tmp_path / "more.yaml"))
    names = [type(c).__name__ for c in cli.trainer.callbacks]
    assert "AsyncRollout" in names and "LearningRateMonitor" in names


def test_an_evaluation_set_is_added_by_name(tmp_path):
    (tmp_path / "more.yaml").write_text(
        "data:\n  evaluation:\n    sampled:\n      num_samples: 4\n      temperature: 0.7\n      top_p: 0.9\n", encoding="utf-8"
    )
    cli = build_command("--config", "vcpo", "--config", str(tmp_path / "more.yaml"))
    assert cli.datamodule.evaluation["sampled"].num_samples == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trainer.max_stepz=3"],
        ["--model.objectiv=PPOClip"],
        ["--data.task.no_such_digits=3"],
        ["--model.objective=NoSuchObjective"],
        ["--data.truncated=sometimes"],
    ],
    ids=["unknown trainer key", "unknown model key", "unknown argument of a class", "unknown class", "unknown choice"],
)
def test_what_cannot_be_read_is_refused(arguments):
    with pytest.raises(SystemExit) as caught:
        build_command("--config", "vcpo", *arguments)
    assert caught.value.code == 2


def test_an_unknown_key_in_a_file_is_refused(tmp_path):
    (tmp_path / "more.yaml").write_text("data:\n  batch_group: 3\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        build_command("--config", "vcpo", "--config", str(tmp_path / "more.yaml"))
