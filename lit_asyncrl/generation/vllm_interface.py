"""What the vLLM backend asks of vLLM, whoever carries it: `AsyncLLM` here (`vllm_client.py`) or servers (`vllm_server.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

PauseMode = Literal["keep", "wait", "abort"]
UNKNOWN_VERSION = -1
"""Of tokens sampled before the first weights were delivered."""
FIRST_TOKEN_ONLY = 10**9
"""vLLM's `stream_interval`: an output for the first token, and one at the end."""


@dataclass(slots=True)
class Sampled:
    """What came back for one request; the lists have one entry per token.

    Attributes:
        token_ids: sampled ids, the end-of-sequence id included.
        logprobs: nats, after temperature.
        versions: `policy_version` of the weights that sampled the token.
        finish_reason: `stop`, `length` or `abort`.
        top_logprobs: log-probs of the likeliest first tokens by id, when asked for.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    top_logprobs: dict[int, float] = field(default_factory=dict)


SoFar = Callable[[], Sampled]
"""Says what has been sampled of a response in flight, without waiting, also when vLLM is dead; event loop only."""
Begun = Callable[[SoFar | None], None]
"""Called when a response's first token has been sampled, so that its prompt has been read; None: only its end is heard of."""


class VLLMClient(Protocol):
    """vLLM's interface as far as it is used here; every method belongs to the backend's event loop.

    Sampling parameters are plain dicts with the names of vLLM's `SamplingParams`.
    """

    max_model_len: int
    world_size: int

    async def start(self) -> None:
        """Be ready, or raise `EngineError`/`ConfigurationError`."""
        ...

    async def stop(self) -> None:
        """End what `start` began; never raises."""
        ...

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: dict[str, Any],
        salt: str | None,
        begun: Begun | None = None,
    ) -> Sampled:
        """Sample one response."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a sequence's tokens after the first, nats at temperature 1."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; `generate` then returns what was sampled, with `abort`."""
        ...

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Stop scheduling."""
        ...

    async def resume(self) -> None:
        """Schedule again."""
        ...

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Set the weight transport up."""
        ...

    async def start_update(self) -> None:
        """Begin a weight update."""
        ...

    async def update(self, info: dict[str, Any]) -> None:
        """Load one chunk."""
        ...

    async def finish_update(self, version: str) -> None:
        """Serve the weights, under this version."""
        ...

    async def set_version(self, version: str) -> None:
        """Change the version that is recorded with tokens."""
        ...

    async def version(self) -> str:
        """The version that is recorded with tokens."""
        ...


def parse_version(label: str) -> int:
    """`policy_version` of vLLM's label, which is text of its own choice before the first update."""
    return int(label) if label.isdigit() else UNKNOWN_VERSION


def versions_of(spans: Iterable[tuple[str, int, int]]) -> list[int]:
    """Each token's version, from spans of (label, start, end)."""
    return [parse_version(label) for label, start, end in spans for _ in range(start, end)]
