"""GradientAlignmentControl: measures the cosine between consecutive policy gradients, and projects or skips by it (GAC).

The gradient is seen after all micro-batches and before the clip. A skipped update is one whose gradients are all None when the
optimizer steps: the module then raises neither `policy_version` nor the schedule.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_asyncrl.algorithm.gradients import (
    Attenuation,
    Regime,
    alignment,
    calibrated_thresholds,
    gac_beta,
    gac_regime,
    gradient_products,
    project_gradients,
    projected_alignment,
)
from lit_asyncrl.algorithm.ranks import summed_over_ranks
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.module import MAX_CONSECUTIVE_SKIPS, PolicyModule

RECORD_NAME = "gradient_alignment.json"
"""File with a run's cosines, written into its log directory; another run's thresholds can come from it."""

FRESH_AGE = 0.5
"""Mean policy age, in updates, above which calibration sees stale gradients and warns."""

RECENT = 200
"""Updates that the running mean and percentile of the cosine cover."""

_REGIMES: tuple[Regime, ...] = ("safe", "project", "skip")
_NEEDED = "two numbers 0 <= low <= high with low below 1"


class GradientAlignmentControl(Callback):
    """Regulates an update by the cosine c between its gradient and the previous one.

    c <= low: nothing. low < c <= high: the part along the previous gradient is attenuated. c > high: no update (weights, moments,
    weight decay, `policy_version` and schedule stay; the batch counts as used). The first update, and one after or with a
    gradient of zero, is left alone.

    Args:
        thresholds: [low, high]; or the path of a `gradient_alignment.json` that a synchronous run has left, to calibrate by; or
            null to calibrate by this run's first updates, which are then observed only.
        calibration_updates: how many.
        attenuation: `to_threshold` leaves a cosine of exactly low, `full` none.
        reference: what the next gradient is compared with: the `raw` gradient, or the `applied` one (after projection).
        renormalize: restore the gradient's norm after projection.
        max_consecutive_skips: skips in a row, after which an update is projected instead, so that the run cannot freeze.
        observe_only: measure and change nothing.

    Raises:
        ConfigurationError: thresholds out of order or range, or counts below their bound; all at once.

    Source: GAC (arXiv 2603.01501): regimes and projection as public digests tell them. Thresholds, attenuation, reference, skip
    limit and calibration are ours, since the paper's are not known to us.
    """

    def __init__(
        self,
        thresholds: tuple[float, float] | str | None = None,
        calibration_updates: int = 50,
        attenuation: Attenuation = "to_threshold",
        reference: Literal["raw", "applied"] = "raw",
        renormalize: bool = False,
        max_consecutive_skips: int = 3,
        observe_only: bool = False,
    ) -> None:
        problems = []
        if thresholds is not None and not isinstance(thresholds, str):
            low, high = thresholds
            if not 0 <= low <= high or low >= 1:
                problems.append(
                    f"GradientAlignmentControl.thresholds must be {_NEEDED}, got {list(thresholds)}. Leave it out to calibrate."
                )
        if calibration_updates < 2:
            problems.append(
                f"GradientAlignmentControl.calibration_updates must be 2 or above, got {calibration_updates}. Give some dozens."
            )
        if not 0 <= max_consecutive_skips <= MAX_CONSECUTIVE_SKIPS:
            problems.append(
                f"GradientAlignmentControl.max_consecutive_skips must be in [0, {MAX_CONSECUTIVE_SKIPS}], got "
                f"{max_consecutive_skips} (the run ends after more). Give 0 to project instead of skipping."
            )
        if problems:
            raise ConfigurationError(" ".join(problems))
        self.given = thresholds
        self.thresholds = None if thresholds is None or isinstance(thresholds, str) else tuple(thresholds)
        self.calibration_updates = calibration_updates
        self.attenuation: Attenuation = attenuation
        self.reference = reference
        self.renormalize = renormalize
        self.max_consecutive_skips = max_consecutive_skips
        self.observe_only = observe_only
        self._previous: dict[str, Tensor] = {}
        self._cosines: deque[float] = deque(maxlen=max(RECENT, calibration_updates))
        self._num_cosines = 0
        self._consecutive_skips = 0
        self._counts = dict.fromkeys(_REGIMES, 0)
        self._ages: list[float] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read another run's record, if it is to give the thresholds."""
        if isinstance(self.given, str):
            self.thresholds = _thresholds_of(self.given)

    # ---------------------------------------------------------------- one update

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note how old the tokens are that calibration sees."""
        if self.thresholds is None:
            self._ages.append(float(batch.stats["pool/policy_age_mean"]))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Measure, and change or drop the gradient."""
        assert isinstance(pl_module, PolicyModule) and pl_module.step is not None
        parameters = {name: p for name, p in pl_module.named_parameters() if p.grad is not None}
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        previous = [
            self._previous[n].to(g) if n in self._previous else torch.zeros_like(g)
            for n, g in zip(parameters, gradients, strict=True)
        ]
        products = summed_over_ranks(gradient_products(gradients, previous))
        cosine = alignment(products)
        regime = self._regime(cosine)
        kept, beta = gradients, 1.0
        if regime == "project" and self._acts:
            assert self.thresholds is not None
            beta = gac_beta(cosine, self.thresholds[0], self.attenuation)
            # The result takes the old reference's tensors, and the gradient's own become the new reference: nothing is copied.
            applied = project_gradients(gradients, previous, products, beta, self.renormalize)
            for parameter, gradient in zip(parameters.values(), applied, strict=True):
                parameter.grad = gradient
            kept = gradients if self.reference == "raw" else applied
        elif regime == "skip" and self._acts:
            for parameter in parameters.values():
                parameter.grad = None
        # The clip scales these tensors in place, which no cosine notices. A skip keeps the raw gradient: a reference that stood
        # still would be compared with for ever.
        self._previous = dict(zip(parameters, kept, strict=True))
        self._count(cosine, regime)
        pl_module.step.metrics.update(self._metrics(cosine, regime, beta))

    @property
    def _acts(self) -> bool:
        return not self.observe_only

    def _regime(self, cosine: float) -> Regime:
        if self.thresholds is None:
            return "safe"
        regime = gac_regime(cosine, *self.thresholds)
        if regime == "skip" and self._acts and self._consecutive_skips >= self.max_consecutive_skips:
            return "project"
        return regime

    def _count(self, cosine: float, regime: Regime) -> None:
        self._counts[regime] += 1
        self._consecutive_skips = self._consecutive_skips + 1 if regime == "skip" else 0
        if cosine != 0.0:  # the first update, or a gradient of zero, says nothing
            self._cosines.append(cosine)
            self._num_cosines += 1
        if self.thresholds is None and self._num_cosines >= self.calibration_updates:
            self._calibrate()

    def _calibrate(self) -> None:
        self.thresholds = calibrated_thresholds(list(self._cosines))
        low, high = self.thresholds
        rank_zero_info(
            f"GradientAlignmentControl: from {self._num_cosines} updates the thresholds are {low:.3f} (project above) and "
            f"{high:.3f} (skip above)."
        )
        age = sum(self._ages) / max(len(self._ages), 1)
        if age > FRESH_AGE:
            rank_zero_warn(
                f"GradientAlignmentControl.thresholds were calibrated on tokens of mean policy age {age:.2f} updates: their "
                "cosines may already be too high. Give as thresholds the gradient_alignment.json of a synchronous run."
            )

    def _metrics(self, cosine: float, regime: Regime, beta: float) -> dict[str, float]:
        after, ratio = projected_alignment(cosine, beta) if beta != 1.0 else (cosine, 1.0)
        updates = sum(self._counts.values())
        metrics = {
            "control/gradient_cosine": cosine,
            "control/gradient_cosine_after": after,
            "control/gac_regime": float(_REGIMES.index(regime)),
            "control/gac_beta": beta,
            "control/gac_norm_ratio": 1.0 if self.renormalize else ratio,
            "control/gac_projected_share": self._counts["project"] / updates,
            "control/gac_skipped_share": self._counts["skip"] / updates,
        }
        if self._cosines:
            recent = torch.tensor(list(self._cosines)[-RECENT:])
            metrics["control/gradient_cosine_mean"] = float(recent.mean())
            metrics["control/gradient_cosine_p95"] = float(recent.quantile(0.95))
        if self.thresholds is not None:
            metrics["control/gac_threshold_low"], metrics["control/gac_threshold_high"] = self.thresholds
        return metrics

    # ---------------------------------------------------------------- what a run leaves behind

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the record that another run can take its thresholds from."""
        if trainer.log_dir is not None and trainer.is_global_zero:
            folder = Path(trainer.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            content = {"cosines": list(self._cosines), "thresholds": self.thresholds}
            (folder / RECORD_NAME).write_text(json.dumps(content) + "\n", encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        """Reference gradient, calibration and counts, so that a resumed run goes on as if it had not stopped."""
        return {
            "previous": self._previous,
            "cosines": list(self._cosines),
            "num_cosines": self._num_cosines,
            "ages": self._ages,
            "thresholds": None if self.thresholds is None else list(self.thresholds),
            "consecutive_skips": self._consecutive_skips,
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; thresholds that the configuration gives come first."""
        self._previous = dict(state_dict["previous"])
        self._cosines.extend(state_dict["cosines"])
        self._num_cosines = state_dict["num_cosines"]
        self._ages = list(state_dict["ages"])
        self._consecutive_skips = state_dict["consecutive_skips"]
        self._counts = dict(state_dict["counts"])
        if self.given is None and state_dict["thresholds"] is not None:
            low, high = state_dict["thresholds"]
            self.thresholds = (low, high)


def _thresholds_of(path: str) -> tuple[float, float]:
    """Thresholds from another run's record.

    Raises:
        ConfigurationError: the file is missing, or holds fewer than two cosines.
    """
    try:
        cosines: Sequence[float] = [float(c) for c in json.loads(Path(path).read_text(encoding="utf-8"))["cosines"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"GradientAlignmentControl.thresholds must be [low, high] or a run's {RECORD_NAME}, got {path!r} "
            f"({type(error).__name__}: {error}). Run with observe_only and data.max_policy_age 0 to make one."
        ) from error
    if len(cosines) < 2:
        raise ConfigurationError(
            f"GradientAlignmentControl.thresholds must name a record with at least 2 cosines, got {len(cosines)} in {path!r}. "
            "Let that run make more updates."
        )
    return calibrated_thresholds(cosines)
