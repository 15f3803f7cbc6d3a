"""Whether a run's settings are those of its record: flattened to keys, compared, and which may differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.recording.file import Header, check_new, read_header

MAY_DIFFER = (
    r"(config|ckpt_path|subcommand)(\..*)?",
    r"trainer\.(logger|default_root_dir|profiler|barebones|log_every_n_steps|enable_\w+|max_time)(\..*)?",
    r"(LearningRateMonitor|ModelCheckpoint|PredictionWriter|RichProgressBar|RunReport|TQDMProgressBar)(\..*)?",
    r"AsyncRollout\.(engine|record_run|replay_run|rehearse|probe_tolerance|trainer_threads|grace_s|evaluate_last)(\..*)?",
    r"AsyncRollout\.(silent_timeout_s|max_restarts|\w+_timeout_s)(\..*)?",
    r"data\.(save_rollouts|\w+_timeout_s)",
)
"""Keys, as patterns, that change no weight of a replay: where it is logged, what samples, and how long is waited."""

MAY_BE_LOWER = ("trainer.max_steps",)
"""Numbers that may be lowered: the replay ends earlier. -1 is without end."""

ABSENT = "left out"


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Nested settings as plain values by key, as typed on the command line.

    Parts given by `class_path` are found under their key with the class's name as value, their arguments under its own keys.
    Callbacks are found under the name of their class, since their place in the list says nothing.

    Example:
        >>> flatten({"data": {"seed": 0, "sampler": {"class_path": "a.PaceSampler", "init_args": {"gamma": 4.0}}}})
        {'data.seed': 0, 'data.sampler': 'PaceSampler', 'data.sampler.gamma': 4.0}
        >>> flatten({"trainer": {"callbacks": [{"class_path": "a.EssLrScale", "init_args": {"floor": 0.1}}]}})
        {'EssLrScale': 'EssLrScale', 'EssLrScale.floor': 0.1}
    """
    if isinstance(value, Mapping) and "class_path" in value:
        name = str(value["class_path"]).rpartition(".")[2]
        return {key: name, **flatten({**value.get("init_args", {}), **value.get("dict_kwargs", {})}, key)}
    if isinstance(value, Mapping):
        flat: dict[str, Any] = {}
        for name, part in value.items():
            flat |= flatten(part, f"{key}.{name}" if key else str(name))
        return flat
    if key == "trainer.callbacks" and isinstance(value, (list, tuple)):
        flat = {}
        for part in value:
            flat |= flatten(part, str(part["class_path"]).rpartition(".")[2])
        return flat
    if isinstance(value, (list, tuple)):
        flat = {}
        for i, part in enumerate(value):
            flat |= flatten(part, f"{key}.{i}")
        return flat
    if hasattr(value, "__qualname__"):  # a function or class, whose text would hold an address
        value = f"{value.__module__}.{value.__qualname__}"
    return {key: value if isinstance(value, (bool, int, float, str)) or value is None else str(value)}


def check_configuration(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse settings that would train another run than the recorded one.

    Raises:
        ConfigurationError: naming every key that differs, its recorded and its present value.
    """
    problems = []
    for key in sorted({*recorded, *present}):
        before, now = recorded.get(key, ABSENT), present.get(key, ABSENT)
        if before == now or any(re.fullmatch(pattern, key) for pattern in MAY_DIFFER):
            continue
        if key in MAY_BE_LOWER and _is_lower(now, before):
            continue
        problems.append(f"{key} must be {before!r} as in the recorded run, got {now!r}.")
    if problems:
        raise ConfigurationError(" ".join([*problems, "Replay with the settings of the record (AsyncRollout.replay_run)."]))


def check_header(recorded: Header, present: Header) -> list[str]:
    """Compare headers; returns warnings in words, about what may change the last bits.

    Raises:
        ConfigurationError: the configuration or the seed differs.
    """
    check_configuration({"data.seed": recorded.seed}, {"data.seed": present.seed})
    _check_where_known(recorded.configuration, present.configuration)
    return [
        f"The recorded run had {name} {before!r}, and this one has {now!r}: weights may differ in their last bits."
        for name, before, now in (
            ("a device of kind", recorded.device, present.device),
            ("PyTorch", recorded.torch, present.torch),
        )
        if before != now
    ]


def _check_where_known(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """`check_configuration`, unless one of the runs was set up in Python and told no settings: then the replay shows it."""
    if recorded and present:
        check_configuration(recorded, present)


def _is_lower(now: Any, before: Any) -> bool:
    return isinstance(now, int) and isinstance(before, int) and now >= 0 and (before < 0 or now <= before)


def check_tape(record_run: str | None, replay_run: str | None, configuration: Mapping[str, Any]) -> None:
    """Refuse, before anything exists, to record where that cannot be, or to replay what is no record of this configuration.

    Raises:
        ConfigurationError: what is wrong, and the remedy.
    """
    if record_run is not None and replay_run is not None:
        raise ConfigurationError(
            f"AsyncRollout.record_run must be left out with AsyncRollout.replay_run, got {record_run!r} and {replay_run!r}. "
            "The replay of a record would be recorded as it is."
        )
    if record_run is not None:
        check_new(record_run)
    if replay_run is not None:
        _check_where_known(read_header(replay_run).configuration, configuration)


def refuse_resumed(key: str) -> ConfigurationError:
    """A resumed run can neither be recorded nor replayed: a record begins with the model folder's weights."""
    return ConfigurationError(
        f"AsyncRollout.{key} must be left out in a run that is resumed (ckpt_path): a record begins with the weights of "
        "model.policy.path. Record from the start, or export the checkpoint and start a run from that folder."
    )
