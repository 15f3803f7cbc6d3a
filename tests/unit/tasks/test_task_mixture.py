"""TaskMixture: shares, indices, epochs."""

import pytest

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.tasks import ReverseDigits, SortDigits, TaskMixture
from lit_asyncrl.tasks.mixture import leaf_tasks


def mixture(weights=None, **sizes):
    return TaskMixture([ReverseDigits(**sizes), SortDigits(num_train=50, num_heldout=10)], weights)


def test_each_task_gets_its_share():
    task = mixture([3.0, 1.0])
    names = [task.train_example(i).task for i in range(400)]
    assert names.count("reverse_digits") == 300


def test_the_order_of_tasks_is_even():
    task = mixture([3.0, 1.0])
    names = [task.train_example(i).task for i in range(40)]
    assert all(names[i : i + 4].count("sort_digits") == 1 for i in range(0, 40, 4))


def test_an_example_carries_the_index_of_the_mixture():
    task = mixture()
    assert [task.train_example(i).index for i in range(5)] == [0, 1, 2, 3, 4]


def test_an_epoch_passes_every_task_through():
    task = mixture(num_train=30, num_heldout=10)
    prompts = [task.train_example(i).prompt for i in range(task.num_train)]
    assert {part.train_example(i).prompt for part in task.tasks for i in range(part.num_train)} <= set(prompts)


# 2:1 of 10 and 10 held-out examples: the larger share ends first, after about 15 examples.
def test_the_heldout_split_ends_before_an_example_would_come_twice():
    task = mixture([2.0, 1.0], num_heldout=10)
    names = [task.heldout_example(i).task for i in range(task.num_heldout)]
    assert names.count("reverse_digits") == 10 and 14 <= task.num_heldout <= 16


def test_leaf_tasks_are_the_parts_of_a_mixture_or_the_task_itself():
    task = mixture()
    assert leaf_tasks(task) == task.tasks and leaf_tasks(task.tasks[0]) == [task.tasks[0]]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, 1e-9]])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ConfigurationError, match="weights must"):
        mixture(weights)


def test_two_tasks_of_one_name_are_refused():
    with pytest.raises(ConfigurationError, match="different names"):
        TaskMixture([ReverseDigits(), ReverseDigits(seed=1)])


def test_tasks_and_rewards_are_built_from_configuration_by_short_name():
    from jsonargparse import ArgumentParser

    from lit_asyncrl.interfaces import Task

    parser = ArgumentParser()
    parser.add_argument("--task", type=Task)
    reward = {"class_path": "LengthPenalty", "init_args": {"max_characters": 9}}
    parts = [
        {"class_path": "Countdown", "init_args": {"num_numbers": 4, "rewards": [{"class_path": "CountdownReward"}, reward]}},
        {"class_path": "JsonlTask", "init_args": {"path": "f", "reward": "last_number"}},
        {"class_path": "JsonlTask", "init_args": {"path": "f", "name": "g", "reward": reward}},
        {"class_path": "Arithmetic", "init_args": {"operations": ["+", "*"]}},
    ]
    config = {"class_path": "TaskMixture", "init_args": {"tasks": parts, "weights": [1, 1, 1, 2]}}
    task = parser.instantiate(parser.parse_object({"task": config})).task
    assert [[reward.name for reward in part.rewards] for part in task.tasks] == [
        ["countdown", "length_penalty"],
        ["last_number"],
        ["length_penalty"],
        ["exact_match"],
    ]
