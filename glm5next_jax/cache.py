"""The state that a sequence leaves behind: one frozen dataclass per mixer, one `Cache` over all."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from glm5next_jax import sharding
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.sharding import AnyMesh


def _leaf(*axes: str | None) -> Any:
    """A leaf with its logical axes; the dimensions that are not named here follow, uncut."""
    return dataclasses.field(metadata={"axes": axes})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KdaCache:
    """State of one KDA layer; its size does not depend on the number of tokens."""

    # [B, W-1, 3, H·K] inputs q, k, v of the short conv (before it), model dtype
    conv_state: jax.Array = _leaf("batch", None, None, "heads")
    recurrent_state: jax.Array = _leaf("batch", "heads")  # [B, H, K, V] float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DsaCache:
    """State of one sparse-attention layer. A layer that shares an indexer has no index leaves."""

    latent: jax.Array = _leaf("batch")  # [B, capacity, R] after its norm, model dtype
    index_pools: jax.Array | None = _leaf("batch")  # [B, capacity/P, dI] key of each complete pool
    # [B, P-1, 2, dI] key and gate rows of the unfinished pool
    index_tail: jax.Array | None = _leaf("batch")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """State of a batch of sequences, returned by every call and never mutated."""

    layers: tuple[KdaCache | DsaCache, ...]
    # [B, D] embedding of the last token before smearing; zeros: none
    smear: jax.Array | None = _leaf("batch")
    length: jax.Array = _leaf("batch")  # [B] int32 tokens seen, owned here once for all layers

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

    def specs(self) -> Cache:
        """The cache with a partition spec in the place of every leaf."""
        return _specs(self)


def _specs(state: Any) -> Any:
    if state is None:
        return None
    if isinstance(state, tuple):
        return tuple(map(_specs, state))
    changes = {}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if "axes" in field.metadata and value is not None:
            changes[field.name] = sharding.partition_spec(field.metadata["axes"])
        else:
            changes[field.name] = _specs(value)
    return dataclasses.replace(state, **changes)


def init_cache(
    config: Glm5NextConfig, batch_size: int, capacity: int, *, mesh: Mesh | None = None
) -> Cache:
    """An empty cache for `batch_size` rows of at most `capacity` tokens.

    Args:
      config: the model's configuration; its dtype is that of the activations kept.
      batch_size: rows.
      capacity: tokens per row, rounded up to whole pools of `index_kpool`.
      mesh: of the model (`model.mesh`): rows are split over `data`, heads over `model`.

    Raises:
      ValueError: batch_size or capacity below 1, or rows that do not divide over the mesh.
    """
    if batch_size < 1 or capacity < 1:
        raise ValueError(f"expected both to be at least 1: {batch_size=}, {capacity=}")
    sharding.check_mesh(config, mesh)
    sharding.check_batch(batch_size, mesh)
    if mesh is None:
        return _empty(config, batch_size, capacity)
    return _maker(config, batch_size, capacity, mesh)()


def abstract_cache(
    config: Glm5NextConfig, batch_size: int, capacity: int, *, mesh: AnyMesh | None = None
) -> Cache:
    """The cache with `jax.ShapeDtypeStruct` leaves, with their shardings where there is a mesh."""
    cache = jax.eval_shape(lambda: _empty(config, batch_size, capacity))
    if mesh is None:
        return cache
    return jax.tree.map(
        lambda leaf, spec: leaf.update(sharding=NamedSharding(mesh, spec)), cache, cache.specs()
    )


@functools.lru_cache(maxsize=16)  # compiling takes longer than making a cache
def _maker(config: Glm5NextConfig, batch_size: int, capacity: int, mesh: Mesh):
    """Compiled, so that each device makes its shards and nothing is made whole anywhere."""
    abstract = abstract_cache(config, batch_size, capacity, mesh=mesh)
    where = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    empty = functools.partial(_empty, config, batch_size, capacity)
    return jax.jit(empty, out_shardings=where)


def _empty(config: Glm5NextConfig, batch_size: int, capacity: int) -> Cache:
    B, P, dtype = batch_size, config.index_kpool, jnp.dtype(config.dtype)
    num_pools = -(-capacity // P)
    H, K, W = config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim

    def zeros(*shape, dtype=dtype):
        # One array per leaf: two leaves that share a buffer cannot both be donated.
        return jnp.zeros((B, *shape), dtype)

    def layer(i: int) -> KdaCache | DsaCache:
        if config.is_kda(i):
            return KdaCache(zeros(W - 1, 3, H * K), zeros(H, K, K, dtype=jnp.float32))
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
