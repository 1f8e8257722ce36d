"""The k-pool indexer literally: tokens enter one at a time, queries are ranked one at a time."""

import jax
import jax.numpy as jnp
from jax import lax

_EXACT = lax.Precision.HIGHEST


def kpool_indexer(
    q: jax.Array,
    head_weights: jax.Array,
    k: jax.Array,
    gate: jax.Array,
    ape: jax.Array,
    index_pools: jax.Array,
    index_tail: jax.Array,
    length: jax.Array,
    *,
    num_selected: int,
    num_valid: jax.Array,
    first_query: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Arguments and results as in `api.kpool_indexer`, with num_valid given."""
    rows = jnp.stack([k, gate], axis=2).astype(index_tail.dtype)  # [B, T, 2, dI]

    def one_row(q, head_weights, rows, pools, tail, length, num_valid):
        pools, tail = _append(rows, ape, pools, tail, length, num_valid)
        return (
            _select(
                q,
                head_weights,
                pools,
                length + first_query,
                num_valid - first_query,
                len(ape),
                num_selected,
            ),
            pools,
            tail,
        )

    return jax.vmap(one_row)(q, head_weights, rows, index_pools, index_tail, length, num_valid)


def _append(rows, ape, pools, tail, length, num_valid):
    """rows [T, 2, dI], pools [NP, dI], tail [P-1, 2, dI] -> pools and tail after num_valid rows."""
    pool_size, capacity = len(ape), len(pools)
    slots = jnp.arange(pool_size - 1, dtype=jnp.int32)

    def token(carry, inputs):
        pools, tail = carry
        t, row = inputs  # row [2, dI]
        position = length + t
        slot, pool = position % pool_size, position // pool_size
        members = jnp.concatenate([tail, row[None]])  # [P, 2, dI], this token in the last slot
        weights = jax.nn.softmax(
            members[:, 1].astype(jnp.float32) + ape.astype(jnp.float32), axis=0
        )
        pool_key = jnp.sum(weights * members[:, 0].astype(jnp.float32), axis=0)  # [dI]
        finished = slot == pool_size - 1
        # An index past the end is dropped; so is a pool that the capacity has no room for.
        target = jnp.where(finished, pool, capacity)
        new_pools = pools.at[target].set(pool_key.astype(pools.dtype), mode="drop")
        stashed = jnp.where((slots == slot)[:, None, None], row, tail)
        new_tail = jnp.where(finished, jnp.zeros_like(tail), stashed)
        real = t < num_valid
        return (jnp.where(real, new_pools, pools), jnp.where(real, new_tail, tail)), None

    # Whatever an earlier owner left in slots that hold no row of the unfinished pool goes away
    # with the row's first token.
    held = slots < length % pool_size
    clean = jnp.where(held[:, None, None], tail, jnp.zeros_like(tail))
    tail = jnp.where(num_valid > 0, clean, tail)
    steps = jnp.arange(len(rows), dtype=jnp.int32)
    return lax.scan(token, (pools, tail), (steps, rows))[0]


def _select(q, head_weights, pools, length, num_valid, pool_size, num_selected):
    """q [T, I, dI], head_weights [T, I], pools [NP, dI] -> pool ids [T, min(num_selected, NP)]."""
    keys = pools.astype(jnp.float32)  # [NP, dI]
    last_token = pool_size * (jnp.arange(len(pools), dtype=jnp.int32) + 1) - 1  # [NP]

    def query(inputs):
        t, q, head_weights = inputs
        dots = jnp.matmul(q.astype(jnp.float32), keys.T, precision=_EXACT)  # [I, NP]
        heads = jax.nn.relu(dots * q.shape[-1] ** -0.5)
        score = jnp.sum(head_weights[:, None] * heads, axis=0)  # [NP]
        candidate = last_token <= length + t
        # A stable sort keeps the lowest index first among equals; -0 and +0 are equal.
        score = jnp.where(score == 0, jnp.zeros_like(score), score)
        ranked = jnp.argsort(jnp.where(candidate, -score, jnp.inf), stable=True).astype(jnp.int32)
        chosen = ranked[:num_selected]
        return jnp.where(candidate[chosen] & (t < num_valid), chosen, -1)

    return lax.map(query, (jnp.arange(len(q), dtype=jnp.int32), q, head_weights))
