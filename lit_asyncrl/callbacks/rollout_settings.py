"""What AsyncRollout refuses: arguments out of range, and settings of the run that contradict each other or this version."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging

from lit_asyncrl.datamodule import RolloutDataModule
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.module import PolicyModule

if TYPE_CHECKING:
    from lit_asyncrl.callbacks.async_rollout import AsyncRollout

PRECISIONS = ("32-true", "bf16-mixed", "64-true")
"""Values of `trainer.precision` that keep the master weights exact."""


def check_arguments(rollout: AsyncRollout) -> None:
    """Refuse arguments that are out of range, all in one message; warn of one without effect.

    Raises:
        ConfigurationError: naming keys and values.
    """
    bounds = {
        "publish_lag": (0, "0 or above"),
        "publish_lag_start": (0, "0 or above"),
        "max_model_len": (2, "at least 2 tokens"),
        "max_restarts": (0, "0 or above"),
        "trainer_threads": (1, "at least 1"),
    }
    above_0 = ("probe_tolerance", "sync_timeout_s", "evaluation_timeout_s", "silent_timeout_s", "stall_timeout_s", "grace_s")
    values = {key: getattr(rollout, key) for key in (*bounds, *above_0)}
    wrong = {key: contract for key, (least, contract) in bounds.items() if values[key] is not None and values[key] < least}
    for key in above_0:
        if values[key] is not None and not values[key] > 0:
            wrong[key] = "above 0 nats" if key == "probe_tolerance" else "above 0 seconds"
    if wrong:
        raise ConfigurationError(" ".join(f"AsyncRollout.{k} must be {wrong[k]}, got {values[k]}." for k in values if k in wrong))
    if rollout.publish_lag_start and not rollout.publish_lag:
        warnings.warn(
            f"AsyncRollout.publish_lag_start {rollout.publish_lag_start} is ignored: there is no lag to begin. Set publish_lag.",
            stacklevel=3,
        )


def check_settings(rollout: AsyncRollout, trainer: Trainer, module: PolicyModule, data: RolloutDataModule) -> None:
    """Refuse settings that contradict each other, all in one message.

    Raises:
        ConfigurationError: naming keys, values and remedies.
    """
    problems = []
    if data.max_policy_age is not None and data.max_policy_age < rollout.publish_lag:
        problems.append(
            f"data.max_policy_age must be at least publish_lag, got {data.max_policy_age} and {rollout.publish_lag} "
            "(no group could ever be young enough). Raise max_policy_age or set it to null."
        )
    problems += module.contradictions(data)
    behind = rollout.publish_lag + 2 * (
        module.updates_per_batch - 1
    )  # a lag is served in whole batches, and each ages by its own
    if data.max_policy_age is not None and rollout.publish_lag and module.updates_per_batch > 1 and data.max_policy_age < behind:
        problems.append(
            f"data.max_policy_age must be at least {behind} with publish_lag {rollout.publish_lag} and model.updates_per_batch "
            f"{module.updates_per_batch}, got {data.max_policy_age} (weights go out once a batch). Raise it or set it to null."
        )
    context = None if rollout.max_model_len is None else module.context_length()
    if rollout.max_model_len is not None and context is not None and rollout.max_model_len > context:
        problems.append(
            f"AsyncRollout.max_model_len must be at most the model's context of {context} tokens, got {rollout.max_model_len}."
        )
    if trainer.world_size > 1:
        problems.append(
            f"trainer.devices times trainer.num_nodes must be 1, got {trainer.world_size} processes (groups, weights and "
            "baselines are of one trainer process in this version). Set trainer.devices: 1."
        )
    precision = str(trainer.precision)
    if precision not in PRECISIONS:
        problems.append(
            f"trainer.precision must be one of {PRECISIONS}, got {precision} (master weights stay in float32, where an update of "
            "1e-6 does not vanish, and float16's loss scaling is not undone for exact score norms). Set bf16-mixed."
        )
    problems += _lightning_s_problems(trainer, data.updates_per_epoch)
    if problems:
        raise ConfigurationError(" ".join(problems))


def _lightning_s_problems(trainer: Trainer, updates_per_epoch: int) -> list[str]:
    """Settings of Lightning's that cannot do here what they say."""
    problems = []
    overfit, limit = trainer.overfit_batches, trainer.limit_val_batches  # type: ignore[attr-defined]
    if overfit:
        problems.append(
            f"trainer.overfit_batches must be left out, got {overfit} (batches are sampled anew each time). Train on a task of "
            "few prompts instead."
        )
    if isinstance(limit, float) and 0 < limit < 1:
        problems.append(
            f"trainer.limit_val_batches must be 0, 1.0 or a number of held-out sets, got {limit} (a set is one batch). Set "
            "data.evaluation.NAME.num_prompts."
        )
    interval, epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch
    if isinstance(interval, int) and epochs is not None and interval > updates_per_epoch and limit:
        problems.append(
            f"trainer.val_check_interval must be at most data.updates_per_epoch, {updates_per_epoch} updates, got {interval} "
            f"with trainer.check_val_every_n_epoch {epochs}. Set that to null, to count updates over epochs."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            problems.append(
                f"trainer.callbacks must not hold {type(callback).__name__} (the engine samples and evaluates with the weights "
                "that are trained, not with their average). Leave it out, and average checkpoints afterwards."
            )
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            problems.append(
                f"ModelCheckpoint.train_time_interval must be left out, got {callback._train_time_interval} (Lightning never "
                "saves by it under manual optimization). Set every_n_train_steps."
            )
    return problems
