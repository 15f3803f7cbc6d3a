"""The scripted engine and requests that carry what was sampled of them before."""

from lit_asyncrl.generation.scripted import ScriptedEngine
from lit_asyncrl.types import Completion, GenerationRequest, SamplingParams

PARTIAL = Completion(8, [9, 8], [-0.1, -0.2], [0, 0], "abort")


def _engine() -> ScriptedEngine:
    engine = ScriptedEngine(lambda request, version: Completion(request.request_id, [3, 4, 5], [-1.0] * 3, [version] * 3, "stop"))
    engine.start("", eos_token_ids=[1], probe_ids=[3, 4], max_model_len=None)
    engine.begin_update(6, {})
    return engine


def _request(partial: Completion | None) -> GenerationRequest:
    return GenerationRequest(1, (3,), SamplingParams(max_new_tokens=3), 0, partial=partial)


def test_a_partial_comes_first_and_only_what_follows_is_counted():
    engine = _engine()
    engine.submit([_request(PARTIAL)])
    assert engine.completions(1.0) == [Completion(1, [9, 8, 5], [-0.1, -0.2, -1.0], [0, 0, 6], "stop")]
    assert engine.generated_tokens == 1


def test_answers_that_were_not_taken_are_partial():
    engine = _engine()
    engine.submit([_request(None)])
    assert engine.partial_completions() == [Completion(1, [3, 4, 5], [-1.0] * 3, [6] * 3, "abort")]
    engine.completions(1.0)
    assert engine.partial_completions() == []


def test_a_paused_request_keeps_its_partial():
    engine = _engine()
    engine.pause()
    engine.submit([_request(PARTIAL)])
    assert engine.partial_completions() == [Completion(1, [9, 8], [-0.1, -0.2], [0, 0], "abort")]
