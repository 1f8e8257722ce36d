"""The FP8 matmul on TPU: the grouped matmul's kernel with a single group."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.fp8_matmul import xla
from pallas_kernels.grouped_matmul import pallas_mosaic_tpu as grouped


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _differentiable(x, weight, scale, x_dtype, out_dtype):
    rows = x.reshape(-1, x.shape[-1])  # [N, D]
    out = grouped.multiply(rows, weight[None], None, scale[None], out_dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _forward(x, weight, scale, x_dtype, out_dtype):
    return _differentiable(x, weight, scale, x_dtype, out_dtype), (weight, scale)


_differentiable.defvjp(_forward, xla.backward)


def fp8_matmul(
    x: jax.Array, weight: jax.Array, scale: jax.Array, *, out_dtype: jnp.dtype
) -> jax.Array:
    """Arguments and result as in `api.fp8_matmul`; gradients are those of `xla`."""
    return _differentiable(x, weight, scale, x.dtype, out_dtype)
