"""PromptSource: a task's training examples in order, epoch after epoch, tokenized and with their identity in the run."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from lit_asyncrl.errors import CheckpointError, ConfigurationError, DataError
from lit_asyncrl.interfaces import Task
from lit_asyncrl.seeds import derive_seed
from lit_asyncrl.types import Example, Prompt

Refill = Literal["new_prompt", "same_prompt"]
DEFAULT_MAX_TRIES = 3


def checksum(prompt: Prompt) -> int:
    """Of a prompt's ids."""
    return zlib.crc32(repr(prompt.token_ids).encode())


def check_example(example: Any) -> None:
    """Refuse what is no example, from a task of the user's own.

    Raises:
        ConfigurationError: naming what was given.
    """
    if not isinstance(example, Example) or not isinstance(example.prompt, (str, list)):
        got = f"a prompt of type {type(example.prompt).__name__}" if isinstance(example, Example) else repr(example)[:80]
        raise ConfigurationError(
            f"data.task must give Examples whose prompt is text or a list of chat messages, got {got}. Mend the task."
        )


def tokenize_prompt(tokenizer: Any, example: Example) -> tuple[int, ...]:
    """Ids of the example's prompt: plain text as the tokenizer encodes it, chat messages through its chat template.

    Raises:
        ConfigurationError: chat messages, but the tokenizer has no chat template.
        DataError: the prompt has no tokens, or a character the tokenizer does not know.
    """
    check_example(example)
    if isinstance(example.prompt, str):
        ids = tokenizer(example.prompt)["input_ids"]
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError(
                f"data.task must give plain text to a tokenizer without a chat template, got chat messages "
                f"(task {example.task!r}). "
                "Use template: plain, or a chat model."
            )
        text = tokenizer.apply_chat_template(list(example.prompt), add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise DataError(f"The prompt of {example} has no tokens.")
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and unknown in ids:
        raise DataError(f"The prompt of {example} has characters that the tokenizer does not know: {example.prompt!r}.")
    return tuple(int(i) for i in ids)


def check_prompt_length(ids: Sequence[int], example: Example, *, max_new_tokens: int, context: int | None) -> None:
    """Refuse a prompt that leaves no room for the response.

    Raises:
        ConfigurationError: naming prompt, lengths and remedy.
    """
    if context is not None and len(ids) + max_new_tokens > context:
        raise ConfigurationError(
            f"data.sampling.max_new_tokens must fit the model's context of {context} tokens together with every prompt, got "
            f"{len(ids)} + {max_new_tokens} tokens ({example}). "
            "Shorten the prompt or the budget, or use a model with a longer context."
        )


_Key = tuple[int, int, int, int]
"""Identity of a dispatch: group id, index, epoch, attempt."""


class PromptSource:
    """Gives out prompts; the i-th prompt of a run is a function of the seed, whatever the timing, while none is sent again.

    What takes the place of a group that was dropped or failed is the `refill`: the next prompt of the split, so that the trained
    prompts may differ from the split in what is dropped; or the same prompt, with other seeds and under another group id, until
    it was sent `max_tries` times in its epoch, so that hard prompts are neither left out at once nor sent for ever.

    Args:
        task: what to draw from.
        tokenizer: of the policy.
        seed: of the run; each prompt's seed derives from (seed, task, index, epoch, attempt).
        max_new_tokens: response budget, for the length check.
        context: the model's context in tokens; None: unknown.
        max_epochs: passes through the training split; None: without end.
        refill: what takes the place of a group that leaves untrained.
        max_tries: how often a prompt is sent in an epoch, with the refill `same_prompt`.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        *,
        seed: int,
        max_new_tokens: int,
        context: int | None,
        max_epochs: int | None = None,
        refill: Refill = "new_prompt",
        max_tries: int = DEFAULT_MAX_TRIES,
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._seed = seed
        self._max_new_tokens = max_new_tokens
        self._context = context
        self._max_epochs = max_epochs
        self._position = 0
        self._next_group_id = 0
        self._requeued: deque[_Key] = deque()
        self._tries = max_tries if refill == "same_prompt" else 1
        self._unsettled: dict[int, _Key] = {}  # those that may have to be sent again, by group id
        self._lock = threading.Lock()

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        """The next prompts: requeued ones first. Fewer than asked for only at the end of the last epoch."""
        with self._lock:
            prompts = []
            for _ in range(num_prompts):
                key = self._next_key()
                if key is None:
                    break
                prompts.append(self._make(*key))
                if key[3] + 1 < self._tries:
                    self._unsettled[key[0]] = key
            return prompts

    def settle(self, group_id: int, *, trained: bool, on_retry: Callable[[int], None]) -> None:
        """A group has reached its end; if it was not trained and may be tried again, its prompt is queued under a new group id.

        Args:
            group_id: of the group.
            trained: whether it was trained.
            on_retry: told the new group id before the prompt can be given out.
        """
        with self._lock:
            key = self._unsettled.pop(group_id, None)
            if key is None or trained:
                return
            _, index, epoch, attempt = key
            on_retry(self._next_group_id)
            self._requeued.append((self._next_group_id, index, epoch, attempt + 1))
            self._next_group_id += 1

    @property
    def ended(self) -> bool:
        """Whether no prompt is left to give; one that is sent again can undo it."""
        with self._lock:
            return not self._requeued and self._after_the_end()

    def _after_the_end(self) -> bool:
        return self._max_epochs is not None and self._position >= self._max_epochs * self._task.num_train

    def _next_key(self) -> _Key | None:
        if self._requeued:
            return self._requeued.popleft()
        if self._after_the_end():
            return None
        epoch, index = divmod(self._position, self._task.num_train)
        self._position += 1
        self._next_group_id += 1
        return self._next_group_id - 1, index, epoch, 0

    def _make(self, group_id: int, index: int, epoch: int, attempt: int) -> Prompt:
        example = self._task.train_example(index)
        ids = tokenize_prompt(self._tokenizer, example)
        check_prompt_length(ids, example, max_new_tokens=self._max_new_tokens, context=self._context)
        seed = derive_seed(self._seed, example.task, example.index, epoch, attempt)
        return Prompt(group_id, example, index, ids, epoch, attempt, seed)

    @property
    def epoch(self) -> int:
        """Passes through the training split completed so far."""
        return self._position // self._task.num_train

    def state_dict(self, outstanding: Sequence[Prompt] = ()) -> dict[str, Any]:
        """Position, and the prompts to send again with their identity: those in flight (`outstanding`), then those requeued."""
        with self._lock:
            again = [[p.group_id, p.source_index, p.epoch, p.attempt] for p in outstanding]
            again += [[*key] for key in self._requeued]
            return {
                "checksums": {p.group_id: checksum(p) for p in outstanding},
                "position": self._position,
                "next_group_id": self._next_group_id,
                "requeued": again,
                "unsettled": [[*key] for key in self._unsettled.values()],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CheckpointError: a prompt that is to be sent again is another one by now: what was sampled for it would be trained
                with the wrong question.
        """
        for group_id, index, epoch, attempt in state["requeued"]:
            expected = state["checksums"].get(group_id)
            if expected is not None and checksum(prompt := self._make(group_id, index, epoch, attempt)) != expected:
                raise CheckpointError(
                    f"data.task must give the prompts of the checkpoint, got another one for {prompt.example} (whose "
                    "responses in flight go on). Give the task the settings and files of the run that wrote it, or export the "
                    "policy and start anew."
                )
        with self._lock:
            self._position = int(state["position"])
            self._next_group_id = int(state["next_group_id"])
            self._requeued = deque((int(g), int(i), int(e), int(a)) for g, i, e, a in state["requeued"])
            self._unsettled = {int(g): (int(g), int(i), int(e), int(a)) for g, i, e, a in state["unsettled"]}
