"""The k-pool indexer in pure JAX: all pools of a call at once, queries in blocks of tokens."""

import jax
import jax.numpy as jnp
from jax import lax

# Bytes that the per-head scores [B, block, I, NP] of one block of tokens may take. At 1M tokens
# of context with P = 4 and I = 32, one token of one row takes 32 MiB.
SCORE_BLOCK_BYTES = 256 * 2**20

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
    with jax.named_scope("pool"):
        index_pools, index_tail = append_tokens(
            k, gate, ape, index_pools, index_tail, length, num_valid
        )
    with jax.named_scope("select"):
        pool_ids = select_pools(
            q,
            head_weights,
            index_pools,
            length + first_query,
            num_valid - first_query,
            pool_size=ape.shape[0],
            num_selected=num_selected,
        )
    return pool_ids, index_pools, index_tail


def append_tokens(
    k: jax.Array,
    gate: jax.Array,
    ape: jax.Array,
    index_pools: jax.Array,
    index_tail: jax.Array,
    length: jax.Array,
    num_valid: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(index_pools, index_tail) after the first num_valid[b] tokens of k and gate [B, T, dI].

    The rows of the unfinished pool and the new rows form one stream that starts at a pool
    boundary; pool i of the stream is its rows i*P .. (i+1)*P - 1.
    """
    batch, tokens, width = k.shape
    pool_size, capacity = ape.shape[0], index_pools.shape[1]
    new_rows = jnp.stack([k, gate], axis=2).astype(index_tail.dtype)
    rows = jnp.concatenate([index_tail, new_rows], axis=1)  # [B, P-1+T, 2, dI]
    held = length % pool_size  # [B] rows of the unfinished pool
    finished = (held + num_valid) // pool_size  # [B] pools that this call finishes

    def stream(index: jax.Array) -> jax.Array:
        """Rows of the stream at index [B, n]; what lies past its end is arbitrary."""
        source = jnp.where(index < held[:, None], index, index + pool_size - 1 - held[:, None])
        source = jnp.minimum(source, rows.shape[1] - 1)
        return jnp.take_along_axis(rows, source[:, :, None, None], axis=1)  # [B, n, 2, dI]

    most = (pool_size - 1 + tokens) // pool_size  # pools that any row can finish
    pool = jnp.arange(most, dtype=jnp.int32)
    members = stream(jnp.broadcast_to(jnp.arange(most * pool_size), (batch, most * pool_size)))
    members = members.astype(jnp.float32).reshape(batch, most, pool_size, 2, width)
    weights = jax.nn.softmax(members[..., 1, :] + ape.astype(jnp.float32), axis=2)
    pool_keys = jnp.sum(weights * members[..., 0, :], axis=2)  # [B, most, dI]

    # Unfinished pools aim past the end and are dropped, as is what the capacity has no room for;
    # dynamic_update_slice would clamp the start and overwrite finished pools.
    first = (length // pool_size)[:, None]
    target = jnp.where(pool < finished[:, None], first + pool, capacity)  # [B, most]
    row_index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    pools = index_pools.at[row_index, target].set(pool_keys.astype(index_pools.dtype), mode="drop")

    slot = jnp.arange(pool_size - 1, dtype=jnp.int32)
    left = stream((finished * pool_size)[:, None] + slot)  # [B, P-1, 2, dI]
    is_left = slot < ((held + num_valid) % pool_size)[:, None]
    tail = jnp.where(is_left[:, :, None, None], left, jnp.zeros_like(left))
    idle = (num_valid == 0)[:, None, None, None]
    return pools, jnp.where(idle, index_tail, tail)


def select_pools(
    q: jax.Array,
    head_weights: jax.Array,
    index_pools: jax.Array,
    length: jax.Array,
    num_valid: jax.Array,
    *,
    pool_size: int,
    num_selected: int,
) -> jax.Array:
    """pool ids [B, T, min(num_selected, NP)] of the queries q [B, T, I, dI], -1 = none."""
    batch, tokens, heads, width = q.shape
    capacity = index_pools.shape[1]
    block = score_block(batch, tokens, heads, capacity)
    num_blocks = -(-tokens // block)
    padding = num_blocks * block - tokens
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    head_weights = jnp.pad(head_weights, ((0, 0), (0, padding), (0, 0)))
    if q.dtype != index_pools.dtype:
        q, index_pools = q.astype(jnp.float32), index_pools.astype(jnp.float32)

    def one_block(start: jax.Array) -> jax.Array:
        q_block = lax.dynamic_slice_in_dim(q, start, block, axis=1)  # [B, t, I, dI]
        weights = lax.dynamic_slice_in_dim(head_weights, start, block, axis=1)  # [B, t, I]
        dots = jnp.einsum(
            "btid,bpd->btip",
            q_block,
            index_pools,
            precision=_EXACT,
            preferred_element_type=jnp.float32,
        )  # [B, t, I, NP]
        score = jnp.sum(weights[..., None] * jax.nn.relu(dots * width**-0.5), axis=2)
        # top_k ranks +0 above -0, which would break ties by sign instead of by index.
        score = jnp.where(score == 0, jnp.zeros_like(score), score)  # [B, t, NP]
        t = start + jnp.arange(block, dtype=jnp.int32)
        # Pool p has its last token at or before the query iff p < (position + 1) // P.
        num_candidates = (length[:, None] + t + 1) // pool_size  # [B, t]
        num_candidates = jnp.where(t < num_valid[:, None], num_candidates, 0)[..., None]
        pool = jnp.arange(capacity, dtype=jnp.int32)
        score = jnp.where(pool < num_candidates, score, -jnp.inf)
        chosen = lax.top_k(score, min(num_selected, capacity))[1]  # [B, t, Z]
        return jnp.where(chosen < num_candidates, chosen, -1)

    pool_ids = lax.map(one_block, block * jnp.arange(num_blocks, dtype=jnp.int32))
    pool_ids = jnp.moveaxis(pool_ids, 0, 1)  # [B, N, t, Z]
    return pool_ids.reshape(batch, num_blocks * block, -1)[:, :tokens]


def score_block(batch: int, tokens: int, heads: int, capacity: int) -> int:
    """Tokens per block: as many as SCORE_BLOCK_BYTES allows, evened out over the blocks."""
    bytes_per_token = 4 * batch * heads * capacity
    largest = max(1, min(tokens, SCORE_BLOCK_BYTES // bytes_per_token))
    num_blocks = -(-tokens // largest)
    return -(-tokens // num_blocks)
