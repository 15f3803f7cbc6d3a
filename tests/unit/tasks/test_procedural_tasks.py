"""Procedural tasks: determinism, disjoint splits, right answers."""

import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.tasks import Arithmetic, Countdown, ReverseDigits, SortDigits
from lit_asyncrl.tasks.countdown import evaluate_expression

TASKS = {
    "reverse": lambda seed: ReverseDigits(2, 5, seed=seed),
    "sort": lambda seed: SortDigits(3, 3, seed=seed),
    "arithmetic": lambda seed: Arithmetic(["+", "-", "*"], max_operand=30, seed=seed),
    "countdown": lambda seed: Countdown(3, max_number=9, max_target=50, seed=seed),
}


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_same_seed_and_index_give_the_same_example(make):
    assert [make(3).train_example(i) for i in (0, 7, 999_999)] == [make(3).train_example(i) for i in (0, 7, 999_999)]


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_another_seed_gives_other_examples(make):
    assert [make(0).train_example(i).prompt for i in range(20)] != [make(1).train_example(i).prompt for i in range(20)]


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
@given(seeds=st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)), start=st.integers(0, 4000))
@settings(max_examples=15, deadline=None)
def test_training_and_heldout_prompts_are_disjoint_whatever_the_seeds(make, seeds, start):
    train, heldout = make(seeds[0]), make(seeds[1])
    trained = {train.train_example(i).prompt for i in range(start, start + 60)}
    assert trained.isdisjoint(heldout.heldout_example(i).prompt for i in range(start % 4000, start % 4000 + 60))


def test_reverse_digits_pads_short_strings_at_the_left_and_reverses_them():
    task = ReverseDigits(2, 4)
    for example in map(task.train_example, range(50)):
        digits = example.prompt[1:-1].lstrip(" ")
        assert example.prompt == f"r{digits:>4}=" and example.answer == digits[::-1]


def test_lengths_cover_the_whole_range():
    task = ReverseDigits(4, 10)
    assert {len(task.train_example(i).answer) for i in range(200)} == set(range(4, 11))


def test_sort_digits_answers_the_digits_in_rising_order():
    assert SortDigits(4, 4).solve("4071") == "0147"


def test_arithmetic_answers_are_right():
    task = Arithmetic(["+", "-", "*"], max_operand=30)
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for example in map(task.train_example, range(100)):
        sign = next(c for c in "+-*" if c in example.prompt)
        left, right = map(int, example.prompt[:-1].split(sign))
        assert example.answer == str(operations[sign](left, right))


def reachable(numbers):
    """Every value that some of the numbers reach, by trying all ways to join two of them."""
    found = set(numbers)
    for left, right in itertools.permutations(range(len(numbers)), 2):
        rest = [n for i, n in enumerate(numbers) if i not in (left, right)]
        a, b = numbers[left], numbers[right]
        for value in {a + b, a * b, a - b} | ({a // b} if b and a % b == 0 else set()):
            found |= reachable([*rest, value])
    return found


def test_every_countdown_target_is_reachable():
    task = Countdown(3, max_number=12, max_target=60)
    for example in map(task.train_example, range(40)):
        assert example.answer["target"] in reachable(example.answer["numbers"])


def test_countdown_chat_template_asks_for_the_same_numbers():
    short, chat = Countdown(seed=5).train_example(3), Countdown(seed=5, template="chat").train_example(3)
    assert chat.answer == short.answer and str(chat.answer["numbers"]) in chat.prompt[0]["content"]


def test_a_space_of_prompts_without_a_heldout_one_is_refused():
    with pytest.raises(ConfigurationError, match="prompts for both splits"):
        Arithmetic(max_operand=0).setup()


@pytest.mark.parametrize(("low", "high"), [(1, 4), (5, 4), (4, 1001)])
def test_an_impossible_range_of_digits_is_refused(low, high):
    with pytest.raises(ConfigurationError, match="digits must be between"):
        ReverseDigits(low, high)


def test_an_index_outside_the_split_is_refused():
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        ReverseDigits(num_train=10).train_example(10)


def write_expression(rng, depth):
    """A random expression and its value by Python's own fractions; None where it would divide by zero."""
    from fractions import Fraction

    if depth == 0 or rng.random() < 0.3:
        number = rng.randint(0, 30)
        return str(number), Fraction(number)
    (left, a), (right, b) = write_expression(rng, depth - 1), write_expression(rng, depth - 1)
    sign = rng.choice("+-*/")
    if a is None or b is None or (sign == "/" and b == 0):
        value = None
    else:
        value = {"+": a + b, "-": a - b, "*": a * b}[sign] if sign != "/" else a / b
    return f"({left} {sign}{right})", value


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_expressions_are_evaluated_exactly(seed):
    text, value = write_expression(random.Random(seed), 3)
    if value is None:
        with pytest.raises(ValueError, match="division by zero"):
            evaluate_expression(text)
    else:
        assert evaluate_expression(text)[0] == value


@pytest.mark.parametrize(("text", "value"), [("2+3*4", 14), ("8-3-2", 3), ("16/4/2", 2), ("(2+3)*4", 20)])
def test_precedence_and_left_association_are_those_of_arithmetic(text, value):
    assert evaluate_expression(text)[0] == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "9**9**9",
        "9^9",
        "1e9",
        "",
        "()",
        "1+",
        "(1",
        "1)",
        "1 2",
        "-3",
        "1//2",
        "(" * 150,
        "1+" * 101 + "1",
        "٣+1",
    ],
)
def test_anything_but_plain_arithmetic_is_refused(text):
    with pytest.raises(ValueError):
        evaluate_expression(text)


def test_a_question_puts_the_calculation_into_a_chat_message_and_counts_the_last_number():
    task = Arithmetic(question="What is {}?", operations=["-"], min_operand=7, max_operand=12)
    example = task.train_example(0)
    left, right = (int(number) for number in re.findall(r"\d+", example.prompt[0]["content"]))
    assert example.prompt == [{"role": "user", "content": f"What is {left} - {right}?"}]
    assert task.rewards[0](f"That is {left} - {right} = {left - right}.", example) == 1.0


def test_a_question_without_a_place_for_the_calculation_is_refused():
    with pytest.raises(ConfigurationError, match=r"question must hold \{\} once"):
        Arithmetic(question="What is it?")
