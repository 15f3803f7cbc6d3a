"""The causes of a difference between the engine's log-probs and the trainer's, told apart."""

import pytest
import torch

from lit_asyncrl.algorithm.mismatch import Mismatch, mismatch_metrics

# One prompt token (-1), then: row 0 all of version 5; row 1 versions 4, 4, 5 (a prefix of older weights); row 2 all of version 4.
VERSIONS = torch.tensor([[-1, 5, 5, 5], [-1, 4, 4, 5], [-1, 4, 4, 4]], dtype=torch.int32)
LOG_RATIO = torch.tensor([[0.0, 0.1, -0.2, 0.3], [0.0, 1.0, -2.0, 3.0], [0.0, 4.0, 5.0, -6.0]])
MASK = VERSIONS >= 0


def test_numeric_is_the_mean_over_tokens_of_the_current_version_after_a_prefix_of_its_own():
    # (0.1 + 0.2 + 0.3) / 3 = 0.2
    assert mismatch_metrics([Mismatch.of(LOG_RATIO, MASK, VERSIONS)], 5)["mismatch/numeric"] == pytest.approx(0.2)


def test_staleness_is_the_mean_over_all_other_trained_tokens():
    # (1 + 2 + 3 + 4 + 5 + 6) / 6 = 3.5
    assert mismatch_metrics([Mismatch.of(LOG_RATIO, MASK, VERSIONS)], 5)["mismatch/staleness"] == pytest.approx(3.5)


def test_micro_batches_pool_their_sums_and_not_their_means():
    parts = [Mismatch.of(LOG_RATIO[:1], MASK[:1], VERSIONS[:1]), Mismatch.of(LOG_RATIO[1:], MASK[1:], VERSIONS[1:])]
    whole = mismatch_metrics([Mismatch.of(LOG_RATIO, MASK, VERSIONS)], 5)
    assert mismatch_metrics(parts, 5) == pytest.approx(whole)


def test_tokens_without_a_loss_and_nan_there_count_nowhere():
    mask = MASK.clone()
    mask[2] = False
    log_ratio = LOG_RATIO.clone()
    log_ratio[2] = torch.nan
    # (1 + 2 + 3) / 3 = 2
    assert mismatch_metrics([Mismatch.of(log_ratio, mask, VERSIONS)], 5)["mismatch/staleness"] == pytest.approx(2.0)


def test_a_kind_without_tokens_has_no_key():
    fresh = Mismatch.of(LOG_RATIO[:1], MASK[:1], VERSIONS[:1])
    assert set(mismatch_metrics([fresh], 5)) == {"mismatch/numeric"}
    assert set(mismatch_metrics([fresh], 6)) == {"mismatch/staleness"}
    assert mismatch_metrics([], 6) == {}
