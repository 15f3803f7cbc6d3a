"""The objectives: each one is a rule for the weights omega of the one policy-gradient estimator.

    gradient = sum_i sum_t c_i * omega_it * A_i * grad log pi(y_it)

Objectives say omega, `Advantage` says A, `token_scales` says c. omega is detached: for a surrogate loss (PPO) it is the
derivative of the surrogate with respect to log pi, divided by A; for REINFORCE-style losses it is the importance weight.

By family: `weight_losses` (truncated and masked weights), `clip_losses` (surrogates), `group_losses` (bounded trajectory ratios).
An objective may say more about itself than `Objective` asks for:

    ratio               what its weight is a function of, for the share of clipped tokens (`RatioKind`)
    uses_advantages     its weights depend on the advantages, which `per_trajectory` score norms know too late
    needs_whole_groups  its weights couple the members of a group
"""

from __future__ import annotations

from lit_asyncrl.algorithm.aggregation import Aggregation, check_aggregation, token_scales
from lit_asyncrl.algorithm.clip_losses import GSPO, M2PO, SAPO, BatchObjective, DecoupledPPO, PPOClip, ProximalObjective
from lit_asyncrl.algorithm.group_losses import GMCGRPO, TICGRPO
from lit_asyncrl.algorithm.weight_losses import CISPO, IcePop, Reinforce, SequenceMask, SequenceTIS, TokenMIS, TokenTIS

__all__ = [
    "CISPO",
    "GMCGRPO",
    "GSPO",
    "M2PO",
    "SAPO",
    "TICGRPO",
    "Aggregation",
    "BatchObjective",
    "DecoupledPPO",
    "IcePop",
    "PPOClip",
    "ProximalObjective",
    "Reinforce",
    "SequenceMask",
    "SequenceTIS",
    "TokenMIS",
    "TokenTIS",
    "check_aggregation",
    "token_scales",
]
