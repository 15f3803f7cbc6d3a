"""JsonlTask: rows to examples, splits, and errors that name file and line."""

import json

import pytest

from lit_asyncrl.errors import ConfigurationError, DataError
from lit_asyncrl.tasks import ExactMatch, JsonlTask, LastNumber, LengthPenalty, MathVerify


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def questions(tmp_path):
    return write(tmp_path / "rows.jsonl", [{"prompt": f"q{i}", "answer": f"because\n#### {i}"} for i in range(100)])


def loaded(*args, **kwargs):
    task = JsonlTask(*args, **kwargs)
    task.setup()
    return task


def prompts(task):
    return [task.train_example(i).prompt for i in range(task.num_train)]


def test_the_answer_is_what_follows_the_mark(questions):
    example = loaded(questions).train_example(0)
    assert example.answer == example.prompt[1:]


def test_the_answer_is_kept_whole_without_a_mark(questions):
    assert loaded(questions, answer_after=None).train_example(0).answer.startswith("because")


def test_the_splits_are_disjoint_and_hold_every_row(questions):
    task = loaded(questions)
    heldout = {task.heldout_example(i).prompt for i in range(task.num_heldout)}
    assert heldout.isdisjoint(prompts(task)) and len(heldout) + task.num_train == 100


def test_rows_with_the_same_prompt_fall_in_the_same_split(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"q{i % 50}", "answer": i} for i in range(200)])
    task = loaded(path, heldout_fraction=0.5)
    assert set(prompts(task)).isdisjoint(task.heldout_example(i).prompt for i in range(task.num_heldout))


def test_the_order_is_a_function_of_the_seed(questions):
    assert prompts(loaded(questions, seed=1)) == prompts(loaded(questions, seed=1)) != prompts(loaded(questions, seed=2))


def test_training_rows_whose_prompt_is_in_the_heldout_file_are_left_out(tmp_path, questions):
    heldout = write(tmp_path / "heldout.jsonl", [{"prompt": f"q{i}", "answer": "1"} for i in range(3)])
    with pytest.warns(UserWarning, match="3 rows of"):
        task = loaded(questions, heldout_path=heldout)
    assert (task.num_train, task.num_heldout) == (97, 3)


def test_the_chat_template_makes_messages_with_the_system_prompt_first(questions):
    example = loaded(questions, template="chat", system_prompt="Be short.").train_example(0)
    assert [m["role"] for m in example.prompt] == ["system", "user"]


def test_chat_messages_in_a_row_are_kept(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "2+2"}]
    path = write(
        tmp_path / "r.jsonl", [{"prompt": [*messages, {"role": "user", "content": str(i)}], "answer": 4} for i in range(50)]
    )
    assert loaded(path, template="chat").train_example(0).prompt[:3] == messages


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"answer": "1"}, "must have the key 'prompt'"),
        ({"prompt": "q"}, "must have the key 'answer'"),
        ({"prompt": " ", "answer": "1"}, "must have a prompt, got an empty one"),
        ({"prompt": 3, "answer": "1"}, "must have text as its prompt"),
        ("{not json", "must be JSON"),
        ("[1]", "must be a JSON object, got list"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, problem):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "1"}, "", row])
    with pytest.raises(DataError, match=r"rows\.jsonl:3 ") as caught:
        loaded(path)
    assert problem in str(caught.value)


def test_bad_rows_are_skipped_and_counted_when_asked(tmp_path):
    rows = [{"prompt": f"q{i}", "answer": "1"} for i in range(40)]
    path = write(tmp_path / "rows.jsonl", [*rows, "{not json", {"answer": "1"}])
    with pytest.warns(UserWarning, match="2 rows"):
        task = loaded(path, on_bad_row="skip")
    assert (task.num_bad_rows, task.num_train + task.num_heldout) == (2, 40)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"path must be a file .*nothing\.jsonl"):
        loaded(str(tmp_path / "nothing.jsonl"))


def test_a_file_too_small_to_split_is_refused(tmp_path):
    with pytest.raises(DataError, match="rows for both splits"):
        loaded(write(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "1"}]))


def test_the_constructor_reads_no_file():
    JsonlTask("/no/such/file.jsonl")


@pytest.mark.parametrize(
    ("name", "kind"), [("exact_match", ExactMatch), ("last_number", LastNumber), ("math_verify", MathVerify)]
)
def test_rewards_are_found_by_name(name, kind):
    assert isinstance(JsonlTask("f", reward=name).rewards[0], kind)


def test_several_rewards_may_be_given():
    rewards = [LastNumber(), LengthPenalty(100, weight=0.1)]
    assert JsonlTask("f", reward=rewards).rewards == rewards


def test_an_unknown_reward_is_refused():
    with pytest.raises(ConfigurationError, match="reward must be one of"):
        JsonlTask("f", reward="exact")


def test_a_system_prompt_needs_the_chat_template():
    with pytest.raises(ConfigurationError, match="template: chat"):
        JsonlTask("f", system_prompt="Be short.")


def test_a_parquet_file_gives_the_same_examples_as_its_rows_in_jsonl(tmp_path, questions):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet needs pyarrow")
    rows = [json.loads(line) for line in open(questions, encoding="utf-8")]  # noqa: PTH123, SIM115
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert prompts(loaded(str(tmp_path / "rows.parquet"))) == prompts(loaded(questions))


def test_a_datasets_folder_gives_the_same_examples_as_its_rows_in_jsonl(tmp_path, questions):
    datasets = pytest.importorskip("datasets", reason="a folder of `save_to_disk` needs datasets")
    rows = [json.loads(line) for line in open(questions, encoding="utf-8")]  # noqa: PTH123, SIM115
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "folder"))
    assert prompts(loaded(str(tmp_path / "folder"))) == prompts(loaded(questions))
