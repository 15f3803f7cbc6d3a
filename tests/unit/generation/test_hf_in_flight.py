"""Responses in flight at a weight update, against plain transformers forwards: `keep`, `wait`, `restart`, and prompts ahead."""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest
import tiny_models
import torch

from lit_asyncrl.errors import ConfigurationError, WeightSyncError
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.types import Completion, GenerationRequest, Purpose, SamplingParams

Start = Callable[..., HFEngine]
TICK_ID = 10_000
BUDGET = 24
PROMPTS = [(5, 6, 7), (4, 9), (8,), (3, 11, 12, 13, 14), (15, 16, 17, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def models(folder: str) -> list[Any]:
    """Versions 0, 1, 2, ...: each far enough from the others that log-probs differ in the second digit."""
    versions = [load_model(folder) for _ in range(6)]
    for version, model in enumerate(versions):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * (version > 0) * torch.randn(parameter.shape, generator=generator))
    return versions


@pytest.fixture
def start(folder: str, models: list[Any]) -> Iterator[Start]:
    engines: list[HFEngine] = []

    def started(num_slots: int = 8, **settings: Any) -> HFEngine:
        engine = HFEngine(mode="inline", num_slots=num_slots, **settings)
        engines.append(engine)
        engine.start(folder, eos_token_ids=(1,), probe_ids=tiny_models.PROBE_IDS, max_model_len=64)
        _update(engine, models, 0)
        return engine

    yield started
    for engine in engines:
        engine.stop()


def _update(engine: HFEngine, models: Sequence[Any], version: int) -> None:
    engine.begin_update(version, named_weights(models[version]))
    engine.finish_update(10.0)


def _requests(number: int, purpose: Purpose = "train", first_id: int = 0) -> list[GenerationRequest]:
    return [
        GenerationRequest(i, PROMPTS[i % len(PROMPTS)], SamplingParams(max_new_tokens=BUDGET), 100 + i, purpose)
        for i in range(first_id, first_id + number)
    ]


class _Run:
    """Runs an engine step by step and collects completions by request id."""

    def __init__(self, engine: HFEngine, purpose: Purpose = "train") -> None:
        self.finished: dict[int, Completion] = {}
        self._engine = engine
        self._purpose: Purpose = purpose
        self._ticks = count(TICK_ID)

    def take(self) -> None:
        take = self._engine.completions if self._purpose == "train" else self._engine.evaluation_completions
        batch = take(10.0)
        assert batch, "no completion within the timeout"
        self.finished |= {completion.request_id: completion for completion in batch}

    def steps(self, number: int) -> None:
        """A request of one token takes exactly one decode step (given a free slot)."""
        for _ in range(number):
            tick = next(self._ticks)
            self._engine.submit([GenerationRequest(tick, (5,), SamplingParams(max_new_tokens=1), 0, self._purpose)])
            while tick not in self.finished:
                self.take()

    def responses(self, number: int) -> list[Completion]:
        """The first `number` requests' completions, in the order of their ids."""
        while not all(i in self.finished for i in range(number)):
            self.take()
        return [self.finished[i] for i in range(number)]


def _prompt(response: Completion) -> tuple[int, ...]:
    return PROMPTS[response.request_id % len(PROMPTS)]


def _spanning(responses: Sequence[Completion], after: int) -> list[Completion]:
    """Responses with more than `after` tokens."""
    chosen = [response for response in responses if len(response.token_ids) > after]
    assert len(chosen) >= 3, "the seeds must give responses that are long enough"
    return chosen


def _assert_plain_forward(models: Sequence[Any], response: Completion, tokens: slice = slice(None)) -> None:
    """Each token's log-prob is the one that its version's weights give in one forward over prompt and response."""
    plain = [tiny_models.token_logprobs(model, _prompt(response), response.token_ids) for model in models]
    expected = torch.stack([plain[version][t] for t, version in enumerate(response.token_versions)])
    torch.testing.assert_close(torch.tensor(response.behavior_logprobs)[tokens], expected[tokens], atol=1e-4, rtol=0)


def _mixed_logprobs(old: Any, new: Any, old_ids: Sequence[int], new_ids: Sequence[int]) -> torch.Tensor:
    """Log-probs of `new_ids[1:]` by weights `new`, over keys and values of `old_ids` that weights `old` have computed."""
    with torch.no_grad():
        cache = old(input_ids=torch.tensor([old_ids]), use_cache=True).past_key_values
        logits = new(input_ids=torch.tensor([new_ids[:-1]]), past_key_values=cache, use_cache=True).logits[0]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(new_ids)[1:, None]).squeeze(1)


# ---------------------------------------------------------------- an update in the middle of a response


@pytest.mark.parametrize("in_flight", ["keep", "restart"])
def test_tokens_around_an_update_carry_its_versions_and_those_before_it_the_old_logprobs(
    start: Start, models: list[Any], in_flight: str
):
    engine = start(in_flight=in_flight)
    run = _Run(engine)
    engine.submit(_requests(6))
    run.steps(5)
    _update(engine, models, 1)
    for response in _spanning(run.responses(6), 5):
        assert response.token_versions == [0] * 5 + [1] * (len(response.token_ids) - 5)
        _assert_plain_forward(models, response, slice(0, 5))


def test_keep_samples_with_new_weights_over_the_old_cache(start: Start, models: list[Any]):
    engine = start()
    run = _Run(engine)
    engine.submit(_requests(6))
    run.steps(5)
    _update(engine, models, 1)
    for response in _spanning(run.responses(6), 5):
        ids = [*_prompt(response), *response.token_ids]
        held = len(_prompt(response)) + 4  # the fifth token is fed, by the new weights, when the sixth is sampled
        expected = _mixed_logprobs(models[0], models[1], ids[:held], ids[held:])
        torch.testing.assert_close(torch.tensor(response.behavior_logprobs[5:]), expected, atol=1e-4, rtol=0)
        plain = tiny_models.token_logprobs(models[1], _prompt(response), response.token_ids)[5:]
        assert (plain - expected).abs().max() > 1e-3  # one version's forward would have been told apart


@pytest.mark.parametrize("purpose", ["train", "evaluation"])
def test_restart_samples_as_after_a_clean_prefill_under_the_new_weights(start: Start, models: list[Any], purpose: Purpose):
    engine = start(in_flight="restart")
    run = _Run(engine, purpose)
    engine.submit(_requests(6, purpose))
    run.steps(5)
    _update(engine, models, 1)
    for response in _spanning(run.responses(6), 5):
        _assert_plain_forward(models, response)


def test_restart_at_every_third_token_while_slots_are_refilled_gives_each_token_its_versions_logprob(
    start: Start, models: list[Any]
):
    engine = start(num_slots=4, in_flight="restart")
    run = _Run(engine)
    engine.submit(_requests(3))
    for version in range(1, 6):
        run.steps(3)
        _update(engine, models, version)
        engine.submit(_requests(3, first_id=3 * version))
    responses = run.responses(18)
    assert max(len(set(response.token_versions)) for response in responses) >= 3
    for response in responses:
        _assert_plain_forward(models, response)


def test_restart_keeps_the_remaining_budget_and_goes_on_in_the_random_stream(start: Start, models: list[Any]):
    uninterrupted = start()
    uninterrupted.submit(_requests(8))
    expected = [(r.token_ids, r.finish_reason) for r in _Run(uninterrupted).responses(8)]
    engine = start(num_slots=9, in_flight="restart")
    run = _Run(engine)
    engine.submit(_requests(8))
    for version in (1, 2):
        run.steps(4)
        engine.begin_update(version, named_weights(models[0]))  # the same weights: only the restart could make a difference
        engine.finish_update(10.0)
    responses = run.responses(8)
    assert [(r.token_ids, r.finish_reason) for r in responses] == expected
    assert any(len(r.token_ids) == BUDGET for r in responses)
    assert any(len(set(r.token_versions)) == 3 for r in responses)


def test_wait_ends_every_response_under_the_version_it_began_with(start: Start, models: list[Any]):
    engine = start(num_slots=4, in_flight="wait")
    run = _Run(engine)
    engine.submit(_requests(3))
    run.steps(2)
    engine.submit(_requests(5, first_id=3))
    engine.begin_update(1, named_weights(models[1]))
    engine.submit(_requests(4, first_id=8))
    assert engine.finish_update(10.0).version == 1
    responses = run.responses(12)
    assert [set(r.token_versions) for r in responses] == [{0}] * 3 + [{1}] * 9
    for response in responses:
        _assert_plain_forward(models, response)


def test_wait_finishes_running_evaluation_under_the_old_version_and_begins_none_before_the_new(start: Start, models: list[Any]):
    engine = start(in_flight="wait")
    run = _Run(engine, "evaluation")
    engine.submit(_requests(3, "evaluation"))
    run.steps(2)
    engine.begin_update(1, named_weights(models[1]))
    engine.submit(_requests(3, "evaluation", first_id=3))
    engine.finish_update(10.0)
    assert [set(r.token_versions) for r in run.responses(6)] == [{0}] * 3 + [{1}] * 3


@pytest.mark.parametrize("in_flight", ["keep", "wait", "restart"])
def test_an_update_with_nothing_in_flight_is_served_at_once(start: Start, models: list[Any], in_flight: str):
    engine = start(in_flight=in_flight)
    engine.begin_update(1, named_weights(models[1]))
    report = engine.finish_update(0.0)
    expected = tiny_models.token_logprobs(models[1], tiny_models.PROBE_IDS[:1], list(tiny_models.PROBE_IDS[1:]))
    torch.testing.assert_close(torch.tensor(report.probe_logprobs), expected, atol=1e-5, rtol=0)
    engine.submit(_requests(3))
    for response in _Run(engine).responses(3):
        assert set(response.token_versions) == {1}
        _assert_plain_forward(models, response)


# ---------------------------------------------------------------- waiting, pausing, time


def test_an_update_that_waits_too_long_is_an_error_and_finishes_later(start: Start, models: list[Any]):
    engine = start(in_flight="wait")
    run = _Run(engine)
    engine.submit(_requests(4))
    run.steps(1)
    engine.begin_update(1, named_weights(models[1]))
    with pytest.raises(WeightSyncError, match=r"version 1 within 0\.0 s.*in_flight: wait"):
        engine.finish_update(0.0)
    with pytest.raises(WeightSyncError, match=r"Version 2 must follow.*version 1"):
        engine.begin_update(2, named_weights(models[2]))
    assert engine.finish_update(10.0).version == 1
    assert {v for r in run.responses(4) for v in r.token_versions} == {0}


def test_weights_may_change_as_soon_as_a_waiting_update_has_begun(start: Start, models: list[Any]):
    engine = start(in_flight="wait")
    run = _Run(engine)
    engine.submit(_requests(4))
    run.steps(1)
    weights = {name: tensor.detach().clone() for name, tensor in named_weights(models[1]).items()}
    engine.begin_update(1, weights)
    for tensor in weights.values():
        tensor.zero_()
    expected = tiny_models.token_logprobs(models[1], tiny_models.PROBE_IDS[:1], list(tiny_models.PROBE_IDS[1:]))
    torch.testing.assert_close(torch.tensor(engine.finish_update(10.0).probe_logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pause_first", [True, False])
def test_wait_does_not_wait_for_paused_responses_which_then_go_on_as_restarted(
    start: Start, models: list[Any], pause_first: bool
):
    engine = start(in_flight="wait")
    run = _Run(engine)
    engine.submit(_requests(6))
    run.steps(5)
    if pause_first:
        engine.pause()
    engine.begin_update(1, named_weights(models[1]))
    if not pause_first:
        engine.pause()
    assert engine.finish_update(0.0).version == 1
    engine.resume()
    for response in _spanning(run.responses(6), 5):
        assert response.token_versions == [0] * 5 + [1] * (len(response.token_ids) - 5)
        _assert_plain_forward(models, response)


def test_wait_goes_on_decoding_after_a_pause_is_undone_during_it(start: Start, models: list[Any]):
    engine = start(in_flight="wait")
    run = _Run(engine, "evaluation")
    engine.submit([*_requests(3, "evaluation"), *_requests(3, first_id=3)])
    run.steps(2)
    engine.pause()
    engine.begin_update(1, named_weights(models[1]))  # evaluation is live and waited for
    engine.resume()
    engine.finish_update(10.0)
    assert [set(r.token_versions) for r in run.responses(3)] == [{0}] * 3
    training = _Run(engine)
    while len(training.finished) < 3:
        training.take()
    assert all(set(r.token_versions) == {1} for r in training.finished.values())  # none had a slot before the update


@pytest.mark.parametrize("in_flight", ["keep", "wait", "restart"])
def test_a_paused_response_that_goes_on_under_its_own_version_has_one_version(start: Start, models: list[Any], in_flight: str):
    engine = start(in_flight=in_flight)
    run = _Run(engine)
    engine.submit(_requests(6))
    run.steps(5)
    engine.pause()
    for version in (1, 0):
        _update(engine, models, version)
    engine.resume()
    for response in run.responses(6):
        assert set(response.token_versions) == {0}
        _assert_plain_forward(models, response)


def test_a_thread_that_decodes_and_one_that_waits_for_its_update_finish_together(start: Start, models: list[Any]):
    engine = start(num_slots=4, in_flight="wait")
    run = _Run(engine)
    engine.submit(_requests(60))
    thread = threading.Thread(target=run.responses, args=(60,))
    thread.start()
    for version in range(1, 6):
        _update(engine, models, version)
    thread.join(30.0)
    assert not thread.is_alive()
    responses = run.responses(60)
    assert all(len(set(response.token_versions)) == 1 for response in responses)
    assert len({response.token_versions[0] for response in responses}) > 1


# ---------------------------------------------------------------- prompts computed ahead


def _begun_after_an_update(engine: HFEngine, models: list[Any]) -> list[Completion]:
    """Of two slots one is live at the update; the first step has computed the prompts of those that begin after it."""
    live, *begun = _requests(5)
    tick = GenerationRequest(TICK_ID - 1, (5,), SamplingParams(max_new_tokens=1), 0)
    run = _Run(engine)
    engine.submit([live])
    engine.submit([tick])
    engine.submit(begun)
    while TICK_ID - 1 not in run.finished:
        run.take()
    assert 0 not in run.finished
    _update(engine, models, 1)
    responses = run.responses(5)[1:]
    assert all(set(response.token_versions) == {1} for response in responses)
    return responses


@pytest.mark.parametrize("in_flight", ["keep", "wait", "restart"])
@pytest.mark.parametrize("prefix_cache", ["salt", "reset"])
def test_no_prompt_of_old_weights_is_used_after_an_update(start: Start, models: list[Any], in_flight: str, prefix_cache: str):
    for response in _begun_after_an_update(start(num_slots=2, in_flight=in_flight, prefix_cache=prefix_cache), models):
        _assert_plain_forward(models, response)


@pytest.mark.parametrize("in_flight", ["keep", "wait", "restart"])
def test_prefix_cache_keep_uses_prompts_of_old_weights_after_an_update(start: Start, models: list[Any], in_flight: str):
    begun = _begun_after_an_update(start(num_slots=2, in_flight=in_flight, prefix_cache="keep"), models)
    mixed = [response for response in begun if len(_prompt(response)) > 1]
    assert len(mixed) == 3
    for response in mixed:
        ids = [*_prompt(response), *response.token_ids]
        held = len(_prompt(response)) - 1  # the prompt's last token is fed when the first token is sampled
        expected = _mixed_logprobs(models[0], models[1], ids[:held], ids[held:])
        torch.testing.assert_close(torch.tensor(response.behavior_logprobs), expected, atol=1e-4, rtol=0)
        plain = tiny_models.token_logprobs(models[1], _prompt(response), response.token_ids)
        assert (plain - expected).abs().max() > 1e-3


@pytest.mark.parametrize("setting", ["in_flight", "prefix_cache"])
def test_an_unknown_policy_is_refused_with_the_choices(setting: str):
    with pytest.raises(ConfigurationError, match=rf"engine\.{setting} must be one of .*keep.*, got 'drain'"):
        HFEngine(**{setting: "drain"})  # type: ignore[arg-type]
