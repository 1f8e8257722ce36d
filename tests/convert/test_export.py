"""`exporter.export`: released checkpoints out of anything that can be loaded, bit for bit where
nothing is to be changed."""

import json
import lzma
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors
from flax import nnx

from convert import converter, exporter, files, released_format
from convert.exporter import export
from glm5next_jax import Glm5NextConfig, load
from glm5next_jax.checkpoint import CheckpointError
from glm5next_jax.checkpoint.native import UNFINISHED_NAME
from glm5next_jax.checkpoint.safetensors_reader import INDEX_NAME, SafetensorsDirectory
from tests.checkpoint import released
from tests.checkpoint.released import BF16, FP8, TEXT

MANIFEST = pathlib.Path(__file__).parents[1] / "data" / "manifest"
BLOCK = (16, 16)
COPIED = {
    "tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
    "chat_template.jinja": "{{ messages }}\n",
    "generation_config.json": '{"eos_token_id": [3, 4]}',
}
NORM = f"{TEXT}norm.weight"
EXPERT = f"{TEXT}layers.4.mlp.experts.5.up_proj.weight"
Q_B = f"{TEXT}layers.3.self_attn.q_b_proj.weight"
FLOAT32 = re.compile(r"(A_log|dt_bias|e_score_correction_bias|hc_(attn|ffn)_(base|scale))$")


def with_mtp(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A copy of the last layer as a layer of multi-token prediction, which has no mHC."""
    mtp = {
        name.replace("layers.7.", "layers.8."): x
        for name, x in tensors.items()
        if "layers.7." in name and "hc_" not in name
    }
    return tensors | mtp | {f"{TEXT}layers.8.eh_proj.weight": np.ones((64, 128), BF16)}


def stored(kind: str) -> dict[str, np.ndarray]:
    full = released.released(released.in_memory())
    bf16 = released.as_stored(full)
    fp8, _ = released.with_fp8(full, BLOCK)
    coded = {
        n for name in fp8 if name.endswith("_inv") for n in (name, name.removesuffix("_scale_inv"))
    }
    tensors = {"float32": full, "bf16": bf16, "fp8": bf16 | {n: fp8[n] for n in coded}}[kind]
    return with_mtp(tensors)


def config_of(kind: str) -> dict:
    config = released.config()
    dtype = "float32" if kind == "float32" else "bfloat16"
    config["text_config"] |= {"num_nextn_predict_layers": 1, "dtype": dtype}
    if kind == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    return config


KINDS = ("bf16", "fp8", "float32")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, pathlib.Path]:
    """Per kind, a released directory KIND and its conversion KIND-converted."""
    root, made = tmp_path_factory.mktemp("sources"), {}
    for kind in KINDS:
        made[kind] = root / kind
        released.write(made[kind], stored(kind), hf_config=config_of(kind), num_shards=3)
        for name, text in COPIED.items():
            (made[kind] / name).write_text(text)
        made[f"{kind}-converted"] = root / f"{kind}-converted"
        converter.convert(made[kind], made[f"{kind}-converted"], mode="quiet")
    return made


def tensors_in(directory) -> dict[str, np.ndarray]:
    with SafetensorsDirectory(directory) as reader:
        return {info.name: reader.read(info) for info in reader.tensors}


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        y = got[name]
        assert (y.dtype, y.shape) == (x.dtype, x.shape), name
        assert y.tobytes() == x.tobytes(), name


def run(source, destination, **options):
    return export(source, destination, mode="quiet", **options)


def quantization_of(directory) -> dict | None:
    return json.loads((directory / "config.json").read_text()).get("quantization_config")


@pytest.mark.parametrize("converted", ["", "-converted"])
@pytest.mark.parametrize("kind", KINDS)
def test_keep_gives_the_original_bit_for_bit(kind, converted, sources, tmp_path):
    source, out, want = sources[kind + converted], tmp_path / "out", stored(kind)
    summary = run(source, out, max_file_bytes=200_000)
    assert_same(tensors_in(out), want)

    index = json.loads((out / INDEX_NAME).read_text())
    num_bytes = sum(x.nbytes for x in want.values())
    assert index["metadata"]["total_size"] == num_bytes == summary.num_bytes
    names = sorted(set(index["weight_map"].values()))
    count = summary.num_files
    assert names == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert count == len(list(out.glob("*.safetensors"))) > 3
    order = []
    for name in names:
        assert (out / name).stat().st_size <= 200_000
        with safetensors.safe_open(out / name, "np") as file:  # another reader
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == {n for n, f in index["weight_map"].items() if f == name}
        order += _order(out / name)
    assert order == list(index["weight_map"])
    layers = [int(m[1]) for n in order if (m := re.match(rf"{TEXT}layers\.(\d+)\.", n))]
    assert layers == sorted(layers)
    assert order[0] == f"{TEXT}embed_tokens.weight"

    assert summary.num_tensors == len(want) and summary.num_quantized == 0
    carried = {n: x for n, x in want.items() if "visual" in n or "layers.8." in n}
    assert summary.num_carried == len(carried)
    assert summary.carried_bytes == sum(x.nbytes for x in carried.values())
    for name, text in COPIED.items():
        assert (out / name).read_text() == text
    assert not (out / UNFINISHED_NAME).exists()


def _order(path: pathlib.Path) -> list[str]:
    """Names in the order of their bytes."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    return sorted(header, key=lambda name: header[name]["data_offsets"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_loads_as_the_source_does(kind, sources, tmp_path):
    run(sources[f"{kind}-converted"], tmp_path / "out")
    ours, theirs = load(tmp_path / "out"), load(sources[kind])
    assert ours.eos_token_ids == theirs.eos_token_ids == (3, 4)

    def leaves(model):
        flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
        return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in flat}

    assert_same(leaves(ours), leaves(theirs))


@pytest.mark.parametrize("form", ["in memory", "fused", "no prefix"])
def test_any_names_become_the_released_ones(form, tmp_path):
    """Public fault 21: nothing is dropped of what a bare text model saves, and the like."""
    want = released.released(released.in_memory())
    tensors = {
        "in memory": released.in_memory(),
        "fused": released.fused(want),
        "no prefix": {n.removeprefix(TEXT).removeprefix("model."): x for n, x in want.items()},
    }[form]
    assert tensors.keys() != want.keys()
    released.write(tmp_path / "source", tensors)
    run(tmp_path / "source", tmp_path / "out")
    assert_same(tensors_in(tmp_path / "out"), want)


def spread(factors: np.ndarray, shape, block) -> np.ndarray:
    return np.kron(factors, np.ones(block, np.float32))[: shape[0], : shape[1]]


def is_carried(name: str) -> bool:
    return "visual" in name or "layers.8." in name


@pytest.mark.parametrize("converted", ["", "-converted"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind, converted, sources, tmp_path):
    run(sources[kind + converted], tmp_path / "out", dtype="bfloat16")
    source, want = stored(kind), {}
    for name, x in source.items():
        if is_carried(name):
            want[name] = x
        elif not name.endswith("_inv"):
            scale = source.get(f"{name}_scale_inv")
            if scale is not None:
                x = x.astype(np.float32) * spread(scale, x.shape, BLOCK)
            want[name] = x.astype(np.float32 if FLOAT32.search(name) else BF16)
    assert_same(tensors_in(tmp_path / "out"), want)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    # The MTP layer stays FP8, and its reader must know the blocks.
    quantization = quantization_of(tmp_path / "out")
    assert (quantization is not None) == (kind == "fp8")
    if quantization is not None:
        assert Q_B.removesuffix(".weight") in quantization["modules_to_not_convert"]
    assert load(tmp_path / "out").config.dtype == "bfloat16"


@pytest.mark.parametrize("kind", ["bf16", "float32"])
def test_fp8(kind, sources, tmp_path):
    """Blocks of 128 x 128, here all of them partial, by the tests' own quantiser."""
    out, source = tmp_path / "out", stored(kind)
    summary = run(sources[f"{kind}-converted"], out, dtype="fp8")
    want = {}
    coded, _ = released.with_fp8({n: x.astype(np.float32) for n, x in source.items()}, (128, 128))
    for name, x in source.items():
        if not is_carried(name) and f"{name}_scale_inv" in coded:
            want[name], want[f"{name}_scale_inv"] = coded[name], coded[f"{name}_scale_inv"]
        else:
            is_float32 = is_carried(name) or FLOAT32.search(name)
            want[name] = x if is_float32 else x.astype(BF16)
    assert_same(tensors_in(out), want)
    assert summary.num_quantized == 9 + 2 * 4 + 5 * 3 * (8 + 1)
    modules = {
        re.sub(r"\.(weight|bias)$", "", n)
        for n, x in want.items()
        if x.dtype != FP8
        and not n.endswith("_inv")
        and (x.ndim > 1 or n.endswith((".weight", ".bias")))
    }
    quantization = quantization_of(out)
    assert quantization is not None
    listed = quantization.pop("modules_to_not_convert")
    assert sorted(listed) == sorted(modules)
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    assert load(out).config.dtype == "bfloat16"
    # What is FP8 already stays as it is.
    assert run(out, tmp_path / "again", dtype="fp8").num_quantized == 0
    assert_same(tensors_in(tmp_path / "again"), want)
    assert quantization_of(tmp_path / "again") == quantization_of(out)


@pytest.mark.parametrize("converted", ["", "-converted"])
def test_fp8_that_is_there_is_passed_through_and_its_block_used(converted, sources, tmp_path):
    source, out = sources["fp8" + converted], tmp_path / "out"
    assert run(source, out, dtype="fp8").num_quantized == 0
    assert_same(tensors_in(out), stored("fp8"))
    quantization = quantization_of(out)
    assert quantization is not None and quantization["weight_block_size"] == list(BLOCK)
    assert quantization["modules_to_not_convert"].count("lm_head") == 1
    not_converted = set(quantization["modules_to_not_convert"])
    assert Q_B.removesuffix(".weight") not in not_converted
    assert f"{TEXT}layers.8.self_attn.q_b_proj" not in not_converted
    assert {f"{TEXT}layers.3.self_attn.kv_b_proj", "model.visual.patch_embed.proj"} <= not_converted


def test_one_weight_that_is_not_fp8_yet(tmp_path):
    tensors = stored("fp8")
    values = released.as_stored(released.released(released.in_memory()))[EXPERT]
    del tensors[f"{EXPERT}_scale_inv"]
    tensors[EXPERT] = values
    released.write(tmp_path / "source", tensors, hf_config=config_of("fp8"))
    assert run(tmp_path / "source", tmp_path / "keep").num_quantized == 0
    assert_same(tensors_in(tmp_path / "keep"), tensors)
    assert run(tmp_path / "source", tmp_path / "fp8", dtype="fp8").num_quantized == 1
    codes, scale = released.quantize(values.astype(np.float32), BLOCK)
    assert_same(
        tensors_in(tmp_path / "fp8"), tensors | {EXPERT: codes, f"{EXPERT}_scale_inv": scale}
    )


@pytest.mark.parametrize("rows", [16, 24, 20])
def test_fp8_of_fused_weights(rows, tmp_path):
    """q_a has 32 rows and kv_a 16 behind them. A block of either takes the factor of the stored
    block that it lies in; with blocks of 20 rows, that of kv_a lies in two."""
    base = stored("bf16")
    stem = f"{TEXT}layers.3.self_attn."
    q_a, kv_a = (f"{stem}{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa"))
    both = np.concatenate([base[q_a], base[kv_a]]).astype(np.float32)
    codes, scale = released.quantize(both, (rows, 16))
    name = f"{stem}fused_qkv_a_proj_with_mqa.weight"
    fused = {n: x for n, x in base.items() if n not in (q_a, kv_a)}
    fused |= {name: codes, f"{name}_scale_inv": scale}
    config = config_of("bf16")
    config["quantization_config"] = {"weight_block_size": [rows, 16]}
    released.write(tmp_path / "source", fused, hf_config=config)
    run(tmp_path / "source", tmp_path / "out")

    want = base | {q_a: codes[:32], f"{q_a}_scale_inv": scale[:2]}
    if rows == 20:
        values = codes.astype(np.float32) * spread(scale, both.shape, (20, 16))
        want[kv_a] = values[32:].astype(BF16)
    else:
        want |= {kv_a: codes[32:], f"{kv_a}_scale_inv": scale[2:] if rows == 16 else scale[1:]}
    assert_same(tensors_in(tmp_path / "out"), want)
    quantization = quantization_of(tmp_path / "out")
    assert quantization is not None and quantization["weight_block_size"] == [rows, 16]
    listed = kv_a.removesuffix(".weight") in quantization["modules_to_not_convert"]
    assert listed == (rows == 20)


def test_larger_blocks_get_a_factor_per_block_of_the_config(tmp_path):
    tensors = stored("fp8")
    codes, scale = released.quantize(
        released.released(released.in_memory())[Q_B], (64, 32)
    )  # the whole matrix
    assert scale.shape == (1, 1) and codes.shape == (64, 32)
    tensors |= {Q_B: codes, f"{Q_B}_scale_inv": scale}
    released.write(tmp_path / "source", tensors, hf_config=config_of("fp8"))
    run(tmp_path / "source", tmp_path / "out")
    want = tensors | {f"{Q_B}_scale_inv": np.full((4, 2), scale.item(), np.float32)}
    assert_same(tensors_in(tmp_path / "out"), want)


def test_float16_is_kept_and_becomes_bfloat16(tmp_path):
    tensors = stored("bf16")
    tensors[NORM] = tensors[NORM].astype(np.float16)
    released.write(tmp_path / "source", tensors, hf_config=config_of("bf16"))
    run(tmp_path / "source", tmp_path / "keep")
    assert_same(tensors_in(tmp_path / "keep"), tensors)
    run(tmp_path / "source", tmp_path / "bf16", dtype="bfloat16")
    assert_same(tensors_in(tmp_path / "bf16"), tensors | {NORM: tensors[NORM].astype(BF16)})


@pytest.mark.parametrize("version", ["bf16", "fp8"])
def test_names_shapes_and_dtypes_of_the_released_model(version):
    with lzma.open(MANIFEST / f"manifest_{version}.tsv.xz", "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    want = {
        name: (dtype, tuple(map(int, shape.split("x"))))
        for name, dtype, shape in rows
        if ".visual." not in name and ".layers.45." not in name and not name.endswith("_inv")
    }
    got = {
        tensor.name: (
            "F32" if tensor.is_float32
            else "F8_E4M3" if tensor.is_fp8 and version == "fp8"
            else "BF16",
            tensor.shape,
        )
        for tensor in released_format.released_tensors(Glm5NextConfig.glm53_flash())
    }  # fmt: skip
    assert got == want


def test_memory_is_tiles_and_not_tensors(sources, tmp_path, monkeypatch):
    """No read is larger than a tile; where tiles end changes no bit."""
    want = {}
    for dtype in ("bfloat16", "fp8"):
        run(sources["bf16"], tmp_path / f"whole-{dtype}", dtype=dtype)
        want[dtype] = tensors_in(tmp_path / f"whole-{dtype}")
    tile = 4096
    monkeypatch.setattr(exporter, "_TILE_BYTES", tile)
    assert tile < max(x.nbytes for x in stored("bf16").values())
    original, reads = SafetensorsDirectory.read_bytes, []

    def recording(self, info, begin, out):
        reads.append(out.nbytes)
        original(self, info, begin, out)

    monkeypatch.setattr(SafetensorsDirectory, "read_bytes", recording)
    run(sources["fp8"], tmp_path / "fp8")
    run(sources["float32-converted"], tmp_path / "float32")
    run(sources["bf16"], tmp_path / "tiles-bfloat16", dtype="bfloat16")
    assert max(reads) <= tile
    for kind in ("fp8", "float32"):
        assert_same(tensors_in(tmp_path / kind), stored(kind))
    assert_same(tensors_in(tmp_path / "tiles-bfloat16"), want["bfloat16"])
    # Blocks of 128 rows are not cut, so these tiles are larger.
    run(sources["bf16"], tmp_path / "tiles-fp8", dtype="fp8")
    assert_same(tensors_in(tmp_path / "tiles-fp8"), want["fp8"])


def released_with(tmp_path, kind: str, **changed: np.ndarray) -> pathlib.Path:
    return released.write(tmp_path / "bad", stored(kind) | changed, hf_config=config_of(kind))


def test_values_that_are_not_finite_are_named(tmp_path):
    tensors = stored("fp8")
    norm, codes, scale = tensors[NORM].copy(), tensors[EXPERT].copy(), None
    norm[3] = np.nan
    norm[4] = np.inf
    codes.view(np.uint8)[1, :2] = (0x7F, 0xFF)
    scale = tensors[f"{Q_B}_scale_inv"].copy()
    scale[1, 1] = np.inf
    changed = {NORM: norm, EXPERT: codes, f"{Q_B}_scale_inv": scale}
    source = released_with(tmp_path, "fp8", **changed)
    out = tmp_path / "out"
    with pytest.raises(CheckpointError) as caught:
        run(source, out)
    assert {f.tensor: f.found for f in caught.value.failures} == {
        NORM: "2 values that are NaN or infinite",
        EXPERT: "2 NaN codes",
        f"{Q_B}_scale_inv": "1 values that are NaN or infinite",
    }
    assert not list(out.glob("*.safetensors*"))

    # In files of their own, those before it are kept and its own is not.
    with pytest.raises(CheckpointError) as caught:
        run(source, tmp_path / "parts", max_file_bytes=50_000)
    assert [f.tensor for f in caught.value.failures] == [f"{Q_B}_scale_inv"]
    finished = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert finished
    for name in finished:
        with safetensors.safe_open(tmp_path / "parts" / name, "np") as file:
            assert Q_B not in file.keys()
    with pytest.raises(CheckpointError):  # and again: it is not taken for finished
        run(source, tmp_path / "parts", max_file_bytes=50_000)

    run(source, tmp_path / "anyway", check_finite=False)
    assert_same(tensors_in(tmp_path / "anyway"), tensors | changed)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_what_only_the_export_would_make_infinite_is_named(dtype, tmp_path):
    tensors = stored("float32")
    norm = tensors[NORM].copy()
    norm[5] = np.finfo(np.float32).max  # beyond the largest bfloat16 once it is rounded
    source = released_with(tmp_path, "float32", **{NORM: norm})
    with pytest.raises(CheckpointError) as caught:
        run(source, tmp_path / "out", dtype=dtype)
    assert [f.tensor for f in caught.value.failures] == [NORM]
    run(source, tmp_path / "keep")


def test_infinite_float16(tmp_path):
    norm = stored("bf16")[NORM].astype(np.float16)
    norm[0] = np.inf
    source = released_with(tmp_path, "bf16", **{NORM: norm})
    with pytest.raises(CheckpointError, match="1 values that are NaN or infinite"):
        run(source, tmp_path / "out")


def interrupt_at(monkeypatch, number: int, error: type[BaseException], suffix: str) -> None:
    """Makes the writing of the nth file with this ending fail, half of it written."""
    original, seen = files.atomic_writer, []

    def failing(path):
        if str(path).endswith(suffix):
            seen.append(path)
            if len(seen) == number:
                raise error(f"{path}: no space")
        return original(path)

    monkeypatch.setattr(files, "atomic_writer", failing)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_was_interrupted_continues(error, sources, tmp_path, monkeypatch):
    out, options = tmp_path / "out", dict(max_file_bytes=150_000)
    source = sources["bf16-converted"]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3, error, ".safetensors")
        with pytest.raises(error):
            run(source, out, **options)
    done = sorted(out.glob("*.safetensors"))
    assert len(done) == 2 and not (out / INDEX_NAME).exists()
    with pytest.raises(CheckpointError, match="unfinished"):
        load(out)
    (out / f"{done[0].name}.partial").write_bytes(b"left by a kill")
    before = [path.stat().st_mtime_ns for path in done]
    data = bytearray(done[1].read_bytes())
    data[-1] ^= 1
    done[1].write_bytes(data)

    summary = run(source, out, **options)
    assert done[0].stat().st_mtime_ns == before[0]
    assert summary.kept_bytes == done[0].stat().st_size and "earlier run" in str(summary)
    assert_same(tensors_in(out), stored("bf16"))
    run(source, tmp_path / "at once", **options)
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in (tmp_path / "at once").iterdir()}
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "at once" / name).read_bytes(), name

    again = run(source, out, **options)
    assert not again.is_new and "nothing to do" in str(again)


@pytest.mark.parametrize("suffix", ["config.json", INDEX_NAME])
def test_interrupted_at_the_end(suffix, sources, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1, OSError, suffix)
        with pytest.raises(OSError):
            run(sources["fp8"], out)
    with pytest.raises(CheckpointError, match="unfinished"):
        load(out)
    assert run(sources["fp8"], out).kept_bytes > 0
    assert_same(tensors_in(out), stored("fp8"))


def test_a_full_disk_is_said_before_anything_is_written(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    with pytest.raises(OSError, match="left to write, but only 1000 B are free"):
        run(sources["bf16"], tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_destinations_that_are_not_taken(sources, tmp_path):
    source = sources["bf16"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("my only copy")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="not overwritten"):
            run(source, tmp_path / "mine", overwrite=overwrite)
    # A released checkpoint that was downloaded is not one that this command made.
    released.write(tmp_path / "theirs", stored("bf16"), num_shards=2)
    with pytest.raises(ValueError, match="not overwritten"):
        run(source, tmp_path / "theirs", overwrite=True)
    with pytest.raises(ValueError, match="overlaps"):
        run(source, source / "inside")
    run(source, tmp_path / "out", max_file_bytes=100_000)
    with pytest.raises(ValueError, match="--overwrite"):
        run(source, tmp_path / "out", dtype="fp8")
    run(source, tmp_path / "out", dtype="fp8", overwrite=True)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert tensors_in(tmp_path / "out")[Q_B].dtype == FP8


def test_smear_is_refused(tmp_path):
    config = released.config()
    config["text_config"]["smear"] = True
    tensors = released.released(released.in_memory())
    tensors |= {
        f"{TEXT}smear.smear_gate.weight": np.ones((1, 24), np.float32),
        f"{TEXT}smear.smear_lambda": np.ones((1,), np.float32),
    }
    released.write(tmp_path / "source", tensors, hf_config=config)
    with pytest.raises(ValueError, match="released format has no place"):
        run(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stored_head", [True, False])
def test_a_tied_head_is_not_written(stored_head, tmp_path):
    config = released.config()
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    tensors = released.released(released.in_memory())
    head = tensors.pop("lm_head.weight")
    if stored_head:
        tensors["lm_head.weight"] = tensors[f"{TEXT}embed_tokens.weight"]
    released.write(tmp_path / "source", tensors, hf_config=config)
    run(tmp_path / "source", tmp_path / "out", dtype="fp8")
    got = tensors_in(tmp_path / "out")
    assert "lm_head.weight" not in got and f"{TEXT}embed_tokens.weight" in got
    quantization = quantization_of(tmp_path / "out")
    assert quantization is not None and "lm_head" in quantization["modules_to_not_convert"]
    if stored_head:
        released.write(tmp_path / "wrong", tensors | {"lm_head.weight": head}, hf_config=config)
        with pytest.raises(CheckpointError, match="other values"):
            run(tmp_path / "wrong", tmp_path / "out2")


def test_the_config_says_nothing_of_where_it_was(tmp_path):
    config = released.config()
    config |= {"_name_or_path": "/home/someone/model", "log_dir": "/home/someone/logs"}
    config["text_config"] |= {"cache": "C:\\Users\\someone", "note": "a/b"}
    config["vision_config"] |= {"_name_or_path": "/home/someone", "files": ["~/a", "b"]}
    released.write(tmp_path / "source", stored("float32"), hf_config=config)
    run(tmp_path / "source", tmp_path / "out")
    text = (tmp_path / "out" / "config.json").read_text()
    assert "someone" not in text and "~/a" not in text
    got = json.loads(text)
    assert "_name_or_path" not in got and "log_dir" not in got
    assert got["text_config"]["note"] == "a/b" and got["vision_config"]["files"] == ["b"]
    assert got["vision_config"]["depth"] == 2 and "quantization_config" not in got
    ours, theirs = (Glm5NextConfig.from_hf(tmp_path / name) for name in ("out", "source"))
    assert ours.replace(hf_extra="{}") == theirs.replace(hf_extra="{}")


def test_two_forms_of_one_carried_name(tmp_path):
    tensors = stored("float32")
    name = next(name for name in tensors if "visual" in name)
    tensors[name.removeprefix("model.")] = tensors[name]
    released.write(tmp_path / "source", tensors, hf_config=config_of("float32"))
    with pytest.raises(CheckpointError, match="a second model.visual"):
        run(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(dtype="float32"), "dtype='float32'; expected one of"),
        (dict(max_file_bytes=0), "max_file_bytes=0"),
        (dict(max_file_bytes=float("nan")), "max_file_bytes=nan"),
    ],
)
def test_arguments_are_checked(options, message, sources, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(sources["bf16"], tmp_path / "out", **options)


def test_bfloat16_is_rounded_once(tmp_path):
    """FP8 times its factor, to bfloat16: not by way of anything between."""
    tensors = stored("fp8")
    scale = tensors[f"{EXPERT}_scale_inv"] * np.float32(1.0000001)
    codes = tensors[EXPERT]
    source = released_with(tmp_path, "fp8", **{f"{EXPERT}_scale_inv": scale})
    run(source, tmp_path / "out", dtype="bfloat16")
    exact = codes.astype(np.float64) * spread(scale, codes.shape, BLOCK).astype(np.float64)
    want = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert_same({"x": tensors_in(tmp_path / "out")[EXPERT]}, {"x": want})
