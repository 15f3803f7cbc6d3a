"""Tiny real transformers models in a folder, and a plain forward to compare the engine with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 20
EOS_IDS = (1, 2)
PROBE_IDS = tuple(range(3, 13))


def save_qwen3(folder: Path, *, seed: int = 0, **overrides: Any) -> str:
    """Tied embeddings, grouped-query attention; a wide initialization so that distributions are far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _save(
        Qwen3ForCausalLM, Qwen3Config(**(_sizes() | {"head_dim": 8, "tie_word_embeddings": True} | overrides)), folder, seed
    )


def save_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> str:
    """Untied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(LlamaForCausalLM, LlamaConfig(**(_sizes() | {"tie_word_embeddings": False} | overrides)), folder, seed)


def perturbed(model: Any, scale: float = 0.05, seed: int = 1) -> Any:
    """A copy of a model with noise on every parameter: at the default far enough that log-probs differ in the first digit."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return copy.eval()


def token_logprobs(model: Any, prompt_ids: tuple[int, ...], token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [len(token_ids)] of a response by one forward over the whole sequence, without any cache."""
    ids = torch.tensor([[*prompt_ids, *token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None]).squeeze(1)[len(prompt_ids) - 1 :]


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _save(model_class: Any, config: Any, folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    model_class(config).save_pretrained(folder)
    return str(folder)
