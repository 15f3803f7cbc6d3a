"""tools/compare_runs.py: one page of curves of several runs."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

TOOL = Path(__file__).parents[2] / "tools" / "compare_runs.py"

pytest.importorskip("matplotlib", reason="tools/compare_runs.py needs the extra plot")


def write_run(folder: Path, offset: float) -> str:
    with SummaryWriter(str(folder)) as writer:
        for step in range(20):
            writer.add_scalar("reward/mean", offset + 0.01 * step, step)
            writer.add_scalar("weights/ess_ratio", float("nan") if step == 3 else 0.9, step)
        writer.add_scalar("val/heldout/accuracy", 0.5 + offset, 19)
    return str(folder)


def compare(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_runs_of_different_methods_share_one_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, offset) for name, offset in (("grpo", 0.1), ("vcpo", 0.2))]
    result = compare(*runs, "--out", "page.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "page.png"
    image = (tmp_path / "page.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) < 300_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("empty",), "must be a folder with TensorBoard files, got 'empty'"),
        (("run", "run"), "more than once"),
        (("run", "--smooth", "0"), "--smooth must be at least 1"),
        (("run", "--out", "nowhere/page.png"), "--out must be a file .png or .svg or .pdf in a folder that exists"),
        (("run", "--out", "page.txt"), "--out must be a file"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "run", 0.0)
    result = compare(*arguments, cwd=tmp_path)
    assert result.returncode != 0
    assert words in result.stderr
    assert "Traceback" not in result.stderr
