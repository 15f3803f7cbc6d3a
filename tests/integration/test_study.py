"""tools/study.py: what the study shows holds in two runs, and its workers end with it."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

TOOL = Path(__file__).parents[2] / "tools" / "study.py"


@pytest.mark.slow
def test_no_correction_collapses_and_vcpo_learns_at_lag_32() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "check"], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_workers_end_with_a_runner_that_is_killed(tmp_path: Path) -> None:
    arguments = ["run", "--results", str(tmp_path / "results.jsonl"), "--cache", str(tmp_path / "cache"), "--workers", "2"]
    with subprocess.Popen([sys.executable, str(TOOL), *arguments], stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        assert "runs to make" in runner.stdout.readline()
        workers: list[psutil.Process] = []
        while not workers or not list(tmp_path.glob("cache/*.lock")):  # a lock is the first that a worker makes
            workers = [child for child in psutil.Process(runner.pid).children() if "spawn_main" in " ".join(child.cmdline())]
            with pytest.raises(subprocess.TimeoutExpired):  # it is alive
                runner.wait(0.2)
        runner.send_signal(signal.SIGKILL)
        assert runner.wait(30) == -signal.SIGKILL
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []
