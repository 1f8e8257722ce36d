"""One model on many devices: the same numbers, and every leaf where it is declared to be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from glm5next_jax import (
    Glm5NextConfig,
    SamplingParams,
    forward,
    generate,
    init_cache,
    make_mesh,
    shard,
    sharding,
    stream,
)
from glm5next_jax.model import Glm5NextForCausalLM
from tests.model.models import random_model

# Measured 7.3e-5 over all meshes, on logits of standard deviation 1.
LOGITS = 2e-4
STATES = 2e-5  # measured 3e-6
MESHES = ((1, 8), (2, 4), (4, 2), (8, 1))
P = PartitionSpec


@pytest.fixture(scope="module")
def config() -> Glm5NextConfig:
    """Counts that divide over eight devices, of dense and sparse, KDA and MLA layers."""
    return Glm5NextConfig.tiny().replace(
        dtype="float32",
        linear_num_heads=8,
        num_attention_heads=8,
        n_routed_experts=16,
        num_experts_per_tok=3,
        smear=True,
        num_hidden_layers=3,
        layer_types=("linear_attention", "indexed_attention", "linear_attention"),
        mlp_layer_types=("dense", "sparse", "sparse"),
        indexer_types=("full",) * 3,
    )


@pytest.fixture(scope="module")
def model(config) -> Glm5NextForCausalLM:
    return random_model(config)


@pytest.fixture(scope="module")
def calls(config):
    """Two calls on eight ragged rows, idle ones among them."""
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, config.vocab_size, (8, 24)).astype(np.int32)
    return [
        (token_ids[:, :20], np.array([20, 11, 0, 1, 7, 20, 13, 2], np.int32)),
        (token_ids[:, 20:], np.array([4, 4, 3, 0, 1, 2, 4, 1], np.int32)),
    ]


def abstract_mesh(data: int, model: int) -> jax.sharding.AbstractMesh:
    automatic = (jax.sharding.AxisType.Auto,) * 2
    return jax.sharding.AbstractMesh((data, model), ("data", "model"), automatic)


def run(model, config, calls, mesh=None):
    cache = init_cache(config, 8, 32, mesh=mesh)
    out = []
    for token_ids, num_valid in calls:
        logits, cache = forward(model, token_ids, cache, num_valid)
        out.append(np.asarray(logits))
    return out, cache


@pytest.fixture(scope="module")
def one_device(model, config, calls):
    return run(model, config, calls)


@pytest.mark.parametrize("data, model_size", MESHES)
def test_same_logits_and_states_on_every_mesh(model, config, calls, one_device, data, model_size):
    mesh = make_mesh(data=data, model=model_size)
    sharded = shard(model, mesh)
    got, cache = run(sharded, config, calls, mesh)
    want, want_cache = one_device
    for (_, num_valid), ours, theirs in zip(calls, got, want, strict=True):
        valid = np.arange(ours.shape[1])[None] < num_valid[:, None]
        assert np.abs(ours - theirs)[valid].max() < LOGITS
        margin = np.diff(np.sort(theirs, axis=-1)[..., -2:], axis=-1)[..., 0]
        decided = valid & (margin > LOGITS)
        assert (ours.argmax(-1) == theirs.argmax(-1))[decided].all()
    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(want_cache), strict=True):
        assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() < STATES

    # Where the states are, read off the arrays.
    kda: Any = cache.layers[0]
    dsa: Any = cache.layers[1]
    where = {
        "conv_state": (kda.conv_state, P("data", None, None, "model")),
        "recurrent_state": (kda.recurrent_state, P("data", "model")),
        "latent": (dsa.latent, P("data")),
        "index_pools": (dsa.index_pools, P("data")),
        "index_tail": (dsa.index_tail, P("data")),
        "smear": (cache.smear, P("data")),
        "length": (cache.length, P("data")),
    }
    for name, (leaf, spec) in where.items():
        declared = jax.sharding.NamedSharding(mesh, spec)
        assert leaf.sharding.is_equivalent_to(declared, leaf.ndim), (name, leaf.sharding)


def test_a_device_holds_only_its_share(model, config):
    """No leaf is replicated by accident: bytes per device are those of the declared cuts."""
    mesh = make_mesh(data=2, model=4)
    cuts = {
        "shared_experts": 4, "experts.": 8, "embed_tokens": 4, "lm_head": 4, "qkv_proj": 4,
        "qkv_conv1d": 4, "f_b_proj": 4, "g_b_proj": 4, "A_log": 4, "dt_bias": 4,
        "self_attn.o_proj": 4, "q_b_proj": 4, "kv_b_proj": 4, "mlp.gate_proj": 4,
        "mlp.up_proj": 4, "mlp.down_proj": 4,
    }  # fmt: skip
    leaves = nnx.to_flat_state(nnx.state(shard(model, mesh), nnx.Param))
    for path, leaf in leaves:
        name, array = ".".join(map(str, path)), leaf[...]
        cut = next((n for part, n in cuts.items() if part in name), 1)
        held = {shard.device: shard.data.nbytes for shard in array.addressable_shards}
        assert set(held.values()) == {array.nbytes // cut}, name
    for leaf in jax.tree.leaves(init_cache(config, 8, 32, mesh=mesh)):
        cut = 2 if leaf.ndim < 4 or leaf.shape[1:3] == (3, 2) else 8  # tails have no heads
        assert {s.data.nbytes for s in leaf.addressable_shards} == {leaf.nbytes // cut}


@pytest.mark.parametrize("data, model_size", [(2, 4)])
def test_generate_and_stream_give_the_same_tokens(model, config, data, model_size):
    """Three prompts on a mesh that splits the batch in two: one row is idle."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in (3, 17, 24)]
    sampling = [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=0.9, seed=3),
        SamplingParams(logprobs=True),
    ]
    options: dict[str, Any] = dict(max_new_tokens=6, chunk_size=8, eos_token_ids=[])
    want = generate(model, prompts, sampling=sampling, **options)
    sharded = shard(model, make_mesh(data=data, model=model_size))
    got = generate(sharded, prompts, sampling=sampling, **options)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert want[2].logprobs is not None
    assert got[2].logprobs == pytest.approx(want[2].logprobs, abs=LOGITS)
    events = stream(sharded, prompts[0], **options)
    assert tuple(event.token_id for event in events) == want[0].token_ids


def test_fp8_weights_give_the_same_logits_on_a_mesh():
    """Codes and factors are cut alike; a shared expert of one block stays whole."""
    config = Glm5NextConfig.tiny().replace(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
        linear_num_heads=2, num_attention_heads=2, qk_nope_head_dim=128, v_head_dim=128,
        q_lora_rank=128, n_routed_experts=8, num_experts_per_tok=3, num_hidden_layers=2,
        layer_types=("indexed_attention", "linear_attention"),
        mlp_layer_types=("dense", "sparse"), indexer_types=("full", "full"),
    )  # fmt: skip
    model = random_model(config, fp8=True)
    token_ids = np.random.default_rng(2).integers(0, config.vocab_size, (4, 9)).astype(np.int32)
    want, _ = forward(model, token_ids)
    mesh = make_mesh(data=4, model=2)
    sharded = shard(model, mesh)
    got, _ = forward(sharded, token_ids)
    assert np.abs(np.asarray(got) - np.asarray(want)).max() < LOGITS
    moe: Any = sharded.layers[1].mlp
    assert moe.experts.gate_proj.dtype == jnp.float8_e4m3fn
    assert moe.experts.gate_proj[...].sharding.spec == P(("data", "model"), None, None)
    assert moe.experts.gate_proj_scale_inv[...].sharding.spec == P(("data", "model"), None, None)
    assert moe.shared_experts.down_proj.weight[...].sharding.is_fully_replicated
    dense: Any = sharded.layers[0].mlp
    assert dense.down_proj.weight[...].sharding.spec == P(None, "model")
    assert dense.down_proj.weight_scale_inv[...].sharding.spec == P(None, "model")


def test_a_shard_that_no_token_chose_and_one_that_all_chose(config):
    """Routing as uneven as it gets: more rows on one device than a pass takes."""
    model = random_model(config)
    moe: Any = model.layers[1].mlp
    bias = np.full((16,), -10.0, np.float32)
    bias[:3] = 10.0  # everything goes to the first two devices of eight
    moe.gate.e_score_correction_bias[...] = jnp.asarray(bias)
    token_ids = np.random.default_rng(3).integers(0, config.vocab_size, (8, 96)).astype(np.int32)
    want, _ = forward(model, token_ids, logits="last")
    mesh = make_mesh(data=2, model=4)
    got, _ = forward(shard(model, mesh), token_ids, logits="last")
    assert np.abs(np.asarray(got) - np.asarray(want)).max() < LOGITS


def test_partition_specs_name_each_mesh_axis_once():
    assert sharding.partition_spec(("experts", None, None)) == P(("data", "model"), None, None)
    with pytest.raises(ValueError, match="'batch' and 'experts' .* both map to the mesh axis"):
        sharding.partition_spec(("batch", "experts"))
    with pytest.raises(ValueError, match="unknown logical axis 'head'"):
        sharding.partition_spec(("head",))


@pytest.mark.parametrize(
    "change, sizes, message",
    [
        ({}, (1, 3), r"num_attention_heads = 64 does not divide .* model = 3; .* 1, 2, 4, 8, 16,"),
        ({}, (8, 8), r"n_routed_experts = 288 .* 8·8 = 64 devices; it divides over 1, 2, 3, 4, 6"),
        ({"linear_num_heads": 12}, (1, 8), "linear_num_heads = 12 .* over model = 1, 2, 4$"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused(change, sizes, message):
    config = Glm5NextConfig.glm53_flash().replace(**change)
    mesh = abstract_mesh(*sizes)
    with pytest.raises(ValueError, match=message):
        sharding.check_mesh(config, mesh)


def test_fp8_blocks_are_not_cut():
    config = Glm5NextConfig.glm53_flash().replace(intermediate_size=128 * 6)
    mesh = abstract_mesh(1, 4)
    sharding.check_mesh(config, mesh)
    with pytest.raises(ValueError, match="FP8 blocks of intermediate_size = 6 does not divide"):
        sharding.check_mesh(config, mesh, fp8=True)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="data=4 x model=4 needs 16 devices, but there are 8"):
        make_mesh(data=4, model=4)
    with pytest.raises(ValueError, match="mesh axis model to be an integer >= 1, got 0"):
        make_mesh(model=0)


def test_other_meshes_and_batches_are_refused(model, config):
    devices = np.array(jax.devices())
    with pytest.raises(ValueError, match=r"axes \('data', 'model'\) .*, got \('x',\)"):
        shard(model, Mesh(devices, ("x",)))
    explicit = jax.make_mesh((2, 4), ("data", "model"), (jax.sharding.AxisType.Explicit,) * 2)
    with pytest.raises(ValueError, match="expected automatic mesh axes"):
        shard(model, explicit)
    mesh = make_mesh(data=4, model=2)
    with pytest.raises(ValueError, match="batch_size=6 does not divide over the mesh axis data"):
        init_cache(config, 6, 32, mesh=mesh)
    with pytest.raises(ValueError, match="batch_size=1 does not divide over the mesh axis data"):
        forward(shard(model, mesh), np.zeros((1, 4), np.int32))
