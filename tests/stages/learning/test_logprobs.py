"""Log-probs at the sampling temperature, without whole logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.learning.logprobs import logprobs_from_hidden, logprobs_from_logits


def test_scored_at_the_sampling_temperature_the_ratio_of_equal_policies_is_one():
    """huggingface/trl#4159."""
    logits, token = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    sampled, _ = logprobs_from_logits(logits, token, 0.6)
    assert float(sampled) == pytest.approx(-0.202573, abs=1e-5)
    assert float(logprobs_from_logits(logits, token)[0]) == pytest.approx(-0.407606, abs=1e-5)
    hidden, weight = torch.eye(3)[:1], torch.tensor([[2.0, 0, 0], [1.0, 0, 0], [0.0, 0, 0]])
    scored, _ = logprobs_from_hidden(hidden, weight, token, 0.6)
    assert float((scored - sampled).exp()) == pytest.approx(1.0, abs=1e-6)


def test_each_token_has_its_own_temperature():
    logits, labels = torch.randn(3, 7, dtype=torch.float64), torch.tensor([1, 2, 3])
    temperatures = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    together, _ = logprobs_from_logits(logits, labels, temperatures)
    apart = [logprobs_from_logits(logits[i : i + 1], labels[i : i + 1], float(temperatures[i]))[0] for i in range(3)]
    torch.testing.assert_close(together, torch.cat(apart))


def test_greedy_tokens_are_refused():
    with pytest.raises(ValueError, match="temperature is 0"):
        logprobs_from_logits(torch.zeros(1, 3), torch.tensor([0]), 0)


@settings(max_examples=25, deadline=None)
@given(num_tokens=st.integers(0, 9), chunk=st.integers(1, 10), seed=st.integers(0, 5), entropy=st.booleans())
def test_chunks_give_the_values_and_gradients_of_whole_logits(num_tokens, chunk, seed, entropy):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731 - a name for a draw
    hidden, weight = draw(num_tokens, 6).requires_grad_(), draw(11, 6).requires_grad_()
    labels = torch.randint(0, 11, (num_tokens,), generator=generator)
    temperature = torch.rand(num_tokens, generator=generator, dtype=torch.float64) + 0.5
    pull, push = draw(num_tokens), draw(num_tokens) * entropy

    def loss(found):
        return (pull * found[0] + push * found[1]).sum()

    whole = logprobs_from_logits(hidden @ weight.T, labels, temperature)
    chunked = logprobs_from_hidden(hidden, weight, labels, temperature, chunk_bytes=chunk * 4 * 11)
    for mine, want in zip(chunked, whole, strict=True):
        torch.testing.assert_close(mine, want)
    for mine, want in zip(
        torch.autograd.grad(loss(chunked), [hidden, weight]),
        torch.autograd.grad(loss(whole), [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(mine, want)


def test_nothing_as_large_as_the_logits_is_kept_or_made():
    num_tokens, vocabulary, width = 256, 2048, 8
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.zeros(num_tokens, dtype=torch.int64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        logp, _ = logprobs_from_hidden(hidden, weight, labels, chunk_bytes=16 * vocabulary * 4)
        logp.sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < num_tokens * vocabulary * 4 / 4


def test_a_forbidden_token_has_probability_zero_and_leaves_no_nan():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    logp, entropy = logprobs_from_logits(logits, torch.tensor([1]))
    (grad,) = torch.autograd.grad((logp + entropy).sum(), logits)
    assert bool(entropy.isfinite().all())
    assert bool(grad.isfinite().all())


def test_half_precision_states_are_scored_in_single_precision():
    hidden, weight = torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(9, 8).bfloat16().requires_grad_()
    logp, entropy = logprobs_from_hidden(hidden, weight, torch.arange(5))
    assert logp.dtype == entropy.dtype == torch.float32
    grads = torch.autograd.grad(logp.sum(), [hidden, weight])
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.bfloat16]
