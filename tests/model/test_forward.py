"""`forward`'s arguments: its logits modes, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5next_jax import Glm5NextConfig, forward, init_cache
from tests.model.models import random_model

CONFIG = Glm5NextConfig.tiny(
    num_hidden_layers=2,
    layer_types=("linear_attention", "indexed_attention"),
    mlp_layer_types=("dense", "dense"),
)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


def test_logits_modes(model):
    ids = np.arange(12).reshape(3, 4)
    num_valid = np.asarray([4, 2, 0])
    every, _ = forward(model, ids, num_valid=num_valid)
    last, cache = forward(model, ids, init_cache(CONFIG, 3, 8), num_valid, logits="last")
    np.testing.assert_allclose(last[0], every[0, 3], atol=1e-5)
    np.testing.assert_allclose(last[1], every[1, 1], atol=1e-5)
    np.testing.assert_array_equal(last[2], 0)  # nothing valid
    nothing, cache = forward(model, ids, cache, num_valid, logits="none")
    assert nothing is None
    assert cache.length.tolist() == [8, 4, 0]


def test_inside_a_users_own_jit_and_scan(model):
    """The functional cache is an ordinary carry."""
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12))
    want, _ = forward(model, ids)

    @jax.jit
    def chunked(chunks):
        def step(cache, chunk):
            logits, cache = forward(model, chunk, cache)
            return cache, logits

        return jax.lax.scan(step, init_cache(CONFIG, 2, 12), chunks)[1]

    got = chunked(jnp.asarray(ids.reshape(2, 3, 4).swapaxes(0, 1)))
    np.testing.assert_allclose(got.swapaxes(0, 1).reshape(want.shape), want, atol=1e-4)


REFUSED = [
    (dict(token_ids=[1, 2, 3]), "expected token_ids [B, T]"),
    (dict(token_ids=np.zeros((1, 0), int)), "expected token_ids [B, T] with B, T >= 1"),
    (dict(token_ids=[[1.0, 2.0]]), "expected integer token_ids"),
    (dict(token_ids=[[1, 128]]), "token_ids[0, 1]=128 is outside the vocabulary 0..127"),
    (dict(token_ids=[[1, 2], [-1, 3]]), "token_ids[1, 0]=-1 is outside the vocabulary"),
    (dict(token_ids=[[1, 2]], num_valid=[3]), "expected num_valid in 0..2, got [3]"),
    (dict(token_ids=[[1, 2]], num_valid=[1, 1]), "expected num_valid [B=1]"),
    (dict(token_ids=[[1, 2]], logits="first"), "expected logits to be one of"),
    (dict(token_ids=[[1, 2]], cache=init_cache(CONFIG, 2, 8)), "expected a cache of 1 rows"),
    (
        dict(token_ids=[[1] * 9], cache=init_cache(CONFIG, 1, 8)),
        "row 0 would hold 9 tokens, beyond the cache's capacity=8",
    ),
    (
        dict(token_ids=[[1]], cache=init_cache(Glm5NextConfig.tiny(), 1, 8)),
        "the cache was not made for this model by init_cache(model.config, ...)",
    ),
    (
        dict(token_ids=[[1]], cache=init_cache(CONFIG.replace(dtype="bfloat16"), 1, 8)),
        "layers[0].conv_state is bfloat16[1, 3, 3, 32], expected float32[1, 3, 3, 32]",
    ),
]


@pytest.mark.parametrize("arguments, message", REFUSED, ids=[m for _, m in REFUSED])
def test_refused(model, arguments, message):
    with pytest.raises(ValueError) as error:
        forward(model, **arguments)
    assert message in str(error.value)


def test_a_full_cache_refuses_the_next_token(model):
    _, cache = forward(model, [[1] * 8], init_cache(CONFIG, 1, 7))  # 7 is rounded up to 8
    with pytest.raises(ValueError, match="beyond the cache's capacity=8"):
        forward(model, [[1]], cache)


@pytest.mark.parametrize("sizes", [(0, 8), (1, 0)])
def test_empty_cache_is_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        init_cache(CONFIG, *sizes)
