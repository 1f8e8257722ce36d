"""Normalisations. Statistics are float32 everywhere; the cast to the model dtype is the spec's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """x · rsqrt(mean(x²) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """w · cast(x̂): the weight multiplies after the cast to x's dtype (model spec, section 3)."""

    def __init__(self, dim: int, *, eps: float, dtype):
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight[...].astype(x.dtype) * rms_normalize(x, self.eps).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """w · x̂ · sigmoid(gate), all float32, then cast (model spec, section 5 step 8)."""

    def __init__(self, dim: int, *, eps: float, dtype):
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        y = rms_normalize(x, self.eps) * self.weight[...].astype(jnp.float32)
        return (y * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) · rsqrt(var + eps) · w + b in float32, then cast."""

    def __init__(self, dim: int, *, eps: float, dtype):
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.bias = nnx.Param(jnp.zeros((dim,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + self.eps)
        weight, bias = self.weight[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (y * weight + bias).astype(x.dtype)
