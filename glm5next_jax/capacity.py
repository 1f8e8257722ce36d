"""What one device must hold: weights, cache and working memory, computed without making any."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from glm5next_jax import sharding
from glm5next_jax.cache import abstract_cache
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.model import param_specs
from glm5next_jax.moe import rows_per_pass
from glm5next_jax.sharding import AnyMesh
from pallas_kernels.kda import xla as kda_xla
from pallas_kernels.kpool_indexer import xla as indexer_xla
from pallas_kernels.sparse_mla import xla as mla_xla

WeightsAtRest = Literal["fp8", "bf16", "float32"]

# Memory of one JAX device, by the vendors' data sheets (a tpu7x chip is two devices). The runtime
# keeps some of it, so `Footprint.fits` leaves a part free.
DEVICE_BYTES = {
    "v5e": 16 * 2**30,
    "v5p": 95 * 2**30,
    "v6e": 32 * 2**30,
    "tpu7x": 96 * 2**30,
    "h100": 80 * 10**9,
    "h200": 141 * 10**9,
}
_RESERVED = 0.05


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes on each device of a mesh.

    Attributes:
      weights: the model's.
      cache: of one batch, which calls update in place.
      temporaries: of the larger of a prefill chunk and a decode step, an estimate from above.
    """

    weights: int
    cache: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.temporaries

    def fits(self, device: str) -> bool:
        """Whether a device of `DEVICE_BYTES` holds it, with 5% left to the runtime."""
        return self.total <= DEVICE_BYTES[device] * (1 - _RESERVED)


def footprint(
    config: Glm5NextConfig,
    *,
    data: int = 1,
    model: int = 1,
    weights: WeightsAtRest = "bf16",
    batch_size: int,
    capacity: int,
    chunk_size: int = 2048,
) -> Footprint:
    """What each device of a data x model mesh holds while it generates.

    Args:
      config: the model.
      data, model: sizes of the mesh axes (`sharding.make_mesh`).
      weights: how weights rest (`load(weights=...)`).
      batch_size: rows over the whole mesh.
      capacity: tokens per row.
      chunk_size: prompt tokens per row and prefill step.

    Raises:
      ValueError: the model or the batch does not divide over the mesh.
    """
    mesh = _mesh(data, model)
    sharding.check_batch(batch_size, mesh)
    rows = batch_size // data
    return Footprint(
        weights=_weight_bytes(config, mesh, weights),
        cache=cache_bytes(config, mesh, batch_size, capacity),
        temporaries=_temporaries(config, data, model, rows, capacity, chunk_size),
    )


def _mesh(data: int, model: int) -> AbstractMesh:
    return AbstractMesh((data, model), (sharding.DATA, sharding.MODEL), (AxisType.Auto,) * 2)


@functools.lru_cache(maxsize=64)  # tracing all layers takes a second
def _weight_bytes(config: Glm5NextConfig, mesh: AbstractMesh, weights: WeightsAtRest) -> int:
    dtype = {"fp8": config.dtype, "bf16": "bfloat16", "float32": "float32"}[weights]
    specs = param_specs(config, param_dtype=dtype, fp8=weights == "fp8", mesh=mesh)
    return sum(map(sharding.shard_bytes, specs.values()))


def cache_bytes(
    config: Glm5NextConfig, mesh: AnyMesh | None, batch_size: int, capacity: int
) -> int:
    """Bytes of a cache on each device."""
    cache = abstract_cache(config, batch_size, capacity, mesh=mesh)
    return sum(map(sharding.shard_bytes, jax.tree.leaves(cache)))


def _temporaries(
    config: Glm5NextConfig, data: int, model: int, rows: int, capacity: int, chunk_size: int
) -> int:
    """Working memory of `rows` rows of `chunk_size` tokens on one device, from above.

    The residual streams are there all the time; of the rest, one layer's part at a time. Ops that
    work in blocks have a byte budget each.
    """
    c, tokens = config, rows * chunk_size
    width = jnp.dtype(c.dtype).itemsize
    D, R, F = c.hidden_size, c.kv_lora_rank, c.moe_intermediate_size
    streams = tokens * c.hc_mult * D * (3 * width + 4)
    kda = tokens * 3 * c.linear_dim // model * 3 * width + 4 * kda_xla.GROUP_BYTES
    sparse = (
        # The compiler lays the latents out anew to gather from them; two copies were seen.
        2 * rows * capacity * R * width
        + tokens * c.num_attention_heads // model * R * 2 * width
        + 3 * (mla_xla.ATTENTION_BLOCK_BYTES + indexer_xla.SCORE_BLOCK_BYTES)
    )
    everyone, chosen = data * tokens, data * tokens * c.num_experts_per_tok
    moe = everyone * D * (width + 8) + chosen * D * 2 * width
    moe += rows_per_pass(chosen, data * model) * (2 * D + 3 * F) * width
    return streams + max(kda, sparse, moe)
