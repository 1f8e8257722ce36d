"""Weight-holding leaves: projections and the embedding, stored `[out, in]` as on disk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


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


def normal_param(rngs: nnx.Rngs, shape, dtype, std: float) -> nnx.Param:
    """A weight drawn from N(0, std²)."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * jnp.float32(std)
    return nnx.Param(value.astype(dtype))


class Linear(nnx.Module):
    """y = x Wᵀ (+ b), float32 accumulation. weight [out, in], bias [out]."""

    def __init__(self, in_dim: int, out_dim: int, *, rngs, dtype, std: float, use_bias=False):
        self.weight = normal_param(rngs, (out_dim, in_dim), dtype, std)
        self.bias = nnx.Param(jnp.zeros((out_dim,), dtype)) if use_bias else None

    def __call__(self, x: jax.Array, *, out_dtype=None) -> jax.Array:
        """x [..., in] -> [..., out] in `out_dtype` (x's dtype by default)."""
        out_dtype = out_dtype or x.dtype
        y = einsum("...d,fd->...f", x, self.weight[...].astype(x.dtype), out_dtype=out_dtype)
        return y if self.bias is None else y + self.bias[...].astype(out_dtype)


class Embedding(nnx.Module):
    """weight [vocab, D]; the row of the padding token starts at zero."""

    def __init__(self, vocab: int, dim: int, *, rngs, dtype, std: float, pad: int | None):
        weight = normal_param(rngs, (vocab, dim), dtype, std)[...]
        self.weight = nnx.Param(weight if pad is None else weight.at[pad].set(0))

    def __call__(self, token_ids: jax.Array, dtype) -> jax.Array:
        """token_ids [B, T], all inside the vocabulary -> [B, T, D]."""
        return self.weight[...][token_ids].astype(dtype)
