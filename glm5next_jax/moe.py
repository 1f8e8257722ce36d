"""Mixture of experts: sigmoid router, grouped expert matmuls, one shared expert."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from glm5next_jax import sharding
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.linear import fp8_params, normal_param
from glm5next_jax.mlp import SwiGLU, clamped_swiglu
from pallas_kernels import grouped_matmul


class Router(nnx.Module):
    """weight [E, D] and e_score_correction_bias [E], both float32 (model spec, section 8)."""

    def __init__(self, config: Glm5NextConfig, *, rngs):
        E, D = config.n_routed_experts, config.hidden_size
        self.weight = normal_param(
            rngs, (E, D), jnp.float32, config.initializer_range, (None, None)
        )
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
    """Stacked experts: gate_proj and up_proj [E, F, D], down_proj [E, D, F].

    With `fp8`, these hold e4m3 codes, and X_scale_inv beside each the factors of its blocks.
    """

    def __init__(self, config: Glm5NextConfig, *, rngs, dtype, fp8: bool):
        E, F, D = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        std, axes = config.initializer_range, ("experts", None, None)

        def weight(*shape):
            if fp8:
                return fp8_params(rngs, shape, std, axes)
            return normal_param(rngs, shape, dtype, std, axes), None

        self.gate_proj, self.gate_proj_scale_inv = weight(E, F, D)
        self.up_proj, self.up_proj_scale_inv = weight(E, F, D)
        self.down_proj, self.down_proj_scale_inv = weight(E, D, F)
        self.limit = config.swiglu_limit

    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """x [N, D] sorted by expert, group_sizes [E] -> [N, D]; rows in no group give zeros."""
        gate = _multiply(x, self.gate_proj, self.gate_proj_scale_inv, group_sizes)
        up = _multiply(x, self.up_proj, self.up_proj_scale_inv, group_sizes)
        h = clamped_swiglu(gate, up, self.limit)
        return _multiply(h, self.down_proj, self.down_proj_scale_inv, group_sizes)


def _multiply(x, weights: nnx.Param, scale: nnx.Param | None, group_sizes: jax.Array) -> jax.Array:
    factors = None if scale is None else scale[...]
    return grouped_matmul(x, weights[...], group_sizes, scale=factors)


class MoE(nnx.Module):
    """Σ_x w_x · E_x(h) + shared_experts(h).

    On a mesh each device holds some experts whole. The tokens of all data shards are gathered,
    every device multiplies the rows that chose its experts, and the sum goes back to where the
    tokens live: no token is dropped and no capacity is guessed.
    """

    def __init__(self, config: Glm5NextConfig, *, rngs, dtype, fp8: bool):
        self.gate = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs, dtype=dtype, fp8=fp8)
        self.shared_experts = SwiGLU(
            config.hidden_size,
            config.moe_intermediate_size * config.n_shared_experts,
            limit=config.swiglu_limit,
            rngs=rngs,
            dtype=dtype,
            std=config.initializer_range,
            fp8=fp8,
            axis="shared_ffn",
        )
        self.config = config

    def __call__(self, x: jax.Array, num_valid: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D]. Padding is sent to no expert."""
        B, T, D = x.shape
        flat = x.reshape(B * T, D)
        with jax.named_scope("router"):
            chosen, weights = self.gate(flat)  # [N, X]
        is_valid = (jnp.arange(T, dtype=jnp.int32)[None] < num_valid[:, None]).reshape(B * T, 1)
        chosen = jnp.where(is_valid, chosen, self.config.n_routed_experts)

        with jax.named_scope("experts"):
            # Every data shard's tokens, against the experts that are here.
            everyone = (sharding.gather_shards(part, "batch") for part in (flat, chosen, weights))
            combined = self._combine(*everyone).astype(x.dtype)
            combined = sharding.scatter_sum(combined, "batch")
        with jax.named_scope("shared_experts"):
            shared = self.shared_experts.partial(flat, out_dtype=jnp.float32)
        if self._is_shared_cut():
            combined = (combined.astype(jnp.float32) + shared).astype(x.dtype)
            return sharding.sum_shards(combined, "ffn").reshape(B, T, D)
        combined = sharding.sum_shards(combined, "ffn") + shared.astype(x.dtype)
        return combined.reshape(B, T, D)

    def _is_shared_cut(self) -> bool:
        whole = self.config.moe_intermediate_size * self.config.n_shared_experts
        return self.shared_experts.down_proj.weight.shape[1] < whole

    def _combine(self, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """x [N, D], chosen and weights [N, X] -> Σ over the experts that are here, float32 [N, D].

        The rows that chose one are sorted by expert and multiplied in passes of a fixed number of
        rows, of which only as many run as there are rows.
        """
        N, X = chosen.shape
        E = self.experts.gate_proj.shape[0]
        local = chosen - sharding.shard_index("experts") * E
        is_here = (local >= 0) & (local < E)
        assignment = jnp.where(is_here, local, E).reshape(-1)  # [N·X]
        order = jnp.argsort(assignment, stable=True)
        ends = jnp.cumsum(jnp.bincount(assignment, length=E)).astype(jnp.int32)  # [E]
        # Where each of a token's rows is in that order, [N, X].
        rank = jnp.zeros_like(order).at[order].set(jnp.arange(N * X, dtype=order.dtype))
        rank = rank.reshape(N, X)

        rows = rows_per_pass(N * X, sharding.num_shards("experts"))
        num_passes = -(-N * X // rows)
        token = jnp.pad(order // X, (0, num_passes * rows - N * X))

        def one_pass(total, start):
            group_sizes = jnp.diff(jnp.clip(ends - start, 0, rows), prepend=0)
            mine = jax.lax.dynamic_slice_in_dim(token, start, rows)
            out = self.experts(x[mine], group_sizes)
            found = out.at[rank - start].get(mode="clip").astype(jnp.float32)  # [N, X, D]
            is_done = is_here & (rank >= start) & (rank < start + rows)
            part = jnp.where(is_done[..., None], found * weights[..., None], 0)
            return total + jnp.sum(part, axis=1)

        def needed_pass(total, start):
            run = functools.partial(one_pass, start=start)
            return jax.lax.cond(start < ends[-1], run, lambda total: total, total), None

        total = jnp.zeros(x.shape, jnp.float32)
        if num_passes == 1:
            return one_pass(total, 0)
        starts = rows * jnp.arange(num_passes, dtype=jnp.int32)
        return jax.lax.scan(needed_pass, total, starts)[0]


# So few rows are multiplied in one pass: choosing passes would cost more than it saves.
_FEW_ROWS = 2048


def rows_per_pass(num_rows: int, num_shards: int) -> int:
    """Twice a shard's fair share of the rows: one pass unless routing is very uneven."""
    fair = -(-2 * num_rows // num_shards)
    return min(num_rows, max(_FEW_ROWS, -(-fair // 128) * 128))
