"""Writes a tiny checkpoint in the released format of GLM-5.3-Flash: random weights, real layout.

    python examples/make_example_checkpoint.py [DIRECTORY]

Names, dtypes, FP8 blocks, shards, index, config, tokenizer and chat template are those that the
released checkpoint has (checkpoint facts; model spec, sections 2, 13 and 14), at a size that fits
into a repository. A run gives the same bytes on any machine.

The weights are random, scaled so that the model's answers depend on its input: matrices have
standard deviation 1/sqrt(inputs), where the released initialisation (model spec, section 10) has
0.02 and would give nearly equal logits at this width; norms and biases are off their neutral
values, so that a reader that mixes them up is noticed; the head has logits of standard deviation
2.5 for printable text and smaller ones for other bytes, so that answers can be read.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from safetensors.numpy import save

SEED = 5
FP8_BLOCK = 128
FP8_MAX = 448.0  # largest finite float8_e4m3fn
NUM_SHARDS = 4
TARGET = pathlib.Path(__file__).parent / "tiny-glm53-flash"

# Merges of the byte-level BPE: enough for tokens of several bytes, in the order of their rank.
MERGES = (
    "h e", "Ġ t", "i n", "e r", "a n", "Ġt he", "o n", "Ġ a", "r e", "e n", "o u", "in g",
    "e d", "Ġ s", "Ġ w", "l l", "Ġ o", "o r", "h i", "Ġa n", "Ġan d", "Ġ i", "he ll", "hell o",
)  # fmt: skip
# At the places that the released vocabulary gives them, counted from <|endoftext|>, 154820.
# Without gaps: `tokenizers` numbers added tokens one after the other, whatever the file says.
SPECIAL_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>",
    "<|begin_of_video|>", "<|end_of_video|>", *[f"<|reserved_{i}|>" for i in range(10)],
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|image|>", "<|video|>",
)  # fmt: skip
# Text that the model writes and a reader wants to see: not skipped in decoding.
VISIBLE = SPECIAL_TOKENS[SPECIAL_TOKENS.index("<think>") : SPECIAL_TOKENS.index("</arg_value>") + 1]
FIRST_SPECIAL = 256 + len(MERGES)
SPECIAL_ID = {name: FIRST_SPECIAL + i for i, name in enumerate(SPECIAL_TOKENS)}
EOS = [SPECIAL_ID[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]

LAYERS = 5
D, F_DENSE, F, E = 128, 256, 128, 8
VOCAB = 320  # a few ids at the end have no token, as in the released vocabulary
HEADS, HEAD_DIM, Q_RANK, KV_RANK = 4, 32, 128, 128
# With fewer heads, many pools would tie: a score is exactly zero where no head is positive.
INDEX_HEADS, INDEX_DIM, POOL = 8, 16, 4
KDA_HEADS, KDA_DIM, CONV = 2, 32, 4
STREAMS = 4
VISION = {
    "model_type": "glm5_next_vision",
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "image_size": 16,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": D,
    "projection_intermediate_size": 32,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-05,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
}

CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- if tools %}<|system|>Tools that may be called, one schema a line:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}
{%- endif %}
{%- macro text_of(content) %}
  {%- if content is string %}{{ content }}
  {%- else %}
    {%- for part in content or [] %}{{ part.text }}{% endfor %}
  {%- endif %}
{%- endmacro %}
{%- for message in messages %}
  {%- if message.role == "system" %}<|system|>{{ text_of(message.content) }}
  {%- elif message.role == "user" %}<|user|>{{ text_of(message.content) }}
  {%- elif message.role == "assistant" -%}
    <|assistant|><think>{{ message.reasoning_content or "" }}</think>{{ text_of(message.content) }}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      <tool_call>{{ function.name }}
      {%- for key, value in function.arguments.items() -%}
        <arg_key>{{ key }}</arg_key><arg_value>
        {{- value if value is string else value | tojson }}</arg_value>
      {%- endfor -%}
      </tool_call>
    {%- endfor %}
  {%- elif message.role == "tool" -%}
    <|observation|><tool_response>{{ text_of(message.content) }}</tool_response>
  {%- else %}
    {{- raise_exception("unknown role " ~ message.role) }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt -%}
  <|assistant|><think>{{ "</think>" if enable_thinking is defined and not enable_thinking }}
{%- endif %}
"""


class Draw:
    """Random arrays that depend on the seed and on a tensor's name alone, the same everywhere.

    Only raw 64-bit words, integer sums and correctly rounded arithmetic are used: distributions of
    NumPy's Generator may change between versions, and logarithms between machines.
    """

    def __init__(self, name: str):
        digest = hashlib.sha256(f"{SEED}/{name}".encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest[:16], "little"))

    def _sixteens(self, count: int) -> np.ndarray:
        """[count, 4] integers in 0..65535."""
        words = self._bits.random_raw(count).astype("<u8")
        return words.view("<u2").reshape(count, 4).astype(np.int64)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> np.ndarray:
        """Float32, near normal: a sum of four uniform numbers, within 3.5 standard deviations."""
        total = self._sixteens(math.prod(shape)).sum(axis=1)
        unit = (total - 2 * 65535) / math.sqrt((2.0**32 - 1) / 3)
        return (mean + std * unit).astype(np.float32).reshape(shape)

    def uniform(self, low: float, high: float, *shape: int) -> np.ndarray:
        """Float32 in [low, high]."""
        fraction = self._sixteens(math.prod(shape))[:, 0] / 65535.0
        return (low + (high - low) * fraction).astype(np.float32).reshape(shape)


def quantise(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32 [out, in] to float8_e4m3 [out, in] and float32 scales, one a block of 128 x 128."""
    rows, cols = (size // FP8_BLOCK for size in weight.shape)
    assert (rows * FP8_BLOCK, cols * FP8_BLOCK) == weight.shape, weight.shape
    blocks = weight.reshape(rows, FP8_BLOCK, cols, FP8_BLOCK)
    scale = np.abs(blocks).max(axis=(1, 3)) / np.float32(FP8_MAX)  # [rows, cols]
    values = blocks / scale[:, None, :, None]
    return values.reshape(weight.shape).astype(ml_dtypes.float8_e4m3fn), scale


Tensor = tuple[str, np.ndarray]


def bf16(name: str, value: np.ndarray) -> Iterator[Tensor]:
    yield name, value.astype(ml_dtypes.bfloat16)


def f32(name: str, value: np.ndarray) -> Iterator[Tensor]:
    yield name, value.astype(np.float32)


def linear(module: str, rows: int, cols: int, fp8: bool = False) -> Iterator[Tensor]:
    name = f"{module}.weight"
    value = Draw(name).normal(rows, cols, std=1 / math.sqrt(cols))
    if fp8:
        weight, scale = quantise(value)
        yield name, weight
        yield f"{name}_scale_inv", scale
    else:
        yield from bf16(name, value)


def norm(name: str, size: int) -> Iterator[Tensor]:
    yield from bf16(name, Draw(name).normal(size, std=0.1, mean=1.0))


def bias(name: str, size: int) -> Iterator[Tensor]:
    yield from bf16(name, Draw(name).normal(size, std=0.1))


def mlp(module: str, size: int) -> Iterator[Tensor]:
    yield from linear(f"{module}.gate_proj", size, D, fp8=True)
    yield from linear(f"{module}.up_proj", size, D, fp8=True)
    yield from linear(f"{module}.down_proj", D, size, fp8=True)


def kda(module: str) -> Iterator[Tensor]:
    size = KDA_HEADS * KDA_DIM
    for name in ("q", "k", "v"):
        yield from linear(f"{module}.{name}_proj", size, D)
    for name in ("q", "k", "v"):
        conv = f"{module}.{name}_conv1d.weight"
        yield from bf16(conv, Draw(conv).normal(size, 1, CONV, std=0.5))
    yield from linear(f"{module}.b_proj", KDA_HEADS, D)
    for name in ("f", "g"):
        yield from linear(f"{module}.{name}_a_proj", KDA_DIM, D)
        yield from linear(f"{module}.{name}_b_proj", size, KDA_DIM)
    yield from f32(f"{module}.A_log", Draw(f"{module}.A_log").uniform(-0.5, 0.5, KDA_HEADS))
    # About the range of the released initialisation, inverse softplus of 0.001 to 0.1.
    yield from f32(f"{module}.dt_bias", Draw(f"{module}.dt_bias").uniform(-6.9, -2.25, size))
    yield from norm(f"{module}.o_norm.weight", KDA_DIM)
    yield from linear(f"{module}.o_proj", D, size)


def dsa(module: str) -> Iterator[Tensor]:
    yield from linear(f"{module}.q_a_proj", Q_RANK, D, fp8=True)
    yield from norm(f"{module}.q_a_layernorm.weight", Q_RANK)
    yield from linear(f"{module}.q_b_proj", HEADS * HEAD_DIM, Q_RANK, fp8=True)
    yield from linear(f"{module}.kv_a_proj_with_mqa", KV_RANK, D, fp8=True)
    yield from norm(f"{module}.kv_a_layernorm.weight", KV_RANK)
    yield from linear(f"{module}.kv_b_proj", HEADS * 2 * HEAD_DIM, KV_RANK)
    yield from linear(f"{module}.o_proj", D, HEADS * HEAD_DIM, fp8=True)
    indexer = f"{module}.indexer"
    yield from linear(f"{indexer}.wq_b", INDEX_HEADS * INDEX_DIM, Q_RANK)
    yield from linear(f"{indexer}.wk", INDEX_DIM, D)
    yield from norm(f"{indexer}.k_norm.weight", INDEX_DIM)
    yield from bias(f"{indexer}.k_norm.bias", INDEX_DIM)
    yield from linear(f"{indexer}.weights_proj", INDEX_HEADS, D)
    ape, gate = f"{indexer}.index_kpool_compress_ape", f"{indexer}.index_kpool_compress_gate"
    yield from bf16(ape, Draw(ape).normal(POOL, INDEX_DIM, std=0.5))
    yield from bf16(gate, Draw(gate).normal(INDEX_DIM, D, std=1 / math.sqrt(D)))


def moe(module: str) -> Iterator[Tensor]:
    yield from linear(f"{module}.gate", E, D)
    correction = f"{module}.gate.e_score_correction_bias"
    yield from f32(correction, Draw(correction).normal(E, std=0.05))
    for expert in range(E):
        yield from mlp(f"{module}.experts.{expert}", F)
    yield from mlp(f"{module}.shared_experts", F)


def hyper_connections(layer: str) -> Iterator[Tensor]:
    rows, cols = (2 + STREAMS) * STREAMS, STREAMS * D
    for part in ("attn", "ffn"):
        fn, base, scale = (f"{layer}.hc_{part}_{name}" for name in ("fn", "base", "scale"))
        yield from bf16(fn, Draw(fn).normal(rows, cols, std=1 / math.sqrt(cols)))
        yield from f32(base, Draw(base).normal(rows, std=0.5))
        yield from f32(scale, Draw(scale).normal(3, std=0.1, mean=1.0))


def language_layers() -> Iterator[Tensor]:
    for i in range(LAYERS):
        layer = f"model.language_model.layers.{i}"
        yield from norm(f"{layer}.input_layernorm.weight", D)
        yield from norm(f"{layer}.post_attention_layernorm.weight", D)
        yield from hyper_connections(layer)
        yield from (dsa if is_sparse_attention(i) else kda)(f"{layer}.self_attn")
        yield from mlp(f"{layer}.mlp", F_DENSE) if i < 3 else moe(f"{layer}.mlp")


def mtp_layer() -> Iterator[Tensor]:
    """The layer after the last: plain residuals, so no hyper-connections."""
    layer = f"model.language_model.layers.{LAYERS}"
    yield from norm(f"{layer}.input_layernorm.weight", D)
    yield from norm(f"{layer}.post_attention_layernorm.weight", D)
    yield from dsa(f"{layer}.self_attn")
    yield from moe(f"{layer}.mlp")
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield from norm(f"{layer}.{name}.weight", D)
    yield from linear(f"{layer}.eh_proj", D, 2 * D)


def embeddings() -> Iterator[Tensor]:
    name = "model.language_model.embed_tokens.weight"
    yield from bf16(name, Draw(name).normal(VOCAB, D))
    yield from norm("model.language_model.norm.weight", D)
    readable = np.asarray([is_readable(token) for token in range(VOCAB)])
    std = np.where(readable, 2.5, 0.5) / math.sqrt(D)
    head = Draw("lm_head.weight").normal(VOCAB, D) * std[:, None].astype(np.float32)
    yield from bf16("lm_head.weight", head)


def vision_tower() -> Iterator[Tensor]:
    hidden, inner, patch = VISION["hidden_size"], VISION["intermediate_size"], VISION["patch_size"]
    root = "model.visual"

    def with_bias(module: str, rows: int, cols: int) -> Iterator[Tensor]:
        yield from linear(module, rows, cols)
        yield from bias(f"{module}.bias", rows)

    def convolution(module: str, *shape: int) -> Iterator[Tensor]:
        std = 1 / math.sqrt(math.prod(shape[1:]))
        name = f"{module}.weight"
        yield from bf16(name, Draw(name).normal(*shape, std=std))
        yield from bias(f"{module}.bias", shape[0])

    frames = VISION["temporal_patch_size"]
    yield from convolution(f"{root}.patch_embed.proj", hidden, 3, frames, patch, patch)
    for i in range(VISION["depth"]):
        block = f"{root}.blocks.{i}"
        yield from norm(f"{block}.norm1.weight", hidden)
        yield from norm(f"{block}.norm2.weight", hidden)
        yield from with_bias(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from with_bias(f"{block}.attn.proj", hidden, hidden)
        for name in ("q_norm", "k_norm"):
            yield from norm(f"{block}.attn.{name}.weight", hidden // VISION["num_heads"])
        yield from with_bias(f"{block}.mlp.gate_proj", inner, hidden)
        yield from with_bias(f"{block}.mlp.up_proj", inner, hidden)
        yield from with_bias(f"{block}.mlp.down_proj", hidden, inner)
    projection = VISION["projection_intermediate_size"]
    yield from linear(f"{root}.merger.proj", D, D)
    yield from norm(f"{root}.merger.post_projection_norm.weight", D)
    yield from bias(f"{root}.merger.post_projection_norm.bias", D)
    yield from linear(f"{root}.merger.gate_proj", projection, D)
    yield from linear(f"{root}.merger.up_proj", projection, D)
    yield from linear(f"{root}.merger.down_proj", D, projection)
    merge = VISION["spatial_merge_size"]
    yield from convolution(f"{root}.downsample", D, hidden, merge, merge)
    yield from norm(f"{root}.post_layernorm.weight", hidden)


def tensors() -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint, by its name on disk."""
    return dict([*embeddings(), *language_layers(), *mtp_layer(), *vision_tower()])


def is_sparse_attention(layer: int) -> bool:
    return layer % 4 == 3


def is_readable(token: int) -> bool:
    """Printable ASCII, a merge of it, or a token that ends an answer."""
    if token < 256:
        return 32 <= token < 127
    return token < FIRST_SPECIAL or token in EOS


def config(names: dict[str, np.ndarray]) -> dict:
    """`config.json` in the form that the hub has it."""
    kda_layers = [i for i in range(LAYERS) if not is_sparse_attention(i)]
    dsa_layers = [i for i in range(LAYERS) if is_sparse_attention(i)]
    text = {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": D,
        "intermediate_size": F_DENSE,
        "moe_intermediate_size": F,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "pad_token_id": EOS[0],
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": HEAD_DIM,
        "qk_rope_head_dim": 0,
        "qk_head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
        "head_dim": 0,
        "mla_use_nope": True,
        "layer_types": [
            "deepseek_sparse_attention" if is_sparse_attention(i) else "linear_attention"
            for i in range(LAYERS)
        ],
        "linear_attn_config": {
            "num_heads": KDA_HEADS,
            "head_dim": KDA_DIM,
            "short_conv_kernel_size": CONV,
            "gate_lower_bound": -5.0,
            "safe_gate": True,
            "kda_layers": kda_layers,
            "full_attn_layers": dsa_layers,
        },
        "indexer_types": ["full"] * LAYERS,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": 16,
        "index_kpool": POOL,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True,
        "first_k_dense_replace": 3,
        "mlp_layer_types": ["dense" if i < 3 else "sparse" for i in range(LAYERS)],
        "n_routed_experts": E,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "mhc": True,
        "hc_mult": STREAMS,
        "hc_eps": 1e-06,
        "hc_sinkhorn_iters": 20,
    }
    kept = sorted(
        name.removesuffix(".weight")
        for name, value in names.items()
        if name.endswith(".weight") and value.dtype != ml_dtypes.float8_e4m3fn
    )
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": SPECIAL_ID["<|image|>"],
        "video_token_id": SPECIAL_ID["<|video|>"],
        "image_start_token_id": SPECIAL_ID["<|begin_of_image|>"],
        "image_end_token_id": SPECIAL_ID["<|end_of_image|>"],
        "video_start_token_id": SPECIAL_ID["<|begin_of_video|>"],
        "video_end_token_id": SPECIAL_ID["<|end_of_video|>"],
        "text_config": text,
        "vision_config": VISION,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": kept,
        },
    }


def tokenizer() -> dict:
    """`tokenizer.json`: byte-level BPE over 256 bytes, a few merges, and the special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable}
    letter |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    # A byte's id is its value.
    vocabulary = {letter[byte]: byte for byte in range(256)}
    for i, merge in enumerate(MERGES):
        vocabulary[merge.replace(" ", "")] = 256 + i
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": name not in VISIBLE,
            }
            for name, token_id in SPECIAL_ID.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [merge.split(" ") for merge in MERGES],
        },
    }


def shards(everything: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Splits into NUM_SHARDS of about one size; each cut parts an FP8 weight from its scales."""
    budget = sum(value.nbytes for value in everything.values()) / NUM_SHARDS
    parts: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, value in everything.items():
        parts[-1][name] = value
        size += value.nbytes
        is_fp8 = value.dtype == ml_dtypes.float8_e4m3fn
        if is_fp8 and len(parts) < NUM_SHARDS and size >= budget * len(parts):
            parts.append({})
    return parts


def write(directory: pathlib.Path) -> None:
    """Writes the checkpoint's files; replaces those that are there."""
    directory.mkdir(parents=True, exist_ok=True)
    everything = tensors()
    parts = shards(everything)
    weight_map = {}
    for i, part in enumerate(parts, start=1):
        file = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        (directory / file).write_bytes(save(part, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in everything.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 0.95}
    named = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    texts = {
        "config.json": config(everything),
        "model.safetensors.index.json": index,
        "generation_config.json": {"eos_token_id": EOS, "pad_token_id": EOS[0], **sampling},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            **named,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    for file, content in texts.items():
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (directory / file).write_text(text, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
