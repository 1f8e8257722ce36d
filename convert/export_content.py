"""What an export writes: for every tensor of the released format, from where and in which dtype."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from convert import released_format
from convert.released_format import ReleasedTensor
from convert.safetensors_writer import SCALE_SUFFIX, OutTensor
from glm5next_jax.checkpoint.encodings import Fp8Blocks
from glm5next_jax.checkpoint.planning import Entry, Piece, Plan
from glm5next_jax.checkpoint.safetensors_header import TensorInfo
from glm5next_jax.checkpoint.source import Source
from glm5next_jax.errors import CheckpointError, Failure

ExportDtype = Literal["keep", "bfloat16", "fp8"]

FP8, BF16, F32 = "F8_E4M3", "BF16", "F32"


@dataclasses.dataclass(frozen=True)
class Weight:
    """A tensor of the text model to be written.

    Attributes:
      tensor: what is written under the weight's name: numbers, or codes.
      entry: the stored weight that has it, as one of its parts.
      row: its first row there.
      matrix: its rows and columns.
      block: of FP8 that is written; None for numbers.
      copied: of FP8 that stays as it is: row and column, in the stored factors, of each factor.
    """

    tensor: OutTensor
    entry: Entry
    row: int
    matrix: tuple[int, int]
    block: tuple[int, int] | None = None
    copied: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def grid(self) -> tuple[int, int]:
        assert self.block is not None
        return (
            math.ceil(self.matrix[0] / self.block[0]),
            math.ceil(self.matrix[1] / self.block[1]),
        )


class Content:
    """What the files will hold.

    Attributes:
      tensors: everything to be written, in order; factors right behind their codes.
      weights: those of the text model, by the name of the numbers or codes.
      carried: the stored tensors of vision and MTP, by the name to be written.
      block: the FP8 block that the config states.

    Raises:
      CheckpointError: the stored tensors do not fit the model.
      ValueError: a model with smear.
    """

    def __init__(self, source: Source, dtype: ExportDtype, carried: Iterable[TensorInfo]):
        released = released_format.released_tensors(source.config)
        specs = source.specs("float32")  # none FP8: what is coded has an encoding
        plan = source.plan(specs)
        with source.leaves(specs, check_finite=False) as reader:
            reader.finish()  # a head that is said to be tied must be
        self.block = _block_of(plan)
        self.tensors: list[OutTensor] = []
        self.weights: dict[str, Weight] = {}
        pieces: dict[str, list[tuple[Piece, Entry]]] = collections.defaultdict(list)
        for entry in plan.entries:
            for piece in entry.pieces:
                pieces[piece.leaf].append((piece, entry))
        for of_leaf in pieces.values():
            of_leaf.sort(key=lambda item: item[0].target_start)
        for each in released:
            at = bisect.bisect_right(
                pieces[each.leaf], each.start, key=lambda item: item[0].target_start
            )
            piece, entry = pieces[each.leaf][at - 1]
            row = piece.source_start + each.start - piece.target_start
            self._add(_weight(each, entry, row, dtype, self.block))
        self.carried: dict[str, TensorInfo] = {}
        failures = []
        for info in carried:
            name = released_format.released_name(info.name)
            if self.carried.setdefault(name, info) is not info:
                found = f"a second {name} (also in {self.carried[name].file})"
                failures.append(Failure("duplicate", info.file, info.name, found, "one"))
            self.tensors.append(OutTensor(name, info.dtype, info.shape))
        if failures:
            raise CheckpointError(f"{source.path}: cannot be exported", failures)
        self.dtype = source.config.dtype if dtype == "keep" else "bfloat16"
        self._config = source.config

    def _add(self, weight: Weight) -> None:
        name = weight.tensor.name
        self.weights[name] = weight
        self.tensors.append(weight.tensor)
        if weight.block is not None:
            self.tensors.append(OutTensor(name + SCALE_SUFFIX, F32, weight.grid))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def hf_config(self) -> dict[str, Any]:
        """`config.json`."""
        kinds = [(t.name, t.dtype, len(t.shape)) for t in self.tensors]
        return released_format.hf_config(self._config, self.dtype, kinds, self.block)


def _block_of(plan: Plan) -> tuple[int, int]:
    """The block of the source's FP8: what its config states, unless none is stored like that."""
    found = Counter(
        entry.encoding.block for entry in plan.entries if isinstance(entry.encoding, Fp8Blocks)
    )
    if not found or plan.weight_block_size in found:
        return plan.weight_block_size
    return found.most_common(1)[0][0]


def _weight(
    released: ReleasedTensor, entry: Entry, row: int, dtype: ExportDtype, block: tuple[int, int]
) -> Weight:
    """What becomes of one tensor."""
    matrix, encoding = released.matrix, entry.encoding

    def weight(kind: str, *fp8: Any) -> Weight:
        return Weight(OutTensor(released.name, kind, released.shape), entry, row, matrix, *fp8)

    if isinstance(encoding, Fp8Blocks) and dtype != "bfloat16":
        height = entry.source.shape[-2]
        number, first = divmod(row, height)
        rows = _factors_of(first, matrix[0], block[0], encoding.block[0])
        columns = _factors_of(0, matrix[1], block[1], encoding.block[1])
        if rows is not None and columns is not None:
            above = number * encoding.scale.shape[-2]
            return weight(FP8, block, (tuple(above + at for at in rows), columns))
    if dtype == "fp8" and released.is_fp8:
        return weight(FP8, block)
    if dtype == "keep" and encoding is None:
        return weight(entry.source.dtype)
    return weight(F32 if released.is_float32 and dtype != "keep" else BF16)


@functools.lru_cache(maxsize=1024)
def _factors_of(first: int, size: int, block: int, stored: int) -> tuple[int, ...] | None:
    """Which stored factor each block of a part takes, along one dimension.

    Args:
      first, size: of the part.
      block: of the part's blocks, counted from its beginning.
      stored: size of the stored blocks.

    Returns:
      None where a block of the part lies in two stored ones.
    """
    factors = []
    for start in range(0, size, block):
        low, high = first + start, first + min(start + block, size) - 1
        if low // stored != high // stored:
            return None
        factors.append(low // stored)
    return tuple(factors)
