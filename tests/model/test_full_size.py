"""The released model's size, without its memory: shapes and counts (tests/data/manifest)."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from glm5next_jax import Glm5NextConfig, init_cache
from glm5next_jax.cache import DsaCache, KdaCache
from glm5next_jax.model import Glm5NextForCausalLM, param_specs
from tests.model.conftest import GOLDEN

CONFIG = Glm5NextConfig.glm53_flash()


@pytest.fixture(scope="module")
def specs():
    return param_specs(CONFIG)


def counted(specs, pattern: str) -> int:
    return sum(math.prod(s.shape) for name, s in specs.items() if re.match(pattern, name))


@pytest.mark.parametrize(
    "line, pattern",
    [
        ("language_model+lm_head", ""),
        ("embed_tokens", r"embed_tokens\."),
        ("lm_head", r"lm_head\."),
        ("KDA self_attn (layer 0)", r"layers\.0\.self_attn\."),
        ("DSA self_attn (layer 3)", r"layers\.3\.self_attn\."),
        ("  indexer", r"layers\.3\.self_attn\.indexer\."),
        ("dense mlp (layer 0)", r"layers\.0\.mlp\."),
        ("MoE mlp (layer 3)", r"layers\.3\.mlp\."),
        ("  routed experts", r"layers\.3\.mlp\.experts\."),
        ("  shared expert", r"layers\.3\.mlp\.shared_experts\."),
        ("  router", r"layers\.3\.mlp\.gate\."),
        ("mHC per layer (2 modules)", r"layers\.0\.(attn|ffn)_hc\."),
        ("layer 0 total (KDA+dense)", r"layers\.0\."),
        ("layer 3 total (DSA+MoE)", r"layers\.3\."),
        ("layer 4 total (KDA+MoE)", r"layers\.4\."),
    ],
)
def test_parameter_counts(specs, line, pattern):
    text = (GOLDEN.parent / "manifest" / "param_counts.txt").read_text()
    (want,) = re.findall(rf"^{re.escape(line)}: ([\d,]+)$", text, re.MULTILINE)
    assert counted(specs, pattern) == int(want.replace(",", ""))


def test_dtypes_at_rest(specs):
    float32 = {name for name, spec in specs.items() if spec.dtype == jnp.float32}
    kept = r".*(mlp\.gate\.|qkv_conv1d\.|dt_bias|A_log|_hc\.(base|scale))"
    assert float32 == {name for name in specs if re.match(kept, name)}
    assert {spec.dtype for spec in specs.values()} == {jnp.dtype("bfloat16"), jnp.dtype("float32")}


def test_forward_and_cache():
    """45 layers traced over a prefill chunk of 2,048 tokens and over a decode step of 64 rows."""
    model = Glm5NextForCausalLM.abstract(CONFIG)
    leaves, treedef = jax.tree.flatten(model)
    for B, T, capacity in ((1, 2048, 32768), (64, 1, 4096)):
        cache = jax.eval_shape(lambda B=B, capacity=capacity: init_cache(CONFIG, B, capacity))

        def call(leaves, ids, cache, num_valid):
            model = jax.tree.unflatten(treedef, leaves)
            hidden, cache = model(ids, cache, num_valid)
            return model.logits(hidden[:, -1]), cache

        ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
        logits, after = jax.eval_shape(
            call, leaves, ids, cache, jax.ShapeDtypeStruct((B,), jnp.int32)
        )
        assert (logits.shape, logits.dtype) == ((B, CONFIG.vocab_size), jnp.float32)
        assert after == cache


def test_cache_bytes():
    """Model spec, section 9: 149.3 MB a sequence for KDA with one conv row more than ours, and 512
    latents with 128/4 pooled keys a token in the 11 sparse layers."""
    cache = jax.eval_shape(lambda: init_cache(CONFIG, 1, 32768))
    nbytes = lambda tree: sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))
    kda = [layer for layer in cache.layers if isinstance(layer, KdaCache)]
    dsa = [layer for layer in cache.layers if isinstance(layer, DsaCache)]
    assert nbytes(kda) == 34 * (64 * 128 * 128 * 4 + 24576 * 3 * 2)
    tail = 3 * 2 * 128 * 2
    assert nbytes(dsa) == 11 * (32768 * (512 + 128 // 4) * 2 + tail)
