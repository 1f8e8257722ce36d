"""Sparse MLA literally: one query token at a time against a mask over the whole cache."""

import jax
import jax.numpy as jnp
from jax import lax

_EXACT = lax.Precision.HIGHEST


def sparse_mla(
    q: jax.Array,
    latent: jax.Array,
    pool_ids: jax.Array,
    length: jax.Array,
    *,
    pool_size: int,
    scale: float,
    always_select_tail: bool,
    num_valid: jax.Array,
) -> jax.Array:
    """Arguments and result as in `api.sparse_mla`, with num_valid given."""
    slot = jnp.arange(latent.shape[1], dtype=jnp.int32)  # [S]

    def one_row(q, latent, pool_ids, length, num_valid):
        def query(inputs):
            t, q, pool_ids = inputs  # q [H, R], pool_ids [Z]
            position = length + t
            visible = jnp.any(slot[:, None] // pool_size == pool_ids, axis=1)  # [S]
            if always_select_tail:
                visible |= slot >= pool_size * ((position + 1) // pool_size)
            visible &= (slot <= position) & (t < num_valid)
            return _attend(q, latent, visible, scale)

        return lax.map(query, (jnp.arange(len(q), dtype=jnp.int32), q, pool_ids))

    return jax.vmap(one_row)(q, latent, pool_ids, length, num_valid)


def _attend(q, latent, visible, scale):
    """q [H, R], latent [S, R], visible [S] -> [H, R]; zeros where nothing is visible."""
    # Selected on both sides of the score: 0 * NaN is NaN, in the values and in gradients.
    q_used = jnp.where(jnp.any(visible), q, jnp.zeros_like(q)).astype(jnp.float32)
    used = jnp.where(visible[:, None], latent, jnp.zeros_like(latent)).astype(jnp.float32)
    scores = jnp.matmul(q_used, used.T, precision=_EXACT) * scale  # [H, S]
    exponent = scores - jnp.max(scores, axis=1, where=visible, initial=-jnp.inf, keepdims=True)
    mass = jnp.where(visible, jnp.exp(jnp.where(visible, exponent, 0.0)), 0.0)
    total = jnp.sum(mass, axis=1, keepdims=True)
    weights = mass / jnp.where(total == 0, 1.0, total)
    rounded = weights.astype(q.dtype).astype(jnp.float32)
    return jnp.matmul(rounded, used, precision=_EXACT).astype(q.dtype)
