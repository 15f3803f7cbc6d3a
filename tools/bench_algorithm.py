"""What the maths of `lit_asyncrl.algorithm` costs beside a plain step: ratios measured in one run, medians, peak memory.

    python tools/bench_algorithm.py            # all parts; or some of: opob smollm2 logprobs

    opob      a step with exact OPOB on the packaged tiny Qwen3, 128 trajectories, against a plain one and `per_trajectory`
    smollm2   the same at the shapes of SmolLM2-135M (random weights), 8 trajectories of 64 tokens; everything else's share
    logprobs  token log-probs in chunks at a vocabulary of 49,152, against the whole at once

A plain step is forward, backward, clipping and AdamW of the same micro-batch. Memory is the highest resident size, each arm in a
process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from bench_table import Line, print_table, ratio_line
from torch import Tensor, nn

from lit_asyncrl.algorithm.advantages import OPOB, GroupMean
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.gradients import alignment, ess_lr_scale, gac_beta, gradient_products, project_gradients
from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.losses import SequenceTIS
from lit_asyncrl.algorithm.ranks import pooled_ess_ratio
from lit_asyncrl.algorithm.statistics import pool_stats
from lit_asyncrl.interfaces import Advantage
from lit_asyncrl.policy import load_model
from lit_asyncrl.types import MicroBatch

VOCABULARY = 49_152
MIB = 2**20
ADVANTAGES: dict[str, Callable[[], Advantage]] = {
    "plain": GroupMean,
    "batched": lambda: OPOB("batched"),
    "per_trajectory": lambda: OPOB("per_trajectory"),
    "logit_proxy": lambda: OPOB("logit_proxy"),
}


# ---------------------------------------------------------------- steps


def smollm2() -> nn.Module:
    """A Llama of SmolLM2-135M's shapes, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def make_batch(model: nn.Module, groups: int, group_size: int, prompt: int, response: int) -> MicroBatch:
    """Random trajectories without a common prompt, sampled by a policy that differs a little."""
    torch.manual_seed(0)
    shape = (groups * group_size, prompt + response)
    config: Any = model.config
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


class Steps:
    """Steps of one model under several advantages, with the seconds that were spent outside of the model and the log-probs."""

    def __init__(self, model: nn.Module, batch: MicroBatch) -> None:
        self.model = model
        self.batch = batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.estimators = {name: PolicyGradient(SequenceTIS(), make()) for name, make in ADVANTAGES.items()}
        self.elsewhere_s = 0.0

    def step(self, name: str) -> float:
        """One step; its seconds."""
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.estimators[name].gradient(self.model, [self.batch], backward=lambda loss: loss.backward())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return time.perf_counter() - started

    def rest(self) -> float:
        """Seconds of a plain gradient that are neither model, log-probs nor backward; batch statistics and step size included."""
        spent = 0.0

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal spent
                begun = time.perf_counter()
                result = function(*args, **kwargs)
                spent += time.perf_counter() - begun
                return result

            return call

        users = [m for n, m in sys.modules.items() if n.startswith("lit_asyncrl.algorithm.") and hasattr(m, "token_logprobs")]
        for module in users:
            module.token_logprobs = timed(token_logprobs)  # type: ignore[attr-defined]
        try:
            self.optimizer.zero_grad()
            started = time.perf_counter()
            parts = self.estimators["plain"].gradient(self.model, [self.batch], backward=timed(lambda loss: loss.backward()))
            stats = pool_stats(parts, 0)
            ess_lr_scale(pooled_ess_ratio(stats.log_weights))
            return time.perf_counter() - started - spent
        finally:
            for module in users:
                module.token_logprobs = token_logprobs  # type: ignore[attr-defined]


def alternate(steps: Steps, counts: dict[str, int]) -> dict[str, float]:
    """Median seconds; the arms take turns, so that a disturbance of the machine falls on all of them. One warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in counts}
    for turn in range(max(counts.values()) + 1):
        for name, count in counts.items():
            if turn <= count:
                seconds[name].append(steps.step(name))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


# ---------------------------------------------------------------- parts


def bench_opob(repeats: int) -> list[Line]:
    """Exact OPOB on the tiny Qwen3, 128 trajectories of 12 + 11 tokens."""
    model = load_model("tiny-reverse10")
    steps = Steps(model, make_batch(model, groups=16, group_size=8, prompt=12, response=11))
    medians = alternate(
        steps, {"plain": 6 * repeats, "batched": 6 * repeats, "logit_proxy": 6 * repeats, "per_trajectory": repeats}
    )
    return [
        *(Line(name, f"{s * 1e3:8.1f} ms") for name, s in medians.items()),
        Line("logit_proxy / plain", "", medians["logit_proxy"] / medians["plain"]),
        ratio_line("batched / plain", medians["batched"] / medians["plain"], 1.35, "low"),
        ratio_line("per_trajectory / batched", medians["per_trajectory"] / medians["batched"], 8.0, "high"),
    ]


def bench_smollm2(repeats: int) -> list[Line]:
    """Exact OPOB and everything else at SmolLM2-135M's shapes, 8 trajectories of 64 tokens."""
    peaks = {name: _in_child("step", name) for name in ("plain", "batched")}
    model = smollm2()
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / MIB
    steps = Steps(model, make_batch(model, groups=1, group_size=8, prompt=32, response=32))
    medians = alternate(steps, {"plain": repeats, "batched": repeats})
    rest = statistics.median(steps.rest() for _ in range(repeats))
    safe, project = _alignment_seconds(steps, repeats)
    extra = (peaks["batched"] - peaks["plain"]) / size
    return [
        *(Line(name, f"{s:8.2f} s, peak {peaks[name]:5.0f} MiB") for name, s in medians.items()),
        ratio_line("batched / plain", medians["batched"] / medians["plain"], 1.9, "low"),
        ratio_line(f"peak over plain, in models of {size:.0f} MiB", extra, 2.0, "low"),
        ratio_line("weights, advantages, statistics, ESS: % of a step", 100 * rest / medians["plain"], 2.0, "low"),
        ratio_line("the same with GAC, safe: % of a step", 100 * (rest + safe) / medians["plain"], 2.0, "low"),
        Line("GAC, projecting: % of a step", "", 100 * project / medians["plain"]),
    ]


def _alignment_seconds(steps: Steps, repeats: int) -> tuple[float, float]:
    """Seconds of measuring the cosine, and of measuring and projecting."""
    gradients = [p.grad for p in steps.model.parameters() if p.grad is not None]
    previous = [torch.randn_like(g) for g in gradients]
    measured, projected = [], []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        products = gradient_products(gradients, previous)
        cosine = alignment(products)
        measured.append(time.perf_counter() - started)
        project_gradients(gradients, previous, products, gac_beta(abs(cosine) + 0.1, 0.05))
        projected.append(time.perf_counter() - started)
    return statistics.median(measured[1:]), statistics.median(projected[1:])


def bench_logprobs(repeats: int) -> list[Line]:
    """Log-probs and entropy of 8 x 128 tokens over 49,152 logits. Memory is that beside the logits, 192 MiB.

    The backward pass makes the logits' gradient, as large as they are, in either way.
    """
    arms = ("chunked", "whole")
    forward = {name: _in_child("forward", name) for name in arms}
    peaks = {name: _in_child("backward", name) for name in arms}
    runs = {name: _logprobs_run(name) for name in arms}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(2 * repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return [
        *(Line(f"{name}, forward", f"peak +{forward[name]:5.0f} MiB") for name in arms),
        *(Line(f"{name}, with backward", f"{medians[name] * 1e3:8.0f} ms, peak +{peaks[name]:5.0f} MiB") for name in arms),
        ratio_line("chunked / whole, time with backward", medians["chunked"] / medians["whole"], 1.1, "low"),
        ratio_line("chunked / whole, peak of the forward pass", forward["chunked"] / forward["whole"], 1 / 3, "low"),
        Line("chunked / whole, peak with backward", "", peaks["chunked"] / peaks["whole"]),
    ]


def _logprobs_run(name: str, backward: bool = True) -> Callable[[], None]:
    """One forward, and backward, from given logits, which stand for a model's."""
    torch.manual_seed(0)
    logits = torch.randn(8, 128, VOCABULARY).requires_grad_()
    ids = torch.randint(0, VOCABULARY, (8, 129))
    mask = (torch.arange(129) > 0).expand(8, 129)
    batch = MicroBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(mask),
        loss_mask=mask,
        behavior_logprobs=torch.zeros(8, 129),
        token_versions=torch.where(mask, 0, -1).int(),
        rewards=torch.zeros(8),
        group_index=torch.arange(8),
        temperature=1.0,
    )

    class Logits(nn.Module):
        def forward(self, **_: Any) -> Any:
            return SimpleNamespace(logits=logits)

    model = Logits()

    def whole() -> Tensor:
        logprobs = (logits / batch.temperature).log_softmax(-1)
        entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
        assert entropy.isfinite().all()
        return logprobs.gather(-1, ids[:, 1:, None]).sum()

    def run() -> None:
        logits.grad = None
        total = token_logprobs(model, batch).logprobs.sum() if name == "chunked" else whole()
        if backward:
            total.backward()

    return run


# ---------------------------------------------------------------- memory


def _in_child(kind: str, name: str) -> float:
    """Peak resident memory, MiB, of one arm in a process of its own (for log-probs: above that with the logits alone)."""
    command = [sys.executable, __file__, "--child", kind, name, "--threads", str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return float(done.stdout.split()[-1])


def _child(kind: str, name: str) -> None:
    if kind == "step":
        model = smollm2()
        steps = Steps(model, make_batch(model, groups=1, group_size=8, prompt=32, response=32))
        before = 0.0
        for _ in range(2):  # the optimizer's moments exist from the second on
            steps.step(name)
    else:
        run = _logprobs_run(name, backward=kind == "backward")
        before = psutil.Process().memory_info().rss / MIB
        run()
    print(_peak_mib() - before)


def _peak_mib() -> float:
    """This process's highest resident size; the kernel's own count, which `exec` starts at 0."""
    with open("/proc/self/status", encoding="utf-8") as status:  # noqa: PTH123 - no file of the project's
        return next(float(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


PARTS: dict[str, Callable[[int], list[Line]]] = {"opob": bench_opob, "smollm2": bench_smollm2, "logprobs": bench_logprobs}


def main() -> int:
    """Run the parts that were named; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of the slowest arm (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        _child(*arguments.child)
        return 0
    if unknown := sorted(set(arguments.parts) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)}")
    missed = False
    for part in arguments.parts or PARTS:
        lines = PARTS[part](arguments.repeats)
        print_table(f"({part}) {(PARTS[part].__doc__ or '').splitlines()[0]} Load {os.getloadavg()[0]:.1f}.", lines)
        missed = missed or any(line.verdict().endswith("miss") for line in lines)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
