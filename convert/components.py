"""What of the model a weight belongs to, and whose names a checkpoint carries."""

from __future__ import annotations

import re
from collections.abc import Iterable

from glm5next_jax.checkpoint import mapping
from glm5next_jax.checkpoint.mapping import Name, Rule
from glm5next_jax.config import Glm5NextConfig

UNKNOWN = "unknown"
MTP = "MTP"
VISION = "vision"
COMPONENTS = (
    "embedding", "lm_head", "KDA", "sparse MLA", "indexer", "dense MLP", "routed experts",
    "shared experts", "router", "norms", "hyper-connections", "smear", MTP, VISION, UNKNOWN,
)  # fmt: skip
RELEASED, FUSED, IN_MEMORY = "released", "fused", "in memory"

# Of generic names, stored ones and those of leaves; the first that matches counts.
_PLACES = (
    (re.compile(r"embed_tokens\."), "embedding"),
    (re.compile(r"lm_head\."), "lm_head"),
    (re.compile(r"(smear\.)?smear_"), "smear"),
    (re.compile(r"norm\.|layers\.{L}\.(input|post_attention)_layernorm\."), "norms"),
    (re.compile(r"layers\.{L}\.(hc_(attn|ffn)_|(attn|ffn)_hc\.)"), "hyper-connections"),
    (re.compile(r"layers\.{L}\.self_attn\.indexer\."), "indexer"),
    (re.compile(r"layers\.{L}\.mlp\.experts\."), "routed experts"),
    (re.compile(r"layers\.{L}\.mlp\.shared_experts\."), "shared experts"),
    (re.compile(r"layers\.{L}\.mlp\.gate\."), "router"),
    (re.compile(r"layers\.{L}\.mlp\."), "dense MLP"),
)
_ATTENTION = re.compile(r"layers\.{L}\.self_attn\.")
_FUSED = re.compile(r"self_attn\.(fused_|in_proj_|qkv_|indexer\.wk_weights_proj)")
_IN_MEMORY = re.compile(
    r"self_attn\.(forget_gate\.|conv1d\.)|(attn|ffn)_hc\.|experts\.(gate_up|down)_proj$|^smear\."
)


def component_of(name: Name, config: Glm5NextConfig) -> str:
    """Which of `COMPONENTS` a stored weight without its prefix, or a leaf, belongs to.

    Norms within an attention belong to that. The name need not be known to any rule.
    """
    if name.layer is not None and name.layer >= config.num_hidden_layers:
        return UNKNOWN
    for pattern, component in _PLACES:
        if pattern.match(name.generic):
            return component
    if _ATTENTION.match(name.generic) and name.layer is not None:
        return "KDA" if config.is_kda(name.layer) else "sparse MLA"
    return UNKNOWN


def spelling_of(source: str) -> str:
    """Whose name the source of a rule is: RELEASED, FUSED (serving engines), or IN_MEMORY
    (transformers). Names that all of them share are RELEASED."""
    if _FUSED.search(source):
        return FUSED
    return IN_MEMORY if _IN_MEMORY.search(source) else RELEASED


def spelling(rules: Iterable[Rule]) -> str:
    """Whose names a checkpoint that matches these rules carries, in words.

    Engines and transformers share most names with the released checkpoints. Mixed is a checkpoint
    that has a part of the model under two forms of its name.
    """
    rules = list(dict.fromkeys(rules))
    other = [rule for rule in rules if spelling_of(rule.source) != RELEASED]
    found = {spelling_of(rule.source) for rule in other}
    shared = [
        rule
        for rule in rules
        if spelling_of(rule.source) == RELEASED and any(_overlap(rule, each) for each in other)
    ]
    if shared or len(found) > 1:
        kinds = [kind for kind in (RELEASED, FUSED, IN_MEMORY) if kind in found or kind == RELEASED]
        return f"mixed names ({', '.join(kinds)})"
    if FUSED in found:
        return "fused names of serving engines"
    return "in-memory names of transformers" if found else "released names"


def _overlap(a: Rule, b: Rule) -> bool:
    """Whether two rules fill the same part of a leaf."""
    for ours in a.targets:
        for theirs in b.targets:
            if ours == theirs:
                return True
            is_whole = "[" not in ours or "[" not in theirs
            if is_whole and ours.partition("[")[0] == theirs.partition("[")[0]:
                return True
    return False


def is_mtp(name: Name, config: Glm5NextConfig) -> bool:
    """Whether a stored weight is one of a multi-token prediction layer."""
    first = config.num_hidden_layers
    last = first + max(config.num_nextn_predict_layers, 1)
    return (
        name.layer is not None and first <= name.layer < last and name.generic in mapping.MTP_NAMES
    )
