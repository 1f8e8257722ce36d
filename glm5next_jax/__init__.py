"""GLM-5.3-Flash (`glm5_next`) in JAX."""

__version__ = "0.1.0.dev0"

from glm5next_jax.cache import Cache, init_cache
from glm5next_jax.checkpoint import load
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.forward import forward
from glm5next_jax.generate import Completion, generate, stream
from glm5next_jax.sampling import SamplingParams
from glm5next_jax.sharding import make_mesh, shard

__all__ = [
    "Cache",
    "Completion",
    "Glm5NextConfig",
    "SamplingParams",
    "forward",
    "generate",
    "init_cache",
    "load",
    "make_mesh",
    "shard",
    "stream",
]
