"""The public entry of the grouped matmul: the equation, the argument checks, the choice of
backend."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.dispatch import check_array, check_scale, dispatch
from pallas_kernels.grouped_matmul import pallas_mosaic_gpu, pallas_mosaic_tpu, reference, xla

_BACKENDS = {
    "reference": reference.grouped_matmul,
    "xla": xla.grouped_matmul,
    "pallas_mosaic_tpu": pallas_mosaic_tpu.grouped_matmul,
    "pallas_mosaic_gpu": pallas_mosaic_gpu.grouped_matmul,
}


def grouped_matmul(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    scale: jax.Array | None = None,
    backend: str | None = None,
) -> jax.Array:
    """The expert matmul of a mixture of experts over rows that are sorted by expert.

    Source: model spec, section 8 (the routed experts, `E_e(h)`). The first group_sizes[0] rows
    of x belong to group 0, the next group_sizes[1] to group 1, and so on:

        out[n] = weights[group(n)] @ x[n]     float32 sums, rounded once to x.dtype
        out[n] = 0                            for n >= sum(group_sizes)

    Weights of another float dtype are cast to x.dtype, one group at a time. FP8 weights are codes,
    and the weight is code * factor in float32, rounded once to x.dtype. Rows past the last group
    may hold NaN. Differentiable in x and weights (reverse mode); in x alone where weights are FP8.

    Args:
        x: [N, D] rows sorted by group.
        weights: [E, F, D], stacked as on disk ([out, in] per expert).
        group_sizes: [E] int32, each >= 0, their sum at most N. Checked where the values are
            known; inside jit a larger sum is cut at N.
        scale: [E, ceil(F/128), ceil(D/128)] float32, a factor per 128 x 128 block of each expert's
            weight; exactly where weights are float8_e4m3fn.
        backend: see `pallas_kernels.dispatch`.

    Returns:
        [N, F] in x.dtype.

    Raises:
        ValueError: a shape, a dtype or (where known) group_sizes is wrong, or scale is missing or
            has no FP8 weights.
        NotImplementedError: the named backend does not exist for this op, or cannot do this call.
    """
    op, sizes = "grouped_matmul", {}
    check_array(op, "x", x, ("N", "D"), sizes)
    check_array(op, "weights", weights, ("E", "F", "D"), sizes)
    check_array(op, "group_sizes", group_sizes, ("E",), sizes, jnp.int32)
    for name in ("N", "D", "E", "F"):
        if sizes[name] < 1:
            raise ValueError(f"{op}: {name}={sizes[name]}, expected at least 1")
    check_scale(op, weights, scale, ("E", "F", "D"), sizes)
    if not isinstance(group_sizes, Tracer):
        found = np.asarray(group_sizes, np.int64)
        if found.min() < 0:
            raise ValueError(f"{op}: min(group_sizes)={found.min()}, expected at least 0")
        if found.sum() > sizes["N"]:
            raise ValueError(
                f"{op}: sum(group_sizes)={found.sum()}, expected at most N={sizes['N']}"
            )
    return dispatch(op, _BACKENDS, backend, x, weights, group_sizes, scale=scale)
