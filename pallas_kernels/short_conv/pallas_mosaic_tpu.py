"""The short convolution as one Pallas kernel for TPU, with its SiLU, its splits and its state.

A grid step covers some channels, a few rows of the batch and some tokens of each. What of this lies
along the sublanes of the vector registers is what XLA lays there: the tokens, except where the
tokens are so few that the batch fills a tile better (decoding). The new state likewise is written
with the batch along the sublanes, which is how XLA keeps an array [B, 3, C]. So `swapaxes` around
the launch moves nothing.

Tokens along the sublanes: a block is unpacked to float32 into scratch memory behind the W - 1
tokens before it, and read back at W offsets. Loads may start at any row of a scratch array that is
128 lanes wide, which costs nothing, where rotating registers and selecting between them costs two
operations per offset. What follows in the same row of the batch finds the last tokens in scratch.
Batch along the sublanes: every token and every row of the state is an array [B, C] of its own.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import count_valid, platform

LANES = 128
_VMEM_LIMIT = 56 * 2**20  # of the 64 MiB that the smallest of the supported chips has
_MOST_IN_BLOCKS = 48 * 2**20
_HEAD = 8  # rows of scratch before the first token of a block; the last W - 1 of them hold history
_WIDEST = 512  # channels in a block, or twice that where the batch is in rows
_MOST_BATCH = 128  # rows of the batch in a block, where they are in rows
_MOST_ELEMENTS = 2**20  # in a block
_UNROLLED = 1024  # tokens in a loop's body: that many hide the latencies of loads, tanh and stores
_ROWS = 16  # rows that are worked on at a time, one packed register of bfloat16


class Plan(NamedTuple):
    """How a call is cut into steps."""

    batch_in_rows: bool  # whether the batch, not the tokens, lies along the sublanes
    swapped: bool  # whether the state comes as [W - 1, B, C]
    splits: int
    width: int  # W
    batch: int  # rows of the batch in a step
    tokens: int  # tokens in a step
    lanes: int  # channels in a step
    vmem: int  # bytes


def _tile_rows(n: int) -> int:
    """Rows that an array of n rows of bfloat16 takes in HBM, where tiles have 2, 4 or 8."""
    return next((rows for rows in (2, 4, 8) if n <= rows), -(-n // 8) * 8)


def plan(B: int, T: int, C: int, W: int, dtype, splits: int) -> Plan:
    """The blocks of a call. Raises NotImplementedError where the kernel cannot do it."""
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"x in {dtype.name}, only bfloat16 and float32")
    if C % (splits * LANES):
        raise NotImplementedError(f"{C=} in {splits=}, only multiples of {LANES} channels in each")
    if not 2 <= W <= _HEAD:
        raise NotImplementedError(f"{W=}, only 2 to {_HEAD}")
    # As XLA chooses between the two, [B, T, C] or [T, B, C] in HBM. It takes the former for many
    # rows of 2 or 4 tokens too; a copy and registers full of rows are then 4 times as fast.
    batch_in_rows = B > 1 and T < 8 and (_tile_rows(T) * B > _tile_rows(B) * T or B >= 8)

    tiles = C // splits // LANES
    widest = _WIDEST * (2 if batch_in_rows else 1) // LANES
    fitting = [n for n in range(1, widest + 1) if tiles % n == 0]
    # An even number of blocks of channels keeps both cores of a v5p busy.
    even = [n for n in fitting if tiles // n % 2 == 0]

    def of_lanes(lanes):
        if batch_in_rows:
            batch, tokens = min(B, _MOST_BATCH), T
        else:
            most = _MOST_ELEMENTS // lanes
            tokens = T if T <= _UNROLLED else min(T, most) // _UNROLLED * _UNROLLED
            together = most // tokens if tokens == T else 1  # history is kept for one row only
            batch = max(n for n in range(1, max(1, min(B, together)) + 1) if B % n == 0)
        state_rows = (W - 1) * (batch if batch_in_rows else max(_tile_rows(B), 8))
        rows = batch * _tile_rows(tokens)
        in_blocks = 4 * (rows * (1 + splits) // 2 + state_rows) * lanes * dtype.itemsize
        scratch = 0 if batch_in_rows else 4 * (state_rows + _HEAD + _tile_rows(tokens)) * lanes
        return Plan(batch_in_rows, B > 1, splits, W, batch, tokens, lanes, in_blocks + scratch)

    plans = [of_lanes(n * LANES) for n in sorted(even or fitting, reverse=True)]
    for p in plans:
        if p.vmem <= _MOST_IN_BLOCKS:
            return p
    raise NotImplementedError(f"the state of {B=} rows and {W=} does not fit into VMEM")


def _lanes(tile):
    return pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)


def _chunks(rows: int, height: int = _ROWS):
    return [(start, min(height, rows - start)) for start in range(0, rows, height)]


def _taps(weight, lanes, dtype):
    """The W rows of weight [W, lanes]; halved for `_silu_of_sum` in bfloat16, which is exact."""
    taps = [weight[pl.ds(j, 1), lanes] for j in range(weight.shape[0])]
    return [0.5 * w for w in taps] if dtype == jnp.bfloat16 else taps


def _silu_of_sum(taps, rows, dtype):
    """silu(sum_j taps[j] * rows[j]) in float32, the oldest row first; taps as `_taps` makes them.

    x sigmoid(x) = h + h tanh(h) with h = x / 2: one transcendental and two other operations, where
    a sigmoid takes two and more. Its error is float32's epsilon times x, which is large beside
    silu(x) where x is far below 0, so float32 results take the sigmoid.
    """
    total = taps[0] * rows[0]
    for tap, row in zip(taps[1:], rows[1:], strict=True):
        total += tap * row
    if dtype == jnp.bfloat16:
        return total + total * jnp.tanh(total)
    return total * lax.logistic(total)


def _to_split(split, outs, write):
    """Calls write(out) with the output that a grid step of `split` is for."""
    if len(outs) == 1:
        write(outs[0])
        return
    for i, out in enumerate(outs):
        pl.when(split == i)(functools.partial(write, out))


def _batch_kernel(num_valid, x, weight, state, *rest, p: Plan, B: int):
    """x [T, batch, lanes], state [W - 1, batch, lanes] -> as many."""
    outs, new_state, valid = rest[: p.splits], rest[p.splits], rest[p.splits + 1]
    T, batch, lanes = x.shape
    first = lax.rem(pl.program_id(0), pl.cdiv(B, batch)) * batch
    split = pl.program_id(1)

    @pl.when(split == 0)
    def spread_num_valid():
        for row in range(batch):
            n = num_valid[jnp.minimum(first + row, B - 1)]
            valid[row : row + 1, :] = jnp.full((1, LANES), n, jnp.int32)

    def compute(out):
        def one_tile(tile, _):
            at = _lanes(tile)
            taps = _taps(weight, at, x.dtype)
            for start, height in _chunks(batch):
                rows = pl.ds(start, height)
                n = valid[rows, :]
                u = [state[j, rows, at].astype(jnp.float32) for j in range(p.width - 1)]
                u += [x[t, rows, at].astype(jnp.float32) for t in range(T)]
                for t in range(T):
                    y = _silu_of_sum(taps, u[t : t + p.width], x.dtype)
                    out[t, rows, at] = jnp.where(n > t, y, 0.0).astype(out.dtype)
                for j in range(p.width - 1):
                    row = u[j]
                    for m in range(1, T + 1):
                        row = jnp.where(n >= m, u[j + m], row)
                    new_state[j, rows, at] = row.astype(new_state.dtype)

        # Enough work in the loop's body to hide its latencies, if the batch is small too.
        unroll = min(lanes // LANES, max(1, _MOST_BATCH // batch))
        lax.fori_loop(0, lanes // LANES, one_tile, None, unroll=unroll)

    _to_split(split, outs, compute)


def _token_kernel(num_valid, x, weight, state, *rest, p: Plan):
    """x [batch, tokens, lanes] -> as many; state of the whole batch, written at its last step."""
    outs, (new_state, history, moved) = rest[: p.splits], rest[p.splits :]
    batch, tokens, lanes = x.shape
    split, step, block = (pl.program_id(axis) for axis in (1, 2, 3))
    closes = (step == pl.num_programs(2) - 1) & (block == pl.num_programs(3) - 1)
    tiles, before = lanes // LANES, p.width - 1

    @pl.when((step == 0) & (block == 0))
    def open_state():
        for tile in range(tiles):
            moved[tile] = state[:, :, tile * LANES : (tile + 1) * LANES].astype(jnp.float32)

    def state_at(tile, j, row):
        return (tile, j, pl.ds(row, 1)) if p.swapped else (tile, 0, pl.ds(j, 1))

    def of_row(i, _):
        row = step * batch + i
        ahead = num_valid[row] - block * tokens
        valid = jnp.clip(ahead, 0, tokens)  # tokens in this block

        @pl.when((valid > 0) & (block == 0))
        def load_history():
            for tile in range(tiles):
                for j in range(before):
                    old = moved[state_at(tile, j, row)]
                    history[tile, pl.ds(_HEAD - before + j, 1), :] = old

        def compute(out):
            def one_tile(tile, _):
                at = _lanes(tile)
                taps = _taps(weight, at, x.dtype)

                def some_tokens(part, _):
                    start = pl.multiple_of(part * _UNROLLED, _UNROLLED)
                    chunks = _chunks(min(_UNROLLED, tokens))

                    def unpack(chunk):
                        first, height = chunk
                        rows = x[i, pl.ds(start + first, height), at].astype(jnp.float32)
                        history[tile, pl.ds(start + first + _HEAD, height), :] = rows

                    # The compiler keeps the order of what may touch the same memory, so the order
                    # here is the schedule's: two chunks are on their way while one is read.
                    for chunk in chunks[:2]:
                        unpack(chunk)
                    for k, (first, height) in enumerate(chunks):
                        if k + 2 < len(chunks):
                            unpack(chunks[k + 2])
                        oldest = start + first + _HEAD - before
                        u = [history[tile, pl.ds(oldest + j, height), :] for j in range(p.width)]
                        y = _silu_of_sum(taps, u, x.dtype).astype(out.dtype)
                        out[i, pl.ds(start + first, height), at] = y

                lax.fori_loop(0, pl.cdiv(tokens, _UNROLLED), some_tokens, None)

            # Where the tokens are few, several tiles of channels hide the latencies.
            unroll = min(tiles, max(1, _UNROLLED // tokens))
            lax.fori_loop(0, tiles, one_tile, None, unroll=unroll)

        def clear_padding(out):
            def clear(start, height):
                token = start + lax.broadcasted_iota(jnp.int32, (height, LANES), 0)
                for tile in range(tiles):
                    at = i, pl.ds(start, height), pl.ds(tile * LANES, LANES)
                    y = jnp.where(token < valid, out[at].astype(jnp.float32), 0.0)
                    out[at] = y.astype(out.dtype)

            def some_rows(part, _):
                clear(pl.multiple_of(part * _ROWS, _ROWS), _ROWS)

            whole = tokens // _ROWS
            if whole:
                lax.fori_loop(jnp.minimum(lax.div(valid, _ROWS), whole), whole, some_rows, None)
            if tokens % _ROWS:
                clear(whole * _ROWS, tokens % _ROWS)

        def write(out):
            pl.when(valid > 0)(lambda: compute(out))
            pl.when(valid < tokens)(lambda: clear_padding(out))

        _to_split(split, outs, write)

        @pl.when((valid > 0) & (ahead <= tokens))
        def move_state():
            for tile in range(tiles):
                for j in range(before):
                    new = history[tile, pl.ds(valid + _HEAD - before + j, 1), :]
                    moved[state_at(tile, j, row)] = new

        if tokens % _HEAD == 0:  # else it is the only block

            @pl.when(ahead > tokens)
            def keep_history():
                for tile in range(tiles):
                    history[tile, 0:_HEAD, :] = history[tile, pl.ds(tokens, _HEAD), :]

    lax.fori_loop(0, batch, of_row, None)

    @pl.when(closes)
    def close_state():
        for tile in range(tiles):
            new = moved[tile].astype(new_state.dtype)
            new_state[:, :, tile * LANES : (tile + 1) * LANES] = new


def launch(
    x: jax.Array,
    weight: jax.Array,
    conv_state: jax.Array,
    num_valid: jax.Array | None,
    splits: int,
    *,
    interpret=None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Arguments and results as in `api.short_conv`, but always a tuple of outputs.

    interpret: as in `pl.pallas_call`; None: unless the program is for TPUs.
    """
    (B, T, C), W = x.shape, weight.shape[1]
    p = plan(B, T, C, W, x.dtype, splits)
    if interpret is None:
        interpret = platform() != "tpu"
    cuts = C // splits // p.lanes  # blocks of channels in each output

    # Grid: blocks of channels (and of the batch, if that lies in rows) x outputs x rows x tokens.
    # A block of channels goes through all outputs, so that each output's blocks are written by one
    # core and in one go; while others are written, an output's block stays where it is.
    if p.batch_in_rows:
        batches = pl.cdiv(B, p.batch)
        grid = (cuts * batches, splits, 1, 1)
        block, state_block = (T, p.batch, p.lanes), (W - 1, p.batch, p.lanes)
        kernel = functools.partial(_batch_kernel, p=p, B=B)
        scratch = [pltpu.VMEM((p.batch, LANES), jnp.int32)]
    else:
        batches = 1
        grid = (cuts, splits, B // p.batch, pl.cdiv(T, p.tokens))
        block = p.batch, p.tokens, p.lanes
        state_block = (W - 1, B, p.lanes) if p.swapped else (B, W - 1, p.lanes)
        kernel = functools.partial(_token_kernel, p=p)
        tiles, rows = p.lanes // LANES, _HEAD + pl.cdiv(p.tokens, 8) * 8
        scratch = [
            pltpu.VMEM((tiles, rows, LANES), jnp.float32),
            pltpu.VMEM((tiles, *state_block[:2], LANES), jnp.float32),
        ]

    def weight_index(outer, split, row, part, num_valid):
        return 0, split * cuts + lax.div(outer, batches)

    def state_index(outer, split, row, part, num_valid):
        return 0, lax.rem(outer, batches), split * cuts + lax.div(outer, batches)

    def x_index(outer, split, row, part, num_valid):
        if p.batch_in_rows:
            return state_index(outer, split, row, part, num_valid)
        if grid[3] > 1:  # what holds only padding is not read: the block before it stays
            last = lax.div(jnp.maximum(num_valid[row] - 1, 0), p.tokens)
            part = jnp.minimum(part, last)
        return row, part, split * cuts + outer

    def out_index(own, outer, split, row, part, num_valid):
        if p.batch_in_rows:
            return 0, lax.rem(outer, batches), lax.div(outer, batches)
        now, early = split == own, split < own
        row = jnp.where(now, row, jnp.where(early, 0, grid[2] - 1))
        part = jnp.where(now, part, jnp.where(early, 0, grid[3] - 1))
        return row, part, outer

    if p.batch_in_rows:
        x = x.swapaxes(0, 1)
    if p.swapped:
        conv_state = conv_state.swapaxes(0, 1)
    shape = (*x.shape[:2], C // splits)
    *y, conv_state = pl.pallas_call(
        kernel,
        out_shape=[
            *[jax.ShapeDtypeStruct(shape, x.dtype)] * splits,
            jax.ShapeDtypeStruct(conv_state.shape, conv_state.dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[
                pl.BlockSpec(block, x_index),
                pl.BlockSpec((W, p.lanes), weight_index),
                pl.BlockSpec(state_block, state_index),
            ],
            out_specs=[
                *[pl.BlockSpec(block, functools.partial(out_index, i)) for i in range(splits)],
                pl.BlockSpec(state_block, state_index),
            ],
            scratch_shapes=scratch,
        ),
        input_output_aliases={3: splits},  # a donated state is updated in place
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_VMEM_LIMIT,
        ),
        interpret=interpret,
        name="short_conv",
    )(count_valid(num_valid, B, T), x, weight.T, conv_state)
    if p.batch_in_rows:
        y = [part.swapaxes(0, 1) for part in y]
    return tuple(y), conv_state.swapaxes(0, 1) if p.swapped else conv_state


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    conv_state: jax.Array,
    *,
    num_valid: jax.Array | None = None,
    splits: int = 1,
) -> tuple[Any, jax.Array]:
    """See `pallas_kernels.short_conv.api.short_conv`."""
    y, conv_state = launch(x, weight, conv_state, num_valid, splits)
    return y if splits > 1 else y[0], conv_state
