"""EssLrScale: scales each step's learning rate by the effective sample size of its importance weights (VCPO)."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_asyncrl.algorithm.gradients import ess_lr_scale
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.module import PolicyModule


class EssLrScale(Callback):
    """Learning rate of one step: eta * rule(min(1, ess_ratio / reference_ratio)); the base rate is restored right after it.

    The rate is put back in the optimizer's own post-step hook: before the scheduler acts and before any checkpoint is written.
    The callback has no state.

    Args:
        reference_ratio: ESS ratio at which the rate is not scaled; 1 for single-turn tasks, 0.55 in the paper's tool use.
        rule: `sqrt` for Adam-like optimizers, `linear` for SGD.
        floor: lower bound of the scale.

    Source: VCPO (arXiv 2602.17616), section on ESS-guided step size; raw weights as in the authors' code. The floor is ours.
    """

    def __init__(self, reference_ratio: float = 1.0, rule: Literal["sqrt", "linear"] = "sqrt", floor: float = 0.0) -> None:
        if not 0 < reference_ratio <= 1:
            raise ConfigurationError(f"EssLrScale.reference_ratio must be in (0, 1], got {reference_ratio}.")
        if not 0 <= floor <= 1:
            raise ConfigurationError(f"EssLrScale.floor must be in [0, 1], got {floor}.")
        self.reference_ratio = reference_ratio
        self.rule: Literal["sqrt", "linear"] = rule
        self.floor = floor
        self._base_rates: list[float] | None = None
        self._hook: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook that restores the base rate."""
        self._hook = trainer.optimizers[0].register_step_post_hook(self._restore)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Scale this step's rate."""
        assert isinstance(pl_module, PolicyModule) and pl_module.step is not None
        step = pl_module.step
        step.lr_scale = ess_lr_scale(step.ess_ratio, self.reference_ratio, self.rule, self.floor)
        self._base_rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= step.lr_scale

    def _restore(self, optimizer: Any, *_: Any) -> None:
        if self._base_rates is not None:
            for group, rate in zip(optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = rate
            self._base_rates = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the hook."""
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hook."""
        self._remove()

    def _remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
