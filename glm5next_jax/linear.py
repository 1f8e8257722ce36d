"""Weight-holding leaves: projections and the embedding, stored `[out, in]` as on disk."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from glm5next_jax import sharding
from glm5next_jax.sharding import Axes
from pallas_kernels import fp8_matmul
from pallas_kernels.dispatch import SCALE_BLOCK

FP8 = jnp.dtype(jnp.float8_e4m3fn)


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """Float32 stays float32: the default is bf16 on TPU and TF32 on NVIDIA."""
    float32 = jnp.dtype(dtype) == jnp.float32
    return jax.lax.Precision.HIGHEST if float32 else jax.lax.Precision.DEFAULT


def einsum(spec: str, a: jax.Array, b: jax.Array, *, out_dtype=None) -> jax.Array:
    """`jnp.einsum` of two arrays of one dtype, in `out_dtype` (theirs by default).

    Every backend accumulates bf16 products in float32 and rounds once, to the output's dtype.
    """
    out_dtype = out_dtype or a.dtype
    precision = matmul_precision(a.dtype)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=out_dtype)


def normal_param(rngs: nnx.Rngs, shape, dtype, std: float, axes: Axes, **metadata) -> nnx.Param:
    """A weight drawn from N(0, std²), with its logical axes."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * jnp.float32(std)
    return nnx.Param(value.astype(dtype), axes=axes, **metadata)


def fp8_params(
    rngs: nnx.Rngs, shape, std: float, axes: Axes, **metadata
) -> tuple[nnx.Param, nnx.Param]:
    """A weight of N(0, std²) at rest in FP8: codes, and one float32 factor per 128 x 128 block."""
    grid = tuple(math.ceil(n / SCALE_BLOCK) for n in shape[-2:])
    codes = normal_param(rngs, shape, FP8, 1.0, axes, **metadata)
    factors = jnp.full((*shape[:-2], *grid), std, jnp.float32)
    return codes, nnx.Param(factors, axes=axes, **metadata)


class Linear(nnx.Module):
    """y = x Wᵀ (+ b), float32 accumulation. weight [out, in], bias [out].

    With `fp8`, weight holds e4m3 codes and weight_scale_inv [out/128, in/128] their factors. Where
    the mesh cuts `in`, the shards' parts of the sum travel in the output's dtype.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        rngs,
        dtype,
        std: float,
        axes: Axes = (None, None),
        use_bias: bool = False,
        fp8: bool = False,
        **metadata,
    ):
        shape = (out_dim, in_dim)
        if fp8:
            self.weight, self.weight_scale_inv = fp8_params(rngs, shape, std, axes, **metadata)
        else:
            self.weight = normal_param(rngs, shape, dtype, std, axes, **metadata)
            self.weight_scale_inv = None
        bias = jnp.zeros((out_dim,), dtype)
        self.bias = nnx.Param(bias, axes=axes[:1]) if use_bias else None

    def __call__(self, x: jax.Array, *, out_dtype=None) -> jax.Array:
        """x [..., in] -> [..., out] in `out_dtype` (x's dtype by default)."""
        y = self.partial(x, out_dtype=out_dtype)
        in_axis = self.weight.get_metadata()["axes"][1]
        if in_axis is not None:
            y = sharding.sum_shards(y, in_axis)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    def partial(self, x: jax.Array, *, out_dtype=None) -> jax.Array:
        """This shard's part of x Wᵀ, for a caller that sums the parts itself."""
        out_dtype = out_dtype or x.dtype
        if self.weight_scale_inv is not None:
            factors = self.weight_scale_inv[...]
            return fp8_matmul(x, self.weight[...], factors, out_dtype=out_dtype)
        return einsum("...d,fd->...f", x, self.weight[...].astype(x.dtype), out_dtype=out_dtype)


class Embedding(nnx.Module):
    """weight [vocab, D]; the row of the padding token starts at zero."""

    def __init__(self, vocab: int, dim: int, *, rngs, dtype, std: float, pad: int | None):
        axes = ("vocab", None)
        weight = normal_param(rngs, (vocab, dim), dtype, std, axes)[...]
        self.weight = nnx.Param(weight if pad is None else weight.at[pad].set(0), axes=axes)

    def __call__(self, token_ids: jax.Array, dtype) -> jax.Array:
        """token_ids [B, T], all inside the vocabulary -> [B, T, D]."""
        weight = self.weight[...]
        row = token_ids - sharding.shard_index("vocab") * weight.shape[0]
        is_mine = (row >= 0) & (row < weight.shape[0])
        # One shard has the row and the others add zeros, so the sum is exact.
        found = jnp.where(is_mine[..., None], weight.at[row].get(mode="clip"), 0)
        return sharding.sum_shards(found, "vocab").astype(dtype)
