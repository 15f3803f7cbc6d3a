"""The wheel carries configs and tiny models: built, installed elsewhere, and run by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "lit_asyncrl", "configs"):
        # A copy, so that no build folder appears in the checkout.
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), str(source)], check=True, timeout=300)
    wheel = next(folder.glob("*.whl"))
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True, timeout=300)
    return folder / "site"


def _run(site: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.slow
def test_the_installed_wheel_runs_the_smoke_job_by_name(site: Path, tmp_path: Path) -> None:
    where = _run(site, "-c", "import lit_asyncrl; print(lit_asyncrl.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(site)), where
    done = _run(site, "-m", "lit_asyncrl.cli", "fit", "--config", "smoke", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "runs" / "smoke" / "version_0" / "summary.json").read_text())
    assert summary["policy_version"] == 40


@pytest.mark.slow
def test_the_wheel_holds_every_config(site: Path) -> None:
    packaged = {str(p.relative_to(site / "lit_asyncrl" / "configs")) for p in (site / "lit_asyncrl" / "configs").rglob("*.yaml")}
    assert packaged == {str(p.relative_to(ROOT / "configs")) for p in (ROOT / "configs").rglob("*.yaml")}
