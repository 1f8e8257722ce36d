"""The memory of a conversion: a few times the largest file, whatever the size of the checkpoint."""

import pytest

from benchmarks.checkpoints import files_in, write_checkpoint
from benchmarks.convert import read_layer, require_same_tensors, run
from convert.tree import FILE_BYTES
from glm5next_jax.config import Glm5NextConfig

MIB = 1 << 20


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_there_and_back_in_little_memory(dtype, tmp_path):
    """Also that the benchmark does what it says, with a checkpoint that takes seconds."""
    config = Glm5NextConfig.glm53_flash().replace(
        vocab_size=20_480,
        eos_token_id=(),
        pad_token_id=None,
        n_routed_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        layer_types=("linear_attention", "indexed_attention"),
        mlp_layer_types=("dense", "sparse"),
        indexer_types=("full", "full"),
    )
    released, converted, exported = (tmp_path / name for name in ("src", "dst", "out"))
    size = write_checkpoint(released, config)
    base = run(released, converted, "--dry-run")
    convert = run(released, converted, "--dtype", dtype, "--quiet")
    largest = max(path.stat().st_size for path in files_in(converted / "weights"))
    assert FILE_BYTES // 2 < largest < FILE_BYTES + MIB < size / 16
    assert convert.peak_bytes - base.peak_bytes < 3 * largest
    assert convert.peak_bytes < 1000 * MIB
    run("verify", released, converted, "--quiet")
    read_layer(converted, released, 1)
    run("export", converted, exported, "--quiet")
    if dtype == "keep":
        assert require_same_tensors(released, exported) > 100
