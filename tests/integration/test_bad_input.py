"""Bad input: a clear error before anything starts, and nothing left behind."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import psutil
import pytest
from policies import save_policy

from lit_asyncrl.callbacks import AsyncRollout
from lit_asyncrl.cli import main
from lit_asyncrl.errors import ConfigurationError


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def refused(policy, tmp_path, monkeypatch, capsys):
    """Run a tiny `fit` with more arguments in an empty folder; give the exit code and what was printed on standard error."""

    def run(*arguments: str, path: str = policy) -> tuple[object, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["lit-asyncrl"])
        before = set(tmp_path.rglob("*"))
        threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
        code: object = 0
        try:
            main(
                [
                    *("fit", "--config", "smoke", f"--model.policy.path={path}", "--data.sampling.max_new_tokens=6"),
                    *("--trainer.max_steps=1", *arguments),
                ]
            )
        except SystemExit as error:
            code = error.code
        for thread in set(threading.enumerate()) - threads:  # transformers reads weights in a pool that ends by itself
            thread.join(10.0)
            assert not thread.is_alive(), thread
        assert set(psutil.Process().children(recursive=True)) <= children
        assert not {p.name for p in set(tmp_path.rglob("*")) - before if p.is_file()}
        return code, capsys.readouterr().err

    return run


def assert_refused(result: tuple[object, str], *parts: str) -> None:
    code, message = result
    assert code == 2, message
    for part in parts:
        assert part in message


def test_a_model_path_that_does_not_exist(refused):
    assert_refused(refused(path="/no/such/model"), "model.policy.path", "/no/such/model", "no such folder")


def test_a_tokenizer_that_does_not_fit_the_model(refused, tmp_path_factory):
    path = save_policy(tmp_path_factory.mktemp("narrow"), vocab_size=10)
    assert_refused(refused(path=path), "model.policy.path", "10 embeddings")


def jsonl(folder: Path, *lines: str) -> list[str]:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["--data.task=JsonlTask", f"--data.task.path={file}"]


GOOD = json.dumps({"prompt": "r12=", "answer": "21"})


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (json.dumps({"answer": "21"}), "prompt"),
        (json.dumps({"prompt": "", "answer": "21"}), "prompt"),
        ('{"prompt": "r12=", ', "JSON"),
        ("[1, 2]", ""),
    ],
    ids=["without a prompt", "empty prompt", "not JSON", "not an object"],
)
def test_a_jsonl_row_that_cannot_be_used_is_named_by_file_and_line(refused, tmp_path_factory, bad, word):
    arguments = jsonl(tmp_path_factory.mktemp("data"), *[GOOD] * 30, bad, *[GOOD] * 3)
    assert_refused(refused(*arguments), "rows.jsonl", "31", word)


def test_a_jsonl_file_that_does_not_exist(refused):
    assert_refused(refused("--data.task=JsonlTask", "--data.task.path=/no/such.jsonl"), "/no/such.jsonl")


def test_a_prompt_longer_than_the_context(refused, tmp_path_factory):
    rows = [json.dumps({"prompt": f"r{i}" + "1" * 200 + "=", "answer": "1"}) for i in range(40)]
    assert_refused(refused(*jsonl(tmp_path_factory.mktemp("data"), *rows)), "context of 64 tokens")


def test_group_size_one_with_a_group_baseline(refused):
    assert_refused(refused("--data.group_size=1"), "data.group_size must be at least 2 with OPOB")


def test_no_response_budget(refused):
    assert_refused(refused("--data.sampling.max_new_tokens=0"), "data.sampling.max_new_tokens must be at least 1, got 0")


@pytest.mark.parametrize("argument", ["top_p=0.9", "top_k=5", "min_p=0.1"])
def test_restricted_sampling_in_training(refused, argument):
    assert_refused(refused(f"--data.sampling.{argument}"), "top_p, top_k or min_p in training", argument)


@pytest.mark.parametrize("argument", ["temperature=0", "temperature=-1"])
def test_a_training_temperature_that_is_not_positive(refused, argument):
    assert_refused(refused(f"--data.sampling.{argument}"), "data.sampling.temperature must be above 0")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("data:\n  batch_group: 2\n", "batch_group"),
        ("data:\n  seed: 1\n  seed: 2\n", "'seed' on lines 2 and 3"),
        ("trainerr:\n", "trainerr"),
        ("data:\n  task:\n    init_args:\n      min_digit: 3\n", "min_digit"),
        ("data:\n  tsk:\n", "tsk"),
    ],
    ids=["unknown", "duplicate", "empty misspelt section", "unknown, deep", "empty misspelt key"],
)
def test_a_key_that_cannot_be_read(refused, tmp_path_factory, text, word):
    file = tmp_path_factory.mktemp("config") / "more.yaml"
    file.write_text(text, encoding="utf-8")
    assert_refused(refused("--config", str(file)), word)


def test_an_unknown_config(refused):
    assert_refused(refused("--config", "vcppo"), "--config", "vcppo")


@pytest.mark.parametrize("folder", ["/proc/no/such", "/dev/null/runs"])
def test_a_log_directory_that_cannot_be_written(refused, folder):
    assert_refused(refused(f"--trainer.logger.init_args.save_dir={folder}"), "save_dir", "can be written")


def test_a_root_directory_that_cannot_be_written(refused):
    assert_refused(refused("--trainer.default_root_dir=/proc/no/such"), "trainer.default_root_dir", "can be written")


def test_a_rollout_folder_that_cannot_be_written(refused):
    assert_refused(refused("--data.save_rollouts=/proc/no/such"), "data.save_rollouts", "can be written")


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("--trainer.gradient_clip_val=1.0", "model.max_grad_norm"),
        ("--trainer.accumulate_grad_batches=2", "data.max_tokens_per_micro_batch"),
    ],
)
def test_lightning_s_own_clip_and_accumulation_point_to_ours(refused, argument, remedy):
    assert_refused(refused(argument), remedy)


def test_an_age_bound_below_the_forced_lag(refused):
    assert_refused(refused("--trainer.callbacks.publish_lag=3", "--data.max_policy_age=2"), "max_policy_age", "publish_lag")


def test_exact_score_norms_with_token_level_weights(refused):
    assert_refused(refused("--model.objective=PPOClip"), "model.objective", "logit_proxy")


def test_several_contradictions_are_listed_together(refused):
    assert_refused(refused("--data.batch_groups=0", "--data.group_size=0"), "data.batch_groups", "data.group_size")


def test_a_checkpoint_that_does_not_exist(refused):
    assert_refused(refused("--ckpt_path=/no/such.ckpt"), "ckpt_path", "/no/such.ckpt")


def test_a_torn_checkpoint(refused, tmp_path_factory):
    file = tmp_path_factory.mktemp("torn") / "last.ckpt"
    file.write_bytes(b"torn")
    assert_refused(refused(f"--ckpt_path={file}"), "ckpt_path", str(file))


def test_several_trainer_processes(refused):
    assert_refused(refused("--trainer.devices=2"), "trainer.devices times trainer.num_nodes must be 1, got 2")


@pytest.mark.parametrize("advantage", ["GroupMean", "LeaveOneOut"])
def test_group_size_one_with_any_baseline_of_the_group(refused, advantage):
    assert_refused(
        refused("--data.group_size=1", f"--model.advantage={advantage}"), "data.group_size must be at least 2", advantage
    )


def test_a_held_out_prompt_longer_than_the_context_is_named_by_file_and_line(refused, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    heldout = folder / "heldout.jsonl"
    heldout.write_text(GOOD + "\n" + json.dumps({"prompt": "r" + "1" * 200 + "=", "answer": "1"}) + "\n", encoding="utf-8")
    rows = [json.dumps({"prompt": f"r{i}=", "answer": "1"}) for i in range(20, 40)]
    arguments = [*jsonl(folder, *rows), f"--data.task.heldout_path={heldout}"]
    assert_refused(refused(*arguments), "context of 64 tokens", "heldout.jsonl:2")


def test_fewer_prompts_than_a_batch(refused, tmp_path_factory):
    rows = [json.dumps({"prompt": f"r{i}=", "answer": "1"}) for i in range(20)]
    arguments = [*jsonl(tmp_path_factory.mktemp("data"), *rows), "--data.max_prompt_epochs=1", "--data.batch_groups=32"]
    assert_refused(refused(*arguments), "data.task must give at least 32 prompts", "max_prompt_epochs: 1")


def test_a_mixture_of_tasks_of_one_name_is_one_clear_line(refused):
    tasks = json.dumps([{"class_path": "ReverseDigits"}, {"class_path": "ReverseDigits"}])
    assert_refused(refused("--data.task=TaskMixture", f"--data.task.tasks={tasks}"), "tasks must have different names")


def test_a_folder_that_is_no_data_set(refused, tmp_path_factory):
    folder = tmp_path_factory.mktemp("no_data_set")
    assert_refused(refused("--data.task=JsonlTask", f"--data.task.path={folder}"), str(folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("publish_lag_start", -5),
        ("probe_tolerance", -1.0),
        ("max_model_len", 1),
        ("sync_timeout_s", 0.0),
        ("evaluation_timeout_s", -1.0),
        ("trainer_threads", 0),
    ],
)
def test_a_number_that_the_rollout_cannot_use_is_refused_by_its_key(key, value):
    with pytest.raises(ConfigurationError, match=rf"AsyncRollout\.{key} must be .*, got {value}"):
        AsyncRollout(**{key: value})
