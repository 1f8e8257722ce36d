"""Clamped SwiGLU, the feed-forward of dense layers and of the shared expert."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from glm5next_jax.linear import Linear


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """SiLU(min(gate, limit)) · clip(up, -limit, limit), float32 inside (model spec, section 8)."""
    gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
    activated = jax.nn.silu(jnp.minimum(gate32, limit)) * jnp.clip(up32, -limit, limit)
    return activated.astype(gate.dtype)


class SwiGLU(nnx.Module):
    """down(clamped_swiglu(gate x, up x))."""

    def __init__(self, dim: int, ffn_dim: int, *, limit: float, rngs, dtype, std: float):
        linear = partial(Linear, rngs=rngs, dtype=dtype, std=std)
        self.gate_proj = linear(dim, ffn_dim)
        self.up_proj = linear(dim, ffn_dim)
        self.down_proj = linear(ffn_dim, dim)
        self.limit = limit

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> [..., D]."""
        return self.down_proj(clamped_swiglu(self.gate_proj(x), self.up_proj(x), self.limit))
