"""The FP8 matmul on Hopper GPUs: the grouped matmul's kernel with one group.

One weight has too few tiles to keep every multiprocessor busy, unless rows or outputs are many: the
sum over columns is then cut into parts as well.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp8_matmul import xla
from pallas_kernels.grouped_matmul.pallas_mosaic_gpu import (
    ROW_UNIT,
    Tiling,
    fit,
    multiply,
    num_tiles,
    require,
)

_BLOCKS = 132  # multiprocessors
_MANY_ROWS = 2048  # above, dequantising once costs less than doing so for each tile


def tiling_for(num_rows: int, weight: Any, out_bytes: int) -> Tiling:
    """num_rows is a multiple of 8."""
    rows = ROW_UNIT
    while rows < min(num_rows, 128) and 2 * rows <= num_rows:
        rows *= 2
    tiling = fit(rows, weight, 1, out_bytes)
    steps = weight.shape[1] // tiling.depth
    tiles = -(-num_rows // rows) * (weight.shape[0] // (tiling.width * tiling.warpgroups))
    parts = 1
    while 2 * parts * tiles <= _BLOCKS and steps % (2 * parts) == 0 and steps >= 8 * parts:
        parts *= 2
    return fit(rows, weight, parts, out_bytes)


def _multiply(x: jax.Array, weight: jax.Array, scale: jax.Array, out_dtype) -> jax.Array:
    lead, num_rows = x.shape[:-1], math.prod(x.shape[:-1])
    x = jnp.pad(x.reshape(num_rows, -1), ((0, -num_rows % ROW_UNIT), (0, 0)))
    tiling = tiling_for(len(x), weight, jnp.dtype(out_dtype).itemsize)
    tiles = num_tiles(len(x), 1, tiling.rows)
    bounds = np.array([[0, len(x)], [0, -(-len(x) // tiling.rows)]], np.int32)
    groups = np.zeros(tiles, np.int32)
    out = multiply(x, weight[None], scale[None], bounds, groups, tiling, out_dtype)
    if tiling.parts > 1:
        out = jnp.sum(out, axis=0)
    return out[:num_rows].astype(out_dtype).reshape(*lead, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _differentiable(x, weight, scale, out_dtype):
    return _multiply(x, weight, scale, out_dtype)


def _forward(x, weight, scale, out_dtype):
    return _multiply(x, weight, scale, out_dtype), (x, weight, scale)


def _backward(out_dtype, saved, out_gradient):
    x, weight, scale = saved
    _, pull = jax.vjp(lambda x: xla.fp8_matmul(x, weight, scale, out_dtype=out_dtype), x)
    return *pull(out_gradient), None, None


_differentiable.defvjp(_forward, _backward)


def fp8_matmul(
    x: jax.Array, weight: jax.Array, scale: jax.Array, *, out_dtype: jnp.dtype
) -> jax.Array:
    """Arguments and result as in `api.fp8_matmul`. The gradient is that of `xla`, and so
    is the form for very many rows.

    Raises:
        NotImplementedError: jax < 0.11.1, no Hopper GPU, or arguments the kernel refuses.
    """
    require(x, weight)
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"it gives bfloat16 or float32, not {jnp.dtype(out_dtype).name}")
    if math.prod(x.shape[:-1]) > _MANY_ROWS:
        return xla.fp8_matmul(x, weight, scale, out_dtype=out_dtype)
    return _differentiable(x, weight, scale, out_dtype)
