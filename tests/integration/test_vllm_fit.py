"""Whole runs with vLLM: the main job learns as with the embedded engine; a killed engine is started anew, or ends `fit`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

PROGRAM = Path(sys.executable).with_name("lit-asyncrl")
START_S = 300.0
SHORT = """
trainer:
  max_steps: {max_steps}
  val_check_interval: 100000
  callbacks:
    - class_path: AsyncRollout
      init_args:
        max_restarts: {max_restarts}
        engine:
          class_path: VLLMEngine
          init_args: {{num_slots: 24, response_timeout_s: 10}}
    - class_path: EssLrScale
    - class_path: RunReport
data:
  save_rollouts: rollouts
  evaluation:
    heldout: {{num_prompts: 16, final_num_prompts: 16}}
"""
CONFIGS = ("--config", "vcpo", "--config", "engine/vllm")


@contextmanager
def fit(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run of the main job with vLLM, as a user starts it; ended with the block at the latest."""
    log = (folder / "fit.log").open("w")
    process = subprocess.Popen([PROGRAM, "fit", *CONFIGS, *arguments], cwd=folder, stdout=log, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        log.close()


def vllm_core(process: subprocess.Popen[str], folder: Path) -> psutil.Process:
    """vLLM's engine core, once the run has trained on something."""
    deadline = time.monotonic() + START_S
    while not list(folder.glob("rollouts/*")):
        assert process.poll() is None, (folder / "fit.log").read_text()[-3000:]
        assert time.monotonic() < deadline, "the run trains nothing"
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


def leftovers(children: list[psutil.Process]) -> list[psutil.Process]:
    """Those of the processes that are still there."""
    return psutil.wait_procs(children, timeout=10.0)[1]


def test_the_main_job_learns_with_vllm_as_with_the_embedded_engine(tmp_path: Path):
    with fit(tmp_path) as process:
        assert process.wait(800) == 0, (tmp_path / "fit.log").read_text()[-3000:]
    summary = json.loads(next(tmp_path.glob("runs/vcpo/*/summary.json")).read_text())
    assert summary["accuracy_after"] >= 0.90
    assert summary["policy_version"] == 400
    assert 0 < summary["policy_age_mean"] <= 2


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGKILL, "vLLM"), (signal.SIGSTOP, "sign of life|has not answered")], ids=["killed", "hung"]
)
def test_a_lost_engine_ends_the_run_with_its_cause_and_leaves_nothing(tmp_path: Path, number: int, cause: str):
    (tmp_path / "short.yaml").write_text(SHORT.format(max_steps=100000, max_restarts=0))
    with fit(tmp_path, "--config", "short.yaml") as process:
        core = vllm_core(process, tmp_path)
        children = psutil.Process(process.pid).children(recursive=True)
        lost = time.monotonic()
        os.kill(core.pid, number)
        assert process.wait(60) == 1
        assert time.monotonic() - lost < 40.0  # the engine's 10 s, and the end of everything
    assert re.search(cause, (tmp_path / "fit.log").read_text())
    assert leftovers(children) == []


def test_a_killed_engine_is_started_anew_and_the_run_goes_on_to_its_end(tmp_path: Path):
    (tmp_path / "short.yaml").write_text(SHORT.format(max_steps=40, max_restarts=1))
    with fit(tmp_path, "--config", "short.yaml") as process:
        core = vllm_core(process, tmp_path)
        core.kill()
        code = process.wait(START_S)
    log = (tmp_path / "fit.log").read_text()
    assert code == 0, log[-3000:]
    assert "started anew (1 of 1)" in log
    summary = json.loads(next(tmp_path.glob("runs/vcpo/*/summary.json")).read_text())
    assert summary["policy_version"] == 40
    assert summary["engine_restarts"] == 1
    assert sum(row["tokens"] for row in summary["ledger"].values()) == summary["generated_tokens"]
