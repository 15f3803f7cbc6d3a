"""Reads checkpoints without running any code in them, and exports a policy from one."""

from __future__ import annotations

from typing import Any

import torch

from lit_asyncrl.errors import CheckpointError
from lit_asyncrl.policy import load_model, load_tokenizer, resolve_policy_path


def export_policy(checkpoint_path: str, output_dir: str, policy_path: str | None = None) -> str:
    """Write the policy of a checkpoint as a Hugging Face folder (model, tokenizer, generation config).

    Args:
        checkpoint_path: a checkpoint written by lit-asyncrl.
        output_dir: folder to write; made if missing.
        policy_path: the model folder the run started from; None: as recorded in the checkpoint.

    Returns:
        The folder.

    Raises:
        CheckpointError: the file is missing, torn or foreign.
    """
    checkpoint = read_checkpoint(checkpoint_path)
    source = resolve_policy_path(policy_path or checkpoint["lit_asyncrl"]["policy_path"])
    model = load_model(source)
    state = checkpoint["state_dict"]
    weights = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # tensors of other shapes
        raise CheckpointError(f"ckpt_path must fit the model in {source!r}, got {checkpoint_path!r} ({error}).") from error
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise CheckpointError(
            f"ckpt_path must fit the model in {source!r}, got unexpected tensors {unexpected[:3]} and missing "
            f"{sorted(missing)[:3]}."
        )
    model.save_pretrained(output_dir)
    load_tokenizer(source).save_pretrained(output_dir)
    return output_dir


def read_checkpoint(path: str) -> dict[str, Any]:
    """The content of a checkpoint, without running any pickled code.

    Raises:
        CheckpointError: the file is missing, torn or foreign.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"ckpt_path must name a whole checkpoint, got {path!r} ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(checkpoint, dict) or "lit_asyncrl" not in checkpoint:
        raise CheckpointError(f"ckpt_path must name a checkpoint written by lit-asyncrl, got {path!r}.")
    return checkpoint
