"""The token recurrence as it is defined: the project's oracle, with no thought for speed."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import count_valid, zero_padding
from pallas_kernels.kda.inputs import prepare

_HIGHEST = jax.lax.Precision.HIGHEST


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
    B, T = v.shape[:2]
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
    valid = jnp.arange(T, dtype=jnp.int32) < count_valid(num_valid, B, T)[:, None]  # [B, T]

    def step(state, token):  # [B, H, K, V]
        (q, k, v, log_decay, beta), valid = token
        decayed = jnp.exp(log_decay)[..., None] * state
        predicted = jnp.einsum("bhkv,bhk->bhv", decayed, k, precision=_HIGHEST)
        delta = beta[..., None] * (v - predicted)
        new_state = decayed + k[..., None] * delta[..., None, :]
        o = jnp.einsum("bhkv,bhk->bhv", new_state, q, precision=_HIGHEST)
        # Selecting the old state is bit-exact, whatever it holds; multiplying it by exp(0) is not
        # (NaN, -0).
        state = jnp.where(valid[:, None, None, None], new_state, state)
        return state, [o, state] if return_states else [o]

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, valid))
    final_state, (o, *states) = jax.lax.scan(step, initial_state, tokens)
    o = zero_padding(jnp.moveaxis(o, 0, 1), num_valid).astype(v.dtype)
    return o, jnp.moveaxis(states[0], 0, 1) if return_states else final_state


def chunk_kda(*args, **kwargs) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.kda.api.chunk_kda`; the recurrence has no chunks."""
    return recurrent_kda(*args, **kwargs, return_states=False)
