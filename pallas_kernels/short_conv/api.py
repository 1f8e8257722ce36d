"""The public short convolution: what it computes, what it accepts, and which backends have it."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import check_array, dispatch
from pallas_kernels.gradients import with_gradients_of
from pallas_kernels.short_conv import pallas_mosaic_tpu, reference, xla

BACKENDS = {
    "reference": reference.short_conv,
    "xla": xla.short_conv,
    "pallas_mosaic_tpu": with_gradients_of(xla.short_conv, pallas_mosaic_tpu.short_conv),
}


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    conv_state: jax.Array,
    *,
    num_valid: jax.Array | None = None,
    splits: int = 1,
    backend: str | None = None,
) -> tuple[Any, jax.Array]:
    """Causal depthwise convolution and SiLU (Kimi Linear, arXiv 2510.26692; model spec, section 5).

        y_t = silu(sum_{j < W} weight[:, j] u_{t - W + 1 + j})

    in float32, where u is x preceded by `conv_state`. All zeros as `conv_state` means that nothing
    came before.

    Args:
        x: [B, T, C] floating, the raw inputs (here C is the number of channels).
        weight: [C, W] float32; weight[:, W - 1] meets the current token.
        conv_state: [B, W - 1, C] in x.dtype, the raw inputs of the last tokens, oldest first.
        num_valid: [B] int32 in 0..T, or None for T. Tokens at t >= num_valid[b] are padding, which
            may hold anything (NaN too): it changes no state and its outputs are zero.
        splits: into how many equal parts of its channels y is cut. A part per consumer spares the
            copies that cutting one array costs where a kernel wrote it.
        backend: a name in `pallas_kernels.dispatch.BACKENDS`, which never falls back, or None for
            the best that applies.

    Returns:
        y [B, T, C] in x.dtype, or with splits > 1 a tuple of `splits` arrays [B, T, C / splits],
        and the new conv_state: the last W - 1 rows of conv_state followed by the valid rows of x.
        Old rows stay in it as long as fewer than W - 1 tokens are new.

    Raises:
        ValueError: an argument has a wrong rank, shape or dtype, C is no multiple of `splits`, or
            `backend` is no backend name.
        NotImplementedError: the named backend cannot do this.
    """
    op = "short_conv"
    sizes: dict[str, int] = {}
    check_array(op, "x", x, ("B", "T", "C"), sizes)
    check_array(op, "weight", weight, ("C", "W"), sizes, jnp.float32)
    if min(sizes["T"], sizes["W"]) < 1:
        raise ValueError(f"{op}: {x.shape=} and {weight.shape=}, expected T >= 1 and W >= 1")
    check_array(op, "conv_state", conv_state, ("B", sizes["W"] - 1, "C"), sizes, x.dtype)
    if num_valid is not None:
        check_array(op, "num_valid", num_valid, ("B",), sizes, jnp.int32)
    if splits < 1 or sizes["C"] % splits:
        raise ValueError(f"{op}: {x.shape=} and {splits=}, expected C to be a multiple of splits")
    arguments = x, weight, conv_state
    return dispatch(op, BACKENDS, backend, *arguments, num_valid=num_valid, splits=splits)
