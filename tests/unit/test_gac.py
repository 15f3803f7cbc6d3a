"""GradientAlignmentControl, one update at a time: what it changes, what it leaves alone, what it reports, what it refuses."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from lit_asyncrl.callbacks import GradientAlignmentControl
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.module import PolicyModule
from lit_asyncrl.types import StepStats


class Weights(PolicyModule):
    """A module of one vector, whose gradient the test gives."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector = torch.nn.Parameter(torch.zeros(size))


def observe(control: GradientAlignmentControl, module: Weights, gradient: list[float]) -> tuple[list[float] | None, dict]:
    """One update: the gradient after the callback, and the metrics."""
    module.vector.grad = torch.tensor(gradient)
    module.step = StepStats(torch.zeros(1), 1.0, 1.0)
    control.on_before_optimizer_step(None, module, None)
    result = None if module.vector.grad is None else module.vector.grad.tolist()
    module.zero_grad()
    return result, module.step.metrics


def test_the_first_gradient_is_left_alone():
    gradient, metrics = observe(GradientAlignmentControl((0.2, 0.9)), Weights(2), [3.0, 4.0])
    assert gradient == [3.0, 4.0]
    assert (metrics["control/gradient_cosine"], metrics["control/gac_regime"]) == (0.0, 0.0)


def test_an_aligned_gradient_is_attenuated_to_the_threshold():
    control, module = GradientAlignmentControl((0.2, 0.9)), Weights(2)
    observe(control, module, [2.0, 0.0])
    gradient, metrics = observe(control, module, [3.0, 4.0])
    # cosine 3 / 5; beta = .2 / .6 sqrt(.64 / .96) = .2721655; 3 beta = .8164966
    assert gradient == pytest.approx([0.8164966, 4.0], abs=1e-6)
    assert metrics["control/gradient_cosine"] == pytest.approx(0.6)
    assert metrics["control/gradient_cosine_after"] == pytest.approx(0.2)
    assert metrics["control/gac_beta"] == pytest.approx(0.2721655, abs=1e-6)
    assert metrics["control/gac_norm_ratio"] == pytest.approx(0.8164966, abs=1e-6)
    assert metrics["control/gac_regime"] == 1.0
    assert (metrics["control/gac_projected_share"], metrics["control/gac_skipped_share"]) == (0.5, 0.0)
    assert (metrics["control/gac_threshold_low"], metrics["control/gac_threshold_high"]) == (0.2, 0.9)


def test_full_attenuation_leaves_the_orthogonal_part():
    control, module = GradientAlignmentControl((0.2, 0.9), attenuation="full"), Weights(2)
    observe(control, module, [2.0, 0.0])
    assert observe(control, module, [3.0, 4.0])[0] == pytest.approx([0.0, 4.0], abs=1e-6)


def test_renormalize_restores_the_norm():
    control, module = GradientAlignmentControl((0.2, 0.9), attenuation="full", renormalize=True), Weights(2)
    observe(control, module, [2.0, 0.0])
    gradient, metrics = observe(control, module, [3.0, 4.0])
    assert gradient == pytest.approx([0.0, 5.0], abs=1e-5)
    assert metrics["control/gac_norm_ratio"] == 1.0


def test_an_opposed_gradient_is_left_alone():
    control, module = GradientAlignmentControl((0.2, 0.3)), Weights(2)
    observe(control, module, [2.0, 0.0])
    assert observe(control, module, [-3.0, 4.0])[0] == [-3.0, 4.0]


def test_the_raw_reference_is_the_gradient_before_projection():
    control, module = GradientAlignmentControl((0.0, 1.0)), Weights(2)
    observe(control, module, [2.0, 0.0])
    observe(control, module, [3.0, 4.0])
    # <(4, 3), (3, 4)> / 25 = .96
    assert observe(control, module, [4.0, 3.0])[1]["control/gradient_cosine"] == pytest.approx(0.96)


def test_the_applied_reference_is_the_gradient_after_projection():
    control, module = GradientAlignmentControl((0.0, 1.0), reference="applied"), Weights(2)
    observe(control, module, [2.0, 0.0])
    observe(control, module, [3.0, 4.0])  # applied: (0, 4)
    # <(4, 3), (0, 4)> / (5 * 4) = .6
    assert observe(control, module, [4.0, 3.0])[1]["control/gradient_cosine"] == pytest.approx(0.6)


def test_skips_in_a_row_end_in_a_projection():
    control, module = GradientAlignmentControl((0.2, 0.5), max_consecutive_skips=2), Weights(2)
    regimes = [observe(control, module, [3.0, 4.0])[1]["control/gac_regime"] for _ in range(7)]
    # The first has no reference; each later one is its own reference (cosine 1): two skips, then a projection.
    assert regimes == [0.0, 2.0, 2.0, 1.0, 2.0, 2.0, 1.0]


def test_a_skipped_update_has_no_gradient():
    control, module = GradientAlignmentControl((0.2, 0.5)), Weights(2)
    observe(control, module, [3.0, 4.0])
    gradient, metrics = observe(control, module, [3.0, 4.1])
    assert gradient is None
    assert metrics["control/gac_skipped_share"] == 0.5


def test_the_reference_moves_on_during_skips():
    control, module = GradientAlignmentControl((0.2, 0.5)), Weights(2)
    for gradient in ([2.0, 0.0], [3.0, 0.1]):
        observe(control, module, gradient)
    assert observe(control, module, [0.1, -3.0])[1]["control/gradient_cosine"] == pytest.approx(0.0, abs=1e-6)


def test_observing_changes_nothing_and_says_what_would_be_done():
    control, module = GradientAlignmentControl((0.2, 0.5), observe_only=True), Weights(2)
    observe(control, module, [3.0, 4.0])
    for _ in range(5):
        gradient, metrics = observe(control, module, [3.0, 4.0])
        assert gradient == [3.0, 4.0]
        assert (metrics["control/gac_regime"], metrics["control/gac_beta"]) == (2.0, 1.0)


def test_thresholds_come_from_the_first_updates():
    control, module = GradientAlignmentControl(calibration_updates=2), Weights(2)
    for gradient in ([2.0, 0.0], [3.0, 4.0], [4.0, 3.0]):
        assert observe(control, module, gradient)[0] == gradient
    # cosines .6 and .96: percentile 95 is .6 + .95 * .36 = .942; mean .78 + 6 * .18 = 1.86
    assert control.thresholds == pytest.approx((0.942, 1.86))
    gradient, metrics = observe(control, module, [4.0, 3.0])  # cosine 1
    assert metrics["control/gac_regime"] == 1.0
    assert gradient == pytest.approx([0.0, 0.0], abs=1e-6)  # sqrt(1 - c^2) = 0: nothing orthogonal is left


def test_calibration_on_stale_tokens_is_told():
    control, module = GradientAlignmentControl(calibration_updates=2), Weights(2)
    for gradient in ([2.0, 0.0], [3.0, 4.0]):
        control.on_train_batch_start(None, module, SimpleNamespace(stats={"pool/policy_age_mean": 2.0}), 0)
        observe(control, module, gradient)
    with pytest.warns(UserWarning, match=r"mean policy age 2\.00"):
        observe(control, module, [4.0, 3.0])


def test_running_mean_and_percentile_are_over_the_cosines_so_far():
    control, module = GradientAlignmentControl((0.0, 1.0), observe_only=True), Weights(2)
    for gradient in ([2.0, 0.0], [3.0, 4.0]):
        observe(control, module, gradient)
    metrics = observe(control, module, [4.0, 3.0])[1]
    assert metrics["control/gradient_cosine_mean"] == pytest.approx(0.78)
    assert metrics["control/gradient_cosine_p95"] == pytest.approx(0.942)


def test_a_parameter_without_gradient_takes_no_part():
    control, module = GradientAlignmentControl((0.2, 0.9)), Weights(2)
    module.unused = torch.nn.Parameter(torch.ones(3))
    observe(control, module, [2.0, 0.0])
    assert observe(control, module, [3.0, 4.0])[1]["control/gradient_cosine"] == pytest.approx(0.6)
    assert module.unused.grad is None


def test_a_restored_control_goes_on_where_it_was():
    gradients = [torch.randn(4).tolist() for _ in range(12)]
    whole, module = GradientAlignmentControl(calibration_updates=4), Weights(4)
    expected = [observe(whole, module, g) for g in gradients]
    first, second = GradientAlignmentControl(calibration_updates=4), GradientAlignmentControl(calibration_updates=4)
    half = [observe(first, module, g) for g in gradients[:6]]
    second.load_state_dict(first.state_dict())
    assert half + [observe(second, module, g) for g in gradients[6:]] == expected


@pytest.mark.parametrize("thresholds", [(0.3, 0.05), (-0.1, 0.3), (1.0, 1.0), (math.nan, 0.3)])
def test_thresholds_out_of_order_are_refused(thresholds):
    with pytest.raises(ConfigurationError, match=r"GradientAlignmentControl\.thresholds must be two numbers"):
        GradientAlignmentControl(thresholds)


def test_all_bad_arguments_are_told_at_once():
    with pytest.raises(ConfigurationError, match=r"thresholds.*calibration_updates.*max_consecutive_skips") as caught:
        GradientAlignmentControl((0.5, 0.1), calibration_updates=1, max_consecutive_skips=11)
    assert "got 11" in str(caught.value)


def test_a_record_that_cannot_be_read_is_refused(tmp_path):
    control = GradientAlignmentControl(str(tmp_path / "missing.json"))
    with pytest.raises(ConfigurationError, match=r"gradient_alignment\.json.*FileNotFoundError.*observe_only"):
        control.setup(None, None, "fit")
    (tmp_path / "short.json").write_text('{"cosines": [0.1]}', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="at least 2 cosines, got 1"):
        GradientAlignmentControl(str(tmp_path / "short.json")).setup(None, None, "fit")
