"""What can refuse a run before anything starts: the datamodule's settings, its tasks, and their prompts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Task
from lit_asyncrl.pool.admission import admission_limit
from lit_asyncrl.tasks.mixture import leaf_tasks
from lit_asyncrl.tasks.prompt_source import DEFAULT_MAX_TRIES, check_prompt_length, tokenize_prompt
from lit_asyncrl.types import Example

if TYPE_CHECKING:
    from lit_asyncrl.datamodule import RolloutDataModule

MAX_CHECKED_PROMPTS = 20_000
"""Training prompts tokenized and checked before a run starts; beyond, a prompt is checked when it is dispatched."""

PROCEDURAL_CHECKED_PROMPTS = 256


def check_data(data: RolloutDataModule) -> None:
    """Refuse settings that are out of range or contradict each other, all in one message; warn of those without effect.

    Raises:
        ConfigurationError: naming keys, values and remedies.
    """
    problems = [
        f"data.{key} must be at least {least}, got {value}."
        for key, value, least in (
            ("batch_groups", data.batch_groups, 1),
            ("group_size", data.group_size, 1),
            ("sampling.max_new_tokens", data.sampling.max_new_tokens, 1),
            ("updates_per_epoch", data.updates_per_epoch, 1),
            ("max_policy_age", 0 if data.max_policy_age is None else data.max_policy_age, 0),
            ("max_tokens_per_micro_batch", 1 if data.max_tokens_per_micro_batch is None else data.max_tokens_per_micro_batch, 1),
            ("max_tries", data.max_tries, 1),
        )
        if value < least
    ]
    if not data.data_timeout_s > 0:
        problems.append(f"data.data_timeout_s must be above 0 seconds, got {data.data_timeout_s}.")
    if not data.sampling.temperature > 0:
        problems.append(f"data.sampling.temperature must be above 0 in training, got {data.sampling.temperature}.")
    if data.sampling.is_restricted:
        problems.append(
            "data.sampling must not set top_p, top_k or min_p in training, got "
            f"top_p={data.sampling.top_p}, top_k={data.sampling.top_k}, min_p={data.sampling.min_p} (the log-probs would be "
            "those of another distribution than the trainer's: every importance ratio would be biased). "
            "Set them in data.evaluation."
        )
    if data.batch_groups >= 1 and (data.max_policy_age is None or data.max_policy_age >= 0):
        try:
            admission_limit(data.batch_groups, data.max_policy_age, data.capacity_groups, **data.admission())
        except ConfigurationError as error:
            problems.append(str(error))
    if problems:
        raise ConfigurationError(" ".join(problems))
    for name, heldout in data.evaluation.items():
        heldout.check(name)
    if data.capacity_groups is not None and data.max_policy_age is not None:
        warnings.warn(
            f"data.capacity_groups {data.capacity_groups} is ignored: data.max_policy_age {data.max_policy_age} bounds the "
            "pool. Set data.max_policy_age: null to use it.",
            stacklevel=3,
        )
    if data.max_tries != DEFAULT_MAX_TRIES and data.refill != "same_prompt":
        warnings.warn(
            f"data.max_tries {data.max_tries} is ignored: no prompt is sent again. Set data.refill: same_prompt to use it.",
            stacklevel=3,
        )


def collect_tasks(roots: Iterable[Task]) -> dict[str, Task]:
    """Set tasks up and list the unmixed ones by name.

    Raises:
        ConfigurationError: a task without rewards, or two of one name.
        DataError: a file that cannot be used.
    """
    tasks: dict[str, Task] = {}
    for root in roots:
        root.setup()
        for leaf in leaf_tasks(root):
            if not leaf.rewards:
                raise ConfigurationError(f"data.task must have at least one reward function, got none (task {leaf.name!r}).")
            if tasks.setdefault(leaf.name, leaf) is not leaf:
                raise ConfigurationError(f"data.task names must differ, got {leaf.name!r} twice. Set `name` on one of them.")
    return tasks


def check_prompts(data: RolloutDataModule, tasks: Mapping[str, Task], tokenizer: Any, context: int | None) -> None:
    """Check prompts of the training split and of every held-out set, and that there are enough of them.

    Raises:
        ConfigurationError, DataError: what is wrong, and the remedy.
    """
    prompts = data.task.num_train * (1 if data.max_prompt_epochs is None else data.max_prompt_epochs)
    least = 1 if data.max_prompt_epochs is None else data.batch_groups
    if prompts < least:
        raise ConfigurationError(
            f"data.task must give at least {least} prompts, got {data.task.num_train} an epoch (data.max_prompt_epochs: "
            f"{data.max_prompt_epochs}). Give more prompts, raise data.max_prompt_epochs, or lower data.batch_groups."
        )
    stored = any(getattr(task, "is_stored", False) for task in tasks.values())
    limit = MAX_CHECKED_PROMPTS if stored else PROCEDURAL_CHECKED_PROMPTS
    budget = data.sampling.max_new_tokens
    for index in range(min(limit, data.task.num_train)):
        checked_ids(data.task.train_example(index), tasks, tokenizer, budget, context)
    for heldout in data.evaluation.values():
        task = heldout.task or data.task
        number = max(heldout.num_prompts, heldout.final_num_prompts)
        for index in range(min(limit, number, task.num_heldout)):
            checked_ids(task.heldout_example(index), tasks, tokenizer, heldout.sampling(budget).max_new_tokens, context)


def checked_ids(
    example: Example, tasks: Mapping[str, Task], tokenizer: Any, max_new_tokens: int, context: int | None
) -> tuple[int, ...]:
    """Token ids of an example's prompt, which must be of a known task and leave room for the response.

    Raises:
        ConfigurationError, DataError: what is wrong, and the remedy.
    """
    ids = tokenize_prompt(tokenizer, example)
    if example.task not in tasks:
        raise ConfigurationError(
            f"data.task must name itself in its examples, got {example.task!r}, which is none of {sorted(tasks)}."
        )
    check_prompt_length(ids, example, max_new_tokens=max_new_tokens, context=context)
    return ids
