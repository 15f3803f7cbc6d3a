"""Configs found by name, checked on the way, and folders that can be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonargparse import Namespace

from lit_asyncrl.cli import check_writable, find_config, join_rollouts, packaged_configs, resolve_configs
from lit_asyncrl.errors import ConfigurationError


def test_an_existing_file_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("vcpo").write_text("seed_everything: 1\n", encoding="utf-8")
    assert find_config("vcpo") == "vcpo"


@pytest.mark.parametrize("name", ["vcpo", "vcpo.yaml", "configs/vcpo.yaml"])
def test_a_packaged_config_is_found_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(find_config(name)) == packaged_configs() / "vcpo.yaml"


def test_a_packaged_config_in_a_folder_is_found_by_its_relative_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(find_config("experiment/pace")) == packaged_configs() / "experiment" / "pace.yaml"


def test_an_unknown_config_is_refused_with_the_known_names():
    with pytest.raises(ConfigurationError, match=r"'experiment/pace'.*got 'vcppo'"):
        find_config("vcppo")


@pytest.mark.parametrize("arguments", [["fit", "--config", "vcpo"], ["fit", "-c", "vcpo"], ["fit", "--config=vcpo"]])
def test_every_way_to_give_a_config_is_resolved(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_configs(arguments)[-1].endswith(str(packaged_configs() / "vcpo.yaml"))


def test_other_arguments_stay_as_they_are():
    arguments = ["fit", "--trainer.max_steps=3", "--model.objective=PPOClip"]
    assert resolve_configs(arguments) == arguments


def test_the_caller_s_arguments_are_not_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "--config", "vcpo"]
    resolve_configs(arguments)
    assert arguments == ["fit", "--config", "vcpo"]


def test_a_given_config_is_checked_strictly(tmp_path):
    (tmp_path / "run.yaml").write_text("data:\n  seed: 1\n  seed: 2\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="'seed' on lines 2 and 3"):
        resolve_configs(["fit", f"--config={tmp_path / 'run.yaml'}"])


def test_a_folder_that_can_be_made_is_writable(tmp_path):
    check_writable(str(tmp_path / "new" / "deeper"), "trainer.logger.save_dir")


def test_a_path_below_a_file_is_not_writable(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"trainer\.logger\.save_dir must be a folder that can be written"):
        check_writable(str(tmp_path / "file" / "runs"), "trainer.logger.save_dir")


def test_a_pseudo_file_system_is_not_writable():
    with pytest.raises(ConfigurationError, match="/proc"):
        check_writable("/proc/lit_asyncrl", "trainer.default_root_dir")


def test_an_appended_rollout_brings_its_engine_and_what_it_sets_and_leaves_the_rest():
    first = Namespace(class_path="a.AsyncRollout", init_args=Namespace(engine="hf", publish_lag=3, record_run=None, grace_s=30.0))
    other = Namespace(class_path="a.EssLrScale")
    last = Namespace(class_path="a.AsyncRollout", init_args=Namespace(engine="vllm", publish_lag=0, record_run="x", grace_s=30.0))
    joined = join_rollouts([first, other, last])
    assert [callback.class_path for callback in joined] == ["a.AsyncRollout", "a.EssLrScale"]
    assert vars(joined[0].init_args) == {"engine": "vllm", "publish_lag": 3, "record_run": "x", "grace_s": 30.0}
