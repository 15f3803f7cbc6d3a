"""Exact per-trajectory score norms and the combined gradient against one autograd call per trajectory."""

import pytest
import torch
from algorithm_cases import gradient_of, make_batch, make_model
from torch import Tensor, nn

from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.score_norms import BatchedScores, check_supported
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.types import MicroBatch

KINDS = ["tied qwen3", "untied llama"]


def brute_force(model: nn.Module, batch: MicroBatch) -> Tensor:
    """[B, P]: the score of each trajectory by automatic differentiation."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    sums = token_logprobs(model, batch).logprobs.masked_fill(~batch.loss_mask, 0.0).sum(-1)
    rows = []
    for value in sums:
        gradients = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True, allow_unused=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)


def batched(model: nn.Module, batch: MicroBatch, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Norms [B] and combined gradient [P]."""
    check_supported(model)
    model.zero_grad()
    with BatchedScores(model, batch.num_trajectories) as scores:
        logprobs = token_logprobs(model, batch, share_prefix=False).logprobs
        scores.backward(logprobs.masked_fill(~batch.loss_mask, 0.0).sum())
    norms = scores.norms_squared()
    scores.accumulate(coefficients)
    return norms, torch.cat([gradient_of(nn.ParameterList([p])) for p in model.parameters() if p.requires_grad])


def assert_exact(model: nn.Module, batch: MicroBatch, tolerance: float) -> None:
    coefficients = torch.randn(batch.num_trajectories, dtype=batch.rewards.dtype)
    expected = brute_force(model, batch)
    norms, gradient = batched(model, batch, coefficients)
    torch.testing.assert_close(norms, expected.square().sum(-1).double(), rtol=tolerance, atol=0)
    combined = coefficients @ expected
    assert float((gradient - combined).norm() / combined.norm()) < tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_norms_and_combined_gradient_equal_brute_force(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    assert_exact(make_model(kind, dtype), make_batch(dtype=dtype), tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("materialize", [True, False])
def test_gram_matrices_and_materialized_gradients_agree(kind: str, materialize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchedScores, "_is_small", lambda *_: materialize)
    assert_exact(make_model(kind, torch.float64), make_batch(), 1e-10)


def test_frozen_parameters_are_left_out() -> None:
    model = make_model("untied llama", torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and "layers.0" not in name and "bias" not in name)
    assert_exact(model, make_batch(), 1e-10)
    assert model.model.embed_tokens.weight.grad is None


def test_the_row_of_a_padding_id_is_not_trained() -> None:
    model, batch = make_model("untied llama", torch.float64), make_batch()
    assert model.model.embed_tokens.padding_idx == 3
    assert (batch.input_ids == 3).any()
    assert_exact(model, batch, 1e-10)


class UnitOffsetRMSNorm(nn.Module):
    """Gemma's kind: normalized * (1 + weight)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


@pytest.mark.parametrize("make_norm", [nn.LayerNorm, UnitOffsetRMSNorm, nn.RMSNorm])
@pytest.mark.parametrize("with_zero_factor", [True, False])
def test_every_kind_of_norm_layer_is_exact(make_norm, with_zero_factor: bool) -> None:  # type: ignore[no-untyped-def]
    model = make_model("tied qwen3", torch.float64)
    model.model.norm = make_norm(16).double()
    with torch.no_grad():
        model.model.norm.weight.add_(0.1 * torch.randn(16))
        if with_zero_factor:
            model.model.norm.weight[2] = -1.0 if make_norm is UnitOffsetRMSNorm else 0.0
    assert_exact(model, make_batch(), 1e-10)


def test_gradients_are_added_to_those_already_there() -> None:
    model, batch = make_model("tied qwen3", torch.float64), make_batch()
    ones = torch.ones(batch.num_trajectories, dtype=torch.float64)
    once = batched(model, batch, ones)[1]
    with BatchedScores(model, batch.num_trajectories) as scores:
        scores.backward(token_logprobs(model, batch, share_prefix=False).logprobs.masked_fill(~batch.loss_mask, 0.0).sum())
    scores.accumulate(ones)
    torch.testing.assert_close(gradient_of(model), 2 * once)


def test_works_under_bfloat16_autocast() -> None:
    model, batch = make_model("tied qwen3", torch.float32), make_batch(dtype=torch.float32)
    exact = brute_force(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        norms, gradient = batched(model, batch, torch.ones(batch.num_trajectories))
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(norms, exact.square().sum(-1).double(), rtol=0.1, atol=0)
    assert float((gradient - exact.sum(0)).norm() / exact.sum(0).norm()) < 0.1


def test_no_hook_stays_behind() -> None:
    model, batch = make_model("tied qwen3", torch.float64), make_batch()
    with pytest.raises(ZeroDivisionError), BatchedScores(model, batch.num_trajectories):
        raise ZeroDivisionError
    assert all(not module._forward_hooks for module in model.modules())


class Scale(nn.Module):
    """A layer nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_an_unknown_layer_is_refused_by_name_with_the_remedy() -> None:
    model = make_model("tied qwen3", torch.float64)
    model.model.layers[1].mlp.act_fn = Scale()
    with pytest.raises(ConfigurationError, match=r"'model\.layers\.1\.mlp\.act_fn' of type Scale.*per_trajectory.*logit_proxy"):
        check_supported(model)
    model.model.layers[1].mlp.act_fn.requires_grad_(False)
    check_supported(model)


def test_gradient_checkpointing_is_refused() -> None:
    model = make_model("tied qwen3", torch.float64)
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigurationError, match=r"gradient checkpointing.*per_trajectory"):
        check_supported(model)


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.compile"):
        check_supported(torch.compile(make_model("tied qwen3", torch.float64)))  # compiles nothing before its first call
