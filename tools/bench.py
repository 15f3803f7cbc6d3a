"""The project's own benchmarks: ratios measured in one run, so that they mean the same on any machine.

    python tools/bench.py a b d e                            # c needs TRL in an environment of its own, see bench_trl.py
    python tools/bench.py c --trl-python trl-env/bin/python

    a  asynchronous against synchronous, one core each for engine and trainer, at lengths where both take about as long
    b  embedded engine against `transformers.generate`
    c  a step with the GRPO objective against TRL's `GRPOTrainer`, same number of threads
    d  where a step's time goes
    e  a step with exact OPOB (`batched`) against a plain step

Medians over `--steps` steps after `--warmup`. Run it on a machine with two cores that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bench_engine
import bench_trl
import torch
from bench_runs import CONTEXT, LEARNING_RATE, Shape, TimedRun, make_model_folder, timed_fit
from torch import nn

from lit_asyncrl.algorithm.advantages import OPOB, GroupMean
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.losses import SequenceTIS
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.interfaces import Advantage
from lit_asyncrl.policy import load_model
from lit_asyncrl.types import MicroBatch

BALANCE = 0.15
"""Largest difference between generation and training time, over the longer one, that counts as balanced."""
MAX_POLICY_AGE = 4
WAVES = 4
"""Batches of slots that one run of part b decodes."""
BUSY_LOAD = 0.7
"""Load average (1 minute) above which the machine counts as busy."""


@dataclass(frozen=True)
class Line:
    """One row of a table: what was measured, and the goal where there is one (`low` or `high`: which side of it is good)."""

    label: str
    value: str
    ratio: float | None = None
    goal: float | None = None
    good: str = "high"

    def verdict(self) -> str:
        """`pass` or `miss`; empty without a goal."""
        if self.ratio is None or self.goal is None:
            return ""
        reached = self.ratio >= self.goal if self.good == "high" else self.ratio <= self.goal
        return f"{'>=' if self.good == 'high' else '<='} {self.goal:.2f} {'pass' if reached else 'miss'}"


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


# ---------------------------------------------------------------- (a) asynchronous against synchronous


def bench_async(setup: Setup) -> list[Line]:
    """Trained tokens per second at `max_policy_age` 4 over those at 0, both sides one pinned core each."""
    shape = balanced_shape(setup)
    waiting = _one_core_each(setup, shape, max_policy_age=0)
    running = _one_core_each(setup, shape, max_policy_age=MAX_POLICY_AGE)
    generation, training = generation_and_training_s(waiting)
    gap = abs(generation - training) / max(generation, training)
    return [
        Line("shape", str(shape)),
        Line("generation, training of a batch", f"{generation:.3f} s, {training:.3f} s"),
        Line("their difference", f"{gap:.0%}", gap, BALANCE, "low"),
        Line("synchronous", f"{waiting.tokens_per_s:.0f} tok/s"),
        Line(f"asynchronous, age <= {MAX_POLICY_AGE}", f"{running.tokens_per_s:.0f} tok/s"),
        Line("ratio of means", f"{running.mean_tokens_per_s / waiting.mean_tokens_per_s:.2f}"),
        _ratio("asynchronous / synchronous", running.tokens_per_s / waiting.tokens_per_s, 1.5, "high"),
    ]


def balanced_shape(setup: Setup) -> Shape:
    """Sizes at which the engine generates a batch in about the time in which the trainer trains on it.

    Few responses favour the trainer (a decode step costs almost the same for 8 of them as for 64), long prompts the engine (they
    are read once per group, but trained on with every response): halve the groups while training takes longer, then bisect the
    prompt's length.
    """
    # A share of 1/2 + d of training in the sum is a difference of 4 d over the longer one; half of the limit is aimed at, for the
    # longer measurement may come out differently.
    slack = BALANCE / 2 / 4
    shape = Shape()
    share = _training_share(setup, shape)
    while share > 0.5 + slack and shape.groups > 1:
        shape = replace(shape, groups=shape.groups // 2)
        share = _training_share(setup, shape)
    low, high = shape.prompt_length, CONTEXT // 2
    while abs(share - 0.5) > slack and high - low > 1:
        low, high = (low, shape.prompt_length) if share > 0.5 else (shape.prompt_length, high)
        shape = replace(shape, prompt_length=round((low * high) ** 0.5))
        share = _training_share(setup, shape)
    return shape


def _training_share(setup: Setup, shape: Shape) -> float:
    short = replace(setup, steps=max(2, setup.steps // 3), warmup=2)
    generation, training = generation_and_training_s(_one_core_each(short, shape, max_policy_age=0))
    print(f"  {shape}: generation {generation:.3f} s, training {training:.3f} s", flush=True)
    return training / (generation + training)


def generation_and_training_s(run: TimedRun) -> tuple[float, float]:
    """Seconds of a synchronous step for which the trainer waits for its batch, and the rest of the step."""
    generation = run.part_s("batch_wait")
    return generation, run.step_s - generation


def _one_core_each(setup: Setup, shape: Shape, *, max_policy_age: int) -> TimedRun:
    return timed_fit(
        setup.model,
        shape,
        HFEngine(num_slots=shape.num_responses, num_threads=1),
        max_policy_age=max_policy_age,
        trainer_threads=1,
        steps=setup.steps,
        warmup=setup.warmup,
        pinned=True,
    )


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
            [
                lambda requests=requests: bench_engine.run_engine(model, requests, slots),
                lambda requests=requests: bench_engine.run_generate(model, requests, slots),
            ],
            warmup=1,
            steps=-(-setup.steps // WAVES),
        )
        rates = f"{tokens / engine_s:.0f}, {tokens / generate_s:.0f} tok/s"
        lines.append(Line(f"engine, generate at {shortest}-{longest} tokens", rates))
        lines.append(_ratio("engine / generate", generate_s / engine_s, goal, "high"))
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


# ---------------------------------------------------------------- (c) against TRL


def bench_against_trl(setup: Setup) -> list[Line]:
    """Seconds of a GRPO step of ours over TRL's, same model, prompts, lengths and number of threads."""
    if setup.trl_python is None:
        return [Line("skipped", "give --trl-python, see tools/bench_trl.py")]
    shape = Shape()
    trl_s = statistics.median(_trl_steps(setup, shape)[setup.warmup :])
    threads = setup.threads
    inline = _grpo(setup, shape, HFEngine(mode="inline"), max_policy_age=0, trainer_threads=threads)
    apart = _grpo(setup, shape, HFEngine(num_threads=threads), max_policy_age=0, trainer_threads=threads)
    running = _grpo(setup, shape, HFEngine(), max_policy_age=MAX_POLICY_AGE, trainer_threads=1)
    return [
        Line("shape", str(shape)),
        Line("threads (asynchronous: one each)", str(threads)),
        Line("TRL", f"{trl_s:.3f} s"),
        Line("synchronous, engine in process", f"{inline.step_s:.3f} s"),
        _ratio("synchronous / TRL (stretch 0.60)", inline.step_s / trl_s, 0.75, "low"),
        Line("synchronous, engine in its process", f"{apart.step_s:.3f} s", apart.step_s / trl_s),
        Line(f"asynchronous, age <= {MAX_POLICY_AGE}", f"{running.step_s:.3f} s", running.step_s / trl_s),
    ]


def _grpo(setup: Setup, shape: Shape, engine: HFEngine, *, max_policy_age: int, trainer_threads: int) -> TimedRun:
    return timed_fit(
        setup.model,
        shape,
        engine,
        max_policy_age=max_policy_age,
        trainer_threads=trainer_threads,
        steps=setup.steps,
        warmup=setup.warmup,
    )


def _trl_steps(setup: Setup, shape: Shape) -> list[float]:
    assert setup.trl_python is not None
    num_steps = setup.steps + setup.warmup
    task = shape.task()
    output = setup.work_dir / "trl_steps.json"
    request: bench_trl.Request = {
        "model": setup.model,
        "prompts": [str(task.train_example(i).prompt) for i in range(num_steps * shape.groups)],
        "groups": shape.groups,
        "group_size": shape.group_size,
        "response_length": shape.response_length,
        "num_steps": num_steps,
        "num_threads": setup.threads,
        "learning_rate": LEARNING_RATE,
        "output": str(output),
    }
    script = Path(__file__).with_name("bench_trl.py")
    subprocess.run([setup.trl_python, str(script)], input=json.dumps(request), text=True, check=True, stdout=subprocess.DEVNULL)
    steps: list[float] = json.loads(output.read_text(encoding="utf-8"))
    return steps


# ---------------------------------------------------------------- (d) where a step's time goes


MODEL_COMPUTE = ("generation", "forward", "backward", "optimizer")
OVERHEAD = ("publish", "reward", "assembly", "pool", "collate", "log", "other")


def bench_step(setup: Setup) -> list[Line]:
    """Seconds per part of a synchronous step, everything in one process on one thread, with logging."""
    with contextlib.redirect_stdout(io.StringIO()):  # the closing table
        run = timed_fit(
            setup.model,
            Shape(),
            HFEngine(mode="inline"),
            max_policy_age=0,
            trainer_threads=1,
            steps=setup.steps,
            warmup=setup.warmup,
            log_dir=str(setup.work_dir / "logs"),
        )
    parts = step_parts(run)
    lines = [Line("shape", str(Shape())), Line("step", f"{run.step_s * 1e3:8.1f} ms")]
    lines += [Line(part, f"{seconds * 1e3:8.1f} ms {seconds / run.step_s:6.1%}") for part, seconds in parts.items()]
    share = sum(parts[part] for part in OVERHEAD) / run.step_s
    return [*lines, _ratio("neither model compute nor waiting", share, 0.15, "low")]


def step_parts(run: TimedRun) -> dict[str, float]:
    """Median seconds per part of a synchronous step.

    In the trainer's thread: `forward`, `backward`, `optimizer` (with clipping), `publish` (copies the weights to the engine and
    proves the delivery), `pool` (takes the batch), `collate`, `log`, and `other`, which nobody measured: Lightning's loop,
    gradient norm, statistics. While it waits for its batch: `generation` and, in the collector's thread, `reward` and `assembly`
    (checks, detokenization, groups, their way into the pool); what is left is `waiting`. Generation starts when the new weights
    are delivered, beside `log`: the sum can be a little above the step.
    """
    in_trainer = ("forward", "backward", "optimizer", "publish", "collate", "log", "data_wait")
    parts = {part: run.part_s(part) for part in (*MODEL_COMPUTE, "publish", "reward")}
    parts["assembly"] = run.rest_s(run.parts["collect"], "reward")
    parts["pool"] = run.rest_s(run.parts["data_wait"], "batch_wait")
    parts |= {part: run.part_s(part) for part in ("collate", "log")}
    parts["waiting"] = max(0.0, run.rest_s(run.parts["batch_wait"], "generation", "collect"))
    parts["other"] = run.rest_s(run.seconds, *in_trainer)
    return parts


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
        _ratio("batched / plain (stretch 1.35)", batched / plain, 1.5, "low"),
    ]


def _update(advantage: Advantage) -> Callable[[], None]:
    """One optimizer update of a model of its own."""
    model = load_model("tiny-reverse10")
    batch = _micro_batch(model)
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


def _micro_batch(model: nn.Module, groups: int = 16, group_size: int = 8, prompt: int = 12, response: int = 11) -> MicroBatch:
    """Random trajectories of the packaged model's lengths, sampled by a policy that differs a little."""
    torch.manual_seed(0)
    config: Any = model.config
    shape = (groups * group_size, prompt + response)
    mask = (torch.arange(shape[1]) >= prompt).expand(shape)
    batch = MicroBatch(
        input_ids=torch.randint(3, config.vocab_size, shape),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        loss_mask=mask,
        behavior_logprobs=torch.zeros(shape),
        token_versions=torch.where(mask, 0, -1).int(),
        rewards=torch.rand(shape[0]),
        group_index=torch.arange(groups).repeat_interleave(group_size),
        temperature=1.0,
    )
    with torch.no_grad():
        logprobs = token_logprobs(model, batch).logprobs
    return replace(batch, behavior_logprobs=torch.where(mask, logprobs + 0.05 * torch.randn(shape), 0.0))


# ---------------------------------------------------------------- command line


PARTS: dict[str, Callable[[Setup], list[Line]]] = {
    "a": bench_async,
    "b": bench_generate,
    "c": bench_against_trl,
    "d": bench_step,
    "e": bench_opob,
}


def _ratio(label: str, ratio: float, goal: float, good: str) -> Line:
    return Line(label, "", ratio, goal, good)


def print_table(title: str, lines: list[Line]) -> None:
    """One part's rows in columns: label, value, ratio, goal with verdict."""
    print(f"\n{title}")
    for line in lines:
        ratio = "" if line.ratio is None else f"{line.ratio:5.2f}"
        print(f"  {line.label:<48} {line.value:<26} {ratio:>6}  {line.verdict()}".rstrip(), flush=True)


def main() -> int:
    """Run the parts that were named; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--steps", type=int, default=20, help="measured steps (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default: %(default)s)")
    parser.add_argument("--trl-python", help="interpreter of the environment that TRL is in, for part c")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of both sides of part c (default: %(default)s)")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        print(f"warning: this machine is busy (load average {load:.1f}); the figures below mean little", file=sys.stderr)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    missed = False
    with tempfile.TemporaryDirectory() as work_dir:
        setup = Setup(Path(work_dir), arguments.steps, arguments.warmup, arguments.threads, arguments.trl_python)
        for part in arguments.parts:
            lines = PARTS[part](setup)
            print_table(f"({part}) {PARTS[part].__doc__}", lines)
            missed = missed or any(line.verdict().endswith("miss") for line in lines)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
