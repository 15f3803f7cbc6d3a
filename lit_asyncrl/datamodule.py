"""RolloutDataModule: owns tasks, prompt source, rewards and trajectory pool; its training dataloader yields `TrainBatch`.

A training batch is taken from the pool only when the loop asks for it (no prefetch: the loader has a length, so Lightning does
not fetch ahead), with PACE's re-scoring done by the policy that is about to be trained.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import LightningDataModule
from torch import Tensor

from lit_asyncrl.checkpoint_io import install_atomic_io
from lit_asyncrl.checks import check_data, check_prompts, checked_ids, collect_tasks
from lit_asyncrl.errors import CheckpointError, ConfigurationError, WaitTimeoutError
from lit_asyncrl.evaluation import EvaluationBatch, EvaluationSet
from lit_asyncrl.generation.groups import pack_completions, sample_record, unpack_completions
from lit_asyncrl.generation.rollout import RolloutConfig, RolloutWorker, Truncated, ZeroVariance
from lit_asyncrl.interfaces import Task
from lit_asyncrl.loaders import EvaluationLoader, PromptsExhausted, TrainLoader, score_groups
from lit_asyncrl.pool.collate import collate, in_training_order
from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.pool.records import TakenGroup
from lit_asyncrl.pool.sampler import StalenessSampler
from lit_asyncrl.seeds import derive_seed
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.tasks.digits import ReverseDigits
from lit_asyncrl.tasks.prompt_source import DEFAULT_MAX_TRIES, PromptSource, Refill
from lit_asyncrl.tasks.runner import RewardRunner
from lit_asyncrl.types import Completion, Prompt, SamplingParams, TrainBatch, TrajectoryGroup
from lit_asyncrl.waits import Countdown

if TYPE_CHECKING:
    from lit_asyncrl.module import PolicyModule

TAKE_SLICE_S = 1.0
"""How often, in seconds, a wait for a batch looks whether the prompts have ended."""


class RolloutDataModule(LightningDataModule):
    """Prompts, rewards, pool and evaluation sets of a run.

    Args:
        task: prompts with rewards (default: `ReverseDigits`); `TaskMixture` mixes several.
        batch_groups: groups (prompts) per optimizer update.
        group_size: responses per prompt.
        sampling: temperature and response budget of training; top-p, top-k and min-p are refused here.
        sampler: which waiting groups are trained, and which rejected (default: `PaceSampler`).
        max_policy_age: hard bound on a group's policy age in optimizer updates when it is taken; 0: synchronous;
            None: no bound (the pool's capacity and the sampler limit staleness).
        age_measure: age of a group: mean over its trained tokens, or of its oldest one.
        capacity_groups: bound on groups in flight, waiting and in training when `max_policy_age` is None.
        max_tokens_per_micro_batch: padded tokens (trajectories x length) per forward and backward; None: whole batch at once.
        truncated: responses that ran out of budget are trained, only kept in the baseline (`mask`), or leave the group (`drop`).
        zero_variance: groups whose rewards are all equal are trained or dropped.
        refill: what takes the place of a group that was dropped or failed: the next prompt, or the same one with other seeds.
        max_tries: how often a prompt is sent in an epoch at most, with the refill `same_prompt`.
        updates_per_epoch: optimizer updates per Lightning epoch.
        evaluation: held-out sets by name (default: one, greedy); the first one's accuracy goes to the progress bar.
        reward_timeout_s: seconds for scoring one group.
        on_reward_error: a reward that raises, hangs or is not finite ends the run, or fails its group, which is counted.
        data_timeout_s: seconds that the trainer waits for a batch before the run ends with an error.
        max_prompt_epochs: passes through the training split; None: without end.
        save_rollouts: folder for sampled trajectories as JSONL, one group of each update, for reading; None: not saved.
        seed: of prompts and sampling; None: `seed_everything`'s.

    Attributes:
        batch_ids: group ids of the last batch, in the order of its micro-batches.
        while_waiting: called now and then while the trainer waits for a batch, in its thread.
        is_epoch_broken_off: whether a stop request or the end of the prompts ended the epoch before its last batch.
    """

    def __init__(
        self,
        task: Task | None = None,
        batch_groups: int = 16,
        group_size: int = 8,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        sampler: StalenessSampler | None = None,
        max_policy_age: int | None = 4,
        age_measure: Literal["mean", "oldest"] = "mean",
        capacity_groups: int | None = None,
        max_tokens_per_micro_batch: int | None = 16384,
        truncated: Truncated = "train",
        zero_variance: ZeroVariance = "keep",
        refill: Refill = "new_prompt",
        max_tries: int = DEFAULT_MAX_TRIES,
        updates_per_epoch: int = 100,
        evaluation: dict[str, EvaluationSet] | None = None,
        reward_timeout_s: float = 10.0,
        on_reward_error: Literal["raise", "skip"] = "raise",
        data_timeout_s: float = 600.0,
        max_prompt_epochs: int | None = None,
        save_rollouts: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.task = task or ReverseDigits()
        self.batch_groups = batch_groups
        self.group_size = group_size
        self.sampling = sampling
        self.sampler = sampler or PaceSampler()
        self.max_policy_age = max_policy_age
        self.age_measure = age_measure
        self.capacity_groups = capacity_groups
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.updates_per_epoch = updates_per_epoch
        self.evaluation = evaluation or {"heldout": EvaluationSet()}
        self.data_timeout_s = data_timeout_s
        self.max_prompt_epochs = max_prompt_epochs
        self.refill: Refill = refill
        self.max_tries = max_tries
        self.save_rollouts = save_rollouts
        self.seed = seed
        self.rollout_config = RolloutConfig(group_size, sampling, truncated, zero_variance, max(batch_groups, 64))
        self.supervisor = Supervisor()
        self._make_scorer = partial(RewardRunner, timeout_s=reward_timeout_s, on_error=on_reward_error)
        self.scorer = self._make_scorer()
        self._worker: RolloutWorker | None = None
        self._carried: dict[int, list[Completion]] = {}
        self.batch_ids: list[int] = []
        self.while_waiting: Callable[[], object] = lambda: None
        self.is_epoch_broken_off = False
        self._fresh_sampler = copy.deepcopy(self.sampler.state_dict())
        self._prepared_for: PolicyModule | None = None
        self._snapshot: tuple[int, dict[str, Any]] | None = None
        check_data(self)

    # ---------------------------------------------------------------- set-up

    @property
    def worker(self) -> RolloutWorker | None:
        """The rollout worker of the run; it goes on with the responses that a checkpoint carried."""
        return self._worker

    @worker.setter
    def worker(self, worker: RolloutWorker | None) -> None:
        self._worker = worker
        if worker is not None:
            worker.carry(self._carried)

    @property
    def _module(self) -> PolicyModule:
        assert self.trainer is not None
        module: Any = self.trainer.lightning_module
        return module

    def prepare(self, module: PolicyModule, publish_lag: int) -> None:
        """Read the tasks, load the policy, and check prompts and pool: all that can refuse a run. Starts and writes nothing.

        Raises:
            ConfigurationError, DataError: what is wrong, and the remedy.
        """
        self._make_pool(publish_lag, module.updates_per_batch)
        if self._prepared_for is not module:
            held_out = (heldout.task for heldout in self.evaluation.values() if heldout.task is not None)
            self.tasks: Mapping[str, Task] = collect_tasks((self.task, *held_out))
            module.configure_model()
            check_prompts(self, self.tasks, module.tokenizer, module.context_length())
            self._prepared_for = module

    def setup(self, stage: str) -> None:
        """Make prompt source and pool anew for this run, and whatever `prepare` does if it was not called before."""
        self.supervisor = Supervisor()
        self.scorer = self._make_scorer(supervisor=self.supervisor)
        self.worker = None
        self._snapshot = None
        self._carried = {}
        self.sampler.load_state_dict(copy.deepcopy(self._fresh_sampler))  # of an earlier run with these objects
        assert self.trainer is not None
        install_atomic_io(self.trainer)
        module = self._module
        if stage == "fit":
            check_files(self.trainer)
        publish_lag = lag_of(self.trainer)
        self.prepare(module, publish_lag)
        for task in self.tasks.values():
            task.start()
        if self.save_rollouts is not None:
            Path(self.save_rollouts).mkdir(parents=True, exist_ok=True)
        self.run_seed = self.seed if self.seed is not None else _global_seed()
        self.prompts = PromptSource(
            self.task,
            module.tokenizer,
            seed=self.run_seed,
            max_new_tokens=self.sampling.max_new_tokens,
            context=module.context_length(),
            max_epochs=self.max_prompt_epochs,
            refill=self.refill,
            max_tries=self.max_tries,
        )
        self.pool = self._make_pool(publish_lag, module.updates_per_batch)
        if self.refill == "same_prompt":
            self.pool.ledger.on_settled(self._settled)

    def _settled(self, group_id: int, state: str) -> None:
        """A group has reached its end; one that was not trained may have its prompt sent again."""
        pending = partial(self.pool.ledger.move, state="pending")
        self.prompts.settle(group_id, trained=state == "trained", on_retry=pending)

    def admission(self) -> dict[str, Any]:
        """What `admission_limit` has to know beside batch, age and capacity."""
        return {
            "target_occupancy": self.sampler.target_occupancy,
            "measures_mean": self.age_measure == "mean",
            "splits_groups": self.sampler.splits_groups,
        }

    def _make_pool(self, publish_lag: int, updates_per_batch: int) -> TrajectoryPool:
        return TrajectoryPool(
            batch_groups=self.batch_groups,
            sampler=self.sampler,
            max_policy_age=self.max_policy_age,
            age_measure=self.age_measure,
            capacity_groups=self.capacity_groups,
            publish_lag=publish_lag,
            updates_per_batch=updates_per_batch,
            supervisor=self.supervisor,
        )

    def evaluation_batches(self, *, final: bool) -> list[EvaluationBatch]:
        """Every held-out set as one batch; the same prompts and seeds at every evaluation of a run."""
        tokenizer, context = self._module.tokenizer, self._module.context_length()
        batches = []
        for name, heldout in self.evaluation.items():
            task = heldout.task or self.task
            sampling = heldout.sampling(self.sampling.max_new_tokens)
            number = min(heldout.final_num_prompts if final else heldout.num_prompts, task.num_heldout)
            prompts = []
            for index in range(number):
                example = task.heldout_example(index)
                ids = checked_ids(example, self.tasks, tokenizer, sampling.max_new_tokens, context)
                prompts.append(Prompt(index, example, index, ids, 0, 0, derive_seed("evaluation", self.run_seed, name, index)))
            batches.append(EvaluationBatch(name, tuple(prompts), heldout.num_samples, sampling))
        return batches

    # ---------------------------------------------------------------- loaders

    def train_dataloader(self) -> TrainLoader:
        """Batches for `updates_per_epoch` updates."""
        return TrainLoader(self)

    def val_dataloader(self) -> list[EvaluationLoader]:
        """One loader per held-out set, each with the whole set as its only batch."""
        during_fit = self.trainer is not None and self.trainer.state.fn == "fit"
        return [EvaluationLoader(batch) for batch in self.evaluation_batches(final=not during_fit)]

    def test_dataloader(self) -> list[EvaluationLoader]:
        """As `val_dataloader`, with the final number of prompts."""
        return [EvaluationLoader(batch) for batch in self.evaluation_batches(final=True)]

    def predict_dataloader(self) -> list[EvaluationLoader]:
        """As `test_dataloader`."""
        return self.test_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Training batches move to the device; evaluation batches hold no tensors."""
        return batch if isinstance(batch, EvaluationBatch) else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def take_batch(self) -> TrainBatch:
        """Wait for a batch of groups, re-scored where the sampler asks for it, and pad it."""
        module = self._module
        self._snapshot = None  # as large as the pool
        if self.pool.untrained:  # a subclass of the module left a batch out: its `on_train_batch_start` returned -1
            self.pool.settle_skipped()
        with module.times.measure("data_wait"):
            taken = self._take(module.policy_version)
        self.batch_ids = [item.group.group_id for item in in_training_order(taken)]
        with module.times.measure("collate"):
            batch = collate(
                taken,
                max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
                temperature=self.sampling.temperature,
                policy_version=module.policy_version,
            )
            self._attach_samples(batch, taken)
        return batch

    def _take(self, policy_version: int) -> list[TakenGroup]:
        """`pool.take` in slices, between which the end of the prompts is noticed.

        Raises:
            PromptsExhausted: no further batch can come.
            ConfigurationError: nothing generates.
        """
        if self.worker is None:
            raise ConfigurationError(
                "trainer.callbacks must hold AsyncRollout to train, got none. Add lit_asyncrl.callbacks.AsyncRollout."
            )
        countdown = Countdown(self.data_timeout_s, TAKE_SLICE_S)
        while True:
            ended = self.worker.exhausted
            self.while_waiting()
            try:
                return self.pool.take(policy_version, self.score_groups, min(TAKE_SLICE_S, self.data_timeout_s))
            except WaitTimeoutError as error:
                # Seen before the last look into the pool: what was in flight then is in there, or is sent again.
                if ended and self.worker.exhausted:
                    raise PromptsExhausted from error
                if not countdown.left_s:
                    raise WaitTimeoutError(
                        f"data.data_timeout_s must cover the longest wait for a batch, got {self.data_timeout_s} s without one. "
                        f"{self._starved()}Waited for {str(error).partition(' for ')[2]}"
                    ) from error

    def _starved(self) -> str:
        """Why no group reached the pool, where groups were generated and left."""
        lost = [
            f"{row.prompts} {row.state} ({row.reason})" for row in self.pool.ledger.rows() if row.state in ("dropped", "failed")
        ]
        return f"Groups that left untrained so far: {', '.join(lost)}. " if lost else ""

    def score_groups(self, groups: Sequence[TrajectoryGroup]) -> list[Tensor]:
        """PACE's `PrefixScorer`: log-probs of whole groups under the current policy."""
        with self._module.times.measure("rescore"):
            return score_groups(self._module, groups, self.max_tokens_per_micro_batch, self.sampling.temperature)

    def _attach_samples(self, batch: TrainBatch, taken: Sequence[TakenGroup]) -> None:
        group = taken[0].group
        batch.samples = [sample_record(group, self.decode, i) for i in range(min(4, group.group_size))]
        if self.save_rollouts is not None:
            records = [sample_record(group, self.decode, i) for i in range(group.group_size)]
            with (Path(self.save_rollouts) / "rollouts.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"policy_version": self._module.policy_version, **r}) + "\n" for r in records)

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids -> text, special tokens removed."""
        return self._module.tokenizer.decode(list(ids), skip_special_tokens=True)

    # ---------------------------------------------------------------- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Pool, prompt position, and groups in flight with what is sampled of them: one snapshot of one instant."""
        if not hasattr(self, "pool"):
            return {}
        version = self._module.policy_version
        if self._snapshot is None or self._snapshot[0] != version:
            self._snapshot = (version, self._take_snapshot())
        return self._snapshot[1]

    def _take_snapshot(self) -> dict[str, Any]:
        worker, groups, carried, unfinished = self.worker, [], dict(self._carried), 0
        with nullcontext() if worker is None else worker.frozen():
            if worker is not None:
                groups, carried = worker.open_groups(), worker.carried
                unfinished = worker.unfinished_tokens  # after what it counts: tokens are reported meanwhile
            carried |= {group.prompt.group_id: group.members for group in groups}
            tokens = {group_id: sum(len(c.token_ids) for c in members) for group_id, members in carried.items()}
            return {
                "tasks": sorted(self.tasks),
                "pool": self.pool.state_dict(unfinished, tokens),
                "prompts": self.prompts.state_dict([group.prompt for group in groups]),
                "members": pack_completions(c for members in carried.values() for c in members),
                "sampling": self._sampled_with(),
                "temperature": self.sampling.temperature,
            }

    def _sampled_with(self) -> dict[str, Any]:
        """Settings that members of a group must have in common."""
        return {"group_size": self.group_size, "sampling.max_new_tokens": self.sampling.max_new_tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue pool and prompts where the snapshot was taken; groups in flight then are sent again and go on.

        Raises:
            CheckpointError: the checkpoint's prompts are of other tasks, or its groups of another temperature.
        """
        assert self.trainer is not None
        if not state_dict or self.trainer.state.fn != "fit":  # an evaluation needs no pool, whatever its settings
            return
        if state_dict["tasks"] != sorted(self.tasks):
            raise CheckpointError(
                f"data.task must be that of the checkpoint, got {sorted(self.tasks)} instead of {state_dict['tasks']} (its "
                "prompts and groups go on). To train the policy on another task, export it and start anew."
            )
        if state_dict["temperature"] != self.sampling.temperature:
            raise CheckpointError(
                f"data.sampling.temperature must be that of the checkpoint, {state_dict['temperature']:g}, got "
                f"{self.sampling.temperature:g} (the log-probs of its waiting groups are of that distribution). To train the "
                "policy at another temperature, export it and start anew."
            )
        self.prompts.load_state_dict(state_dict["prompts"])  # before the pool, which may drop a group and have it sent again
        self.pool.load_state_dict(state_dict["pool"])
        members = unpack_completions(state_dict["members"])
        changed = [key for key, value in self._sampled_with().items() if value != state_dict["sampling"][key]]
        if changed and members:
            warnings.warn(
                f"data.{changed[0]} is {self._sampled_with()[changed[0]]}, and was {state_dict['sampling'][changed[0]]} in the "
                f"checkpoint: {len(members)} responses of groups that were not complete are sampled again.",
                stacklevel=2,
            )
            self.pool.ledger.interrupt()
            members = []
        self._carried = {}
        for member in members:
            self._carried.setdefault(member.request_id // self.group_size, []).append(member)

    def on_exception(self, exception: BaseException) -> None:
        """Release the tasks' resources: Lightning calls no teardown after an exception."""
        self.teardown("exception")

    def teardown(self, stage: str) -> None:
        """Release the tasks' resources."""
        self.scorer.close()
        for task in getattr(self, "tasks", {}).values():
            try:
                task.close()
            except Exception as error:  # noqa: BLE001 - a user's code; the run's result must not be lost to it
                warnings.warn(f"Task {task.name!r} could not be closed: {error!r}.", stacklevel=2)


def lag_of(trainer: Any) -> int:
    """The lag that the AsyncRollout callback forces, in updates; the datamodule is set up before any callback is."""
    return max((getattr(callback, "publish_lag", 0) for callback in getattr(trainer, "callbacks", ())), default=0)


def check_files(trainer: Any) -> None:
    """Let callbacks refuse files that they are to read or write: before the policy, which may be large, is loaded."""
    for callback in getattr(trainer, "callbacks", ()):
        getattr(callback, "check_files", lambda: None)()


def _global_seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
