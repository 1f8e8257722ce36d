"""Mixture of experts: sigmoid router, grouped expert matmuls, one shared expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.linear import normal_param
from glm5next_jax.mlp import SwiGLU, clamped_swiglu
from pallas_kernels import grouped_matmul


class Router(nnx.Module):
    """weight [E, D] and e_score_correction_bias [E], both float32 (model spec, section 8)."""

    def __init__(self, config: Glm5NextConfig, *, rngs):
        E, D = config.n_routed_experts, config.hidden_size
        self.weight = normal_param(rngs, (E, D), jnp.float32, config.initializer_range)
        self.e_score_correction_bias = nnx.Param(jnp.zeros((E,), jnp.float32))
        self.config = config

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [N, D] -> (experts [N, X] int32, weights [N, X] float32).

        The bias takes part in the choice alone; the weights are the unbiased scores.
        """
        c = self.config
        logits = jnp.einsum(
            "nd,ed->ne",
            x.astype(jnp.float32),
            self.weight[...].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        scores = jax.nn.sigmoid(logits)  # [N, E]
        choice = scores + self.e_score_correction_bias[...][None]
        if c.n_group > 1:
            grouped = choice.reshape(-1, c.n_group, c.n_routed_experts // c.n_group)
            group_score = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)  # [N, groups]
            _, kept = jax.lax.top_k(group_score, c.topk_group)
            is_kept = jax.nn.one_hot(kept, c.n_group, dtype=jnp.bool_).any(axis=1)
            choice = jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
        _, experts = jax.lax.top_k(choice, c.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if c.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return experts, weights * c.routed_scaling_factor


class Experts(nnx.Module):
    """Stacked experts: gate_proj and up_proj [E, F, D], down_proj [E, D, F]."""

    def __init__(self, config: Glm5NextConfig, *, rngs, dtype):
        E, F, D = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        std = config.initializer_range
        self.gate_proj = normal_param(rngs, (E, F, D), dtype, std)
        self.up_proj = normal_param(rngs, (E, F, D), dtype, std)
        self.down_proj = normal_param(rngs, (E, D, F), dtype, std)
        self.limit = config.swiglu_limit

    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """x [N, D] sorted by expert, group_sizes [E] -> [N, D]; rows in no group give zeros."""
        gate = grouped_matmul(x, self.gate_proj[...], group_sizes)
        up = grouped_matmul(x, self.up_proj[...], group_sizes)
        return grouped_matmul(
            clamped_swiglu(gate, up, self.limit), self.down_proj[...], group_sizes
        )


class MoE(nnx.Module):
    """Σ_x w_x · E_x(h) + shared_experts(h)."""

    def __init__(self, config: Glm5NextConfig, *, rngs, dtype):
        self.gate = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs, dtype=dtype)
        self.shared_experts = SwiGLU(
            config.hidden_size,
            config.moe_intermediate_size * config.n_shared_experts,
            limit=config.swiglu_limit,
            rngs=rngs,
            dtype=dtype,
            std=config.initializer_range,
        )
        self.num_experts = config.n_routed_experts

    def __call__(self, x: jax.Array, num_valid: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D]. Padding is sent to no expert."""
        B, T, D = x.shape
        flat = x.reshape(B * T, D)
        with jax.named_scope("router"):
            experts, weights = self.gate(flat)  # [N, X]
        is_valid = (jnp.arange(T, dtype=jnp.int32)[None] < num_valid[:, None]).reshape(B * T, 1)
        experts = jnp.where(is_valid, experts, self.num_experts)

        with jax.named_scope("experts"):
            X = experts.shape[1]
            assignment = experts.reshape(-1)  # [N·X]
            order = jnp.argsort(assignment, stable=True)
            group_sizes = jnp.bincount(assignment, length=self.num_experts).astype(jnp.int32)
            routed = self.experts(flat[order // X], group_sizes)
            # Back to token order, then weigh and sum in float32, in the router's order.
            rank = jnp.zeros_like(order).at[order].set(jnp.arange(B * T * X, dtype=order.dtype))
            routed = routed[rank].reshape(B * T, X, D).astype(jnp.float32)
            combined = jnp.sum(routed * weights[..., None], axis=1).astype(x.dtype)
        return combined.reshape(B, T, D) + self.shared_experts(x)
