"""The convolution as W shifted multiply-adds, which XLA fuses into one pass over the inputs."""

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
    B, T, C = x.shape
    W = weight.shape[1]
    inputs = jnp.concatenate([conv_state, zero_padding(x, num_valid)], axis=1)  # [B, W - 1 + T, C]
    y = jnp.zeros((B, T, C), jnp.float32)
    for j in range(W):
        y += weight[:, j] * inputs[:, j : j + T].astype(jnp.float32)
    y = zero_padding(jax.nn.silu(y), num_valid).astype(x.dtype)
    # Row i of `inputs` precedes new token i - (W - 1), so the last W - 1 inputs before token n
    # start at row n.
    rows = count_valid(num_valid, B, T)[:, None] + jnp.arange(W - 1, dtype=jnp.int32)  # [B, W - 1]
    conv_state = jnp.take_along_axis(inputs, rows[..., None], axis=1)
    return tuple(jnp.split(y, splits, axis=-1)) if splits > 1 else y, conv_state
