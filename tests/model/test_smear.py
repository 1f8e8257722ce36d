"""Token smearing across calls. The fault to exclude: a chunk whose first token loses its
predecessor because the code asks how many tokens came in instead of what the state holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm5next_jax.smear import Smear

D = 32


@pytest.fixture(scope="module")
def smear():
    module = Smear(rngs=nnx.Rngs(0), dtype=jnp.float32, std=1.0)
    module.smear_lambda[...] = jnp.asarray([0.7])
    return module


def smeared(smear, x: np.ndarray) -> np.ndarray:
    """x [T, D] in float64: x_t + lambda sigmoid(w . x_t[:24]) x_{t-1}, nothing before x_0."""
    x = x.astype(np.float64)
    weight = np.asarray(smear.smear_gate.weight[...], np.float64)[0]
    gate = 0.7 / (1 + np.exp(-(x[:, :24] @ weight)))
    before = np.concatenate([np.zeros((1, x.shape[1])), x[:-1]])
    return x + gate[:, None] * before


@pytest.mark.parametrize(
    "cuts",
    [
        [8],  # whole
        [4, 4],  # the reported case: the second chunk has several tokens and a predecessor
        [1] * 8,  # token by token
        [1, 3, 1, 1, 2],
        [5, 0, 3],  # a call in which the row is idle
    ],
    ids=str,
)
def test_chunks_equal_the_whole(smear, cuts):
    x = np.random.default_rng(0).normal(size=(1, 8, D)).astype(np.float32)
    want = smeared(smear, x[0])
    state, start, got = jnp.zeros((1, D)), 0, []
    for n in cuts:
        chunk = np.full((1, 5 if n <= 5 else 8, D), np.nan, np.float32)  # padding is NaN
        chunk[:, :n] = x[:, start : start + n]
        y, state = smear(jnp.asarray(chunk), state, jnp.asarray([n], jnp.int32))
        got.append(np.asarray(y)[0, :n])
        start += n
    np.testing.assert_allclose(np.concatenate(got), want, rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(state[0], x[0, -1])


def test_the_first_token_of_a_sequence_has_no_predecessor(smear):
    x = jax.random.normal(jax.random.key(0), (2, 1, D))
    y, state = smear(x, jnp.zeros((2, D)), jnp.ones(2, jnp.int32))
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(state, x[:, 0])
