"""The model with the TPU's kernels in place of `xla`, in interpret mode: the same model, and the
same law of cut invariance.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5next_jax import Glm5NextConfig, forward, init_cache
from pallas_kernels import dispatch
from tests.cases import relative_l2
from tests.model.models import random_model

LENGTH = 20
CONFIG = Glm5NextConfig.tiny(
    num_hidden_layers=2,
    layer_types=("linear_attention", "indexed_attention"),
    mlp_layer_types=("dense", "dense"),
    linear_num_heads=2,
    linear_head_dim=128,  # that of the release: the kernels have no other
)


@pytest.fixture
def kernels(monkeypatch):
    """Switches the automatic choice; returns the ops that a kernel ran."""
    ran = []

    def switch():
        monkeypatch.setitem(dispatch.AUTOMATIC_ORDER, "cpu", ("pallas_mosaic_tpu", "xla"))
        original = dispatch.dispatch

        def spy(op, backends, backend, *args, **kwargs):
            if "pallas_mosaic_tpu" in backends:
                ran.append(op)
            return original(op, backends, backend, *args, **kwargs)

        for family in ("kda", "short_conv"):
            api = importlib.import_module(f"pallas_kernels.{family}.api")
            monkeypatch.setattr(api, "dispatch", spy)
        return ran

    return switch


def test_any_cut_gives_what_xla_gives_at_once(kernels):
    """One row is a token shorter, so calls are ragged, and the last one has an idle row."""
    model = random_model(CONFIG)
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, LENGTH)).astype(np.int32)
    lengths = np.array([LENGTH, LENGTH - 1], np.int32)
    empty = init_cache(CONFIG, 2, 24)
    want, want_cache = forward(model, ids, empty, jnp.asarray(lengths))
    want = np.asarray(want)

    ran = kernels()
    for sizes in [(20,), (11, 8, 1)]:
        cache, start, parts = empty, 0, []
        for size in sizes:
            num_valid = np.clip(lengths - start, 0, size).astype(np.int32)
            piece = ids[:, start : start + size]
            logits, cache = forward(model, piece, cache, jnp.asarray(num_valid))
            parts.append(np.asarray(logits))
            start += size
        got = np.concatenate(parts, axis=1)
        for row, n in enumerate(lengths):
            assert relative_l2(got[row, :n], want[row, :n]) < 1e-5
        for leaf, want_leaf in zip(*map(jax.tree.leaves, (cache, want_cache)), strict=True):
            assert relative_l2(leaf, want_leaf) < 1e-5
    assert {"chunk_kda", "recurrent_kda", "short_conv"} <= set(ran)
