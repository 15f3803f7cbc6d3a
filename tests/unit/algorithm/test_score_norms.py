"""Exact per-trajectory score norms and the combined gradient against one autograd call per trajectory."""

import pytest
import torch
from algorithm_cases import gradient_of, make_batch, make_model
from torch import Tensor, nn

from lit_asyncrl.algorithm.advantages import OPOB
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.logprobs import token_logprobs
from lit_asyncrl.algorithm.losses import SequenceTIS
from lit_asyncrl.algorithm.score_norms import BatchedScores, check_supported, logit_proxy
from lit_asyncrl.algorithm.score_records import Product, squared_norms
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
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_norms_of_one_backward_per_trajectory_equal_brute_force(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    model, batch = make_model(kind, dtype), make_batch(dtype=dtype)
    expected = brute_force(model, batch).square().sum(-1).double()
    estimator = PolicyGradient(SequenceTIS(), OPOB("per_trajectory"))
    (stats,) = estimator.gradient(model, [batch], backward=lambda loss: loss.backward())
    torch.testing.assert_close(stats.score_norms_squared, expected, rtol=tolerance, atol=0)


def test_the_smaller_of_gram_matrix_and_materialized_gradients_is_kept() -> None:
    scores = BatchedScores(nn.Module(), 2)
    for columns, small in ((10, True), (11, False)):  # 5 tokens: 10 * 10 = 5 * (10 + 10), 10 * 11 > 5 * (10 + 11)
        weight = nn.Parameter(torch.zeros(10, columns))
        scores.add_product(weight, torch.zeros(2, 5, 10), torch.zeros(2, 5, columns))
        assert scores._is_small(weight) is small


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("materialize", [True, False])
def test_gram_matrices_and_materialized_gradients_agree(
    kind: str, dtype: torch.dtype, tolerance: float, materialize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchedScores, "_is_small", lambda *_: materialize)
    assert_exact(make_model(kind, dtype), make_batch(dtype=dtype), tolerance)


@pytest.mark.parametrize("small", [True, False])
def test_after_the_backward_the_smaller_record_alone_is_left(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchedScores, "_is_small", lambda *_: small)
    model, batch = make_model("untied llama", torch.float64), make_batch()
    with BatchedScores(model, batch.num_trajectories) as scores:
        scores.backward(token_logprobs(model, batch, share_prefix=False).logprobs[batch.loss_mask].sum())
        assert not scores._calls  # nor the layers' outputs
    matrices = {p for p in model.parameters() if p.dim() == 2}
    assert set(scores._products) == (set() if small else matrices)
    assert matrices & set(scores._vectors) == (matrices if small else set())


def test_a_layer_whose_output_is_not_used_has_no_score() -> None:
    model = make_model("untied llama", torch.float64)
    model.extra = nn.Linear(16, 16).double()
    model.model.layers[0].register_forward_hook(lambda _, __, out: (model.extra(out), out)[1])
    assert_exact(model, make_batch(), 1e-10)


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


def test_a_large_bias_costs_a_norm_layer_no_precision() -> None:
    model, batch = make_model("tied qwen3", torch.float32), make_batch(dtype=torch.float32)
    model.model.norm = nn.LayerNorm(16)
    with torch.no_grad():
        model.model.norm.weight.fill_(0.01)
        model.model.norm.bias.copy_(10.0 * torch.randn(16))
    assert_exact(model, batch, 1e-5)


class SharedProjection(nn.Module):
    """Two uses of one weight on the same input, beside two layers that share that input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x).tanh() + self.first(x).sin()


@pytest.mark.parametrize("materialize", [True, False])
def test_a_layer_called_twice_counts_once_with_both_uses(materialize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchedScores, "_is_small", lambda *_: materialize)
    model = make_model("untied llama", torch.float64)
    model.model.layers[1].mlp = SharedProjection().double()
    assert_exact(model, make_batch(), 1e-10)


@pytest.mark.parametrize("materialize", [True, False])
def test_an_embedding_used_twice_is_exact(materialize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchedScores, "_is_small", lambda *_: materialize)
    model = make_model("untied llama", torch.float64)
    model.model.layers[0].register_forward_hook(lambda _, __, out: out + 0.1 * model.model.embed_tokens(out[..., 0].long() % 19))
    assert_exact(model, make_batch(), 1e-10)


def test_the_cross_term_of_a_shared_matrix_does_not_depend_on_which_use_comes_first() -> None:
    lookup = Product(torch.tensor([[2, 0, 2]]), torch.randn(1, 3, 4, dtype=torch.float64))
    linear = Product(torch.randn(1, 2, 5, dtype=torch.float64), torch.randn(1, 2, 4, dtype=torch.float64))
    expected = sum(product.gradients(torch.Size([5, 4])) for product in (lookup, linear)).square().sum()
    for uses in ([lookup, linear], [linear, lookup]):
        torch.testing.assert_close(squared_norms([uses]), expected[None], rtol=1e-12, atol=0)


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


def test_a_layer_that_mixes_trajectories_is_refused_when_it_runs() -> None:
    model, batch = make_model("tied qwen3", torch.float64), make_batch()
    down = model.model.layers[0].mlp.down_proj
    down.register_forward_pre_hook(lambda _, args: (args[0].flatten(0, 1),))
    down.register_forward_hook(lambda _, __, out: out.view(batch.num_trajectories, -1, 16))
    with pytest.raises(ConfigurationError, match=r"type Linear sees inputs of shape.*for 12 trajectories.*logit_proxy"):
        batched(model, batch, torch.ones(batch.num_trajectories))


def test_the_proxy_is_the_sum_of_the_energies_of_trained_tokens() -> None:
    energy = torch.tensor([[0.25, 0.5, float("nan")], [1.0, 2.0, 4.0]])
    mask = torch.tensor([[True, True, False], [False, True, True]])
    assert logit_proxy(energy, mask).tolist() == [0.75, 6.0]
