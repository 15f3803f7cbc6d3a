"""What the benchmarks of `tools/bench.py` run: a model whose responses all have the same length, and a timed `fit`."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from bench_trl import digit_share
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from make_tiny_model import EOS, PAD, VOCABULARY, make_tokenizer

from lit_asyncrl.algorithm.advantages import GroupMean
from lit_asyncrl.algorithm.losses import PPOClip
from lit_asyncrl.callbacks import AsyncRollout, RunReport
from lit_asyncrl.datamodule import RolloutDataModule
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.module import PolicyModule
from lit_asyncrl.policy import PolicyConfig
from lit_asyncrl.pool.pool import BATCH_WAITER
from lit_asyncrl.pool.sampler import FifoSampler
from lit_asyncrl.tasks import ReverseDigits
from lit_asyncrl.timing import StepTimes
from lit_asyncrl.types import Example, SamplingParams, TrainBatch

LEARNING_RATE = 1e-5
CONTEXT = 1024
PROMPT_MARKS = 2
"""Characters of a prompt of `ReverseDigits` that are not digits."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one update: groups, responses per group, and tokens per prompt and per response."""

    groups: int = 16
    group_size: int = 8
    prompt_length: int = 12
    response_length: int = 32

    @property
    def num_responses(self) -> int:
        """Responses of one update."""
        return self.groups * self.group_size

    def task(self) -> ReverseDigits:
        """Prompts of exactly `prompt_length` tokens, under a reward that differs between random responses."""
        digits = self.prompt_length - PROMPT_MARKS
        return ReverseDigits(digits, digits, rewards=[DigitShare()])

    def __str__(self) -> str:
        return f"{self.groups} x {self.group_size} responses of {self.response_length} tokens, prompts of {self.prompt_length}"


class DigitShare(RewardFn):
    """The share of a response's characters that are digits."""

    name = "digit_share"

    def __call__(self, completion: str, example: Example) -> float:
        """Count."""
        return digit_share(completion)


def make_model_folder(folder: Path, hidden_size: int = 128, num_layers: int = 4) -> str:
    """A random Qwen3 model (0.8M parameters by default) that never samples its end of sequence: every response has full length.

    One feature of the residual stream is the same for every token, and the tied head reads it with opposite sign for `<eos>`.
    """
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    eos, pad = VOCABULARY.index(EOS), VOCABULARY.index(PAD)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
    model: Any = Qwen3ForCausalLM(config)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = 2.0
        embeddings[eos, 0] = -2.0
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(folder)
    make_tokenizer(CONTEXT).save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class Setup:
    """What the parts share."""

    work_dir: Path
    steps: int
    warmup: int
    threads: int
    trl_python: str | None

    @property
    def model(self) -> str:
        """Folder of the 0.8M model, made on first use."""
        folder = self.work_dir / "model"
        return str(folder) if folder.is_dir() else make_model_folder(folder)


class RunningTimes(StepTimes):
    """`StepTimes` that also keeps totals which nobody drains."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        """Add to both."""
        super().add(part, seconds)
        self.totals[part] = self.totals.get(part, 0.0) + seconds


@dataclass
class TimedRun:
    """Per measured step: seconds, trained tokens, and seconds per part of the step."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return median(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Median over steps of trained tokens per second."""
        return median(n / s for n, s in zip(self.tokens, self.seconds, strict=True))

    @property
    def mean_tokens_per_s(self) -> float:
        """Trained tokens per second over all measured steps together."""
        return sum(self.tokens) / sum(self.seconds)

    def part_s(self, part: str) -> float:
        """Median seconds per step of one part."""
        return median(self.parts[part])

    def rest_s(self, whole: list[float], *parts: str) -> float:
        """Median over steps of what the parts leave of `whole`, seconds."""
        return median(w - sum(part) for w, *part in zip(whole, *(self.parts[name] for name in parts), strict=True))


class StepClock(Callback):
    """Reads time and totals after each update. First in the list of callbacks: an interval is from one update's end to the next.

    Times the background parts by wrapping the run's own calls: `reward` and, with it, `collect` (everything the collector thread
    does between two calls of the engine: checks, detokenization, rewards, groups, pool).

    Args:
        warmup: updates that are not measured.
        pinned: put the trainer on one core and the engine's process on another.
    """

    def __init__(self, warmup: int, pinned: bool) -> None:
        self.run = TimedRun()
        self._warmup = warmup
        self._pinned = pinned
        self._times = RunningTimes()
        self._last: tuple[float, dict[str, float]] = (0.0, {})
        self._returned: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap what is to be timed, before the rollout worker starts."""
        rollout = next(c for c in trainer.callbacks if isinstance(c, AsyncRollout))  # type: ignore[attr-defined]
        assert isinstance(pl_module, PolicyModule)
        self._rollout = rollout
        pl_module.times = self._times
        scorer: Any = rollout.data.scorer
        scorer.score = self._timed("reward", scorer.score)
        engine: Any = rollout.parts.engine
        engine.completions = self._between("collect", engine.completions)
        if self._pinned:
            pin_engine_and_trainer()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainBatch, batch_idx: int
    ) -> None:
        """Keep the differences to the update before."""
        before_at, before = self._last
        self._last = now, totals = time.monotonic(), self._totals()
        if batch_idx < self._warmup:
            return
        self.run.seconds.append(now - before_at)
        self.run.tokens.append(batch.num_trained_tokens)
        for part, total in totals.items():
            self.run.parts.setdefault(part, []).append(total - before.get(part, 0.0))

    def _totals(self) -> dict[str, float]:
        waited = self._rollout.data.supervisor.waited_s(BATCH_WAITER)
        return {**self._times.totals, "generation": self._rollout.parts.engine.busy_s, "batch_wait": waited}  # type: ignore[attr-defined]

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._times.measure(part):
                return function(*args, **kwargs)

        return call

    def _between(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._returned is not None:
                self._times.add(part, time.perf_counter() - self._returned)
            result = function(*args, **kwargs)
            self._returned = time.perf_counter()
            return result

        return call


def timed_fit(
    folder: str,
    shape: Shape,
    engine: HFEngine,
    *,
    max_policy_age: int,
    trainer_threads: int,
    steps: int,
    warmup: int,
    pinned: bool = False,
    log_dir: str | None = None,
) -> TimedRun:
    """Train with the GRPO objective and time the steps after the warm-up.

    Args:
        folder: model.
        shape: sizes of an update.
        engine: samples the responses.
        max_policy_age: 0 is synchronous.
        trainer_threads: torch threads of this process.
        steps, warmup: updates that are measured, and updates before them.
        pinned: see `StepClock`.
        log_dir: where TensorBoard logs go; None: nothing is logged.
    """
    clock = StepClock(warmup, pinned)
    rollout = AsyncRollout(engine, trainer_threads=trainer_threads, evaluate_first=False, evaluate_last=False)
    data = RolloutDataModule(
        task=shape.task(),
        batch_groups=shape.groups,
        group_size=shape.group_size,
        sampling=SamplingParams(max_new_tokens=shape.response_length),
        sampler=FifoSampler(),
        max_policy_age=max_policy_age,
        updates_per_epoch=warmup + steps,
        seed=0,
    )
    module = PolicyModule(
        PolicyConfig(folder), PPOClip(), GroupMean(), optimizer=lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE)
    )
    with kept_affinity(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=warmup + steps,
            limit_val_batches=0,
            log_every_n_steps=1,
            logger=TensorBoardLogger(log_dir) if log_dir else False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock, rollout, *([RunReport()] if log_dir else [])],
        ).fit(module, data)
    return clock.run


def pin_engine_and_trainer() -> None:
    """Every thread of this process on the first core allowed, every thread of its children on the second."""
    trainer_core, engine_core = sorted(os.sched_getaffinity(0))[:2]
    this = psutil.Process()
    for process, core in ((this, trainer_core), *((child, engine_core) for child in this.children(recursive=True))):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


@contextmanager
def kept_affinity() -> Iterator[None]:
    """Give this process's threads their cores back in the end."""
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        for thread in psutil.Process().threads():
            os.sched_setaffinity(thread.id, cores)
