"""The state that a sequence leaves behind: one frozen dataclass per mixer, one `Cache` over all."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from glm5next_jax.config import Glm5NextConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KdaCache:
    """State of one KDA layer; its size does not depend on the number of tokens."""

    conv_state: jax.Array  # [B, W-1, 3·H·K] inputs of the short conv (before it), model dtype
    recurrent_state: jax.Array  # [B, H, K, V] float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DsaCache:
    """State of one sparse-attention layer. A layer that shares an indexer has no index leaves."""

    latent: jax.Array  # [B, capacity, R] after its norm, model dtype
    index_pools: jax.Array | None  # [B, capacity/P, dI] key of each complete pool
    index_tail: jax.Array | None  # [B, P-1, 2, dI] key and gate rows of the unfinished pool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """State of a batch of sequences, returned by every call and never mutated."""

    layers: tuple[KdaCache | DsaCache, ...]
    smear: jax.Array | None  # [B, D] embedding of the last token before smearing; zeros: none
    length: jax.Array  # [B] int32 tokens seen, owned here once for all layers

    @property
    def batch_size(self) -> int:
        return self.length.shape[0]

    @property
    def capacity(self) -> int | None:
        """Most tokens a row can hold; None when no layer keeps anything per token."""
        for layer in self.layers:
            if isinstance(layer, DsaCache):
                return layer.latent.shape[1]
        return None


def init_cache(config: Glm5NextConfig, batch_size: int, capacity: int) -> Cache:
    """An empty cache for `batch_size` rows of at most `capacity` tokens.

    Args:
      config: the model's configuration; its dtype is that of the activations kept.
      batch_size: rows.
      capacity: tokens per row, rounded up to whole pools of `index_kpool`.

    Raises:
      ValueError: batch_size or capacity below 1.
    """
    if batch_size < 1 or capacity < 1:
        raise ValueError(f"expected both to be at least 1: {batch_size=}, {capacity=}")
    B, P, dtype = batch_size, config.index_kpool, jnp.dtype(config.dtype)
    num_pools = -(-capacity // P)
    H, K, W = config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim

    def zeros(*shape, dtype=dtype):
        # One array per leaf: two leaves that share a buffer cannot both be donated.
        return jnp.zeros((B, *shape), dtype)

    def layer(i: int) -> KdaCache | DsaCache:
        if config.is_kda(i):
            return KdaCache(zeros(W - 1, 3 * H * K), zeros(H, K, K, dtype=jnp.float32))
        latent = zeros(num_pools * P, config.kv_lora_rank)
        if not config.has_indexer(i):
            return DsaCache(latent, None, None)
        dI = config.index_head_dim
        return DsaCache(latent, zeros(num_pools, dI), zeros(P - 1, 2, dI))

    return Cache(
        layers=tuple(layer(i) for i in range(config.num_hidden_layers)),
        smear=zeros(config.hidden_size) if config.smear else None,
        length=jnp.zeros((B,), jnp.int32),
    )
