"""JsonlTask: prompts and answers from a user's file: JSON lines, a parquet file, or a folder saved by `datasets`."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_asyncrl.errors import ConfigurationError, DataError
from lit_asyncrl.interfaces import RewardFn, Task
from lit_asyncrl.tasks.math_verify import MathVerify
from lit_asyncrl.tasks.rewards import ExactMatch, LastNumber
from lit_asyncrl.types import Example

RewardName = Literal["exact_match", "last_number", "math_verify"]

_REWARDS: dict[str, type[RewardFn]] = {"exact_match": ExactMatch, "last_number": LastNumber, "math_verify": MathVerify}

Prompt = str | list[dict[str, str]]
Row = tuple[Prompt, Any, str]
"""Prompt, answer, and where the row stands."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a row becomes prompt and answer; every field is documented where the user sets it (`JsonlTask`)."""

    prompt_key: str
    answer_key: str
    template: Literal["plain", "chat"]
    system_prompt: str | None
    answer_after: str | None

    def read(self, row: Any) -> tuple[Prompt, Any]:
        """Prompt and answer of a row.

        Raises:
            ValueError: what is wrong with the row, without its place.
        """
        if not isinstance(row, dict):
            raise ValueError(f"must be a JSON object, got {type(row).__name__}")
        for key in (self.prompt_key, self.answer_key):
            if row.get(key) is None:
                raise ValueError(f"must have the key {key!r}, got the keys {sorted(map(str, row))}")
        answer = row[self.answer_key]
        if isinstance(answer, str) and self.answer_after is not None:
            answer = answer.rpartition(self.answer_after)[2].strip()
        return self._prompt(row[self.prompt_key]), answer

    def _prompt(self, value: Any) -> Prompt:
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"must have a prompt, got an empty one (key {self.prompt_key!r})")
        if isinstance(value, str) and self.template == "plain":
            return value
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if self.template == "plain" or not _are_messages(messages):
            wanted = "text" if self.template == "plain" else "text or a list of chat messages"
            raise ValueError(f"must have {wanted} as its prompt, got {value!r} (key {self.prompt_key!r})")
        if self.system_prompt is not None:
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return list(messages)


class JsonlTask(Task):
    """Prompts and answers from a file on this machine. It is read in `setup`, which names file and line of a bad row.

    Training and held-out prompts are disjoint: without a file of its own, the held-out part is chosen by a hash of seed and
    prompt; with one, training rows whose prompt occurs in it are left out with a warning.

    Args:
        path: `.jsonl` file (one JSON object a line), `.parquet` file, or folder written by `datasets`' `save_to_disk`
            (parquet and folders need `pip install 'lit-asyncrl[parquet]'`).
        prompt_key: key of the prompt: text, or chat messages when `template` is `chat`.
        answer_key: key of the answer.
        template: `plain` text, or `chat`: the prompt goes through the tokenizer's chat template.
        system_prompt: system message put first; for `chat` only.
        reward: name of a reward function, one, or a list of them, summed with their weights; the first decides on accuracy.
        answer_after: of an answer that holds this text only what follows counts (GSM8K puts the result after `####`).
        heldout_path: file of held-out rows, read as `path` is.
        heldout_fraction: share of rows held out when there is no `heldout_path`; in (0, 1).
        on_bad_row: end with an error, or skip the row, counted in `num_bad_rows`.
        name: name of the task in logs and samples.
        seed: of the order of rows and the choice of held-out ones.

    Attributes:
        num_bad_rows: rows skipped, after `setup`.
    """

    is_stored = True
    """The rows are finite and known, so that every one can be checked before a run starts."""

    def __init__(
        self,
        path: str,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        template: Literal["plain", "chat"] = "plain",
        system_prompt: str | None = None,
        reward: RewardName | RewardFn | list[RewardFn] = "exact_match",
        answer_after: str | None = "####",
        heldout_path: str | None = None,
        heldout_fraction: float = 0.1,
        on_bad_row: Literal["error", "skip"] = "error",
        name: str = "jsonl",
        seed: int = 0,
    ) -> None:
        if system_prompt is not None and template != "chat":
            raise ConfigurationError("system_prompt must be left out with template: plain. Set template: chat.")
        if not 0 < heldout_fraction < 1:
            raise ConfigurationError(f"heldout_fraction must be above 0 and below 1, got {heldout_fraction} (task {name}).")
        if isinstance(reward, str) and reward not in _REWARDS:
            raise ConfigurationError(f"reward must be one of {sorted(_REWARDS)} or a reward function, got {reward!r}.")
        rewards = [_REWARDS[reward]()] if isinstance(reward, str) else reward
        self.name = name
        self.rewards: Sequence[RewardFn] = list(rewards) if isinstance(rewards, list) else [rewards]
        self.num_bad_rows = 0
        self._path = path
        self._format = RowFormat(prompt_key, answer_key, template, system_prompt, answer_after)
        self._heldout_path = heldout_path
        self._heldout_fraction = heldout_fraction
        self._skip = on_bad_row == "skip"
        self._seed = seed
        self._train: list[Row] | None = None
        self._heldout: list[Row] = []

    @property
    def num_train(self) -> int:
        """Number of training rows."""
        return len(self._rows(heldout=False))

    @property
    def num_heldout(self) -> int:
        """Number of held-out rows."""
        return len(self._rows(heldout=True))

    def train_example(self, index: int) -> Example:
        """Training row `index`, in the order shuffled by the seed."""
        prompt, answer, source = self._rows(heldout=False)[index]
        return Example(prompt, answer, self.name, index, source)

    def heldout_example(self, index: int) -> Example:
        """Held-out row `index`, in the order shuffled by the seed."""
        prompt, answer, source = self._rows(heldout=True)[index]
        return Example(prompt, answer, self.name, index, source)

    def setup(self) -> None:
        """Read, check, split and shuffle the rows; a second call does nothing.

        Raises:
            ConfigurationError: no such file.
            DataError: a row that cannot be used, or no row left for a split; names file and line.
        """
        if self._train is not None:
            return
        rows = list(self._read(self._path, "path"))
        if self._heldout_path is None:
            heldout = [row for row in rows if self._is_heldout(row[0])]
        else:
            heldout = list(self._read(self._heldout_path, "heldout_path"))
        heldout_prompts = {_key(row[0]) for row in heldout}
        train = [row for row in rows if _key(row[0]) not in heldout_prompts]
        if self._heldout_path is not None and len(train) < len(rows):
            number = len(rows) - len(train)
            warnings.warn(f"{number} rows of {self._path} are left out: {self._heldout_path} has their prompts.", stacklevel=2)
        if self.num_bad_rows:
            warnings.warn(f"{self.num_bad_rows} rows of task {self.name} cannot be used and are skipped.", stacklevel=2)
        for split, part in (("training", train), ("held-out", heldout)):
            if not part:
                raise DataError(
                    f"{self._path} must have rows for both splits, got no {split} row out of {len(rows)} usable ones."
                )
            random.Random(f"{self._seed}/{split}").shuffle(part)
        self._train, self._heldout = train, heldout

    def _rows(self, *, heldout: bool) -> list[Row]:
        assert self._train is not None, "setup() must come before the first example"
        return self._heldout if heldout else self._train

    def _is_heldout(self, prompt: Prompt) -> bool:
        digest = hashlib.blake2b(f"{self._seed}/{_key(prompt)}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._heldout_fraction * 2**64

    def _read(self, path: str, key: str) -> Iterator[Row]:
        for place, row in _raw_rows(path, key):
            try:
                yield *self._format.read(json.loads(row) if isinstance(row, str) else row), place
            except ValueError as error:
                if not self._skip:
                    problem = f"must be JSON, got {row[:60]!r}" if isinstance(error, json.JSONDecodeError) else str(error)
                    raise DataError(f"{place} {problem}. Mend the row, or set on_bad_row: skip.") from error
                self.num_bad_rows += 1


def _raw_rows(path: str, key: str) -> Iterator[tuple[str, Any]]:
    """Each row with its place: text of a JSON line (blank lines are no rows), or a dict."""
    file = Path(path).expanduser()
    if not file.exists():
        raise ConfigurationError(f"{key} must be a file or folder on this machine, got {path!r}, which does not exist.")
    if file.is_dir() or file.suffix == ".parquet":
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(_table(file, key), start=1))
        return
    with file.open(encoding="utf-8", errors="strict") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
        except UnicodeDecodeError as error:
            raise DataError(f"{path} must be UTF-8 text, got {error}. Convert the file.") from error


def _table(file: Path, key: str) -> Iterator[dict[str, Any]]:
    """Rows of a parquet file or of a `datasets` folder."""
    try:
        if file.is_dir():
            from datasets import Dataset, load_from_disk

            dataset = load_from_disk(str(file))
            if not isinstance(dataset, Dataset):
                raise ConfigurationError(
                    f"{key} must be one data set, got {sorted(dataset)} in {str(file)!r}. Give the folder of one."
                )
            yield from dataset
        else:
            from pyarrow import parquet

            for batch in parquet.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{key} must be a folder written by `datasets`' save_to_disk, got {str(file)!r} ({error}). "
            "Give such a folder, or a file."
        ) from error
    except ImportError as error:
        raise ConfigurationError(
            f"{key} must be a .jsonl file unless pyarrow and datasets are installed, got {str(file)!r}. "
            "pip install 'lit-asyncrl[parquet]'."
        ) from error


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value)
    )


def _key(prompt: Prompt) -> str:
    """One text per prompt, to compare prompts by."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)
