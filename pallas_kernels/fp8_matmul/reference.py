"""The FP8 matmul literally: the weight in full, then one dot."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import SCALE_BLOCK


def fp8_matmul(
    x: jax.Array, weight: jax.Array, scale: jax.Array, *, out_dtype: jnp.dtype
) -> jax.Array:
    """Arguments and result as in `api.fp8_matmul`."""
    weight, scale = lax.stop_gradient((weight, scale))
    row, column = (jnp.arange(size, dtype=jnp.int32) // SCALE_BLOCK for size in weight.shape)
    full = (weight.astype(jnp.float32) * scale[row[:, None], column]).astype(x.dtype)  # [F, D]
    return jnp.einsum(
        "...d,fd->...f",
        x,
        full,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ).astype(out_dtype)
