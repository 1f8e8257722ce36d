"""The public entry of the k-pool indexer: equations, argument checks, choice of backend."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import check_array, count_valid, dispatch
from pallas_kernels.kpool_indexer import reference, xla

_BACKENDS = {"reference": reference.kpool_indexer, "xla": xla.kpool_indexer}


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
    num_valid: jax.Array | None = None,
    first_query: jax.Array | int = 0,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pools the new index keys, scores every finished pool and selects the best ones per query.

    Sources: the indexer of DeepSeek sparse attention with keys pooled P at a time; model spec,
    section 7. With P = ape.shape[0] and tokens counted from the row's first one, token s has
    index key k_s, gate g_s and slot s mod P. Per channel c,

        weight_m[c]  = softmax over the P members of ( g_m[c] + ape[m, c] )
        pool_key_p[c] = sum_m weight_m[c] * k_m[c],  rounded once, to index_pools.dtype
        score[t, p]  = sum_h w_h[t] * relu( (q_h[t] . pool_key_p) * dI**-0.5 )

    all in float32. The query at position t may select pool p iff its last token P*(p+1) - 1 <= t.
    The min(num_selected, NP) best are selected, the lowest index first among equal scores (ties
    are common: relu can zero every head).

    State. Pools 0 .. length//P - 1 of `index_pools` are finished; the k and gate rows of the
    unfinished pool are in slots 0 .. length%P - 1 of `index_tail`. The call's tokens follow, so
    calls may start and end inside a pool. New k and gate rows are rounded to index_tail.dtype
    first, and scores read the rounded pool keys, also of pools that this very call finishes:
    results do not depend on how a sequence is cut into calls. Pools past the capacity NP are
    dropped.

    Args:
        q: [B, Tq, I, dI] index queries of all T tokens, or of Tq of them.
        head_weights: [B, Tq, I] float32, already scaled by I**-0.5; any sign.
        k, gate: [B, T, dI] index keys after their norm, and pooling gates.
        ape: [P, dI] additive embedding of the slot inside a pool.
        index_pools: [B, NP, dI] pool keys; contents past the finished pools are never read.
        index_tail: [B, P-1, 2, dI] k (0) and gate (1) rows of the unfinished pool.
        length: [B] int32, tokens already in the cache.
        num_selected: how many pools a query may select (index_topk // P).
        num_valid: [B] int32, real tokens per row (None = T). The rest is padding, may hold NaN,
            selects nothing (-1) and changes no state.
        first_query: which of the T tokens q starts with; Tq of them follow each other.
        backend: see `pallas_kernels.dispatch`.

    Returns:
        pool_ids [B, Tq, min(num_selected, NP)] int32, distinct, best first, -1 where there are
        fewer candidates; index_pools and index_tail after the call's tokens (tail slots past the
        unfinished pool are zero).

    No gradient is meant to pass: the reference model computes all of this without one.

    Raises:
        ValueError: a shape or dtype is wrong, or num_selected < 1.
        NotImplementedError: the named backend does not exist for this op.
    """
    op, sizes = "kpool_indexer", {}
    check_array(op, "q", q, ("B", "Tq", "I", "dI"), sizes)
    check_array(op, "head_weights", head_weights, ("B", "Tq", "I"), sizes, jnp.float32)
    check_array(op, "k", k, ("B", "T", "dI"), sizes)
    check_array(op, "gate", gate, ("B", "T", "dI"), sizes)
    check_array(op, "ape", ape, ("P", "dI"), sizes)
    check_array(op, "index_pools", index_pools, ("B", "NP", "dI"), sizes)
    check_array(op, "index_tail", index_tail, ("B", sizes["P"] - 1, 2, "dI"), sizes)
    check_array(op, "length", length, ("B",), sizes, jnp.int32)
    if num_valid is not None:
        check_array(op, "num_valid", num_valid, ("B",), sizes, jnp.int32)
    for name in ("Tq", "T", "P", "NP"):
        if sizes[name] < 1:
            raise ValueError(f"{op}: {name}={sizes[name]}, expected at least 1")
    if sizes["Tq"] > sizes["T"]:
        raise ValueError(f"{op}: queries of Tq={sizes['Tq']} tokens, of which T={sizes['T']}")
    if num_selected < 1:
        raise ValueError(f"{op}: {num_selected=}, expected at least 1")
    return dispatch(
        op,
        _BACKENDS,
        backend,
        q,
        head_weights,
        k,
        gate,
        ape,
        index_pools,
        index_tail,
        length,
        num_selected=num_selected,
        num_valid=count_valid(num_valid, sizes["B"], sizes["T"]),
        first_query=jnp.asarray(first_query, jnp.int32),
    )
