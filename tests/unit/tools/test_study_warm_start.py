"""Warm starts of the study: the number of supervised steps is searched once, and kept."""

import json
from pathlib import Path
from typing import Any

import make_tiny_model
import pytest
import study_warm_start
from study_warm_start import WANTED, WARM_STARTS, warm_start


class Trained:
    """A model whose accuracy is all that is known of it, and its tokenizer."""

    def __init__(self, accuracy: float, flat: bool) -> None:
        self.accuracy = accuracy
        self.flat = flat

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that were tried; 230 steps give a greedy accuracy of a half, and 1 % more or less is 3 steps.

    Sampled accuracy is a half of it, but 0.05 for the first draw of seed 201, and for every draw of seed 202.
    """
    tried: list[int] = []

    def supervised(name: str, seed: int, steps: int) -> tuple[Trained, Trained]:
        tried.append(steps)
        model = Trained(min(max(0.5 + (steps - 230) / 300, 0.0), 1.0), flat=seed == 201 or seed % 1000 == 202)
        return model, model

    def accuracy(model: Trained, task: Any, tokenizer: Any, *, num_prompts: int, sample: bool) -> float:
        return (0.05 if model.flat else model.accuracy / 2) if sample else model.accuracy

    monkeypatch.setattr(study_warm_start, "supervised", supervised)
    monkeypatch.setattr(make_tiny_model, "heldout_accuracy", accuracy)
    return tried


def test_the_search_ends_within_the_wanted_accuracy(trials: list[int], tmp_path: Path) -> None:
    folder, figures = warm_start("reverse10", 200, tmp_path)
    assert trials[0] == WARM_STARTS["reverse10"].steps
    assert figures["steps"] == trials[-1]
    assert WANTED[0] <= figures["greedy"] <= WANTED[1]
    assert json.loads((folder / "training.json").read_text(encoding="utf-8")) == figures


def test_weights_that_sample_almost_nothing_right_are_drawn_again(trials: list[int], tmp_path: Path) -> None:
    assert warm_start("reverse10", 200, tmp_path)[1]["draw"] == 0
    assert warm_start("reverse10", 201, tmp_path)[1]["draw"] == 1
    with pytest.raises(ValueError, match=r"reverse10 and seed 202 must sample 0\.1 right, got less in 12 draws"):
        warm_start("reverse10", 202, tmp_path)
    assert not (tmp_path / "reverse10-202").exists()


def test_a_folder_that_is_not_whole_is_named(tmp_path: Path) -> None:
    (tmp_path / "reverse10-200").mkdir()
    (tmp_path / "reverse10-200" / "training.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"reverse10-200 must hold a whole warm start"):
        warm_start("reverse10", 200, tmp_path)


def test_a_warm_start_is_made_once(trials: list[int], tmp_path: Path) -> None:
    first = warm_start("reverse10", 200, tmp_path)
    number = len(trials)
    assert warm_start("reverse10", 200, tmp_path) == first
    assert len(trials) == number


def test_another_seed_has_another_folder(trials: list[int], tmp_path: Path) -> None:
    assert warm_start("reverse10", 200, tmp_path)[0] != warm_start("reverse10", 201, tmp_path)[0]


def test_the_model_of_a_seed_and_a_number_of_steps_is_always_the_same() -> None:
    first, second = (study_warm_start.supervised("reverse10", 200, 2)[0] for _ in range(2))
    assert all((a == b).all() for a, b in zip(first.parameters(), second.parameters(), strict=True))
