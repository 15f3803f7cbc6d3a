"""RewardRunner, MathVerify and KillableReward: bounded waits, and causes that are named."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lit_asyncrl.errors import ConfigurationError, RewardError, StopRequested
from lit_asyncrl.interfaces import RewardFn
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.tasks import CharacterShare, ExactMatch, KillableReward, MathVerify, ReverseDigits, RewardRunner
from lit_asyncrl.types import Example, Response


class Scripted(RewardFn):
    """Does what `action` says for the response "bad", else returns 1."""

    name = "scripted"

    def __init__(self, action):
        self.action = action

    def __call__(self, completion, example):
        return self.action() if completion == "bad" else 1.0


def raising():
    raise KeyError("lost")


@pytest.fixture
def release():
    """Ends the rewards that hang."""
    event = threading.Event()
    yield event
    event.set()


def score(runner, action, completions=("good", "bad")):
    task = ReverseDigits(rewards=[Scripted(action)])
    return runner.score(task, list(completions), task.train_example(7))


def test_values_come_per_response_in_the_order_of_the_rewards():
    task = ReverseDigits(2, 2, rewards=[ExactMatch(), CharacterShare()])
    # "13" against "12": no match, 1 of 2 places.
    assert RewardRunner().score(task, ["12", "13"], Example("r21=", "12", "t", 0)) == [[1.0, 1.0], [0.0, 0.5]]


def test_a_reward_that_raises_is_named_with_task_example_response_and_cause():
    with pytest.raises(RewardError, match=r"'scripted' of task 'reverse_digits' \(example 7, response 1\)") as caught:
        score(RewardRunner(), raising)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0]], ids=repr)
def test_a_reward_that_is_no_finite_number_is_an_error(value):
    with pytest.raises(RewardError, match="response 1"):
        score(RewardRunner(), lambda: value)


def test_a_failed_group_is_skipped_and_counted_when_asked():
    runner = RewardRunner(on_error="skip")
    with pytest.warns(UserWarning, match="left out"):
        assert score(runner, raising) is None
    assert runner.num_failed == 1


def test_a_reward_that_hangs_is_an_error_within_the_timeout(release):
    started = time.monotonic()
    with pytest.raises(RewardError, match="reward_timeout_s must suffice"):
        score(RewardRunner(timeout_s=0.2), release.wait)
    assert time.monotonic() - started < 5.0


@pytest.mark.filterwarnings("ignore:A group is left out")
def test_scoring_goes_on_after_a_reward_that_hangs(release):
    runner = RewardRunner(timeout_s=0.2, on_error="skip")
    score(runner, release.wait)
    assert score(runner, release.wait, ["good"]) == [[1.0]]


@pytest.mark.filterwarnings("ignore:A group is left out")
def test_the_number_of_threads_left_behind_is_bounded(release):
    runner = RewardRunner(timeout_s=0.02, on_error="skip")
    for _ in range(4):
        assert score(runner, release.wait) is None
    with pytest.raises(RewardError, match="At most 4 rewards may hang"):
        score(runner, release.wait)


def test_a_stop_request_ends_the_wait(release):
    supervisor = Supervisor()
    supervisor.request_stop("test")
    with pytest.raises(StopRequested):
        score(RewardRunner(timeout_s=60.0, supervisor=supervisor), release.wait)


def test_a_closed_runner_ends_its_thread():
    runner, threads = RewardRunner(), []
    score(runner, lambda: threads.append(threading.current_thread()) or 1.0)
    runner.close()
    threads[0].join(5.0)
    assert not threads[0].is_alive()


def test_a_timeout_of_zero_is_refused():
    with pytest.raises(ConfigurationError, match="reward_timeout_s"):
        RewardRunner(timeout_s=0.0)


@pytest.fixture(scope="module")
def verify():
    reward = MathVerify(timeout_s=20.0)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"so it is \boxed{72}", "72", 1.0),
        (r"$\frac{144}{2}$", "72", 1.0),
        ("71", "72", 0.0),
        (r"$x=\frac{1}{2}$", r"\frac{2}{4}", 1.0),
        ("", "72", 0.0),
    ],
)
def test_math_verify_judges_by_value(verify, completion, answer, value):
    assert verify(completion, Example("p", answer, "t", 0)) == value


def test_math_verify_kills_a_process_that_takes_too_long_and_starts_another(verify):
    verify("1", Example("p", "1", "t", 0))
    process = verify._worker._process
    verify._worker._timeout_s = 0.3
    with pytest.raises(RewardError, match="still computing"):
        verify("$9^{9^{9^{9}}}$", Example("p", "72", "t", 0))
    assert process.poll() is not None
    verify._worker._timeout_s = 20.0
    assert verify("72", Example("p", "72", "t", 0)) == 1.0


@pytest.mark.parametrize("answer", ["", r"\frac{1}{0}"])
def test_math_verify_refuses_an_answer_that_it_cannot_judge(verify, answer):
    with pytest.raises(RewardError, match=r"no mathematics|nan or zoo"):
        verify("$3$", Example("p", answer, "t", 0))


def test_a_response_that_math_verify_cannot_compare_is_wrong(verify):
    assert verify(r"$\frac{1}{0}$", Example("p", "3", "t", 0)) == 0.0


def test_math_verify_is_started_before_the_first_response():
    reward = MathVerify()
    reward.start()
    process = reward._worker._process
    assert process is not None and process.poll() is None
    reward.start()
    assert reward._worker._process is process
    reward.close()
    assert process.poll() is not None


def test_math_verify_starts_no_process_before_the_first_call():
    assert MathVerify()._worker._process is None


def test_the_verifying_process_loads_no_torch(verify):
    verify("1", Example("p", "1", "t", 0))
    assert "libtorch" not in Path(f"/proc/{verify._worker._process.pid}/maps").read_text(encoding="utf-8")


def test_the_verifying_process_ends_with_its_parent():
    reward = MathVerify(timeout_s=20.0)
    reward("1", Example("p", "1", "t", 0))
    # What the end of the parent does to the pipe.
    reward._worker._process.stdin.close()
    assert reward._worker._process.wait(20.0) == 0
    reward.close()


class Backtracking(RewardFn):
    """Takes for ever on "aaa...b", and keeps the interpreter to itself meanwhile."""

    name = "backtracking"
    weight = 0.5

    def __call__(self, completion: str, example: Example) -> float:
        if completion == "raise":
            raise KeyError(example.answer)
        if completion == "text":
            return "1"
        if isinstance(completion, Response):
            return completion.num_tokens
        return torch.tensor(float(re.match(r"(a+)+$", completion) is not None))


@pytest.fixture(scope="module")
def killable():
    reward = KillableReward(Backtracking(), timeout_s=20.0)
    yield reward
    reward.close()


def test_a_killable_reward_says_what_the_reward_says(killable):
    killable.start()
    assert (killable.name, killable.weight) == ("backtracking", 0.5)
    assert [killable(text, Example("p", "1", "t", 0)) for text in (Response("aaa", 3), "aa", "b")] == [3.0, 1.0, 0.0]
    with pytest.raises(RewardError, match="backtracking raised KeyError: 'lost'"):
        killable("raise", Example("p", "lost", "t", 0))


def test_a_killable_reward_that_keeps_the_interpreter_is_killed(killable):
    killable.start()
    process, killable._worker._timeout_s = killable._worker._process, 0.3
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"backtracking must answer within 0\.3 s, got no answer"):
        killable("a" * 60 + "b", Example("p", "1", "t", 0))
    assert time.monotonic() - began < 10.0
    assert process.poll() is not None
    killable._worker._timeout_s = 20.0
    assert killable("a", Example("p", "1", "t", 0)) == 1.0


def test_what_is_no_number_is_refused_as_from_any_reward(killable):
    with pytest.raises(RewardError, match="must be a number"):
        RewardRunner(timeout_s=60.0).score(ReverseDigits(rewards=[killable]), ["text"], Example("p", "1", "t", 0))


def test_a_reward_that_cannot_be_loaded_is_named():
    class Unloadable(Backtracking):
        def __reduce__(self):
            return (int, ("no number",))

    reward = KillableReward(Unloadable())
    for use in (reward.start, lambda: reward("a", Example("p", "1", "t", 0))):
        with pytest.raises(RewardError, match=r"'backtracking' could not be loaded in its process: ValueError"):
            use()
    reward.close()


def test_scoring_from_two_threads_keeps_the_groups_apart():
    runner, task = RewardRunner(), ReverseDigits()
    examples = [task.train_example(i) for i in range(40)]

    def all_right(part):
        return all(runner.score(task, [e.answer, "x"], e) == [[1.0], [0.0]] for e in part)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(all_right, (examples[:20], examples[20:])))
