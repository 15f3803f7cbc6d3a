"""PromptSource: the i-th prompt is a function of the seed alone, and nothing is lost or sent twice over a checkpoint."""

from __future__ import annotations

import pytest
from policies import PACKAGED

from lit_asyncrl.errors import CheckpointError, ConfigurationError, DataError
from lit_asyncrl.generation.rollout import sample_seed
from lit_asyncrl.policy import load_tokenizer
from lit_asyncrl.seeds import derive_seed
from lit_asyncrl.tasks.digits import ReverseDigits
from lit_asyncrl.tasks.prompt_source import PromptSource, check_prompt_length, tokenize_prompt
from lit_asyncrl.types import Example


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(PACKAGED)


@pytest.fixture
def make_source(tokenizer):
    def make(num_train: int = 5, **changes) -> PromptSource:
        task = ReverseDigits(3, 6, num_train=num_train)
        return PromptSource(task, tokenizer, **({"seed": 0, "max_new_tokens": 8, "context": 64} | changes))

    return make


def _identities(prompts):
    return [(p.group_id, p.source_index, p.epoch, p.attempt, p.seed) for p in prompts]


def test_two_sources_of_one_seed_give_the_same_prompts(make_source):
    assert make_source().next_prompts(8) == make_source().next_prompts(8)


def test_how_many_are_asked_for_at_once_does_not_matter(make_source):
    one, other = make_source(), make_source()
    assert one.next_prompts(7) == [p for n in (1, 4, 2) for p in other.next_prompts(n)]


def test_epochs_follow_each_other_with_rising_group_ids(make_source):
    prompts = make_source(num_train=3).next_prompts(7)
    assert [p.source_index for p in prompts] == [0, 1, 2, 0, 1, 2, 0]
    assert [p.epoch for p in prompts] == [0, 0, 0, 1, 1, 1, 2]
    assert [p.group_id for p in prompts] == list(range(7))


def test_the_source_ends_after_its_last_epoch(make_source):
    source = make_source(num_train=3, max_epochs=2)
    assert len(source.next_prompts(10)) == 6
    assert source.next_prompts(1) == []


def test_seeds_differ_by_prompt_and_by_epoch(make_source):
    seeds = [p.seed for p in make_source(num_train=5).next_prompts(20)]
    assert len(set(seeds)) == 20


def test_seeds_differ_by_the_run_s_seed(make_source):
    assert make_source(seed=0).next_prompts(1)[0].seed != make_source(seed=1).next_prompts(1)[0].seed


def test_samples_of_a_group_have_different_seeds(make_source):
    prompts = make_source().next_prompts(10)
    seeds = {sample_seed(p, i) for p in prompts for i in range(8)}
    assert len(seeds) == 80
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_derived_seed_is_the_same_on_every_machine():
    assert derive_seed(0, "reverse_digits", 3, 1, 0) == derive_seed(0, "reverse_digits", 3, 1, 0)
    assert derive_seed(1, 23) != derive_seed(12, 3)  # parts are separated, not concatenated
    assert 0 <= derive_seed("x") < 2**63


def test_a_resumed_source_sends_outstanding_prompts_again_with_their_identity(make_source):
    source = make_source()
    sent = source.next_prompts(4)
    resumed = make_source()
    resumed.load_state_dict(source.state_dict([sent[1], sent[3]]))
    assert _identities(resumed.next_prompts(2)) == _identities([sent[1], sent[3]])


def test_a_resumed_source_goes_on_where_the_other_stopped(make_source):
    source = make_source()
    source.next_prompts(4)
    resumed = make_source()
    resumed.load_state_dict(source.state_dict())
    assert resumed.next_prompts(3) == source.next_prompts(3)


def test_requeued_prompts_survive_a_second_checkpoint(make_source):
    source = make_source()
    sent = source.next_prompts(4)
    second = make_source()
    second.load_state_dict(source.state_dict(sent))
    again = second.next_prompts(1)
    third = make_source()
    third.load_state_dict(second.state_dict(again))
    assert _identities(third.next_prompts(5))[:4] == _identities(sent)


def test_a_checkpoint_in_the_last_epoch_keeps_the_end(make_source):
    source = make_source(num_train=3, max_epochs=1)
    source.next_prompts(2)
    resumed = make_source(num_train=3, max_epochs=1)
    resumed.load_state_dict(source.state_dict())
    assert len(resumed.next_prompts(5)) == 1


def test_a_prompt_that_leaves_no_room_for_the_response_is_refused(make_source):
    with pytest.raises(ConfigurationError, match=r"max_new_tokens must fit the model's context of 10 tokens"):
        make_source(context=10).next_prompts(5)


def test_a_prompt_that_just_fits_is_taken():
    check_prompt_length([0] * 6, Example("x", "y", "toy", 0), max_new_tokens=4, context=10)


def test_an_empty_prompt_is_refused(tokenizer):
    with pytest.raises(DataError, match="example 7 of task 'toy' has no tokens"):
        tokenize_prompt(tokenizer, Example("", "y", "toy", 7))


def test_a_character_the_tokenizer_does_not_know_is_refused(tokenizer):
    with pytest.raises(DataError, match="does not know"):
        tokenize_prompt(tokenizer, Example("r1\u4e002=", "y", "toy", 0))


def test_chat_messages_need_a_chat_template(tokenizer):
    with pytest.raises(ConfigurationError, match="chat template"):
        tokenize_prompt(tokenizer, Example([{"role": "user", "content": "r12="}], "21", "toy", 0))


# --- refill ---------------------------------------------------------------------------------------------------------------


def settle(source: PromptSource, group_id: int, trained: bool = False) -> list[int]:
    """Group ids under which the prompt is sent again."""
    again: list[int] = []
    source.settle(group_id, trained=trained, on_retry=again.append)
    return again


def test_a_dropped_group_is_followed_by_the_next_prompt_by_default(make_source):
    source = make_source()
    source.next_prompts(2)
    assert settle(source, 0) == []
    assert source.next_prompts(1)[0].source_index == 2


def test_a_dropped_prompt_is_sent_again_with_other_seeds_until_its_tries_are_used(make_source):
    source = make_source(refill="same_prompt", max_tries=3)
    first, _ = source.next_prompts(2)
    assert settle(source, 0) == [2]
    second, other = source.next_prompts(2)
    assert (second.group_id, second.source_index, second.attempt) == (2, 0, 1)
    assert (other.group_id, other.source_index) == (3, 2)
    assert settle(source, 2) == [4]
    (third,) = source.next_prompts(1)
    assert third.attempt == 2
    assert len({first.seed, second.seed, third.seed}) == 3
    assert settle(source, 4) == []  # a hard prompt is not sent for ever


def test_a_trained_prompt_is_not_sent_again(make_source):
    source = make_source(refill="same_prompt")
    source.next_prompts(1)
    assert settle(source, 0, trained=True) == []
    assert settle(source, 0) == []


def test_a_source_that_has_ended_goes_on_when_a_prompt_is_sent_again(make_source):
    source = make_source(num_train=2, max_epochs=1, refill="same_prompt")
    assert not source.ended
    source.next_prompts(5)
    assert source.ended
    settle(source, 1)
    assert not source.ended
    assert [p.source_index for p in source.next_prompts(5)] == [1]
    assert source.ended


def test_a_resumed_source_still_sends_dropped_prompts_again(make_source):
    source = make_source(refill="same_prompt")
    sent = source.next_prompts(3)
    settle(source, 0)
    resumed = make_source(refill="same_prompt")
    resumed.load_state_dict(source.state_dict([sent[2]]))
    assert settle(resumed, 1) == [4]
    assert [(p.group_id, p.source_index) for p in resumed.next_prompts(3)] == [(2, 2), (3, 0), (4, 1)]


def test_responses_in_flight_do_not_go_on_under_another_prompt(tokenizer, make_source):
    source = make_source()
    state = source.state_dict(source.next_prompts(3)[1:])
    other = PromptSource(ReverseDigits(7, 7, num_train=5), tokenizer, seed=0, max_new_tokens=8, context=64)
    with pytest.raises(CheckpointError, match=r"data\.task must give the prompts of the checkpoint.*example 1 of task"):
        other.load_state_dict(state)
    assert [p.group_id for p in other.next_prompts(1)] == [0]  # nothing was taken over
    make_source().load_state_dict(state)
