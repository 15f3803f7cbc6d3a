"""Checks on one machine with a GPU what no CPU can check; prints pass, fail or skipped per feature. Under 10 minutes on one GPU.

    pip install -e '.[vllm]' && python tools/check_gpu.py [--only NAME]

Every feature runs in a process of its own with a time limit, so that one that hangs or crashes takes no other with it. Models are
made from a config (random weights): nothing is downloaded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.generation.publisher import EXACT_NOISE, ROUNDED_NOISE, WeightPublisher
from lit_asyncrl.generation.vllm import VLLMEngine
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import GenerationRequest, NamedTensors, SamplingParams

LIMIT_S = 180
"""Longest time for one feature."""
PROBE_IDS = tuple(range(3, 19))
EOS_IDS = (1,)


class SkippedError(Exception):
    """The feature needs something this machine lacks."""


def make_policy(folder: Path) -> str:
    """A random Qwen3 of 6M parameters, tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def probe(model: Any, changed: NamedTensors) -> list[float]:
    """Log-probs of the probe under the trainer's model with some weights replaced, nats."""
    row = torch.tensor([PROBE_IDS], device=model.device)
    with torch.no_grad():
        logits = torch.func.functional_call(model, dict(changed), kwargs={"input_ids": row}).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, row[0, 1:, None]).squeeze(1).tolist()


def deliver_and_sample(engine: GenerationEngine, noise: float) -> str:
    """Rehearse, deliver two versions with responses in flight, and compare what was sampled with a plain forward."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_policy(Path(folder))
        loaded: Any = load_model(path)
        model = loaded.to("cuda")
        engine.start(path, eos_token_ids=EOS_IDS, probe_ids=PROBE_IDS, max_model_len=256)
        publisher = WeightPublisher(engine, supervisor=Supervisor(), timeout_s=60.0, max_noise=noise)
        try:
            publisher.rehearse(0, named_weights(model), lambda changed: probe(model, changed))
            publisher.publish(0, named_weights(model), probe(model, {}))
            publisher.wait_delivered()
            engine.submit([GenerationRequest(i, (5, 6, 7), SamplingParams(max_new_tokens=200), i) for i in range(64)])
            publisher.publish(1, named_weights(model), probe(model, {}))
            publisher.wait_delivered()
            worst, tokens, waited = 0.0, 0, time.monotonic()
            finished = 0
            while finished < 64 and time.monotonic() - waited < 60.0:
                for completion in engine.completions(5.0):
                    finished += 1
                    tokens += len(completion.token_ids)
                    worst = max(worst, _difference(model, completion.token_ids, completion.behavior_logprobs))
            if finished < 64 or worst > noise:
                raise AssertionError(f"{finished} of 64 responses, log-probs differ by {worst:.4f} nats (at most {noise})")
            return f"{tokens} tokens, log-probs within {worst:.4f} nats, pause {1e3 * publisher.mean_pause_s:.0f} ms an update"
        finally:
            publisher.close()
            engine.stop()


def _difference(model: Any, token_ids: Sequence[int], logprobs: Sequence[float]) -> float:
    row = torch.tensor([[5, 6, 7, *token_ids]], device=model.device)
    with torch.no_grad():
        ours = torch.log_softmax(model(input_ids=row).logits[0, 2:-1].float(), -1).gather(1, row[0, 3:, None]).squeeze(1)
    return float((ours.cpu() - torch.tensor(logprobs)).abs().max())


def fit(*arguments: str) -> str:
    """Run `lit-asyncrl fit` on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["lit-asyncrl", "fit", "--config", "smoke", *arguments]
        command += ["--trainer.accelerator", "gpu", "--trainer.logger.init_args.save_dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {done.stderr[-800:]}")
    return done.stdout.strip().splitlines()[-1][:100]


def gpu_arithmetic() -> str:
    """A matrix product in bfloat16."""
    x = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    if not torch.isfinite((x @ x).float()).all():
        raise AssertionError("not finite")
    return torch.cuda.get_device_name()


def vllm_nccl() -> str:
    """Weights from GPU to GPU; the trainer and vLLM cannot share one."""
    if torch.cuda.device_count() < 2:
        raise SkippedError("needs two GPUs")
    torch.cuda.set_device(1)
    return deliver_and_sample(VLLMEngine(dtype="bfloat16", transport="nccl"), ROUNDED_NOISE)


HALF_GPU = {"gpu_memory_utilization": 0.4}
FEATURES: dict[str, Callable[[], str]] = {
    "gpu": gpu_arithmetic,
    "embedded_engine": lambda: deliver_and_sample(HFEngine(device="cuda"), EXACT_NOISE),
    "embedded_engine_bf16": lambda: deliver_and_sample(HFEngine(device="cuda", dtype="bfloat16"), ROUNDED_NOISE),
    "fit": fit,
    "vllm_shared_memory": lambda: deliver_and_sample(VLLMEngine(dtype="bfloat16", engine_args=HALF_GPU), ROUNDED_NOISE),
    "vllm_float32": lambda: deliver_and_sample(VLLMEngine(engine_args=HALF_GPU), 1e-2),
    "vllm_restart": lambda: deliver_and_sample(
        VLLMEngine(dtype="bfloat16", in_flight="restart", engine_args=HALF_GPU), ROUNDED_NOISE
    ),
    "vllm_ipc": lambda: deliver_and_sample(VLLMEngine(dtype="bfloat16", transport="ipc", engine_args=HALF_GPU), ROUNDED_NOISE),
    "vllm_nccl": vllm_nccl,
    "fit_with_vllm": lambda: fit("--config", "engine/vllm"),
}


def run_one(name: str) -> None:
    """Run a feature in this process and say what it found."""
    try:
        print(f"pass: {FEATURES[name]()}")
    except SkippedError as reason:
        print(f"skipped: {reason}")


def main() -> None:
    """Run every feature, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*FEATURES], help="run this feature alone, in this process")
    only = parser.parse_args().only
    if only is not None:
        run_one(only)
        return
    if not torch.cuda.is_available():
        sys.exit("check_gpu.py needs a CUDA GPU, and torch sees none.")
    failed = 0
    for name in FEATURES:
        started = time.monotonic()
        try:
            command = [sys.executable, __file__, "--only", name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            verdict = done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"fail: {done.stderr.strip()[-600:]}"
        except subprocess.TimeoutExpired:
            verdict = f"fail: not done within {LIMIT_S} s"
        failed += verdict.startswith("fail")
        print(f"{name:<22} {time.monotonic() - started:5.0f} s  {verdict}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
