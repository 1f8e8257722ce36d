"""Multi-head latent attention without positions, over the tokens that the indexer selects."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from glm5next_jax.cache import DsaCache
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.indexer import KPoolIndexer
from glm5next_jax.linear import Linear, einsum
from glm5next_jax.norms import RMSNorm
from pallas_kernels import sparse_mla


class MultiHeadLatentAttention(nnx.Module):
    """One sparse-attention mixer (model spec, section 6).

    The latent is cached after its norm and attended in absorbed form: W_k moves onto the query and
    W_v onto the output, so no per-head key or value of a cached token is ever built.
    """

    def __init__(self, config: Glm5NextConfig, *, has_indexer: bool, rngs, dtype, fp8: bool):
        D, H, Q, R = (
            config.hidden_size,
            config.num_attention_heads,
            config.q_lora_rank,
            config.kv_lora_rank,
        )
        K, V = config.qk_nope_head_dim, config.v_head_dim
        linear = partial(Linear, rngs=rngs, dtype=dtype, std=config.initializer_range)
        biased = partial(linear, fp8=fp8, use_bias=config.attention_bias)
        norm = partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        self.q_a_proj = biased(D, Q)
        self.q_a_layernorm = norm(Q)
        self.q_b_proj = linear(Q, H * K, axes=("heads", None), fp8=fp8)
        self.kv_a_proj_with_mqa = biased(D, R)
        self.kv_a_layernorm = norm(R)
        self.kv_b_proj = linear(R, H * (K + V), axes=("heads", None))
        self.o_proj = biased(H * V, D, axes=(None, "heads"))
        self.indexer = KPoolIndexer(config, rngs=rngs, dtype=dtype) if has_indexer else None
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        cache: DsaCache,
        length: jax.Array,
        num_valid: jax.Array,
        pool_ids: jax.Array | None,
    ) -> tuple[jax.Array, DsaCache, jax.Array]:
        """x [B, T, D] at positions length[b] + t -> (y [B, T, D], state, pool_ids [B, T, Z]).

        `pool_ids` is the selection of the layer before, used when this layer has no indexer.
        """
        c = self.config
        B, T, _ = x.shape
        K, V = c.qk_nope_head_dim, c.v_head_dim
        H = self.kv_b_proj.weight.shape[0] // (K + V)  # this shard's heads
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).reshape(B, T, H, K)
        new_latent = self.kv_a_layernorm(self.kv_a_proj_with_mqa(x))
        cache = _append(cache, new_latent, length, num_valid)

        if self.indexer is not None:
            assert cache.index_pools is not None and cache.index_tail is not None
            with jax.named_scope("indexer"):
                pool_ids, pools, tail = self.indexer(
                    x, q_latent, cache.index_pools, cache.index_tail, length, num_valid
                )
            cache = DsaCache(cache.latent, pools, tail)
        assert pool_ids is not None  # the config refuses a shared layer without a full one before

        kv_b = self.kv_b_proj.weight[...].astype(x.dtype).reshape(H, K + V, c.kv_lora_rank)
        with jax.named_scope("sparse_mla"):
            o = sparse_mla(
                einsum("bthk,hkr->bthr", q, kv_b[:, :K]),
                cache.latent,
                pool_ids,
                length,
                pool_size=c.index_kpool,
                scale=K**-0.5,
                always_select_tail=c.index_kpool_always_select_tail,
                num_valid=num_valid,
            )
        o = einsum("bthr,hvr->bthv", o, kv_b[:, K:])
        return self.o_proj(o.reshape(B, T, H * V)), cache, pool_ids


def _append(
    cache: DsaCache, latent: jax.Array, length: jax.Array, num_valid: jax.Array
) -> DsaCache:
    """Writes latent [B, T, R] behind the cached tokens; padding and overflow are dropped."""
    B, T, _ = latent.shape
    offset = jnp.arange(T, dtype=jnp.int32)[None]
    capacity = cache.latent.shape[1]
    # Out of range drops the row. dynamic_update_slice would clamp and overwrite valid ones.
    slot = jnp.where(offset < num_valid[:, None], length[:, None] + offset, capacity)
    row = jnp.arange(B, dtype=jnp.int32)[:, None]
    written = cache.latent.at[row, slot].set(latent.astype(cache.latent.dtype), mode="drop")
    return DsaCache(written, cache.index_pools, cache.index_tail)
