"""Methods, tiny real models and micro-batches for the algorithm's tests."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lit_asyncrl.algorithm.advantages import OPO, OPOB, GroupMean, LeaveOneOut
from lit_asyncrl.algorithm.estimator import PolicyGradient
from lit_asyncrl.algorithm.losses import (
    CISPO,
    GMCGRPO,
    GSPO,
    M2PO,
    SAPO,
    TICGRPO,
    DecoupledPPO,
    IcePop,
    PPOClip,
    Reinforce,
    SequenceMask,
    SequenceTIS,
    TokenMIS,
    TokenTIS,
)
from lit_asyncrl.algorithm.scored import MicroBatchStats
from lit_asyncrl.types import MicroBatch

METHODS = {
    "vcpo exact": (SequenceTIS(), OPOB("batched")),
    "vcpo one by one": (SequenceTIS(), OPOB("per_trajectory")),
    "vcpo proxy": (SequenceTIS(), OPOB("logit_proxy")),
    "vcpo released": (SequenceTIS(), OPOB("batched", "released", True, "none")),
    "vcpo batch exact": (SequenceTIS(), OPOB("batched", scope="batch")),
    "vcpo batch one by one": (SequenceTIS(), OPOB("per_trajectory", scope="batch")),
    "vcpo batch proxy": (SequenceTIS(), OPOB("logit_proxy", scope="batch")),
    "grpo": (PPOClip(), GroupMean("sample_std")),
    "dual clip": (PPOClip(0.2, 0.28, 3.0), GroupMean()),
    "gspo": (GSPO(0.5, 0.8), OPOB("batched")),
    "cispo": (CISPO(), OPO()),
    "sapo": (SAPO(), GroupMean()),
    "m2po": (M2PO(0.2), GroupMean()),
    "m2po batch proxy": (M2PO(0.2), OPOB("logit_proxy", scope="batch")),
    "decoupled": (DecoupledPPO(), GroupMean()),
    "token tis": (TokenTIS(), GroupMean("none")),
    "token mis": (TokenMIS(), GroupMean()),
    "icepop": (IcePop(), GroupMean()),
    "sequence mask": (SequenceMask(0.01, 100.0, "geometric_mean", "sequence_ratio"), OPOB("per_trajectory")),
    "opsm": (SequenceMask(0.8, None, "geometric_mean", "token_ratio", negative_only=True), GroupMean()),
    "rloo": (Reinforce(), LeaveOneOut()),
    "gmc": (GMCGRPO(), OPOB("batched")),
    "tic": (TICGRPO(), OPOB("per_trajectory")),
    "tic truncated": (TICGRPO(mode="truncate"), GroupMean()),
}
"""Objective and advantage by name."""

PATHS = ("vcpo exact", "vcpo one by one", "vcpo proxy", "vcpo batch one by one", "grpo", "m2po", "gmc")
"""One method for each way through the estimator."""


class DoubleRMSNorm(nn.Module):
    """RMS norm that does not round to float32, so that a float64 model is one throughout."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def make_model(kind: str, dtype: torch.dtype) -> nn.Module:
    sizes = {
        "vocab_size": 19,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    torch.manual_seed(1)
    if kind == "tied qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
    else:
        config = LlamaConfig(**sizes, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, pad_token_id=3)
        model = LlamaForCausalLM(config)
    model = model.to(dtype).eval()
    if dtype == torch.float64:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child).__name__ in ("Qwen3RMSNorm", "LlamaRMSNorm"):
                    setattr(module, name, DoubleRMSNorm(child.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def make_batch(
    num_groups: int = 3, group_size: int = 4, dtype: torch.dtype = torch.float64, temperature: float = 0.7, seed: int = 0
) -> MicroBatch:
    """Ragged trajectories; every third has an untrained, sampled segment inside its response."""
    generator = torch.Generator().manual_seed(seed)
    batch_size, width = num_groups * group_size, 14
    prompt = torch.randint(2, 5, (num_groups,), generator=generator).repeat_interleave(group_size)
    length = prompt + torch.randint(3, 9, (batch_size,), generator=generator)
    position = torch.arange(width)[None, :]
    real = position < length[:, None]
    sampled = real & (position >= prompt[:, None])
    trained = sampled & ~((position == prompt[:, None] + 1) & (torch.arange(batch_size) % 3 == 0)[:, None])
    ids = torch.randint(0, 19, (batch_size, width), generator=generator).masked_fill(~real, 0)
    behavior = -2.0 + 0.3 * torch.randn(batch_size, width, generator=generator, dtype=torch.float64)
    rewards = torch.randint(0, 3, (batch_size,), generator=generator).to(dtype)
    return MicroBatch(
        input_ids=ids,
        attention_mask=real,
        loss_mask=trained,
        behavior_logprobs=behavior.masked_fill(~sampled, 0.0).to(dtype),
        token_versions=torch.where(sampled, 5, -1).int(),
        rewards=rewards,
        group_index=torch.arange(num_groups).repeat_interleave(group_size),
        temperature=temperature,
    )


def gradient_of(model: nn.Module) -> Tensor:
    """All gradients as one vector (zeros where there is none)."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def run(
    method: PolicyGradient, model: nn.Module, batches: Sequence[MicroBatch], zero_grad: bool = True
) -> tuple[Tensor, list[MicroBatchStats]]:
    """Gradient and statistics of a batch made of these micro-batches."""
    if zero_grad:
        model.zero_grad()
    stats = method.gradient(model, batches, backward=lambda loss: loss.backward())
    return gradient_of(model), stats


def take(batch: MicroBatch, rows: Tensor) -> MicroBatch:
    names = ["input_ids", "attention_mask", "loss_mask", "behavior_logprobs", "token_versions", "rewards", "group_index"]
    return replace(batch, **{name: getattr(batch, name)[rows] for name in names})


def assert_same(first: Tensor, second: Tensor) -> None:
    assert float((first - second).norm() / second.norm()) < 1e-10
