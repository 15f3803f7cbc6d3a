"""Parts a, c and d of `tools/bench.py`: whole training runs, timed step by step."""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path

import bench_trl
from bench_runs import CONTEXT, LEARNING_RATE, Setup, Shape, TimedRun, timed_fit
from bench_table import Line, ratio_line

from lit_asyncrl.generation.hf import HFEngine

BALANCE = 0.15
"""Largest difference between generation and training time, over the longer one, that counts as balanced."""
MAX_POLICY_AGE = 4


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
        ratio_line("asynchronous / synchronous", running.tokens_per_s / waiting.tokens_per_s, 1.5, "high"),
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
        ratio_line("synchronous / TRL (stretch 0.60)", inline.step_s / trl_s, 0.75, "low"),
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
    return [*lines, ratio_line("neither model compute nor waiting", share, 0.15, "low")]


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
