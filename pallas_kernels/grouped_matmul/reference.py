"""The grouped matmul literally: one row at a time, with its group's weight."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import SCALE_BLOCK


def _weight_in_full(weight: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """weight [F, D] in dtype; FP8 codes times the factor of their block, in float32."""
    if scale is None:
        return weight.astype(dtype)
    weight, scale = lax.stop_gradient((weight, scale))
    row, column = (jnp.arange(size, dtype=jnp.int32) // SCALE_BLOCK for size in weight.shape)
    return (weight.astype(jnp.float32) * scale[row[:, None], column]).astype(dtype)


def grouped_matmul(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, scale: jax.Array | None = None
) -> jax.Array:
    """Arguments and result as in `api.grouped_matmul`."""
    ends = jnp.cumsum(group_sizes)  # [E]

    def one_row(inputs):
        n, row = inputs  # row [D]
        group = jnp.sum(n >= ends)  # == E for rows past the last group
        real = group < len(ends)
        row = jnp.where(real, row, jnp.zeros_like(row))
        group = jnp.minimum(group, len(ends) - 1)
        factors = None if scale is None else scale[group]
        weight = _weight_in_full(weights[group], factors, x.dtype)  # [F, D]
        out = jnp.matmul(
            weight, row, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return jnp.where(real, out, jnp.zeros_like(out)).astype(x.dtype)

    return lax.map(one_row, (jnp.arange(len(x), dtype=jnp.int32), x))
