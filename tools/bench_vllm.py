"""What our side costs vLLM: tokens per second through the rollout worker, under weight updates, and the price of the proof.

    python tools/bench_vllm.py [--seconds 20] [--repeats 3] [--model FOLDER --dtype bfloat16]

(a) the rollout worker (rewards and pool included) against bare `AsyncLLM` with the same requests; (b) an update every second, by
the weight publisher with its proof, against no updates; (c) how long generation stands still for an update; (d) the proof's own
time (probe, versions, checksums) as a share of an update interval of one second. One engine, runs alternate, medians.
Model: a random Qwen3 of 0.8M parameters, 64 requests at once, up to 200 tokens each; or `--model`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from bench_engine import build_model
from bench_table import Line, print_table
from transformers import AutoTokenizer

from lit_asyncrl.generation.publisher import EXACT_NOISE, ROUNDED_NOISE, WeightPublisher
from lit_asyncrl.generation.rollout import RolloutConfig, RolloutWorker
from lit_asyncrl.generation.vllm import VLLMEngine
from lit_asyncrl.generation.vllm_backend import VLLMBackend
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.pool.sampler import FifoSampler
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.tasks.digits import ReverseDigits
from lit_asyncrl.tasks.runner import RewardRunner
from lit_asyncrl.types import Example, NamedTensors, Prompt, SamplingParams

PROBE_IDS = tuple(range(3, 19))
PROBE_TEXT = "The sum of 12 and 30 is 42, and the sum of 7 and 8 is 15."
"""For `--model`: in 16 bits the log-probs of tokens that nobody would write are noise."""
EOS_IDS = (1,)
GROUP_SIZE = 8
BATCH_GROUPS = 8
BUDGET = 200
SLOTS = 64


class EndlessPrompts:
    """Random prompts of 12 tokens, one a group."""

    ended = False

    def __init__(self) -> None:
        self._next = 0

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        """The next ones."""
        prompts = [prompt(self._next + i) for i in range(num_prompts)]
        self._next += num_prompts
        return prompts

    def settle(self, *_: Any) -> None:
        """Nothing is dispatched again."""


def prompt(number: int) -> Prompt:
    """Prompt of a number, always the same."""
    draw = torch.Generator().manual_seed(number)
    ids = tuple(torch.randint(3, 30, (12,), generator=draw).tolist())
    return Prompt(number, Example("", "0", "digits", number), number, ids, 0, 0, number)


class Bench:
    """A started engine, its trainer's model, and the measurements."""

    def __init__(self, folder: str, dtype: Any, tokenizer: Any = None) -> None:
        loaded: Any = load_model(folder)
        self.model = loaded
        self.probe_ids = PROBE_IDS if tokenizer is None else tuple(tokenizer(PROBE_TEXT)["input_ids"])
        self.supervisor = Supervisor()
        self.engine = VLLMEngine(dtype=dtype, num_slots=SLOTS, kv_cache_gib=1.0)
        self.engine.start(folder, eos_token_ids=EOS_IDS, probe_ids=self.probe_ids, max_model_len=256)
        self.publisher = WeightPublisher(
            self.engine,
            supervisor=self.supervisor,
            timeout_s=120.0,
            max_noise=ROUNDED_NOISE if self.engine.rounds_weights else EXACT_NOISE,
        )
        self.version = -1
        self.publisher.rehearse(0, named_weights(self.model), self.probe)
        self.publish()

    @torch.no_grad()
    def probe(self, changed: NamedTensors) -> list[float]:
        """The trainer's log-probs of the probe."""
        row = torch.tensor([self.probe_ids])
        output: Any = torch.func.functional_call(self.model, dict(changed), kwargs={"input_ids": row})
        return torch.log_softmax(output.logits[0, :-1].float(), -1).gather(1, row[0, 1:, None]).squeeze(1).tolist()

    def publish(self) -> None:
        """Deliver the model's weights as the next version, and wait for the proof."""
        self.version += 1
        self.publisher.publish(self.version, named_weights(self.model), self.probe({}))
        self.publisher.wait_delivered()

    @property
    def backend(self) -> VLLMBackend:
        """The engine's, for requests that go past it."""
        backend = self.engine._backend
        assert backend is not None
        return backend

    def bare(self, seconds: float) -> float:
        """Tokens per second of `AsyncLLM` alone, `SLOTS` requests at any time."""
        return self.backend.call(self._bare(seconds), seconds + 120.0)

    async def _bare(self, seconds: float) -> float:
        from vllm import SamplingParams as Sampling
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        llm: Any = self.backend._client._llm  # type: ignore[attr-defined]
        done, started = 0, time.perf_counter()
        numbers = iter(range(10**9))

        async def work() -> None:
            nonlocal done
            while time.perf_counter() - started < seconds:
                number = next(numbers)
                sampling = Sampling(
                    max_tokens=BUDGET,
                    logprobs=0,
                    seed=number,
                    stop_token_ids=list(EOS_IDS),
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                ids = list(prompt(number // GROUP_SIZE).token_ids)
                async for output in llm.generate(tokens_input(ids, cache_salt="bare"), sampling, f"bare-{number}"):
                    if time.perf_counter() - started < seconds:
                        done += len(output.outputs[0].token_ids)

        await asyncio.gather(*(work() for _ in range(SLOTS)))
        return done / seconds

    def worker(self, seconds: float, *, updates: bool = False) -> float:
        """Tokens per second through the rollout worker into the pool, which is emptied as it fills."""
        pool = TrajectoryPool(
            batch_groups=BATCH_GROUPS, sampler=FifoSampler(), max_policy_age=None, capacity_groups=64, supervisor=self.supervisor
        )
        pool.set_policy_version(self.version)
        scorer = RewardRunner(supervisor=self.supervisor)
        task = ReverseDigits(name="digits")
        worker = RolloutWorker(
            self.engine,
            EndlessPrompts(),
            scorer,
            pool,
            {"digits": task},
            lambda ids: " ".join(map(str, ids)),
            RolloutConfig(GROUP_SIZE, SamplingParams(max_new_tokens=BUDGET)),
            served_version=lambda: self.publisher.served_version,
            supervisor=self.supervisor,
        )
        pool.open_admission()
        before, started = self.engine.generated_tokens, time.perf_counter()
        due = started + 1.0
        worker.start()
        while (now := time.perf_counter()) - started < seconds:
            if len(pool) >= BATCH_GROUPS:
                pool.take(self.version, None, 1.0)
                pool.delivered(self.version + 1)  # as if an update had used them
            if updates and now >= due:
                due += 1.0
                pool.set_policy_version(self.version + 1)
                self.publish()
                pool.delivered(self.version)
            time.sleep(0.002)
        tokens = self.engine.generated_tokens - before
        worker.stop()
        self._drain()
        scorer.close()
        return tokens / seconds

    def _drain(self) -> None:
        while self.engine.completions(2.0):
            pass

    def proof_s(self, repeats: int) -> float:
        """Median seconds of what the proof adds to an update: probe on both sides, version, checksums."""
        taken = []
        for _ in range(repeats):
            started = time.perf_counter()
            self.backend.call(self.backend._client.version(), 30.0)
            self.backend.call(self.backend._client.score(self.probe_ids), 30.0)
            self.probe({})
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)


def checksum_s(bench: Bench) -> float:
    """Median seconds for the checksums of all tensors, on both sides."""
    from lit_asyncrl.generation.vllm_chunks import ChunkFile, plan_chunks, read_pieces

    weights = named_weights(bench.model)
    file = ChunkFile()
    taken = []
    for _ in range(5):
        seconds = {True: 0.0, False: 0.0}
        for checked in seconds:
            for chunk in plan_chunks(weights, bench.engine._dtype):
                started = time.perf_counter()
                pieces = file.write_chunk(chunk, weights, checked=checked)
                for _ in read_pieces(file.path, pieces):
                    pass
                seconds[checked] += time.perf_counter() - started
        taken.append(seconds[True] - seconds[False])
    file.close()
    return statistics.median(taken)


def measure(bench: Bench, seconds: float, repeats: int, pause_goal_s: float) -> list[Line]:
    """All parts."""
    rates: dict[str, list[float]] = {"bare": [], "worker": [], "updates": []}
    bench.worker(2.0)  # warm-up
    bench.bare(2.0)
    pauses: Sequence[float] = []
    for _ in range(repeats):
        rates["bare"].append(bench.bare(seconds))
        rates["worker"].append(bench.worker(seconds))
        before, spent = bench.publisher.deliveries, bench.publisher.mean_pause_s * bench.publisher.deliveries
        rates["updates"].append(bench.worker(seconds, updates=True))
        after = bench.publisher.deliveries
        pauses = [*pauses, (bench.publisher.mean_pause_s * after - spent) / max(1, after - before)]
    bare, worker, updates = (statistics.median(rates[name]) for name in ("bare", "worker", "updates"))
    proof, checksums = bench.proof_s(9), checksum_s(bench)
    return [
        Line("bare AsyncLLM, tokens/s", f"{bare:,.0f}"),
        Line("(a) through the rollout worker, tokens/s", f"{worker:,.0f}", worker / bare, 0.95),
        Line("(b) with an update every second, tokens/s", f"{updates:,.0f}", updates / worker, 0.85),
        Line("(c) generation stands still an update, s", "", statistics.median(pauses), pause_goal_s, "low"),
        Line("(d) proof: probe and version, s of a second", "", proof + checksums, 0.05, "low"),
        Line("    of which checksums, s", f"{checksums:.4f}"),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--model", help="a Hugging Face folder instead of the random model")
    parser.add_argument("--dtype", default="float32", help="of the served weights")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pause_goal_s = 0.10 if arguments.model is None else 0.60
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or folder
        if arguments.model is None:
            build_model().save_pretrained(folder)
        bench = Bench(path, arguments.dtype, AutoTokenizer.from_pretrained(path) if arguments.model else None)
        try:
            lines = measure(bench, arguments.seconds, arguments.repeats, pause_goal_s)
        finally:
            bench.supervisor.request_stop("measured")
            bench.publisher.close()
            bench.engine.stop()
    print_table(f"vLLM, {arguments.model or '0.8M parameters'}, {arguments.dtype}, {SLOTS} slots", lines)


if __name__ == "__main__":
    main()
