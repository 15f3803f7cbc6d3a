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
LEAST_SAMPLED = 0.10
"""Sampled accuracy that it must have, too: from rarer rewards even synchronous training collapses. Other initial weights are
drawn until it is so."""
DRAWS = 12
BETWEEN_DRAWS = 1000
"""From one draw of a seed's initial weights to the next."""
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
    """Folder and figures of a task's warm start of a seed: `draw`, `steps`, `greedy`, `sampled`. Made once for all processes.

    Raises:
        ValueError: what the folder holds is not whole, or nothing gives the wanted accuracies.
    """
    folder = cache / f"{name}-{seed}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}-{seed}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the process, however it ends
        if not (folder / "training.json").is_file():
            make_warm_start(name, seed, folder)
    try:
        figures = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        return folder, {field: figures[field] for field in ("draw", "steps", "greedy", "sampled")}
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{folder} must hold a whole warm start, and its training.json does not. Remove the folder.") from error


def make_warm_start(name: str, seed: int, folder: Path) -> None:
    """Search initial weights and a number of supervised steps that give the wanted accuracies, and save that model.

    Raises:
        ValueError: there are none among `DRAWS` draws.
    """
    from make_tiny_model import heldout_accuracy

    task = task_of(name)
    for draw in range(DRAWS):
        found = search_steps(name, seed + draw * BETWEEN_DRAWS)
        if found is None:
            continue
        steps, model, tokenizer = found
        greedy, sampled = (heldout_accuracy(model, task, tokenizer, num_prompts=FINAL_PROMPTS, sample=s) for s in (False, True))
        if sampled >= LEAST_SAMPLED:
            break
    else:
        raise ValueError(
            f"the warm start of {name} and seed {seed} must sample {LEAST_SAMPLED} right, got less in {DRAWS} draws."
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    figures = {"draw": draw, "steps": steps, "greedy": round(greedy, 3), "sampled": round(sampled, 3)}
    (folder / "training.json").write_text(json.dumps(figures) + "\n", encoding="utf-8")  # last: it says that all is there


def search_steps(name: str, seed: int) -> tuple[int, Any, Any] | None:
    """Supervised steps from one draw that give a greedy accuracy within `WANTED`, model and tokenizer; None if no trial does.

    The same seed gives the same initial weights, and fewer steps are a beginning of more: accuracy rises with the steps but for
    noise, and bisection finds the place.
    """
    from make_tiny_model import heldout_accuracy

    low, high, steps = 0, 4 * WARM_STARTS[name].steps, WARM_STARTS[name].steps
    for _ in range(TRIALS):
        model, tokenizer = supervised(name, seed, steps)
        greedy = heldout_accuracy(model, task_of(name), tokenizer, num_prompts=SEARCH_PROMPTS, sample=False)
        if WANTED[0] <= greedy <= WANTED[1]:
            return steps, model, tokenizer
        if high - low <= 2:
            break
        if greedy < WANTED[0]:
            low, steps = steps, min((steps + high) // 2, math.ceil(1.15 * steps))
        else:
            high, steps = steps, max((low + steps) // 2, math.floor(0.9 * steps))
    return None


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
