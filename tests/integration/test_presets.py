"""The complete experiment of every method: each makes a few updates on the same task, and only the method differs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from policies import save_policy

from lit_asyncrl.cli import AsyncRLCLI, packaged_configs, run
from lit_asyncrl.module import PolicyModule

METHODS = [
    *("reinforce", "grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo", "tis", "m2po", "decoupled_ppo"),
    *("tic_grpo", "gmc_grpo", "vcpo", "gac"),
]
NUM_UPDATES = 4


@pytest.fixture(autouse=True)
def _no_command_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["lit-asyncrl"])  # Lightning warns of arguments beside `args`


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    return save_policy(tmp_path_factory.mktemp("policy"))


def preset(name: str) -> dict[str, Any]:
    path = packaged_configs() / "experiment" / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def fit(name: str, policy: str, folder: Path, **data: Any) -> AsyncRLCLI:
    """A few updates of a preset in this process, with a tiny policy, small batches and no files but the config."""
    config = preset(name)
    callbacks = [c for c in config["trainer"]["callbacks"] if c["class_path"] not in ("ModelCheckpoint", "TQDMProgressBar")]
    callbacks[0]["init_args"] = {
        "engine": {"class_path": "HFEngine", "init_args": {"mode": "inline", "num_slots": 16}},
        "evaluate_first": False,
        "evaluate_last": False,
        "trainer_threads": 1,
    }
    config["trainer"] |= {
        "callbacks": callbacks,
        "max_steps": NUM_UPDATES,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "default_root_dir": str(folder),
        "limit_val_batches": 0,
    }
    config["model"]["policy"]["path"] = policy
    config["data"] |= {"batch_groups": 4, "group_size": 4, "data_timeout_s": 60.0} | data
    config["data"]["task"]["init_args"]["rewards"] = [
        {"class_path": "CharacterShare", "init_args": {"weight": 1.0}},
        *config["data"]["task"]["init_args"].get("rewards", []),
    ]
    file = folder / "preset.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return run(["fit", "--config", str(file)])


@pytest.mark.parametrize("name", METHODS)
def test_every_preset_makes_its_updates(name: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advantages, update = [], PolicyModule._update

    def recorded(module: PolicyModule, micro_batches: Any) -> Any:
        step = update(module, micro_batches)
        advantages.append(step.metrics["policy/advantage_abs_mean"])
        return step

    monkeypatch.setattr(PolicyModule, "_update", recorded)
    cli = fit(name, policy, tmp_path, max_tokens_per_micro_batch=120)  # a group of 4 has at most 4 * 29 tokens
    module = cli.model
    assert (module.policy_version, module.num_skipped) == (NUM_UPDATES, 0)
    assert max(advantages) > 0  # one update may meet groups of equal rewards alone
    assert cli.datamodule.pool.ledger.count("trained") >= 4 * NUM_UPDATES // module.updates_per_batch


def test_dynamic_sampling_replaces_groups_without_a_signal(policy: str, tmp_path: Path) -> None:
    cli = fit("dapo", policy, tmp_path, group_size=2)
    ledger = cli.datamodule.pool.ledger
    assert ledger.count("dropped", "zero variance") > 0
    assert ledger.count("trained") == 4 * NUM_UPDATES


def test_presets_differ_in_the_method_only() -> None:
    def common(name: str) -> dict[str, Any]:
        config = preset(name)
        for key in ("objective", "advantage", "aggregation", "max_response_length", "updates_per_batch"):
            config["model"].pop(key, None)
        config["trainer"]["logger"]["init_args"].pop("name")
        config["trainer"].pop("val_check_interval")  # in batches
        for key in ("zero_variance", "refill", "max_tries"):
            config["data"].pop(key, None)
        config["data"]["task"]["init_args"].pop("rewards", None)
        controls = ("EssLrScale", "GradientAlignmentControl")
        config["trainer"]["callbacks"] = [c for c in config["trainer"]["callbacks"] if c["class_path"] not in controls]
        return config

    assert all(common(name) == common("grpo") for name in METHODS)


def test_the_front_door_and_the_vcpo_preset_are_one_method() -> None:
    front = yaml.safe_load((packaged_configs() / "vcpo.yaml").read_text(encoding="utf-8"))
    assert preset("vcpo")["model"] == front["model"]
    assert preset("vcpo")["data"] == front["data"]


def test_the_method_page_names_every_objective_config_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    folder = packaged_configs() / "objective"
    assert set(re.findall(r"objective/(\w+)", page)) <= {path.stem for path in folder.glob("*.yaml")}
    assert all(path.stem in page for path in folder.glob("*.yaml"))
    assert all(name in page for name in METHODS)
