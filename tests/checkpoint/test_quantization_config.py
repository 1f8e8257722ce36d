"""What a checkpoint's quantisation config says, and what is refused in it."""

import pytest

from glm5next_jax.checkpoint.quantization_config import QuantizationConfig
from tests.checkpoint import released

TEXT = released.TEXT
read = QuantizationConfig.from_hf


def test_nothing_stated():
    for given in (read(), read(None, None), read({}, {}), read({"ignore": None})):
        assert given == QuantizationConfig(None, (128, 128), (), ())
        assert not given.excludes("lm_head")


@pytest.mark.parametrize(
    "config, method, block",
    [
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, "fp8", (64, 32)),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8", (128, 128)),
        ({"quant_method": "modelopt", "config_groups": {"a": {"weights": {"group_size": 16}}}},
         "modelopt", (128, 128)),
        ({"quant_method": "compressed-tensors", "config_groups": {
            "experts": {"weights": {"num_bits": 4, "block_structure": None}},
            "mtp": {"weights": {"num_bits": 8, "block_structure": [32, 64]}},
        }}, "compressed-tensors", (32, 64)),
        ({"config_groups": {"a": {"weights": {"block_structure": "16x32"}}}}, None, (16, 32)),
        ({"config_groups": {"a": {"weights": None}}}, None, (128, 128)),
    ],
)  # fmt: skip
def test_method_and_block(config, method, block):
    given = read(config)
    assert (given.method, given.weight_block_size) == (method, block)


@pytest.mark.parametrize("prefix", [TEXT, "model.", "language_model.", "language_model.model.", ""])
@pytest.mark.parametrize("listed", [TEXT, "model.", "language_model.model.", ""])
def test_names_compare_with_and_without_a_prefix(prefix, listed):
    module = f"{prefix}layers.3.self_attn.kv_b_proj"
    for config in (
        {"modules_to_not_convert": [f"{listed}layers.3.self_attn.kv_b_proj"]},
        {"modules_to_not_convert": [f"{listed}layers.3.self_attn"]},
        {"ignore": [f"{listed}layers.3.self_attn.kv_b_proj"]},
        {"ignore": [f"{listed}layers.3.self_attn*"]},
        {"exclude_modules": [f"{listed}layers.[0-9].*.kv_?_proj"]},
        {"ignore": ["re:.*layers[.]3[.]self_attn[.].*"]},
    ):
        given = read(config)
        assert given.excludes(module), config
        (entry,) = next(iter(config.values()))
        assert given.exclusion_of(module) == entry
        assert not given.excludes(f"{prefix}layers.33.self_attn.kv_b_proj"), config
        assert not given.excludes(f"{prefix}layers.3.mlp.gate_proj"), config
    (both,) = read(None, {"quantization": {"exclude_modules": [f"{listed}layers.3.*"]}}).patterns
    assert both == f"{listed}layers.3.*"


def test_components_of_the_fp8_list_begin_or_end_a_name():
    given = read(
        {"modules_to_not_convert": ["gate", "model.visual", "lm_head", "self_attn.q_proj"]}
    )
    for module in (
        f"{TEXT}layers.3.mlp.gate",
        "model.visual.blocks.0.attn.qkv",
        "lm_head",
        "model.lm_head",
        f"{TEXT}layers.0.self_attn.q_proj",
    ):
        assert given.excludes(module), module
    for module in (
        f"{TEXT}layers.3.mlp.gate_proj",
        f"{TEXT}layers.3.mlp.gate.up",
        f"{TEXT}layers.0.self_attn.q_proj_2",
        f"{TEXT}layers.0.cross_self_attn.q_proj",
    ):
        assert not given.excludes(module), module


def test_lists_of_both_files_count():
    given = read(
        {"quant_method": "modelopt", "ignore": ["lm_head"]},
        {"producer": {"name": "modelopt"}, "quantization": {"exclude_modules": ["model.visual*"]}},
    )
    assert given.excludes("lm_head") and given.excludes("model.visual.merger.proj")
    assert read(None, {"quantization": {}}).method is None
    assert read(None, {"quantization": {"quant_algo": "NVFP4"}}).method == "modelopt"


def test_plain_names_are_no_expressions():
    given = read({"ignore": ["layers.3.x", "re:layers[.]4$"]})
    assert given.excludes("layers.3.x") and given.excludes("model.layers.4")
    for module in ("layers.3ax", "layers.3.x.y", "layers.4.y", "a.layers.3.x"):
        assert not given.excludes(module), module


@pytest.mark.parametrize(
    "config, other, field",
    [
        (7, None, "quantization_config"),
        ([], None, "quantization_config"),
        ({"quant_method": 3}, None, "quantization_config.quant_method"),
        ({"weight_block_size": [128]}, None, "weight_block_size"),
        ({"weight_block_size": [128, 0]}, None, "weight_block_size"),
        ({"weight_block_size": [True, 128]}, None, "weight_block_size"),
        ({"weight_block_size": [128.0, 128]}, None, "weight_block_size"),
        ({"weight_block_size": {"a": 1}}, None, "weight_block_size"),
        ({"weight_block_size": 128}, None, "weight_block_size"),
        ({"config_groups": []}, None, "config_groups"),
        ({"config_groups": {"a": 1}}, None, "config_groups"),
        ({"config_groups": {"a": {"weights": 1}}}, None, "weights"),
        ({"config_groups": {"a": {"weights": {"block_structure": "x"}}}}, None, "block_structure"),
        ({"config_groups": {"a": {"weights": {"block_structure": "9" * 5000 + "x1"}}}}, None,
         "block_structure"),
        ({"modules_to_not_convert": "lm_head"}, None, "modules_to_not_convert"),
        ({"modules_to_not_convert": [1]}, None, "modules_to_not_convert"),
        ({"ignore": {"a": 1}}, None, "ignore"),
        ({"ignore": ["re:("]}, None, "ignore"),
        ({"ignore": ["re:x{99999999999999999999}"]}, None, "ignore"),
        ({"ignore": ["re:" + "(" * 2000 + ")" * 2000]}, None, "ignore"),
        ({"ignore": ["*" + "x" * 5000]}, None, "ignore"),
        (None, [], "hf_quant_config"),
        (None, {"quantization": 1}, "hf_quant_config.quantization"),
        (None, {"quantization": {"exclude_modules": 1}}, "exclude_modules"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(config, other, field):
    with pytest.raises(ValueError) as caught:
        read(config, other)
    assert field in str(caught.value) and len(str(caught.value)) < 400
