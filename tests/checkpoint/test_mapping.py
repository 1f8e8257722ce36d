"""Every name of the two released checkpoints, and every way in which a checkpoint can be wrong."""

import dataclasses
import json
import lzma
import math
import pathlib
import re
import time
from collections import Counter

import numpy as np
import pytest

from glm5next_jax.checkpoint import CheckpointError, mapping, planning, report
from glm5next_jax.checkpoint.encodings import Fp8Blocks
from glm5next_jax.checkpoint.quantization_config import QuantizationConfig
from glm5next_jax.checkpoint.safetensors_reader import TensorInfo
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.model import param_specs
from tests.checkpoint import released

MANIFEST = pathlib.Path(__file__).parents[1] / "data" / "manifest"
NAMES = {np.dtype(np.float32): "F32", released.BF16: "BF16", released.FP8: "F8_E4M3"}
TEXT = released.TEXT
BLOCKS_16 = QuantizationConfig("fp8", (16, 16))


@pytest.fixture(scope="module")
def full_config():
    return Glm5NextConfig.from_hf(MANIFEST / "full_config.json")


@pytest.fixture(scope="module")
def full_specs(full_config):
    return param_specs(full_config)


@pytest.fixture(scope="module")
def tiny_config():
    return Glm5NextConfig.from_hf(released.config())


@pytest.fixture(scope="module")
def tiny_specs(tiny_config):
    return param_specs(tiny_config)


def manifest(kind: str) -> list[TensorInfo]:
    with lzma.open(MANIFEST / f"manifest_{kind}.tsv.xz", "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [
        TensorInfo(name, dtype, tuple(map(int, shape.split("x"))), "shard")
        for name, dtype, shape in rows
    ]


def infos(tensors: dict[str, np.ndarray], file: str = "model.safetensors") -> list[TensorInfo]:
    return [TensorInfo(name, NAMES[x.dtype], x.shape, file) for name, x in tensors.items()]


def numel(info) -> int:
    return math.prod(info.shape)


def width(specs, entry) -> int:
    """Columns of the leaves that an entry fills; a vector is a column."""
    shape = specs[entry.pieces[0].leaf].shape
    return shape[-1] if len(shape) > 1 else 1


def times_filled(plan: planning.Plan) -> dict[str, np.ndarray]:
    """How often each row of each leaf is written."""
    counts = {leaf: np.zeros(num_rows(spec.shape), np.int32) for leaf, spec in plan.specs.items()}
    for entry in plan.entries:
        for piece in entry.pieces:
            counts[piece.leaf][piece.target_start : piece.target_start + piece.size] += 1
    return counts


def num_rows(shape) -> int:
    return math.prod(shape[:-1]) if len(shape) > 1 else shape[0]


def test_parameters_of_the_full_model(full_specs):
    counts = (MANIFEST / "param_counts.txt").read_text()
    text = re.search(r"language_model\+lm_head: ([\d,]+)", counts)
    assert text
    assert sum(map(numel, full_specs.values())) == int(text[1].replace(",", "")) == 313326811966


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_every_released_name_is_accounted_for(kind, full_config, full_specs):
    tensors = manifest(kind)
    assert len(tensors) == {"fp8": 76108, "bf16": 38770}[kind]

    plan = planning.plan(tensors, full_config, full_specs)

    used = [entry.source for entry in plan.entries]
    scales = [e.encoding.scale for e in plan.entries if isinstance(e.encoding, Fp8Blocks)]
    kept = [each.source for each in plan.kept]
    assert sorted([*used, *scales, *kept], key=lambda i: i.name) == sorted(
        tensors, key=lambda i: i.name
    )
    # Each leaf receives exactly its own number of elements, from sources that are used whole.
    for entry in plan.entries:
        assert sum(piece.size for piece in entry.pieces) * width(full_specs, entry) == numel(
            entry.source
        )
    assert all((count == 1).all() for count in times_filled(plan).values())

    reasons = Counter(each.reason for each in plan.kept)
    assert reasons == {
        planning.MTP_REASON: 1760 if kind == "fp8" else 889,
        planning.VISION_REASON: 347,
    }
    weights = [info for info in kept if not info.name.endswith("_scale_inv")]
    mtp = sum(numel(info) for info in weights if "layers.45." in info.name)
    vision = sum(numel(info) for info in weights if "visual" in info.name)
    assert (mtp, vision) == (7_432_592_416, 563_627_008)
    assert len(scales) == (37338 - 871 if kind == "fp8" else 0)  # layer 45 has 871 of them


def test_placement_in_stacked_leaves_of_the_full_model(full_config, full_specs):
    plan = planning.plan(manifest("bf16"), full_config, full_specs)

    def places(leaf):
        return {
            entry.source.name.removeprefix(TEXT): (piece.target_start, piece.size)
            for entry in plan.entries
            for piece in entry.pieces
            if piece.leaf == leaf
        }

    stem = "layers.0.self_attn."
    assert places(f"{stem}qkv_proj.weight") == {
        f"{stem}{part}_proj.weight": (i * 8192, 8192) for i, part in enumerate("qkv")
    }
    assert full_specs[f"{stem}qkv_proj.weight"].shape == (3, 8192, 4096)
    assert places(f"{stem}fused_bfg_a_proj.weight") == {
        f"{stem}b_proj.weight": (0, 64),
        f"{stem}f_a_proj.weight": (64, 128),
        f"{stem}g_a_proj.weight": (192, 128),
    }
    stem = "layers.44.mlp.experts."
    assert places(f"{stem}up_proj") == {
        f"{stem}{e}.up_proj.weight": (e * 2048, 2048) for e in range(288)
    }


def test_plan_of_the_full_model_is_quick(full_config, full_specs):
    tensors = manifest("fp8")
    start = time.process_time()  # not wall time: other work on the machine must not fail this
    planning.plan(tensors, full_config, full_specs)
    assert time.process_time() - start < 5


def test_tiny_released_names_are_those_of_transformers():
    lines = (released.GOLDEN / "tiny_checkpoint_names.txt").read_text().splitlines()
    golden = {}
    for line in lines:
        name, shape, _ = line.split("\t")
        golden[name] = tuple(json.loads(shape))
    ours = released.released(released.in_memory())
    assert {name: x.shape for name, x in ours.items()} == golden


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.", "model.", ""])
@pytest.mark.parametrize("form", ["in_memory", "released", "fused"])
def test_every_form_fills_every_element_once(form, prefix, tiny_config, tiny_specs):
    tensors = released.in_memory()
    if form != "in_memory":
        tensors = released.released(tensors)
    if form == "fused":
        tensors = released.fused(tensors)
    renamed = {name.replace(TEXT, prefix): x for name, x in tensors.items()}

    plan = planning.plan(infos(renamed), tiny_config, tiny_specs)

    assert all((count == 1).all() for count in times_filled(plan).values())
    assert len(plan.entries) + len(plan.kept) == len(tensors)


@pytest.mark.parametrize(
    "old, new",
    [
        ("fused_qkvbfg_a_proj", "in_proj_qkvbfg_a"),
        ("fused_qkv_a_proj_with_mqa", "fused_qkv_a_proj"),
        ("fused_fg_b_proj.weight", "fused_fg_b_proj"),
    ],
)
def test_other_spellings_of_fused_names(old, new, tiny_config, tiny_specs):
    tensors = released.fused(released.released(released.in_memory()))
    renamed = {name.replace(old, new): x for name, x in tensors.items()}
    assert renamed.keys() != tensors.keys()
    plan = planning.plan(infos(renamed), tiny_config, tiny_specs)
    assert all((count == 1).all() for count in times_filled(plan).values())


def test_smear_and_biases(tiny_config):
    config = tiny_config.replace(smear=True, attention_bias=True)
    tensors = released.released(released.in_memory()) | {
        f"{TEXT}smear_gate.weight": np.zeros((1, 24), np.float32),
        f"{TEXT}smear_lambda": np.zeros((1,), np.float32),
    }
    for layer in (3, 7):
        for name, size in (("q_a_proj", 32), ("kv_a_proj_with_mqa", 16), ("o_proj", 64)):
            bias = np.zeros((size,), np.float32)
            tensors[f"{TEXT}layers.{layer}.self_attn.{name}.bias"] = bias
    plan = planning.plan(infos(tensors), config, param_specs(config))
    assert all((count == 1).all() for count in times_filled(plan).values())


def test_tied_head_is_set_aside(tiny_config):
    config = tiny_config.replace(tie_word_embeddings=True)
    tensors = released.released(released.in_memory())
    plan = planning.plan(infos(tensors), config, param_specs(config))
    tied = [kept for kept in plan.kept if kept.source.name == "lm_head.weight"]
    assert [kept.reason for kept in tied] == [planning.TIED_REASON]
    assert not tied[0].is_carried

    del tensors["lm_head.weight"]
    planning.plan(infos(tensors), config, param_specs(config))


def faulty(tiny_config, tiny_specs, change, config=None) -> CheckpointError:
    """The error for the tiny released tensors after `change` of {name: TensorInfo}."""
    tensors = released.with_fp8(released.released(released.in_memory()), (16, 16))[0]
    table = {info.name: info for info in infos(tensors)}
    extra = change(table) or []
    with pytest.raises(CheckpointError) as caught:
        planning.plan(
            [*table.values(), *extra], config or tiny_config, tiny_specs, quantization=BLOCKS_16
        )
    return caught.value


Q = f"{TEXT}layers.0.self_attn.q_proj.weight"
Q_A = f"{TEXT}layers.3.self_attn.q_a_proj.weight"
KV_B = f"{TEXT}layers.3.self_attn.kv_b_proj.weight"
EXPERT = f"{TEXT}layers.4.mlp.experts.5.down_proj.weight"


def add(name, dtype="F32", shape=(4,), file="model.safetensors"):
    return lambda table: [TensorInfo(name, dtype, shape, file)]


def replace(name, **changes):
    def change(table):
        table[name] = dataclasses.replace(table[name], **changes)

    return change


@pytest.mark.parametrize(
    "change, kind, tensor, found, expected",
    [
        (add(f"{TEXT}layers.0.self_attn.x.weight"), "unknown", "self_attn.x", "no rule", ""),
        (add(f"{TEXT}layers.00.self_attn.x"), "unknown", "layers.00", "no rule", ""),
        (add("model.nested.norm.weight"), "unknown", "nested", "no rule", ""),
        (add(f"{TEXT}layers.9.norm.weight"), "unknown", "layers.9", "no rule", ""),
        (add(f"{TEXT}layers.9.input_layernorm.weight"), "layer", "layers.9", "layer 9", "below 8"),
        (add(f"{TEXT}layers.8.hc_attn_fn"), "layer", "layers.8.hc", "layer 8", "layers below 8"),
        (add(f"{TEXT}layers.3.self_attn.A_log"), "unknown", "3.self_attn", "indexed_attent", ""),
        (add(f"{TEXT}smear_lambda"), "unknown", "smear", "no smear.smear_lambda", ""),
        (add(f"{TEXT}layers.4.mlp.experts.8.up_proj.weight"), "layer", ".8.", "expert 8", "below"),
        (lambda t: t.pop(Q) and None, "missing", Q, "no such tensor", "shape [32, 64]"),
        (lambda t: t.pop(EXPERT) and t.pop(EXPERT + "_scale_inv") and None,
         "missing", EXPERT, "no such tensor", "shape [64, 16]"),
        (lambda t: t.pop("lm_head.weight") and None, "missing", "lm_head.weight", "no such", "128"),
        (add(Q, shape=(32, 64), file="other"), "duplicate", Q, "second copy", ""),
        (add("model.layers.0.self_attn.q_proj.weight", shape=(32, 64)),
         "duplicate", "model.layers.0", "fills already", "one source"),
        (add(f"{TEXT}layers.0.self_attn.fused_qkvbfg_a_proj.weight", shape=(130, 64)),
         "duplicate", "fused_qkvbfg", "fills already", "one source"),
        (replace(Q, shape=(64, 32)), "shape", Q, "[64, 32]", "[32, 64]"),
        (replace(Q, shape=(1, 32, 64)), "shape", Q, "[1, 32, 64]", "[32, 64]"),
        (replace(KV_B, shape=(16, 128)), "shape", KV_B, "[16, 128]", "[128, 16]"),
        (replace(f"{TEXT}layers.0.self_attn.k_conv1d.weight", shape=(4, 1, 32)),
         "shape", "k_conv1d", "[4, 1, 32]", "[32, 1, 4] or [32, 4]"),
        (replace(f"{TEXT}layers.0.self_attn.A_log", shape=(1, 2)),
         "shape", "A_log", "[1, 2]", "[2] or [1, 1, 2, 1]"),
        (replace(f"{TEXT}layers.0.self_attn.dt_bias", shape=(2,)), "shape", "dt_bias", "[2]", "32"),
        (replace(Q, dtype="I32"), "dtype", Q, "I32", "BF16"),
        (replace(Q, dtype="F64"), "dtype", Q, "F64", "BF16"),
        (replace(Q, dtype="F8_E5M2"), "dtype", Q, "F8_E5M2", "F8_E4M3"),
        (lambda t: t.pop(Q_A + "_scale_inv") and None, "scale", Q_A, "without a scale", "beside"),
        (lambda t: t.pop(Q_A) and None, "scale", Q_A + "_scale_inv", "without its weight", Q_A),
        (replace(Q_A, dtype="BF16"), "scale", Q_A + "_scale_inv", "a weight of BF16", "F8_E4M3"),
        (replace(Q_A + "_scale_inv", shape=(4, 2)), "scale", Q_A + "_scale_inv", "[4, 2]", "16 x"),
        (replace(Q_A + "_scale_inv", dtype="F16"), "dtype", Q_A + "_scale_inv", "F16", "F32"),
        (add("model.visual.a.weight", "F8_E4M3", (8, 8)), "scale", "visual", "without a scale", ""),
    ],
)  # fmt: skip
def test_one_fault(change, kind, tensor, found, expected, tiny_config, tiny_specs):
    error = faulty(tiny_config, tiny_specs, change)
    matching = [f for f in error.failures if f.kind == kind and tensor in f.tensor]
    assert len(matching) == 1, error
    assert found in matching[0].found and expected in matching[0].expected, error
    assert str(matching[0]) in str(error)
    # A missing weight also leaves its scale alone; nothing else may be reported beside a fault.
    others = [f for f in error.failures if f is not matching[0]]
    assert len(others) <= (1 if kind == "scale" and "without its weight" in found else 0), error


def test_all_faults_in_one_report(tiny_config, tiny_specs):
    def change(table):
        del table[f"{TEXT}norm.weight"]
        replace(Q, shape=(64, 32))(table)
        replace(KV_B, dtype="I8")(table)
        return [
            *add(EXPERT, "F8_E4M3", (64, 16), "second.safetensors")(table),
            *add("strange")(table),
        ]

    error = faulty(tiny_config, tiny_specs, change)
    assert Counter(f.kind for f in error.failures) == dict.fromkeys(
        ("duplicate", "shape", "dtype", "unknown", "missing"), 1
    )
    for part in (Q, KV_B, EXPERT, "strange", "norm.weight", "second.safetensors", "5 failure(s)"):
        assert part in str(error)
    assert isinstance(error, ValueError)


def test_long_reports_are_cut_and_show_every_kind(tiny_config, tiny_specs):
    def change(table):
        del table[f"{TEXT}norm.weight"]
        return [TensorInfo(f"strange.{i}", "F32", (1,), "f") for i in range(1000)]

    error = faulty(tiny_config, tiny_specs, change)
    lines = str(error).splitlines()
    assert len(lines) == 42 and lines[-1].strip() == "… and 961 more"
    assert "1000 unknown, 1 missing" in lines[0]
    assert sum("norm.weight" in line for line in lines) == 1
    assert len(error.failures) == 1001


def test_missing_experts_are_one_line(tiny_config, tiny_specs):
    def change(table):
        for name in [name for name in table if "layers.4.mlp.experts." in name]:
            if ".gate_proj." in name and not (".0." in name or ".7." in name):
                del table[name]

    error = faulty(tiny_config, tiny_specs, change)
    assert [f.tensor for f in error.failures] == [
        f"{TEXT}layers.4.mlp.experts.{{1..6}}.gate_proj.weight"
    ]


def test_missing_names_are_told_with_the_prefix_of_the_checkpoint(tiny_config, tiny_specs):
    tensors = released.released(released.in_memory())
    tensors = {name.replace(TEXT, "model."): x for name, x in tensors.items()}
    del tensors["model.layers.7.hc_ffn_scale"]
    with pytest.raises(CheckpointError, match=r"\n  model\.layers\.7\.hc_ffn_scale: found no such"):
        planning.plan(infos(tensors), tiny_config, tiny_specs)


def test_a_deeper_checkpoint_is_not_taken_for_multi_token_prediction(tiny_config):
    """Fewer layers in the config than on disk: layer 7 is no MTP layer, and must not be dropped."""
    config = tiny_config.replace(
        num_hidden_layers=7,
        layer_types=tiny_config.layer_types[:7],
        mlp_layer_types=tiny_config.mlp_layer_types[:7],
        indexer_types=tiny_config.indexer_types[:7],
    )
    tensors = released.released(released.in_memory())
    with pytest.raises(CheckpointError) as caught:
        planning.plan(infos(tensors), config, param_specs(config))
    assert {f.tensor for f in caught.value.failures} == {
        f"{TEXT}layers.7.hc_{module}_{name}"
        for module in ("attn", "ffn")
        for name in ("fn", "base", "scale")
    }


@pytest.mark.parametrize(
    "name, dtype",
    [
        (f"{EXPERT.removesuffix('.weight')}.qweight", "I32"),  # GPTQ, AWQ
        (f"{EXPERT.removesuffix('.weight')}.weight_shape", "I64"),  # AWQ of compressed-tensors
        (f"{TEXT}layers.4.mlp.experts.gate_up_proj_blocks", "U8"),  # MXFP4
    ],
)
def test_foreign_quantisation_is_named(name, dtype, tiny_config, tiny_specs):
    error = faulty(tiny_config, tiny_specs, add(name, dtype, (64, 8)))
    (failure,) = error.failures
    assert (failure.kind, failure.tensor) == ("unknown", name)
    assert "MXFP4, GPTQ or AWQ" in str(error) and "block FP8" in str(error)


def test_released_sources_are_those_of_the_manifest(full_config, full_specs):
    """Back from every part of every leaf to just the names of the released checkpoint."""
    segments = mapping.segments(full_config)
    names = set()
    for leaf, spec in full_specs.items():
        name = mapping.Name.of(leaf)
        stacked = len(spec.shape) == 3 and ".experts." in leaf
        parts = [f"[{part}]" for part, _ in segments.get(name.generic, ())]
        for part in parts or ["[{E}]" if stacked else ""]:
            source = mapping.released_source(name.generic + part)
            for expert in range(spec.shape[0] if stacked else 1):
                prefix = "" if leaf == "lm_head.weight" else TEXT
                full = source.replace("{L}", str(name.layer)).replace("{E}", str(expert))
                names.add(prefix + full)
    released_names = {info.name for info in manifest("bf16")}
    assert names == {n for n in released_names if "visual" not in n and "layers.45." not in n}
    with pytest.raises(ValueError, match="target='x'"):
        mapping.released_source("x")


def test_table(tiny_config, tiny_specs):
    tensors = released.with_fp8(released.released(released.in_memory()), (16, 16))[0]
    plan = planning.plan(infos(tensors), tiny_config, tiny_specs, quantization=BLOCKS_16)
    text = report.table(plan, {leaf: np.dtype(spec.dtype) for leaf, spec in tiny_specs.items()})
    lines = text.splitlines()
    assert all(sum(line.startswith(f"{leaf} ") for line in lines) == 1 for leaf in tiny_specs)
    experts = next(line for line in lines if line.startswith("layers.3.mlp.experts.gate_proj "))
    assert "float32" in experts and "[8, 16, 64]" in experts and "32.00 KiB" in experts
    assert f"{TEXT}layers.3.mlp.experts.{{0..7}}.gate_proj.weight (F8_E4M3 with scale)" in experts
    fused = next(line for line in lines if "layers.0.self_attn.qkv_proj" in line)
    assert f"{TEXT}layers.0.self_attn.q_proj.weight + …k_proj.weight + …v_proj" in fused
    num_vision = sum("visual" in name for name in tensors)
    assert any(f"{num_vision} tensors" in line and planning.VISION_REASON in line for line in lines)
    num_parameters = sum(math.prod(spec.shape) for spec in tiny_specs.values())
    assert f"{len(tiny_specs)} leaves, {num_parameters:,} parameters" in lines[-1]
