"""A checkpoint held against a model: which stored rows go where, or every reason why they do not.

Every stored tensor must match one rule of `mapping` or be set aside for a stated reason, and every
element of every leaf must be filled exactly once (model spec, section 14).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes

from glm5next_jax.checkpoint import mapping, quantized, recognition
from glm5next_jax.checkpoint.encodings import Encoding, Fp8Blocks
from glm5next_jax.checkpoint.leaves import as_matrix
from glm5next_jax.checkpoint.mapping import EXPERTS, Name, Rule
from glm5next_jax.checkpoint.quantization_config import QuantizationConfig
from glm5next_jax.checkpoint.recognition import FLOATS, FP8, StoredWeight
from glm5next_jax.checkpoint.safetensors_header import TensorInfo
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.errors import CheckpointError, Failure

MTP_REASON = "multi-token prediction layer: kept verbatim, not used yet"
VISION_REASON = "vision tower: kept verbatim, not used yet"
TIED_REASON = "tied to embed_tokens.weight by tie_word_embeddings: not used"
ACTIVATION_REASON = "activation scale: activations are not quantised here"

_AS_STORED = "FP8 at rest keeps what is stored, and quantises nothing"


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows [source_start, source_start + size) of a stored weight, and where they go: to as many
    rows of a leaf from `target_start` on. Both are taken as matrices (see `leaves.as_matrix`)."""

    leaf: str
    source_start: int
    size: int
    target_start: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stored weight that fills leaves.

    Attributes:
      source: its numbers, or their codes.
      pieces: all of its rows, each once.
      encoding: of codes that become other numbers, with the tensors of their factors. None for a
        plain tensor, and for FP8 that stays as it is: its factors then fill a leaf of their own.
    """

    source: TensorInfo
    pieces: tuple[Piece, ...]
    encoding: Encoding | None = None

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All stored tensors of it."""
        return (self.source, *(self.encoding.companions if self.encoding else ()))

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A stored tensor that fills no leaf, and why."""

    source: TensorInfo
    reason: str

    @property
    def is_carried(self) -> bool:
        """Whether a conversion carries it along; a tied head would only repeat the embedding, and
        factors of activations belong to codes that are not carried."""
        return self.reason not in (TIED_REASON, ACTIVATION_REASON)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checkpoint completely accounted for: `entries` fill every leaf of `specs` exactly once.

    `weight_block_size` is the FP8 block that the checkpoint states.
    """

    specs: Mapping[str, Any]
    entries: tuple[Entry, ...]
    kept: tuple[Kept, ...]
    weight_block_size: tuple[int, int] = quantized.BLOCK_SHAPE


def scale_leaf(leaf: str) -> str:
    """Path of the leaf with the factors of an FP8 leaf."""
    return leaf + recognition.SCALE_SUFFIX


def plan(
    tensors: Iterable[TensorInfo],
    config: Glm5NextConfig,
    specs: Mapping[str, Any],
    *,
    quantization: QuantizationConfig | None = None,
    origin: str = "checkpoint",
) -> Plan:
    """Matches stored tensors with the leaves of a model, both ways.

    Args:
      tensors: what the checkpoint holds; names may repeat, which is an error to report.
      config: the model's configuration.
      specs: shape and dtype of every leaf by dotted path (`glm5next_jax.model.param_specs`). A leaf
        of dtype float8_e4m3fn takes FP8 codes as they are stored, and `scale_leaf(path)` beside it
        their factors; any other takes the numbers that codes mean.
      quantization: what the checkpoint states. Modules that it excludes must not be quantised; it
        never decides how a tensor is read.
      origin: what to call the checkpoint in an error.

    Returns:
      The plan; nothing is read for it but names, dtypes and shapes.

    Raises:
      CheckpointError: any tensor unknown, missing, stored twice, or of a wrong shape or dtype;
        codes without factors or the reverse; other weights, or other blocks, than an FP8 leaf
        takes. All of them are in the one report.
    """
    return _Planner(config, specs, quantization or QuantizationConfig()).run(tensors, origin)


def identity_plan(
    tensors: Iterable[TensorInfo],
    specs: Mapping[str, Any],
    *,
    weight_block_size: tuple[int, int] = quantized.BLOCK_SHAPE,
    origin: str = "checkpoint",
) -> Plan:
    """The plan of a checkpoint that holds leaves under their own paths.

    Args:
      tensors: arrays named by a leaf's path; FP8 codes have their factors as `scale_leaf(path)`.
      specs: as for `plan`.
      weight_block_size: the FP8 block that the checkpoint states.
      origin: what to call the checkpoint in an error.

    Raises:
      CheckpointError: leaves missing, unknown, or of another shape or dtype, FP8 without factors or
        the reverse. All of them are in the one report.
    """
    failures: list[Failure] = []
    entries: list[Entry] = []
    arrays: dict[str, TensorInfo] = {}
    for info in tensors:
        if arrays.setdefault(info.name, info) is not info:
            failures.append(_failure("duplicate", info, "a second copy of it"))
    at_rest = _at_rest(specs)
    factors = {scale_leaf(leaf) for leaf in at_rest}
    unused = dict(arrays)
    for leaf, spec in specs.items():
        if leaf in factors:
            continue
        info, shape = unused.pop(leaf, None), tuple(spec.shape)
        if info is None:
            failures.append(Failure("missing", "", leaf, "no such leaf", f"shape {list(shape)}"))
            unused.pop(scale_leaf(leaf), None)
            continue
        if info.shape != shape:
            found = f"shape {list(info.shape)}"
            failures.append(_failure("shape", info, found, f"{list(shape)}"))
        pieces = (Piece(leaf, 0, as_matrix(shape)[0], 0),)
        if info.dtype == FP8:
            scale = unused.pop(scale_leaf(leaf), None)
            if scale is None:
                expected = f"{scale_leaf(leaf)} beside it"
                failures.append(_failure("scale", info, "FP8 codes without a scale", expected))
                continue
            encoding = recognition.fp8_blocks(info, scale, weight_block_size, failures)
            if leaf not in at_rest:
                entries.append(Entry(info, pieces, encoding))
            elif encoding is not None and info.shape == shape:
                entries += _codes_and_factors(info, pieces, encoding, specs, failures)
        elif leaf in at_rest or info.dtype not in FLOATS:
            failures.append(_wrong_dtype(info, leaf in at_rest))
            unused.pop(scale_leaf(leaf), None)
        else:
            entries.append(Entry(info, pieces))
    for name, info in unused.items():
        weight = arrays.get(name.removesuffix(recognition.SCALE_SUFFIX), info)
        if weight is not info:
            found = f"a scale for a weight of {weight.dtype}"
            failures.append(_failure("scale", info, found, f"{FP8} codes"))
        else:
            failures.append(_failure("unknown", info, "a leaf of no model part"))
    if failures:
        raise CheckpointError(f"{origin}: the leaves do not fit the model", failures)
    return Plan(specs, tuple(entries), (), weight_block_size)


def fp8_leaves(plan: Plan) -> dict[str, tuple[int, int]]:
    """The leaves that could keep their FP8 codes, factors in a leaf beside them, with their block.

    These are filled by FP8 of one block throughout, of which none would be parted, and the shapes
    of codes and factors tell it again. `scale_leaf(leaf)` then has shape [..., row blocks, column
    blocks].

    Args:
      plan: of specs without FP8.
    """
    blocks: dict[str, tuple[int, int] | None] = {}
    for entry in plan.entries:
        block = None
        if isinstance(entry.encoding, Fp8Blocks):
            if _factor_pieces(entry.pieces, entry.source, entry.encoding.block, plan.specs):
                block = entry.encoding.block
        for piece in entry.pieces:
            if blocks.setdefault(piece.leaf, block) != block:
                blocks[piece.leaf] = None
    for leaf, block in blocks.items():
        shape, told = tuple(plan.specs[leaf].shape), None
        if block is not None:
            told = quantized.block_shape(shape, _grid(shape, block), plan.weight_block_size)
        blocks[leaf] = block if told == block else None
    # What one tensor fills keeps its codes together or not at all.
    found = {leaf: block for leaf, block in blocks.items() if block is not None}
    size = -1
    while size != len(found):
        size = len(found)
        for entry in plan.entries:
            if any(piece.leaf not in found for piece in entry.pieces):
                for piece in entry.pieces:
                    found.pop(piece.leaf, None)
    return {leaf: found[leaf] for leaf in plan.specs if leaf in found}


class _Planner:
    def __init__(self, config, specs, quantization: QuantizationConfig):
        self.config, self.specs, self.quantization = config, specs, quantization
        self.segments = mapping.segments(config)
        self.failures: list[Failure] = []
        self.entries: list[Entry] = []
        self.kept: list[Kept] = []
        self.at_rest = _at_rest(specs)
        self.blocks: dict[str, tuple[int, int]] = {}  # of leaves at rest
        factors = {scale_leaf(leaf) for leaf in self.at_rest}
        # Per leaf, the parts in which it can be filled (experts, blocks of rows, or the whole), as
        # (name, rows), and who fills each.
        self.slots = {leaf: self.slots_of(leaf) for leaf in specs if leaf not in factors}
        self.owners: dict[str, list[TensorInfo | None]] = {
            leaf: [None] * len(slots) for leaf, slots in self.slots.items()
        }
        self.starts = {
            leaf: list(itertools.accumulate((rows for _, rows in slots), initial=0))
            for leaf, slots in self.slots.items()
        }

    def run(self, tensors: Iterable[TensorInfo], origin: str) -> Plan:
        weights = recognition.grouped(tensors, self.failures)
        for stored in weights.values():
            if stored.source is None:
                self.failures += stored.orphans()
            else:
                self.place(stored, stored.source)
        self.report_missing(mapping.prevailing_prefix(weights))
        if self.failures:
            raise CheckpointError(
                f"{origin}: the tensors do not fit the model",
                self.failures,
                recognition.foreign_hint(self.failures),
            )
        block = self.quantization.weight_block_size
        return Plan(self.specs, tuple(self.entries), tuple(self.kept), block)

    def fail(self, kind: str, info: TensorInfo, found: str, expected: str = "") -> None:
        self.failures.append(_failure(kind, info, found, expected))

    def slots_of(self, leaf: str) -> Sequence[tuple[str, int]]:
        shape = self.specs[leaf].shape
        generic = Name.of(leaf).generic
        if generic in self.segments:
            return self.segments[generic]
        if generic.startswith(EXPERTS):
            return [(str(expert), shape[1]) for expert in range(shape[0])]
        return [("", as_matrix(shape)[0])]

    def place(self, stored: StoredWeight, info: TensorInfo) -> None:
        """Accounts for one stored weight, whose numbers or codes `info` holds."""
        name = Name.of(mapping.without_prefix(stored.name))
        reason = self.reason_to_keep(stored.name, name)
        if reason:
            self.recognise(stored)
            self.keep(stored.tensors, reason)
            return
        rule = mapping.rule_of(name.generic)
        if rule is None:
            self.fail("unknown", info, f"{info}, a name that no rule knows")
            return
        layer, depth = name.layer, self.config.num_hidden_layers
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
        self.fill(stored, info, rule, leaves, name.expert)
        self.keep(stored.activation_scales, ACTIVATION_REASON)

    def keep(self, tensors: Iterable[TensorInfo], reason: str) -> None:
        self.kept += [Kept(info, reason) for info in tensors]

    def reason_to_keep(self, full_name: str, name: Name) -> str:
        if full_name.startswith(("model.visual.", "visual.")):
            return VISION_REASON
        depth, layer = self.config.num_hidden_layers, name.layer
        # transformers drops num_nextn_predict_layers from the config, so one layer is always taken.
        num_mtp = max(self.config.num_nextn_predict_layers, 1)
        is_mtp = layer is not None and depth <= layer < depth + num_mtp
        if is_mtp and name.generic in mapping.MTP_NAMES:
            return MTP_REASON
        if name.generic == "lm_head.weight" and self.config.tie_word_embeddings:
            return TIED_REASON
        return ""

    def describe_layer(self, layer: int) -> str:
        config = self.config
        return (
            f"layer {layer} has {config.layer_types[layer]}, a {config.mlp_layer_types[layer]} MLP"
        )

    def recognise(self, stored: StoredWeight) -> recognition.Recognised:
        return recognition.encoding_of(stored, self.quantization.weight_block_size, self.failures)

    def fill(
        self,
        stored: StoredWeight,
        info: TensorInfo,
        rule: Rule,
        leaves: list[str],
        expert: int | None,
    ) -> None:
        """Checks shape and dtype of a weight that matches `rule`, and claims its slots."""
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

        num_failures = len(self.failures)
        if taken:
            self.fail("duplicate", info, taken, "one source")
        recognised = self.recognise(stored)
        accepted = self.accepted_shapes(rule, parts)
        if recognised.shape is not None and recognised.shape not in accepted:
            wanted = " or ".join(str(list(shape)) for shape in accepted)
            self.fail("shape", info, f"shape {list(recognised.shape)}", wanted)
        at_rest = not self.at_rest.isdisjoint(leaves)
        is_plain = recognised.title == "plain"
        if at_rest and recognised.title != FP8 or is_plain and info.dtype not in FLOATS:
            self.failures.append(_wrong_dtype(info, at_rest))
        exclusion = None if is_plain else self.quantization.exclusion_of(stored.module)
        if exclusion is not None:
            found = f"{recognised.title} codes ({info})"
            expected = f"weights that are not quantised, as the config says by {exclusion!r}"
            self.fail("dtype", info, found, expected)
        if len(self.failures) > num_failures:
            return
        pieces, encoding = _pieces(rule, parts, self.specs), recognised.encoding
        if at_rest and isinstance(encoding, Fp8Blocks):
            self.entries += _codes_and_factors(
                info, pieces, encoding, self.specs, self.failures, self.blocks
            )
        else:
            self.entries.append(Entry(info, pieces, encoding))

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
        if len(shape) == 3 and "{E}" not in rule.source and rule.source.startswith(EXPERTS):
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

    def report_missing(self, prefix: str) -> None:
        """One line per run of slots that nothing fills, by the released names."""
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
        name = Name.of(leaf)
        parts = [slot for slot, _ in slots]
        experts = ""
        if name.generic.startswith(EXPERTS):
            first, last = parts[0], parts[-1]
            experts = first if first == last else f"{{{first}..{last}}}"
            parts = ["{E}"]
        own = "" if leaf == "lm_head.weight" else prefix
        for part in parts:
            source = mapping.released_source(f"{name.generic}[{part}]" if part else name.generic)
            source = source.replace("{L}", str(name.layer)).replace("{E}", experts)
            self.failures.append(
                Failure("missing", "", own + source, "no such tensor", f"shape {list(shape)}")
            )


def _failure(kind: str, info: TensorInfo, found: str, expected: str = "") -> Failure:
    return Failure(kind, info.file, info.name, found, expected)


def _wrong_dtype(info: TensorInfo, at_rest: bool) -> Failure:
    expected = f"{FP8}: {_AS_STORED}" if at_rest else f"{', '.join(FLOATS)} or {FP8}"
    return _failure("dtype", info, f"dtype {info.dtype}", expected)


def _at_rest(specs: Mapping[str, Any]) -> set[str]:
    """The leaves that hold FP8 codes."""
    return {leaf for leaf, spec in specs.items() if spec.dtype == ml_dtypes.float8_e4m3fn}


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


def _grid(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the factors of codes [..., rows, columns]."""
    rows, columns = (math.ceil(n / b) for n, b in zip(shape[-2:], block, strict=True))
    return (*shape[:-2], rows, columns)


def _codes_and_factors(
    codes: TensorInfo,
    pieces: tuple[Piece, ...],
    encoding: Fp8Blocks,
    specs: Mapping[str, Any],
    failures: list[Failure],
    blocks: dict[str, tuple[int, int]] | None = None,
) -> list[Entry]:
    """FP8 as it is: codes into their leaves, and factors into the leaves beside them.

    A failure where the factors do not fit there: their blocks are other ones, or would be parted.
    `blocks` notes those of each leaf, which must be the same throughout.
    """
    blocks = {} if blocks is None else blocks
    factors = _factor_pieces(pieces, codes, encoding.block, specs)
    for leaf in dict.fromkeys(piece.leaf for piece in pieces):
        spec, shape = specs.get(scale_leaf(leaf)), tuple(specs[leaf].shape)
        wanted = None if spec is None else tuple(spec.shape)
        one = blocks.setdefault(leaf, encoding.block)
        if factors is not None and one == encoding.block and wanted == _grid(shape, one):
            continue
        rows, columns = encoding.block
        found = f"blocks of {rows} x {columns}"
        standard = wanted and quantized.block_shape(shape, wanted) or quantized.BLOCK_SHAPE
        expected = f"whole blocks of {standard[0]} x {standard[1]} for every weight"
        if wanted is not None and wanted != _grid(shape, encoding.block):
            grid = list(_grid(shape, encoding.block))
            expected += f" (factors {list(wanted)} of {leaf}, not {grid})"
        failures.append(_failure("scale", encoding.scale, found, f"{expected}: {_AS_STORED}"))
        return []
    assert factors is not None
    return [Entry(codes, pieces), Entry(encoding.scale, factors)]


def _factor_pieces(
    pieces: Sequence[Piece], codes: TensorInfo, block: tuple[int, int], specs: Mapping[str, Any]
) -> tuple[Piece, ...] | None:
    """Where the factors of `codes` go when the codes go where `pieces` says.

    None if a block would be parted: between leaves, or between matrices of one.
    """
    rows = block[0]

    def block_row(row: int, height: int) -> int | None:
        """The row of factors that begins at this row of matrices `height` high."""
        matrix, row = divmod(row, height)
        return None if row % rows else matrix * math.ceil(height / rows) + row // rows

    factors = []
    for piece in pieces:
        shape = specs[piece.leaf].shape
        if len(shape) < 2:
            return None
        ends = []
        for start, height in (
            (piece.source_start, codes.shape[-2]),
            (piece.target_start, shape[-2]),
        ):
            first = block_row(start, height)
            last = block_row(start + piece.size, height)
            if first is None or last is None:
                return None
            ends.append((first, last - first))
        (source, size), (target, target_size) = ends
        if size != target_size:
            return None
        factors.append(Piece(scale_leaf(piece.leaf), source, size, target))
    return tuple(factors)
