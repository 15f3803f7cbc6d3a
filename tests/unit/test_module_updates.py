"""PolicyModule: several updates of one batch, skips that a callback asks for, the reference model, and contradictions."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from policies import save_policy
from runs import inline_rollout, make_data, make_module, make_trainer

from lit_asyncrl.algorithm.advantages import GroupMean
from lit_asyncrl.algorithm.losses import GMCGRPO, DecoupledPPO, PPOClip
from lit_asyncrl.algorithm.regularizers import ReferenceKL
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.module import PolicyModule


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class Watch(pl.Callback):
    """Notes what each update and each batch looks like."""

    def __init__(self) -> None:
        self.log_weights: list[float] = []
        self.batches: list[tuple[int, dict[str, float]]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.log_weights.append(float(pl_module.step.log_weights.abs().max()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append((pl_module.policy_version, dict(batch.stats)))


class Remove(pl.Callback):
    """Removes the gradient of the chosen updates, as a control that skips them does."""

    def __init__(self, updates: set[int]) -> None:
        self.updates = updates
        self.seen = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.seen in self.updates:
            for parameter in pl_module.parameters():
                parameter.grad = None
        self.seen += 1


def fit(policy, folder, *callbacks, max_steps=4, data=None, **arguments) -> PolicyModule:
    module = make_module(policy, advantage=GroupMean(), **arguments)
    data = data or make_data(batch_groups=4, max_policy_age=3)
    make_trainer(folder, [inline_rollout(), *callbacks], max_steps=max_steps).fit(module, data)
    return module


def test_a_batch_gives_several_updates_of_rising_version(policy, tmp_path):
    watch = Watch()
    fit(policy, tmp_path, watch, updates_per_batch=2, objective=PPOClip())
    assert [version for version, _ in watch.batches] == [2, 4]
    # the first update of a batch trains the policy that sampled it, the second one another
    assert watch.log_weights[0] < 1e-4 < watch.log_weights[1]


def test_ages_are_those_at_each_update(policy, tmp_path):
    watch = Watch()
    fit(policy, tmp_path, watch, updates_per_batch=2, max_steps=2)
    assert watch.batches[0][1]["pool/policy_age_max"] == 1
    assert watch.batches[0][1]["batch/groups_over_age"] == 0
    assert 0 < watch.batches[0][1]["pool/policy_age_mean"] < 1


class Age(pl.Callback):
    """Says of one group that its tokens are one update older than they are."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for part in batch.micro_batches:
            oldest = part.group_index == part.group_index.max()
            part.token_versions[(part.token_versions >= 0) & oldest[:, None]] -= 1


def test_a_group_that_becomes_too_old_between_two_updates_is_left_out(policy, tmp_path):
    watch = Watch()
    data = make_data(batch_groups=4, max_policy_age=1)
    module = fit(policy, tmp_path, Age(), watch, updates_per_batch=2, max_steps=2, data=data)
    # group 3, of age 1, is of the second update, at which it is 2
    assert watch.batches[0][1]["batch/groups_over_age"] == 1
    assert watch.batches[0][1]["pool/policy_age_max"] == 1
    assert module.policy_version == 2
    assert ledger_of(data) == {"trained": 3, "over_age": 1}


def ledger_of(data) -> dict[str, int]:
    """Settled prompts by reason, else by state."""
    return {row.reason or row.state: row.prompts for row in data.pool.ledger.rows() if row.state in ("trained", "dropped")}


@pytest.mark.parametrize(("removed", "expected"), [({0}, 2), ({1}, 2), ({0, 1}, 4)], ids=["first", "second", "both"])
def test_groups_of_a_skipped_update_are_not_trained(policy, tmp_path, removed, expected):
    data = make_data(batch_groups=4, max_policy_age=3)
    fit(policy, tmp_path, Remove(removed), updates_per_batch=2, max_steps=2 + len(removed), data=data)
    settled = ledger_of(data)
    assert settled["skipped_update"] == expected
    assert sum(row.prompts for row in data.pool.ledger.rows()) == data.pool.ledger.num_dispatched


def test_the_proximal_policy_is_that_of_the_first_update(policy, tmp_path):
    seen: list[list[torch.Tensor]] = []

    class Spy(DecoupledPPO):
        def coefficients(self, log_ratio, loss_mask, advantages, group_index, proximal_log_ratio=None):
            seen.append([log_ratio, proximal_log_ratio])
            return super().coefficients(log_ratio, loss_mask, advantages, group_index, proximal_log_ratio)

    fit(policy, tmp_path, updates_per_batch=2, objective=Spy(), max_steps=2)
    (first, first_proximal), (second, second_proximal) = seen
    torch.testing.assert_close(first, first_proximal, atol=1e-5, rtol=0)
    # sampled by the version that starts the batch: its log-ratios are 0, those after an update are not
    assert float(second_proximal.abs().max()) < 1e-4 < float(second.abs().max())


def test_one_update_of_one_micro_batch_needs_no_proximal_pass(policy, tmp_path):
    seen: list[torch.Tensor | None] = []

    class Spy(DecoupledPPO):
        def coefficients(self, log_ratio, loss_mask, advantages, group_index, proximal_log_ratio=None):
            seen.append(proximal_log_ratio)
            return super().coefficients(log_ratio, loss_mask, advantages, group_index, proximal_log_ratio)

    fit(policy, tmp_path, objective=Spy(), max_steps=1)
    assert seen == [None]


def test_a_callback_that_removes_the_gradient_skips_the_update_and_its_schedule(policy, tmp_path):
    rates: list[float] = []

    class Rate(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    watch = Watch()
    module = fit(
        policy,
        tmp_path,
        Remove({1}),
        watch,
        Rate(),
        max_steps=3,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
    )
    assert [version for version, _ in watch.batches] == [1, 1, 2]
    assert rates == pytest.approx([5e-4, 5e-4, 2.5e-4])
    assert module.num_skipped == 1


def test_no_reference_model_is_loaded_unless_asked_for(policy, tmp_path):
    module = fit(policy, tmp_path, max_steps=1)
    assert module._reference == []
    assert "policy/reference_kl" not in module.step.metrics


def test_the_reference_is_the_policy_before_training_and_stays_it(policy, tmp_path):
    module = fit(policy, tmp_path, max_steps=1, reference_kl=ReferenceKL(0.1), entropy_bonus=0.01)
    assert module.step.metrics["policy/reference_kl"] == pytest.approx(0, abs=1e-9)
    (reference,) = module._reference
    fresh = make_module(policy)
    fresh.configure_model()
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), fresh.model.parameters(), strict=True))
    assert module.state_dict().keys() == fresh.state_dict().keys()


def test_the_divergence_from_the_reference_is_measured(policy, tmp_path):
    module = fit(policy, tmp_path, max_steps=4, reference_kl=ReferenceKL(0.0), learning_rate=3e-2)
    assert module.step.metrics["policy/reference_kl"] > 1e-4


def test_a_reference_of_another_vocabulary_is_refused(policy, tmp_path):
    other = save_policy(tmp_path / "other", vocab_size=40)
    with pytest.raises(
        ConfigurationError, match=r"model\.reference_kl\.path must hold a model with the policy's vocabulary of 32"
    ):
        make_module(policy, reference_kl=ReferenceKL(path=other)).configure_model()


def test_all_contradictions_with_the_data_are_refused_at_once(policy, tmp_path):
    data = make_data(batch_groups=2, group_size=1, max_policy_age=0, max_tokens_per_micro_batch=6)
    with pytest.raises(
        ConfigurationError, match=r"group_size must .*updates_per_batch must .*max_policy_age must .*a whole group"
    ):
        fit(policy, tmp_path, objective=GMCGRPO(), updates_per_batch=3, data=data)


def test_impossible_values_are_refused_at_once():
    with pytest.raises(ConfigurationError, match=r"max_grad_norm must .*updates_per_batch must .*entropy_bonus must"):
        PolicyModule(max_grad_norm=0.0, updates_per_batch=0, entropy_bonus=float("nan"))
