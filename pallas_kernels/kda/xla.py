"""KDA in pure JAX: chunked for many tokens, token by token for few. See README.md."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import count_valid, zero_padding
from pallas_kernels.kda.inputs import Inputs, prepare

CHUNK = 64
BLOCK = 16  # rows whose pairwise decays are formed one by one

_HIGHEST = jax.lax.Precision.HIGHEST


def chunk_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate_logits: jax.Array,
    beta_logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    initial_state: jax.Array,
    *,
    lower_bound: float | None,
    num_valid: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.kda.api.chunk_kda`. Backward keeps one state per chunk."""
    B, T = v.shape[:2]
    block = min(BLOCK, T)
    chunk = min(CHUNK, _round_up(T, block))
    padding = _round_up(T, chunk) - T
    num_chunks = (T + padding) // chunk
    if padding and num_valid is None:
        num_valid = count_valid(None, B, T)  # makes the tokens added below padding like any other

    def to_chunks(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [N, B, C, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, num_chunks, chunk, *x.shape[2:]), 1, 0)

    counts = None
    if num_valid is not None:
        starts = chunk * jnp.arange(num_chunks, dtype=jnp.int32)
        counts = jnp.clip(num_valid - starts[:, None], 0, chunk)  # [N, B]

    # Raw inputs are scanned, in their own dtype: the float32 ones exist for one chunk at a time.
    @jax.checkpoint
    def body(state, xs):
        tokens, count = xs
        inputs = prepare(
            *tokens,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            num_valid=count,
            scale=scale,
        )
        o, new_state = _chunk_step(inputs, state, block)
        if count is not None:
            new_state = jnp.where((count > 0)[:, None, None, None], new_state, state)
        return new_state, zero_padding(o, count).astype(v.dtype)

    tokens = tuple(to_chunks(x) for x in (q, k, v, gate_logits, beta_logits))
    final_state, o = jax.lax.scan(body, initial_state, (tokens, counts))
    o = jnp.moveaxis(o, 0, 1).reshape(B, num_chunks * chunk, *v.shape[2:])
    return o[:, :T], final_state


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _chunk_step(inputs: Inputs, state: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """One chunk: o [B, C, H, V] and the state after it, float32."""
    q, k, v, g, beta = (jnp.moveaxis(x, 2, 1) for x in inputs)  # [B, H, C, ...]
    C = g.shape[2]
    from_start = jnp.exp(jnp.cumsum(g, axis=2))  # decay from the chunk's start up to token i
    to_end = jnp.exp(_sum_after(g))  # decay from after token i to the chunk's end

    kk, qk = _decayed_products(q, k, g, block)  # [B, H, C, C]
    strictly_lower = jnp.tril(jnp.ones((C, C), bool), -1)
    lower = jnp.where(strictly_lower, beta[..., None] * kk, 0.0)
    remembered = jnp.einsum("bhik,bhkv->bhiv", k * from_start, state, precision=_HIGHEST)
    deltas = jax.lax.linalg.triangular_solve(
        lower, beta[..., None] * (v - remembered), left_side=True, lower=True, unit_diagonal=True
    )  # [B, H, C, V], the updates that the recurrence would write

    o = jnp.einsum("bhik,bhkv->bhiv", q * from_start, state, precision=_HIGHEST)
    o += jnp.einsum("bhij,bhjv->bhiv", qk, deltas, precision=_HIGHEST)
    new_state = from_start[:, :, -1, :, None] * state
    new_state += jnp.einsum("bhjk,bhjv->bhkv", k * to_end, deltas, precision=_HIGHEST)
    return jnp.moveaxis(o, 1, 2), new_state


def _sum_after(g: jax.Array) -> jax.Array:
    """sum_{m > i} g_m over axis -2, without the cancellation of total minus prefix."""
    following = jnp.concatenate([g[..., 1:, :], jnp.zeros_like(g[..., :1, :])], axis=-2)
    return jax.lax.cumsum(following, axis=g.ndim - 2, reverse=True)


def _decayed_products(
    q: jax.Array, k: jax.Array, g: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """sum_d x_id k_jd exp(sum_{j < m <= i} g_md) for x = k and x = q, [B, H, C, C]; zero where j >
    i.

    Every exponent is a sum of gates, hence <= 0, and never a difference of prefix sums, which would
    lose the small gates that follow a huge one.
    """
    B, H, C, K = g.shape
    num_blocks = C // block
    qb, kb, gb = (x.reshape(B, H, num_blocks, block, K) for x in (q, k, g))
    row, column = jnp.arange(block)[:, None], jnp.arange(block)

    # Diagonal blocks, pair by pair.
    terms = jnp.where((row > column)[..., None], gb[..., :, None, :], 0.0)
    sums = jnp.cumsum(terms, axis=-3)  # [B, H, C/16, 16, 16, K]
    decayed_k = jnp.where((row >= column)[..., None], jnp.exp(sums) * kb[..., None, :, :], 0.0)
    diagonal = [jnp.sum(x[..., :, None, :] * decayed_k, axis=-1) for x in (kb, qb)]

    # Blocks left of the diagonal, factored around the first row of the row block: rows decay since
    # then, columns until then.
    row_decay = jnp.exp(sums[..., 0, :])  # [B, H, C/16, 16, K]
    first = block * jnp.arange(num_blocks)[:, None]
    index = jnp.arange(C)
    until_first = _sum_after(jnp.where((index <= first)[..., None], g[:, :, None], 0.0))
    columns = jnp.where((index < first)[..., None], jnp.exp(until_first) * k[:, :, None], 0.0)
    off_diagonal = [
        jnp.einsum("bhnik,bhnjk->bhnij", x * row_decay, columns, precision=_HIGHEST)
        for x in (kb, qb)
    ]  # [B, H, C/16, 16, C]

    on_diagonal = (first <= index) & (index < first + block)  # [C/16, C]
    kk, qk = (
        jnp.where(on_diagonal[:, None, :], jnp.tile(d, num_blocks), off).reshape(B, H, C, C)
        for d, off in zip(diagonal, off_diagonal, strict=True)
    )
    return kk, qk


def recurrent_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate_logits: jax.Array,
    beta_logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    initial_state: jax.Array,
    *,
    lower_bound: float | None,
    num_valid: jax.Array | None = None,
    scale: float | None = None,
    return_states: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.kda.api.recurrent_kda`."""
    T = v.shape[1]
    inputs = prepare(
        q,
        k,
        v,
        gate_logits,
        beta_logits,
        A_log,
        dt_bias,
        lower_bound=lower_bound,
        num_valid=num_valid,
        scale=scale,
    )

    def step(state, xs):
        t, (q, k, v, log_decay, beta) = xs
        decayed = jnp.exp(log_decay)[..., None] * state
        # o = S'^T q = decayed^T q + (k . q) delta: both reductions read the old state, so one pass
        # over it serves both. Products and sums rather than dots: a matrix-vector product is bound
        # by memory, and this is float32 everywhere.
        predicted = jnp.sum(decayed * k[..., None], axis=-2)  # [B, H, V]
        recalled = jnp.sum(decayed * q[..., None], axis=-2)
        delta = beta[..., None] * (v - predicted)
        o = recalled + jnp.sum(q * k, axis=-1, keepdims=True) * delta
        new_state = decayed + k[..., None] * delta[..., None, :]
        if num_valid is not None:
            new_state = jnp.where((t < num_valid)[:, None, None, None], new_state, state)
        return new_state, [o, new_state] if return_states else [o]

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    positions = jnp.arange(T, dtype=jnp.int32)
    final_state, (o, *states) = jax.lax.scan(step, initial_state, (positions, tokens))
    o = zero_padding(jnp.moveaxis(o, 0, 1), num_valid).astype(v.dtype)
    return o, jnp.moveaxis(states[0], 0, 1) if return_states else final_state
