"""tools/soak.py: a run that is killed at random instants and resumed settles every group once; checked by the tool itself."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "soak.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def soak(*arguments: str) -> str:
    result = subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=1150)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-3000:]}"
    return result.stdout


def test_ten_kills_lose_nothing_and_repeat_nothing() -> None:
    assert "all holds" in soak("kill", "--rounds", "10", "--updates", "150")


def test_starts_and_stops_with_an_engine_process_leave_nothing() -> None:
    assert "all holds" in soak("cycles", "--rounds", "10")
