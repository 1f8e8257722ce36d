"""NVFP4 weights of both public layouts, against a decoder written from the definition of e2m1."""

import json
import math
import re

import hypothesis
import jax
import numpy as np
import pytest
from etils import epath
from hypothesis import strategies as st

from glm5next_jax import make_mesh
from glm5next_jax.checkpoint import CheckpointError, leaves, load, nvfp4
from glm5next_jax.checkpoint.assemble import StoredLeaves
from glm5next_jax.checkpoint.encodings import Nvfp4
from glm5next_jax.checkpoint.planning import Entry, Piece, Plan
from glm5next_jax.checkpoint.safetensors_header import TensorInfo
from tests.checkpoint import released
from tests.checkpoint.released import BF16, FP8
from tests.checkpoint.test_load import assert_same, leaves_of, rounded
from tests.checkpoint.test_quantized import round_once

TEXT = released.TEXT
LAYOUTS = ("modelopt", "compressed-tensors")
EXPERT = f"{TEXT}layers.4.mlp.experts.5.down_proj"
Q_A = f"{TEXT}layers.3.self_attn.q_a_proj"
# e2m1: sign, 2 bits of exponent with bias 1, 1 of mantissa; no infinities and no NaN.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed_bytes(codes: np.ndarray) -> np.ndarray:
    """Two codes per byte: the even column in the low half."""
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // 2), np.uint8)
    for index in np.ndindex(out.shape):
        *row, column = index
        out[index] = int(codes[*row, 2 * column]) | int(codes[*row, 2 * column + 1]) << 4
    return out


def oracle(codes: np.ndarray, scale: np.ndarray, factor: float, is_reciprocal: bool) -> np.ndarray:
    """The float32 products, as float64; one element at a time."""
    out = np.empty(codes.shape)
    for row, column in np.ndindex(codes.shape):
        of_group = np.float64(scale[row, column // 16])
        whole = of_group / factor if is_reciprocal else of_group * factor
        out[row, column] = E2M1[codes[row, column]] * round_once(whole, 24)
    return round_once(out, 24)


def random_weight(rng, rows: int, groups: int):
    codes = rng.integers(0, 16, (rows, groups * 16))
    scale = rng.uniform(0.02, 448, (rows, groups)).astype(FP8)
    return codes, scale, np.float32(np.exp(rng.normal(-6, 2)))


def test_every_byte():
    packed = np.arange(256, dtype=np.uint8).reshape(32, 8)
    got = nvfp4.dequantize(packed, np.ones((32, 1), FP8), 1, np.float32).reshape(256, 2)
    want = [(E2M1[byte % 16], E2M1[byte // 16]) for byte in range(256)]
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    assert np.signbit(got[0x08, 0]) and np.signbit(got[0x80, 1])  # -0.0 in either half


@hypothesis.given(
    rows=st.integers(0, 9),
    groups=st.integers(1, 4),
    cut=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    is_reciprocal=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_columns(rows, groups, cut, is_reciprocal, seed):
    codes, scale, factor = random_weight(np.random.default_rng(seed), rows, groups)
    first, last = cut[0], max(cut[0], groups * 16 - cut[1])
    want = oracle(codes, scale, float(factor), is_reciprocal)[:, first:last]
    for dtype, bits in ((np.float32, 24), (BF16, 8)):
        out = np.empty((rows, last - first), dtype)
        got = nvfp4.dequantize(
            packed_bytes(codes), scale, factor, dtype, is_reciprocal=is_reciprocal, first=first,
            out=out,
        )  # fmt: skip
        assert got is out
        np.testing.assert_array_equal(got.astype(np.float64), round_once(want, bits))


def test_many_rows_are_taken_in_steps(monkeypatch):
    monkeypatch.setattr(nvfp4, "_STEP_ELEMENTS", 70)
    codes, scale, factor = random_weight(np.random.default_rng(0), 11, 2)
    got = nvfp4.dequantize(packed_bytes(codes), scale, factor, np.float32)
    np.testing.assert_array_equal(got, oracle(codes, scale, float(factor), False))


def test_bfloat16_is_rounded_once():
    # 3 x (1.125 x (1 + 2^-8)) lies above the midpoint that a bfloat16 factor would fall below.
    scale, factor = np.full((1, 1), 1.125, FP8), np.float32(1 + 2.0**-8)
    exact = 3 * (1.125 * (1 + 2.0**-8))
    once, twice = round_once(exact, 8), round_once(3 * round_once(exact / 3, 8), 8)
    assert once != twice
    packed = np.full((1, 8), 0x55, np.uint8)
    got = nvfp4.dequantize(packed, scale, factor, BF16)
    np.testing.assert_array_equal(got.astype(np.float64), np.full((1, 16), once))


def test_shapes_that_do_not_belong_together_are_refused():
    packed, scale = np.zeros((2, 16), np.uint8), np.ones((2, 2), FP8)
    with pytest.raises(ValueError, match=r"packed.shape=\(2, 15\)"):
        nvfp4.dequantize(packed[:, :15], scale, 1, BF16)
    with pytest.raises(ValueError, match=r"out.shape=\(2, 32\) from column first=1"):
        nvfp4.dequantize(packed, scale, 1, BF16, first=1, out=np.empty((2, 32), BF16))


class InMemory:
    """Arrays as files; counts the bytes read of each."""

    path = epath.Path("memory")

    def __init__(self, arrays):
        self.arrays, self.num_bytes = arrays, dict.fromkeys(arrays, 0)

    def granularity(self, info):
        return max(math.prod(info.shape[:-1]), 1), 1

    def read_rectangle(self, info, width, start, column, out):
        matrix = self.arrays[info.name].reshape(-1, width)
        part = matrix[start : start + out.shape[0], column : column + out.shape[1]]
        assert part.shape == out.shape and part.dtype == out.dtype
        out[...] = part
        self.num_bytes[info.name] += out.nbytes


def one_weight(codes, scale, factor, layout) -> tuple[InMemory, Plan]:
    """A checkpoint of one leaf, x."""
    arrays = {
        "codes": packed_bytes(codes), "scale": scale, "whole": np.array([factor], np.float32),
    }  # fmt: skip
    names = {"codes": "U8", "scale": "F8_E4M3", "whole": "F32"}
    infos = {n: TensorInfo(n, names[n], x.shape, "file") for n, x in arrays.items()}
    encoding = Nvfp4(infos["scale"], infos["whole"], is_reciprocal=layout == LAYOUTS[1])
    rows = math.prod(codes.shape[:-1])
    entry = Entry(infos["codes"], (Piece("x", 0, rows, 0),), encoding)
    specs = {"x": jax.ShapeDtypeStruct(codes.shape, np.dtype(BF16))}
    return InMemory(arrays), Plan(specs, (entry,), ())


@hypothesis.given(
    rows=st.integers(1, 12),
    groups=st.integers(1, 5),
    ends=st.tuples(*(st.floats(0, 1) for _ in range(5))),
    tile_bytes=st.sampled_from([1, 30, 100, 10**6]),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_rows_and_columns_are_cut_from_the_whole(rows, groups, ends, tile_bytes, layout, seed):
    """As meshes cut: some rows, and adjoining ranges of columns for several devices at once."""
    codes, scale, factor = random_weight(np.random.default_rng(seed), rows, groups)
    whole = oracle(codes, scale, float(factor), layout == LAYOUTS[1])
    low, high = sorted(round(end * rows) for end in ends[:2])
    columns = sorted(round(end * groups * 16) for end in ends[2:])
    reader, plan = one_weight(codes, scale, factor, layout)
    for dtype, bits in ((np.float32, 24), (BF16, 8)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leaves, "TILE_BYTES", tile_bytes)
            seen: list[int] = []
            with StoredLeaves(reader, plan, {"x": np.dtype(dtype)}, progress=seen.append) as source:
                group = [((low, high), tuple(columns[:2])), ((low, high), tuple(columns[1:]))]
                parts = source.read("x", group)
                assert sum(seen) == source.source_bytes("x", group)
                source.finish()
        got = np.concatenate(parts, axis=-1).astype(np.float64)
        want = round_once(whole[low:high, columns[0] : columns[2]], bits)
        np.testing.assert_array_equal(got, want)
    # Whole groups at most, and never the whole tensor for a part of it.
    used = -(-columns[2] // 16) - columns[0] // 16 if columns[2] > columns[0] else 1
    assert reader.num_bytes["codes"] <= 2 * (high - low) * used * 8
    assert reader.num_bytes["scale"] <= 2 * (high - low) * used


def quantize(x: np.ndarray, layout: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A matrix in NVFP4: {last part of the name: array}, and the float32 values that it means."""
    groups = x.reshape(len(x), -1, 16).astype(np.float64)
    factor = np.float32(max(np.abs(groups).max(), 1e-6) / (6 * 448))
    reciprocal = layout == LAYOUTS[1]
    stored = np.float32(1 / factor) if reciprocal else factor
    scale = (np.abs(groups).max(-1) / 6 / factor).astype(FP8)
    whole = scale.astype(np.float32) / stored if reciprocal else scale.astype(np.float32) * stored
    ratio = groups / np.where(whole == 0, 1, whole)[..., None]
    codes = np.abs(ratio[..., None] - E2M1).argmin(-1)
    values = (E2M1.astype(np.float32)[codes] * whole[..., None]).reshape(x.shape)
    codes = codes.reshape(x.shape)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    if reciprocal:
        return {
            "weight_packed": packed, "weight_scale": scale,
            "weight_global_scale": np.array([stored]), "input_global_scale": np.ones(1, np.float32),
        }, values  # fmt: skip
    return {
        "weight": packed, "weight_scale": scale, "weight_scale_2": np.array(stored),
        "input_scale": np.array(0.5, np.float32),
    }, values  # fmt: skip


def with_nvfp4(
    tensors: dict[str, np.ndarray], layout: str, names: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(tensors with those that match `names` in NVFP4, tensors with the values that these mean)."""
    stored, meant = {}, {}
    for name, x in tensors.items():
        meant[name] = x
        if re.search(names, name) is None:
            stored[name] = x
            continue
        parts, meant[name] = quantize(x, layout)
        stored |= {f"{name.removesuffix('weight')}{last}": part for last, part in parts.items()}
    return stored, meant


EXPERTS = r"layers\.\d+\.mlp\.experts\."
MATRICES = r"layers\.\d+\.mlp\..*(gate|up|down)_proj|layers\.[37]\.self_attn\.(q_a|q_b|o)_proj"


@pytest.fixture(scope="module")
def tensors():
    return released.released(released.in_memory())


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_and_scales_in_different_shards(layout, dtype, tensors, tmp_path, monkeypatch):
    """Public fault 4: halves of a weight in different shards; also on a mesh, in small tiles."""
    monkeypatch.setattr(leaves, "TILE_BYTES", 300)
    stored, meant = with_nvfp4(tensors, layout, MATRICES)
    path = released.write(tmp_path, stored, num_shards=3)
    files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    scales = [name for name in files if name.endswith(".weight_scale")]
    codes = [n.replace("weight_scale", "weight") for n in scales]
    codes = [n if n in files else f"{n}_packed" for n in codes]
    assert any(files[a] != files[b] for a, b in zip(scales, codes, strict=True))
    want = rounded(released.leaves(meant), dtype)
    for mesh in (None, make_mesh(data=4, model=2)):
        loaded = load(path, dtype=np.dtype(dtype).name, mesh=mesh)
        assert_same(leaves_of(loaded), want)


def test_plain_weights_beside_it_are_untouched(tensors, tmp_path):
    """Public fault 35: rare tokens. Embedding and head are the bits of the file."""
    stored, _ = with_nvfp4(released.as_stored(tensors), "modelopt", MATRICES)
    loaded = leaves_of(load(released.write(tmp_path, stored), dtype="bfloat16"))
    for leaf, name in (("embed_tokens.weight", TEXT), ("lm_head.weight", "")):
        assert loaded[leaf].dtype == BF16
        assert loaded[leaf].tobytes() == stored[f"{name}{leaf}"].tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_one_leaf_may_differ(layout, tensors, tmp_path):
    """NVFP4, FP8 blocks, BF16 and F32 beside each other."""
    mixed = {n: x.astype(BF16) if ".experts.1." in n else x for n, x in tensors.items()}
    stored, meant = with_nvfp4(mixed, layout, EXPERTS + "[2-5]")
    for name in [name for name in mixed if re.search(EXPERTS + "[67]", name)]:
        fp8, values = released.with_fp8({name: mixed[name]}, (16, 16))
        # AMD Quark and compressed-tensors name factors of FP8 like that.
        quark = {n.replace("_scale_inv", "_scale"): x for n, x in fp8.items()}
        stored |= quark if ".experts.7." in name else fp8
        meant |= values
    exact = {n: x.astype(np.float32) for n, x in meant.items()}
    model = load(released.write(tmp_path, stored, num_shards=2))
    assert_same(leaves_of(model), released.leaves(exact))


def test_bfloat16_factors_of_fp8(tensors, tmp_path):
    name = f"{EXPERT}.weight"
    codes, scale = released.quantize(tensors[name], (16, 16))
    scale = scale.astype(BF16)
    spread = np.kron(scale.astype(np.float32), np.ones((16, 16), np.float32))
    stored = tensors | {name: codes, f"{EXPERT}.weight_scale": scale}
    want = tensors | {name: codes.astype(np.float32) * spread}
    model = load(released.write(tmp_path, stored))
    assert_same(leaves_of(model), released.leaves(want))


@pytest.mark.parametrize(
    "ignored",
    [
        # Names as the release, as serving engines and as the text model have them.
        {"ignore": [f"model.language_model.layers.{i}.self_attn.q_proj" for i in range(8)]},
        {"ignore": [f"model.layers.{i}.self_attn*" for i in (0, 1, 2, 4, 5, 6)]},
        {"ignore": ["re:.*layers[.][012456][.]self_attn[.].*", "lm_head"]},
        {"ignore": []},  # the list was never remapped: what is stored decides
    ],
)
def test_linear_attention_outside_the_quantisation(ignored, tensors, tmp_path):
    """Public fault 22: an NVFP4 config applied to BF16 q_proj of linear attention."""
    stored, meant = with_nvfp4(tensors, "modelopt", MATRICES)
    hf = released.config() | {
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"} | ignored
    }
    model = load(released.write(tmp_path, stored, hf_config=hf))
    assert_same(leaves_of(model), released.leaves(meant))


def test_exclusions_of_the_other_file(tensors, tmp_path):
    stored, _ = with_nvfp4(tensors, "modelopt", MATRICES)
    path = released.write(tmp_path, stored)
    quantization = {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.3.self_attn.*"]}
    other = path / "hf_quant_config.json"
    other.write_text(json.dumps({"quantization": quantization}))
    error = error_of(path)
    assert {f.tensor for f in error.failures} == {
        f"{TEXT}layers.3.self_attn.{part}_proj.weight" for part in ("q_a", "q_b", "o")
    }
    for failure in error.failures:
        assert failure.kind == "dtype" and "NVFP4 codes (U8" in failure.found
        assert "'model.layers.3.self_attn.*'" in failure.expected
    other.write_text('{"quantization": {"exclude_modules": 3}}')
    assert "exclude_modules" in str(error_of(path))


@pytest.mark.parametrize("kind", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_of_multi_token_prediction_may_differ(layout, kind, tensors, tmp_path):
    """Public fault 23: BF16 or FP8 in the layer after the last, beside NVFP4."""
    stored, meant = with_nvfp4(tensors, layout, MATRICES)
    extra = {
        name.replace("layers.7.", "layers.8."): x
        for name, x in tensors.items()
        if "layers.7." in name and "hc_" not in name
    }
    if kind == "fp8":
        extra = released.with_fp8(extra, (16, 16))[0]
    elif kind == "nvfp4":
        extra = with_nvfp4(extra, layout, EXPERTS)[0]
    else:
        extra = {name: x.astype(BF16) for name, x in extra.items()}
    config = {"quant_method": layout, "ignore": ["model.layers.8.*", "re:.*layers[.]8[.].*"]}
    hf = released.config() | {"quantization_config": config}
    path = released.write(tmp_path, stored | extra, hf_config=hf, num_shards=2)
    assert_same(leaves_of(load(path)), released.leaves(meant))


def error_of(path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    return caught.value


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_factors_of_tensors_that_are_unusable(layout, value, tensors, tmp_path):
    stored, _ = with_nvfp4(tensors, layout, EXPERTS)
    last = "weight_scale_2" if layout == "modelopt" else "weight_global_scale"
    name = f"{EXPERT}.{last}"
    stored[name] = np.full_like(stored[name], value)
    path = released.write(tmp_path, stored)
    (failure,) = error_of(path).failures
    assert (failure.kind, failure.tensor) == ("value", name)
    assert str(value) in failure.found
    load(path, check_finite=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_factors_of_groups_that_are_nan(layout, tensors, tmp_path, monkeypatch):
    monkeypatch.setattr(leaves, "TILE_BYTES", 64)
    stored, meant = with_nvfp4(tensors, layout, EXPERTS)
    stored[f"{EXPERT}.weight_scale"].view(np.uint8)[[3, 60], 0] = (0x7F, 0xFF)
    path = released.write(tmp_path, stored)
    (failure,) = error_of(path).failures
    codes = "weight" if layout == "modelopt" else "weight_packed"
    assert (failure.kind, failure.tensor) == ("value", f"{EXPERT}.{codes}")
    assert failure.found == "32 values that are NaN or infinite after scaling (2 NaN factors)"
    down = leaves_of(load(path, check_finite=False))["layers.4.mlp.experts.down_proj"][5]
    want = meant[f"{EXPERT}.weight"].copy()
    want[[3, 60], :16] = np.nan
    np.testing.assert_array_equal(down, want)
