"""What every engine refuses before it samples."""

from __future__ import annotations

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.types import GenerationRequest


def check_request(request: GenerationRequest, max_model_len: int) -> None:
    """Refuse a request that cannot be sampled, or whose log-probs would be of another distribution than the trainer's.

    Raises:
        ConfigurationError: naming key, value and remedy.
    """
    sampling = request.sampling
    if request.purpose == "train" and sampling.is_restricted:
        raise ConfigurationError(
            f"top_p, top_k and min_p must be 1, 0 and 0 in training, got {sampling.top_p}, {sampling.top_k} and "
            f"{sampling.min_p} (request {request.request_id}). A cut distribution is not the one whose log-probs the trainer "
            "computes, so every ratio would be biased: restrict evaluation only."
        )
    if not request.prompt_ids:
        raise ConfigurationError(f"prompt_ids must hold at least one id, got none (request {request.request_id}).")
    if sampling.max_new_tokens < 1:
        raise ConfigurationError(
            f"max_new_tokens must be at least 1, got {sampling.max_new_tokens} (request {request.request_id})."
        )
    if not sampling.temperature >= 0:
        raise ConfigurationError(f"temperature must be at least 0, got {sampling.temperature} (request {request.request_id}).")
    needed = len(request.prompt_ids) + sampling.max_new_tokens
    if needed > max_model_len:
        raise ConfigurationError(
            f"Prompt and max_new_tokens together must fit into max_model_len = {max_model_len}, got {len(request.prompt_ids)} + "
            f"{sampling.max_new_tokens} (request {request.request_id}). Shorten the prompt or max_new_tokens."
        )
