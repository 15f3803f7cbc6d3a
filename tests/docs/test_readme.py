"""The README holds: its commands run in order in an empty folder, its Python runs, its paths exist.

Skipped lines are those that set up an environment (the test runs in one) and those marked `# needs vLLM` (tests of their own run
them) or `# needs a download`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = ("python3 -m venv", "bash tools/install_", "pip install -e '.[test]'", "tensorboard")
FIRST_COMMAND = "pip install -e . && lit-asyncrl fit --config configs/vcpo.yaml"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def _commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in _blocks("bash") for line in block.splitlines() if line.strip()]
    full = [line for block in _blocks("bash") for line in block.splitlines() if line.strip()]
    return [command for command, line in zip(lines, full, strict=True) if not command.startswith(SETUP) and "# needs" not in line]


def test_the_readme_starts_with_its_two_commands() -> None:
    assert _commands()[0] == FIRST_COMMAND
    assert "pip install -e '.[test]' && pytest" in README


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_every_file_that_a_page_links_to_exists(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).is_file(), target


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_every_heading_that_a_page_links_to_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        linked = (page.parent / target).read_text(encoding="utf-8") if target else text
        headings = re.findall(r"^#+ (.+)$", linked, flags=re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], anchor


def test_every_tool_and_config_that_the_readme_names_exists() -> None:
    for path in re.findall(r"`?((?:tools|configs|docs)/[\w/.-]+\.(?:py|sh|yaml|md|png))", README):
        assert (ROOT / path).is_file(), path


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_command_of_the_readme_runs_in_order(tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    for command in _commands():
        command = command.removeprefix("pip install -e . && ")
        done = subprocess.run(
            f'PATH="{programs}:$PATH" {command}',
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    summary = json.loads((tmp_path / "runs" / "vcpo" / "version_0" / "summary.json").read_text())
    assert summary["accuracy_before"] <= 0.55
    assert summary["accuracy_after"] >= 0.90
    assert (tmp_path / "my-model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_python_example_runs(tmp_path: Path) -> None:
    example = next(block for block in _blocks("python") if "Trainer(" in block)
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_task_written_as_in_the_readme_works() -> None:
    example = next(block for block in re.findall(r"^  ```python\n(.*?)^  ```$", README, flags=re.DOTALL | re.MULTILINE))
    namespace: dict[str, object] = {}
    code = "\n".join(line.removeprefix("  ") for line in example.splitlines())
    exec(compile(code, "README.md", "exec"), namespace)  # noqa: S102 - the README's own example
    task = namespace["DoubleTask"]()  # type: ignore[operator]
    assert task.rewards[0]("77", task.train_example(7)) == 1.0
    assert {task.train_example(i).prompt for i in range(8)}.isdisjoint({task.heldout_example(i).prompt for i in range(2)})


def test_the_dockerfile_names_only_paths_that_exist() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.*)$", dockerfile, flags=re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
