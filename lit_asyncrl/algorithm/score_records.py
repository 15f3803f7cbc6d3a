"""What exact score norms keep of each layer: products whose sum over tokens is a matrix's gradient, and gradients of vectors.

The weight gradient of a linear layer or an embedding is a sum over tokens of outer products, rows (outer) columns. Its squared
norm and its weighted sums need the two factors only; see `score_norms`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Product:
    """One use of a matrix [R, C]: per trajectory b its gradient is sum_t rows[b, t] (outer) columns[b, t].

    `rows` is [B, T, R], or [B, T] integers that stand for one-hot rows (an embedding's ids); `columns` is [B, T, C].
    """

    rows: Tensor
    columns: Tensor

    @property
    def is_lookup(self) -> bool:
        """Whether `rows` are ids."""
        return not self.rows.is_floating_point()

    def gradients(self, shape: torch.Size) -> Tensor:
        """The trajectories' gradients [B, R, C]; `shape` is (R, C)."""
        if not self.is_lookup:
            return self.rows.transpose(1, 2) @ self.columns
        batch_size = len(self.rows)
        offsets = torch.arange(batch_size, device=self.rows.device)[:, None] * shape[0]
        flat = self.columns.new_zeros(batch_size * shape[0], shape[1])
        return flat.index_add_(0, (self.rows + offsets).flatten(), self.columns.flatten(0, 1)).view(batch_size, *shape)

    def weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add sum_b weights[b] * gradient_b to `total` [R, C]."""
        columns = (self.columns * weights[:, None, None]).flatten(0, 1)
        if self.is_lookup:
            total.index_add_(0, self.rows.flatten(), columns)
        else:
            total.addmm_(self.rows.flatten(0, 1).T, columns)


def squared_norms(uses: Iterable[list[Product]]) -> Tensor | float:
    """Sum over matrices of their gradients' squared norms [B] float64, through Gram matrices; 0.0 without a matrix.

    Args:
        uses: per matrix the products of its uses. Neighbours with the same columns (the query, key and value projections of one
            input) share the columns' Gram matrix.
    """
    total: Tensor | float = 0.0
    for _, neighbours in groupby(uses, key=_columns_key):
        matrices = list(neighbours)
        if len(matrices[0]) == 1:
            rows = [_gram(products[0].rows, products[0].rows) for products in matrices]
            columns = matrices[0][0].columns
            total = total + _dot(sum(rows[1:], rows[0]), _gram(columns, columns))
        else:
            total = total + _shared_matrix(matrices[0])
    return total


def _columns_key(products: list[Product]) -> tuple[int, ...]:
    """Equal for matrices that may share a Gram matrix: those used once, on the same tensor."""
    if len(products) > 1 or products[0].is_lookup:
        return (id(products),)
    columns = products[0].columns
    return (columns.data_ptr(), *columns.shape, *columns.stride())


def _shared_matrix(products: list[Product]) -> Tensor:
    """Squared norms [B] of a matrix used several times (tied embeddings): the norm of the sum, with its cross terms."""
    total = sum(_inner(product, product) for product in products)
    for i, first in enumerate(products):
        for second in products[i + 1 :]:
            total = total + 2.0 * _inner(first, second)
    assert isinstance(total, Tensor)
    return total


def _inner(first: Product, second: Product) -> Tensor:
    """Inner products [B] float64 of two uses' gradients, through [T, T'] Gram matrices."""
    return _dot(_gram(first.rows, second.rows), _gram(first.columns, second.columns))


def _gram(first: Tensor, second: Tensor) -> Tensor:
    """Inner products [B, T, T'] of tokens' vectors, either of which may be ids for one-hot vectors."""
    if first.is_floating_point() and second.is_floating_point():
        return first @ second.transpose(1, 2)
    if first.is_floating_point():
        return _gram(second, first).transpose(1, 2)
    if second.is_floating_point():  # <onehot(id_t), v_t'> = v_t'[id_t]
        num_tokens = second.shape[1]
        return second.gather(2, first[:, None, :].expand(-1, num_tokens, -1)).transpose(1, 2)
    return first[:, :, None] == second[:, None, :]


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """Inner products [B] float64 of two matrices a trajectory; boolean ones stand for 0 and 1."""
    dtype = second.dtype
    return torch.linalg.vecdot(first.to(dtype).flatten(1), second.flatten(1)).double()


def over_tokens(gradients: Tensor) -> Tensor:
    """Sum of per-token gradients [B, ..., n] over everything between, [B, n]."""
    return gradients.flatten(1, -2).sum(1)


def norm_weight_gradients(module: nn.Module, inputs: Tensor, output: Tensor, gradient: Tensor) -> Tensor:
    """The trajectories' gradients [B, n] of a norm layer's weight.

    The layer computes output = normalized * factor + bias, where the factor is the weight, or 1 + weight in Gemma's kind.

    Args:
        module: the layer.
        inputs, output, gradient: [B, ..., n] of its call: what went in, what came out, and the latter's gradient.
    """
    weight: Any = module.weight
    unit_offset = _is_unit_offset(module)
    factor = weight + 1.0 if unit_offset else weight
    if getattr(module, "bias", None) is None and factor.all():
        # One quotient per trajectory instead of normalizing every token again. Subtracting a bias would cancel digits.
        return over_tokens(gradient * output.to(gradient.dtype)) / factor.to(gradient.dtype)
    blank = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    if not unit_offset:
        blank["weight"] += 1.0
    normalized = torch.func.functional_call(module, blank, (inputs,))
    return over_tokens(gradient * normalized.to(gradient.dtype))


_UNIT_OFFSET: dict[type, bool] = {}


def _is_unit_offset(module: nn.Module) -> bool:
    """Whether a norm layer multiplies by 1 + weight: with weight 0 its output is then not 0. Found once per class."""
    kind = type(module)
    if kind not in _UNIT_OFFSET:
        weight: Any = module.weight
        blank = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
        sample = torch.arange(weight.numel(), dtype=weight.dtype, device=weight.device)  # LayerNorm makes zeros of a constant
        _UNIT_OFFSET[kind] = bool(torch.func.functional_call(module, blank, (sample,)).any())
    return _UNIT_OFFSET[kind]
