"""Warm starts of the study: one for each task and seed, made once and kept in a folder that is not committed.

    python tools/study_warm_start.py reverse10 200 201     # made anyway when a run needs them

Prints the supervised steps that were found, and the accuracies.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from study_arms import TASKS

CACHE = Path.home() / ".cache" / "lit-asyncrl" / "study"


@dataclass(frozen=True)
class WarmStart:
    """How a task's warm starts are made.

    Attributes:
        steps: supervised steps that are tried first.
        learning_rate: of the supervised steps.
        first_steps: steps on the longest strings alone before that; see `tools/make_tiny_model.py`.
    """

    steps: int
    learning_rate: float = 2e-3
    first_steps: int = 0


WARM_STARTS = {"reverse10": WarmStart(158), "reverse4to16": WarmStart(100, first_steps=260), "sort10": WarmStart(120)}
WANTED = (0.40, 0.60)
"""Greedy accuracy that a warm start must have; the number of supervised steps is searched for each seed."""
TRIALS = 7
SEARCH_PROMPTS, FINAL_PROMPTS = 256, 1024
"""Held-out prompts of a trial, and of the figures that are kept."""


def task_of(name: str, digits: tuple[int, int] | None = None) -> Any:
    """The task object of a key of `TASKS`, or with other lengths."""
    from lit_asyncrl import tasks

    setting = TASKS[name]
    low, high = digits or setting.digits
    return getattr(tasks, setting.name)(min_digits=low, max_digits=high)


def warm_start(name: str, seed: int, cache: Path) -> tuple[Path, dict[str, float]]:
    """Folder and figures of a task's warm start of a seed: `steps`, `greedy`, `sampled`. Made once for all processes."""
    folder = cache / f"{name}-{seed}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}-{seed}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the process, however it ends
        if not (folder / "training.json").is_file():
            make_warm_start(name, seed, folder)
    return folder, json.loads((folder / "training.json").read_text(encoding="utf-8"))


def make_warm_start(name: str, seed: int, folder: Path) -> None:
    """Search the number of supervised steps whose greedy accuracy is nearest to the middle of `WANTED`, and save that model.

    The same seed gives the same initial weights, and fewer steps are a beginning of more: accuracy rises with the steps but for
    noise, and bisection finds the place.
    """
    from make_tiny_model import heldout_accuracy

    task, middle = task_of(name), sum(WANTED) / 2
    low, high, steps = 0, 4 * WARM_STARTS[name].steps, WARM_STARTS[name].steps
    best: tuple[float, int, Any, Any] | None = None
    for _ in range(TRIALS):
        model, tokenizer = supervised(name, seed, steps)
        greedy = heldout_accuracy(model, task, tokenizer, num_prompts=SEARCH_PROMPTS, sample=False)
        if best is None or abs(greedy - middle) < abs(best[0] - middle):
            best = (greedy, steps, model, tokenizer)
        if WANTED[0] <= greedy <= WANTED[1] or high - low <= 2:
            break
        if greedy < middle:
            low, steps = steps, min((steps + high) // 2, math.ceil(1.15 * steps))
        else:
            high, steps = steps, max((low + steps) // 2, math.floor(0.9 * steps))
    assert best is not None
    _, steps, model, tokenizer = best
    figures = {
        "steps": steps,
        "greedy": round(heldout_accuracy(model, task, tokenizer, num_prompts=FINAL_PROMPTS, sample=False), 3),
        "sampled": round(heldout_accuracy(model, task, tokenizer, num_prompts=FINAL_PROMPTS, sample=True), 3),
    }
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(figures) + "\n", encoding="utf-8")  # last: it says that all is there


def supervised(name: str, seed: int, steps: int) -> tuple[Any, Any]:
    """A model and its tokenizer after some supervised steps."""
    from make_tiny_model import make_model, make_tokenizer
    from make_tiny_model import warm_start as train

    setting = WARM_STARTS[name]
    torch.manual_seed(seed)
    tokenizer, model = make_tokenizer(256), make_model(64, 16, 2, 256)
    longest = TASKS[name].digits[1]
    with contextlib.redirect_stdout(io.StringIO()):
        for task, number in ((task_of(name, (longest, longest)), setting.first_steps), (task_of(name), steps)):
            if number:
                train(model, task, tokenizer, steps=number, batch_size=64, learning_rate=setting.learning_rate)
    return model, tokenizer


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in sys.argv[2:]:
        print(*warm_start(sys.argv[1], int(number), CACHE))
