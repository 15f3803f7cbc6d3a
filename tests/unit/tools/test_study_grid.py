"""The study's grid: every run has one identity, and a command line that the product accepts."""

from collections import Counter

import pytest
from runs import build_command
from study_arms import ARMS, HEADLINE, SYNCHRONOUS
from study_grid import MAX_RUNS, RESPONSES, SECTIONS, SEEDS, Cell, arguments_of, cell, cells_of, headline, quick

from lit_asyncrl.callbacks import AsyncRollout, EssLrScale, GradientAlignmentControl
from lit_asyncrl.callbacks.async_rollout import check_settings
from lit_asyncrl.cli import AsyncRLCLI

ONE_PER_ARM = list({(c.arm, c.form): c for c in cells_of(SECTIONS)}.values())


def parse(monkeypatch: pytest.MonkeyPatch, one: Cell) -> AsyncRLCLI:
    """Build trainer, module and datamodule as `fit` does; nothing is started."""
    monkeypatch.setattr("sys.argv", ["lit-asyncrl"])
    cli = build_command(*arguments_of(one, "tiny-reverse10", thresholds=[0.2, 0.6]))
    check_settings(next(c for c in cli.trainer.callbacks if isinstance(c, AsyncRollout)), cli.trainer, cli.model, cli.datamodule)
    return cli


def test_a_run_has_one_key() -> None:
    cells = [c for name in SECTIONS for c in SECTIONS[name]()]
    settings: dict[str, Cell] = {}
    for one in cells:
        assert settings.setdefault(one.key, one) == one


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_names_a_cell_once(name: str) -> None:
    assert [key for key, number in Counter(c.key for c in SECTIONS[name]()).items() if number > 1] == []


def test_the_grid_is_not_larger_than_planned() -> None:
    assert len(cells_of(SECTIONS)) <= MAX_RUNS


def test_every_arm_is_run() -> None:
    assert {c.arm for c in cells_of(SECTIONS)} == set(ARMS)


def test_a_cell_of_two_sections_is_run_once() -> None:
    both = {c.key for c in cells_of(["headline"])} & {c.key for c in cells_of(["rates"])}
    assert len(cells_of(["headline", "rates"])) == len(cells_of(["headline"])) + len(cells_of(["rates"])) - len(both)
    assert both


def test_after_the_first_seed_every_method_of_the_headline_has_both_forms() -> None:
    first = headline()[: len(headline()) // len(SEEDS)]
    assert {c.seed for c in first} == {SEEDS[0]}
    assert {(c.arm, c.form) for c in first} == {
        (arm, "sync" if arm in SYNCHRONOUS else form) for arm in HEADLINE for form in ("cold", "ramp")
    }


def test_quick_is_two_seeds_of_the_main_methods() -> None:
    assert len(quick()) == 16


def test_the_batch_is_of_the_same_size_whatever_the_group() -> None:
    for size in (4, 8, 16, 32):
        arguments = arguments_of(cell("reverse10", "gmc", "cold", group_size=size), "tiny-reverse10")
        assert f"--data.batch_groups={RESPONSES // size}" in arguments


@pytest.mark.parametrize("one", ONE_PER_ARM, ids=lambda c: f"{c.arm}-{c.form}")
def test_the_command_line_accepts_every_arm(monkeypatch: pytest.MonkeyPatch, one: Cell) -> None:
    cli = parse(monkeypatch, one)
    arm = ARMS[one.arm]
    assert type(cli.model.estimator.objective).__name__ == arm.objective
    assert type(cli.model.estimator.advantage).__name__ == arm.advantage
    assert type(cli.datamodule.sampler).__name__ == arm.sampler
    assert any(isinstance(c, EssLrScale) for c in cli.trainer.callbacks) == arm.ess_lr


@pytest.mark.parametrize(("arm", "thresholds"), [("gac", (0.2, 0.6)), ("gac_fixed", (0.1, 0.5)), ("none", None)])
def test_alignment_control_acts_by_the_thresholds_of_its_arm(
    monkeypatch: pytest.MonkeyPatch, arm: str, thresholds: tuple[float, float] | None
) -> None:
    cli = parse(monkeypatch, cell("reverse10", arm, "cold", lag=8))
    control = next(c for c in cli.trainer.callbacks if isinstance(c, GradientAlignmentControl))
    assert (control.thresholds, control.observe_only) == (thresholds, thresholds is None)


def test_alignment_control_that_is_calibrated_needs_thresholds() -> None:
    with pytest.raises(ValueError, match=r"needs thresholds of reverse10/sync/sync/k0/0\.0003/G8/200, which has none"):
        arguments_of(cell("reverse10", "gac", "cold", lag=8), "tiny-reverse10")


def test_alignment_control_is_calibrated_by_the_synchronous_run_of_its_seed_and_rate() -> None:
    one = cell("reverse10", "gac", "cold", rate=1e-4, seed=201, lag=8)
    assert one.calibration.key == "reverse10/sync/sync/k0/0.0001/G8/201"
