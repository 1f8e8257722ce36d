"""The grouped matmul in pure JAX: blocks of rows of one group, each times one expert's weight.

Block rows are fixed, the number of blocks is a static bound, and blocks that no group needs are
skipped, so work grows with the rows and not with the number of experts. Reverse-mode
differentiation through the loop would keep every block's weight and add a gradient of all
experts per block; the gradients are therefore written out, and cost what the forward does.

On a GPU a condition inside a loop waits for the host, which takes longer than the block itself
where rows are few. There each row reads its own group's weight: one reduction, no loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import SCALE_BLOCK, platform

_EXACT = lax.Precision.HIGHEST

# On a GPU so many rows are multiplied one by one: any number of groups, or rows per group. On an
# H200 that takes a tenth of the loop's time at 256 rows of 288 experts, a third at 2048.
_FEW_ROWS, _FEW_ROWS_PER_GROUP = 256, 8


class _Blocks(NamedTuple):
    """The rows that each block covers, and where each row's result is."""

    group: jax.Array  # [NB] whose weight
    start: jax.Array  # [NB] first row, at most N
    rows: jax.Array  # [NB] rows of the group in this block, 0 = nothing to do
    source: jax.Array  # [N] index of a row in the blocks laid end to end
    real: jax.Array  # [N] whether the row belongs to a group


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows per block: about what an average group has, a power of two within 8..128."""
    average = -(-num_rows // num_groups)
    return min(128, max(8, 1 << (average - 1).bit_length()))


def num_blocks(num_rows: int, num_groups: int, rows: int) -> int:
    """Blocks that suffice for any group sizes: each non-empty group wastes at most rows - 1."""
    return (num_rows + min(num_rows, num_groups) * (rows - 1)) // rows


def _blocks(group_sizes: jax.Array, num_rows: int) -> _Blocks:
    num_groups = group_sizes.shape[0]
    rows = block_rows(num_rows, num_groups)
    group_sizes = jnp.asarray(group_sizes)  # a NumPy array, if saved by a differentiated call
    row_ends = jnp.cumsum(group_sizes)  # [E]
    row_starts = row_ends - group_sizes
    count = (group_sizes + (rows - 1)) // rows  # blocks per group
    block_ends = jnp.cumsum(count)
    block_starts = block_ends - count

    groups = jnp.arange(num_groups, dtype=jnp.int32)
    most = num_blocks(num_rows, num_groups, rows)
    block = jnp.arange(most, dtype=jnp.int32)
    needed = block < block_ends[-1]
    group = jnp.repeat(groups, count, total_repeat_length=most)
    offset = (block - block_starts[group]) * rows
    remaining = jnp.clip(group_sizes[group] - offset, 0, rows)
    start = jnp.where(needed, jnp.minimum(row_starts[group] + offset, num_rows), 0)

    row = jnp.arange(num_rows, dtype=jnp.int32)
    real = row < row_ends[-1]
    row_group = jnp.repeat(groups, group_sizes, total_repeat_length=num_rows)
    source = block_starts[row_group] * rows + row - row_starts[row_group]
    source = jnp.where(real, source, 0)
    return _Blocks(group, start, jnp.where(needed, remaining, 0), source, real)


def dequantize(codes: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """codes [..., F, D] in dtype, times scale [..., ceil(F/128), ceil(D/128)] where it is given."""
    if scale is None:
        return codes.astype(dtype)
    for axis in (-2, -1):
        scale = jnp.repeat(scale, SCALE_BLOCK, axis=axis)
        scale = lax.slice_in_dim(scale, 0, codes.shape[axis], axis=axis)
    return (codes.astype(jnp.float32) * scale).astype(dtype)


def _multiply(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None,
    axis: int,
) -> jax.Array:
    """Rows x [N, C] times their group's weight, contracted with that weight's axis (0 or 1)."""
    rows = block_rows(x.shape[0], weights.shape[0])
    blocks = _blocks(group_sizes, x.shape[0])
    padded = jnp.pad(x, ((0, rows), (0, 0)))  # so that no slice is moved at the end
    width = weights.shape[2 - axis]

    def one_block(_, block):
        group, start, count = block

        def product():
            weight = lax.dynamic_index_in_dim(weights, group, keepdims=False)
            factors = None
            if scale is not None:
                factors = lax.dynamic_index_in_dim(scale, group, keepdims=False)
            return lax.dot_general(
                lax.dynamic_slice_in_dim(padded, start, rows),
                dequantize(weight, factors, x.dtype),
                (((1,), (axis,)), ((), ())),
                precision=_EXACT,
                preferred_element_type=jnp.float32,
            ).astype(x.dtype)

        return None, lax.cond(count > 0, product, lambda: jnp.zeros((rows, width), x.dtype))

    steps = (blocks.group, blocks.start, blocks.rows)
    out = lax.scan(one_block, None, steps)[1].reshape(-1, width)  # [NB*rows, width]
    out = out.at[blocks.source].get(mode="clip")
    return jnp.where(blocks.real[:, None], out, jnp.zeros_like(out))


def _weight_gradient(
    x: jax.Array, out_gradient: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """sum over the rows n of each group of out_gradient[n] x[n]^T, [E, F, D] in weights.dtype."""
    rows = block_rows(x.shape[0], weights.shape[0])
    blocks = _blocks(group_sizes, x.shape[0])
    padded_x = jnp.pad(x, ((0, rows), (0, 0)))
    padded_gradient = jnp.pad(out_gradient, ((0, rows), (0, 0)))

    def one_block(total, block):
        group, start, count = block
        mine = (jnp.arange(rows, dtype=jnp.int32) < count)[:, None]

        def own_rows(padded):
            found = lax.dynamic_slice_in_dim(padded, start, rows)
            return jnp.where(mine, found, jnp.zeros_like(found))  # others are other groups'

        def add(total):
            product = lax.dot_general(
                own_rows(padded_gradient),
                own_rows(padded_x),
                (((0,), (0,)), ((), ())),
                precision=_EXACT,
                preferred_element_type=jnp.float32,
            )
            return total.at[group].add(product)

        return lax.cond(count > 0, add, lambda total: total, total), None

    total = jnp.zeros(weights.shape, jnp.float32)
    steps = (blocks.group, blocks.start, blocks.rows)
    return lax.scan(one_block, total, steps)[0].astype(weights.dtype)


def multiply_row_by_row(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, scale: jax.Array | None
) -> jax.Array:
    """Rows x [N, D] times their own group's weight, [N, F].

    XLA for GPU fuses gather, dequantisation, product and sum into one reduction, which reads each
    row's weight where it lies and keeps nothing of [N, F, D]. XLA for CPU keeps the gathered rows.
    """
    row_ends = jnp.cumsum(jnp.asarray(group_sizes))  # [E]
    row = jnp.arange(x.shape[0], dtype=jnp.int32)
    real = row < row_ends[-1]
    group = jnp.sum(row[:, None] >= row_ends, axis=1, dtype=jnp.int32)  # [N], E past the last
    group = jnp.minimum(group, weights.shape[0] - 1)
    factors = None if scale is None else scale[group]
    weight = dequantize(weights[group], factors, x.dtype)  # [N, F, D]
    out = jnp.sum(weight.astype(jnp.float32) * x.astype(jnp.float32)[:, None], axis=-1)
    return jnp.where(real[:, None], out, jnp.zeros_like(out)).astype(x.dtype)


@jax.custom_vjp
def _differentiable(x, weights, group_sizes, scale):
    few = max(_FEW_ROWS, _FEW_ROWS_PER_GROUP * weights.shape[0])
    if platform() == "gpu" and x.shape[0] <= few:
        return multiply_row_by_row(x, weights, group_sizes, scale)
    return _multiply(x, weights, group_sizes, scale, axis=1)


def _forward(x, weights, group_sizes, scale):
    return _differentiable(x, weights, group_sizes, scale), (x, weights, group_sizes, scale)


def backward(saved, out_gradient):
    """The gradients for the saved (x, weights, group_sizes, scale); every backend's."""
    x, weights, group_sizes, scale = saved
    x_gradient = _multiply(out_gradient, weights, group_sizes, scale, axis=0)
    weight_gradient = None  # codes have none
    if scale is None:
        weight_gradient = _weight_gradient(x, out_gradient, weights, group_sizes)
    return x_gradient, weight_gradient, None, None


_differentiable.defvjp(_forward, backward)


def grouped_matmul(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, scale: jax.Array | None = None
) -> jax.Array:
    """Arguments and result as in `api.grouped_matmul`."""
    return _differentiable(x, weights, group_sizes, scale)
