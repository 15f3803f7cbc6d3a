"""Embedded engine against `transformers.generate`: sampled tokens per second, same model, prompts and token counts.

    python tools/bench_engine.py [--slots 128] [--repeats 5] [--threads 1]

Responses end by their own `max_new_tokens` (no end-of-sequence id), so both sides sample exactly the counted tokens; `generate`
works in batches of the slot count, each until its longest response ends, and what it samples beyond a response's budget does not
count. Prompts come in groups of 8 samples, as in training, which the engine prefills once. It also records log-probs and
versions; `generate` does not. Runs alternate; the table shows medians, by wall clock and by CPU time of the process (the same on
an idle machine with one thread; steadier on a busy one).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from lit_asyncrl.generation import slot_attention
from lit_asyncrl.generation.hf_decoder import SlotDecoder
from lit_asyncrl.types import GenerationRequest, SamplingParams

VOCAB_SIZE = 64
PROMPT_LENGTH = 12
GROUP_SIZE = 8


def build_model() -> Any:
    """A random Qwen3 of 0.8M parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def make_requests(count: int, shortest: int, longest: int) -> list[GenerationRequest]:
    """Random prompts of `GROUP_SIZE` samples each, budgets uniform in [shortest, longest]."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(1, VOCAB_SIZE) for _ in range(PROMPT_LENGTH)) for _ in range(-(-count // GROUP_SIZE))]
    return [
        GenerationRequest(
            request_id=i,
            prompt_ids=prompts[i // GROUP_SIZE],
            sampling=SamplingParams(max_new_tokens=draw.randint(shortest, longest)),
            seed=i,
        )
        for i in range(count)
    ]


def run_engine(model: Any, requests: list[GenerationRequest], slots: int) -> None:
    """Decode everything with continuous slots."""
    model.set_attn_implementation(slot_attention.NAME)
    decoder = SlotDecoder(model, num_slots=slots, eos_token_ids=(), max_model_len=256)
    decoder.submit(requests)
    while decoder.has_work:
        decoder.step(version=0)


def run_generate(model: Any, requests: list[GenerationRequest], slots: int) -> None:
    """Decode in batches of the slot count, each until its longest response ends."""
    model.set_attn_implementation("sdpa")
    for start in range(0, len(requests), slots):
        batch = requests[start : start + slots]
        prompts = torch.tensor([request.prompt_ids for request in batch])
        longest = max(request.sampling.max_new_tokens for request in batch)
        config = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, max_new_tokens=longest, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)


def tokens_per_s(run: Callable[..., None], model: Any, requests: list[GenerationRequest], slots: int) -> tuple[float, float]:
    """Counted tokens over wall time and over CPU time of one run."""
    wall, cpu = time.perf_counter(), time.process_time()
    run(model, requests, slots)
    tokens = sum(request.sampling.max_new_tokens for request in requests)
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=128, help="responses decoded at once")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    slots, repeats = arguments.slots, arguments.repeats
    torch.set_num_threads(arguments.threads)
    model = build_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {slots} slots, {arguments.threads} thread(s), medians of {repeats} runs")
    print("| lengths | requests | engine tokens/s | generate tokens/s | ratio | ratio (CPU time) |\n|---|---|---|---|---|---|")
    for shortest, longest in ((32, 32), (8, 64)):
        requests = make_requests(8 * slots, shortest, longest)
        rates: dict[Callable[..., None], list[tuple[float, float]]] = {run_engine: [], run_generate: []}
        for run in rates:
            run(model, requests[:slots], slots)  # warm-up
        for _ in range(repeats):
            for run, results in rates.items():
                results.append(tokens_per_s(run, model, requests, slots))
        engine, generate = ([statistics.median(column) for column in zip(*results, strict=True)] for results in rates.values())
        ratios = " | ".join(f"{ours / theirs:.2f}" for ours, theirs in zip(engine, generate, strict=True))
        print(f"| {shortest}-{longest} | {len(requests)} | {engine[0]:,.0f} | {generate[0]:,.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
