"""The k-pool indexer: which pools of past tokens a query may attend to."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from glm5next_jax import sharding
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.linear import Linear, einsum
from glm5next_jax.norms import LayerNorm
from pallas_kernels import kpool_indexer

# Hard-coded in the reference, not a config field (model spec, section 7).
_K_NORM_EPS = 1e-6


class KPoolIndexer(nnx.Module):
    """Scores pools of P tokens by their compressed keys (model spec, section 7).

    Leaves index_kpool_compress_ape [P, dI] and index_kpool_compress_gate [dI, D] carry no
    `.weight`, as in the checkpoint. Nothing here receives a gradient, as in the reference.
    """

    def __init__(self, config: Glm5NextConfig, *, rngs, dtype):
        D, dI, heads = config.hidden_size, config.index_head_dim, config.index_n_heads
        linear = partial(Linear, rngs=rngs, dtype=dtype, std=config.initializer_range)
        self.wq_b = linear(config.q_lora_rank, heads * dI)
        self.wk = linear(D, dI)
        self.k_norm = LayerNorm(dI, eps=_K_NORM_EPS, dtype=dtype)
        self.weights_proj = linear(D, heads)
        self.index_kpool_compress_ape = nnx.Param(jnp.zeros((config.index_kpool, dI), dtype))
        self.index_kpool_compress_gate = nnx.Param(jnp.ones((dI, D), dtype))
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        q_latent: jax.Array,
        index_pools: jax.Array,
        index_tail: jax.Array,
        length: jax.Array,
        num_valid: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, T, D], q_latent [B, T, Q] -> (pool_ids [B, T, Z] with -1 = none, pools, tail).

        Keys and pools are on every model shard. Where the shards divide the tokens, each selects
        for its part of them.
        """
        c = self.config
        B, T, _ = x.shape
        x, q_latent = jax.lax.stop_gradient((x, q_latent))
        k = self.k_norm(self.wk(x))
        gate = einsum("btd,fd->btf", x, self.index_kpool_compress_gate[...].astype(x.dtype))

        shards = sharding.num_shards("heads")
        is_split = T % shards == 0
        num_queries = T // shards if is_split else T
        first = sharding.shard_index("heads") * num_queries if is_split else 0
        x, q_latent = (
            jax.lax.dynamic_slice_in_dim(part, first, num_queries, axis=1) for part in (x, q_latent)
        )
        q = self.wq_b(q_latent).reshape(B, num_queries, c.index_n_heads, c.index_head_dim)
        head_weights = self.weights_proj(x, out_dtype=jnp.float32) * c.index_n_heads**-0.5
        pool_ids, pools, tail = kpool_indexer(
            q,
            head_weights,
            k,
            gate,
            self.index_kpool_compress_ape[...],
            index_pools,
            index_tail,
            length,
            num_selected=c.num_selected_pools,
            num_valid=num_valid,
            first_query=first,
        )
        if is_split:
            pool_ids = sharding.gather_shards(pool_ids, "heads", dim=1)
        return pool_ids, pools, tail
