"""Per-trajectory squared score norms ||S_i||^2, S_i the gradient of trajectory i's summed log-probs, exact in one backward.

A layer's weight gradient is a sum over tokens of outer products of two vectors, so that its squared norm needs the layer's
inputs and output gradients only. `BatchedScores` records the inputs while the model runs, lets one backward of the summed
log-probs compute the output gradients (no weight gradients), forms the norms, and at last the gradient of *any* weighted sum of
the trajectories' log-probs, without a second backward:

    with BatchedScores(model, batch_size) as scores:
        logprobs = token_logprobs(model, micro_batch, share_prefix=False).logprobs
        scores.backward(logprobs[loss_mask].sum())
    norms = scores.norms_squared()
    scores.accumulate(coefficients_that_may_depend_on_norms)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_asyncrl.algorithm.score_records import Product, norm_weight_gradients, over_tokens, squared_norms
from lit_asyncrl.errors import ConfigurationError

_REMEDY = "Set model.advantage.init_args.score_norm to per_trajectory (any model, slower) or logit_proxy (approximate)."


def logit_proxy(energy: Tensor, loss_mask: Tensor) -> Tensor:
    """Squared norm of the score with respect to the logits: the sum of `TokenLogprobs.energy` over trained tokens, [B] float64.

    Source: verl's optimal token baseline uses the same energies.
    """
    return energy.double().masked_fill(~loss_mask, 0.0).sum(-1)


def check_supported(model: nn.Module) -> None:
    """Refuse a model whose exact norms `BatchedScores` cannot form.

    Raises:
        ConfigurationError: a layer with trainable parameters of an unknown kind, gradient checkpointing, `torch.compile`, or
            sharded parameters; naming the layer and the remedy.
    """

    def refuse(what: str) -> ConfigurationError:
        return ConfigurationError(
            f"model.advantage.init_args.score_norm must suit the model, got 'batched' for a model with {what}. {_REMEDY}"
        )

    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise refuse("torch.compile")
        if getattr(module, "gradient_checkpointing", False):
            raise refuse("gradient checkpointing")
        trainable = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if any(hasattr(p, "device_mesh") for p in trainable) or type(module).__name__ == "FullyShardedDataParallel":
            raise refuse("sharded parameters")
        if trainable and _recorder_of(module) is None:
            raise refuse(f"the layer {name or 'at its root'!r} of type {type(module).__name__}")


class BatchedScores:
    """Exact per-trajectory score norms and any weighted sum of scores, from one forward and one backward.

    Covers `nn.Linear`, `nn.Embedding`, `nn.LayerNorm` and RMSNorm layers, a parameter shared between several of them (tied
    embeddings: the norm of the sum, with its cross term), and frozen parameters (left out). Use as a context manager around
    the forward and `backward`. Computes in float32 at least, also under autocast.

    Args:
        model: accepted by `check_supported`.
        batch_size: B, leading dimension of every layer's input.

    Source: VCPO (arXiv 2602.17616) needs these norms and gets them with one backward per trajectory; Gram norms are the known
        ghost-norm identity; forming the weighted sum from the same records is ours.
    """

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size
        self._calls: list[tuple[nn.Module, Tensor, Tensor]] = []
        self._handles: list[Any] = []
        self._products: dict[nn.Parameter, list[Product]] = {}
        self._vectors: dict[nn.Parameter, Tensor] = {}

    def __enter__(self) -> BatchedScores:
        for module in self._model.modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_hook(self._record, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_recording()

    def _stop_recording(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        inputs = args[0] if args else next(iter(kwargs.values()))
        if inputs.shape[0] != self._batch_size:
            raise ConfigurationError(
                "model.advantage.init_args.score_norm must suit the model, got 'batched' for a model whose layer of type "
                f"{type(module).__name__} sees inputs of shape {tuple(inputs.shape)} for {self._batch_size} trajectories. "
                f"{_REMEDY}"
            )
        self._calls.append((module, inputs.detach(), output))

    def backward(self, total: Tensor) -> None:
        """Differentiate `total` (the sum of the trained log-probs of all trajectories) and keep what the norms need."""
        self._stop_recording()  # layers are called to find out what they compute
        outputs = [output for _, _, output in self._calls]
        gradients = torch.autograd.grad(total, outputs, allow_unused=True)
        dtype = torch.promote_types(torch.float32, total.dtype)
        with torch.no_grad(), torch.autocast(total.device.type, enabled=False):
            for (module, inputs, output), gradient in zip(self._calls, gradients, strict=True):
                recorder = _recorder_of(module)
                assert recorder is not None, f"{type(module).__name__} was not refused by check_supported"
                if gradient is not None:
                    recorder(self, module, inputs, output.detach(), gradient.to(dtype))
            self._calls.clear()
            for parameter in list(self._products):
                self._materialize_if_small(parameter)

    def _materialize_if_small(self, parameter: nn.Parameter) -> None:
        """Replace a matrix's records by its per-trajectory gradients where those are smaller (and less work, then)."""
        if self._is_small(parameter):
            gradients = [product.gradients(parameter.shape) for product in self._products.pop(parameter)]
            self._vectors[parameter] = sum(gradients[1:], gradients[0]).flatten(1)

    def _is_small(self, parameter: nn.Parameter) -> bool:
        num_tokens = sum(product.columns.shape[1] for product in self._products[parameter])
        return parameter.numel() <= num_tokens * sum(parameter.shape)

    @torch.no_grad()
    def norms_squared(self) -> Tensor:
        """||S_i||^2 over all trainable parameters, [B] float64."""
        device = next(self._model.parameters()).device
        total = torch.zeros(self._batch_size, dtype=torch.float64, device=device)
        with torch.autocast(device.type, enabled=False):
            total += squared_norms(self._products.values())
            for vector in self._vectors.values():
                total += torch.linalg.vector_norm(vector, dim=1).double().square()
        return total

    @torch.no_grad()
    def accumulate(self, coefficients: Tensor) -> None:
        """Add sum_i coefficients[i] S_i to the parameters' `.grad`. `coefficients`: [B]."""
        with torch.autocast(coefficients.device.type, enabled=False):
            for parameter, products in self._products.items():
                weights = coefficients.to(products[0].columns.dtype)
                total = products[0].columns.new_zeros(parameter.shape)
                for product in products:
                    product.weighted_sum(weights, total)
                _add_gradient(parameter, total)
            for parameter, vector in self._vectors.items():
                _add_gradient(parameter, (coefficients.to(vector.dtype) @ vector).view(parameter.shape))

    def add_product(self, parameter: nn.Parameter, rows: Tensor, columns: Tensor) -> None:
        """Keep one use of a matrix."""
        if parameter.requires_grad:
            self._products.setdefault(parameter, []).append(Product(rows, columns))

    def add_vector(self, parameter: nn.Parameter, gradients: Tensor) -> None:
        """Keep one use of a vector: the trajectories' gradients [B, n]."""
        if parameter.requires_grad:
            self._vectors[parameter] = self._vectors[parameter] + gradients if parameter in self._vectors else gradients


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


_Recorder = Callable[[BatchedScores, Any, Tensor, Tensor, Tensor], None]


def _recorder_of(module: Any) -> _Recorder | None:
    """How to keep a layer's records; None for an unknown kind. Subclasses may compute anything, hence exact types."""
    if type(module) is nn.Linear:
        return _record_linear
    if type(module) is nn.Embedding:
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return _record_embedding if plain else None
    is_rms_norm = type(module).__name__.endswith("RMSNorm") and [name for name, _ in module.named_parameters()] == ["weight"]
    is_norm = type(module) is nn.LayerNorm or is_rms_norm
    return _record_norm if is_norm and module.weight.dim() == 1 else None


def _record_linear(scores: BatchedScores, module: Any, inputs: Tensor, output: Tensor, gradient: Tensor) -> None:
    scores.add_product(module.weight, gradient.flatten(1, -2), inputs.to(gradient.dtype).flatten(1, -2))
    if module.bias is not None:
        scores.add_vector(module.bias, over_tokens(gradient))


def _record_embedding(scores: BatchedScores, module: Any, ids: Tensor, output: Tensor, gradient: Tensor) -> None:
    if module.padding_idx is not None:  # that row is never trained
        gradient = gradient.masked_fill((ids == module.padding_idx)[..., None], 0.0)
    scores.add_product(module.weight, ids.flatten(1), gradient.flatten(1, -2))


def _record_norm(scores: BatchedScores, module: Any, inputs: Tensor, output: Tensor, gradient: Tensor) -> None:
    scores.add_vector(module.weight, norm_weight_gradients(module, inputs, output, gradient))
    if getattr(module, "bias", None) is not None:
        scores.add_vector(module.bias, over_tokens(gradient))
