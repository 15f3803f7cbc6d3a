"""Windows of a run that a test wants to hit: parts of a run that announce one by a file and wait, boundedly, to be let on.

    LIT_WINDOW=<name>   in the environment of the run; `at(name)` then writes `<folder>/reached` and waits for `<folder>/release`
    LIT_WINDOW_FOLDER   that folder

`python windows.py` is a server of runs: one process imports everything once and forks for each run, so that a window costs a
second instead of the imports. One JSON line in: arguments and environment of a run. Lines out: its process id, its exit code.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.tasks.digits import ReverseDigits

HELD_S = 60.0
"""Longest time, in seconds, that a window is held open."""


def at(name: str) -> None:
    """The run is in this window. The first time, if it is the one wanted, say so and wait."""
    if os.environ.get("LIT_WINDOW") != name:
        return
    folder = Path(os.environ["LIT_WINDOW_FOLDER"])
    if (folder / "reached").exists():
        return
    (folder / "reached").write_text(name, encoding="utf-8")
    deadline = time.monotonic() + HELD_S
    while not (folder / "release").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


class WindowTask(ReverseDigits):
    """Announces `set-up` and `prompt`."""

    def __init__(self) -> None:
        super().__init__(3, 5, rewards=[WindowReward()])

    def setup(self) -> None:
        at("set-up")
        super().setup()

    def train_example(self, index: int) -> Any:
        if threading.current_thread() is not threading.main_thread():  # where the checks before the run read it
            at("prompt")
        return super().train_example(index)


class WindowReward(RewardFn):
    """The number of digits in a response; announces `reward`."""

    name = "digits"

    def __call__(self, completion: str, example: Any) -> float:
        at("reward")
        return float(sum(c.isdigit() for c in completion))


class WindowEngine(HFEngine):
    """The embedded engine; announces what it is asked for."""

    def __init__(self, mode: str = "inline") -> None:
        super().__init__(mode=mode, num_slots=8)  # type: ignore[arg-type]
        self._sent = 0

    def start(self, *arguments: Any, **keywords: Any) -> None:
        at("engine start")
        super().start(*arguments, **keywords)

    def begin_update(self, version: int, weights: Any) -> None:
        at("rehearsal" if version == 0 else "weight update")
        self._sent = version
        super().begin_update(version, weights)

    def finish_update(self, timeout_s: float) -> Any:
        if self._sent > 0:
            at("delivery")
        return super().finish_update(timeout_s)

    def submit(self, requests: Any) -> None:
        if requests[0].purpose == "train":
            at("generation")
        super().submit(requests)

    def stop(self) -> None:
        at("shut-down")
        super().stop()


class WindowCallback(Callback):
    """Announces hooks of the trainer, from the second update on where training goes on."""

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= 1:
            at("optimizer step")

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        at("evaluation")

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._announce(trainer, "evaluation at the end")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._announce(trainer, "first evaluation")

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        at("save")

    @staticmethod
    def _announce(trainer: Any, name: str) -> None:
        """AsyncRollout's own evaluation from here on."""
        rollout = next(c for c in trainer.callbacks if hasattr(c, "evaluate_first"))
        evaluate = type(rollout).evaluate

        def announced(batch: Any) -> Any:
            at(name)
            return evaluate(rollout, batch)

        rollout.evaluate = announced


def serve() -> None:
    """Fork a run for each line of standard input, until it ends."""
    import lit_asyncrl.cli  # noqa: F401 - what all runs need
    from lit_asyncrl.__main__ import main

    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            screen = os.open(order["screen"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(screen, 1)
            os.dup2(screen, 2)
            os.environ.update(order["environment"])
            sys.argv = ["lit-asyncrl", *order["arguments"]]
            main()
            sys.stdout.flush()
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
