"""Fixtures of the estimator's tests."""

import pytest
import torch
from algorithm_cases import METHODS, PATHS, make_model
from torch import nn

from lit_asyncrl.algorithm.estimator import PolicyGradient


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> PolicyGradient:
    return PolicyGradient(*METHODS[request.param])


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """No test changes its weights."""
    return make_model("tied qwen3", torch.float64)
