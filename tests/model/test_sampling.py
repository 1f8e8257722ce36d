"""Sampling against distributions worked out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5next_jax import SamplingParams
from glm5next_jax.sampling import SamplerState, _kept, chosen_logprobs, sample

VOCAB = 12
LOGITS = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 2


def distribution(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """What tokens should come how often, in float64."""
    scaled = logits.astype(np.float64) / p.temperature
    order = np.argsort(-scaled, kind="stable")
    probs = np.exp(scaled - scaled.max())
    keep = order[: p.top_k] if p.top_k else order
    mass = probs[keep] / probs[keep].sum()
    before = np.cumsum(mass) - mass
    keep = keep[(before < p.top_p) & (mass >= p.min_p * mass[0])]
    out = np.zeros_like(probs)
    out[keep] = probs[keep] / probs[keep].sum()
    return out


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=1.0),
        dict(temperature=0.5),
        dict(temperature=1.7, top_k=3),
        dict(temperature=1.0, top_p=0.7),
        dict(temperature=1.0, min_p=0.2),
        dict(temperature=1.3, top_k=8, top_p=0.8, min_p=0.1),
        dict(temperature=1.0, top_p=1e-6),
        dict(temperature=1.0, top_k=1),
        dict(temperature=1.0, top_k=1000),
    ],
    ids=str,
)
def test_frequencies(params):
    n = 4000
    sampler = SamplerState.from_params([SamplingParams(**params, seed=s) for s in range(n)])
    tokens = jax.jit(sample)(
        jnp.tile(jnp.asarray(LOGITS), (n, 1)), sampler, jnp.zeros(n, jnp.int32)
    )
    counts = np.bincount(tokens, minlength=VOCAB) / n
    want = distribution(LOGITS, SamplingParams(**params))
    assert (counts[want == 0] == 0).all()
    # Five standard deviations of a count, fixed seeds.
    assert (np.abs(counts - want) <= 5 * np.sqrt(want * (1 - want) / n)).all()


def test_greedy_takes_the_lowest_id_on_a_tie():
    logits = jnp.asarray([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    sampler = SamplerState.from_params([SamplingParams()] * 2)
    assert sample(logits, sampler, jnp.zeros(2, jnp.int32)).tolist() == [1, 0]


def test_rows_do_not_see_each_other():
    """A row's token depends on its own seed and step, whoever shares the batch."""
    logits = jax.random.normal(jax.random.key(0), (4, VOCAB))
    params = [SamplingParams(temperature=1.0, seed=s) for s in (1, 2, 3)] + [SamplingParams()]
    step = jnp.asarray([0, 5, 9, 2], jnp.int32)
    together = sample(logits, SamplerState.from_params(params), step)
    for row in range(4):
        alone = sample(
            logits[row : row + 1], SamplerState.from_params([params[row]]), step[row : row + 1]
        )
        assert alone[0] == together[row]


def test_seed_and_step_both_matter():
    n = 64
    logits = jnp.zeros((n, VOCAB))
    same = SamplerState.from_params([SamplingParams(temperature=1.0, seed=4)] * n)
    by_step = sample(logits, same, jnp.arange(n, dtype=jnp.int32))
    by_seed = sample(
        logits,
        SamplerState.from_params([SamplingParams(temperature=1.0, seed=s) for s in range(n)]),
        jnp.zeros(n, jnp.int32),
    )
    again = sample(logits, same, jnp.zeros(n, jnp.int32))
    assert len(set(by_step.tolist())) > VOCAB // 2
    assert len(set(by_seed.tolist())) > VOCAB // 2
    assert len(set(again.tolist())) == 1


def test_top_p_of_one_keeps_every_token():
    """Over 150,000 tokens the float32 sum of probabilities reaches 1 long before the last token."""
    vocab = 154880
    logits = 4 * jax.random.normal(jax.random.key(0), (1, vocab))
    keep_all = SamplerState.from_params([SamplingParams(temperature=1.0)])
    assert bool(_kept(logits, keep_all).all())
    nearly = SamplerState.from_params([SamplingParams(temperature=1.0, top_p=0.9999)])
    assert 1000 < int(_kept(logits, nearly).sum()) < vocab


def test_the_smallest_temperature_is_greedy():
    logits = jax.random.normal(jax.random.key(2), (1, VOCAB)) * 30
    sampler = SamplerState.from_params([SamplingParams(temperature=2e-38, seed=1)])
    assert sample(logits, sampler, jnp.zeros(1, jnp.int32))[0] == jnp.argmax(logits)


def test_logprobs():
    logits = jax.random.normal(jax.random.key(1), (3, VOCAB)) * 3
    tokens = jnp.asarray([0, 5, 11])
    exact = np.asarray(logits, np.float64)
    want = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    got = chosen_logprobs(logits, tokens)
    np.testing.assert_allclose(got, want[np.arange(3), np.asarray(tokens)], atol=1e-6)


@pytest.mark.parametrize(
    "params, message",
    [
        (dict(temperature=-1.0), "temperature must be finite, >= 0, got -1.0"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(temperature="hot"), "temperature"),
        (dict(top_k=-1), "top_k must be an integer in 0..2**31-1"),
        (dict(top_k=1.5), "top_k"),
        (dict(top_k=2**31), "top_k"),
        (dict(top_p=0.0), "top_p must be in (0, 1]"),
        (dict(top_p=1.1), "top_p"),
        (dict(min_p=1.0), "min_p must be in [0, 1)"),
        (dict(seed=-1), "seed must be an integer in 0..2**32-1"),
        (dict(seed=2**32), "seed"),
        (dict(logprobs=3), "logprobs must be a bool"),
    ],
    ids=str,
)
def test_refused(params, message):
    with pytest.raises(ValueError) as error:
        SamplingParams(**params)
    assert message in str(error.value)
