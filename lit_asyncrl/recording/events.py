"""What happened in a run, as lines of JSON: numbers of tokens as base64 of little-endian arrays, float32 exactly.

    ["dispatch", group_id, source_index, epoch, attempt, checksum of the prompt's ids]
    ["completion", request_id, finish_reason, ids, log-probs, [[version, number of tokens], ...]]
    ["evaluation", seed, checksum of the prompt's ids, request_id, finish_reason, ids, log-probs, [[version, number], ...]]
    ["added", group_id, rewards]
    ["left", group_id, state, reason]
    ["take", policy_version, taken, completed_versions, rejected, {id: members}, {id: log-probs}]

A token costs 11 bytes, a re-scored one 5 more.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_asyncrl.pool.tape import Decision
from lit_asyncrl.types import Completion, Prompt

Event = list[Any]
"""Its kind, then plain values."""


def to_line(event: Event) -> bytes:
    """One line of the file."""
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def checksum(ids: Sequence[int]) -> int:
    """CRC-32 of token ids."""
    return zlib.crc32(np.asarray(ids, dtype="<i4").tobytes())


def dispatch_event(prompt: Prompt) -> Event:
    """A prompt was given out."""
    return [
        "dispatch",
        prompt.group_id,
        prompt.source_index,
        prompt.epoch,
        prompt.attempt,
        checksum(prompt.token_ids),
    ]


def completion_event(completion: Completion) -> Event:
    """A training response arrived."""
    return ["completion", *_pack(completion)]


def evaluation_event(seed: int, prompt_ids: Sequence[int], completion: Completion) -> Event:
    """An evaluation's response arrived."""
    return ["evaluation", seed, checksum(prompt_ids), *_pack(completion)]


def added_event(group_id: int, rewards: Tensor) -> Event:
    """A group reached the pool."""
    return ["added", group_id, floats(rewards)]


def take_event(decision: Decision) -> Event:
    """A batch was taken."""
    return [
        "take",
        decision.policy_version,
        list(decision.taken),
        list(decision.completed_versions),
        list(decision.rejected),
        {str(group_id): members.int().tolist() for group_id, members in decision.reduced.items()},
        {str(group_id): floats(logprobs) for group_id, logprobs in decision.logprobs.items()},
    ]


def decision_of(event: Event) -> Decision:
    """Undo `take_event`."""
    _, version, taken, completed, rejected, reduced, logprobs = event
    return Decision(
        version,
        taken,
        completed,
        rejected,
        {int(group_id): torch.tensor(members, dtype=torch.bool) for group_id, members in reduced.items()},
        {int(group_id): torch.from_numpy(_array(text, "<f4")) for group_id, text in logprobs.items()},
    )


def completion_of(fields: Sequence[Any]) -> Completion:
    """A response from the last five fields of its event."""
    request_id, finish_reason, ids, logprobs, runs = fields
    versions = [version for version, number in runs for _ in range(number)]
    return Completion(request_id, _array(ids, "<i4").tolist(), _array(logprobs, "<f4").tolist(), versions, finish_reason)


def newest_version(fields: Sequence[Any]) -> int:
    """Of a response's tokens; -1 if it has none."""
    return max((version for version, _ in fields[-1]), default=-1)


def floats(values: Sequence[float] | Tensor) -> str:
    """float32 values as text."""
    array = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
    return _text(array.astype("<f4"))


def floats_of(text: str) -> list[float]:
    """Undo `floats`."""
    return _array(text, "<f4").tolist()


def _pack(completion: Completion) -> list[Any]:
    runs = [[version, len(list(run))] for version, run in groupby(completion.token_versions)]
    ids = _text(np.asarray(completion.token_ids, dtype="<i4"))
    return [completion.request_id, completion.finish_reason, ids, floats(completion.behavior_logprobs), runs]


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
