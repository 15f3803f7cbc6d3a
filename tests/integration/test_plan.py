"""`lit-asyncrl plan`: a table from given, read or measured rates, warnings, and refusals."""

from __future__ import annotations

import json

import psutil
import pytest
from policies import save_policy

from lit_asyncrl.cli import main

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
