"""Rows that share a group's prompt: same numbers as plain rows, and only where they are less work."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithm_cases import gradient_of, make_batch, make_model
from torch import Tensor, nn

from lit_asyncrl.algorithm import shared_prefix
from lit_asyncrl.algorithm.advantages import OPOB
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.logprobs import TokenLogprobs, token_logprobs
from lit_asyncrl.algorithm.losses import Reinforce
from lit_asyncrl.algorithm.shared_prefix import cheapest_layout, plain_layout
from lit_asyncrl.types import MicroBatch


def batch_of(*groups: list[list[int]], dtype: torch.dtype = torch.float64) -> MicroBatch:
    """Trajectories as written; every token after the second is trained."""
    rows = [torch.tensor(row) for group in groups for row in group]
    lengths = torch.tensor([len(row) for row in rows])
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    position = torch.arange(ids.shape[1])
    real = position < lengths[:, None]
    trained = real & (position >= 2)
    return MicroBatch(
        input_ids=ids,
        attention_mask=real,
        loss_mask=trained,
        behavior_logprobs=torch.zeros(ids.shape, dtype=dtype),
        token_versions=torch.where(trained, 0, -1).int(),
        rewards=torch.zeros(len(rows), dtype=dtype),
        group_index=torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group) for group in groups])),
        temperature=0.7,
    )


def sized_batch(groups: int, group_size: int, prompt: int, response: int) -> MicroBatch:
    """Full-length trajectories, all of the same prompt; responses differ from their first token on."""
    member = torch.arange(1, group_size + 1)[:, None].expand(group_size, response)
    rows = torch.cat([torch.zeros(group_size, prompt, dtype=torch.long), member], -1).tolist()
    return batch_of(*[rows] * groups)


RAGGED = (
    [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 9, 10, 11, 12, 13], [1, 2, 3, 9, 14]],
    [[4, 5, 6, 7, 7], [4, 5, 8, 8, 8, 8], [4, 5, 6, 7, 9, 9, 9]],
)
CASES = {
    "ragged members": RAGGED,
    "different prompts in part": ([[1, 2, 3, 4, 5], [1, 9, 3, 4, 5, 6], [1, 2, 3, 4, 7]], *RAGGED),
    "no common prompt in one group": ([[1, 2, 3, 4, 5], [2, 2, 3, 4, 5], [3, 2, 3, 4, 5, 8]], *RAGGED),
    "a group of one member": ([[7, 8, 9, 10, 11]], *RAGGED, [[5, 5, 5]]),
    "a member that is all prefix": ([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]], *RAGGED),
    "equal members": ([[1, 2, 3, 4, 5]] * 3, [[6, 7, 8, 9]] * 2),
}


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Share whatever it costs, with at most so many members to a row."""
    rows = shared_prefix._Members.rows

    def at_most(per_row: int) -> None:
        monkeypatch.setattr(shared_prefix, "WORTHWHILE", math.inf)
        monkeypatch.setattr(shared_prefix, "TOKEN_COST", 1e9)
        monkeypatch.setattr(shared_prefix._Members, "rows", lambda self, wanted: rows(self, min(wanted, per_row)))

    return at_most


def both(model: nn.Module, batch: MicroBatch) -> list[tuple[TokenLogprobs, Tensor]]:
    """Results and gradients of a random combination of log-probs, plain and shared."""
    assert cheapest_layout(model, batch).attention_mask is not None
    weights = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    results = []
    for share_prefix in (False, True):
        model.zero_grad()
        scored = token_logprobs(model, batch, need_energy=True, share_prefix=share_prefix)
        (scored.logprobs * weights).sum().backward()
        results.append((scored, gradient_of(model)))
    return results


def assert_same(model: nn.Module, batch: MicroBatch, tolerance: float) -> None:
    (plain, gradient), (shared, shared_gradient) = both(model, batch)
    for ours, theirs in zip(shared, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
    torch.testing.assert_close(shared_gradient, gradient, atol=tolerance, rtol=tolerance)


def test_layout_of_two_members_of_a_row(share: Callable[[int], None]) -> None:
    share(4)
    batch = batch_of([[1, 2, 3, 4], [1, 2, 5]], [[6, 7, 8], [6, 9, 9]])
    layout = cheapest_layout(make_model("tied qwen3", torch.float32), batch)
    # last tokens are not fed: 1 2 | 3 | - and 6 | 7 | 9, flush right
    assert layout.input_ids.tolist() == [[1, 2, 3], [6, 7, 9]]
    assert layout.position_ids.tolist() == [[0, 1, 2], [0, 1, 1]]
    assert layout.rows.tolist() == [0, 0, 1, 1]
    assert layout.columns[2:, :2].tolist() == [[0, 1], [0, 2]]
    assert layout.attention_mask is not None
    assert (layout.attention_mask[1, 0] == 0).tolist() == [[True, False, False], [True, True, False], [True, False, True]]


def test_shorter_rows_are_padded_on_the_left_where_no_token_sees_it(share: Callable[[int], None]) -> None:
    share(4)
    batch = batch_of([[1, 2, 3, 4], [1, 2, 5]], [[6, 7, 8], [6, 9]])
    layout = cheapest_layout(make_model("tied qwen3", torch.float64), batch)
    # fed: 1 2 | 3 | - and 6 | 7 | -
    assert layout.input_ids.tolist() == [[1, 2, 3], [0, 6, 7]]
    assert layout.position_ids.tolist() == [[0, 1, 2], [0, 0, 1]]
    assert layout.columns[2:, :1].tolist() == [[1], [1]]
    assert layout.attention_mask is not None and layout.attention_mask.dtype == torch.float64
    assert (layout.attention_mask[1, 0] == 0).tolist() == [[True, False, False], [False, True, False], [False, True, True]]


def test_the_mask_has_the_dtype_of_the_attention_under_autocast(share: Callable[[int], None]) -> None:
    share(4)
    with torch.autocast("cpu", torch.bfloat16):
        layout = cheapest_layout(make_model("tied qwen3", torch.float32), batch_of(*RAGGED))
    assert layout.attention_mask is not None and layout.attention_mask.dtype == torch.bfloat16


def test_log_probs_come_from_shared_rows_unless_plain_ones_are_asked_for(share: Callable[[int], None]) -> None:
    share(4)
    model, batch = make_model("tied qwen3", torch.float64), batch_of(*RAGGED)
    rows: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))  # type: ignore[operator]
    token_logprobs(model, batch)
    token_logprobs(model, batch, share_prefix=False)
    assert rows == [2, 7]


@pytest.mark.parametrize("per_row", [2, 3, 4])
@pytest.mark.parametrize("kind", ["tied qwen3", "untied llama"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_shared_rows_equal_plain_rows_in_float64(
    case: tuple[list[list[int]], ...], kind: str, per_row: int, share: Callable[[int], None]
) -> None:
    share(per_row)
    assert_same(make_model(kind, torch.float64), batch_of(*case), 1e-10)


def test_shared_rows_equal_plain_rows_in_float32(share: Callable[[int], None]) -> None:
    share(4)
    assert_same(make_model("tied qwen3", torch.float32), batch_of(*RAGGED, dtype=torch.float32), 1e-5)


def test_shared_rows_equal_plain_rows_under_gradient_checkpointing(share: Callable[[int], None]) -> None:
    share(4)
    model = make_model("untied llama", torch.float64).train()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    assert_same(model, batch_of(*RAGGED), 1e-10)


def test_shared_rows_equal_plain_rows_under_autocast_up_to_its_rounding(share: Callable[[int], None]) -> None:
    share(4)
    with torch.autocast("cpu", torch.bfloat16):
        (plain, gradient), (shared, shared_gradient) = both(
            make_model("tied qwen3", torch.float32), batch_of(*RAGGED, dtype=torch.float32)
        )
    torch.testing.assert_close(shared.logprobs, plain.logprobs, atol=0.1, rtol=0.02)
    assert torch.cosine_similarity(shared_gradient, gradient, dim=0) > 0.999


def test_shared_rows_equal_plain_rows_without_gradient(share: Callable[[int], None]) -> None:
    share(4)
    model, batch = make_model("tied qwen3", torch.float64), batch_of(*RAGGED)
    with torch.no_grad():
        plain, shared = (token_logprobs(model, batch, share_prefix=s).logprobs for s in (False, True))
    torch.testing.assert_close(shared, plain, atol=1e-10, rtol=0)


def test_members_without_a_trained_token_change_nothing(share: Callable[[int], None]) -> None:
    share(4)
    batch = batch_of(*RAGGED)
    kept = torch.arange(batch.num_trajectories) % 3 == 0
    batch = replace(
        batch,
        loss_mask=batch.loss_mask & kept[:, None],
        token_versions=batch.token_versions.masked_fill(~kept[:, None], -1),
    )
    assert_same(make_model("tied qwen3", torch.float64), batch, 1e-10)


def test_a_micro_batch_without_any_scored_token_gives_zeros(share: Callable[[int], None]) -> None:
    share(4)
    batch = batch_of(*RAGGED)
    nothing = torch.zeros_like(batch.loss_mask)
    batch = replace(batch, loss_mask=nothing, token_versions=nothing.int() - 1)
    assert not token_logprobs(make_model("tied qwen3", torch.float64), batch).logprobs.any()


def test_one_token_of_each_trajectory_is_fed_where_there_are_two_or_one(share: Callable[[int], None]) -> None:
    share(4)
    model, one, two = with_config(), batch_of([[3], [3]]), batch_of([[3, 4], [3, 5]])
    assert [shape_of(plain_layout(batch)) for batch in (one, two)] == [(2, 1), (2, 1)]
    assert [shape_of(cheapest_layout(model, batch)) for batch in (one, two)] == [(2, 1), (1, 1)]


@pytest.mark.parametrize("case", [[[[3], [3]]], [[[3, 4], [3, 5]]], [[[3], [3, 4, 5]]]])
def test_trajectories_of_one_or_two_tokens(case: list[list[list[int]]], share: Callable[[int], None]) -> None:
    share(4)
    model, batch = make_model("tied qwen3", torch.float64), batch_of(*case)
    plain, shared = (token_logprobs(model, batch, share_prefix=s).logprobs for s in (False, True))
    torch.testing.assert_close(shared, plain, atol=1e-10, rtol=0)


def test_exact_score_norms_in_one_backward_see_a_row_per_trajectory(share: Callable[[int], None]) -> None:
    share(4)
    gradients = []
    for score_norm in ("batched", "per_trajectory"):
        model, batch = make_model("tied qwen3", torch.float64), batch_of(*RAGGED)
        batch.rewards = torch.arange(7, dtype=torch.float64)
        estimator = PolicyGradient(Reinforce(), OPOB(score_norm=score_norm))
        estimator.accumulate(model, batch, num_trajectories=7, num_trained_tokens=26, backward=lambda loss: loss.backward())
        gradients.append(gradient_of(model))
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-10)


def with_config(**values: object) -> nn.Module:
    model = make_model("tied qwen3", torch.float32)
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


def shape_of(layout: shared_prefix.RowLayout) -> tuple[int, ...]:
    return tuple(layout.input_ids.shape)


@pytest.mark.parametrize(
    ("hidden_size", "sizes", "expected"),
    [
        # plain: 128 * 22 * (6 * 64 + 11) = 1.11M; eight a row: 16 * 92 * (384 + 92) = 0.70M; four: 32 * 52 * 436 = 0.73M
        (64, (16, 8, 12, 11), (16, 92)),
        # plain: 128 * 43 * (6 * 128 + 21.5) = 4.35M; eight: 4.28M; four: 32 * 136 * (768 + 136) = 3.93M; two: 3.99M
        (128, (16, 8, 12, 32), (32, 136)),
        # plain: 32 * 163 * (6 * 576 + 81.5) = 18.5M; eight: 4 * 604 * (3456 + 604) = 9.8M
        (576, (4, 8, 100, 64), (4, 604)),
        # plain: 16 * 4607 * (3456 + 2303) = 425M; two: 8 * 8702 * (3456 + 8702) = 846M
        (576, (1, 16, 512, 4096), (16, 4607)),
        # plain: 4 * 40 * (384 + 20) = 65k; two: 2 * 79 * (384 + 79) = 73k
        (64, (1, 4, 1, 40), (4, 40)),
        # plain: 8 * 39 * (384 + 19.5) = 125.9k, of which 95 % are 119.6k; two: 4 * 66 * (384 + 66) = 118.8k; four: 121.0k
        (64, (2, 4, 12, 28), (4, 66)),
        # four: 2 * 48 * (24 + 48) = 6912 as eight: 72 * (24 + 72) has, whose mask is larger
        (4, (1, 8, 24, 7), (2, 48)),
    ],
)
def test_rows_are_shared_where_that_is_less_work(
    hidden_size: int, sizes: tuple[int, int, int, int], expected: tuple[int, int]
) -> None:
    assert shape_of(cheapest_layout(with_config(hidden_size=hidden_size), sized_batch(*sizes))) == expected


def test_rows_cost_what_the_longest_of_them_does() -> None:
    # plain: 8 * 40 * (384 + 20) = 129k; two: 4 * 79 * (384 + 79) = 146k, though the second group's rows have 3 tokens
    long, short = ([[0] + [member] * 40 for member in range(1, 5)], [[0, 0, member] for member in range(1, 5)])
    assert shape_of(cheapest_layout(with_config(hidden_size=64), batch_of(long, short))) == (8, 40)


def test_groups_that_have_nothing_in_common_stay_plain() -> None:
    batch = make_batch()
    assert cheapest_layout(with_config(), batch).attention_mask is None


@pytest.mark.parametrize(
    "config",
    [
        {"_attn_implementation": "eager"},
        {"_attn_implementation": "flash_attention_2"},
        {"_attn_implementation": "flex_attention"},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["conv", "full_attention"]},
    ],
)
def test_models_that_cannot_take_the_mask_stay_plain(config: dict[str, object]) -> None:
    batch = sized_batch(16, 8, 12, 11)
    assert cheapest_layout(with_config(), batch).attention_mask is not None
    assert cheapest_layout(with_config(**config), batch).attention_mask is None


def test_models_that_say_nothing_of_masks_stay_plain() -> None:
    config = SimpleNamespace(_attn_implementation="sdpa", hidden_size=64)
    hidden_size: Any = shared_prefix._hidden_size
    assert hidden_size(SimpleNamespace(config=config)) is None
    assert hidden_size(SimpleNamespace(config=config, _supports_attention_backend=True)) == 64
    assert hidden_size(SimpleNamespace()) is None


def test_recurrent_models_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_config()
    monkeypatch.setattr(type(model), "_is_stateful", True)
    assert cheapest_layout(model, sized_batch(16, 8, 12, 11)).attention_mask is None
