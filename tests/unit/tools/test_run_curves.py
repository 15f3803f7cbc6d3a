"""tools/compare_runs.py: what is read of a run, and what a panel says it shows."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorboard")

from compare_runs import Panel, curve_of, read_curves
from torch.utils.tensorboard import SummaryWriter


def test_updates_made_again_after_a_resume_replace_the_first_ones(tmp_path: Path) -> None:
    for offset, steps in ((0.0, range(8)), (10.0, range(5, 7))):  # killed after update 7, resumed from update 5
        with SummaryWriter(str(tmp_path), filename_suffix=f".{offset}") as writer:
            for step in steps:
                writer.add_scalar("reward/mean", offset + step, step)
    steps, values = read_curves(str(tmp_path))["reward/mean"]
    assert steps.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 15.0, 16.0]


def test_the_held_out_set_is_named() -> None:
    curve = np.array([0, 20]), np.array([0.5, 0.6])
    panel = Panel("held-out accuracy", (r"val/(.*)/accuracy",))
    found = curve_of({"val/math500/accuracy": curve, "val/aime/accuracy": curve, "val/aime/reward": curve}, panel)
    assert found is not None and found[1] == "aime"
    assert curve_of({"reward/mean": curve}, panel) is None
