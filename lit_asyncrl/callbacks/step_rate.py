"""Scaling the learning rate of one step, for callbacks: several factors multiply, and the base rate comes back right after."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

_BASE_RATE = "rate_before_scaling"


class StepRateCallback(Callback):
    """A callback that scales the rate of a step from its `on_before_optimizer_step`.

    The rate is put back in the optimizer's own post-step hook: before the scheduler acts and before any checkpoint is written. Of
    several such callbacks each multiplies, and the first hook to run restores what none of them had touched.
    """

    def __init__(self) -> None:
        self._hook: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook that restores the base rate."""
        self._hook = trainer.optimizers[0].register_step_post_hook(_restore)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the hook."""
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hook, and leave the base rate behind."""
        if trainer.optimizers:
            _restore(trainer.optimizers[0])
        self._remove()

    def _remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def scale_rate(optimizer: Any, factor: float) -> None:
    """Multiply the rate of the step in progress, in every parameter group."""
    for group in optimizer.param_groups:
        group.setdefault(_BASE_RATE, group["lr"])
        group["lr"] = group["lr"] * factor


def _restore(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        if _BASE_RATE in group:
            group["lr"] = group.pop(_BASE_RATE)
