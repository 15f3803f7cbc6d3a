"""Reward functions: what counts as right."""

import pytest

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.tasks import CharacterShare, CountdownReward, ExactMatch, LastNumber, LengthPenalty
from lit_asyncrl.tasks.rewards import OverlongPenalty
from lit_asyncrl.types import Example, Response


def example(answer):
    return Example("p", answer, "t", 0)


@pytest.mark.parametrize(("completion", "value"), [("12", 1.0), (" 12\n", 1.0), ("012", 0.0), ("", 0.0)])
def test_exact_match_compares_text_without_outer_white_space(completion, value):
    assert ExactMatch()(completion, example("12")) == value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("so 5 + 7 = 12.", "12", 1.0),
        ("$1,000.00", "work #### 1000", 1.0),
        ("-3", "3", 0.0),
        ("10-3", "3", 1.0),
        ("none", "3", 0.0),
        ("3 apples, not 4", "3", 0.0),
    ],
)
def test_last_number_compares_the_last_numbers_by_value(completion, answer, value):
    assert LastNumber()(completion, example(answer)) == value


def test_last_number_refuses_an_answer_without_a_number():
    with pytest.raises(ValueError, match="must hold a number"):
        LastNumber()("3", example("three"))


# 3 of 4 places agree; "12345" against "1234": 4 of 5.
@pytest.mark.parametrize(("completion", "value"), [("1294", 0.75), ("12345", 0.8), ("", 0.0)])
def test_character_share_counts_agreeing_places(completion, value):
    assert CharacterShare()(completion, example("1234")) == value


def test_character_share_is_not_trained_on_by_default():
    assert CharacterShare().weight == 0.0


# 15 characters exceed 10 by 50 %; 40 would exceed by 300 %, which is limited to 1.
@pytest.mark.parametrize(("length", "value"), [(10, 0.0), (15, -0.5), (40, -1.0)])
def test_length_penalty_grows_with_the_excess(length, value):
    assert LengthPenalty(10)("x" * length, example("")) == value


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("25+7*3", 1.0),
        ("25+7*3=46", 1.0),
        ("I think\n<answer>(7*3)+25</answer> is right", 1.0),
        ("<answer>1</answer> no: <answer>(7*3)+25</answer></answer>", 1.0),
        ("<answer>" * 200_000 + "(7*3)+25</answer>", 1.0),
        ("46", 0.0),
        ("25+21", 0.0),
        ("7*3+25+3-3", 0.0),
        ("__import__('os').system('true')", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_reward_wants_the_target_from_the_given_numbers(completion, value):
    assert CountdownReward()(completion, example({"numbers": [3, 7, 25], "target": 46})) == value


def test_countdown_reward_lets_a_response_leave_out_numbers():
    assert CountdownReward()("7*3", example({"numbers": [3, 7, 25], "target": 21})) == 1.0


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    # max_tokens 16, buffer 4: free up to 12, then a quarter a token
    [(1, 0.0), (12, 0.0), (13, -0.25), (15, -0.75), (16, -1.0), (20, -1.0)],
)
def test_overlong_penalty_falls_linearly_over_its_buffer(num_tokens, penalty):
    reward = OverlongPenalty(16, 4)
    assert reward(Response("text", num_tokens), example("a")) == penalty


def test_overlong_penalty_refuses_text_without_a_length():
    with pytest.raises(TypeError, match=r"must be a .*Response, got str"):
        OverlongPenalty(16, 4)("text", example("a"))


@pytest.mark.parametrize("buffer_tokens", [0, 17])
def test_overlong_penalty_needs_a_buffer_within_the_budget(buffer_tokens):
    with pytest.raises(ConfigurationError, match=r"buffer_tokens must be at least 1 and at most max_tokens, got"):
        OverlongPenalty(16, buffer_tokens)
