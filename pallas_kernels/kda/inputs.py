"""From raw projections to what the recurrence consumes: one definition for every backend."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import zero_padding

L2_NORM_EPS = 1e-6


class Inputs(NamedTuple):
    """Float32. Padding is neutral: q = k = v = 0, log_decay = 0, beta = 0."""

    q: jax.Array  # [B, T, H, K], normalised and scaled
    k: jax.Array  # [B, T, H, K], normalised
    v: jax.Array  # [B, T, H, V]
    log_decay: jax.Array  # [B, T, H, K], <= 0
    beta: jax.Array  # [B, T, H], in (0, 1)


def l2_normalize(x: jax.Array) -> jax.Array:
    """x / sqrt(sum x^2 + eps); eps inside the root keeps the gradient finite at x = 0."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_NORM_EPS)


def log_decay(
    gate_logits: jax.Array, A_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None
) -> jax.Array:
    """[B, T, H, K] from float32 gate_logits; in (lower_bound, 0), without a bound in (-inf, 0)."""
    H, K = gate_logits.shape[-2:]
    logits = gate_logits + dt_bias.reshape(H, K)
    rate = jnp.exp(A_log)[:, None]  # [H, 1]
    if lower_bound is None:
        return -rate * jax.nn.softplus(logits)
    return lower_bound * jax.nn.sigmoid(rate * logits)


def prepare(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate_logits: jax.Array,
    beta_logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    *,
    lower_bound: float | None,
    num_valid: jax.Array | None,
    scale: float | None,
) -> Inputs:
    """Masks, casts to float32, normalises and gates. Shapes as in `chunk_kda`.

    Padding is selected away before any arithmetic: a NaN that reached the arithmetic would come
    back through the gradient, even if its result were selected away later. The gates need the
    second selection because a zero logit is not a zero gate.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, gate_logits, beta_logits = (
        zero_padding(x, num_valid).astype(jnp.float32) for x in (q, k, v, gate_logits, beta_logits)
    )
    decay = log_decay(gate_logits, A_log, dt_bias, lower_bound)
    return Inputs(
        q=l2_normalize(q) * factor,
        k=l2_normalize(k),
        v=v,
        log_decay=zero_padding(decay, num_valid),
        beta=zero_padding(jax.nn.sigmoid(beta_logits), num_valid),
    )
