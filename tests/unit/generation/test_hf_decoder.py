from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from lit_asyncrl.generation.hf_decoder import SlotDecoder
from lit_asyncrl.policy import load_model
from lit_asyncrl.types import Completion, GenerationRequest, SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(tiny_models.save_qwen3(tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="module", params=["qwen3_tied", "llama_untied", "qwen3_eager"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "llama_untied":
        return load_model(tiny_models.save_llama(folder))
    return load_model(tiny_models.save_qwen3(folder), attn_implementation="eager" if "eager" in request.param else "sdpa")


def _decoder(model: Any, num_slots: int = 4) -> SlotDecoder:
    return SlotDecoder(model, num_slots=num_slots, eos_token_ids=tiny_models.EOS_IDS, max_model_len=128)


def _requests(count: int, temperature: float = 1.0, max_new_tokens: int = 20) -> list[GenerationRequest]:
    """Prompts of lengths 1 to 6, budgets spread from 3 to `max_new_tokens`."""
    return [
        GenerationRequest(
            request_id=i,
            prompt_ids=tuple(3 + (i * 7 + j * 5) % 17 for j in range(1 + i % 6)),
            sampling=SamplingParams(temperature=temperature, max_new_tokens=3 + (i * 11) % (max_new_tokens - 2)),
            seed=1000 + i,
        )
        for i in range(count)
    ]


def _run(decoder: SlotDecoder, requests: list[GenerationRequest]) -> dict[int, Completion]:
    decoder.submit(requests)
    finished: dict[int, Completion] = {}
    for _ in range(10_000):
        if not decoder.has_work:
            return finished
        finished |= {completion.request_id: completion for completion in decoder.step(version=0)}
    raise AssertionError("the decoder does not finish")


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_recorded_logprobs_equal_a_plain_forward_although_slots_are_refilled(any_model: Any, temperature: float):
    requests = _requests(30, temperature)
    completions = _run(_decoder(any_model), requests)
    for request in requests:
        completion = completions[request.request_id]
        expected = tiny_models.token_logprobs(any_model, request.prompt_ids, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.behavior_logprobs), expected, atol=1e-4, rtol=0)


def test_sampled_tokens_do_not_depend_on_the_number_of_slots(model: Any):
    tokens = [
        {i: completion.token_ids for i, completion in _run(_decoder(model, num_slots), _requests(30)).items()}
        for num_slots in (2, 5, 64)
    ]
    assert tokens[0] == tokens[1] == tokens[2]


def test_greedy_decoding_equals_generate(any_model: Any):
    requests = _requests(6, temperature=0.0)
    completions = _run(_decoder(any_model), requests)
    for request in requests:
        prompt = torch.tensor([request.prompt_ids])
        generated = any_model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request.sampling.max_new_tokens,
            eos_token_id=list(tiny_models.EOS_IDS),
            pad_token_id=0,
        )
        assert completions[request.request_id].token_ids == generated[0, prompt.shape[1] :].tolist()


def test_greedy_logprobs_are_those_of_temperature_one(model: Any):
    request = GenerationRequest(0, (5, 6), SamplingParams(temperature=0.0, max_new_tokens=5), seed=0)
    completion = _run(_decoder(model), [request])[0]
    expected = tiny_models.token_logprobs(model, request.prompt_ids, completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.behavior_logprobs), expected, atol=1e-4, rtol=0)


def test_finish_reason_says_whether_an_end_of_sequence_id_was_sampled(model: Any):
    completions = _run(_decoder(model), _requests(60)).values()
    for completion in completions:
        ends = [token in tiny_models.EOS_IDS for token in completion.token_ids]
        assert not any(ends[:-1])
        assert completion.finish_reason == ("stop" if ends[-1] else "length")
    assert {completion.token_ids[-1] for completion in completions} >= set(tiny_models.EOS_IDS)


def test_truncated_responses_have_exactly_the_budget(model: Any):
    requests = _requests(60)
    completions = _run(_decoder(model), requests)
    truncated = [request for request in requests if completions[request.request_id].finish_reason == "length"]
    assert truncated
    assert all(len(completions[r.request_id].token_ids) == r.sampling.max_new_tokens for r in truncated)


def test_members_of_a_group_differ_by_their_seeds(model: Any):
    group = [GenerationRequest(i, (5, 6, 7), SamplingParams(max_new_tokens=12), seed=i) for i in range(8)]
    completions = _run(_decoder(model, num_slots=8), group)
    assert len({tuple(completion.token_ids) for completion in completions.values()}) > 4


def test_a_long_response_does_not_block_the_slots_of_short_ones(model: Any):
    candidates = [GenerationRequest(i, (5,), SamplingParams(max_new_tokens=60), seed=i) for i in range(16)]
    lengths = {i: len(completion.token_ids) for i, completion in _run(_decoder(model, num_slots=16), candidates).items()}
    long = GenerationRequest(0, (5,), SamplingParams(max_new_tokens=60), seed=max(lengths, key=lambda i: lengths[i]))
    assert max(lengths.values()) > 10
    short = [GenerationRequest(i, (6,), SamplingParams(max_new_tokens=1), seed=i) for i in range(1, 11)]
    decoder = _decoder(model, num_slots=2)
    decoder.submit([long, *short])
    finished = [completion.request_id for _ in range(10) for completion in decoder.step(version=0)]
    assert finished == list(range(1, 11))


def test_every_token_carries_the_version_of_the_step_that_sampled_it(model: Any):
    decoder = _decoder(model)
    decoder.submit([GenerationRequest(0, (5, 6), SamplingParams(temperature=0.0, max_new_tokens=6), seed=0)])
    finished = [completion for version in (3, 3, 4, 6, 6, 7) for completion in decoder.step(version)]
    assert finished[0].token_versions == [3, 3, 4, 6, 6, 7][: len(finished[0].token_ids)]


def test_equal_prompts_are_prefilled_once(model: Any):
    shapes: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        decoder = _decoder(model)
        decoder.submit([GenerationRequest(i, (5, 6, 7), SamplingParams(max_new_tokens=4), seed=i) for i in range(4)])
        decoder.step(version=0)
    finally:
        hook.remove()
    assert shapes == [(1, 2), (4, 1)]  # one prefill of the prompt but its last token, one step of four rows


def test_requests_of_one_message_are_admitted_in_the_order_of_their_ids(model: Any):
    decoder = _decoder(model, num_slots=1)
    decoder.submit([GenerationRequest(i, (5,), SamplingParams(max_new_tokens=1), seed=0) for i in (3, 1, 2)])
    assert [completion.request_id for _ in range(3) for completion in decoder.step(version=0)] == [1, 2, 3]


def test_the_number_of_sampled_tokens_includes_unfinished_responses(model: Any):
    decoder = _decoder(model)
    decoder.submit([GenerationRequest(i, (5, 6), SamplingParams(temperature=0.0, max_new_tokens=50), seed=0) for i in range(3)])
    decoder.step(version=0)
    assert decoder.num_tokens == 3


def test_prompts_computed_ahead_of_their_slot_are_not_used_after_the_weights_have_changed(tmp_path: Path):
    model = load_model(tiny_models.save_qwen3(tmp_path))
    decoder = _decoder(model, num_slots=1)
    prompts = [(5, 6, 7, 8), (9, 10, 11, 12), (4, 13, 14, 15)]
    decoder.submit([GenerationRequest(i, prompts[i], SamplingParams(max_new_tokens=1), seed=i) for i in range(3)])
    decoder.step(version=0)  # computes the prompts of requests 1 and 2 as well
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    completions = [*decoder.step(version=1), *decoder.step(version=1)]
    for completion in completions:
        expected = tiny_models.token_logprobs(model, prompts[completion.request_id], completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.behavior_logprobs), expected, atol=1e-4, rtol=0)


def test_prompts_next_in_the_queue_are_computed_in_one_forward(model: Any):
    shapes: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        decoder = _decoder(model, num_slots=1)
        decoder.submit([GenerationRequest(i, (5, 6 + i, 7), SamplingParams(max_new_tokens=1), seed=i) for i in range(3)])
        for _ in range(3):
            decoder.step(version=0)
    finally:
        hook.remove()
    assert shapes == [(3, 2), (1, 1), (1, 1), (1, 1)]


def test_a_long_prompt_next_in_the_queue_does_not_disturb_short_ones(model: Any):
    requests = _requests(6)
    requests[4] = replace(requests[4], prompt_ids=tuple([5, 6] * 40))
    together = _run(_decoder(model, num_slots=2), requests)
    for request in requests:
        assert together[request.request_id].token_ids == _run(_decoder(model), [request])[request.request_id].token_ids


def test_a_decoder_that_recomputes_does_so_once_for_each_change_of_the_weights(model: Any):
    shapes: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        decoder = SlotDecoder(model, num_slots=4, eos_token_ids=(), max_model_len=128, recomputes=True)
        decoder.submit([GenerationRequest(i, (5, 6, 7), SamplingParams(temperature=0.0, max_new_tokens=4), i) for i in range(2)])
        for version in (3, 3, 5, 5):
            decoder.step(version)
    finally:
        hook.remove()
    # Prompt; two steps; then the prompt and two tokens but the last, equal for both (greedy), so computed once; two steps.
    assert shapes == [(1, 2), (2, 1), (2, 1), (1, 4), (2, 1), (2, 1)]


def _cut(completion: Completion, count: int) -> Completion:
    """Its first `count` tokens, with log-probs and versions that no model gives: to be recognised, and left as they are."""
    return Completion(99, completion.token_ids[:count], [-50.0 - i for i in range(count)], [7] * count, "abort")


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("num_slots", [3, 64])
def test_a_continued_response_has_the_tokens_of_the_unbroken_one(any_model: Any, count: int, num_slots: int):
    requests = _requests(30)
    unbroken = _run(_decoder(any_model), requests)
    long_enough = [request for request in requests if len(unbroken[request.request_id].token_ids) > count]
    assert len(long_enough) >= 3
    continued = [replace(r, partial=_cut(unbroken[r.request_id], count)) for r in long_enough]
    decoder = _decoder(any_model, num_slots)
    answers = _run(decoder, continued)
    for request in long_enough:
        answer, whole = answers[request.request_id], unbroken[request.request_id]
        assert (answer.token_ids, answer.finish_reason) == (whole.token_ids, whole.finish_reason)
        assert answer.behavior_logprobs[:count] == [-50.0 - i for i in range(count)]
        assert answer.token_versions == [7] * count + [0] * (len(whole.token_ids) - count)
        torch.testing.assert_close(
            torch.tensor(answer.behavior_logprobs[count:]), torch.tensor(whole.behavior_logprobs[count:]), atol=1e-4, rtol=0
        )
    assert decoder.num_tokens == sum(len(unbroken[r.request_id].token_ids) - count for r in long_enough)


@pytest.mark.parametrize(
    ("token_ids", "reason"), [([5, 6, 1], "stop"), ([2], "stop"), ([5, 6, 7, 8], "length"), ([5, 6, 7, 8, 9], "length")]
)
def test_a_partial_that_has_ended_is_the_answer(model: Any, token_ids: list[int], reason: str):
    partial = Completion(3, token_ids, [-1.0] * len(token_ids), [4] * len(token_ids), "abort")
    decoder = _decoder(model)
    decoder.submit([GenerationRequest(0, (3,), SamplingParams(max_new_tokens=4), 0, partial=partial)])
    assert decoder.step(version=9) == [replace(partial, request_id=0, finish_reason=reason)]
    assert (decoder.has_work, decoder.num_tokens) == (False, 0)


def test_increments_and_finished_responses_together_are_every_token_once(model: Any):
    requests = _requests(30)
    unbroken = _run(_decoder(model), requests)
    decoder = _decoder(model)
    carried = {r.request_id: min(2, len(unbroken[r.request_id].token_ids) - 1) for r in requests[::3]}
    decoder.submit(
        [
            replace(r, partial=_cut(unbroken[r.request_id], carried[r.request_id])) if carried.get(r.request_id) else r
            for r in requests
        ]
    )
    known = {r.request_id: unbroken[r.request_id].token_ids[: carried.get(r.request_id, 0)] for r in requests}
    steps = 0
    while decoder.has_work:
        for completion in decoder.step(version=0):
            assert completion.token_ids[: len(known[completion.request_id])] == known.pop(completion.request_id)
        steps += 1
        if steps % 3 == 0:
            increments = decoder.take_increments()
            ids = iter(increments.token_ids.tolist())
            for request_id, length in zip(increments.request_ids, increments.lengths, strict=True):
                known[request_id] = known[request_id] + [next(ids) for _ in range(length)]
            partials = {partial.request_id: partial.token_ids for partial in decoder.partial_completions()}
            assert partials == {request_id: ids for request_id, ids in known.items() if ids}
    assert known == {}
