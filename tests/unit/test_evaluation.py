"""Evaluation: accuracy and pass@k of one version, whatever else the engine says."""

from __future__ import annotations

import pytest
from fakes import DirectScorer, FirstNumber

from lit_asyncrl.errors import ConfigurationError, EngineError, StopRequested, WaitTimeoutError
from lit_asyncrl.evaluation import EvaluationBatch, EvaluationSet, Evaluator, pass_at_k
from lit_asyncrl.generation.scripted import ScriptedEngine
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.tasks.digits import ReverseDigits
from lit_asyncrl.types import Completion, Example, GenerationRequest, Prompt, SamplingParams


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (4, 2, 1, 0.5),  # the mean
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (8, 8, 1, 1.0),
    ],
)
def test_pass_at_k_is_the_unbiased_estimate(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def prompts(number: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(i, Example(f"p{i}", "a", "toy", i), i, (7, 8), 0, 0, 100 * i) for i in range(number))


def respond(value, version: int = 3):
    """Response `value(request)` in one token."""

    def answer(request: GenerationRequest, served: int) -> Completion:
        return Completion(request.request_id, [value(request)], [-0.5], [version], "stop")

    return answer


class Bench:
    def __init__(self, answer, *, scorer=None, timeout_s: float = 10.0) -> None:
        self.supervisor = Supervisor()
        self.engine = ScriptedEngine(answer)
        self.engine.start("", eos_token_ids=(1,), probe_ids=(0, 1), max_model_len=None)
        task = ReverseDigits(name="toy", rewards=[FirstNumber()])
        self.evaluator = Evaluator(
            self.engine,
            scorer or DirectScorer(),
            {"toy": task},
            lambda ids: " ".join(map(str, ids)),
            supervisor=self.supervisor,
            timeout_s=timeout_s,
        )

    def run(self, number: int = 4, num_samples: int = 1):
        return self.evaluator.run(EvaluationBatch("heldout", prompts(number), num_samples, SamplingParams(0.0, 4)))


def test_accuracy_and_reward_are_means_over_responses():
    result = Bench(respond(lambda r: 2 if r.request_id % 4 == 0 else 0)).run(number=4)
    assert result.version == 3
    assert result.metrics["accuracy"] == 0.25  # one of four is correct
    assert result.metrics["reward"] == 0.5  # (2 + 0 + 0 + 0) / 4
    assert result.metrics["reward/first"] == 0.5
    assert result.metrics["response_length"] == 1.0
    assert result.metrics["truncated_share"] == 0.0


def test_mean_at_n_and_pass_at_n_of_several_samples():
    # prompt 0: samples 1, 0; prompt 1: samples 0, 0 -> mean@2 = 1/4, pass@2 = 1/2
    result = Bench(respond(lambda r: int(r.seed == 0))).run(number=2, num_samples=2)
    assert result.metrics["accuracy"] == 0.25
    assert result.metrics["pass@2"] == 0.5


def test_a_single_sample_reports_no_pass_at_k():
    assert not any(key.startswith("pass@") for key in Bench(respond(lambda r: 1)).run().metrics)


def test_records_tell_prompt_answer_completion_and_version():
    record = Bench(respond(lambda r: 1)).run(number=1).records[0]
    assert (record["prompt"], record["answer"], record["completion"]) == ("p0", "a", "1")
    assert (record["correct"], record["policy_version"], record["finish_reason"]) == (True, 3, "stop")


def test_responses_of_two_versions_are_refused():
    def answer(request: GenerationRequest, served: int) -> Completion:
        return Completion(request.request_id, [1], [-0.5], [request.request_id % 2], "stop")

    with pytest.raises(EngineError, match=r"one policy version, got \[0, 1\]"):
        Bench(answer).run()


def test_answers_left_from_an_evaluation_that_was_broken_off_are_ignored():
    bench = Bench(respond(lambda r: 1))
    bench.engine.submit([GenerationRequest(999, (7,), SamplingParams(), 0, "evaluation")])
    assert bench.run(number=2).metrics["accuracy"] == 1.0


def test_a_prompt_whose_reward_failed_is_counted_and_left_out():
    metrics = Bench(respond(lambda r: 1), scorer=DirectScorer(skip=[0])).run(number=4).metrics
    assert metrics["failed_prompts"] == 1.0
    assert metrics["accuracy"] == 1.0


def test_training_requests_are_never_made():
    seen: list[str] = []

    def answer(request: GenerationRequest, served: int) -> Completion:
        seen.append(request.purpose)
        return respond(lambda r: 1)(request, served)

    bench = Bench(answer)
    bench.run()
    assert set(seen) == {"evaluation"}
    assert bench.engine.generated_tokens == 0


def test_samples_of_a_prompt_have_different_seeds_and_each_evaluation_the_same_ones():
    seeds: list[int] = []

    def answer(request: GenerationRequest, served: int) -> Completion:
        seeds.append(request.seed)
        return respond(lambda r: 1)(request, served)

    bench = Bench(answer)
    bench.run(number=3, num_samples=2)
    bench.run(number=3, num_samples=2)
    assert len(set(seeds[:6])) == 6
    assert seeds[:6] == seeds[6:]


class SilentEngine(ScriptedEngine):
    """Never answers."""

    def submit(self, requests):
        return


def test_an_evaluation_without_answers_ends_within_its_timeout():
    bench = Bench(respond(lambda r: 1), timeout_s=0.05)
    bench.evaluator._engine = SilentEngine(respond(lambda r: 1))
    bench.evaluator._engine._running = True
    with pytest.raises(WaitTimeoutError, match="4 of 4 responses missing"):
        bench.run()


def test_a_stop_request_ends_an_evaluation():
    bench = Bench(respond(lambda r: 1))
    bench.supervisor.request_stop("SIGTERM")
    with pytest.raises(StopRequested):
        bench.run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_prompts": 0}, r"data\.evaluation\.easy\.num_prompts must be at least 1, got 0"),
        ({"final_num_prompts": 0}, "final_num_prompts"),
        ({"num_samples": 0}, "num_samples"),
        ({"temperature": -1.0}, "temperature must be 0 or above"),
        ({"num_samples": 4}, "num_samples must be 1 at temperature 0, got 4"),
        ({"max_new_tokens": 0}, r"data\.evaluation\.easy\.max_new_tokens must be at least 1, got 0"),
    ],
)
def test_impossible_evaluation_sets_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        EvaluationSet(**arguments).check("easy")


def test_restricted_sampling_is_allowed_in_evaluation():
    heldout = EvaluationSet(num_samples=4, temperature=0.7, top_p=0.9, top_k=5)
    heldout.check("heldout")
    assert heldout.sampling(16) == SamplingParams(0.7, 16, 0.9, 5, 0.0)
