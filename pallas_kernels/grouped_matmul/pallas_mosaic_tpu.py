"""The grouped matmul as one Pallas kernel for TPU.

Rows are cut into tiles at multiples of the tile's height, so a tile may hold rows of several
groups. The grid visits each pair of a tile and a group that has rows in it, in the order of the
rows; a visit multiplies the whole tile by that group's weight and keeps the group's own rows. (The
scheme is MegaBlocks', https://arxiv.org/abs/2211.15841, as other TPU kernels have it too.) How many
pairs there are is known on the device only, so the grid has the largest number that there can be,
and visits that are not needed name the blocks of the visit before: Pallas then copies nothing.

Weights are most of what is read. All of D is in a block, so the visits of one group, which follow
each other, read its weight once. Weights that no row chose are not read; where no row chose any,
one block is, since a pipeline starts with a copy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import SCALE_BLOCK, platform
from pallas_kernels.grouped_matmul import xla

_VMEM_LIMIT = 56 * 2**20  # of the 64 MiB that the smallest of the supported chips has
_MOST_IN_BLOCKS = 44 * 2**20  # the rest is for values that do not fit into registers

# Rows of the table of visits.
_GROUP, _X_TILE, _OUT_TILE, _FIRST_ROW, _END_ROW, _WEIGHTS_USED = range(6)


def num_visits(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """Visits that suffice for any group sizes, where the rows of no group are a group too."""
    tiles = -(-num_rows // tile_rows)
    return tiles + min(num_rows, num_groups + 1) - 1


def visits(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> jax.Array:
    """What each visit works on, [6, V] int32.

    Rows: the group whose weight it holds; the tile of x; the tile of out; the first row within that
    tile that is the group's own, and the one after the last (equal: nothing to multiply); whether
    any weight is used at all. Sums over [V, E + 1] and no gather, to be one small fusion.
    """
    num_groups = group_sizes.shape[0]
    ends = jnp.minimum(jnp.cumsum(jnp.asarray(group_sizes)), num_rows)
    ends = jnp.concatenate([ends, jnp.full((1,), num_rows, jnp.int32)])  # the rows of no group
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    first_tiles = starts // tile_rows
    counts = jnp.where(ends > starts, (ends + tile_rows - 1) // tile_rows - first_tiles, 0)
    visit_ends = jnp.cumsum(counts)

    visit = jnp.arange(num_visits(num_rows, num_groups, tile_rows), dtype=jnp.int32)
    needed = visit < visit_ends[-1]
    visit = jnp.minimum(visit, visit_ends[-1] - 1)
    group = jnp.sum(visit[:, None] >= visit_ends, axis=1, dtype=jnp.int32)  # [V]
    own = group[:, None] == jnp.arange(num_groups + 1, dtype=jnp.int32)  # [V, E + 1]

    def of_group(values):
        return jnp.sum(jnp.where(own, values, 0), axis=1, dtype=jnp.int32)

    tile = of_group(first_tiles + counts - visit_ends) + visit
    first_row = jnp.clip(of_group(starts) - tile * tile_rows, 0, tile_rows)
    end_row = jnp.clip(of_group(ends) - tile * tile_rows, 0, tile_rows)
    multiplied = needed & (group < num_groups)

    # The rows of no group come last and hold on to the blocks of the last group before them.
    groups = jnp.arange(num_groups, dtype=jnp.int32)
    last_group = jnp.max(jnp.where(counts[:-1] > 0, groups, 0))
    last_tile = jnp.maximum(ends[-2] - 1, 0) // tile_rows
    return jnp.stack(
        [
            jnp.minimum(group, last_group),
            jnp.minimum(tile, last_tile),
            tile,
            first_row,
            jnp.where(multiplied, end_row, first_row),
            jnp.broadcast_to((ends[-2] > 0).astype(jnp.int32), visit.shape),
        ]
    )


def _visits_of_one_group(num_rows: int, tile_rows: int) -> np.ndarray:
    """`visits` where the only group has all rows."""
    tile = np.arange(-(-num_rows // tile_rows), dtype=np.int32)
    zero = np.zeros_like(tile)
    end_row = np.minimum(num_rows - tile * tile_rows, tile_rows).astype(np.int32)
    return np.stack([zero, tile, tile, zero, end_row, zero + 1])


def converts_codes() -> bool:
    """Whether the chip converts float8_e4m3fn by itself; yes where the chip is not known.

    Chips before TPU7x convert float8_e4m3b11fnuz, and Pallas makes up for the difference with eight
    operations per element where `_values` needs three.
    """
    return not pltpu.is_tpu_device() or pltpu.get_tpu_info().generation >= 7


def _values(codes: jax.Array, native: bool) -> tuple[jax.Array, float]:
    """float8_e4m3fn codes [F, D] in float32, and the factor that they lack.

    Not native: the bits as float8_e4m3b11fnuz, which has four less in the exponent and is otherwise
    the same but for the codes without a finite value: 0x80 is -0 in the one and NaN in the other,
    so it becomes 0. (Released weights have no NaN; it would come out as 480.)
    """
    if native:
        return codes.astype(jnp.float32), 1.0
    bits = pltpu.bitcast(codes, jnp.int32)  # four codes each
    low = jnp.int32(0x7F7F7F7F)
    keep = ((bits & low) + low) | low  # a byte's top bit is kept where one below is set
    codes = pltpu.bitcast(bits & keep, jnp.float8_e4m3b11fnuz)
    return codes.astype(jnp.float32), 16.0


def _weight_in_full(codes, scale, first_block, dtype, native):
    """codes [F, D] times their factors, which start at scale[0, first_block, 0], in dtype."""
    values, unit = _values(codes, native)
    F, D = codes.shape

    def factor(i, j):
        # The last tile may reach past the weight's end, where its results are dropped.
        return scale[0, jnp.minimum(first_block + i, scale.shape[1] - 1), j] * unit

    rows = [
        jnp.concatenate(
            [
                values[i : i + SCALE_BLOCK, j : j + SCALE_BLOCK]
                * factor(i // SCALE_BLOCK, j // SCALE_BLOCK)
                for j in range(0, D, SCALE_BLOCK)
            ],
            axis=1,
        )
        for i in range(0, F, SCALE_BLOCK)
    ]
    return jnp.concatenate(rows, axis=0).astype(dtype)


def _kernel(table, x, weights, *rest, in_a_dot, native):
    """One visit: x [tile rows, D] times weights [1, tile columns, D], `in_a_dot` columns each."""
    scale, out = rest if len(rest) == 2 else (None, *rest)
    visit = pl.program_id(1)
    first_row, end_row = table[_FIRST_ROW, visit], table[_END_ROW, visit]
    tile, tile_before = table[_OUT_TILE, visit], table[_OUT_TILE, jnp.maximum(visit - 1, 0)]
    opens_tile = jnp.logical_or(visit == 0, tile != tile_before)
    first_block = pl.program_id(0) * (weights.shape[1] // SCALE_BLOCK)

    @pl.when(end_row > first_row)
    def multiply():
        row = lax.broadcasted_iota(jnp.int32, (out.shape[0], in_a_dot), 0)
        own = (row >= first_row) & (row < end_row)

        def some_columns(i, _):
            columns = pl.ds(pl.multiple_of(i * in_a_dot, in_a_dot), in_a_dot)

            weight = weights[0, columns, :]
            if scale is None:
                weight = weight.astype(x.dtype)
            else:
                first = first_block + i * (in_a_dot // SCALE_BLOCK)
                weight = _weight_in_full(weight, scale, first, x.dtype, native)
            product = lax.dot_general(
                x[...],
                weight,
                (((1,), (1,)), ((), ())),
                precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            ).astype(out.dtype)
            # What the tile holds before its first visit is selected away, whatever it is.
            before = jnp.where(opens_tile, jnp.zeros_like(product), out[:, columns])
            out[:, columns] = jnp.where(own, product, before)

        lax.fori_loop(0, weights.shape[1] // in_a_dot, some_columns, None)

    @pl.when((end_row <= first_row) & opens_tile)
    def clear():
        out[...] = jnp.zeros(out.shape, out.dtype)


def tiles(N: int, E: int, F: int, D: int, x_bytes: int, weight_bytes: int) -> tuple[int, int, int]:
    """Rows and columns of a tile of the result, and how many of its columns are one dot.

    Static schedules for v6e say what is fast. FP8 weights need dots of 4 Mi elements for their
    conversion to hide behind the copying of the next block; others are read in blocks of 4 MiB,
    too. A tile has more rows where an average group fills them, and more columns where x is large,
    since x is read once per tile of columns.
    """
    average = N // E
    rows = next((r for r in (64, 128, 256) if average <= {64: 16, 128: 64, 256: 512}[r]), 512)
    while rows > 64 and rows * D * x_bytes > 8 * 2**20:
        rows //= 2

    def split(most):
        parts = -(-F // most)  # the fewest, then as equal as blocks of the scale allow
        return F if parts == 1 else -(-F // (parts * SCALE_BLOCK)) * SCALE_BLOCK

    elements = 4 * 2**20 // max(weight_bytes, x_bytes // 2)
    in_a_dot = split(min(max(elements // D // SCALE_BLOCK, 1) * SCALE_BLOCK, 2048))
    columns = in_a_dot
    if average > 512 and columns < 512 <= F:
        columns *= 512 // columns
    return min(rows, N), columns, in_a_dot


def multiply(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array | None,
    scale: jax.Array | None,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """The launch: arguments as in `api.grouped_matmul`, the result [N, F] in out_dtype.

    group_sizes None: there is one group, and it has all rows.
    """
    (N, D), (E, F, _) = x.shape, weights.shape
    dtypes = {"x": x.dtype, "out": out_dtype}
    if scale is None:
        dtypes["weights"] = weights.dtype
    for name, dtype in dtypes.items():
        if dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(f"{name} in {jnp.dtype(dtype).name}")
    sizes = x.dtype.itemsize, weights.dtype.itemsize
    tile_rows, tile_columns, in_a_dot = tiles(N, E, F, D, *sizes)
    out_bytes = jnp.dtype(out_dtype).itemsize
    in_blocks = 2 * (  # each is read or written while the next or the last is worked on
        (tile_rows * sizes[0] + tile_columns * sizes[1]) * D + tile_rows * tile_columns * out_bytes
    )
    if in_blocks > _MOST_IN_BLOCKS:
        raise NotImplementedError(f"rows of {D=} and {F=} do not fit into VMEM")
    native = converts_codes() or in_a_dot % 32 != 0  # int32 holds four rows of codes
    if group_sizes is None:
        table = jnp.asarray(_visits_of_one_group(N, tile_rows))
    else:
        table = visits(group_sizes, N, tile_rows)

    def weight_block(f, v, table):
        return table[_GROUP, v], jnp.where(table[_WEIGHTS_USED, v] > 0, f, 0), 0

    in_specs = [
        pl.BlockSpec((tile_rows, D), lambda f, v, table: (table[_X_TILE, v], 0)),
        pl.BlockSpec((1, tile_columns, D), weight_block),
    ]
    if scale is not None:
        in_specs.append(
            pl.BlockSpec(
                (1, *scale.shape[1:]),
                lambda f, v, table: (table[_GROUP, v], 0, 0),
                memory_space=pltpu.SMEM,
            )
        )
    return pl.pallas_call(
        functools.partial(_kernel, in_a_dot=in_a_dot, native=native),
        out_shape=jax.ShapeDtypeStruct((N, F), out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-F // tile_columns), table.shape[1]),
            in_specs=in_specs,
            out_specs=pl.BlockSpec(
                (tile_rows, tile_columns), lambda f, v, table: (table[_OUT_TILE, v], f)
            ),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        interpret=platform() != "tpu",
        name="grouped_matmul",
    )(table, x, weights, *(() if scale is None else (scale,)))


@jax.custom_vjp
def _differentiable(x, weights, group_sizes, scale):
    return multiply(x, weights, group_sizes, scale, x.dtype)


def _forward(x, weights, group_sizes, scale):
    return _differentiable(x, weights, group_sizes, scale), (x, weights, group_sizes, scale)


_differentiable.defvjp(_forward, xla.backward)


def grouped_matmul(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, scale: jax.Array | None = None
) -> jax.Array:
    """Arguments and result as in `api.grouped_matmul`; gradients are those of `xla`."""
    return _differentiable(x, weights, group_sizes, scale)
