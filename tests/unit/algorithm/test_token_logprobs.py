"""Token log-probs, entropy and energy of a real tiny model against plain log-softmax."""

from dataclasses import replace

import pytest
import torch
from algorithm_cases import gradient_of, make_batch, make_model
from torch.utils._python_dispatch import TorchDispatchMode

from lit_asyncrl.algorithm import logprobs as logprobs_module
from lit_asyncrl.algorithm.logprobs import token_logprobs


def plain(model, batch, temperature):  # type: ignore[no-untyped-def]
    """All of it, by the definitions, with an attention mask: [B, T] log-probs, entropy, energy (entry 0 is 0)."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits[:, :-1] / temperature
    logp = logits.log_softmax(-1)
    p = logp.exp()
    onehot = torch.nn.functional.one_hot(batch.input_ids[:, 1:], logits.shape[-1])
    columns = ((logp * onehot).sum(-1), -(p * logp).sum(-1), (onehot - p).square().sum(-1))
    needed = (batch.token_versions >= 0)[:, 1:]
    return [torch.nn.functional.pad(x.masked_fill(~needed, 0.0), (1, 0)) for x in columns]


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_values_and_gradient_equal_the_definition(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS", chunk)
    model, batch = make_model("tied qwen3", torch.float64), make_batch(temperature=0.7)
    result, expected = token_logprobs(model, batch, need_energy=True), plain(model, batch, 0.7)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), atol=1e-10, rtol=0)
    assert result.energy is not None and not result.energy.requires_grad
    seed = torch.randn_like(expected[0])
    gradients = []
    for logp in (result.logprobs, expected[0]):
        model.zero_grad()
        (logp * seed).sum().backward()
        gradients.append(gradient_of(model))
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-10)


def test_the_last_token_is_not_fed() -> None:
    model, batch = make_model("tied qwen3", torch.float32), make_batch(dtype=torch.float32)
    shapes = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))  # type: ignore[operator]
    token_logprobs(model, batch, share_prefix=False)
    assert shapes == [(12, 13)]  # of [12, 14]


def test_logits_are_computed_from_the_first_scored_position_on() -> None:
    model, batch = make_model("tied qwen3", torch.float32), make_batch(dtype=torch.float32)
    shapes, options = [], []
    model.lm_head.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    model.register_forward_pre_hook(lambda _, __, kwargs: options.append(kwargs["use_cache"]), with_kwargs=True)
    token_logprobs(model, batch, share_prefix=False)
    nothing = torch.zeros_like(batch.loss_mask)
    token_logprobs(model, replace(batch, loss_mask=nothing, token_versions=nothing.int() - 1), share_prefix=False)
    first = min((row >= 0).nonzero()[0].item() for row in batch.token_versions) - 1  # scored by the logits one position before
    assert first > 0
    assert shapes == [(12, 13 - first, 16), (12, 1, 16)]
    assert options == [False, False]


def test_chunks_hold_at_most_so_many_logits_and_at_least_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS", 8)
    assert logprobs_module._chunks(5, 3) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert logprobs_module._chunks(2, 9) == [slice(0, 1), slice(1, 2)]


def test_both_passes_go_by_chunks_of_the_vocabulary_s_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, chunks = [], logprobs_module._chunks
    monkeypatch.setattr(logprobs_module, "_chunks", lambda *size: sizes.append(size) or chunks(*size))
    logits = torch.randn(2, 3, 5, requires_grad=True)
    rows = torch.tensor([0, 5, 4, 1])
    logprobs_module._RowLogprobs.apply(logits, rows, torch.zeros_like(rows), 1.0, False)[0].sum().backward()
    assert sizes == [(4, 5), (4, 5)]


class Operations(TorchDispatchMode):
    """Notes the names of PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("output", [0, 1])
def test_the_gradient_of_log_probs_alone_takes_no_work_for_the_entropy(output: int) -> None:
    logits = torch.randn(1, 2, 5, requires_grad=True)
    rows = torch.tensor([0, 1])
    total = logprobs_module._RowLogprobs.apply(logits, rows, rows, 1.0, False)[output].sum()
    with Operations() as operations:
        total.backward()
    assert ("where" in operations.names) == (output == 1)  # of tokens that cannot occur


def test_a_row_of_logits_that_scores_two_targets_gets_both_gradients() -> None:
    logits = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log().expand(1, 1, 3).clone().requires_grad_()
    logprobs = logprobs_module._RowLogprobs.apply(logits, torch.tensor([0, 0]), torch.tensor([0, 2]), 1.0, False)[0]
    (2.0 * logprobs[0] + logprobs[1]).backward()
    assert logits.grad is not None
    # 2 (e_0 - p) + (e_2 - p) = (2, 0, 1) - 3 p
    assert logits.grad.flatten().tolist() == pytest.approx([-0.1, -0.6, 0.7])


def test_energy_is_the_squared_norm_of_the_logit_score() -> None:
    logits = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log().expand(1, 3, 3)
    targets = torch.tensor([0, 1, 2])
    energy = logprobs_module._RowLogprobs.apply(logits, torch.arange(3), targets, 1.0, True)[2]
    assert energy.tolist() == pytest.approx([0.14, 1.14, 1.34])  # |e_i - p|^2


def test_greedy_sampling_is_scored_at_temperature_one() -> None:
    model = make_model("tied qwen3", torch.float64)
    scored = [token_logprobs(model, make_batch(temperature=t)).logprobs for t in (0.0, 1.0)]
    assert torch.equal(*scored)


def test_untrained_tokens_are_scored_where_the_engine_sampled_them_version_0_included() -> None:
    model, batch = make_model("tied qwen3", torch.float64), make_batch()
    sampled = batch.token_versions >= 0
    first = replace(batch, loss_mask=torch.zeros_like(sampled), token_versions=batch.token_versions.clamp(max=0))
    result = token_logprobs(model, first)
    assert torch.equal(result.logprobs != 0, sampled)
    assert result.energy is None
    assert not result.entropy.requires_grad


def test_works_without_gradient_and_without_sampled_tokens() -> None:
    model, batch = make_model("tied qwen3", torch.float32), make_batch(dtype=torch.float32)
    nothing = torch.zeros_like(batch.loss_mask)
    with torch.no_grad():
        result = token_logprobs(model, replace(batch, loss_mask=nothing, token_versions=nothing.int() - 1))
    assert not result.logprobs.any()
    assert result.logprobs.dtype == torch.float32


def test_log_softmax_is_float32_under_autocast() -> None:
    model, batch = make_model("tied qwen3", torch.float32), make_batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        scored = token_logprobs(model, batch).logprobs
        scored.sum().backward()
    assert scored.dtype == torch.float32
    # bfloat16 has 8 bits: values would otherwise be multiples of 2^-7 from 1 on
    assert (scored[batch.loss_mask] * 128 % 1 != 0).float().mean() > 0.9
    torch.testing.assert_close(scored, token_logprobs(model, batch).logprobs, atol=0.2, rtol=0.05)


def test_an_impossible_token_elsewhere_does_not_make_entropy_nan() -> None:
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]]])
    result = logprobs_module._RowLogprobs.apply(logits, torch.tensor([0]), torch.tensor([1]), 1.0, True)
    assert [float(x) for x in result] == pytest.approx([-0.6931472, 0.6931472, 0.5])
