"""The public entry of the grouped matmul: the equation, the argument checks, the choice of
backend."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.dispatch import check_array, dispatch
from pallas_kernels.grouped_matmul import reference, xla

_BACKENDS = {"reference": reference.grouped_matmul, "xla": xla.grouped_matmul}


def grouped_matmul(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    backend: str | None = None,
) -> jax.Array:
    """The expert matmul of a mixture of experts over rows that are sorted by expert.

    Source: model spec, section 8 (the routed experts, `E_e(h)`). The first group_sizes[0] rows
    of x belong to group 0, the next group_sizes[1] to group 1, and so on:

        out[n] = weights[group(n)] @ x[n]     float32 sums, rounded once to x.dtype
        out[n] = 0                            for n >= sum(group_sizes)

    Weights of another float dtype are cast to x.dtype, one group at a time. Rows past the last
    group may hold NaN. Differentiable in x and weights (reverse mode).

    Args:
        x: [N, D] rows sorted by group.
        weights: [E, F, D], stacked as on disk ([out, in] per expert).
        group_sizes: [E] int32, each >= 0, their sum at most N. Checked where the values are
            known; inside jit a larger sum is cut at N.
        backend: see `pallas_kernels.dispatch`.

    Returns:
        [N, F] in x.dtype.

    Raises:
        ValueError: a shape, a dtype or (where known) group_sizes is wrong.
        NotImplementedError: the named backend does not exist for this op.
    """
    op, sizes = "grouped_matmul", {}
    check_array(op, "x", x, ("N", "D"), sizes)
    check_array(op, "weights", weights, ("E", "F", "D"), sizes)
    check_array(op, "group_sizes", group_sizes, ("E",), sizes, jnp.int32)
    for name in ("N", "D", "E", "F"):
        if sizes[name] < 1:
            raise ValueError(f"{op}: {name}={sizes[name]}, expected at least 1")
    if not isinstance(group_sizes, Tracer):
        found = np.asarray(group_sizes, np.int64)
        if found.min() < 0:
            raise ValueError(f"{op}: min(group_sizes)={found.min()}, expected at least 0")
        if found.sum() > sizes["N"]:
            raise ValueError(
                f"{op}: sum(group_sizes)={found.sum()}, expected at most N={sizes['N']}"
            )
    return dispatch(op, _BACKENDS, backend, x, weights, group_sizes)
