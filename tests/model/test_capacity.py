"""What a device is said to hold, against the compiler's own account and against real arrays."""

import jax
import numpy as np
import pytest

from glm5next_jax import Glm5NextConfig, init_cache, make_mesh, shard, sharding
from glm5next_jax.capacity import DEVICE_BYTES, cache_bytes, footprint
from tests.model.models import random_model

RELEASED = Glm5NextConfig.glm53_flash()
# Counts that divide over eight devices; a latent cache, a KDA state and both feed-forwards.
SMALL = Glm5NextConfig.tiny().replace(
    linear_num_heads=8, num_attention_heads=8, n_routed_experts=16, num_hidden_layers=2,
    layer_types=("indexed_attention", "linear_attention"), mlp_layer_types=("sparse", "dense"),
    indexer_types=("full", "full"),
)  # fmt: skip


@pytest.mark.parametrize("data, model", [(1, 1), (2, 4), (8, 1)])
def test_weights_and_cache_are_the_compilers_argument_bytes(data, model):
    mesh = make_mesh(data=data, model=model)
    sharded, cache = shard(random_model(SMALL), mesh), init_cache(SMALL, 8, 40, mesh=mesh)
    token_ids = sharding.replicate(np.zeros((8, 1), np.int32), mesh)
    leaves, treedef = jax.tree.flatten(sharded)

    @jax.jit
    def step(leaves, token_ids, cache):
        model = jax.tree.unflatten(treedef, leaves)
        hidden, cache = model(token_ids, cache, token_ids[:, 0])
        return model.logits(hidden), cache

    memory = step.lower(leaves, token_ids, cache).compile().memory_analysis()
    assert memory is not None
    sizes = dict(data=data, model=model, batch_size=8, capacity=40)
    expected = footprint(SMALL, weights="float32", **sizes)
    arguments = expected.weights + expected.cache + token_ids.nbytes
    assert memory.argument_size_in_bytes == arguments
    # And what the arrays say.
    first = jax.devices()[0]
    for tree, stated in ((sharded, expected.weights), (cache, expected.cache)):
        shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
        assert sum(s.data.nbytes for s in shards if s.device == first) == stated


def test_the_released_model():
    """Weights by hand: 321,323,031,390 parameters with MTP and vision; the text model without them
    is 314.7e9 codes and bfloat16 numbers (manifest), which eight devices share."""
    whole = footprint(RELEASED, weights="bf16", batch_size=1, capacity=4)
    fp8 = footprint(RELEASED, weights="fp8", batch_size=1, capacity=4)
    assert 0.5 < fp8.weights / whole.weights < 0.52
    eight = footprint(RELEASED, model=8, weights="fp8", batch_size=64, capacity=32768)
    assert fp8.weights / 8 < eight.weights < 1.05 * fp8.weights / 8
    # 34 KDA layers: [64, 128, 128] float32 and 3 inputs of 3·8192; 11 layers with 512 latents and
    # 128/4 numbers of pool keys per token, in bfloat16; tails of 3·2·128. Heads are cut by 8.
    kda = 34 * (64 * 128 * 128 * 4 + 3 * 3 * 8192 * 2) // 8
    dsa = 11 * (32768 * (512 + 32) * 2 + 3 * 2 * 128 * 2)
    assert eight.cache == 64 * (kda + dsa + 4)
    assert cache_bytes(RELEASED, None, 1, 32768) == 8 * kda + dsa + 4


def test_what_fits():
    v6e = dict(data=4, model=8, batch_size=64, capacity=32768, chunk_size=128)
    assert footprint(RELEASED, weights="fp8", **v6e).fits("v6e")
    assert not footprint(RELEASED, weights="bf16", **v6e | {"batch_size": 128}).fits("v6e")
    h200 = dict(model=8, batch_size=64, capacity=32768, chunk_size=32)
    assert footprint(RELEASED, weights="bf16", **h200).fits("h200")
    assert not footprint(RELEASED, weights="fp8", **h200 | {"model": 2}).fits("h200")
    assert set(DEVICE_BYTES) >= {"v5p", "v6e", "tpu7x", "h200"}


def test_a_batch_that_does_not_divide():
    with pytest.raises(ValueError, match="batch_size=6 does not divide over .* data = 4"):
        footprint(RELEASED, data=4, batch_size=6, capacity=4)
