"""PolicyModule: one training step is one update, or a logged skip; clip, version and float32 weights."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from policies import save_policy
from runs import inline_rollout, make_data, make_module, make_trainer
from torch import nn

from lit_asyncrl.algorithm.advantages import GroupMean
from lit_asyncrl.algorithm.statistics import pool_stats
from lit_asyncrl.checkpoints import export_policy, read_checkpoint
from lit_asyncrl.errors import AsyncRLError, CheckpointError, ConfigurationError
from lit_asyncrl.evaluation import EvaluationBatch
from lit_asyncrl.module import MAX_CONSECUTIVE_SKIPS, PolicyModule
from lit_asyncrl.types import SamplingParams


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class Watch(pl.Callback):
    """Notes versions, gradient norms before and after the clip, and the weights' sum after each step."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.norms: list[float] = []
        self.sums: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append(_norm(pl_module))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.versions.append(pl_module.policy_version)
        self.sums.append(_fingerprint(pl_module))


class Harm(pl.Callback):
    """Changes the first `number` batches before they are trained."""

    def __init__(self, change, number: int = 2) -> None:
        self.change = change
        self.number = number

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx < self.number:
            for micro_batch in batch.micro_batches:
                self.change(micro_batch)


class NormSGD(torch.optim.SGD):
    """Notes the gradient norm that each step sees, and changes nothing."""

    def __init__(self, params, seen: list[float]) -> None:
        super().__init__(params, lr=0.0)
        self.seen = seen

    def step(self, closure=None):
        closure()  # where Lightning calls the hooks
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.seen.append(float(torch.nn.utils.get_total_norm(gradients)))


def _norm(module: nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))


def _fingerprint(module: nn.Module) -> float:
    return float(sum(p.detach().double().abs().sum() for p in module.parameters()))


def _fit(policy, tmp_path, *callbacks, max_steps=2, data=None, **arguments) -> PolicyModule:
    module = make_module(policy, **arguments)
    make_trainer(tmp_path, [inline_rollout(), *callbacks], max_steps=max_steps).fit(module, data or make_data())
    return module


def test_each_training_step_is_one_update(policy, tmp_path):
    watch = Watch()
    module = _fit(policy, tmp_path, watch)
    assert watch.versions == [1, 2]
    assert module.policy_version == 2
    assert watch.sums[0] != watch.sums[1]


def test_weights_are_float32_whatever_the_folder_holds(tmp_path):
    path = save_policy(tmp_path / "bf16", torch_dtype="bfloat16")
    module = make_module(path)
    module.configure_model()
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_callbacks_see_the_unclipped_gradient_and_the_optimizer_the_clipped_one(policy, tmp_path):
    optimizer_saw: list[float] = []
    watch = Watch()
    module = _fit(policy, tmp_path, watch, max_grad_norm=1e-3, optimizer=lambda params: NormSGD(params, optimizer_saw))
    assert min(watch.norms) > 0.01
    assert optimizer_saw == pytest.approx([1e-3, 1e-3], rel=1e-3)
    assert module.step.grad_norm == pytest.approx(watch.norms[-1])


def test_without_a_clip_the_gradient_stays(policy, tmp_path):
    optimizer_saw: list[float] = []
    watch = Watch()
    _fit(policy, tmp_path, watch, max_grad_norm=None, optimizer=lambda params: NormSGD(params, optimizer_saw))
    assert optimizer_saw == pytest.approx(watch.norms)


def _mask_everything(micro_batch) -> None:
    micro_batch.loss_mask.zero_()


def _nan_reward(micro_batch) -> None:
    micro_batch.rewards.fill_(float("nan"))


@pytest.mark.parametrize("harm", [_mask_everything, _nan_reward])
def test_an_update_that_cannot_be_made_is_skipped_and_changes_nothing(policy, tmp_path, harm):
    watch = Watch()
    module = _fit(policy, tmp_path, Harm(harm), watch, max_steps=1)
    assert watch.versions == [0, 0, 1]
    assert module.num_skipped == 2
    assert watch.sums[0] == watch.sums[1]
    assert len(watch.norms) == 1  # the optimizer stepped once, after the skips


def test_skips_without_end_end_the_run(policy, tmp_path):
    with pytest.raises(AsyncRLError, match=f"{MAX_CONSECUTIVE_SKIPS + 1} updates in a row were skipped"):
        _fit(policy, tmp_path, Harm(_nan_reward, number=100))


def test_the_pool_gets_the_room_of_a_skipped_batch_back(policy, tmp_path):
    data = make_data()
    _fit(policy, tmp_path, Harm(_mask_everything, number=3), data=data)
    assert data.pool.ledger.count("dropped", "skipped_update") == 6  # 3 updates x 2 groups


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_clip_of_nothing_is_refused(value):
    with pytest.raises(ConfigurationError, match=r"model\.max_grad_norm"):
        PolicyModule(max_grad_norm=value)


def test_the_constructor_reads_no_file():
    PolicyModule(policy=type(PolicyModule().policy)(path="/no/such/model"))


def test_micro_batches_change_the_update_by_rounding_alone(policy, tmp_path):
    whole, split = (
        _fit(
            policy,
            tmp_path,
            max_steps=1,
            data=make_data(max_tokens_per_micro_batch=size),
            optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        )
        for size in (None, 16)  # 16 padded tokens hold one group
    )
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_on_policy_tokens_have_ratio_one(policy, tmp_path):
    module = _fit(policy, tmp_path, max_steps=1)
    assert float(module.step.log_weights.abs().max()) < 1e-4
    assert module.step.ess_ratio == pytest.approx(1.0, abs=1e-4)


def test_statistics_of_a_batch_without_tokens_are_empty():
    from lit_asyncrl.algorithm.scored import MicroBatchStats

    empty = torch.zeros(0)
    part = MicroBatchStats(empty.long(), empty, empty.long(), empty, None, None, 0.0, 0, 0, 0.0, 0.0, 0.0)
    stats = pool_stats([part], 0)
    assert (stats.ess, stats.ess_ratio, stats.metrics) == (0.0, 0.0, {})


def test_one_ess_is_formed_over_all_micro_batches():
    from lit_asyncrl.algorithm.scored import MicroBatchStats

    def part(*log_weights: float) -> MicroBatchStats:
        n = len(log_weights)
        zeros = torch.zeros(n)
        return MicroBatchStats(zeros.long(), torch.tensor(log_weights), zeros.long(), zeros, None, None, 0.0, n, 0, 0.0, 0.0, 0.0)

    two = float(torch.tensor(2.0).log())
    stats = pool_stats([part(0.0, 0.0), part(2 * two)], 0)
    # weights 1, 1, 4: (1 + 1 + 4)^2 / (1 + 1 + 16) = 36 / 18 = 2; the mean of the two parts' ratios would be 1
    assert stats.ess == pytest.approx(2.0)
    assert stats.ess_ratio == pytest.approx(2 / 3)


def test_evaluation_without_the_rollout_callback_is_refused():
    with pytest.raises(ConfigurationError, match="AsyncRollout"):
        PolicyModule().predict_step(EvaluationBatch("heldout", (), 1, SamplingParams()), 0)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_torn_or_missing_checkpoint_is_refused(content, tmp_path):
    file = tmp_path / "last.ckpt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match="ckpt_path must name a whole checkpoint"):
        read_checkpoint(str(file))


def test_a_foreign_checkpoint_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(CheckpointError, match="written by lit-asyncrl"):
        export_policy(str(tmp_path / "foreign.ckpt"), str(tmp_path / "out"))


def test_a_checkpoint_of_another_architecture_is_refused(policy, tmp_path):
    module = make_module(policy, advantage=GroupMean())
    module.configure_model()
    wider = save_policy(tmp_path / "wider", intermediate_size=40)
    content = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(content)
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="ckpt_path must fit the model"):
        export_policy(str(tmp_path / "last.ckpt"), str(tmp_path / "out"), policy_path=wider)


def test_a_checkpoint_of_another_architecture_or_version_is_not_resumed(policy, tmp_path):
    module = make_module(policy, advantage=GroupMean())
    module.configure_model()
    content = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(content)
    wider = make_module(save_policy(tmp_path / "wider", intermediate_size=40), advantage=GroupMean())
    wider.configure_model()
    with pytest.raises(CheckpointError, match=r"model\.policy\.path must hold a model like that of the checkpoint"):
        wider.on_load_checkpoint(content)
    content["lit_asyncrl"]["format"] -= 1
    with pytest.raises(CheckpointError, match=r"must name a checkpoint of format 2, .* got a file of format 1"):
        module.on_load_checkpoint(content)
