"""Chunked KDA as one Pallas kernel for TPU: the launch. `tpu_chunk.py` has the arithmetic.

The grid walks over steps of a few chunks and a few heads. A step prepares its own tokens, inverts
the triangular systems of the step before, and carries the state over the tokens of the one before
that: three pieces of work that know nothing of each other, so the vector units and the matrix units
are busy at the same time. README.md derives the formulas and their precision.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import count_valid, platform
from pallas_kernels.kda import tpu_chunk
from pallas_kernels.kda.tpu_chunk import CHUNK, HEAD_DIM, LAG, Plan

_VMEM_LIMIT = 56 * 2**20  # of the 64 MiB that the smallest of the supported chips has
_MOST_HEADS = 16  # in a step; and so many head-chunks fill the units


def _divided(x: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of x >= 0. The scalar unit takes long to divide."""
    if n & (n - 1) == 0:
        return x >> (n.bit_length() - 1), x & (n - 1)
    return lax.div(x, jnp.int32(n)), lax.rem(x, jnp.int32(n))


def plan(
    T: int,
    H: int,
    dtype: Any,
    *,
    lower_bound: float | None,
    scale: float,
    heads_apart: bool,
    interpreted: bool,
) -> Plan:
    """How a call is cut into steps, and which formulas its inputs need.

    Raises NotImplementedError where the kernel cannot do it.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"inputs in {jnp.dtype(dtype).name}, only bfloat16 and float32")
    if H % 2 or H > 128:
        raise NotImplementedError(f"{H=}, only even numbers up to 128")
    heads = 8 if H % 8 == 0 else H
    if heads > _MOST_HEADS:
        raise NotImplementedError(f"{H=}, only multiples of 8 above {_MOST_HEADS}")
    # Two at least, since beta's logits come with tokens along lanes.
    chunks = min(max(2, _MOST_HEADS // heads), max(2, -(-T // CHUNK)), 4)
    return Plan(
        heads=heads,
        chunks=chunks,
        heads_apart=heads_apart,
        dtype=jnp.dtype(dtype),
        lower_bound=lower_bound,
        scale=scale,
        interpreted=interpreted,
    )


def chunk_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate_logits: jax.Array,
    beta_logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    initial_state: jax.Array,
    *,
    lower_bound: float | None,
    num_valid: jax.Array | None = None,
    scale: float | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.kda.api.chunk_kda`. interpret: as in `pl.pallas_call`; None: unless the
    program is for TPUs."""
    B, T, H = beta_logits.shape
    K, V = initial_state.shape[2:]
    if (K, V) != (HEAD_DIM, HEAD_DIM):
        raise NotImplementedError(f"{K=} and {V=}, only {HEAD_DIM}")
    if len({x.dtype for x in (q, k, v, gate_logits)}) > 1:
        dtypes = f"{q.dtype=}, {k.dtype=}, {v.dtype=}, {gate_logits.dtype=}"
        raise NotImplementedError(f"{dtypes}, only one dtype for all")
    if interpret is None:  # the general interpreter takes minutes to compile this kernel
        interpret = False if platform() == "tpu" else pltpu.InterpretParams()
    p = plan(
        T,
        H,
        q.dtype,
        lower_bound=lower_bound,
        scale=K**-0.5 if scale is None else scale,
        heads_apart=q.ndim == 4,
        interpreted=bool(interpret),
    )

    length = CHUNK * p.chunks  # tokens in a step
    steps, groups = -(-T // length), H // p.heads  # of a row
    total = B * groups * steps
    cores = 2 if B * groups % 2 == 0 else 1  # v5p has two: each takes half of the rows or heads
    share = total // cores

    # Which piece of work a step's stages do: `lag` steps behind the first stage.
    def work(core, step, lag):
        index = core * share + jnp.clip(step - lag, 0, share - 1)
        rest, n = _divided(index, steps)
        row, group = _divided(rest, groups)
        return row, group, n

    def tokens(lag, *, all_heads=False, reads=True):
        def index(core, step, _, last_read):
            row, group, n = work(core, step, lag)
            if reads:  # what holds only padding is not read: the block before it stays
                n = jnp.minimum(n, last_read[row])
            if all_heads:
                return row, 0, n
            return (row, n, group, 0) if p.heads_apart else (row, n, group)

        if all_heads:
            return pl.BlockSpec((1, H, length), index)
        block = (1, length, p.heads, K) if p.heads_apart else (1, length, p.heads * K)
        return pl.BlockSpec(block, index)

    def of_group(core, step, *_):
        return work(core, step, 0)[1], 0, 0

    def of_state(core, step, *_):
        row, group, _ = work(core, step, LAG)
        return row, group, 0, 0

    rate = jnp.broadcast_to(jnp.exp(A_log)[:, None], (H, K))
    gate_constants = jnp.stack([rate, dt_bias.reshape(H, K)], axis=1)  # [H, 2, K]
    # XLA keeps a narrow last axis first in memory, so that this moves nothing.
    beta_logits = jnp.swapaxes(beta_logits, 1, 2)  # [B, H, T]
    num_valid = count_valid(num_valid, B, T)
    last_read = jnp.maximum(num_valid - 1, 0) // length
    return pl.pallas_call(
        functools.partial(tpu_chunk.kernel, plan=p, work=work, steps=steps, groups=groups),
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(initial_state.shape, jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, share + LAG),
            in_specs=[
                tokens(0),
                tokens(0),
                tokens(0),
                tokens(0, all_heads=True),
                tokens(LAG),
                pl.BlockSpec((p.heads, 2, K), of_group),
                pl.BlockSpec((1, p.heads, K, V), of_state),
            ],
            out_specs=[
                tokens(LAG, reads=False),
                pl.BlockSpec((1, p.heads, K, V), of_state),
            ],
            scratch_shapes=p.scratch(),
        ),
        input_output_aliases={8: 1},  # the state, of which a step holds one row's
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=B * T * H * (6 * K * V + 8 * CHUNK * K),
            transcendentals=4 * B * T * H * K,
            bytes_accessed=5 * q.nbytes + 2 * initial_state.nbytes,
        ),
        interpret=interpret,
        name="chunk_kda",
    )(num_valid, last_read, q, k, gate_logits, beta_logits, v, gate_constants, initial_state)
