"""Loads a policy: a Hugging Face causal language model and its tokenizer, from a folder or from the models that ship here.

The one way in for trainer, engine and tools, so that the packaged tiny model takes the path of a user's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

from lit_asyncrl.errors import ConfigurationError

Dtype = Literal["float32", "bfloat16", "float16"]
AttnImplementation = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]

PACKAGED_MODELS = Path(__file__).parent / "data"


def resolve_policy_path(path: str) -> str:
    """The folder behind `model.policy.path`: a folder as it is, else a packaged model of that name.

    Raises:
        ConfigurationError: neither exists, or the folder holds no `config.json`.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir() and (PACKAGED_MODELS / path / "config.json").is_file():
        folder = PACKAGED_MODELS / path
    if not (folder / "config.json").is_file():
        packaged = sorted(p.parent.name for p in PACKAGED_MODELS.glob("*/config.json"))
        reason = "no such folder" if not folder.is_dir() else "the folder has no config.json"
        raise ConfigurationError(
            f"model.policy.path must be a Hugging Face model folder or one of {packaged}, got {path!r} ({reason}). "
            "Nothing is downloaded: give the path of a folder on this machine."
        )
    return str(folder.resolve())


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the folder.

    Raises:
        ConfigurationError: it cannot be loaded, or has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    folder = resolve_policy_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError) as error:
        raise ConfigurationError(
            f"model.policy.path must hold a tokenizer that transformers can load, got {path!r} ({error}). "
            "Save one there with tokenizer.save_pretrained(path)."
        ) from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):  # what transformers makes up where there are no files
        raise ConfigurationError(
            f"model.policy.path must hold a tokenizer, got special tokens alone in {path!r}. "
            "Save one there with tokenizer.save_pretrained(path)."
        )
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(
            f"model.policy.path must hold a tokenizer with an end-of-sequence token, got none in {path!r}. "
            "Set tokenizer.eos_token."
        )
    return tokenizer


def load_model(
    path: str,
    *,
    dtype: Dtype = "float32",
    attn_implementation: AttnImplementation = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The causal language model of the folder, in evaluation mode (no dropout), on the CPU.

    Raises:
        ConfigurationError: it cannot be loaded.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = resolve_policy_path(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigurationError(
            f"model.policy.path must hold a causal language model that transformers can load, got {path!r} ({error})."
        ) from error
    return model.eval()


def check_vocabulary(tokenizer: Any, model_vocab_size: int, path: str) -> None:
    """Refuse a tokenizer that can make ids the model has no embedding for.

    Raises:
        ConfigurationError: naming both sizes.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= model_vocab_size:
        raise ConfigurationError(
            f"model.policy.path must hold a tokenizer that fits its model, got token id {largest} for "
            f"{model_vocab_size} embeddings ({path!r}). "
            "Use the tokenizer the model was trained with, or resize the model's embeddings."
        )


def end_of_sequence_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """All ids that end a response: the tokenizer's and those of `config.json` and `generation_config.json`, sorted."""
    ids = {int(tokenizer.eos_token_id)}
    folder = Path(resolve_policy_path(path))
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if file.is_file():
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(int(i) for i in ids))


def vocabulary_size(model: nn.Module) -> int:
    """Number of the model's input embeddings."""
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    return int(embeddings.num_embeddings)


def context_length(model: nn.Module) -> int | None:
    """The model's context in tokens; None if its config does not say."""
    return getattr(model.config, "max_position_embeddings", None)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by Hugging Face name, tied tensors once, detached (sharing storage with the model)."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=True)}


def probe_ids(tokenizer: Any, vocab_size: int, length: int = 16) -> tuple[int, ...]:
    """A fixed sequence of `length` ids spread over the vocabulary, for the proof of delivery."""
    usable: Sequence[int] = sorted({i for i in tokenizer.get_vocab().values() if i < vocab_size})
    return tuple(usable[(1 + 7 * i * i + 3 * i) % len(usable)] for i in range(length))


@dataclass(frozen=True)
class PolicyConfig:
    """Which model is trained, and how its forward pass runs.

    Args:
        path: Hugging Face model folder, or the name of a model that ships with lit-asyncrl.
        attn_implementation: attention kernel of the trainer's model.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time.
        trust_remote_code: run Python code that comes with the model folder. Only for folders you trust.
    """

    path: str = "tiny-reverse"
    attn_implementation: AttnImplementation = "sdpa"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: the trainer's log-probs must be those of the distribution that the engine samples from."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - a plain attribute of attention modules
