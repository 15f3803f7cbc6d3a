"""EssLrScale: scales each step's learning rate by the effective sample size of its importance weights (VCPO)."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer

from lit_asyncrl.algorithm.gradients import ess_lr_scale
from lit_asyncrl.algorithm.ranks import pooled_ess_ratio
from lit_asyncrl.callbacks.step_rate import StepRateCallback, scale_rate
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.module import PolicyModule


class EssLrScale(StepRateCallback):
    """Learning rate of one step: eta * rule(min(1, ess_ratio / reference_ratio)); the base rate is restored right after it.

    The ratio is that of the raw sequence weights of the whole batch, over all processes, in log space. The callback has no state.

    Args:
        reference_ratio: ESS ratio at which the rate is not scaled; 1 for single-turn tasks, 0.55 in the paper's tool use.
        rule: `sqrt` for Adam-like optimizers, `linear` for SGD.
        floor: lower bound of the scale; 0 for none.

    Source: VCPO (arXiv 2602.17616), section on ESS-guided step size; raw weights as in the authors' code. The floor is ours.
    """

    def __init__(self, reference_ratio: float = 1.0, rule: Literal["sqrt", "linear"] = "sqrt", floor: float = 0.0) -> None:
        super().__init__()
        problems = []
        if not 0 < reference_ratio <= 1:
            problems.append(f"EssLrScale.reference_ratio must be in (0, 1], got {reference_ratio}. Give 1 for the plain ratio.")
        if not 0 <= floor <= 1:
            problems.append(f"EssLrScale.floor must be in [0, 1], got {floor}. Give 0 for none.")
        if rule not in ("sqrt", "linear"):
            problems.append(f"EssLrScale.rule must be 'sqrt' or 'linear', got {rule!r}. Give sqrt for Adam-like optimizers.")
        if problems:
            raise ConfigurationError(" ".join(problems))
        self.reference_ratio = reference_ratio
        self.rule: Literal["sqrt", "linear"] = rule
        self.floor = floor

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second one, which would scale the scaled rate."""
        number = sum(isinstance(callback, EssLrScale) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if number > 1:
            raise ConfigurationError(
                f"trainer.callbacks must hold one EssLrScale at most, got {number} (the rate would be scaled again). "
                "Leave control/ess out after a config that has one."
            )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Scale this step's rate."""
        assert isinstance(pl_module, PolicyModule) and pl_module.step is not None
        step = pl_module.step
        step.lr_scale = ess_lr_scale(pooled_ess_ratio(step.log_weights), self.reference_ratio, self.rule, self.floor)
        scale_rate(optimizer, step.lr_scale)
