"""Sparse MLA in pure JAX, in blocks of query tokens: a dense mask over small caches, a gather of
the selected pools from large ones."""

import jax
import jax.numpy as jnp
from jax import lax

# Bytes that one block of query tokens may take in scores, weights and gathered latents. At the
# released sizes (64 heads, R = 512, 512 pools of 4 tokens, bf16) one token takes 3 MiB.
ATTENTION_BLOCK_BYTES = 256 * 2**20

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
    """Arguments and result as in `api.sparse_mla`, with num_valid given.

    The mask form does S scores per query, the gather form at most Z*P + P but it copies that many
    latents per query. The one that moves fewer bytes runs.
    """
    batch, tokens, heads, width = q.shape
    capacity = latent.shape[1]
    most_visible = pool_ids.shape[2] * pool_size + (pool_size - 1) * always_select_tail
    # Float32 scores and rounded weights, each written and read; latents read twice, in the gather
    # form by every query and after a copy, in the mask form by a block of queries at a time.
    per_score, row_bytes = heads * 12, width * latent.dtype.itemsize
    masked = capacity * (per_score + 2 * row_bytes / min(tokens, 64))
    gathered = most_visible * (per_score + 4 * row_bytes)
    use_mask = capacity <= most_visible or masked < gathered
    attend = attend_masked if use_mask else attend_gathered
    position = length[:, None] + jnp.arange(tokens, dtype=jnp.int32)  # [B, T]
    valid = jnp.arange(tokens, dtype=jnp.int32) < num_valid[:, None]
    q = jnp.where(valid[..., None, None], q, jnp.zeros_like(q))
    # The tail is the visible part of the first pool that is not finished, so it is one more id.
    # A query that may see nothing (padding) asks for no pool at all.
    if always_select_tail:
        tail_id = (position + 1) // pool_size
        pool_ids = jnp.concatenate([pool_ids, tail_id[..., None]], axis=2)  # [B, T, Z+1]
    pool_ids = jnp.where(valid[..., None], pool_ids, -1)
    end = length + num_valid
    return attend(q, latent, pool_ids, position, end, pool_size=pool_size, scale=scale)


def attend_masked(
    q: jax.Array,
    latent: jax.Array,
    pool_ids: jax.Array,
    position: jax.Array,
    end: jax.Array,
    *,
    pool_size: int,
    scale: float,
) -> jax.Array:
    """o [B, T, H, R] from scores over all of latent [B, S, R] and a mask made of the pool ids.

    pool_ids [B, T, Z] includes the tail's pool; position [B, T]; rows of latent from end [B] on
    are not used.
    """
    batch, tokens, heads, _ = q.shape
    capacity = latent.shape[1]
    slot = jnp.arange(capacity, dtype=jnp.int32)
    used = slot < end[:, None]  # [B, S]
    latent = jnp.where(used[..., None], latent, jnp.zeros_like(latent))
    num_pools = -(-capacity // pool_size)

    def one_block(q, pool_ids, position):
        # A negative index would wrap to the end; one past the end is dropped.
        pool_ids = jnp.where(pool_ids < 0, num_pools, pool_ids)
        row, column = jnp.indices(position.shape, dtype=jnp.int32, sparse=True)
        chosen = jnp.zeros((*position.shape, num_pools), bool)
        chosen = chosen.at[row[..., None], column[..., None], pool_ids].set(True, mode="drop")
        visible = jnp.repeat(chosen, pool_size, axis=2)[..., :capacity]  # [B, t, S]
        visible &= slot <= position[..., None]
        scores = jnp.einsum(
            "bthr,bsr->bths", q, latent, precision=_EXACT, preferred_element_type=jnp.float32
        )
        weights = _masked_softmax(scores * scale, visible[:, :, None]).astype(q.dtype)
        return jnp.einsum(
            "bths,bsr->bthr", weights, latent, precision=_EXACT, preferred_element_type=jnp.float32
        ).astype(q.dtype)

    block = attention_block(tokens, batch * capacity * 2 * heads * 4)
    return _map_blocks(one_block, block, q, pool_ids, position)


def attend_gathered(
    q: jax.Array,
    latent: jax.Array,
    pool_ids: jax.Array,
    position: jax.Array,
    end: jax.Array,
    *,
    pool_size: int,
    scale: float,
) -> jax.Array:
    """o [B, T, H, R] from the latents of the selected pools alone; arguments as above, S >= P.

    Pools are gathered whole, P consecutive rows each.
    """
    del end  # every gathered row is checked against its query's position
    batch, tokens, heads, width = q.shape
    capacity = latent.shape[1]
    if capacity < pool_size:
        raise ValueError(f"latent has {capacity} slots, expected at least {pool_size=}")
    # Sorted, equal ids are neighbours; and the order of the sums depends on the set alone, not on
    # the order of nearly equal scores.
    pool_ids = jnp.sort(pool_ids, axis=2)
    repeated = jnp.pad(pool_ids[..., 1:] == pool_ids[..., :-1], ((0, 0), (0, 0), (1, 0)))
    pool_ids = jnp.where(repeated, -1, pool_ids)

    def one_block(q, pool_ids, position):
        # Slices never leave the array: XLA would move such a start without saying so. The slot
        # of each row is therefore compared with the pool that was asked for.
        start = jnp.clip(pool_ids * pool_size, 0, capacity - pool_size)  # [B, t, Z]
        slot = start[..., None] + jnp.arange(pool_size, dtype=jnp.int32)  # [B, t, Z, P]
        visible = (slot // pool_size == pool_ids[..., None]) & (slot <= position[..., None, None])
        visible = visible.reshape(*position.shape, -1)  # [B, t, L]
        rows = jax.vmap(_slices, in_axes=(0, 0, None))(latent, start, pool_size)
        rows = rows.reshape(*visible.shape, width)  # [B, t, L, R]
        rows = jnp.where(visible[..., None], rows, jnp.zeros_like(rows))
        scores = jnp.einsum(
            "bthr,btlr->bthl", q, rows, precision=_EXACT, preferred_element_type=jnp.float32
        )
        weights = _masked_softmax(scores * scale, visible[:, :, None]).astype(q.dtype)
        return jnp.einsum(
            "bthl,btlr->bthr", weights, rows, precision=_EXACT, preferred_element_type=jnp.float32
        ).astype(q.dtype)

    gathered = pool_ids.shape[2] * pool_size
    block = attention_block(
        tokens, batch * gathered * (width * latent.dtype.itemsize + 2 * heads * 4)
    )
    return _map_blocks(one_block, block, q, pool_ids, position)


def attention_block(tokens: int, bytes_per_token: int) -> int:
    """Query tokens per block: what ATTENTION_BLOCK_BYTES allows, evened out over the blocks."""
    largest = max(1, min(tokens, ATTENTION_BLOCK_BYTES // bytes_per_token))
    num_blocks = -(-tokens // largest)
    return -(-tokens // num_blocks)


def _slices(latent: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """latent [S, R], start [t, Z] -> [t, Z, length, R], the rows from each start on."""
    return lax.gather(
        latent,
        start[..., None],
        lax.GatherDimensionNumbers(
            offset_dims=(2, 3), collapsed_slice_dims=(), start_index_map=(0,)
        ),
        slice_sizes=(length, latent.shape[1]),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def _masked_softmax(scores: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax over the last axis, over the visible entries alone; zeros where there are none."""
    scores = jnp.where(visible, scores, -jnp.inf)
    largest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    mass = jnp.exp(scores - largest)  # exactly 0 at -inf
    total = jnp.sum(mass, axis=-1, keepdims=True)
    return mass / jnp.where(total == 0, 1.0, total)


def _map_blocks(function, block: int, *arrays: jax.Array) -> jax.Array:
    """function over blocks of axis 1 of arrays [B, T, ...]; the last block is padded.

    Padding has position -1 and pool ids -1, so it sees nothing; its results are cut off.
    """
    batch, tokens = arrays[0].shape[:2]
    num_blocks = -(-tokens // block)

    def pad(x):
        widths = ((0, 0), (0, num_blocks * block - tokens), *((0, 0),) * (x.ndim - 2))
        return jnp.pad(x, widths, constant_values=-1 if x.dtype == jnp.int32 else 0)

    padded = [pad(x) for x in arrays]

    def one_block(start):
        return function(*(lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in padded))

    out = lax.map(one_block, block * jnp.arange(num_blocks, dtype=jnp.int32))
    out = jnp.moveaxis(out, 0, 1)  # [B, N, t, H, R]
    return out.reshape(batch, num_blocks * block, *out.shape[3:])[:, :tokens]
