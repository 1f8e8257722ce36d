"""Kimi Delta Attention: linear attention with a gated, delta-ruled recurrent state."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from glm5next_jax import sharding
from glm5next_jax.cache import KdaCache
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.linear import Linear, einsum, normal_param
from glm5next_jax.norms import GatedRMSNorm
from pallas_kernels import chunk_kda, recurrent_kda, short_conv

# Up to this many tokens a token loop costs less than building a chunk's triangular system. Both
# ops compute the same function of the same state.
_RECURRENT_MAX_TOKENS = 8


class KimiDeltaAttention(nnx.Module):
    """One KDA mixer (model spec, section 5; Kimi Linear, arXiv 2510.26692).

    Two matrices read the layer's input: qkv_proj [3, H·K, D], which a mesh cuts by heads, and
    fused_bfg_a_proj with rows b | f_a | g_a, small enough for every shard to have it whole.
    """

    def __init__(self, config: Glm5NextConfig, *, rngs, dtype):
        H, K, D = config.linear_num_heads, config.linear_head_dim, config.hidden_size
        W = config.linear_conv_kernel_dim
        std = config.initializer_range
        linear = partial(Linear, rngs=rngs, dtype=dtype, std=std)
        self.qkv_proj = QkvProjection(config, rngs=rngs, dtype=dtype)
        self.fused_bfg_a_proj = linear(D, H + 2 * K)
        self.qkv_conv1d = ConvWeight(H * K, W, rngs=rngs, std=std)
        self.f_b_proj = linear(K, H * K, axes=("heads", None))
        self.g_b_proj = linear(K, H * K, axes=("heads", None))
        self.A_log = nnx.Param(_init_A_log(config, rngs), axes=("heads",))
        self.dt_bias = nnx.Param(_init_dt_bias(config, rngs), axes=("heads",))
        self.o_norm = GatedRMSNorm(K, eps=config.rms_norm_eps, dtype=dtype)
        self.o_proj = linear(H * K, D, axes=(None, "heads"))
        self.config = config

    def __call__(
        self, x: jax.Array, cache: KdaCache, num_valid: jax.Array
    ) -> tuple[jax.Array, KdaCache]:
        """x [B, T, D], num_valid [B] -> (y [B, T, D], the state after the valid tokens)."""
        c = self.config
        B, T, _ = x.shape
        H, K, W = self.A_log.shape[0], c.linear_head_dim, c.linear_conv_kernel_dim
        # Heads stay side by side, as projections give them: on a TPU, [B, T, H, K] would be a copy.
        qkv = self.qkv_proj(x)  # [B, T, 3·H·K]
        # Float32 out: beta's rounding would compound through the recurrence.
        bfg_a = self.fused_bfg_a_proj(x, out_dtype=jnp.float32)
        beta_logits, f_a, g_a = jnp.split(bfg_a, [c.linear_num_heads, c.linear_num_heads + K], -1)
        first = sharding.shard_index("heads") * H
        beta_logits = jax.lax.dynamic_slice_in_dim(beta_logits, first, H, axis=2)

        with jax.named_scope("short_conv"):
            (q, k, v), conv_state = short_conv(
                qkv,
                self.qkv_conv1d.weight[...].reshape(3 * H * K, W),
                cache.conv_state.reshape(B, W - 1, 3 * H * K),
                num_valid=num_valid,
                splits=3,
            )
        kda = recurrent_kda if T <= _RECURRENT_MAX_TOKENS else chunk_kda
        with jax.named_scope("kda"):
            o, recurrent_state = kda(
                q,
                k,
                v,
                self.f_b_proj(f_a.astype(x.dtype)),
                beta_logits,
                self.A_log[...],
                self.dt_bias[...],
                cache.recurrent_state,
                lower_bound=c.linear_lower_bound,
                num_valid=num_valid,
            )
        g_b = self.g_b_proj(g_a.astype(x.dtype))
        o = self.o_norm(o.reshape(B, T, H, K), g_b.reshape(B, T, H, K))
        y = self.o_proj(o.reshape(B, T, H * K))
        return y, KdaCache(conv_state.reshape(cache.conv_state.shape), recurrent_state)


class QkvProjection(nnx.Module):
    """weight [3, H·K, D]: q, k and v as one matmul, each cut by heads."""

    def __init__(self, config: Glm5NextConfig, *, rngs, dtype):
        shape = (3, config.linear_dim, config.hidden_size)
        self.weight = normal_param(
            rngs, shape, dtype, config.initializer_range, (None, "heads", None)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, 3·H·K]."""
        weight = self.weight[...].astype(x.dtype)
        return einsum("btd,fd->btf", x, weight.reshape(-1, weight.shape[-1]))


class ConvWeight(nnx.Module):
    """weight [3, H·K, W] float32 of the depthwise causal conv over q, k and v."""

    def __init__(self, channels: int, width: int, *, rngs, std: float):
        axes = (None, "heads", None)
        self.weight = normal_param(rngs, (3, channels, width), jnp.float32, std, axes)


def _init_A_log(config: Glm5NextConfig, rngs: nnx.Rngs) -> jax.Array:
    """Zero for the bounded gate, log U(1, 16) for the softplus one (model spec, section 10)."""
    shape = (config.linear_num_heads,)
    if config.linear_lower_bound is not None:
        return jnp.zeros(shape, jnp.float32)
    return jnp.log(jax.random.uniform(rngs.params(), shape, jnp.float32, 1.0, 16.0))


def _init_dt_bias(config: Glm5NextConfig, rngs: nnx.Rngs) -> jax.Array:
    """Inverse softplus of a step drawn log-uniformly from [1e-3, 1e-1]."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = jnp.exp(jax.random.uniform(rngs.params(), (config.linear_dim,), jnp.float32, low, high))
    return dt + jnp.log(-jnp.expm1(-dt))
