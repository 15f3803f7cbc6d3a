"""Parts b and e of `tools/bench.py`: computations alone, without a run around them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import bench_engine
import torch
from bench_algorithm import make_batch
from bench_runs import LEARNING_RATE, Setup
from bench_table import Line, ratio_line
from torch import nn

from lit_asyncrl.algorithm.advantages import OPOB, GroupMean
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.losses import SequenceTIS
from lit_asyncrl.interfaces import Advantage
from lit_asyncrl.policy import load_model

WAVES = 4
"""Batches of slots that one run of part b decodes."""


# ---------------------------------------------------------------- (b) engine against transformers.generate


def bench_generate(setup: Setup) -> list[Line]:
    """Sampled tokens per second of the embedded engine over those of `generate`, one thread."""
    torch.set_num_threads(1)
    model, slots = bench_engine.build_model(), 128
    lines = []
    for shortest, longest, goal in ((32, 32, 0.9), (8, 64, 1.3)):
        requests = bench_engine.make_requests(WAVES * slots, shortest, longest)
        tokens = sum(request.sampling.max_new_tokens for request in requests)
        engine_s, generate_s = alternate(
            [partial(run, model, requests, slots) for run in (bench_engine.run_engine, bench_engine.run_generate)],
            warmup=1,
            steps=-(-setup.steps // WAVES),
        )
        rates = f"{tokens / engine_s:.0f}, {tokens / generate_s:.0f} tok/s"
        lines.append(Line(f"engine, generate at {shortest}-{longest} tokens", rates))
        lines.append(ratio_line("engine / generate", generate_s / engine_s, goal, "high"))
    return lines


def alternate(arms: Sequence[Callable[[], None]], *, warmup: int, steps: int) -> list[float]:
    """Median seconds of each arm; they take turns, so that a disturbance of the machine falls on all of them."""
    seconds: list[list[float]] = [[] for _ in arms]
    for _ in range(warmup + steps):
        for arm, measured in zip(arms, seconds, strict=True):
            started = time.perf_counter()
            arm()
            measured.append(time.perf_counter() - started)
    return [statistics.median(measured[warmup:]) for measured in seconds]


# ---------------------------------------------------------------- (e) exact OPOB against a plain step


def bench_opob(setup: Setup) -> list[Line]:
    """Forward, backward, clipping and AdamW of the same micro-batch, one thread; the kinds of step take turns."""
    torch.set_num_threads(1)
    arms: dict[str, Advantage] = {
        "plain (GroupMean)": GroupMean(),
        "OPOB, batched": OPOB("batched"),
        "OPOB, logit_proxy": OPOB("logit_proxy"),
    }
    medians = alternate([_update(advantage) for advantage in arms.values()], warmup=setup.warmup, steps=setup.steps)
    plain, batched, proxy = medians
    return [
        *(Line(name, f"{seconds * 1e3:8.1f} ms") for name, seconds in zip(arms, medians, strict=True)),
        Line("logit_proxy / plain", "", proxy / plain),
        ratio_line("batched / plain (stretch 1.35)", batched / plain, 1.5, "low"),
    ]


def _update(advantage: Advantage) -> Callable[[], None]:
    """One optimizer update of a model of its own."""
    model = load_model("tiny-reverse10")
    batch = make_batch(model, groups=16, group_size=8, prompt=12, response=11)  # the packaged model's lengths
    estimator = PolicyGradient(SequenceTIS(), advantage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        estimator.accumulate(
            model,
            batch,
            num_trajectories=batch.num_trajectories,
            num_trained_tokens=int(batch.loss_mask.sum()),
            backward=lambda loss: loss.backward(),
        )
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step
