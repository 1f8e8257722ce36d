"""Reading, writing and refusing configurations; and that no field is a knob without effect."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm5next_jax import Glm5NextConfig, forward, generate
from glm5next_jax.checkpoint import planning
from glm5next_jax.checkpoint.safetensors_reader import TensorInfo
from glm5next_jax.model import Glm5NextForCausalLM, param_specs
from glm5next_jax.moe import MoE
from tests.model.conftest import GOLDEN
from tests.model.models import random_model

FULL = GOLDEN.parent / "manifest" / "full_config.json"
SMALL = Glm5NextConfig.tiny(
    num_hidden_layers=2,
    layer_types=("linear_attention", "indexed_attention"),
    mlp_layer_types=("dense", "sparse"),
)


def released(**text) -> dict:
    """A config in the released form, with the hub's own keys."""
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "image_token_id": 154854,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "glm5_next_vision", "depth": 24},
        "text_config": {
            "model_type": "glm5_next_text",
            "dtype": "bfloat16",
            "index_kpool": 4,
            "num_nextn_predict_layers": 1,
            "eos_token_id": [154820, 154827, 154829],
            "layer_types": [
                "deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)
            ],
            "linear_attn_config": {
                "num_heads": 64,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "kda_layers": [0, 1, 2],
            },
            **text,
        },
    }


def test_released_config_is_the_preset():
    config = Glm5NextConfig.from_hf(released())
    assert config.replace(hf_extra="{}") == Glm5NextConfig.glm53_flash()
    assert config.layer_types.count("indexed_attention") == 11
    assert config.num_selected_pools == 512


def test_both_spellings_of_layer_types():
    new = Glm5NextConfig.from_hf(FULL)
    assert new.layer_types == Glm5NextConfig.from_hf(released()).layer_types


def test_class_defaults_where_a_field_is_missing():
    config = Glm5NextConfig.from_hf({"model_type": "glm5_next", "text_config": {}})
    assert config.index_kpool == 16  # not the released value
    assert config.linear_lower_bound == -5.0
    assert config.eos_token_id == ()
    assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 42
    assert config.replace(hf_extra="{}") == Glm5NextConfig()


@pytest.mark.parametrize(
    "linear, bound",
    [
        ({"gate_lower_bound": -3.0}, -3.0),
        ({"gate_lower_bound": None}, -5.0),  # safe_gate is on where it is missing
        ({"gate_lower_bound": None, "safe_gate": True}, -5.0),
        ({"gate_lower_bound": None, "safe_gate": False}, None),
        ({}, -5.0),
    ],
)
def test_gate_bound(linear, bound):
    config = Glm5NextConfig.from_hf(released(linear_attn_config=linear))
    assert config.linear_lower_bound == bound
    assert Glm5NextConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    "text, types",
    [
        ({"index_topk_pattern": "FSFS"}, ("full", "shared", "full", "shared")),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, ("full", "shared") * 2),
        ({"indexer_types": ["full", "shared", "full", "full"]}, ("full", "shared", "full", "full")),
    ],
)
def test_indexer_types(text, types):
    layers = {"num_hidden_layers": 4, "layer_types": ["indexed_attention"] * 4}
    source = {"model_type": "glm5_next", "text_config": {**layers, **text}}
    assert Glm5NextConfig.from_hf(source).indexer_types == types


def test_text_config_alone_and_files(tmp_path):
    whole = released()
    (tmp_path / "config.json").write_text(json.dumps(whole))
    from_directory = Glm5NextConfig.from_hf(tmp_path)
    assert from_directory == Glm5NextConfig.from_hf(str(tmp_path / "config.json"))
    alone = Glm5NextConfig.from_hf(whole["text_config"])
    assert alone.replace(hf_extra="") == from_directory.replace(hf_extra="")


@pytest.mark.parametrize(
    "config",
    [
        Glm5NextConfig.glm53_flash(),
        Glm5NextConfig.tiny(smear=True, linear_lower_bound=None, tie_word_embeddings=True),
        Glm5NextConfig.from_hf(released()),
        Glm5NextConfig.from_hf(GOLDEN / "tiny_config.json"),
    ],
    ids=["flash", "tiny", "released", "golden"],
)
def test_round_trip(config):
    again = config.to_hf()
    assert Glm5NextConfig.from_hf(json.loads(json.dumps(again))) == config


def test_lists_are_taken_where_tuples_are_kept():
    config = Glm5NextConfig.tiny(eos_token_id=[3], layer_types=["linear_attention"] * 5)
    assert hash(config) == hash(config.replace()) and config.eos_token_id == (3,)
    with pytest.raises(ValueError, match="eos_token_id must be a list, got 3"):
        Glm5NextConfig.tiny(eos_token_id=3)


def test_nulls_mean_the_default():
    text = dict(index_skip_topk_offset=None, index_topk_freq=None, linear_attn_config=None)
    assert Glm5NextConfig.from_hf(released(**text)).indexer_types == ("full",) * 45


def test_what_the_text_model_does_not_read_is_kept():
    written = Glm5NextConfig.from_hf(released()).to_hf()
    assert written["vision_config"] == released()["vision_config"]
    assert written["image_token_id"] == 154854
    assert written["text_config"]["linear_attn_config"]["kda_layers"] == [0, 1, 2]


REFUSED = [
    (dict(qk_rope_head_dim=64), "qk_rope_head_dim=64"),
    (dict(hidden_act="gelu"), "hidden_act='gelu'"),
    (dict(index_topk=2047), "index_topk=2047 must be divisible by index_kpool=4"),
    (dict(num_key_value_heads=8), "num_key_value_heads=8"),
    (dict(q_lora_rank=None), "q_lora_rank"),
    (dict(layer_types=["linear_attention"] * 44 + ["mamba"]), "layer_types[44]"),
    (dict(layer_types=["linear_attention"] * 44), "layer_types must have num_hidden_layers=45"),
    (dict(mlp_layer_types=["moe"] * 45), "mlp_layer_types[0]"),
    (dict(indexer_types=["shared"] * 45), "indexer_types[3] is 'shared'"),
    (dict(linear_attn_config={"gate_lower_bound": 5.0}), "linear_lower_bound must be negative"),
    (dict(n_group=5), "n_routed_experts=288 must be divisible by n_group=5"),
    (dict(num_experts_per_tok=289), "num_experts_per_tok=289"),
    (dict(topk_group=2), "topk_group=2 exceeds n_group=1"),
    (dict(hidden_size=0), "hidden_size must be a positive integer"),
    (dict(rms_norm_eps=-1.0), "rms_norm_eps must be a positive number"),
    (dict(dtype="float16"), "dtype must be one of"),
    (dict(eos_token_id=[154880]), "eos_token_id holds 154880"),
    (dict(num_hidden_layers=0, layer_types=None), "num_hidden_layers must be at least 1"),
    (dict(num_hidden_layers="45"), "num_hidden_layers must be an integer, got '45'"),
    (dict(initializer_range=None), "initializer_range must be a number >= 0, got None"),
    (dict(index_topk_freq="2"), "index_topk_freq must be an integer, got '2'"),
    (dict(linear_attn_config=[1]), "linear_attn_config must be an object, got [1]"),
    (dict(linear_attn_config={"gate_lower_bound": "x"}), "linear_lower_bound must be negative"),
    (dict(mlp_layer_types=5), "mlp_layer_types must be a list, got 5"),
    (dict(layer_types="linear_attention"), "layer_types must be a list"),
    (dict(index_kpool_always_select_tail="false"), "index_kpool_always_select_tail must be true"),
    (dict(eos_token_id=["<eos>"]), "eos_token_id holds '<eos>'"),
    (dict(smear=True, hidden_size=16), "smear reads 24 channels, more than hidden_size=16"),
]


@pytest.mark.parametrize("text, message", REFUSED, ids=[m for _, m in REFUSED])
def test_refused(text, message):
    with pytest.raises(ValueError) as error:
        Glm5NextConfig.from_hf(released(**text))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"model_type": "llama"}', "model_type='llama'"),
    ],
)
def test_refused_file(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="config.json") as error:
        Glm5NextConfig.from_hf(path)
    assert message in str(error.value)


# Every field, and a change of it that must show in one of the ways below.
CHANGES_SHAPES = dict(
    vocab_size=96,
    hidden_size=72,
    num_hidden_layers=3,
    intermediate_size=40,
    moe_intermediate_size=24,
    layer_types=("indexed_attention", "linear_attention"),
    mlp_layer_types=("sparse", "dense"),
    num_attention_heads=2,
    q_lora_rank=24,
    kv_lora_rank=24,
    qk_nope_head_dim=8,
    v_head_dim=8,
    attention_bias=True,
    index_n_heads=4,
    index_head_dim=8,
    index_kpool=2,
    linear_num_heads=3,
    linear_head_dim=8,
    linear_conv_kernel_dim=3,
    n_routed_experts=12,
    n_shared_experts=2,
    hc_mult=2,
    tie_word_embeddings=True,
    smear=True,
    dtype="bfloat16",
)
CHANGES_LOGITS = dict(
    index_topk=8,
    index_kpool_always_select_tail=False,
    linear_lower_bound=-1.0,
    num_experts_per_tok=3,
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    swiglu_limit=0.1,
    hc_eps=0.1,
    hc_sinkhorn_iters=1,
    rms_norm_eps=0.1,
)
ELSEWHERE = {
    "n_group", "topk_group", "indexer_types", "initializer_range", "pad_token_id", "eos_token_id",
    "max_position_embeddings", "num_nextn_predict_layers", "hf_extra",
}  # fmt: skip


def test_every_field_is_tested_for_its_effect():
    names = {field.name for field in dataclasses.fields(Glm5NextConfig)}
    assert names == CHANGES_SHAPES.keys() | CHANGES_LOGITS.keys() | ELSEWHERE


@pytest.mark.parametrize("field", CHANGES_SHAPES)
def test_field_changes_shapes(field):
    changes = {field: CHANGES_SHAPES[field]}
    if field == "num_hidden_layers":
        changes |= dict(layer_types=(), mlp_layer_types=(), indexer_types=())
    assert param_specs(SMALL.replace(**changes)) != param_specs(SMALL)


# One layer is enough to show an effect.
KDA_DENSE = SMALL.replace(
    num_hidden_layers=1,
    layer_types=("linear_attention",),
    mlp_layer_types=("dense",),
    indexer_types=("full",),
)
DSA_MOE = KDA_DENSE.replace(layer_types=("indexed_attention",), mlp_layer_types=("sparse",))


def logits_of(config: Glm5NextConfig) -> np.ndarray:
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, 40))
    return np.asarray(forward(random_model(config), ids)[0])


@pytest.fixture(scope="module")
def unchanged_logits():
    return {config: logits_of(config) for config in (KDA_DENSE, DSA_MOE)}


@pytest.mark.parametrize("field", CHANGES_LOGITS)
def test_field_changes_logits(field, unchanged_logits):
    in_dsa_or_moe = field.startswith(("index", "num_experts", "norm_topk", "routed"))
    config = DSA_MOE if in_dsa_or_moe else KDA_DENSE
    changed = logits_of(config.replace(**{field: CHANGES_LOGITS[field]}))
    assert np.abs(changed - unchanged_logits[config]).max() > 1e-2


def router_of(config: Glm5NextConfig):
    mlp = random_model(config).layers[1].mlp
    assert isinstance(mlp, MoE)
    return mlp.gate


def test_groups_limit_the_router():
    config = SMALL.replace(n_group=4, topk_group=1)
    router = router_of(config)
    experts, _ = router(jax.random.normal(jax.random.key(0), (50, config.hidden_size)))
    groups = np.asarray(experts) // 2
    assert (groups[:, :1] == groups).all()
    wider, _ = router_of(config.replace(topk_group=2))(
        jax.random.normal(jax.random.key(0), (50, config.hidden_size))
    )
    assert (np.sort(np.asarray(wider)) != np.sort(np.asarray(experts))).any()


def test_shared_indexer_has_no_weights():
    layers = dict(layer_types=("indexed_attention",) * 2)
    full = param_specs(SMALL.replace(**layers)).keys()
    shared = param_specs(SMALL.replace(**layers, indexer_types=("full", "shared"))).keys()
    gone = full - shared
    assert len(gone) == 7 and all(name.startswith("layers.1.self_attn.indexer.") for name in gone)


def test_initialisation_fields():
    tall = SMALL.replace(initializer_range=1.0)
    small, large = (Glm5NextForCausalLM(c, rngs=nnx.Rngs(0)) for c in (SMALL, tall))
    std = lambda model: jnp.std(model.layers[0].self_attn.o_proj.weight[...])
    ratio = std(large) / std(small)
    np.testing.assert_allclose(ratio, 50, rtol=1e-5)
    embedding = np.asarray(small.embed_tokens.weight[...])
    assert not embedding[0].any() and embedding[1].any()
    other = Glm5NextForCausalLM(SMALL.replace(pad_token_id=None), rngs=nnx.Rngs(0))
    assert np.asarray(other.embed_tokens.weight[...])[0].any()


def test_generation_fields():
    model = Glm5NextForCausalLM(SMALL.replace(eos_token_id=(7, 9)), rngs=nnx.Rngs(0))
    assert model.eos_token_ids == (7, 9)
    short = Glm5NextForCausalLM(SMALL.replace(max_position_embeddings=10), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        generate(short, [[1, 2, 3]], max_new_tokens=8)


def test_mtp_field_accounts_for_more_layers():
    names = [
        TensorInfo(f"model.language_model.layers.{i}.enorm.weight", "BF16", (64,), "f")
        for i in (2, 3)
    ]

    def kinds(config) -> set[str]:
        try:
            planning.plan(names, config, {})
        except ValueError as error:
            return {failure.tensor for failure in error.failures}  # type: ignore[attr-defined]
        return set()

    assert kinds(SMALL.replace(num_nextn_predict_layers=1)) == {names[1].name}
    assert kinds(SMALL.replace(num_nextn_predict_layers=2)) == set()


def test_hf_extra_is_written_back():
    assert "vision_config" in SMALL.replace(hf_extra='{"vision_config": {"depth": 1}}').to_hf()
