"""docs/names.md, made from the table that reading uses: `python -m convert.names_page`."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from flax import nnx

from convert import components
from convert.released_format import HEAD, TEXT_PREFIX, released_tensors
from glm5next_jax import sharding
from glm5next_jax.checkpoint import mapping, planning
from glm5next_jax.checkpoint.mapping import EXPERTS, Name, Rule
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.model import Glm5NextForCausalLM, param_specs

# The released layers 0 to 4 are of every kind that there is.
_FEW = 5
_HC = "2·M + M·M"
# Rows of parts of a leaf.
_PARTS = {"q": "H·K", "k": "H·K", "v": "H·K", "b": "H", "f_a": "K", "g_a": "K"}
# Dimensions of a leaf: by component, as some names stand in two.
_LETTERS: dict[tuple[str, str], str] = {
    ("embedding", "embed_tokens.weight"): "vocab, D",
    ("lm_head", "lm_head.weight"): "vocab, D",
    ("KDA", "qkv_proj.weight"): "3, H·K, D",
    ("KDA", "fused_bfg_a_proj.weight"): "H + K + K, D",
    ("KDA", "qkv_conv1d.weight"): "3, H·K, W",
    ("KDA", "f_b_proj.weight"): "H·K, K",
    ("KDA", "g_b_proj.weight"): "H·K, K",
    ("KDA", "A_log"): "H",
    ("KDA", "dt_bias"): "H·K",
    ("KDA", "o_norm.weight"): "K",
    ("KDA", "o_proj.weight"): "D, H·K",
    ("sparse MLA", "q_a_proj.weight"): "Q, D",
    ("sparse MLA", "q_a_proj.bias"): "Q",
    ("sparse MLA", "q_a_layernorm.weight"): "Q",
    ("sparse MLA", "q_b_proj.weight"): "H·K, Q",
    ("sparse MLA", "kv_a_proj_with_mqa.weight"): "R, D",
    ("sparse MLA", "kv_a_proj_with_mqa.bias"): "R",
    ("sparse MLA", "kv_a_layernorm.weight"): "R",
    ("sparse MLA", "kv_b_proj.weight"): "H·K + H·V, R",
    ("sparse MLA", "o_proj.weight"): "D, H·V",
    ("sparse MLA", "o_proj.bias"): "D",
    ("indexer", "wq_b.weight"): "H·K, Q",
    ("indexer", "wk.weight"): "K, D",
    ("indexer", "k_norm.weight"): "K",
    ("indexer", "k_norm.bias"): "K",
    ("indexer", "weights_proj.weight"): "H, D",
    ("indexer", "index_kpool_compress_ape"): "P, K",
    ("indexer", "index_kpool_compress_gate"): "K, D",
    ("dense MLP", "gate_proj.weight"): "F, D",
    ("dense MLP", "up_proj.weight"): "F, D",
    ("dense MLP", "down_proj.weight"): "D, F",
    ("routed experts", "gate_proj"): "E, F, D",
    ("routed experts", "up_proj"): "E, F, D",
    ("routed experts", "down_proj"): "E, D, F",
    ("shared experts", "gate_proj.weight"): "F, D",
    ("shared experts", "up_proj.weight"): "F, D",
    ("shared experts", "down_proj.weight"): "D, F",
    ("router", "gate.weight"): "E, D",
    ("router", "gate.e_score_correction_bias"): "E",
    ("norms", "norm.weight"): "D",
    ("norms", "input_layernorm.weight"): "D",
    ("norms", "post_attention_layernorm.weight"): "D",
    ("hyper-connections", "attn_hc.fn"): f"{_HC}, M·D",
    ("hyper-connections", "attn_hc.base"): _HC,
    ("hyper-connections", "attn_hc.scale"): "3",
    ("hyper-connections", "ffn_hc.fn"): f"{_HC}, M·D",
    ("hyper-connections", "ffn_hc.base"): _HC,
    ("hyper-connections", "ffn_hc.scale"): "3",
    ("smear", "smear_gate.weight"): "1, 24",
    ("smear", "smear_lambda"): "1",
}
_STEMS = re.compile(
    r"layers\.{L}\.(self_attn\.(indexer\.)?|mlp\.(experts\.|shared_experts\.)?)?|smear\."
)
_TITLES = {
    "embedding": "Embedding", "lm_head": "Head", "KDA": "Linear attention (KDA)",
    "sparse MLA": "Sparse attention (MLA)", "indexer": "Indexer of sparse attention",
    "dense MLP": "Dense feed-forward", "routed experts": "Routed experts",
    "shared experts": "Shared expert", "router": "Router", "norms": "Norms",
    "hyper-connections": "Hyper-connections", "smear": "Smear",
}  # fmt: skip
_SPELLINGS = {
    components.RELEASED: "released",
    components.FUSED: "engines",
    components.IN_MEMORY: "transformers",
}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the released model, the layer's number taken out.

    Attributes:
      component: what it belongs to.
      generic: path, with {L} for the layer.
      shape: in the released model.
      dtypes: at rest; FP8 behind the other where it may stay that.
      axes: logical, one for each dimension.
      needs: what of the config makes it, where released models lack it.
    """

    component: str
    generic: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    axes: sharding.Axes
    needs: str = ""

    @property
    def letters(self) -> list[str]:
        return _LETTERS[self.component, _STEMS.sub("", self.generic, count=1)].split(", ")


@dataclasses.dataclass(frozen=True)
class Row:
    """One stored name in one component.

    Attributes:
      rule: the rule of the name.
      leaves: those that it fills, whole or in part.
      letters: dimensions of the stored tensor.
      dtypes: in the released BF16 and the released FP8 checkpoint; "" where these have no such
        tensor.
    """

    rule: Rule
    leaves: tuple[Leaf, ...]
    letters: tuple[str, ...]
    dtypes: tuple[str, str]

    @property
    def component(self) -> str:
        return self.leaves[0].component

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stored tensor, in the released model."""
        return tuple(size_of(letters, self.component) for letters in self.letters)


@functools.cache
def few_layers(*, extras: bool) -> Glm5NextConfig:
    """The released model's first layers; with what released models lack."""
    whole = Glm5NextConfig.glm53_flash()
    return whole.replace(
        num_hidden_layers=_FEW,
        layer_types=whole.layer_types[:_FEW],
        mlp_layer_types=whole.mlp_layer_types[:_FEW],
        indexer_types=whole.indexer_types[:_FEW],
        attention_bias=extras,
        smear=extras,
    )


@functools.cache
def leaves() -> dict[tuple[str, str], Leaf]:
    """Every leaf that a model may have, by component and generic path."""
    config = few_layers(extras=True)
    released = param_specs(few_layers(extras=False), param_dtype="bfloat16")
    fp8 = param_specs(config, param_dtype="bfloat16", fp8=True)
    model = Glm5NextForCausalLM.abstract(config, param_dtype="bfloat16")
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaf, spec = ".".join(map(str, path)), variable.get_value()
        name = Name.of(leaf)
        dtypes = dict.fromkeys((spec.dtype.name, fp8[leaf].dtype.name))
        needs = "`smear`" if leaf.startswith("smear.") else "`attention_bias`"
        one = Leaf(
            components.component_of(name, config),
            name.generic,
            tuple(spec.shape),
            tuple(dtypes),
            variable.get_metadata().get("axes") or (None,) * len(spec.shape),
            "" if leaf in released else needs,
        )
        found.setdefault((one.component, one.generic), one)
    return found


@functools.cache
def rows() -> tuple[Row, ...]:
    """Every rule, once for each component whose leaves it fills."""
    dtypes = {
        Name.of(mapping.without_prefix(tensor.name)).generic: (
            "F32" if tensor.is_float32 else "BF16",
            "F8_E4M3" if tensor.is_fp8 else "F32" if tensor.is_float32 else "BF16",
        )
        for tensor in sorted(
            released_tensors(few_layers(extras=False)), key=lambda tensor: tensor.is_fp8
        )
    }
    found = []
    for rule in mapping.RULES:
        paths = [target.partition("[")[0] for target in rule.targets]
        for component in components.COMPONENTS:
            filled = [leaves().get((component, path)) for path in paths]
            whole = tuple(leaf for leaf in filled if leaf is not None)
            if len(whole) < len(paths):
                continue
            of_rule = dtypes.get(rule.source, ("", ""))
            if component == "KDA" and of_rule[0]:  # where sparse attention has FP8
                of_rule = (of_rule[0], of_rule[0])
            found.append(Row(rule, whole, tuple(_stored_letters(rule, whole)), of_rule))
    return tuple(found)


def numbers(component: str) -> dict[str, int]:
    """What the letters of a component's shapes are in the released model."""
    config = Glm5NextConfig.glm53_flash()
    values: dict[str, int] = {
        "vocab": config.vocab_size,
        "D": config.hidden_size,
        "E": config.n_routed_experts,
        "F": config.moe_intermediate_size,
        "H": config.num_attention_heads,
        "K": config.qk_nope_head_dim,
        "V": config.v_head_dim,
        "Q": config.q_lora_rank,
        "R": config.kv_lora_rank,
        "W": config.linear_conv_kernel_dim,
        "P": config.index_kpool,
        "M": config.hc_mult,
    }
    match component:
        case "dense MLP":
            values["F"] = config.intermediate_size
        case "KDA":
            values |= {"H": config.linear_num_heads, "K": config.linear_head_dim}
        case "indexer":
            values |= {"H": config.index_n_heads, "K": config.index_head_dim}
    return values


def size_of(letters: str, component: str) -> int:
    """The number that a dimension in letters, a sum of products, is in the released model."""
    values = numbers(component)
    return sum(
        math.prod(int(f) if f.isdigit() else values[f] for f in term.split("·"))
        for term in letters.split(" + ")
    )


def _stored_letters(rule: Rule, filled: Sequence[Leaf]) -> Iterator[str]:
    """Dimensions of the stored tensor of a rule."""
    parts = [target.partition("[")[2].removesuffix("]") for target in rule.targets]
    letters = [leaf.letters for leaf in filled]
    if rule.source.startswith(EXPERTS):
        stack, height, width = letters[0]
        if parts[0] == "{E}":
            yield from (height, width)
        else:
            yield from (stack, height if len(filled) == 1 else f"{len(filled)}·{height}", width)
        return
    if rule.also == "pair":
        yield from ("2", *letters[0])
        return
    heights = []
    for part, of_leaf in zip(parts, letters, strict=True):
        if part:
            heights.append(_PARTS[part])
        elif len(of_leaf) == 3:  # q, k and v, which stand under each other
            heights.append(f"3·{_PARTS['q']}")
        else:
            heights.append(of_leaf[0])
    yield " + ".join(heights)
    if rule.also == "conv":
        yield "1"
    if len(letters[0]) > 1:
        yield letters[0][-1]


def page() -> str:
    """The page, in Markdown."""
    out = [_INTRODUCTION.format(prefixes=_listed(mapping.PREFIXES), few=_released_examples())]
    for component in components.COMPONENTS:
        group = [row for row in rows() if row.component == component]
        if group:
            out += [f"## {_TITLES[component]}", "", *_section(component, group), ""]
    out.append(_ending())
    return "\n".join(out)


def _section(component: str, group: Sequence[Row]) -> Iterator[str]:
    letters = {
        letter
        for row in group
        for each in (*row.letters, *(n for leaf in row.leaves for n in leaf.letters))
        for letter in re.findall(r"[A-Za-z]+", each)
    }
    values = numbers(component)
    stated = ", ".join(f"{x} = {values[x]}" for x in values if x in letters)
    yield f"{_where(component)} {stated}." if stated else _where(component)
    yield ""
    filled = dict.fromkeys(leaf for row in group for leaf in row.leaves)
    yield "| leaf | shape | at rest | logical axes |"
    yield "| --- | --- | --- | --- |"
    for leaf in filled:
        needs = f" (only with {leaf.needs})" if leaf.needs else ""
        yield (
            f"| `{leaf.generic}`{needs} | {_shape(leaf.letters, leaf.shape)} | "
            f"{' or '.join(leaf.dtypes)} | {_axes(leaf.axes)} |"
        )
    yield ""
    yield "| stored name | of | fills | shape | BF16 repo | FP8 repo |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in group:
        targets = ", ".join(f"`{_STEMS.sub('', t, count=1)}`" for t in row.rule.targets)
        bf16, fp8 = row.dtypes
        yield (
            f"| `{row.rule.source}` | {_SPELLINGS[components.spelling_of(row.rule.source)]} | "
            f"{targets} | {_stored_shape(row)} | {bf16 or '-'} | {fp8 or '-'} |"
        )


def _where(component: str) -> str:
    config = Glm5NextConfig.glm53_flash()
    depth = range(config.num_hidden_layers)
    kda = sum(config.is_kda(layer) for layer in depth)
    moe = sum(config.is_moe(layer) for layer in depth)
    match component:
        case "KDA":
            return f"In {kda} layers of the released model."
        case "sparse MLA" | "indexer":
            return f"In {len(depth) - kda} layers of the released model."
        case "dense MLP":
            return f"In {len(depth) - moe} layers of the released model."
        case "routed experts" | "shared experts" | "router":
            return f"In {moe} layers of the released model."
        case "hyper-connections":
            return f"In all {len(depth)} layers; the mean of the streams at the end has no weights."
        case "lm_head":
            return "Absent where `tie_word_embeddings` is set; a stored one is then ignored."
        case "smear":
            return "Only with `smear`; released models lack it."
        case "norms":
            return f"Two in each of {len(depth)} layers, and the last; others are in their parts."
    return "Outside the layers."


def _shape(letters: Sequence[str], shape: Sequence[int]) -> str:
    symbols, sizes = ", ".join(letters), ", ".join(map(str, shape))
    return f"[{symbols}]" if symbols == sizes else f"[{symbols}] = [{sizes}]"


def _stored_shape(row: Row) -> str:
    text = _shape(row.letters, row.shape)
    match row.rule.also:
        case "conv":
            return f"{text}, or without the 1"
        case "heads":
            return f"{text}, or [1, 1, {row.letters[0]}, 1]"
    return text


def _axes(axes: sharding.Axes) -> str:
    if not any(axes):
        return "replicated"
    words = [f"{name} → {'·'.join(sharding.RULES[name])}" if name else "-" for name in axes]
    return f"[{', '.join(words)}]"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


def _released_examples() -> str:
    names = (f"{TEXT_PREFIX}layers.0.self_attn.q_proj.weight", HEAD)
    return " and ".join(f"`{name}`" for name in names)


def _ending() -> str:
    sections: dict[str, set[str]] = {}
    for row in rows():
        sections.setdefault(row.component, set()).add(row.rule.source)
    whole = [name for name, sources in sections.items() if sources <= mapping.MTP_NAMES]
    named = set().union(*(sections[name] for name in whole))
    titles = ", ".join(_TITLES[name] for name in whole)
    depth = Glm5NextConfig.glm53_flash().num_hidden_layers
    lines = [
        "## Kept, and not used",
        "",
        "| names | reason |",
        "| --- | --- |",
        f"| `model.visual.*`, `visual.*` | {planning.VISION_REASON} |",
        f"| those of layer {depth} that are listed below | {planning.MTP_REASON} |",
        f"| `lm_head.weight` with `tie_word_embeddings` | {planning.TIED_REASON} |",
        f"| `X.input_scale`, `X.input_global_scale` | {planning.ACTIVATION_REASON} |",
        "",
        "A conversion carries the first two along, byte for byte, in `unused/`, and drops the other"
        " two.",
        f"The layer of multi-token prediction (L = {depth} in the released model) may have:",
        "",
        f"* every stored name of these sections: {titles}",
        *(f"* `{name}`" for name in sorted(mapping.MTP_NAMES - named)),
        "",
        "Any other name is an error, and so is a leaf that is not filled exactly once.",
    ]
    return "\n".join(lines)


_INTRODUCTION = """\
# Names

Which stored tensor fills which leaf of the model. Made by `python -m convert.names_page` from the
table that reading uses, `glm5next_jax/checkpoint/mapping.py`; do not edit it by hand.

* A stored name stands behind one of the prefixes {prefixes}
  or none, such as {few}.
* `of` says whose name it is: that of the released checkpoints (most are everybody's), a fused one
  of serving engines, or one that transformers has in memory and `save_pretrained` of a bare text
  model writes. A checkpoint may mix them.
* `fills` leaves out what the name of the section's module says. `leaf[q]` is the block of rows
  called q, `leaf[{{E}}]` one expert. Several leaves follow each other in the stored tensor, as
  rows, or in `gate_up_proj` within each expert.
* Shapes are in the letters of [CONTRIBUTING](../CONTRIBUTING.md#letters), then in numbers of the
  released model. A leaf [3, rows, columns] is stored as its q, its k and its v, or as all their
  rows under each other.
* BF16 repo and FP8 repo: the dtype in the two released checkpoints, `-` where they have no tensor
  of this name. Read are BF16, F16 and F32; F8_E4M3 `X.weight` with `X.weight_scale_inv` or
  `X.weight_scale`; and NVFP4, as ModelOpt (`X.weight` U8, `X.weight_scale`, `X.weight_scale_2`) or
  compressed-tensors (`X.weight_packed`, `X.weight_scale`, `X.weight_global_scale`) stores it. What
  is stored decides, weight by weight.
* At rest is the dtype of `param_specs` with bfloat16 weights; a conversion with `--dtype keep`
  leaves a weight as it is stored. Where float8_e4m3fn is named, the factors of the blocks are a
  second leaf of the same path with `_scale_inv`, sharded like their weight.
* Logical axes stand with the axes of the mesh that they are cut over (`sharding.RULES`).
"""

if __name__ == "__main__":
    sys.stdout.write(page() + "\n")
