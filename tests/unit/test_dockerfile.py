"""The Dockerfile holds without a Docker engine: what it copies and names exists, who runs in it, and a linter's opinion."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _instructions() -> list[tuple[str, str]]:
    """(keyword, arguments) of every instruction, with continued lines joined and comments left out."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [(keyword, rest) for keyword, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def _arguments(keyword: str) -> list[str]:
    return [rest for name, rest in _instructions() if name == keyword]


def _copied() -> list[str]:
    return [source for rest in _arguments("COPY") for source in rest.split()[:-1]]


def test_every_path_that_the_image_copies_exists() -> None:
    assert _copied()
    assert [path for path in _copied() if not (ROOT / path).exists()] == []


def test_the_build_context_holds_exactly_what_the_image_copies() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    assert sorted(line[1:] for line in lines if line.startswith("!")) == sorted(_copied())


def test_the_dependencies_are_those_of_the_vllm_extra_and_come_before_the_source() -> None:
    keywords = [f"{keyword} {rest}" for keyword, rest in _instructions()]
    install = next(i for i, line in enumerate(keywords) if "requirements.txt" in line)
    extras = re.findall(r'\["optional-dependencies"\]\["([\w-]+)"\]', keywords[install])
    assert extras == ["vllm"] and set(extras) <= PROJECT["optional-dependencies"].keys()
    assert [line for line in keywords[:install] if line.startswith("COPY")] == ["COPY pyproject.toml ./"]


def test_the_line_that_lists_the_dependencies_lists_them(tmp_path: Path) -> None:
    code = re.search(r"python -c '([^']+)'", "\n".join(_arguments("RUN")))
    assert code is not None
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = subprocess.run([sys.executable, "-c", code[1]], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == PROJECT["dependencies"] + PROJECT["optional-dependencies"]["vllm"]


def test_the_image_runs_as_a_user_other_than_root() -> None:
    user = _arguments("USER")[-1]
    assert user.isdigit() and int(user) > 0
    assert f"--uid {user} " in _arguments("RUN")[0]


def test_the_image_starts_the_command_of_the_package() -> None:
    [command] = json.loads(_arguments("ENTRYPOINT")[-1])
    assert command in PROJECT["scripts"]


def test_a_linter_has_nothing_to_say() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("hadolint is not installed (the extra dev)")
    done = subprocess.run([linter, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
