"""The methods and tasks of the study as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Control = Literal["observe", "calibrated", "fixed"]


@dataclass(frozen=True)
class TaskSetting:
    """A task and what goes with it.

    Attributes:
        title: in tables.
        name: class of the task.
        digits: shortest and longest string.
        max_new_tokens: budget of a response.
    """

    title: str
    name: str
    digits: tuple[int, int]
    max_new_tokens: int


TASKS = {
    "reverse10": TaskSetting("reverse 10 digits", "ReverseDigits", (10, 10), 12),
    "reverse4to16": TaskSetting("reverse 4 to 16 digits", "ReverseDigits", (4, 16), 20),
    "sort10": TaskSetting("sort 10 digits", "SortDigits", (10, 10), 12),
}


@dataclass(frozen=True)
class Arm:
    """A method: what it changes in the experiment file.

    Attributes:
        title: in tables.
        objective, advantage: classes.
        settings: further overrides, as on the command line, without the dashes.
        ess_lr: with VCPO's step size.
        control: gradient alignment control observes, acts by thresholds from a synchronous run, or by fixed ones.
        has_epsilon: whether the cell gives the objective's `epsilon`.
        updates_per_batch: updates of one batch; the batch grows with it, so that each is of 128 responses.
        sampler: how groups are taken from the pool.
    """

    title: str
    objective: str
    advantage: str = "GroupMean"
    settings: tuple[str, ...] = ()
    ess_lr: bool = False
    control: Control = "observe"
    has_epsilon: bool = False
    updates_per_batch: int = 1
    sampler: str = "FifoSampler"


PROXY, EXACT = ("model.advantage.score_norm=logit_proxy",), ("model.advantage.score_norm=batched",)
RELEASED, BY_LENGTH = ("model.advantage.weighting=released",), ("model.advantage.normalize_by_length=true",)

ARMS = {
    "sync": Arm("synchronous", "Reinforce"),
    "sync_opob": Arm("synchronous, OPOB (logit proxy)", "Reinforce", "OPOB", PROXY),
    "none": Arm("no correction", "Reinforce"),
    "ppo": Arm("PPO clip 0.2 (GRPO)", "PPOClip"),
    "token_tis": Arm("token TIS, cap 2", "TokenTIS"),
    "tis": Arm("sequence TIS, cap 8", "SequenceTIS"),
    "ess": Arm("sequence TIS + ESS step size", "SequenceTIS", ess_lr=True),
    "opob_proxy": Arm("sequence TIS + OPOB (logit proxy)", "SequenceTIS", "OPOB", PROXY),
    "vcpo_proxy": Arm("VCPO, OPOB by logit proxy", "SequenceTIS", "OPOB", PROXY, ess_lr=True),
    "vcpo_exact": Arm("VCPO, exact OPOB", "SequenceTIS", "OPOB", EXACT, ess_lr=True),
    "gspo": Arm("GSPO, paper's interval", "GSPO"),
    "gspo_wide": Arm(
        "GSPO, interval 0.2", "GSPO", settings=("model.objective.epsilon_low=0.2", "model.objective.epsilon_high=0.2")
    ),
    "cispo": Arm("CISPO", "CISPO", settings=("model.aggregation=token-mean",)),
    "m2po": Arm("M2PO", "M2PO"),
    "decoupled": Arm("decoupled PPO, 2 updates a batch", "DecoupledPPO", updates_per_batch=2),
    "icepop": Arm("IcePop", "IcePop"),
    "tic": Arm("TIC-GRPO", "TICGRPO", has_epsilon=True),
    "gmc": Arm("GMC-GRPO", "GMCGRPO", has_epsilon=True),
    "tic_ess": Arm("TIC-GRPO + ESS step size", "TICGRPO", ess_lr=True, has_epsilon=True),
    "gmc_ess": Arm("GMC-GRPO + ESS step size", "GMCGRPO", ess_lr=True, has_epsilon=True),
    "gmc_ess_opob": Arm("GMC-GRPO + ESS + OPOB (logit proxy)", "GMCGRPO", "OPOB", PROXY, ess_lr=True, has_epsilon=True),
    "gac": Arm("GAC alone, calibrated", "Reinforce", control="calibrated"),
    "gac_fixed": Arm("GAC alone, fixed", "Reinforce", control="fixed"),
    "ppo_gac": Arm("PPO clip + GAC, calibrated", "PPOClip", control="calibrated"),
    "ppo_gac_fixed": Arm("PPO clip + GAC, fixed", "PPOClip", control="fixed"),
    "tis_gac": Arm("sequence TIS + GAC, calibrated", "SequenceTIS", control="calibrated"),
    "tis_gac_fixed": Arm("sequence TIS + GAC, fixed", "SequenceTIS", control="fixed"),
    "vcpo_gac": Arm("VCPO (proxy) + GAC, calibrated", "SequenceTIS", "OPOB", PROXY, ess_lr=True, control="calibrated"),
    "vcpo_gac_fixed": Arm("VCPO (proxy) + GAC, fixed", "SequenceTIS", "OPOB", PROXY, ess_lr=True, control="fixed"),
    "vcpo_proxy_released": Arm("VCPO, proxy, released weights", "SequenceTIS", "OPOB", PROXY + RELEASED, ess_lr=True),
    "vcpo_exact_released": Arm("VCPO, exact, released weights", "SequenceTIS", "OPOB", EXACT + RELEASED, ess_lr=True),
    "vcpo_proxy_length": Arm("VCPO, proxy, norms over length", "SequenceTIS", "OPOB", PROXY + BY_LENGTH, ess_lr=True),
    "vcpo_exact_length": Arm("VCPO, exact, norms over length", "SequenceTIS", "OPOB", EXACT + BY_LENGTH, ess_lr=True),
    "fifo": Arm("PPO clip, first in first out", "PPOClip"),
    "max_age": Arm("PPO clip, oldest token rejected", "PPOClip", sampler="MaxAgeSampler"),
    "total": Arm("PPO clip, oldest mean rejected", "PPOClip", sampler="TotalStalenessSampler"),
    "pace": Arm("PPO clip, PACE", "PPOClip", sampler="PaceSampler"),
    "vcpo_fifo": Arm("VCPO (proxy), first in first out", "SequenceTIS", "OPOB", PROXY, ess_lr=True),
    "vcpo_pace": Arm("VCPO (proxy), PACE", "SequenceTIS", "OPOB", PROXY, ess_lr=True, sampler="PaceSampler"),
}

SYNCHRONOUS = ("sync", "sync_opob")
"""Arms without any lag. The second tells what the baseline of VCPO does by itself."""
MAIN = ("sync", "sync_opob", "none", "ppo", "tis", "vcpo_proxy", "vcpo_exact", "gmc_ess_opob")
"""Arms of `--quick`, of the other tasks, and of the first figure."""
HEADLINE = (
    *SYNCHRONOUS,
    *("none", "ppo", "token_tis", "tis", "ess", "opob_proxy", "vcpo_proxy", "vcpo_exact", "gspo", "gspo_wide", "cispo", "m2po"),
    *("decoupled", "icepop", "tic", "gmc", "gmc_ess_opob"),
)
RATE_ARMS = (*SYNCHRONOUS, "none", "ppo", "token_tis", "tis", "ess", "opob_proxy", "vcpo_proxy")
OPOB_ARMS = (
    *("vcpo_proxy", "vcpo_exact", "vcpo_proxy_released", "vcpo_exact_released"),
    *("vcpo_proxy_length", "vcpo_exact_length"),
)
GAC_ARMS = ("gac", "gac_fixed", "ppo_gac", "ppo_gac_fixed", "tis_gac", "tis_gac_fixed", "vcpo_gac", "vcpo_gac_fixed")
POOL_ARMS = ("sync", "fifo", "max_age", "total", "pace", "vcpo_fifo", "vcpo_pace")
