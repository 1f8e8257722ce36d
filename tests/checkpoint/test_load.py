"""`load`: bit for bit what the files say, whatever their form; and every bad input by name."""

import io
import json
import os
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm5next_jax.checkpoint import (
    CheckpointError,
    _progress_bar,
    leaves,
    load,
    memory,
    native,
    placement,
)
from tests.checkpoint import released
from tests.checkpoint.released import BF16

TEXT = released.TEXT
Q_A = f"{TEXT}layers.3.self_attn.q_a_proj.weight"
FLOAT32_LEAVES = (
    "mlp.gate.weight", "e_score_correction_bias", "qkv_conv1d.weight", "dt_bias", "A_log",
    "_hc.base", "_hc.scale",
)  # fmt: skip


@pytest.fixture(scope="module")
def tensors():
    return released.released(released.in_memory())


@pytest.fixture
def source(tmp_path, tensors):
    return released.write(tmp_path / "src", tensors, num_shards=3)


def leaves_of(model) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in state}


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape), name
        assert got[name].tobytes() == x.tobytes(), name


def rounded(leaves: dict[str, np.ndarray], dtype) -> dict[str, np.ndarray]:
    """Leaves at rest: `dtype`, but float32 where the model must have it."""
    return {n: x if n.endswith(FLOAT32_LEAVES) else x.astype(dtype) for n, x in leaves.items()}


def error_of(path, **arguments) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(path, **arguments)
    return caught.value


def test_released_names_in_shards(source, tensors):
    model = load(source)
    assert_same(leaves_of(model), released.leaves(tensors))
    assert model.config.dtype == "float32" and model.config.num_hidden_layers == 8
    assert model.tokenizer is None and model.eos_token_ids == ()
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize("prefix", [TEXT, "model.", ""])
def test_names_of_transformers_in_memory(prefix, tmp_path, tensors):
    names = {name.replace(TEXT, prefix): x for name, x in released.in_memory().items()}
    model = load(released.write(tmp_path, names))
    assert_same(leaves_of(model), released.leaves(tensors))


def test_fused_names(tmp_path, tensors):
    model = load(released.write(tmp_path, released.fused(tensors), num_shards=2, index=False))
    assert_same(leaves_of(model), released.leaves(tensors))


@pytest.mark.parametrize(
    "stored, dtype, weights, at_rest",
    [
        ("float32", None, None, np.float32),
        ("float32", "bfloat16", None, BF16),
        ("float32", None, "bf16", BF16),
        ("bfloat16", "bfloat16", None, BF16),
        ("bfloat16", "bfloat16", "float32", np.float32),
        ("bfloat16", jnp.float32, None, np.float32),
        ("float16", "float32", None, np.float32),
    ],
)
def test_dtypes(stored, dtype, weights, at_rest, tmp_path, tensors):
    if stored == "bfloat16":
        tensors = released.as_stored(tensors)
    elif stored == "float16":
        tensors = {name: x.astype(np.float16) for name, x in tensors.items()}
    exact = {name: x.astype(np.float32) for name, x in tensors.items()}
    model = load(released.write(tmp_path, tensors), dtype=dtype, weights=weights)
    assert_same(leaves_of(model), rounded(released.leaves(exact), at_rest))
    assert model.config.dtype == ("float32" if dtype is None else jnp.dtype(dtype).name)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("block", [(16, 16), (12, 20), (128, 128)])
def test_fp8_with_codes_and_scales_in_different_shards(block, dtype, tmp_path, tensors):
    stored, meant = released.with_fp8(tensors, block)
    assert sum(name.endswith("_scale_inv") for name in stored) > 100
    config = released.config()
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    # Scales follow their codes, so that dealing out in turn to two shards parts them.
    source = released.write(tmp_path, stored, hf_config=config, num_shards=2)
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    scales = [name for name in stored if name.endswith("_scale_inv")]
    assert any(weight_map[n] != weight_map[n.removesuffix("_scale_inv")] for n in scales)

    model = load(source, dtype=np.dtype(dtype).name)

    assert_same(leaves_of(model), rounded(released.leaves(meant), dtype))


def test_fused_fp8(tmp_path, tensors):
    """Codes of stacked experts, and of two projections in one, with the scales of the whole."""
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    names = released.in_memory()
    stored, meant = dict(names), dict(names)
    for name in [f"{TEXT}layers.3.{gate_up}", f"{TEXT}layers.3.{down}"]:
        pairs = [released.quantize(x, (16, 16)) for x in names[name]]
        stored[name] = np.stack([codes for codes, _ in pairs])
        stored[f"{name}_scale_inv"] = np.stack([scale for _, scale in pairs])
        spread = np.stack([np.kron(scale, np.ones((16, 16), np.float32)) for _, scale in pairs])
        meant[name] = stored[name].astype(np.float32) * spread
    stem = f"{TEXT}layers.3.self_attn."
    both = np.concatenate([stored.pop(Q_A), stored.pop(f"{stem}kv_a_proj_with_mqa.weight")])
    codes, scale = released.quantize(both, (16, 16))
    stored[f"{stem}fused_qkv_a_proj_with_mqa.weight"] = codes
    stored[f"{stem}fused_qkv_a_proj_with_mqa.weight_scale_inv"] = scale
    values = codes.astype(np.float32) * np.kron(scale, np.ones((16, 16), np.float32))
    meant[Q_A], meant[f"{stem}kv_a_proj_with_mqa.weight"] = values[:32], values[32:]

    model = load(released.write(tmp_path, stored))

    assert_same(leaves_of(model), released.leaves(released.released(meant)))


@pytest.mark.parametrize("form", ["released", "in_memory", "fused", "fp8"])
def test_small_read_blocks_change_nothing(form, tmp_path, tensors, monkeypatch):
    """Tensors larger than one read: a few rows, or one row of FP8 blocks, at a time."""
    monkeypatch.setattr(leaves, "TILE_BYTES", 300)
    want = tensors
    given = {"released": tensors, "in_memory": released.in_memory()}.get(form)
    if form == "fused":
        given = released.fused(tensors)
    elif form == "fp8":
        given, want = released.with_fp8(tensors, (16, 16))
    assert given is not None
    model = load(released.write(tmp_path, given))
    assert_same(leaves_of(model), released.leaves(want))


def test_multi_token_prediction_and_vision_are_left_out(tmp_path, tensors):
    extra = {
        name.replace("layers.7.", "layers.8."): x
        for name, x in tensors.items()
        if "layers.7." in name and "hc_" not in name
    }
    extra[f"{TEXT}layers.8.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    model = load(released.write(tmp_path, tensors | extra))
    assert_same(leaves_of(model), released.leaves(tensors))


def test_tied_embeddings(tmp_path, tensors):
    config = released.config() | {"tie_word_embeddings": True}
    embedding = tensors[f"{TEXT}embed_tokens.weight"]
    want = released.leaves(tensors)
    del want["lm_head.weight"]

    without = {name: x for name, x in tensors.items() if name != "lm_head.weight"}
    model = load(released.write(tmp_path / "absent", without, hf_config=config))
    assert_same(leaves_of(model), want)
    same = tensors | {"lm_head.weight": embedding}
    assert_same(leaves_of(load(released.write(tmp_path / "same", same, hf_config=config))), want)
    error = error_of(released.write(tmp_path / "other", tensors, hf_config=config))
    assert "lm_head.weight" in str(error) and "tie_word_embeddings" in str(error)


def test_a_shared_indexer_has_no_weights_of_its_own(tmp_path, tensors):
    config = released.config()
    text = config["text_config"]
    text["layer_types"] = ["linear_attention"] * 2 + ["indexed_attention"] * 2
    text["indexer_types"] = ["full", "full", "full", "shared"]
    text["mlp_layer_types"], text["num_hidden_layers"] = text["mlp_layer_types"][:4], 4
    stem = f"{TEXT}layers.{{}}.self_attn."
    four = {n: x for n, x in tensors.items() if not any(f"layers.{i}." in n for i in range(4, 8))}
    for name in [n for n in four if n.startswith(stem.format(2))]:
        del four[name]
    for name, x in tensors.items():
        if name.startswith(stem.format(7)):
            four[name.replace("layers.7.", "layers.2.")] = x
    for name in [n for n in four if "layers.3.self_attn.indexer" in n]:
        del four[name]
    model = load(released.write(tmp_path, four, hf_config=config))
    assert_same(leaves_of(model), released.leaves(four))


def test_end_tokens_come_from_the_generation_config(source):
    config = released.config()
    config["text_config"]["eos_token_id"] = [5, 7]
    (source / "config.json").write_text(json.dumps(config))
    assert load(source).eos_token_ids == (5, 7)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4, 9]}))
    assert load(source).eos_token_ids == (3, 4, 9)


def test_an_end_token_outside_the_vocabulary_is_named(source, monkeypatch):
    vocab_size = released.config()["text_config"]["vocab_size"]
    file = source / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [3, vocab_size - 1]}))
    assert load(source).eos_token_ids == (3, vocab_size - 1)
    file.write_text(json.dumps({"eos_token_id": [3, vocab_size]}))
    monkeypatch.setattr(placement, "place", None)  # found before any weight is read
    with pytest.raises(ValueError) as caught:
        load(source)
    assert str(caught.value) == (
        f"{file}: eos_token_id holds {vocab_size}, outside the vocabulary 0..{vocab_size - 1} of "
        "config.json"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_all_named(value, tmp_path, tensors):
    stem = f"{TEXT}layers."
    bad = [f"{stem}2.self_attn.k_proj.weight", f"{stem}5.mlp.experts.3.up_proj.weight"]
    broken = dict(tensors)
    for name in bad:
        broken[name] = tensors[name].copy()
        broken[name][1, 2] = value
    source = released.write(tmp_path, broken, num_shards=3)
    error = error_of(source)
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    assert {(f.kind, f.tensor, f.file) for f in error.failures} == {
        ("value", name, weight_map[name]) for name in bad
    }
    assert "1 values that are NaN or infinite" in str(error)
    assert_same(leaves_of(load(source, check_finite=False)), released.leaves(broken))


def test_a_value_beyond_bfloat16_is_reported(tmp_path, tensors):
    big = tensors[f"{TEXT}norm.weight"].copy()
    big[0] = np.finfo(np.float32).max
    source = released.write(tmp_path, tensors | {f"{TEXT}norm.weight": big})
    load(source, dtype="float32")
    assert f"{TEXT}norm.weight" in str(error_of(source, dtype="bfloat16"))


def test_nan_codes_and_scales_are_named(tmp_path, tensors):
    stored, _ = released.with_fp8(tensors, (16, 16))
    codes = stored[Q_A].copy()
    codes.view(np.uint8)[0, :2] = (0x7F, 0xFF)
    o_proj = f"{TEXT}layers.7.self_attn.o_proj.weight"
    scale = stored[f"{o_proj}_scale_inv"].copy()
    scale[1, 1] = np.nan
    broken = stored | {Q_A: codes, f"{o_proj}_scale_inv": scale}
    error = error_of(released.write(tmp_path, broken))
    found = {f.tensor: f.found for f in error.failures}
    assert found.keys() == {Q_A, o_proj}
    assert found[Q_A].startswith("2 values") and "2 NaN codes" in found[Q_A]
    assert found[o_proj].startswith("256 values") and "0 NaN codes" in found[o_proj]


def test_faults_of_names_and_shapes_come_in_one_report_with_files(source, tensors):
    changed = dict(tensors)
    del changed[f"{TEXT}norm.weight"]
    changed[f"{TEXT}layers.0.self_attn.q_proj.weight"] = tensors[
        f"{TEXT}layers.0.self_attn.q_proj.weight"
    ].T.copy()
    changed["strange"] = np.zeros((1,), np.int32)
    released.write(source, changed, num_shards=3)
    error = error_of(source)
    assert {(f.kind, f.tensor) for f in error.failures} == {
        ("missing", f"{TEXT}norm.weight"),
        ("shape", f"{TEXT}layers.0.self_attn.q_proj.weight"),
        ("unknown", "strange"),
    }
    assert str(source) in str(error) and "-of-00003.safetensors" in str(error)


def test_one_tensor_in_two_shards(source, tensors):
    name = f"{TEXT}norm.weight"
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(f for f in sorted(set(weight_map.values())) if f != weight_map[name])
    shard = {n: x for n, x in tensors.items() if weight_map[n] == other}
    released.write_file(source / other, shard | {name: tensors[name]})
    (failure,) = error_of(source).failures
    assert failure.kind == "duplicate" and failure.tensor == name
    assert other in str(failure) and weight_map[name] in str(failure)


def test_a_missing_and_a_truncated_shard(source):
    os.remove(source / "model-00001-of-00003.safetensors")
    path = source / "model-00002-of-00003.safetensors"
    size = path.stat().st_size
    os.truncate(path, size // 2)
    message = str(error_of(source))
    assert "no file model-00001-of-00003.safetensors" in message
    assert f"model-00002-of-00003.safetensors: found {size // 2} bytes" in message
    assert f"expected {size} bytes (truncated)" in message


def test_bad_configs(source):
    os.rename(source / "config.json", source / "old.json")
    assert "no config.json" in str(error_of(source))
    (source / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="config.json: model_type='llama'"):
        load(source)
    config = released.config() | {"quantization_config": {"weight_block_size": [128, 0]}}
    (source / "config.json").write_text(json.dumps(config))
    assert "weight_block_size" in str(error_of(source))


def test_hub_names_print_the_download_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = error_of("zai-org/GLM-5.3-Flash")
    assert "hf download zai-org/GLM-5.3-Flash --local-dir GLM-5.3-Flash" in str(error)


def test_bad_arguments(source):
    with pytest.raises(ValueError, match="weights='int4'; expected one of"):
        load(source, weights="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype='brain'"):
        load(source, dtype="brain")
    with pytest.raises(ValueError, match="dtype must be one of"):
        load(source, dtype="float16")


def test_memory_is_asked_for_before_anything_is_read(source, monkeypatch):
    needed = sum(x.nbytes for x in leaves_of(load(source)).values())
    monkeypatch.setattr(memory, "free_host_bytes", lambda: needed - 1)
    monkeypatch.setattr(placement, "place", None)  # reading would fail in another way
    with pytest.raises(MemoryError, match=rf"\({needed} bytes\).*\({needed - 1} bytes\) are free"):
        load(source)


def test_free_memory_is_what_the_system_says():
    free = memory.free_host_bytes()
    assert free is not None and 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def write_native(path, tensors, source, dtype=np.float32):
    from convert.converter import convert

    released.write(source, tensors)
    convert(source, path, dtype=np.dtype(dtype).name, mode="quiet")  # type: ignore[arg-type]
    return path


def test_converted_directories(tmp_path, tensors, monkeypatch):
    converted = write_native(tmp_path / "dst", tensors, tmp_path / "src")
    monkeypatch.chdir(tmp_path)
    assert_same(leaves_of(load("dst")), released.leaves(tensors))  # relative, too
    assert load("dst").config == load("src").config
    got = leaves_of(load(converted, dtype="bfloat16"))
    assert_same(got, rounded(released.leaves(tensors), BF16))


def test_faulty_converted_directories(tmp_path, tensors):
    converted = write_native(tmp_path / "dst", tensors, tmp_path / "src")
    header = json.loads((converted / native.HEADER_NAME).read_text())
    (converted / native.HEADER_NAME).write_text(json.dumps(header | {"version": 99}))
    assert "found format and version ('glm5next-jax', 99)" in str(error_of(converted))
    (converted / native.HEADER_NAME).write_text(json.dumps(header))

    config = json.loads((converted / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 95
    config["text_config"]["layer_types"][3] = "linear_attention"
    (converted / "config.json").write_text(json.dumps(config))
    error = error_of(converted)
    kinds = {f.kind for f in error.failures}
    assert kinds == {"missing", "unknown", "shape"}
    assert "layers.0.mlp.gate_proj.weight: found shape [96, 64], expected [95, 64]" in str(error)

    shutil.rmtree(converted / native.WEIGHTS_NAME)
    assert "weights: found no such folder" in str(error_of(converted))


def test_damaged_converted_weights_are_named(tmp_path, tensors):
    converted = write_native(tmp_path / "dst", tensors, tmp_path / "src")
    files = [p for p in (converted / native.WEIGHTS_NAME).glob("*/c/**/*") if p.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    (failure,) = error_of(converted).failures
    assert failure.tensor == largest.relative_to(converted / native.WEIGHTS_NAME).parts[0]
    assert "Error reading" in failure.found and "tensorstore_spec" not in failure.found

    os.remove(largest)  # and does not read as zeros
    (failure,) = error_of(converted).failures
    assert "is missing" in failure.found


@pytest.mark.parametrize("place", [0.1, 0.5, 0.99])
def test_a_flipped_bit_of_converted_weights_is_found(place, tmp_path, tensors):
    converted = write_native(tmp_path / "dst", tensors, tmp_path / "src")
    (chunk,) = (converted / native.WEIGHTS_NAME / "embed_tokens.weight" / "c").rglob("*/0")
    data = bytearray(chunk.read_bytes())
    data[int(place * len(data))] ^= 4
    chunk.write_bytes(data)
    (failure,) = error_of(converted).failures
    assert failure.tensor == "embed_tokens.weight" and "Digest mismatch" in failure.found


def test_an_earlier_version_is_converted_again(tmp_path, tensors):
    converted = write_native(tmp_path / "dst", tensors, tmp_path / "src")
    header = json.loads((converted / native.HEADER_NAME).read_text())
    (converted / native.HEADER_NAME).write_text(json.dumps(header | {"version": 1}))
    message = str(error_of(converted))
    assert "('glm5next-jax', 1)" in message and "convert the released checkpoint again" in message


def test_the_bar_counts_bytes_on_the_first_process_alone(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    with _progress_bar() as bar:
        bar.total = 4000
        bar.update(1000)
        bar.refresh()
    assert re.search(r"loading: +25%.*1.00k/4.00k \[.*<.*B/s\]", stream.getvalue())
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert _progress_bar().disable


def test_converted_weights_that_are_not_finite(tmp_path, tensors):
    from convert.converter import convert

    bad = np.full((64,), np.nan, np.float32)
    source = released.write(tmp_path / "src", tensors | {f"{TEXT}norm.weight": bad})
    convert(source, tmp_path / "dst", check_finite=False, mode="quiet")
    error = error_of(tmp_path / "dst")
    assert [f.tensor for f in error.failures] == ["norm.weight"] and "64 values" in str(error)
    load(tmp_path / "dst", check_finite=False)


@pytest.mark.parametrize("folder", ["weights", "weights/norm.weight", "unused"])
def test_links_out_of_a_converted_directory_are_refused(folder, tmp_path, tensors):
    converted = write_native(tmp_path / "dst", tensors, tmp_path / "src")
    elsewhere = tmp_path / "elsewhere"
    shutil.move(converted / folder, elsewhere)
    (converted / folder).symlink_to(elsewhere)
    assert "a link to elsewhere" in str(error_of(converted))


def test_fault_5_a_drafts_own_head_with_nan_factors(tmp_path, tensors):
    """vLLM 57532: the throw-away head of the MTP layer had NaN factors, which reached the model's.
    Here it fills no leaf, the model's head is its own, and conversion carries it as it is."""
    from convert.converter import convert
    from convert.verifier import verify

    config = released.config()
    config["text_config"]["num_nextn_predict_layers"] = 1
    stem = f"{TEXT}layers.8.shared_head.head.weight"
    head = tensors["lm_head.weight"]
    codes, scale = released.quantize(head, (128, 128))
    drafts = {stem: codes, f"{stem}_scale_inv": np.full_like(scale, np.nan)}
    source = released.write(tmp_path / "src", tensors | drafts, hf_config=config)
    assert leaves_of(load(source))["lm_head.weight"].tobytes() == head.tobytes()
    convert(source, tmp_path / "dst", mode="quiet")
    assert leaves_of(load(tmp_path / "dst"))["lm_head.weight"].tobytes() == head.tobytes()
    verdict = verify(source, tmp_path / "dst", mode="quiet")
    assert verdict.num_carried > 2 and not verdict.differences


def test_fault_34_a_decay_bias_per_head(tmp_path, tensors):
    """DFlash2 4: the bias of the decay has a value per head and channel; one per head would
    broadcast and decay wrongly."""
    name = f"{TEXT}layers.0.self_attn.dt_bias"
    num_heads = released.config()["text_config"]["linear_num_heads"]
    per_head = tensors | {name: tensors[name][:num_heads].copy()}
    (failure,) = error_of(released.write(tmp_path, per_head)).failures
    assert (failure.kind, failure.tensor) == ("shape", name)
    assert f"expected [{tensors[name].size}]" in str(failure)
