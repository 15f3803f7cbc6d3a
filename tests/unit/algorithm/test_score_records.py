"""What exact score norms keep of a matrix: its gradients and their norms, by hand, and how little work the norms take."""

import pytest
import torch
from torch import Tensor, nn

from lit_asyncrl.algorithm import score_records
from lit_asyncrl.algorithm.score_records import Product, norm_weight_gradients, over_tokens, squared_norms


def doubles(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Two trajectories of two tokens. Gradients: (1, 2) x (1, 0, 2) + (0, 1) x (3, 1, 0) and (1, 0) x (0, 1, 0) + (1, 1) x (1, 0, 0)
LINEAR = Product(doubles([[1, 2], [0, 1]], [[1, 0], [1, 1]]), doubles([[1, 0, 2], [3, 1, 0]], [[0, 1, 0], [1, 0, 0]]))
OF_LINEAR = doubles([[1, 0, 2], [5, 1, 4]], [[1, 1, 0], [1, 0, 0]])
# Two trajectories of three ids in a table of 3 rows: ids 2, 0, 2 and 1, 1, 0
LOOKUP = Product(torch.tensor([[2, 0, 2], [1, 1, 0]]), doubles([[1, 2], [3, 4], [5, 6]], [[1, 0], [0, 1], [2, 2]]))
OF_LOOKUP = doubles([[3, 4], [0, 0], [6, 8]], [[2, 2], [1, 1], [0, 0]])


@pytest.mark.parametrize(("product", "expected"), [(LINEAR, OF_LINEAR), (LOOKUP, OF_LOOKUP)], ids=["linear", "lookup"])
def test_gradients_are_sums_of_outer_products(product: Product, expected: Tensor) -> None:
    assert torch.equal(product.gradients(expected.shape[1:]), expected)


@pytest.mark.parametrize(("product", "gradients"), [(LINEAR, OF_LINEAR), (LOOKUP, OF_LOOKUP)], ids=["linear", "lookup"])
def test_a_weighted_sum_is_added_to_what_is_there(product: Product, gradients: Tensor) -> None:
    total = torch.ones(gradients.shape[1:], dtype=torch.float64)
    product.weighted_sum(doubles(2, -1), total)
    assert torch.equal(total, 1 + 2 * gradients[0] - gradients[1])


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([[LINEAR]], [47, 3]),  # 1 + 4 + 25 + 1 + 16 and 1 + 1 + 1
        ([[LOOKUP]], [125, 10]),  # 9 + 16 + 36 + 64 and 4 + 4 + 1 + 1
        ([[LINEAR], [LOOKUP]], [172, 13]),
        ([[LINEAR], [LINEAR]], [94, 6]),  # two matrices with the same records
        ([[LOOKUP], [LOOKUP]], [250, 20]),
        ([[LINEAR, LINEAR]], [188, 12]),  # one matrix used twice: the gradient is twice as large
        ([[LOOKUP, LOOKUP, LOOKUP]], [1125, 90]),  # three times
        ([[LINEAR, LINEAR], [LINEAR, LINEAR]], [376, 24]),
    ],
)
def test_squared_norms_match_the_oracle(uses: list[list[Product]], expected: list[float]) -> None:
    assert squared_norms(uses).tolist() == expected  # type: ignore[union-attr]


def test_without_a_matrix_there_is_no_norm() -> None:
    assert squared_norms([]) == 0.0


def test_matrices_with_one_input_share_its_inner_products(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    gram = score_records._gram
    monkeypatch.setattr(score_records, "_gram", lambda *factors: calls.append(1) or gram(*factors))
    shared = [[Product(torch.randn(2, 3, 4), columns)] for columns in [torch.randn(2, 3, 5)] * 3]
    other = [Product(torch.randn(2, 3, 4), torch.randn(2, 3, 5))]
    squared_norms([*shared, other])
    assert len(calls) == 3 + 1 + 2  # rows of each, columns of one input; rows and columns of the other


def test_gradients_of_vectors_are_summed_over_all_tokens() -> None:
    # [B, 2, 2, n] with n = 1: heads are tokens too
    assert over_tokens(doubles([[[1], [2]], [[3], [4]]], [[[5], [6]], [[7], [8]]])).tolist() == [[10], [26]]


class UnitRMSNorm(nn.Module):
    """x * (1 + weight), already normalized."""

    def __init__(self, weight: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(doubles(*weight))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + self.weight)


@pytest.mark.parametrize("weight", [[1.0, 3.0], [1.0, -1.0], [-1.0, -1.0]])
def test_a_norm_layer_s_gradient_is_that_of_its_factor(weight: list[float]) -> None:
    # sum over both tokens of gradient times normalized: 2 * 1 + 3 * 10, 4 * 5 + 1 * 7, whatever the weight
    layer, inputs, gradient = UnitRMSNorm(weight), doubles([[1, 5], [10, 7]]), doubles([[2, 4], [3, 1]])
    with torch.no_grad():
        result = norm_weight_gradients(layer, inputs, layer(inputs), gradient)
    assert result.tolist() == [[32, 27]]
