import torch

from lit_asyncrl.generation.sampling import Restriction, request_uniforms, restrict, sample_from_probs, sample_tokens


def _restriction(top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Restriction:
    return Restriction(torch.tensor([top_p]), torch.tensor([top_k]), torch.tensor([min_p]))


def test_uniforms_of_a_longer_request_begin_with_those_of_a_shorter_one():
    assert request_uniforms(7, 5).tolist() == request_uniforms(7, 50)[:5].tolist()


def test_uniforms_differ_between_neighbouring_seeds():
    assert request_uniforms(7, 5).tolist() != request_uniforms(8, 5).tolist()


def test_inverse_cdf_returns_the_id_whose_interval_holds_the_uniform():
    # Cumulative masses 0.25, 0.75, 1: 0.2 -> 0, 0.25 -> 1 (intervals are half-open), 0.74 -> 1, 0.76 -> 2.
    probs = torch.tensor([[0.25, 0.5, 0.25]]).expand(4, 3)
    assert sample_from_probs(probs, torch.tensor([0.2, 0.25, 0.74, 0.76], dtype=torch.float64)).tolist() == [0, 1, 1, 2]


def test_no_uniform_samples_a_token_of_probability_zero():
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(4, 5)
    uniforms = torch.tensor([0.0, 0.3, 0.9999999, 1.0 - 2.0**-53], dtype=torch.float64)
    assert set(sample_from_probs(probs, uniforms).tolist()) <= {1, 3}


def test_top_k_keeps_the_k_most_probable_ids():
    kept = restrict(torch.tensor([[0.1, 0.4, 0.2, 0.3]]), _restriction(top_k=2))
    assert kept.tolist() == [[0.0, torch.tensor(0.4).item(), 0.0, torch.tensor(0.3).item()]]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    # Descending 0.4, 0.3, 0.2, 0.1; before them 0, 0.4, 0.7, 0.9: with 0.6 the first two stay.
    kept = restrict(torch.tensor([[0.1, 0.4, 0.2, 0.3]]), _restriction(top_p=0.6))
    assert (kept > 0).tolist() == [[False, True, False, True]]


def test_min_p_cuts_relative_to_the_most_probable_id():
    # 0.6 * 0.4 = 0.24: only 0.4 and 0.3 reach it.
    kept = restrict(torch.tensor([[0.1, 0.4, 0.2, 0.3]]), _restriction(min_p=0.6))
    assert (kept > 0).tolist() == [[False, True, False, True]]


def test_top_p_zero_keeps_the_most_probable_id():
    kept = restrict(torch.tensor([[0.1, 0.4, 0.2, 0.3]]), _restriction(top_p=0.0))
    assert (kept > 0).tolist() == [[False, True, False, False]]


def test_logprobs_of_restricted_sampling_are_those_of_the_unrestricted_distribution():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    ids, logprobs = sample_tokens(
        logits, torch.ones(1), torch.tensor([0.0], dtype=torch.float64), restriction=_restriction(top_k=1)
    )
    assert ids.tolist() == [1]
    torch.testing.assert_close(logprobs, torch.tensor([0.4]).log())


def test_sampled_frequencies_follow_the_tempered_softmax():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5])
    draws = 20_000
    expected = torch.softmax(logits / 0.7, dim=-1).double() * draws
    ids, _ = sample_tokens(logits.expand(draws, 5), torch.full((draws,), 0.7), request_uniforms(3, draws))
    observed = torch.bincount(ids, minlength=5).double()
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded with probability 0.001
