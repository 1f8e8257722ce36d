"""Names: which stored tensor fills which part of which leaf. ONE table, `RULES`.

A checkpoint may carry the released names, the fused names of serving engines, or the names that
transformers uses in memory (written by `save_pretrained` of a bare text model), under any of four
prefixes. Every stored tensor must match one rule or be set aside by name for a stated reason, and
every element of every leaf must be filled exactly once (model spec, section 14).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes

from glm5next_jax.checkpoint import quantized
from glm5next_jax.checkpoint.errors import CheckpointError, Failure
from glm5next_jax.checkpoint.leaves import as_matrix
from glm5next_jax.checkpoint.safetensors_reader import TensorInfo
from glm5next_jax.config import Glm5NextConfig


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
      source: stored name without its prefix; {L} is a layer, {E} an expert.
      targets: leaves it fills, in the order in which the stored tensor holds them. `leaf[q]` is the
        block of rows called q (see `_segments`), `leaf[{E}]` one expert, `leaf` the whole.
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
_EXPERTS = "layers.{L}.mlp.experts."

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
        Rule(f"{_EXPERTS}{{E}}.{name}.weight", (f"{_EXPERTS}{name}[{{E}}]",))
        for name in ("gate_proj", "up_proj", "down_proj")
    ),
    Rule(_EXPERTS + "gate_up_proj", (_EXPERTS + "gate_proj", _EXPERTS + "up_proj"), axis=1),
    Rule(_EXPERTS + "down_proj", (_EXPERTS + "down_proj",)),
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
_MTP_NAMES = frozenset(rule.source for rule in (*_NORMS, *_SPARSE_ATTENTION, *_FEED_FORWARD)) | {
    f"layers.{{L}}.{name}"
    for name in (
        "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
        "shared_head.head.weight", "embed_tokens.weight",
    )
}  # fmt: skip

MTP_REASON = "multi-token prediction layer: kept verbatim, not used yet"
VISION_REASON = "vision tower: kept verbatim, not used yet"
TIED_REASON = "tied to embed_tokens.weight by tie_word_embeddings: not used"

_PREFIXES = ("model.language_model.", "language_model.", "model.", "")
_SCALE_SUFFIX = "_scale_inv"
_NUMBERED = re.compile(r"layers\.(0|[1-9][0-9]*)\.(?:(mlp\.experts\.)(0|[1-9][0-9]*)\.)?")
_FLOATS = ("BF16", "F16", "F32")
_FP8 = "F8_E4M3"
_AS_STORED = "FP8 at rest keeps what is stored, and quantises nothing"
_FOREIGN_SUFFIXES = (".weight_packed", ".weight_scale", ".weight_scale_2", ".qweight")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows [source_start, source_start + size) of a stored tensor, and where they go: to as many
    rows of a leaf from `target_start` on. Both are taken as matrices (see `leaves.as_matrix`)."""

    leaf: str
    source_start: int
    size: int
    target_start: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stored tensor that fills leaves.

    Attributes:
      source: the tensor.
      pieces: all of its rows, each once.
      scale, block: of FP8 codes that become other numbers, their factors and the block of one
        factor. None for FP8 that stays as it is: its factors then fill a leaf of their own.
    """

    source: TensorInfo
    pieces: tuple[Piece, ...]
    scale: TensorInfo | None = None
    block: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Kept:
    """A stored tensor that fills no leaf, and why."""

    source: TensorInfo
    reason: str

    @property
    def is_carried(self) -> bool:
        """Whether a conversion carries it along; a tied head would only repeat the embedding."""
        return self.reason != TIED_REASON


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checkpoint completely accounted for: `entries` fill every leaf of `specs` exactly once."""

    specs: Mapping[str, Any]
    entries: tuple[Entry, ...]
    kept: tuple[Kept, ...]


def scale_leaf(leaf: str) -> str:
    """Path of the leaf with the factors of an FP8 leaf."""
    return leaf + _SCALE_SUFFIX


def plan(
    tensors: Iterable[TensorInfo],
    config: Glm5NextConfig,
    specs: Mapping[str, Any],
    *,
    weight_block_size: tuple[int, int] = quantized.BLOCK_SHAPE,
    origin: str = "checkpoint",
) -> Plan:
    """Matches stored tensors with the leaves of a model, both ways.

    Args:
      tensors: what the checkpoint holds; names may repeat, which is an error to report.
      config: the model's configuration.
      specs: shape and dtype of every leaf by dotted path (`glm5next_jax.model.param_specs`). A leaf
        of dtype float8_e4m3fn takes FP8 codes as they are stored, and `scale_leaf(path)` beside it
        their factors; any other takes the numbers that codes mean.
      weight_block_size: FP8 block of `quantization_config`.
      origin: what to call the checkpoint in an error.

    Returns:
      The plan; nothing is read for it but names, dtypes and shapes.

    Raises:
      CheckpointError: any tensor unknown, missing, stored twice, or of a wrong shape or dtype; FP8
        codes without factors or the reverse; other weights, or other blocks, than an FP8 leaf
        takes. All of them are in the one report.
    """
    return _Planner(config, specs, weight_block_size).run(tensors, origin)


class _Planner:
    def __init__(self, config, specs, weight_block_size):
        self.config, self.specs, self.weight_block_size = config, specs, weight_block_size
        self.segments = _segments(config)
        self.failures: list[Failure] = []
        self.entries: list[Entry] = []
        self.kept: list[Kept] = []
        # Per leaf, the parts in which it can be filled (experts, blocks of rows, or the whole), as
        # (name, rows), and who fills each.
        self.at_rest = {
            leaf for leaf, spec in specs.items() if spec.dtype == ml_dtypes.float8_e4m3fn
        }
        factors = {scale_leaf(leaf) for leaf in self.at_rest}
        self.slots = {leaf: self.slots_of(leaf) for leaf in specs if leaf not in factors}
        self.owners: dict[str, list[TensorInfo | None]] = {
            leaf: [None] * len(slots) for leaf, slots in self.slots.items()
        }
        self.starts = {
            leaf: list(itertools.accumulate((rows for _, rows in slots), initial=0))
            for leaf, slots in self.slots.items()
        }

    def run(self, tensors: Iterable[TensorInfo], origin: str) -> Plan:
        weights: dict[str, TensorInfo] = {}
        scales: dict[str, TensorInfo] = {}
        for info in tensors:
            group = weights
            name = info.name
            if name.endswith(_SCALE_SUFFIX):
                group, name = scales, name.removesuffix(_SCALE_SUFFIX)
            if name in group:
                self.fail("duplicate", info, f"a second copy of it (also in {group[name].file})")
            else:
                group[name] = info
        self.names = weights.keys()
        for name, info in weights.items():
            self.place(info, scales.pop(name, None))
        for name, info in scales.items():
            self.fail("scale", info, "a scale without its weight", f"{name} beside it")
        self.report_missing()
        if self.failures:
            foreign = any(
                failure.kind == "unknown" and failure.tensor.endswith(_FOREIGN_SUFFIXES)
                for failure in self.failures
            )
            hint = (
                "These look like NVFP4, MXFP4, GPTQ or AWQ weights: only BF16, F16, F32 and block "
                "FP8 (weight with weight_scale_inv) are read."
            )
            raise CheckpointError(
                f"{origin}: the tensors do not fit the model",
                self.failures,
                hint if foreign else "",
            )
        return Plan(self.specs, tuple(self.entries), tuple(self.kept))

    def fail(self, kind: str, info: TensorInfo, found: str, expected: str = "") -> None:
        self.failures.append(Failure(kind, info.file, info.name, found, expected))

    def slots_of(self, leaf: str) -> Sequence[tuple[str, int]]:
        shape = self.specs[leaf].shape
        generic = _NUMBERED.sub("layers.{L}.", leaf, count=1)
        if generic in self.segments:
            return self.segments[generic]
        if generic.startswith(_EXPERTS):
            return [(str(expert), shape[1]) for expert in range(shape[0])]
        return [("", as_matrix(shape)[0])]

    def place(self, info: TensorInfo, scale: TensorInfo | None) -> None:
        """Accounts for one stored tensor and its scale."""
        name = _without_prefix(info.name)
        match = _NUMBERED.match(name)
        layer, expert, generic = None, None, name
        if match:
            layer = int(match[1])
            expert = None if match[3] is None else int(match[3])
            middle = "" if match[3] is None else f"{match[2]}{{E}}."
            generic = f"layers.{{L}}.{middle}{name[match.end() :]}"

        reason = self.reason_to_keep(info.name, generic, layer)
        if reason:
            self.check_scale(info, scale)
            self.kept += [Kept(each, reason) for each in (info, scale) if each is not None]
            return
        rule = _RULE_OF.get(generic)
        if rule is None:
            self.fail("unknown", info, f"{info}, a name that no rule knows")
            return
        depth = self.config.num_hidden_layers
        if layer is not None and layer >= depth:
            self.fail("layer", info, f"layer {layer}", f"layers below {depth}")
            return
        leaves = [target.partition("[")[0] for target in rule.targets]
        leaves = [leaf.replace("{L}", str(layer)) for leaf in leaves]
        absent = [leaf for leaf in leaves if leaf not in self.specs]
        if absent:
            why = self.describe_layer(layer) if layer is not None else "its config says so"
            self.fail("unknown", info, f"{info}, but the model has no {absent[0]} ({why})")
            return
        self.fill(info, scale, rule, leaves, expert)

    def reason_to_keep(self, name: str, generic: str, layer: int | None) -> str:
        if name.startswith(("model.visual.", "visual.")):
            return VISION_REASON
        depth = self.config.num_hidden_layers
        # transformers drops num_nextn_predict_layers from the config, so one layer is always taken.
        num_mtp = max(self.config.num_nextn_predict_layers, 1)
        if layer is not None and depth <= layer < depth + num_mtp and generic in _MTP_NAMES:
            return MTP_REASON
        if generic == "lm_head.weight" and self.config.tie_word_embeddings:
            return TIED_REASON
        return ""

    def describe_layer(self, layer: int) -> str:
        config = self.config
        return (
            f"layer {layer} has {config.layer_types[layer]}, a {config.mlp_layer_types[layer]} MLP"
        )

    def fill(self, info, scale, rule: Rule, leaves: list[str], expert: int | None) -> None:
        """Checks shape and dtype of a tensor that matches `rule`, and claims its slots."""
        parts = []  # of each leaf: its first row, and how many
        taken = ""
        for target, leaf in zip(rule.targets, leaves, strict=True):
            part = target.partition("[")[2].removesuffix("]")
            slots = self.slots[leaf]
            first, last = 0, len(slots)
            if part == "{E}":
                assert expert is not None
                if expert >= len(slots):
                    self.fail("layer", info, f"expert {expert}", f"experts below {len(slots)}")
                    return
                first, last = expert, expert + 1
            elif part:
                first = [name for name, _ in slots].index(part)
                last = first + 1
            taken = self.claim(info, leaf, first, last) or taken
            start, stop = self.starts[leaf][first], self.starts[leaf][last]
            parts.append((leaf, start, stop - start))

        if taken:
            self.fail("duplicate", info, taken, "one source")
        accepted = self.accepted_shapes(rule, parts)
        ok = not taken
        if tuple(info.shape) not in accepted:
            wanted = " or ".join(str(list(shape)) for shape in accepted)
            self.fail("shape", info, f"shape {list(info.shape)}", wanted)
            ok = False
        at_rest = not self.at_rest.isdisjoint(leaves)
        if at_rest and info.dtype != _FP8:
            self.fail("dtype", info, f"dtype {info.dtype}", f"{_FP8}: {_AS_STORED}")
            ok = False
        elif info.dtype not in (*_FLOATS, _FP8):
            self.fail("dtype", info, f"dtype {info.dtype}", f"{', '.join(_FLOATS)} or {_FP8}")
            ok = False
        block = self.check_scale(info, scale)
        if not ok:
            return
        pieces = _pieces(rule, parts, self.specs)
        if not at_rest:
            self.entries.append(Entry(info, pieces, scale, block))
        elif scale is not None and block is not None:
            factors = _factor_pieces(pieces, info, block, self.specs)
            if factors is None:
                rows, columns = quantized.BLOCK_SHAPE
                expected = f"whole blocks of {rows} x {columns} for every weight: {_AS_STORED}"
                self.fail("scale", scale, f"blocks of {block[0]} x {block[1]}", expected)
            else:
                self.entries += [Entry(info, pieces), Entry(scale, factors)]

    def claim(self, info: TensorInfo, leaf: str, first: int, last: int) -> str:
        """Marks slots as filled by `info`; returns who fills the first that already is, or ""."""
        owners = self.owners[leaf]
        taken = next((owner for owner in owners[first:last] if owner is not None), None)
        for slot in range(first, last):
            owners[slot] = owners[slot] or info
        if taken is None:
            return ""
        return f"a part of {leaf} that {taken.name} in {taken.file} fills already"

    def accepted_shapes(
        self, rule: Rule, parts: Sequence[tuple[str, int, int]]
    ) -> list[tuple[int, ...]]:
        leaf, _, rows = parts[0]
        shape = tuple(self.specs[leaf].shape)
        total = sum(rows for _, _, rows in parts)
        if rule.axis == 1:
            return [(shape[0], total // shape[0], *shape[2:])]
        if len(shape) == 3 and "{E}" not in rule.source and rule.source.startswith(_EXPERTS):
            return [shape]
        if len(shape) < 2:
            return [(total,), (1, 1, total, 1)] if rule.also == "heads" else [(total,)]
        columns = shape[-1]
        match rule.also:
            case "conv":
                return [(total, 1, columns), (total, columns)]
            case "pair":
                return [(2, total // 2, columns)]
        return [(total, columns)]

    def check_scale(self, info: TensorInfo, scale: TensorInfo | None) -> tuple[int, int] | None:
        """Whether FP8 codes have factors that belong to them; their block, or None."""
        if info.dtype != _FP8:
            if scale is not None:
                self.fail("scale", scale, f"a scale for a weight of {info.dtype}", f"{_FP8} codes")
            return None
        if scale is None:
            self.fail(
                "scale", info, "FP8 codes without a scale", f"{info.name}{_SCALE_SUFFIX} beside it"
            )
            return None
        if scale.dtype != "F32":
            self.fail("dtype", scale, f"dtype {scale.dtype}", "F32")
        block = quantized.block_shape(info.shape, scale.shape, self.weight_block_size)
        if block is None:
            rows, columns = self.weight_block_size
            self.fail(
                "scale",
                scale,
                f"a grid of {list(scale.shape)} for a weight of {list(info.shape)}",
                f"one factor per block of {rows} x {columns}",
            )
        return block

    def report_missing(self) -> None:
        """One line per run of slots that nothing fills, by the released names."""
        prefix = _prevailing_prefix(self.names)
        for leaf, owners in self.owners.items():
            slots, first = self.slots[leaf], 0
            while first < len(owners):
                last = first
                while (
                    last < len(owners)
                    and owners[last] is None
                    and (last == first or slots[first][1] == slots[last][1])
                ):
                    last += 1
                if last > first:
                    self.report_run(leaf, slots[first:last], prefix)
                first = max(last, first + 1)

    def report_run(self, leaf: str, slots: Sequence[tuple[str, int]], prefix: str) -> None:
        leaf_shape = tuple(self.specs[leaf].shape)
        shape = (slots[0][1], *leaf_shape[-1:]) if len(leaf_shape) > 1 else leaf_shape
        match = _NUMBERED.match(leaf)
        generic = _NUMBERED.sub("layers.{L}.", leaf, count=1)
        part = "{E}" if generic.startswith(_EXPERTS) else slots[0][0]
        names = []
        for slot, _ in slots if part != "{E}" else slots[:1]:
            target = f"{generic}[{slot if part != '{E}' else '{E}'}]" if slot else generic
            names.append(_RELEASED_SOURCE[target].replace("{L}", match[1] if match else ""))
        if part == "{E}":
            first, last = slots[0][0], slots[-1][0]
            experts = first if first == last else f"{{{first}..{last}}}"
            names = [names[0].replace("{E}", experts)]
        own = "" if leaf == "lm_head.weight" else prefix
        for name in names:
            self.failures.append(
                Failure("missing", "", own + name, "no such tensor", f"shape {list(shape)}")
            )


def _pieces(
    rule: Rule, parts: Sequence[tuple[str, int, int]], specs: Mapping[str, Any]
) -> tuple[Piece, ...]:
    """Parts (leaf, its first row, rows) that follow each other in one stored tensor.

    Along axis 1 of stacked matrices they follow each other within each matrix.
    """
    matrices = specs[parts[0][0]].shape[0] if rule.axis == 1 else 1
    pieces, start = [], 0
    for matrix in range(matrices):
        for leaf, first, rows in parts:
            height = rows // matrices
            pieces.append(Piece(leaf, start, height, first + matrix * height))
            start += height
    return tuple(pieces)


def _factor_pieces(
    pieces: Sequence[Piece], codes: TensorInfo, block: tuple[int, int], specs: Mapping[str, Any]
) -> tuple[Piece, ...] | None:
    """Where the factors of `codes` go when the codes go where `pieces` says.

    None if blocks are not those of an FP8 leaf, or one block would go to two leaves.
    """
    if block != quantized.BLOCK_SHAPE:
        return None
    rows = block[0]

    def block_row(row: int, height: int) -> int | None:
        """The row of factors that begins at this row of matrices `height` high."""
        matrix, row = divmod(row, height)
        return None if row % rows else matrix * math.ceil(height / rows) + row // rows

    factors = []
    for piece in pieces:
        ends = []
        for start, height in (
            (piece.source_start, codes.shape[-2]),
            (piece.target_start, specs[piece.leaf].shape[-2]),
        ):
            first = block_row(start, height)
            last = block_row(start + piece.size, height)
            if first is None or last is None:
                return None
            ends.append((first, last - first))
        (source, size), (target, _) = ends
        factors.append(Piece(scale_leaf(piece.leaf), source, size, target))
    return tuple(factors)


def _segments(config: Glm5NextConfig) -> dict[str, list[tuple[str, int]]]:
    """Rows of the leaves that hold several projections under each other, in order."""
    heads, width, dim = config.linear_num_heads, config.linear_head_dim, config.linear_dim
    qkv = [("q", dim), ("k", dim), ("v", dim)]
    return {_QKV: qkv, _BFG_A: [("b", heads), ("f_a", width), ("g_a", width)], _CONV: qkv}


def _without_prefix(name: str) -> str:
    return name.removeprefix(next(prefix for prefix in _PREFIXES if name.startswith(prefix)))


def _prevailing_prefix(names: Iterable[str]) -> str:
    """The prefix of the first layer tensor, to name missing ones as this checkpoint would."""
    for name in names:
        for prefix in _PREFIXES:
            if name.startswith(prefix + "layers."):
                return prefix
    return _PREFIXES[0]


_RULE_OF = {rule.source: rule for rule in RULES}
_RELEASED_SOURCE: dict[str, str] = {}
for _rule in RULES:
    if len(_rule.targets) == 1:
        _RELEASED_SOURCE.setdefault(_rule.targets[0], _rule.source)
