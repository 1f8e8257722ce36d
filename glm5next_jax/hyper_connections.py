"""Manifold-constrained hyper-connections (mHC): M residual streams mixed by a doubly stochastic
matrix (model spec, section 4; arXiv 2512.24880)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.linear import normal_param
from glm5next_jax.norms import rms_normalize


class Mixing(NamedTuple):
    """How one block's output returns to the streams."""

    post: jax.Array  # [B, T, M] float32: weight of the block's output in each stream
    comb: jax.Array  # [B, T, M, M] float32: comb[j, i] is the share of stream j in new stream i


class HyperConnection(nnx.Module):
    """fn [(2 + M)·M, M·D] projects all streams to the weights; base and scale are float32."""

    def __init__(self, config: Glm5NextConfig, *, rngs, dtype):
        M, D = config.hc_mult, config.hidden_size
        self.fn = normal_param(
            rngs, ((2 + M) * M, M * D), dtype, config.initializer_range, (None, None)
        )
        self.base = nnx.Param(jnp.zeros(((2 + M) * M,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((3,), jnp.float32))
        self.config = config

    def pre(self, streams: jax.Array) -> tuple[jax.Array, Mixing]:
        """streams [B, T, M, D] -> (the block's input [B, T, D], the mixing of its output)."""
        c = self.config
        B, T, M, D = streams.shape
        flat = rms_normalize(streams.reshape(B, T, M * D), c.rms_norm_eps)
        u = jnp.einsum(
            "btd,fd->btf",
            flat,
            self.fn[...].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        scale, base = self.scale[...], self.base[...][None, None]
        pre = jax.nn.sigmoid(scale[0] * u[..., :M] + base[..., :M]) + c.hc_eps
        post = 2 * jax.nn.sigmoid(scale[1] * u[..., M : 2 * M] + base[..., M : 2 * M])
        comb = (scale[2] * u[..., 2 * M :] + base[..., 2 * M :]).reshape(B, T, M, M)
        comb = sinkhorn(jax.nn.softmax(comb, axis=-1) + c.hc_eps, c.hc_sinkhorn_iters, c.hc_eps)
        collapsed = jnp.sum(pre[..., None] * streams.astype(jnp.float32), axis=2)
        return collapsed.astype(streams.dtype), Mixing(post, comb)

    def post(self, streams: jax.Array, y: jax.Array, mixing: Mixing) -> jax.Array:
        """X'_i = post_i · y + Σ_j comb[j, i] · X_j, in the model dtype."""
        dtype = streams.dtype
        post, comb = mixing.post.astype(dtype), mixing.comb.astype(dtype)
        # M is 4: a broadcast sum fuses with its neighbours where a batch of 4x4 matmuls does not.
        kept = jnp.sum(
            comb[..., None].astype(jnp.float32) * streams[..., None, :].astype(jnp.float32), axis=2
        )  # [B, T, M(j), M(i), D] summed over j
        return post[..., None] * y[:, :, None] + kept.astype(dtype)


def sinkhorn(matrix: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Alternate column and row normalisation of [..., M, M], columns (axis -2) first and last."""

    # Sums of M terms written out: they fuse with the division, where a reduction would be a program
    # of its own on a GPU, 40 of them per call.
    def normalized(m, axis):
        slices = jnp.split(m, m.shape[axis], axis=axis)
        return m / (functools.reduce(jnp.add, slices) + eps)

    def columns(m):
        return normalized(m, -2)

    def rows(m):
        return normalized(m, -1)

    return jax.lax.fori_loop(0, iterations - 1, lambda _, m: columns(rows(m)), columns(matrix))
