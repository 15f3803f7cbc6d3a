"""Tiny complete runs through the Python API: a trainer, a module and a datamodule that take a second on one core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lit_asyncrl.callbacks import AsyncRollout
from lit_asyncrl.cli import AsyncRLCLI, Trainer, resolve_configs
from lit_asyncrl.datamodule import RolloutDataModule
from lit_asyncrl.evaluation import EvaluationSet
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.interfaces import Objective, RewardFn
from lit_asyncrl.module import PolicyModule
from lit_asyncrl.policy import PolicyConfig
from lit_asyncrl.pool.sampler import FifoSampler
from lit_asyncrl.tasks.digits import ReverseDigits
from lit_asyncrl.types import Example, SamplingParams


class LongAnswer(RewardFn):
    """A reward that an untrained policy spreads over: the number of characters that are digits."""

    name = "digits"

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, completion: str, example: Example) -> float:
        return float(sum(c.isdigit() for c in completion))


def build_command(*arguments: str) -> AsyncRLCLI:
    """Parse a command line and build trainer, module and datamodule as `fit` does; nothing is started."""
    return AsyncRLCLI(
        PolicyModule,
        RolloutDataModule,
        trainer_class=Trainer,
        save_config_callback=None,
        auto_configure_optimizers=False,
        run=False,
        args=resolve_configs(list(arguments)),
    )


def inline_rollout(**arguments: Any) -> AsyncRollout:
    """The engine in this process; no evaluation unless asked for."""
    settings = {"evaluate_first": False, "evaluate_last": False, "trainer_threads": 1} | arguments
    return AsyncRollout(engine=HFEngine(mode="inline", num_slots=8), **settings)


def make_data(**arguments: Any) -> RolloutDataModule:
    """Synchronous, 2 groups of 2, responses of at most 6 tokens, one small held-out set."""
    settings: dict[str, Any] = {
        "task": ReverseDigits(3, 5, rewards=[LongAnswer()]),
        "batch_groups": 2,
        "group_size": 2,
        "sampling": SamplingParams(max_new_tokens=6),
        "sampler": FifoSampler(),
        "max_policy_age": 0,
        "evaluation": {"heldout": EvaluationSet(num_prompts=4, final_num_prompts=8)},
        "data_timeout_s": 30.0,
        "seed": 0,
    }
    return RolloutDataModule(**(settings | arguments))


def make_module(path: str, *, learning_rate: float = 1e-3, objective: Objective | None = None, **arguments: Any) -> PolicyModule:
    """AdamW at a constant rate unless `optimizer` is given."""
    arguments.setdefault("optimizer", lambda params: torch.optim.AdamW(params, lr=learning_rate, weight_decay=0.01))
    return PolicyModule(PolicyConfig(path=path), objective=objective, **arguments)


def make_trainer(folder: Path, callbacks: list[pl.Callback], max_steps: int = 2, **arguments: Any) -> pl.Trainer:
    """Quiet, on the CPU, without files unless asked for."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": max_steps,
        "max_epochs": -1,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": None,
        "val_check_interval": 10**6,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    return pl.Trainer(callbacks=callbacks, **(settings | arguments))
