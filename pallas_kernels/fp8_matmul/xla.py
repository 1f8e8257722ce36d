"""The FP8 matmul in pure JAX: the weight is dequantised, then multiplied.

The gradient is written out so that what a differentiated call keeps is the codes and not the
weight in full.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.xla import dequantize


def _dot(x: jax.Array, weight: jax.Array, axis: int, out_dtype: jnp.dtype) -> jax.Array:
    """x [..., C] with its last axis contracted with the weight's axis (0 or 1)."""
    return lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ).astype(out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _differentiable(x, weight, scale, x_dtype, out_dtype):
    return _dot(x, dequantize(weight, scale, x_dtype), 1, out_dtype)


def _forward(x, weight, scale, x_dtype, out_dtype):
    return _differentiable(x, weight, scale, x_dtype, out_dtype), (weight, scale)


def backward(x_dtype, out_dtype, saved, out_gradient):
    """The gradients for the saved (weight, scale); every backend's."""
    weight, scale = saved
    # The weight is what x was multiplied by, then widened if the gradient is of another dtype.
    wide = x_dtype if x_dtype == out_dtype else jnp.float32
    full = dequantize(weight, scale, x_dtype).astype(wide)
    return _dot(out_gradient.astype(wide), full, 0, x_dtype), None, None


_differentiable.defvjp(_forward, backward)


def fp8_matmul(
    x: jax.Array, weight: jax.Array, scale: jax.Array, *, out_dtype: jnp.dtype
) -> jax.Array:
    """Arguments and result as in `api.fp8_matmul`."""
    return _differentiable(x, weight, scale, x.dtype, out_dtype)
