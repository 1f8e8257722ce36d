"""The public entry of the FP8 matmul: the equation, the argument checks, the choice of backend."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import check_array, check_scale, dispatch
from pallas_kernels.fp8_matmul import pallas_mosaic_gpu, pallas_mosaic_tpu, reference, xla

_BACKENDS = {
    "reference": reference.fp8_matmul,
    "xla": xla.fp8_matmul,
    "pallas_mosaic_tpu": pallas_mosaic_tpu.fp8_matmul,
    "pallas_mosaic_gpu": pallas_mosaic_gpu.fp8_matmul,
}


def fp8_matmul(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    *,
    out_dtype: Any = None,
    backend: str | None = None,
) -> jax.Array:
    """A linear layer whose weight stays in FP8 as released.

    Each 128 x 128 block of the weight, the last ones cut short, has one factor:

        w[f, d] = weight[f, d] * scale[f // 128, d // 128]     in float32, rounded once to x.dtype
        out = x @ w^T                                          float32 sums, rounded once

    Differentiable in x (reverse mode); weight and scale get zeros.

    Args:
        x: [..., D], at least one row.
        weight: [F, D] float8_e4m3fn, stacked as on disk ([out, in]).
        scale: [ceil(F/128), ceil(D/128)] float32.
        out_dtype: a float dtype of the result; None means x.dtype.
        backend: see `pallas_kernels.dispatch`.

    Returns:
        [..., F] in out_dtype.

    Raises:
        ValueError: a shape or a dtype is wrong.
        NotImplementedError: the named backend does not exist for this op, or cannot do this call.
    """
    op, sizes = "fp8_matmul", {}
    lead = getattr(x, "shape", (1,))[:-1]
    check_array(op, "x", x, (*lead, "D"), sizes)
    check_array(op, "weight", weight, ("F", "D"), sizes, jnp.float8_e4m3fn)
    check_scale(op, weight, scale, ("F", "D"), sizes)
    for name, size in (*((f"x.shape[{i}]", n) for i, n in enumerate(lead)), *sizes.items()):
        if size < 1:
            raise ValueError(f"{op}: {name}={size}, expected at least 1")
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    for name, dtype in (("x.dtype", jnp.dtype(x.dtype)), ("out_dtype", out_dtype)):
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            raise ValueError(
                f"{op}: {name}={dtype.name}, expected a floating dtype of at least 16 bits"
            )
    return dispatch(op, _BACKENDS, backend, x, weight, scale, out_dtype=out_dtype)
