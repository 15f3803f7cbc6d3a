"""Times TRL's `GRPOTrainer` for part (c) of `tools/bench.py`, in an environment of its own:

    python -m venv trl-env
    trl-env/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    trl-env/bin/pip install "transformers>=5.16.1,<5.20" "trl==1.16.*" datasets accelerate
    python tools/bench.py c --trl-python trl-env/bin/python

Needs nothing of lit-asyncrl. Reads one JSON object on standard input (see `Request`), and writes the seconds of every step to the
file it names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TypedDict


class Request(TypedDict):
    """What to time.

    Attributes:
        model: Hugging Face folder.
        prompts: texts; `groups` of them are used per step.
        groups, group_size: prompts per step, and responses per prompt.
        response_length: tokens per response at most.
        num_steps: optimizer steps.
        num_threads: torch threads.
        learning_rate: of AdamW.
        output: file for the list of seconds per step.
    """

    model: str
    prompts: list[str]
    groups: int
    group_size: int
    response_length: int
    num_steps: int
    num_threads: int
    learning_rate: float
    output: str


def digit_share(text: str) -> float:
    """The benchmarks' reward: the share of characters that are digits."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def time_steps(request: Request) -> list[float]:
    """Seconds of each step of a GRPO run: one update per batch, no reference model, no logger, no checkpoint."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    logging.disable_progress_bar()

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.times.append(time.monotonic())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.monotonic())

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [digit_share(text) for text in completions]

    torch.set_num_threads(request["num_threads"])
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(request["model"], padding_side="left"),
        reward_funcs=[reward],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in request["prompts"]]),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=str(Path(request["output"]).parent / "trl"),
            per_device_train_batch_size=request["groups"] * request["group_size"],
            num_generations=request["group_size"],
            max_completion_length=request["response_length"],
            max_steps=request["num_steps"],
            learning_rate=request["learning_rate"],
            lr_scheduler_type="constant",
            beta=0.0,
            loss_type="grpo",
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    return [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)]


def main() -> None:
    """Time what standard input asks for."""
    request: Request = json.load(sys.stdin)
    Path(request["output"]).write_text(json.dumps(time_steps(request)), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
