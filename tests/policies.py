"""A policy folder small enough for unit tests: a few thousand parameters with a packaged model's character tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

PACKAGED = "tiny-reverse10"


def save_policy(folder: Path, *, seed: int = 0, generation_eos: int | list[int] | None = 1, **overrides: Any) -> str:
    """Write model, tokenizer and generation config; `overrides` go to the model's config."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from lit_asyncrl.policy import load_tokenizer

    torch.manual_seed(seed)
    config = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    Qwen3ForCausalLM(Qwen3Config(**(config | overrides))).save_pretrained(folder)
    load_tokenizer(PACKAGED).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}), encoding="utf-8")
    return str(folder)
