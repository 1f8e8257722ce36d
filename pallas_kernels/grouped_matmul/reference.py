"""The grouped matmul literally: one row at a time, with its group's weight."""

import jax
import jax.numpy as jnp
from jax import lax


def grouped_matmul(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Arguments and result as in `api.grouped_matmul`."""
    ends = jnp.cumsum(group_sizes)  # [E]

    def one_row(inputs):
        n, row = inputs  # row [D]
        group = jnp.sum(n >= ends)  # == E for rows past the last group
        real = group < len(ends)
        row = jnp.where(real, row, jnp.zeros_like(row))
        weight = weights[jnp.minimum(group, len(ends) - 1)].astype(x.dtype)  # [F, D]
        out = jnp.matmul(
            weight, row, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return jnp.where(real, out, jnp.zeros_like(out)).astype(x.dtype)

    return lax.map(one_row, (jnp.arange(len(x), dtype=jnp.int32), x))
