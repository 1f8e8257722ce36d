"""KDA in pure JAX: chunked for many tokens, token by token for few. See README.md."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import count_valid, zero_padding
from pallas_kernels.kda.inputs import Inputs, prepare

CHUNK = 64
BLOCK = 16  # rows whose pairwise decays are formed one by one
# Chunks are prepared in groups, with this many bytes of pairwise decays at a time: then only few
# operations per chunk wait for the state before it. At the released sizes a chunk has 32 MiB.
GROUP_BYTES = 256 * 2**20

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
    """See `pallas_kernels.kda.api.chunk_kda`. Backward keeps one state per group of chunks."""
    B, T, H, K = k.shape
    block, chunk = (min(size, _power_of_two(T)) for size in (BLOCK, CHUNK))
    num_chunks = -(-T // chunk)
    num_groups = -(-num_chunks // max(1, GROUP_BYTES // (4 * B * H * chunk * block * K)))
    length = chunk * -(-num_chunks // num_groups)  # tokens per group
    padding = length * num_groups - T
    if padding and num_valid is None:
        num_valid = count_valid(None, B, T)  # makes the tokens added below padding like any other

    def to_groups(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [groups, B, length, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, num_groups, length, *x.shape[2:]), 1, 0)

    counts = None
    if num_valid is not None:
        starts = length * jnp.arange(num_groups, dtype=jnp.int32)
        counts = jnp.clip(num_valid - starts[:, None], 0, length)  # [groups, B]

    # Raw inputs are scanned, in their own dtype: the float32 ones exist for one group at a time.
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
        new_state, o = jax.lax.scan(_chunk_step, state, _chunks(inputs, chunk, block))
        o = jnp.moveaxis(o, (0, 3), (1, 2)).reshape(B, length, H, -1)  # from [G, B, H, C, V]
        if count is not None:
            new_state = jnp.where((count > 0)[:, None, None, None], new_state, state)
        return new_state, zero_padding(o, count).astype(v.dtype)

    tokens = tuple(to_groups(x) for x in (q, k, v, gate_logits, beta_logits))
    final_state, o = jax.lax.scan(body, initial_state, (tokens, counts))
    o = jnp.moveaxis(o, 0, 1).reshape(B, num_groups * length, *v.shape[2:])
    return o[:, :T], final_state


def _power_of_two(n: int) -> int:
    """The next one, n itself if it is one."""
    return 1 << (n - 1).bit_length()


class _Chunks(NamedTuple):
    """What chunks need that does not depend on the state, [G, B, H, C, ...] float32."""

    reads: jax.Array  # [G, B, H, 2C, K] keys, then queries, decayed since the chunk's start
    writes: jax.Array  # [G, B, H, C, K] keys decayed until the chunk's end
    decay: jax.Array  # [G, B, H, K] of the state over the chunk
    v: jax.Array  # [G, B, H, C, V]
    beta: jax.Array  # [G, B, H, C]
    solve: jax.Array  # [G, B, H, C, C] the inverse of the chunk's triangular system
    qk: jax.Array  # [G, B, H, C, C] decayed products of queries and keys


def _chunks(inputs: Inputs, chunk: int, block: int) -> _Chunks:
    """All chunks of a group at once, as one batch of G·B·H small problems."""
    B, T, H = inputs.beta.shape
    shape = (T // chunk, B, H)
    q, k, v, g, beta = (
        jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), (1, 3), (0, 2)).reshape(
            -1, chunk, *x.shape[3:]
        )
        for x in inputs
    )  # [G·B·H, C, ...]
    from_start = jnp.exp(jnp.cumsum(g, axis=1))  # decay from the chunk's start up to token i
    to_end = jnp.exp(_sum_after(g))  # decay from after token i to the chunk's end
    kk, qk = _decayed_products(q, k, g, block)
    strictly_lower = jnp.tril(jnp.ones((chunk, chunk), bool), -1)
    flat = _Chunks(
        reads=jnp.concatenate([k * from_start, q * from_start], axis=1),
        writes=k * to_end,
        decay=from_start[:, -1],
        v=v,
        beta=beta,
        solve=_inverse_unit_lower(jnp.where(strictly_lower, beta[..., None] * kk, 0.0)),
        qk=qk,
    )
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), flat)


def _chunk_step(state: jax.Array, x: _Chunks) -> tuple[jax.Array, jax.Array]:
    """One chunk: the state [B, H, K, V] after it and o [B, H, C, V], float32."""
    C = x.v.shape[2]
    read = jnp.einsum("bhik,bhkv->bhiv", x.reads, state, precision=_HIGHEST)
    remembered, o = read[:, :, :C], read[:, :, C:]
    # The updates that the recurrence would write.
    wanted = x.beta[..., None] * (x.v - remembered)
    deltas = jnp.einsum("bhij,bhjv->bhiv", x.solve, wanted, precision=_HIGHEST)
    o += jnp.einsum("bhij,bhjv->bhiv", x.qk, deltas, precision=_HIGHEST)
    new_state = x.decay[..., None] * state
    new_state += jnp.einsum("bhjk,bhjv->bhkv", x.writes, deltas, precision=_HIGHEST)
    return new_state, o


def _inverse_unit_lower(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 for strictly lower triangular lower [N, C, C], C a power of two.

    Blocks of twice the size from blocks, [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]:
    as exact as substitution, in log2(C) batched steps. A series in powers of `lower` would cancel
    badly for repeated keys; and jaxlib's own solver may wait forever on the CPU for threads that
    its other calls occupy, one per device of a mesh.
    """
    N, C, _ = lower.shape
    inverse = jnp.ones((N, C, 1, 1), lower.dtype)
    size = 1
    while size < C:
        pairs = C // (2 * size)
        below = lower.reshape(N, pairs, 2, size, pairs, 2, size)[:, :, 1, :, :, 0]
        own = jnp.eye(pairs, dtype=bool)[:, None, :, None]
        below = jnp.sum(jnp.where(own, below, 0.0), axis=3)  # [N, pairs, size, size]
        upper, last = inverse[:, 0::2], inverse[:, 1::2]
        corner = -jnp.matmul(last, jnp.matmul(below, upper, precision=_HIGHEST), precision=_HIGHEST)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=3)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, last], axis=3)], axis=2)
        size *= 2
    return inverse[:, 0]


def _sum_after(g: jax.Array) -> jax.Array:
    """sum_{m > i} g_m over axis -2, without the cancellation of total minus prefix."""
    following = jnp.concatenate([g[..., 1:, :], jnp.zeros_like(g[..., :1, :])], axis=-2)
    return jax.lax.cumsum(following, axis=g.ndim - 2, reverse=True)


def _decayed_products(
    q: jax.Array, k: jax.Array, g: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """sum_d x_id k_jd exp(sum_{j < m <= i} g_md) for x = k and x = q, [N, C, C]; zero where j > i.

    Every exponent is a sum of gates, hence <= 0, and never a difference of prefix sums, which would
    lose the small gates that follow a huge one.
    """
    N, C, K = g.shape
    num_blocks = C // block
    qb, kb, gb = (x.reshape(N, num_blocks, block, K) for x in (q, k, g))
    row, column = jnp.arange(block)[:, None], jnp.arange(block)

    # Diagonal blocks, pair by pair.
    terms = jnp.where((row > column)[..., None], gb[..., :, None, :], 0.0)
    sums = jnp.cumsum(terms, axis=-3)  # [N, C/16, 16, 16, K]
    decayed_k = jnp.where((row >= column)[..., None], jnp.exp(sums) * kb[..., None, :, :], 0.0)
    diagonal = [jnp.sum(x[..., :, None, :] * decayed_k, axis=-1) for x in (kb, qb)]

    # Blocks left of the diagonal, factored around the first row of the row block: rows decay since
    # then, columns until then.
    row_decay = jnp.exp(sums[..., 0, :])  # [N, C/16, 16, K]
    first = block * jnp.arange(num_blocks)[:, None]
    index = jnp.arange(C)
    until_first = _sum_after(jnp.where((index <= first)[..., None], g[:, None], 0.0))
    columns = jnp.exp(until_first) * k[:, None]
    columns = jnp.where((index < first)[..., None], columns, 0.0)
    off_diagonal = [
        jnp.einsum("anik,anjk->anij", x * row_decay, columns, precision=_HIGHEST) for x in (kb, qb)
    ]  # [N, C/16, 16, C]

    on_diagonal = (first <= index) & (index < first + block)  # [C/16, C]
    kk, qk = (
        jnp.where(on_diagonal[:, None, :], jnp.tile(d, num_blocks), off).reshape(N, C, C)
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
