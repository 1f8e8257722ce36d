"""The convolution token by token: the project's oracle, with no thought for speed."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import count_valid, zero_padding


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    conv_state: jax.Array,
    *,
    num_valid: jax.Array | None = None,
    splits: int = 1,
) -> tuple[Any, jax.Array]:
    """See `pallas_kernels.short_conv.api.short_conv`."""
    B, T, _ = x.shape
    valid = jnp.arange(T, dtype=jnp.int32) < count_valid(num_valid, B, T)[:, None]  # [B, T]

    def step(state, token):
        row, valid = token
        window = jnp.concatenate([state, row[:, None]], axis=1)  # [B, W, C]
        y = jax.nn.silu(jnp.sum(window.astype(jnp.float32) * weight.T, axis=1))
        return jnp.where(valid[:, None, None], window[:, 1:], state), y

    tokens = (jnp.moveaxis(zero_padding(x, num_valid), 1, 0), valid.T)
    conv_state, y = jax.lax.scan(step, conv_state, tokens)
    y = zero_padding(jnp.moveaxis(y, 0, 1), num_valid).astype(x.dtype)
    return tuple(jnp.split(y, splits, axis=-1)) if splits > 1 else y, conv_state
