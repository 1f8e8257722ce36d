"""Names: which stored tensor fills which part of which leaf. ONE table, `RULES`.

A checkpoint may carry the released names, the fused names of serving engines, or the names that
transformers uses in memory (written by `save_pretrained` of a bare text model), under any of four
prefixes. `planning.plan` holds a checkpoint against the table, tensor by tensor.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from glm5next_jax.config import Glm5NextConfig

PREFIXES = ("model.language_model.", "language_model.", "model.", "")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
      source: stored name without its prefix; {L} is a layer, {E} an expert.
      targets: leaves it fills, in the order in which the stored tensor holds them. `leaf[q]` is the
        block of rows called q (see `segments`), `leaf[{E}]` one expert, `leaf` the whole.
      axis: along which axis of the stored tensor several targets follow each other.
      also: further shape accepted, of the same elements in the same order: "conv" takes [C, 1, W]
        for [C, W], "heads" [1, 1, H, 1] for [H], "pair" [2, R, C] for two [R, C]. "pair" is the
        only form of its rule.

    The q, k and v that a leaf stacks as [3, R, C] stand in a stored tensor as rows [3 R, C].
    """

    source: str
    targets: tuple[str, ...]
    axis: int = 0
    also: str = ""


_ATTENTION = "layers.{L}.self_attn."
_QKV = _ATTENTION + "qkv_proj.weight"
_BFG_A = _ATTENTION + "fused_bfg_a_proj.weight"
_CONV = _ATTENTION + "qkv_conv1d.weight"
EXPERTS = "layers.{L}.mlp.experts."

_NORMS = [
    Rule(f"layers.{{L}}.{name}", (f"layers.{{L}}.{name}",))
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
]
_SPARSE_ATTENTION = [
    *(
        Rule(_ATTENTION + name, (_ATTENTION + name,))
        for name in (
            "q_a_proj.weight", "q_a_proj.bias", "q_a_layernorm.weight", "q_b_proj.weight",
            "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias", "kv_a_layernorm.weight",
            "kv_b_proj.weight", "o_proj.weight", "o_proj.bias",
            "indexer.wq_b.weight", "indexer.wk.weight", "indexer.k_norm.weight",
            "indexer.k_norm.bias", "indexer.weights_proj.weight",
            "indexer.index_kpool_compress_ape", "indexer.index_kpool_compress_gate",
        )
    ),
    *(
        Rule(
            f"{_ATTENTION}{fused}.{kind}",
            (f"{_ATTENTION}q_a_proj.{kind}", f"{_ATTENTION}kv_a_proj_with_mqa.{kind}"),
        )
        for fused in ("fused_qkv_a_proj_with_mqa", "fused_qkv_a_proj")
        for kind in ("weight", "bias")
    ),
    Rule(
        _ATTENTION + "indexer.wk_weights_proj.weight",
        (_ATTENTION + "indexer.wk.weight", _ATTENTION + "indexer.weights_proj.weight"),
    ),
]  # fmt: skip
_FEED_FORWARD = [
    *(
        Rule(f"layers.{{L}}.mlp.{name}", (f"layers.{{L}}.mlp.{name}",))
        for name in (
            "gate_proj.weight", "up_proj.weight", "down_proj.weight",
            "gate.weight", "gate.e_score_correction_bias",
            "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight",
            "shared_experts.down_proj.weight",
        )
    ),
    *(
        Rule(f"{EXPERTS}{{E}}.{name}.weight", (f"{EXPERTS}{name}[{{E}}]",))
        for name in ("gate_proj", "up_proj", "down_proj")
    ),
    Rule(EXPERTS + "gate_up_proj", (EXPERTS + "gate_proj", EXPERTS + "up_proj"), axis=1),
    Rule(EXPERTS + "down_proj", (EXPERTS + "down_proj",)),
]  # fmt: skip
_LINEAR_ATTENTION = [
    *(Rule(f"{_ATTENTION}{part}_proj.weight", (f"{_QKV}[{part}]",)) for part in ("q", "k", "v")),
    *(
        Rule(f"{_ATTENTION}{part}_proj.weight", (f"{_BFG_A}[{part}]",))
        for part in ("b", "f_a", "g_a")
    ),
    *(
        Rule(f"{_ATTENTION}{part}_conv1d.weight", (f"{_CONV}[{part}]",), also="conv")
        for part in ("q", "k", "v")
    ),
    Rule(_ATTENTION + "f_b_proj.weight", (_ATTENTION + "f_b_proj.weight",)),
    Rule(_ATTENTION + "g_b_proj.weight", (_ATTENTION + "g_b_proj.weight",)),
    Rule(_ATTENTION + "A_log", (_ATTENTION + "A_log",), also="heads"),
    Rule(_ATTENTION + "dt_bias", (_ATTENTION + "dt_bias",)),
    Rule(_ATTENTION + "o_norm.weight", (_ATTENTION + "o_norm.weight",)),
    # Serving engines.
    Rule(_ATTENTION + "fused_qkvbfg_a_proj.weight", (_QKV, _BFG_A)),
    Rule(_ATTENTION + "in_proj_qkvbfg_a.weight", (_QKV, _BFG_A)),
    Rule(_QKV, (_QKV,)),
    Rule(_BFG_A, (_BFG_A,)),
    *(
        Rule(
            f"{_ATTENTION}{name}",
            (_ATTENTION + "f_b_proj.weight", _ATTENTION + "g_b_proj.weight"),
            also="pair",
        )
        for name in ("fused_fg_b_proj.weight", "fused_fg_b_proj")
    ),
    Rule(_CONV, (_CONV,), also="conv"),
    # transformers, in memory.
    Rule(_ATTENTION + "conv1d.weight", (_CONV,), also="conv"),
    Rule(_ATTENTION + "forget_gate.f_a_proj.weight", (_BFG_A + "[f_a]",)),
    Rule(_ATTENTION + "forget_gate.f_b_proj.weight", (_ATTENTION + "f_b_proj.weight",)),
    Rule(_ATTENTION + "forget_gate.A_log", (_ATTENTION + "A_log",), also="heads"),
    Rule(_ATTENTION + "forget_gate.dt_bias", (_ATTENTION + "dt_bias",)),
]
_HYPER_CONNECTIONS = [
    Rule(f"layers.{{L}}.{source}{name}", (f"layers.{{L}}.{module}.{name}",))
    for source_of in ("hc_{}_", "{}_hc.")  # released, in memory
    for module, stem in (("attn_hc", "attn"), ("ffn_hc", "ffn"))
    for source in (source_of.format(stem),)
    for name in ("fn", "base", "scale")
]
_OUTSIDE_LAYERS = [
    Rule("embed_tokens.weight", ("embed_tokens.weight",)),
    Rule("norm.weight", ("norm.weight",)),
    Rule("lm_head.weight", ("lm_head.weight",)),
    *(
        Rule(prefix + name, (f"smear.{name}",))
        for prefix in ("", "smear.")
        for name in ("smear_gate.weight", "smear_lambda")
    ),
]

# The released form of a tensor stands before its other forms: errors name what is missing by it.
RULES: tuple[Rule, ...] = (
    *_OUTSIDE_LAYERS, *_NORMS, *_HYPER_CONNECTIONS, *_LINEAR_ATTENTION, *_SPARSE_ATTENTION,
    *_FEED_FORWARD,
)  # fmt: skip
# A layer of multi-token prediction is a sparse-attention layer without hyper-connections, plus:
MTP_NAMES = frozenset(rule.source for rule in (*_NORMS, *_SPARSE_ATTENTION, *_FEED_FORWARD)) | {
    f"layers.{{L}}.{name}"
    for name in (
        "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
        "shared_head.head.weight", "embed_tokens.weight",
    )
}  # fmt: skip

_RULE_OF = {rule.source: rule for rule in RULES}
_RELEASED_SOURCE: dict[str, str] = {}
for _rule in RULES:
    if len(_rule.targets) == 1:
        _RELEASED_SOURCE.setdefault(_rule.targets[0], _rule.source)
_NUMBERED = re.compile(r"layers\.(0|[1-9][0-9]*)\.(?:(mlp\.experts\.)(0|[1-9][0-9]*)\.)?")


@dataclasses.dataclass(frozen=True)
class Name:
    """A name with its numbers taken out: "layers.{L}.mlp.experts.{E}.up_proj.weight", 3, 5."""

    generic: str
    layer: int | None = None
    expert: int | None = None

    @classmethod
    def of(cls, name: str) -> Name:
        """Of a leaf, or of a stored tensor without its prefix."""
        match = _NUMBERED.match(name)
        if match is None:
            return cls(name)
        rest = name[match.end() :]
        if match[3] is None:
            return cls(f"layers.{{L}}.{rest}", int(match[1]))
        return cls(f"layers.{{L}}.{match[2]}{{E}}.{rest}", int(match[1]), int(match[3]))


def rule_of(generic: str) -> Rule | None:
    """The rule of a stored tensor, by its `Name.generic`."""
    return _RULE_OF.get(generic)


def released_source(target: str) -> str:
    """The released name, without a prefix, of the tensor that fills a target.

    Args:
      target: as in `Rule.targets`: "layers.{L}.self_attn.qkv_proj.weight[q]",
        "layers.{L}.mlp.experts.up_proj[{E}]", "norm.weight".

    Returns:
      The name, with {L} and {E} for numbers.

    Raises:
      ValueError: no released tensor fills just this target.
    """
    if target not in _RELEASED_SOURCE:
        raise ValueError(f"{target=}; expected a leaf, or a part of one, that a tensor fills")
    return _RELEASED_SOURCE[target]


def segments(config: Glm5NextConfig) -> dict[str, list[tuple[str, int]]]:
    """Leaves that hold several projections under each other: names and rows of these, in order."""
    heads, width, dim = config.linear_num_heads, config.linear_head_dim, config.linear_dim
    qkv = [("q", dim), ("k", dim), ("v", dim)]
    return {_QKV: qkv, _BFG_A: [("b", heads), ("f_a", width), ("g_a", width)], _CONV: qkv}


def without_prefix(name: str) -> str:
    return name.removeprefix(next(prefix for prefix in PREFIXES if name.startswith(prefix)))


def prevailing_prefix(names: Iterable[str]) -> str:
    """The prefix of the first layer tensor, to name missing ones as this checkpoint would."""
    for name in names:
        for prefix in PREFIXES:
            if name.startswith(prefix + "layers."):
                return prefix
    return PREFIXES[0]
