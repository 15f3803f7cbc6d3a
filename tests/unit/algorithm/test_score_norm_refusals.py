"""Models whose exact score norms cannot be formed are refused by name, with the remedy."""

import pytest
import torch
from algorithm_cases import make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lit_asyncrl.algorithm.score_norms import check_supported
from lit_asyncrl.errors import ConfigurationError


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


class Gain(nn.Module):
    """One vector by the name that norm layers give theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class ShiftedRMSNorm(Gain):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))


class GatedRMSNorm(Gain):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)


@pytest.mark.parametrize(
    "layer", [Gain(), ShiftedRMSNorm(), GatedRMSNorm(), nn.LayerNorm((2, 2))], ids=lambda m: type(m).__name__
)
def test_what_looks_like_a_norm_layer_and_has_other_parameters_is_refused(layer: nn.Module) -> None:
    check_supported(nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4)))
    with pytest.raises(ConfigurationError, match=rf"'0' of type {type(layer).__name__}"):
        check_supported(nn.Sequential(layer))


def test_gradient_checkpointing_is_refused() -> None:
    model = make_model("tied qwen3", torch.float64)
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigurationError, match=r"gradient checkpointing.*per_trajectory"):
        check_supported(model)


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.compile.*per_trajectory"):
        check_supported(torch.compile(make_model("tied qwen3", torch.float64)))  # compiles nothing before its first call


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_part_is_refused(in_place: bool) -> None:
    model = make_model("tied qwen3", torch.float64)
    if in_place:
        model.model.layers[1].compile()
    else:
        model.model.layers[1] = torch.compile(model.model.layers[1])
    with pytest.raises(ConfigurationError, match=r"torch\.compile.*per_trajectory"):
        check_supported(model)


def test_sharded_parameters_are_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = make_model("tied qwen3", torch.float64)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigurationError, match=r"sharded parameters.*per_trajectory.*logit_proxy"):
            check_supported(model)
    finally:
        torch.distributed.destroy_process_group()


class FullyShardedDataParallel(nn.Module):
    """What PyTorch's first kind of sharding is called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_sharding_wrapper_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sharded parameters"):
        check_supported(FullyShardedDataParallel(make_model("tied qwen3", torch.float64)))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_embedding_with_a_gradient_of_its_own_kind_is_refused(option) -> None:  # type: ignore[no-untyped-def]
    model = make_model("untied llama", torch.float64)
    model.model.embed_tokens = nn.Embedding(19, 16, **option)
    with pytest.raises(ConfigurationError, match=r"'model\.embed_tokens' of type Embedding"):
        check_supported(model)
