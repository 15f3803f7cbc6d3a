"""`lit-asyncrl plan`: a table from given, read or measured rates, warnings, and refusals."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from policies import save_policy
from runs import make_data, make_module

from lit_asyncrl.cli import main
from lit_asyncrl.planning import plan as plan_module
from lit_asyncrl.planning import rates as rates_module
from lit_asyncrl.planning.rates import Rates, summary_rates
from lit_asyncrl.pool.admission import admission_limit
from lit_asyncrl.simulation.lengths import ResponseLengths
from lit_asyncrl.simulation.simulator import simulate
from lit_asyncrl.types import Completion, Prompt

RATES = ("--token_s=0.01", "--train_s=0.2", "--mean_tokens=5")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def plan(policy, tmp_path, monkeypatch, capsys):
    """Run `plan` on the smallest packaged config; give exit code, output and errors. Nothing may be left behind."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["lit-asyncrl"])
        before, children = set(tmp_path.rglob("*")), set(psutil.Process().children(recursive=True))
        code: object = 0
        try:
            main(["plan", "--config", "smoke", f"--model.policy.path={policy}", "--data.sampling.max_new_tokens=8", *arguments])
        except SystemExit as error:
            code = error.code
        assert set(tmp_path.rglob("*")) == before
        assert set(psutil.Process().children(recursive=True)) <= children
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def value_of(output: str, label: str) -> str:
    [line] = [line for line in output.splitlines() if line.strip().startswith(label)]
    return line.strip().removeprefix(label).strip()


def test_given_rates_give_a_table_with_units(plan):
    code, output, _ = plan(*RATES)
    assert code == 0
    assert "rates: given" in output
    assert value_of(output, "time per token of one response") == "10 ms"
    assert value_of(output, "time per update of the trainer") == "0.2 s"
    for label in ("generation staleness", "waiting staleness", "policy age, largest"):
        assert value_of(output, label).endswith("updates")
    for label in ("groups rejected", "length bias", "trainer busy", "slots busy"):
        assert value_of(output, label).endswith("%")


@pytest.mark.slow
def test_rates_are_measured_unless_they_are_given(plan):
    code, output, _ = plan()
    assert code == 0
    assert "rates: measured" in output


def test_rates_come_from_an_earlier_run(plan, tmp_path_factory):
    # 100 s for 50 updates, of which the trainer waited half: 1 s each; 4,000 tokens in 80 s and n slots: .02 n s a token;
    # 200 groups of 2 with 2,000 tokens: 5 tokens a response
    summary = {
        "wall_s": 100.0,
        "policy_version": 50,
        "generated_tokens": 4000,
        "share_trainer_waits_for_data": 0.5,
        "share_engine_waits_for_admission": 0.2,
        "ledger": {"trained": {"prompts": 200, "tokens": 2000}, "in_flight": {"prompts": 4, "tokens": 0}},
    }
    path = tmp_path_factory.mktemp("run") / "summary.json"
    path.write_text(json.dumps(summary))
    code, output, _ = plan(f"--summary={path}", "--data.group_size=2", "--num_slots=4")
    assert code == 0
    assert value_of(output, "time per token of one response") == "80 ms"
    assert value_of(output, "time per update of the trainer") == "1 s"
    assert float(value_of(output, "response length, mean").split()[0]) == pytest.approx(5.0, rel=0.01)


@pytest.mark.slow
def test_a_bound_out_of_reach_is_a_warning(plan):
    code, output, _ = plan(*RATES, "--data.max_policy_age=8")
    assert code == 0
    assert "warning: data.max_policy_age 8 cannot be reached" in output


def test_a_bound_on_the_oldest_token_that_bounds_length_is_a_warning(plan):
    # 1 of 100 responses takes 8 tokens of 1 s; an update comes every 4 s, when a batch of stragglers is complete
    rates = ("--token_s=1", "--train_s=0.5", "--mean_tokens=2", "--num_slots=256")
    code, output, _ = plan(*rates, "--data.max_policy_age=1", "--data.age_measure=oldest")
    assert code == 0
    assert "data.max_policy_age 1 (oldest) bounds response length" in output


def test_slots_that_admission_leaves_empty_are_a_warning(plan):
    code, output, _ = plan(*RATES, "--data.max_policy_age=0", "--num_slots=4096")
    assert code == 0
    assert "fewer than the engine's 4096 slots" in output


def test_a_pool_below_one_batch_is_refused(plan):
    code, _, errors = plan(*RATES, "--data.max_policy_age=null", "--data.capacity_groups=1", "--data.batch_groups=4")
    assert code == 2
    assert "data.capacity_groups must hold at least one batch of 4" in errors


def test_a_bound_so_large_that_a_run_would_queue_millions_is_refused_at_once(plan):
    code, _, errors = plan(*RATES, "--data.max_policy_age=1000000")
    assert code == 2
    assert "data.max_policy_age must leave at most 1,000,000 responses outstanding, got 1000000" in errors


def test_several_updates_a_batch_are_said_to_be_left_out(plan):
    code, output, _ = plan(*RATES, "--model.updates_per_batch=2")
    assert code == 0
    assert "warning: model.updates_per_batch 2 is not simulated" in output


def test_prompts_that_never_fill_a_batch_are_refused(plan):
    code, _, errors = plan(*RATES, "--data.max_prompt_epochs=1", "--data.batch_groups=100000000")
    assert code == 2
    assert "would never be complete" in errors


def test_a_file_that_is_no_summary_is_refused(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "other.json"
    path.write_text("{}")
    code, _, errors = plan(f"--summary={path}")
    assert code == 2
    assert "summary must name a run's summary.json" in errors


# ------------------------------------------------------------------ the numbers behind it


def test_tokens_of_members_that_left_their_group_count_in_the_mean_length(tmp_path):
    # 10 groups of 4 with 1,000 tokens: 200 trained, 800 of members that were dropped. What goes on or starts anew is no answer.
    ledger = {
        "trained": (10, 200),
        "dropped: members": (0, 800),
        "dropped: interrupted": (0, 999),
        "in_flight: unfinished": (0, 7),
    }
    summary = {
        "wall_s": 100.0,
        "policy_version": 50,
        "generated_tokens": 2006,
        "share_trainer_waits_for_data": 0.0,
        "share_engine_waits_for_admission": 0.0,
        "ledger": {name: {"prompts": prompts, "tokens": tokens} for name, (prompts, tokens) in ledger.items()},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    rates = summary_rates(str(tmp_path / "summary.json"), 8, 4, "constant", 100)
    assert set(rates.lengths.draw(np.random.default_rng(0), (9,)).tolist()) == {25}


class ClockedEngine:
    """Every response has 20 tokens, and a step of all slots takes 10 ms of a clock of its own."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.now = 0.0

    def start(self, *_, **arguments):
        self.arguments = arguments

    def submit(self, requests):
        self.queue = list(requests)

    def completions(self, timeout_s):
        taken, self.queue = self.queue[: self.num_slots], self.queue[self.num_slots :]
        self.now += 20 * 0.01
        return [Completion(request.request_id, [1] * 20, [0.0] * 20, [0] * 20, "length") for request in taken]

    begin_update = finish_update = stop = lambda self, *_: None


@pytest.mark.parametrize(("num_slots", "group_size", "number"), [(8, 4, 8), (8, 6, 8), (64, 48, 64), (4, 10, 10)])
def test_the_time_of_a_token_does_not_depend_on_how_groups_fill_the_slots(policy, monkeypatch, num_slots, group_size, number):
    engine = ClockedEngine(num_slots)
    monkeypatch.setattr(rates_module.time, "monotonic", lambda: engine.now)
    module, data = make_module(policy), make_data(group_size=group_size)
    data.prepare(module, 0)
    prompts = [Prompt(i, data.task.train_example(i), i, (3, 4), 0, 0, 0) for i in range(-(-num_slots // group_size))]
    rollout = SimpleNamespace(engine=engine, max_model_len=48)
    completions, token_s = rates_module._measure_generation(module, data, rollout, prompts, num_slots)
    assert len(completions) == number
    assert token_s == pytest.approx(0.01)
    assert engine.arguments["max_model_len"] == 48


def test_several_updates_a_batch_are_bounded_and_timed_as_in_the_run(policy, monkeypatch):
    seen = []

    def watched(settings, sampler, **arguments):
        seen.append(settings)
        return simulate(settings, sampler, **arguments)

    monkeypatch.setattr(plan_module, "simulate", watched)
    rates = Rates(0.01, 0.5, ResponseLengths("constant", 50), "given")
    plan_module.make_plan(make_data(batch_groups=4, max_policy_age=3), rates, num_slots=8, publish_lag=0, updates_per_batch=4)
    assert seen[0].train_s == 4 * 0.5
    # Four updates a batch, age at most 3: one batch outstanding, as if synchronous.
    assert seen[0].max_policy_age == 0
    assert admission_limit(4, 0) == admission_limit(4, 3, updates_per_batch=4) == 4
