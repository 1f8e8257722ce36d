"""The grouped matmul on Hopper GPUs: one persistent kernel, written in Pallas for Mosaic GPU.

A tile is a few rows of x of one group times some rows of that group's weight. The weight stands on
the left of the tensor cores' product, out^T = W x^T: there the other side may be as narrow as 8
rows, so that decoding reads each chosen expert once and multiplies little more than it must; and
an operand on the left may come from registers, which is where FP8 codes become bfloat16. One
warpgroup of every block copies tiles to shared memory, running ahead over the ends of output
tiles; the others multiply. Groups without rows cost nothing.

That FP8 codes are widened between shared memory and the tensor cores, in the layout of the left
operand, is how JAX's own mixed-type matmul for Hopper works; the ladder of copies that stores a
number of rows known only at run time is an idea of its ragged dot.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import SCALE_BLOCK, platform
from pallas_kernels.grouped_matmul import xla

# Rows of x are copied in units of this many: a tile starts at a multiple of it.
ROW_UNIT = 8
_SMEM_BYTES = 225 * 1024  # of a block's 227 KiB, the barriers' left out
_BF16, _FP8 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn)
_REGISTERS = {1: 240, 2: 232, 3: 152}  # per thread of a multiplying warpgroup, by their number


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The shape of a tile, and how the work is cut."""

    rows: int  # of x per tile: 8, 16, ... 256
    width: int  # rows of the weight per warpgroup: 64 or 128
    depth: int  # columns of the weight per step
    stages: int  # steps that are in shared memory at a time
    parts: int = 1  # the sum over columns is cut into so many, added up outside
    warpgroups: int = 2  # that multiply

    @property
    def out_rows(self) -> int:
        """Rows that are stored at a time."""
        return min(self.rows, 64 if self.parts == 1 else 32)


def require(x: Any, weights: Any) -> None:
    """Raises NotImplementedError unless this JAX, this device and these arguments will do."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
    if version < (0, 11, 1):
        raise NotImplementedError(f"it needs jax >= 0.11.1, this is {jax.__version__}")
    if jax.default_backend() == "gpu":
        capability = getattr(jax.devices()[0], "compute_capability", None)
        if str(capability) != "9.0":
            raise NotImplementedError(
                f"it needs a Hopper GPU (compute capability 9.0), this one has {capability}"
            )
    elif platform() != "gpu":  # else the program is compiled for a GPU elsewhere
        raise NotImplementedError(f"it needs a GPU, the default backend is {jax.default_backend()}")
    if x.dtype != _BF16 or weights.dtype not in (_BF16, _FP8):
        raise NotImplementedError(
            "it multiplies bfloat16 x with weights in bfloat16 or float8_e4m3fn, not "
            f"{x.dtype.name} with {weights.dtype.name}"
        )
    if weights.shape[-2] % 128 or weights.shape[-1] % 128:
        raise NotImplementedError(
            f"it needs multiples of 128, not weights of {weights.shape[-2]} x {weights.shape[-1]}"
        )


def num_tiles(num_rows: int, num_groups: int, rows: int) -> int:
    """Tiles that suffice for any group sizes, the rows past the last group included."""
    waste = rows + ROW_UNIT - 2  # per group that is not empty
    return (num_rows + (min(num_rows, num_groups) + 1) * waste) // rows


def schedule(group_sizes: jax.Array, num_rows: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Which tiles there are.

    Returns bounds [2, E + 1] int32, the first row and the first tile of each group and the number
    of rows and tiles in all groups; and groups, an int32 per tile, E for rows past the last group.
    A group may have a tile more than it needs: how its first row lies is left out of the count, so
    that both bounds are one reduction.
    """
    group_sizes = jnp.asarray(group_sizes)
    num_groups = len(group_sizes)
    tiles = jnp.where(group_sizes > 0, (group_sizes + (rows + ROW_UNIT - 2)) // rows, 0)
    each = jnp.arange(num_groups, dtype=jnp.int32)
    before = each < jnp.arange(num_groups + 1, dtype=jnp.int32)[:, None]  # [E + 1, E]
    counts = jnp.stack([group_sizes, tiles])[:, None]  # [2, 1, E]
    bounds = jnp.sum(jnp.where(before, counts, 0), axis=-1, dtype=jnp.int32)
    tile = jnp.arange(num_tiles(num_rows, num_groups, rows), dtype=jnp.int32)
    return bounds, jnp.sum(bounds[1, 1:] <= tile[:, None], axis=-1, dtype=jnp.int32)


def multiply(
    x: jax.Array,
    weights: jax.Array,
    scale: jax.Array | None,
    bounds: Any,
    groups: Any,
    tiling: Tiling,
    out_dtype: Any = _BF16,
    blocks: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Rows x [N, D] times their group's weight, N a multiple of 8 and at least tiling.rows.

    weights [E, F, D] with scale as in `api.grouped_matmul`, bounds and groups as `schedule`
    returns them. Gives [N, F], or float32 [parts, N, F] where the sum is cut into parts. `blocks`
    is one per multiprocessor by default.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu  # its names come and go with jax's versions
    num_rows, depth = x.shape[0], tiling.depth
    num_groups, num_columns, _ = weights.shape
    rows, width, stages, parts = tiling.rows, tiling.width, tiling.stages, tiling.parts
    workers, out_rows = tiling.warpgroups, tiling.out_rows
    across = num_columns // (width * workers)  # tiles side by side
    steps = x.shape[1] // depth // parts
    halves = width // 64
    # A step's products may run on into the next step where both sides lie in shared memory. From
    # registers they may not: the next step overwrites those (found as wrong sums). Within a step
    # the second half is widened, in registers of its own, while the first is multiplied.
    flying = halves if scale is None else 0
    dtype = jnp.dtype(jnp.float32) if parts > 1 else jnp.dtype(out_dtype)
    grid: int = blocks or getattr(jax.devices()[0], "core_count", None) or 132

    def store(ref, value):
        """Bank conflicts allowed, which jax 0.12 wants to be told."""
        if hasattr(plgpu, "store"):
            plgpu.store(ref, value, optimized=False)
        else:
            ref[...] = value

    def body(*refs, x_smem, w_smem, out_smem, full, empty):
        x_ref, w_ref, *scale_ref, bounds_ref, groups_ref, out_ref = refs
        worker, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        rest = num_rows - lax.div(bounds_ref[0, num_groups], ROW_UNIT) * ROW_UNIT
        rest = lax.select(
            bounds_ref[0, num_groups] < num_rows, lax.div(rest + (rows - 1), rows), jnp.int32(0)
        )
        tiles = jnp.minimum(bounds_ref[1, num_groups] + rest, groups.shape[0]) * (across * parts)
        mine = lax.div(tiles - block + (grid - 1), grid)

        def find(i):
            """My i-th tile: group, first row, the rows of it that count, column, part, steps."""
            tile = block + i * grid
            down = jnp.minimum(lax.div(tile, across * parts), groups.shape[0] - 1)
            tile = lax.rem(tile, across * parts)
            group = groups_ref[down]
            start = bounds_ref[0, group]
            end = lax.select(
                group < num_groups, bounds_ref[0, jnp.minimum(group + 1, num_groups)], num_rows
            )
            first = lax.div(start, ROW_UNIT) * ROW_UNIT + (down - bounds_ref[1, group]) * rows
            low = jnp.clip(start - first, 0, rows)
            high = jnp.maximum(jnp.clip(jnp.minimum(end, num_rows) - first, 0, rows), low)
            count = lax.select((group < num_groups) & (low < high), steps, 0)
            column = lax.rem(tile, across) * (width * workers)
            return group, first, low, high, column, lax.div(tile, across), count

        def each_tile(function):
            """Calls function(done, group, first, ...) for my tiles; it gives the steps done so far.

            Where the next tile is gets looked up while this one is at work: a read of a read.
            """

            def tile(i, carry):
                done, (group, first, low, high, column, part, count) = carry
                following = find(i + 1)
                first = pl.multiple_of(first, ROW_UNIT)
                column = pl.multiple_of(column, width * workers)
                return function(done, group, first, low, high, column, part, count), following

            return lax.fori_loop(0, mine, tile, (jnp.int32(0), find(0)))[0]

        @pl.when(worker == workers)
        def _copy():
            plgpu.set_max_registers(40, action="decrease")

            def tile(done, group, first, low, high, column, part, count):
                def step(k, done):
                    slot = lax.rem(done, stages)
                    at = pl.ds((part * steps + k) * depth, depth)

                    @pl.when(done >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    plgpu.copy_gmem_to_smem(
                        w_ref.at[group, pl.ds(column, width * workers), at],
                        w_smem.at[slot],
                        full.at[slot],
                    )
                    plgpu.copy_gmem_to_smem(
                        x_ref.at[pl.ds(first, rows), at], x_smem.at[slot], full.at[slot]
                    )
                    return done + 1

                return lax.fori_loop(0, count, step, done)

            done = each_tile(tile)

            def drain(step, _):
                plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

            lax.fori_loop(jnp.maximum(done - stages, 0), done, drain, None)

        @pl.when(worker < workers)
        def _multiply():
            plgpu.set_max_registers(_REGISTERS[workers], action="increase")

            def tile(done, group, first, low, high, column, part, count):
                own = pl.multiple_of(column + worker * width, width)

                def factor(k):
                    k = part * steps + jnp.minimum(k, steps - 1)
                    return scale_ref[0][
                        jnp.minimum(group, num_groups - 1),
                        lax.div(own, SCALE_BLOCK),
                        lax.div(k * depth, SCALE_BLOCK),
                    ]

                def give_back(step, when):
                    @pl.when(when)
                    def _():
                        plgpu.barrier_arrive(empty.at[lax.rem(step, stages)])

                def products(*sums):
                    def step(k, carry):
                        done, now = carry[0], carry[1:]
                        slot = lax.rem(done, stages)
                        following = [factor(k + 1)] if scale is not None else []
                        plgpu.barrier_wait(full.at[slot])
                        right = x_smem.at[slot].transpose((1, 0))  # [depth, rows]
                        for half in range(halves):
                            at = pl.multiple_of(worker * width + half * 64, 64)
                            left = w_smem.at[slot, pl.ds(at, 64)]  # [64, depth]
                            if scale is not None:
                                left = left[...].astype(jnp.float32) * now[0]
                                left = left.astype(jnp.bfloat16)
                            plgpu.wgmma(sums[half], left, right)
                        plgpu.wgmma_wait(flying)
                        if flying:
                            give_back(done + (stages - 1), k > 0)
                        else:
                            plgpu.barrier_arrive(empty.at[slot])
                        return (done + 1, *following)

                    start = (done, *([factor(0)] if scale is not None else []))
                    end = lax.fori_loop(0, count, step, start)[0]
                    if flying:
                        plgpu.wgmma_wait(0)
                        give_back(end + (stages - 1), count > 0)
                    return [total[...].astype(dtype) for total in sums]

                sums = [plgpu.ACC((64, rows), jnp.float32) for _ in range(halves)]
                sums = pl.run_scoped(products, *sums)
                target = out_ref.at[part] if parts > 1 else out_ref
                for row in range(0, rows, out_rows):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for half in range(halves):
                        piece = sums[half][:, row : row + out_rows]
                        piece = plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED)
                        place = out_smem.at[worker, :, pl.ds(half * 64, 64)]
                        store(place.transpose((1, 0)), piece)
                    plgpu.commit_smem()
                    # The other rows are another group's. A copy has a fixed number of rows: one
                    # for each bit of the number wanted.
                    at = jnp.clip(low - row, 0, out_rows)
                    left, size = jnp.clip(high - row, 0, out_rows) - at, out_rows
                    while size:

                        @pl.when((left & size) != 0)
                        def _(row=row, at=at, size=size):
                            plgpu.copy_smem_to_gmem(
                                out_smem.at[worker, pl.ds(at, size)],
                                target.at[pl.ds(first + row + at, size), pl.ds(own, width)],
                            )

                        at = at + (left & size)
                        size //= 2
                return done + count

            each_tile(tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    def swizzled(dtype):
        shape = (8, 128 // dtype.itemsize)
        return plgpu.TilingTransform(shape), plgpu.SwizzleTransform(128)

    out_shape = (num_rows, num_columns) if parts == 1 else (parts, num_rows, num_columns)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out_shape, dtype),
        grid=(grid,),
        grid_names=("block",),
        num_threads=workers + 1,
        thread_name="warpgroup",
        interpret=interpret,
        scratch_types={
            "x_smem": plgpu.SMEM((stages, rows, depth), x.dtype, transforms=swizzled(x.dtype)),
            "w_smem": plgpu.SMEM(
                (stages, width * workers, depth), weights.dtype, transforms=swizzled(weights.dtype)
            ),
            "out_smem": plgpu.SMEM((workers, out_rows, width), dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
        },
    )
    scales = () if scale is None else (scale,)
    return kernel(x, weights, *scales, bounds, groups)


def fit(rows: int, weights: Any, parts: int = 1, out_bytes: int = 2) -> Tiling:
    """A tiling with so many rows and as many stages as shared memory holds."""
    size = weights.dtype.itemsize
    wide = rows >= (16 if size == 1 else 128) and weights.shape[-2] % 256 == 0
    width = 128 if wide else 64
    tiling = Tiling(rows, width, depth=128 if size == 1 else 64, stages=0, parts=parts)
    staged = tiling.warpgroups * tiling.out_rows * width * (4 if parts > 1 else out_bytes)
    step = tiling.depth * (tiling.warpgroups * width * size + rows * 2)
    return dataclasses.replace(tiling, stages=min(12, (_SMEM_BYTES - staged) // step))


def tile_rows(num_rows: int, num_groups: int) -> int:
    """Rows per tile: most groups should fit in one, wherever their first row lies."""
    wanted = 3 * num_rows // (2 * num_groups) + ROW_UNIT
    rows = ROW_UNIT
    while rows < min(wanted, 128) and 2 * rows <= num_rows:
        rows *= 2
    return rows


@jax.custom_vjp
def _differentiable(x, weights, group_sizes, scale):
    num_rows = x.shape[0]
    x = jnp.pad(x, ((0, -num_rows % ROW_UNIT), (0, 0)))  # of a batch times 8 experts: none
    tiling = fit(tile_rows(x.shape[0], weights.shape[0]), weights)
    bounds, groups = schedule(group_sizes, x.shape[0], tiling.rows)
    return multiply(x, weights, scale, bounds, groups, tiling)[:num_rows]


def _forward(x, weights, group_sizes, scale):
    return _differentiable(x, weights, group_sizes, scale), (x, weights, group_sizes, scale)


def _backward(saved, out_gradient):
    x, weights, group_sizes, scale = saved
    if scale is not None:  # codes have no gradient
        product = functools.partial(xla.grouped_matmul, scale=scale)
        _, pull = jax.vjp(lambda x: product(x, weights, group_sizes), x)
        return *pull(out_gradient), None, None, None
    _, pull = jax.vjp(lambda x, w: xla.grouped_matmul(x, w, group_sizes), x, weights)
    return *pull(out_gradient), None, None


_differentiable.defvjp(_forward, _backward)


def grouped_matmul(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, scale: jax.Array | None = None
) -> jax.Array:
    """Arguments and result as in `api.grouped_matmul`. The gradients are those of `xla`.

    Raises:
        NotImplementedError: jax < 0.11.1, no Hopper GPU, or arguments `require` refuses.
    """
    require(x, weights)
    return _differentiable(x, weights, group_sizes, scale)
