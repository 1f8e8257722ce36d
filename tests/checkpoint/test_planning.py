"""Plans of quantised checkpoints and of converted ones: what each accepts, and each fault by name.

Names, and faults of plain tensors, are in test_mapping.py.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5next_jax.checkpoint import CheckpointError, planning
from glm5next_jax.checkpoint.encodings import Fp8Blocks, Nvfp4
from glm5next_jax.checkpoint.quantization_config import QuantizationConfig
from glm5next_jax.checkpoint.safetensors_header import TensorInfo
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.model import param_specs
from tests.checkpoint import released
from tests.checkpoint.test_mapping import MANIFEST, manifest

TEXT = released.TEXT
EXPERT = f"{TEXT}layers.4.mlp.experts.5.down_proj"  # [64, 16]
Q = f"{TEXT}layers.0.self_attn.q_proj"  # [32, 64]
Q_A = f"{TEXT}layers.3.self_attn.q_a_proj"  # [32, 64]
F8 = jnp.float8_e4m3fn


def spec(shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture(scope="module")
def config():
    return Glm5NextConfig.from_hf(released.config())


@pytest.fixture(scope="module")
def specs(config):
    return param_specs(config)


def plain_table() -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name, "F32", x.shape, "file")
        for name, x in released.released(released.in_memory()).items()
    }


def put(table, stem: str, **tensors: tuple[str, tuple[int, ...]] | None) -> None:
    """Makes stem.part a tensor of (dtype, shape), or takes it away for None."""
    for part, given in tensors.items():
        table.pop(f"{stem}.{part}", None)
        if given is not None:
            table[f"{stem}.{part}"] = TensorInfo(f"{stem}.{part}", *given, f"{part}.file")


def modelopt(table, stem, rows, columns, **changes) -> None:
    put(table, stem, **({
        "weight": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_scale_2": ("F32", ()),
    } | changes))  # fmt: skip


def compressed(table, stem, rows, columns, **changes) -> None:
    put(table, stem, **({
        "weight": None,
        "weight_packed": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_global_scale": ("F32", (1,)),
    } | changes))  # fmt: skip


def entry_of(plan: planning.Plan, name: str) -> planning.Entry:
    (entry,) = [entry for entry in plan.entries if entry.source.name == name]
    return entry


def test_both_layouts_with_companions_in_other_files(config, specs):
    table = plain_table()
    modelopt(table, EXPERT, 64, 16, weight_scale_2=("F32", (1,)), input_scale=("F32", ()))
    compressed(table, Q_A, 32, 64, input_global_scale=("F32", (1,)))
    tensors = list(table.values())
    for order in (tensors, tensors[::-1]):
        plan = planning.plan(order, config, specs)
        expert = entry_of(plan, f"{EXPERT}.weight")
        assert isinstance(expert.encoding, Nvfp4) and not expert.encoding.is_reciprocal
        assert [info.name for info in expert.tensors] == [
            f"{EXPERT}.{part}" for part in ("weight", "weight_scale", "weight_scale_2")
        ]
        assert len({info.file for info in expert.tensors}) == 3
        assert expert.num_bytes == 64 * 8 + 64 + 4
        q_a = entry_of(plan, f"{Q_A}.weight_packed")
        assert isinstance(q_a.encoding, Nvfp4) and q_a.encoding.is_reciprocal
        aside = {kept.source.name for kept in plan.kept if not kept.is_carried}
        assert aside == {f"{EXPERT}.input_scale", f"{Q_A}.input_global_scale"}
        reasons = {kept.reason for kept in plan.kept if kept.source.name in aside}
        assert reasons == {"activation scale: activations are not quantised here"}


def test_quantised_layers_of_multi_token_prediction_are_kept_whole(config, specs):
    table = plain_table()
    stem = f"{TEXT}layers.8.mlp.experts.0."
    modelopt(table, f"{stem}up_proj", 16, 64, input_scale=("F32", ()))
    compressed(table, f"{stem}gate_proj", 16, 64, input_global_scale=("F32", ()))
    put(table, f"{stem}down_proj", weight=("F8_E4M3", (64, 16)), weight_scale=("BF16", (1, 1)))
    tensors = [name for name in table if name.startswith(stem)]
    quantization = QuantizationConfig("modelopt", patterns=("model.layers.8.*",))
    plan = planning.plan(table.values(), config, specs, quantization=quantization)
    kept = {kept.source.name: kept for kept in plan.kept}
    assert kept.keys() >= set(tensors) and len(tensors) == 10
    assert all(kept[name].reason == planning.MTP_REASON for name in tensors)
    assert all(kept[name].is_carried for name in tensors)


def fault(config, specs, change, **arguments) -> list:
    table = plain_table()
    change(table)
    with pytest.raises(CheckpointError) as caught:
        planning.plan(table.values(), config, specs, **arguments)
    return list(caught.value.failures)


def m(**changes):
    return lambda table: modelopt(table, EXPERT, 64, 16, **changes)


def c(**changes):
    return lambda table: compressed(table, EXPERT, 64, 16, **changes)


def fp8(**changes):
    codes = {"weight": ("F8_E4M3", (64, 16)), "weight_scale": ("F32", (1, 1))}
    return lambda table: put(table, EXPERT, **(codes | changes))


@pytest.mark.parametrize(
    "change, kind, part, found, expected",
    [
        (m(weight_scale=None), "scale", "weight", "without their", "down_proj.weight_scale "),
        (m(weight_scale_2=None), "scale", "weight", "without their scales", "weight_scale_2 besid"),
        (m(weight_scale=None, weight_scale_2=None), "scale", "weight", "without their scales",
         "weight_scale and "),
        (c(weight_scale=None), "scale", "weight_packed", "without", "down_proj.weight_scale "),
        (c(weight_global_scale=None), "scale", "weight_packed", "without", "weight_global_scale"),
        (m(weight_scale=("BF16", (64, 1))), "dtype", "weight_scale", "BF16", "F8_E4M3"),
        (m(weight_scale=("F8_E4M3", (1, 64))), "scale", "weight_scale", "[1, 64]", "[64, 1]"),
        (m(weight_scale=("F8_E4M3", (64, 2))), "scale", "weight_scale", "[64, 2]", "[64, 1]"),
        (m(weight_scale_2=("BF16", ())), "dtype", "weight_scale_2", "BF16", "F32"),
        (m(weight_scale_2=("F32", (64,))), "scale", "weight_scale_2", "[64]", "one factor for the"),
        (c(weight_global_scale=("F32", (2,))), "scale", "weight_global_scale", "[2]", "one factor"),
        (m(input_scale=("F16", ())), "dtype", "input_scale", "F16", "F32"),
        (m(input_scale=("F32", (16,))), "scale", "input_scale", "[16]", "one factor"),
        (m(weight_global_scale=("F32", (1,))), "scale", "weight_global_scale", "another form", ""),
        (c(weight_scale_2=("F32", ())), "scale", "weight_scale_2", "another form", ""),
        (c(input_scale=("F32", ())), "scale", "input_scale", "another form", ""),
        (m(weight_scale_inv=("F32", (1, 1))), "scale", "weight_scale_inv", "scale of another", ""),
        (c(weight=("F32", (64, 16))), "duplicate", "weight_packed", "second form", "one of the"),
        (m(weight_packed=("U8", (64, 8))), "duplicate", "weight_packed", "second form", "one of"),
        (m(weight=("U8", (64, 16)), weight_scale=("F8_E4M3", (64, 2))),
         "shape", "weight", "[64, 32]", "[64, 16]"),  # a weight's, not its bytes'
        (m(weight=("U8", (16, 64)), weight_scale=("F8_E4M3", (16, 8))),
         "shape", "weight", "[16, 128]", "[64, 16]"),
        (m(weight=("U8", (64, 7))), "shape", "weight", "[64, 7] of two", "groups of 16"),
        (m(weight=("U8", (512,))), "shape", "weight", "[512] of two", "groups of 16"),
        (c(weight_packed=("I32", (64, 2))), "dtype", "weight_packed", "I32", "U8"),
        (m(weight_scale=("U8", (64, 1))), "dtype", "weight_scale", "MXFP4", "F8_E4M3"),
        (m(weight_scale=("F8_E8M0", (64, 1))), "dtype", "weight_scale", "MXFP4", "F8_E4M3"),
        (fp8(weight_scale=None), "scale", "weight", "without a scale", "weight_scale_inv"),
        (fp8(weight_scale=("F16", (1, 1))), "dtype", "weight_scale", "F16", "F32 or BF16"),
        (fp8(weight_scale=("F32", ())), "scale", "weight_scale", "a grid of []", "one factor per"),
        (fp8(weight_scale=("F32", (64, 1))), "scale", "weight_scale", "[64, 1]", "one factor per"),
        (fp8(weight_scale_inv=("F32", (1, 1))), "duplicate", "weight_scale_inv", "second", "one"),
        (fp8(weight_scale_2=("F32", ())), "scale", "weight_scale_2", "NVFP4", ""),
        (fp8(weight=("BF16", (64, 16))), "scale", "weight_scale", "a weight of BF16", "F8_E4M3"),
        (lambda t: put(t, EXPERT, input_scale=("F32", ())),
         "scale", "input_scale", "a weight of F32", "NVFP4"),
        (lambda t: put(t, "model.visual.x", input_scale=("F32", ())),
         "scale", "input_scale", "without its weight", "model.visual.x.weight"),
        (lambda t: put(t, "model.visual.x", weight_global_scale=("F32", ())),
         "scale", "weight_global_scale", "without its weight", "weight_packed"),
        (lambda t: put(t, "model.visual.x", weight=("U8", (4, 8))),
         "scale", "weight", "without their scales", "model.visual.x.weight_scale"),
        (lambda t: put(t, f"{TEXT}layers.0.self_attn", A_log=("U8", (2,))),
         "dtype", "A_log", "U8", "BF16"),
    ],
)  # fmt: skip
def test_one_fault(change, kind, part, found, expected, config, specs):
    (failure,) = fault(config, specs, change)
    assert failure.kind == kind and failure.tensor.rpartition(".")[2] == part, failure
    assert failure.file in (f"{part}.file", "file")
    assert found in failure.found and expected in failure.expected, failure


def test_companions_alone(config, specs):
    def change(table):
        modelopt(table, EXPERT, 64, 16, weight=None, input_scale=("F32", ()))

    failures = fault(config, specs, change)
    missing = [f for f in failures if f.kind == "missing"]
    assert [f.tensor for f in missing] == [f"{EXPERT}.weight"]
    alone = {f.tensor for f in failures if f.found == "a scale without its weight"}
    assert alone == {f"{EXPERT}.{p}" for p in ("weight_scale", "weight_scale_2", "input_scale")}
    assert len(failures) == 4


def test_what_the_config_excludes_must_not_be_quantised(config, specs):
    """Only stored codes contradict it; plain weights that it does not list are as good."""
    for method, change in (("NVFP4", m()), ("F8_E4M3", fp8())):
        listed = "model.language_model.layers.4.mlp.experts.5.down_proj"
        for quantization in (
            QuantizationConfig("fp8", modules=(listed,)),
            QuantizationConfig("modelopt", patterns=(f"{listed[:-3]}*",)),
            QuantizationConfig("compressed-tensors", patterns=("re:.*experts[.]5[.]down_.*",)),
        ):
            (failure,) = fault(config, specs, change, quantization=quantization)
            assert (failure.kind, failure.tensor) == ("dtype", f"{EXPERT}.weight")
            (entry,) = quantization.modules + quantization.patterns
            assert method in failure.found and repr(entry) in failure.expected
    planning.plan(plain_table().values(), config, specs, quantization=QuantizationConfig("fp8"))


def test_nvfp4_is_not_taken_for_fp8_at_rest(config):
    at_rest = param_specs(config, fp8=True)
    failures = fault(config, at_rest, m())
    (failure,) = [f for f in failures if f.tensor == f"{EXPERT}.weight"]
    assert failure.kind == "dtype" and failure.found == "dtype U8"
    assert failure.expected.startswith("F8_E4M3: FP8 at rest keeps")


def fp8_table(block) -> dict[str, TensorInfo]:
    stored, _ = released.with_fp8(released.released(released.in_memory()), block)
    names = {np.dtype(np.float32): "F32", released.FP8: "F8_E4M3"}
    return {n: TensorInfo(n, names[x.dtype], x.shape, "file") for n, x in stored.items()}


def with_codes(specs, blocks) -> dict[str, jax.ShapeDtypeStruct]:
    """The specs with these leaves as codes, factors beside them."""
    out = dict(specs)
    for leaf, (rows, columns) in blocks.items():
        shape = specs[leaf].shape
        out[leaf] = spec(shape, F8)
        grid = (*shape[:-2], math.ceil(shape[-2] / rows), math.ceil(shape[-1] / columns))
        out[f"{leaf}_scale_inv"] = spec(grid, jnp.float32)
    return out


@pytest.mark.parametrize("block", [(16, 16), (12, 20), (128, 128), (32, 16)])
def test_blocks_of_any_shape_stay_at_rest(block, config, specs):
    tensors = list(fp8_table(block).values())
    quantization = QuantizationConfig("fp8", block)
    plan = planning.plan(tensors, config, specs, quantization=quantization)
    blocks = planning.fp8_leaves(plan)
    fp8_names = {entry.pieces[0].leaf for entry in plan.entries if entry.encoding}
    assert blocks == dict.fromkeys((leaf for leaf in specs if leaf in fp8_names), block)
    assert len(blocks) > 20 and "layers.0.self_attn.qkv_proj.weight" not in blocks

    at_rest = with_codes(specs, blocks)
    again = planning.plan(tensors, config, at_rest, quantization=quantization)
    assert all(entry.encoding is None for entry in again.entries)
    filled = dict.fromkeys(at_rest, 0)
    for entry in again.entries:
        for piece in entry.pieces:
            filled[piece.leaf] += piece.size
    for leaf, each in at_rest.items():
        assert filled[leaf] == (
            math.prod(each.shape[:-1]) if len(each.shape) > 1 else each.shape[0]
        )

    # The factors beside an expert's codes are its own.
    leaf = "layers.4.mlp.experts.down_proj_scale_inv"
    scale = entry_of(again, f"{EXPERT}.weight_scale_inv")
    height = math.ceil(64 / block[0])
    assert scale.pieces == (planning.Piece(leaf, 0, height, 5 * height),)

    # Other factors than the specs have room for.
    wrong = dict(at_rest)
    wrong[leaf] = spec((8, 1, 7), jnp.float32)
    with pytest.raises(CheckpointError) as caught:
        planning.plan(tensors, config, wrong, quantization=quantization)
    assert {f.kind for f in caught.value.failures} == {"scale"}
    assert len(caught.value.failures) == 8
    failure = caught.value.failures[0]
    assert failure.found == f"blocks of {block[0]} x {block[1]}"
    assert f"[8, 1, 7] of layers.4.mlp.experts.down_proj, not {[*at_rest[leaf].shape]}" in (
        failure.expected
    )


def test_leaves_whose_parts_differ_are_not_kept_as_codes(config, specs):
    def blocks_of(change) -> dict:
        table = fp8_table((16, 16))
        change(table)
        quantization = QuantizationConfig("fp8", (16, 16))
        plan = planning.plan(table.values(), config, specs, quantization=quantization)
        return planning.fp8_leaves(plan)

    everything = blocks_of(lambda table: None)
    leaf = "layers.4.mlp.experts.down_proj"

    def plain(table):
        put(table, EXPERT, weight=("BF16", (64, 16)), weight_scale_inv=None)

    def other_block(table):
        put(table, EXPERT, weight_scale_inv=("F32", (1, 1)))

    def bfloat16_factors(table):
        put(table, EXPERT, weight_scale_inv=("BF16", (4, 1)))

    def half_byte(table):
        modelopt(table, EXPERT, 64, 16, weight_scale_inv=None)

    for change in (plain, other_block, half_byte):
        assert blocks_of(change) == {n: b for n, b in everything.items() if n != leaf}, change
    assert blocks_of(bfloat16_factors) == everything

    def fused(table, rows):
        """One tensor for q_a (32 rows) and kv_a (16 rows), in blocks of so many rows."""
        stem = f"{TEXT}layers.3.self_attn."
        for part in ("q_a_proj", "kv_a_proj_with_mqa"):
            put(table, stem + part, weight=None, weight_scale_inv=None)
        grid = (48 // rows, 64 // rows) if rows < 48 else (1, 1)
        put(
            table,
            f"{stem}fused_qkv_a_proj_with_mqa",
            weight=("F8_E4M3", (48, 64)),
            weight_scale_inv=("F32", grid),
        )

    parts = {f"layers.3.self_attn.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa")}
    assert blocks_of(lambda table: fused(table, 16)) == everything
    assert blocks_of(lambda table: fused(table, 8)) == everything | dict.fromkeys(parts, (8, 8))
    without = {n: b for n, b in everything.items() if n not in parts}
    assert blocks_of(lambda table: fused(table, 48)) == without  # one block for both


def test_released_fp8_leaves_are_those_of_the_model():
    config = Glm5NextConfig.from_hf(MANIFEST / "full_config.json")
    plan = planning.plan(manifest("fp8"), config, param_specs(config))
    blocks = planning.fp8_leaves(plan)
    model = param_specs(config, fp8=True)
    assert set(blocks) == {leaf for leaf, each in model.items() if each.dtype == F8}
    assert set(blocks.values()) == {(128, 128)}


def arrays_of(specs, dtype="BF16") -> dict[str, TensorInfo]:
    names = {np.dtype(F8): "F8_E4M3", np.dtype(np.float32): "F32"}
    return {
        leaf: TensorInfo(leaf, names.get(np.dtype(each.dtype), dtype), tuple(each.shape), leaf)
        for leaf, each in specs.items()
    }


def test_identity_of_codes_at_rest_and_decoded(config, specs):
    blocks = {
        "layers.4.mlp.experts.down_proj": (16, 16),
        "layers.3.self_attn.o_proj.weight": (8, 8),
    }
    at_rest = with_codes(specs, blocks)
    tensors = arrays_of(at_rest).values()
    plan = planning.identity_plan(tensors, at_rest)
    assert {entry.source.name for entry in plan.entries} == set(at_rest)
    for entry in plan.entries:
        shape = at_rest[entry.source.name].shape
        rows = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
        assert entry.pieces == (planning.Piece(entry.source.name, 0, rows, 0),)
        assert entry.encoding is None
    assert plan.kept == ()

    decoded = planning.identity_plan(tensors, specs)
    assert {entry.source.name for entry in decoded.entries} == set(specs)
    for entry in decoded.entries:
        if entry.source.name in blocks:
            assert isinstance(entry.encoding, Fp8Blocks)
            assert entry.encoding.block == blocks[entry.source.name]
            assert entry.encoding.scale.name == f"{entry.source.name}_scale_inv"
        else:
            assert entry.encoding is None

    odd = with_codes(specs, {"layers.3.self_attn.o_proj.weight": (12, 20)})
    plan = planning.identity_plan(arrays_of(odd).values(), odd, weight_block_size=(12, 20))
    assert plan.weight_block_size == (12, 20)


DOWN = "layers.4.mlp.experts.down_proj"  # FP8 at rest in the specs of the next test
O_PROJ = "layers.3.self_attn.o_proj.weight"  # FP8 in the checkpoint alone


@pytest.mark.parametrize(
    "name, changes, kind, tensor, found, expected",
    [
        ("norm.weight", None, "missing", "norm.weight", "no such leaf", "shape [64]"),
        (DOWN, None, "missing", DOWN, "no such leaf", "shape [8, 64, 16]"),
        ("strange", {"dtype": "F32", "shape": (1,)}, "unknown", "strange", "no model part", ""),
        ("x_scale_inv", {"dtype": "F32", "shape": (1,)}, "unknown", "x_scale_inv", "no model", ""),
        ("norm.weight_scale_inv", {"dtype": "F32", "shape": (1,)},
         "scale", "norm.weight_scale_inv", "a weight of F32", "F8_E4M3"),
        ("norm.weight", {"shape": (63,)}, "shape", "norm.weight", "[63]", "[64]"),
        ("norm.weight", {"dtype": "I32"}, "dtype", "norm.weight", "I32", "BF16, F16, F32 or F8"),
        (DOWN, {"dtype": "BF16"}, "dtype", DOWN, "BF16", "F8_E4M3: FP8 at rest keeps what is"),
        (f"{DOWN}_scale_inv", None, "scale", DOWN, "without a scale", "_scale_inv beside it"),
        (f"{O_PROJ}_scale_inv", None, "scale", O_PROJ, "without a scale", "_scale_inv beside it"),
        (f"{O_PROJ}_scale_inv", {"shape": (3, 1)}, "scale", f"{O_PROJ}_scale_inv", "[3, 1]", "per"),
        (f"{O_PROJ}_scale_inv", {"dtype": "F16"}, "dtype", f"{O_PROJ}_scale_inv", "F16", "F32"),
        (f"{DOWN}_scale_inv", {"shape": (8, 8, 2)},
         "scale", f"{DOWN}_scale_inv", "blocks of 8 x 8", "16 x 16 for every weight (factors [8,"),
    ],
)  # fmt: skip
def test_one_fault_of_a_converted_checkpoint(
    name, changes, kind, tensor, found, expected, config, specs
):
    wanted = with_codes(specs, {DOWN: (16, 16)})
    table = arrays_of(with_codes(specs, {DOWN: (16, 16), O_PROJ: (8, 8)}))
    if changes is None:
        del table[name]
    else:
        table[name] = dataclasses.replace(
            table.get(name, TensorInfo(name, "F32", (1,), "file")), **changes
        )
    with pytest.raises(CheckpointError, match="^there: the leaves do not fit the model") as caught:
        planning.identity_plan(table.values(), wanted, origin="there")
    (failure,) = caught.value.failures
    assert (failure.kind, failure.tensor) == (kind, tensor), failure
    assert found in failure.found and expected in failure.expected, failure


def test_plain_leaves_beside_factors_and_twice(config, specs):
    wanted = with_codes(specs, {DOWN: (16, 16)})
    table = arrays_of(specs)
    norm = table["norm.weight"]
    with pytest.raises(CheckpointError) as caught:
        planning.identity_plan([*table.values(), norm, dataclasses.replace(norm)], wanted)
    kinds = sorted(f.kind for f in caught.value.failures)
    assert kinds == ["dtype", "duplicate"] and re.search("second copy", str(caught.value))
