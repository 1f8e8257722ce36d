"""Clamped SwiGLU, the feed-forward of dense layers and of the shared expert."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from glm5next_jax.linear import Linear
from glm5next_jax.sharding import fp8_units


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """SiLU(min(gate, limit)) · clip(up, -limit, limit), float32 inside (model spec, section 8)."""
    gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
    activated = jax.nn.silu(jnp.minimum(gate32, limit)) * jnp.clip(up32, -limit, limit)
    return activated.astype(gate.dtype)


class SwiGLU(nnx.Module):
    """down(clamped_swiglu(gate x, up x)), its channels cut by the mesh along `axis`."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        *,
        limit: float,
        rngs,
        dtype,
        std: float,
        fp8: bool = False,
        axis: str = "ffn",
    ):
        units = fp8_units(ffn_dim) if fp8 else ffn_dim
        linear = partial(Linear, rngs=rngs, dtype=dtype, std=std, fp8=fp8, units=units)
        self.gate_proj = linear(dim, ffn_dim, axes=(axis, None))
        self.up_proj = linear(dim, ffn_dim, axes=(axis, None))
        self.down_proj = linear(ffn_dim, dim, axes=(None, axis))
        self.limit = limit

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> [..., D]."""
        return self.down_proj(self._activations(x))

    def partial(self, x: jax.Array, *, out_dtype) -> jax.Array:
        """This shard's part of the result, for a caller that sums the parts itself."""
        return self.down_proj.partial(self._activations(x), out_dtype=out_dtype)

    def _activations(self, x: jax.Array) -> jax.Array:
        return clamped_swiglu(self.gate_proj(x), self.up_proj(x), self.limit)
