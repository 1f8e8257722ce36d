"""`load(weights="fp8")`: codes and factors as the file holds them, or a report; never others."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.checkpoints import released_tensors, write_checkpoint
from glm5next_jax import make_mesh
from glm5next_jax.checkpoint import CheckpointError, load, planning, quantized
from glm5next_jax.checkpoint.safetensors_reader import SafetensorsDirectory, TensorInfo
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.model import param_specs
from tests.checkpoint import released
from tests.checkpoint.test_load import assert_same, leaves_of, write_native
from tests.checkpoint.test_mapping import MANIFEST, manifest

TEXT = released.TEXT
DENSE = f"{TEXT}layers.0.mlp.down_proj.weight"
EXPERT = f"{TEXT}layers.1.mlp.experts.3.up_proj.weight"
Q_A = f"{TEXT}layers.1.self_attn.q_a_proj.weight"


def config(**changes) -> Glm5NextConfig:
    """Several blocks wherever the model is cut in two; a last block of q_lora_rank is cut off."""
    fields = dict(
        vocab_size=96, hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
        num_attention_heads=4, q_lora_rank=192, kv_lora_rank=128, qk_nope_head_dim=64,
        v_head_dim=64, linear_num_heads=2, linear_head_dim=32, num_hidden_layers=2,
        layer_types=("linear_attention", "indexed_attention"), mlp_layer_types=("dense", "sparse"),
        indexer_types=("full", "full"), dtype="bfloat16",
    )  # fmt: skip
    return Glm5NextConfig.tiny(**(fields | changes))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("fp8") / "src"
    write_checkpoint(path, config(), file_bytes=400_000)
    return path


def stored_in(directory) -> dict[str, np.ndarray]:
    with SafetensorsDirectory(directory) as reader:
        return {info.name: reader.read(info) for info in reader.tensors}


def at_rest(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The leaves of stored tensors, with the float32 ones of bfloat16 tensors widened."""
    scales = {n.removesuffix("_scale_inv"): x for n, x in stored.items() if n.endswith("_inv")}
    weights = released.leaves({n: x for n, x in stored.items() if not n.endswith("_inv")})
    factors = {f"{leaf}_scale_inv": x for leaf, x in released.leaves(scales).items()}
    wide = ("mlp.gate.weight", "qkv_conv1d.weight")
    weights |= {n: x.astype(np.float32) for n, x in weights.items() if n.endswith(wide)}
    return weights | factors


@pytest.mark.parametrize("data, model", [(1, 1), (4, 2), (8, 1)])
def test_codes_and_factors_are_those_of_the_file(data, model, directory):
    mesh = None if data * model == 1 else make_mesh(data=data, model=model)
    loaded = load(directory, weights="fp8", mesh=mesh)
    got, want = leaves_of(loaded), at_rest(stored_in(directory))
    assert loaded.fp8 and loaded.config.dtype == "bfloat16"
    assert sum(x.dtype == released.FP8 for x in want.values()) == 3 + 3 + 3 + 4
    assert_same(got, want)
    specs = param_specs(config(), fp8=True, mesh=mesh)
    assert {n: (x.shape, x.dtype) for n, x in got.items()} == {
        n: (spec.shape, spec.dtype) for n, spec in specs.items()
    }


def test_half_the_bytes_of_bfloat16(directory):
    def expert_bytes(model):
        return sum(x.nbytes for n, x in leaves_of(model).items() if ".experts." in n)

    fp8, bf16 = load(directory, weights="fp8"), load(directory, weights="bf16")
    assert 0.5 <= expert_bytes(fp8) / expert_bytes(bf16) < 0.501


def test_the_compute_dtype_is_that_of_the_other_weights(directory):
    loaded = leaves_of(load(directory, weights="fp8", dtype="float32"))
    assert loaded["layers.1.self_attn.kv_b_proj.weight"].dtype == np.float32
    assert loaded["layers.1.self_attn.q_b_proj.weight"].dtype == released.FP8
    assert loaded["layers.1.self_attn.q_b_proj.weight_scale_inv"].shape == (2, 2)  # 256 x 192


@pytest.mark.parametrize("dtype", [np.float32, released.BF16])
def test_decoding_a_shard_gives_the_bits_of_decoding_the_whole(dtype, directory):
    """Shards of a mesh against `quantized.dequantize` of whole matrices."""
    stored, meant = stored_in(directory), {}
    for name, x in stored.items():
        if name.endswith("_scale_inv"):
            continue
        scale = stored.get(f"{name}_scale_inv")
        meant[name] = x if scale is None else quantized.dequantize(x, scale, dtype)
    want = {n: x for n, x in at_rest(meant).items()}
    weights = "bf16" if dtype == released.BF16 else "float32"
    got = leaves_of(load(directory, weights=weights, mesh=make_mesh(data=4, model=2)))
    assert_same(got, {n: x.astype(got[n].dtype) for n, x in want.items()})


def rewritten(directory, tmp_path, **changed: np.ndarray):
    """The checkpoint with some tensors changed."""
    hf = json.loads((directory / "config.json").read_text())
    return released.write(tmp_path, stored_in(directory) | changed, hf_config=hf)


def error_of(path, **arguments) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(path, weights="fp8", **arguments)
    return caught.value


def test_nan_codes_and_factors_are_named(directory, tmp_path):
    stored = stored_in(directory)
    codes, scale = stored[EXPERT].copy(), stored[f"{DENSE}_scale_inv"].copy()
    codes.view(np.uint8)[5, :3] = (0x7F, 0xFF, 0x7E)
    scale[1, 1] = np.inf
    path = rewritten(directory, tmp_path, **{EXPERT: codes, f"{DENSE}_scale_inv": scale})
    for mesh in (None, make_mesh(data=4, model=2)):
        error = error_of(path, mesh=mesh)
        assert {f.tensor: f.found for f in error.failures} == {
            EXPERT: "2 NaN codes",
            f"{DENSE}_scale_inv": "1 values that are NaN or infinite",
        }
    load(path, weights="fp8", check_finite=False)


def test_other_blocks_are_refused_and_not_recoded(directory, tmp_path):
    _, scale = released.quantize(np.ones((256, 512), np.float32), (64, 64))
    path = rewritten(directory, tmp_path, **{f"{DENSE}_scale_inv": scale})
    (failure,) = error_of(path).failures
    assert (failure.kind, failure.tensor) == ("scale", f"{DENSE}_scale_inv")
    assert failure.found == "blocks of 64 x 64"
    assert "whole blocks of 128 x 128" in failure.expected
    assert leaves_of(load(path, weights="bf16"))["layers.0.mlp.down_proj.weight"].shape == (
        256,
        512,
    )


def test_weights_that_are_not_fp8_are_refused_and_not_quantised(directory, tmp_path):
    write_checkpoint(tmp_path, config(), fp8=False)
    error = error_of(tmp_path)
    assert {f.kind for f in error.failures} == {"dtype"}
    tensors = released_tensors(config())
    assert {f.tensor for f in error.failures} == {
        name for name, (dtype, _) in tensors.items() if dtype == "F8_E4M3"
    }
    assert "found dtype BF16, expected F8_E4M3: FP8 at rest keeps what is stored" in str(error)


def test_a_converted_directory_of_other_weights(tmp_path):
    tensors = released.released(released.in_memory())
    converted = write_native(tmp_path / "dst", tensors, tmp_path / "src")
    with pytest.raises(ValueError, match="found dtype F32, expected F8_E4M3: FP8 at rest keeps"):
        load(converted, weights="fp8")


def plan_of(infos, c) -> planning.Plan:
    return planning.plan(infos, c, param_specs(c, fp8=True))


def infos_of(c) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name, dtype, shape, "file")
        for name, (dtype, shape) in released_tensors(c).items()
    }


def with_fused(table: dict[str, TensorInfo], c: Glm5NextConfig) -> dict[str, TensorInfo]:
    """Stacked experts, gate above up, and q_a above kv_a, as serving engines hold them."""
    fused = {n: i for n, i in table.items() if ".experts." not in n}
    E, F, D = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
    both = c.q_lora_rank + c.kv_lora_rank
    stem = f"{TEXT}layers.1."
    for part in ("q_a_proj", "kv_a_proj_with_mqa"):
        for suffix in ("weight", "weight_scale_inv"):
            del fused[f"{stem}self_attn.{part}.{suffix}"]
    for name, shape in (
        ("mlp.experts.gate_up_proj", (E, 2 * F, D)),
        ("mlp.experts.down_proj", (E, D, F)),
        ("self_attn.fused_qkv_a_proj_with_mqa.weight", (both, D)),
    ):
        grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        fused[stem + name] = TensorInfo(stem + name, "F8_E4M3", shape, "file")
        scale = f"{stem}{name}_scale_inv"
        fused[scale] = TensorInfo(scale, "F32", grid, "file")
    return fused


def test_fused_fp8_fills_codes_and_factors_once():
    c = config(q_lora_rank=256)
    plan = plan_of(with_fused(infos_of(c), c).values(), c)
    filled = {leaf: 0 for leaf in plan.specs}
    for entry in plan.entries:
        assert entry.encoding is None
        for piece in entry.pieces:
            filled[piece.leaf] += piece.size
    assert filled == {
        leaf: int(np.prod(spec.shape[:-1])) if len(spec.shape) > 1 else spec.shape[0]
        for leaf, spec in plan.specs.items()
    }
    places = {
        (piece.leaf, piece.source_start, piece.size, piece.target_start)
        for entry in plan.entries
        if entry.source.name.endswith(("gate_up_proj_scale_inv", "with_mqa.weight_scale_inv"))
        for piece in entry.pieces
    }
    up = "layers.1.mlp.experts.up_proj_scale_inv"
    assert {(up, 2 * e + 1, 1, e) for e in range(8)} <= places
    assert ("layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv", 2, 1, 0) in places


@pytest.mark.parametrize("rank, name", [(192, "fused_qkv_a_proj_with_mqa.weight")])
def test_a_block_that_would_be_parted_is_refused(rank, name):
    c = config(q_lora_rank=rank)
    with pytest.raises(CheckpointError) as caught:
        plan_of(with_fused(infos_of(c), c).values(), c)
    (failure,) = caught.value.failures
    assert failure.tensor.endswith(f"{name}_scale_inv") and "128 x 128" in failure.expected


def test_every_released_fp8_tensor_has_a_leaf_of_codes():
    c = Glm5NextConfig.from_hf(MANIFEST / "full_config.json")
    plan = plan_of(manifest("fp8"), c)
    assert all(entry.encoding is None for entry in plan.entries)
    codes = [leaf for leaf, spec in plan.specs.items() if spec.dtype == jnp.float8_e4m3fn]
    assert len(codes) == 42 * (3 + 3) + 3 * 3 + 11 * 4
    stored = sum(entry.source.num_bytes for entry in plan.entries)
    # Nothing is decoded: the model takes what is stored, and its few float32 leaves.
    wide = sum(
        2 * int(np.prod(spec.shape))
        for leaf, spec in plan.specs.items()
        if leaf.endswith(("mlp.gate.weight", "qkv_conv1d.weight"))
    )
    held = sum(int(np.prod(s.shape)) * s.dtype.itemsize for s in plan.specs.values())
    assert held == stored + wide


def test_the_benchmark_writes_the_released_names():
    """Names, dtypes and shapes of the generated checkpoint against the released table."""
    c = Glm5NextConfig.from_hf(MANIFEST / "full_config.json")
    for kind in ("fp8", "bf16"):
        ours = released_tensors(c, fp8=kind == "fp8")
        theirs = {
            info.name: (info.dtype, info.shape)
            for info in manifest(kind)
            if "layers.45." not in info.name and "visual" not in info.name
        }
        assert ours == theirs
