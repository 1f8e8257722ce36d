"""The public entry of sparse MLA: the equations, the argument checks, the choice of backend."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import check_array, count_valid, dispatch
from pallas_kernels.sparse_mla import reference, xla

_BACKENDS = {"reference": reference.sparse_mla, "xla": xla.sparse_mla}


def sparse_mla(
    q: jax.Array,
    latent: jax.Array,
    pool_ids: jax.Array,
    length: jax.Array,
    *,
    pool_size: int,
    scale: float,
    always_select_tail: bool = True,
    num_valid: jax.Array | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Softmax attention over the latents of the pools that each query selected.

    Sources: multi-head latent attention in its absorbed form (q already multiplied by the key
    half of kv_b_proj) with the selection of DeepSeek sparse attention; model spec, sections 6
    and 7. The query at t has position pos = length[b] + t. With P = pool_size it sees

        visible = { s <= pos : s // P in pool_ids[b, t] }
                  and, if always_select_tail, { s : P * ((pos + 1) // P) <= s <= pos }
        score_s = (q_h . latent_s) * scale                      float32
        p       = softmax of the scores over the visible s      float32, then cast to q.dtype
        o_h     = sum_s p_s * latent_s                          float32 sum, cast to q.dtype

    No positions beyond pos are ever visible, whatever the pool ids say. The ids of a query are
    expected to be distinct, as the indexer makes them; they form a set, so neither a repeated id
    nor one that names the tail's pool counts its tokens twice. A query that sees nothing, and
    padding, give zeros.

    Args:
        q: [B, T, H, R] absorbed queries.
        latent: [B, S, R] cached latents of q.dtype, those of the call's own tokens included.
            Rows at and past length + num_valid are never used and may hold NaN.
        pool_ids: [B, T, Z] int32, -1 (or any id outside the cache) = none.
        length: [B] int32, tokens in the cache before this call.
        pool_size: tokens per pool.
        scale: factor on the scores (qk_nope_head_dim ** -0.5).
        always_select_tail: whether the tokens after the last finished pool are visible.
        num_valid: [B] int32, real tokens per row (None = T). The rest is padding and may hold NaN.
        backend: see `pallas_kernels.dispatch`.

    Returns:
        o [B, T, H, R] in q.dtype, to be multiplied by the value half of kv_b_proj.

    Raises:
        ValueError: a shape or dtype is wrong, or pool_size < 1.
        NotImplementedError: the named backend does not exist for this op.
    """
    op, sizes = "sparse_mla", {}
    check_array(op, "q", q, ("B", "T", "H", "R"), sizes)
    check_array(op, "latent", latent, ("B", "S", "R"), sizes, q.dtype)
    check_array(op, "pool_ids", pool_ids, ("B", "T", "Z"), sizes, jnp.int32)
    check_array(op, "length", length, ("B",), sizes, jnp.int32)
    if num_valid is not None:
        check_array(op, "num_valid", num_valid, ("B",), sizes, jnp.int32)
    for name in ("T", "S", "Z"):
        if sizes[name] < 1:
            raise ValueError(f"{op}: {name}={sizes[name]}, expected at least 1")
    if pool_size < 1:
        raise ValueError(f"{op}: {pool_size=}, expected at least 1")
    return dispatch(
        op,
        _BACKENDS,
        backend,
        q,
        latent,
        pool_ids,
        length,
        pool_size=pool_size,
        scale=scale,
        always_select_tail=always_select_tail,
        num_valid=count_valid(num_valid, sizes["B"], sizes["T"]),
    )
