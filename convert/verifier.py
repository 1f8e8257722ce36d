"""Two checkpoints held against each other, weight by weight."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from convert import files
from convert.progress import Mode, Progress
from convert.released_format import without_paths
from convert.tree import indices
from glm5next_jax.checkpoint import planning, quantized
from glm5next_jax.checkpoint.assemble import StoredLeaves
from glm5next_jax.checkpoint.leaves import Index
from glm5next_jax.checkpoint.report import human_bytes
from glm5next_jax.checkpoint.safetensors_header import TensorInfo
from glm5next_jax.checkpoint.source import Source, open_source

_F8 = np.dtype(ml_dtypes.float8_e4m3fn)
_PIECE_BYTES = 16 << 20
# Half of the distance between neighbouring e4m3 numbers: relative to them, and near zero. A little
# more, since the factor and the quotient are rounded too.
_HALF_STEP = 2.0**-4 * (1 + 2.0**-20)
_HALF_SMALLEST = 2.0**-10 * (1 + 2.0**-20)


@dataclasses.dataclass(frozen=True)
class Difference:
    """What is not the same in two checkpoints.

    Attributes:
      name: leaf, tensor or file.
      text: what differs.
    """

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a comparison found.

    Attributes:
      differences: all of them; empty where the checkpoints agree.
      num_leaves, num_bytes: what was compared; bytes are those read of the source.
      num_rounded: leaves that are FP8 in one of the two alone, compared within its rounding.
      num_carried: tensors outside the model, compared byte for byte.
    """

    differences: tuple[Difference, ...]
    num_leaves: int
    num_bytes: int
    num_rounded: int
    num_carried: int

    def __str__(self) -> str:
        how = "bit for bit"
        if self.num_rounded:
            how += f" ({self.num_rounded} of them within the rounding to FP8)"
        same = "the same" if not self.differences else f"{len(self.differences)} differences"
        return (
            f"{self.num_leaves} leaves, {human_bytes(self.num_bytes)}, compared {how}, and "
            f"{self.num_carried} unused tensors byte for byte: {same}"
        )


def verify(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], *, mode: Mode = "auto"
) -> Verdict:
    """Compares a checkpoint with what was made of it; reads both once, piece by piece.

    Either may be released or converted. A leaf is compared in the dtype that the destination holds
    it in: the source's numbers, rounded once to it, must be there bit for bit. Codes are compared
    as codes where both have them. Where the destination alone is in FP8, each of its numbers must
    be among the nearest to the source's: within half a step at its factor.

    Raises:
      CheckpointError: either cannot be read, or is incomplete.
      ValueError: an unsupported config.
    """
    with open_source(source) as first, open_source(destination) as second:
        theirs, ours = second.specs("keep"), first.specs("keep")
        rounded = {
            leaf
            for leaf, spec in theirs.items()
            if spec.dtype == _F8 and not _same(ours, theirs, planning.scale_leaf(leaf))
        }
        factors = {planning.scale_leaf(leaf) for leaf in rounded}
        wanted = {
            leaf: jax.ShapeDtypeStruct(spec.shape, np.float32) if leaf in rounded else spec
            for leaf, spec in theirs.items()
            if leaf not in factors
        }
        with (
            first.leaves(wanted, check_finite=False) as mine,
            second.leaves(theirs, check_finite=False) as found,
            first.carried() as (reader, carried),
            second.carried() as (other_reader, others),
        ):
            comparison = _Comparison(second, found, rounded)
            total = sum(
                mine.source_bytes(leaf, [index])
                for leaf in wanted
                for index in _pieces(theirs[leaf])
            )
            num_carried = sum(info.num_bytes for info in carried)
            with Progress(total + num_carried, "comparing", mode) as progress:
                mine.progress = progress.update
                for leaf in mine.order:
                    progress.at(leaf)
                    comparison.leaf(leaf, mine, theirs[leaf])
                comparison.carried(reader, carried, other_reader, others, progress)
        comparison.small_files(first, second)
    return Verdict(tuple(comparison.differences), len(wanted), total, len(rounded), len(carried))


class _Comparison:
    """Collects differences with one checkpoint, `second`, whose leaves are read as they rest."""

    def __init__(self, second: Source, found: StoredLeaves, rounded: set[str]):
        self.differences: list[Difference] = []
        self._second, self._found, self._rounded = second, found, rounded

    def note(self, name: str, text: str) -> None:
        self.differences.append(Difference(name, text))

    def leaf(self, leaf: str, mine: StoredLeaves, spec: Any) -> None:
        """Compares one leaf, piece by piece."""
        count, first, worst = 0, None, 0.0
        for index in _pieces(spec):
            expected = mine.read(leaf, [index])[0]
            values = self._found.read(leaf, [index])[0]
            if leaf in self._rounded:
                values, allowed = self._decoded(leaf, index, values)
                wrong = ~(np.abs(expected - values) <= allowed)
            else:
                wrong = _bits(expected) != _bits(values)
            if not wrong.any():
                continue
            where = np.argwhere(wrong)
            first = first or [int(n) + start for n, (start, _) in zip(where[0], index, strict=True)]
            count += len(where)
            with np.errstate(invalid="ignore"):
                apart = np.abs(
                    expected[wrong].astype(np.float64) - values[wrong].astype(np.float64)
                )
            worst = max(worst, float(np.nan_to_num(apart, nan=np.inf).max()))
        if count:
            size = math.prod(spec.shape)
            text = f"{count} of {size} values differ, by up to {worst:.3g}; the first at {first}"
            self.note(leaf, text)

    def _decoded(self, leaf: str, index: Index, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The float32 numbers of codes, and how far from each its origin may be."""
        shape, scale = self._found.shape(leaf), planning.scale_leaf(leaf)
        grid = self._found.shape(scale)
        stated = self._second.quantization.weight_block_size
        block = quantized.block_shape(shape, grid, stated)
        assert block is not None  # planned
        (start, stop), (_, columns) = index[-2:]
        rows = (start // block[0], math.ceil(stop / block[0]))
        factors = self._found.read(scale, [(*index[:-2], rows, (0, grid[-1]))])[0]
        origin = (start % block[0], 0)
        values = quantized.dequantize(codes, factors, np.float32, block=block, origin=origin)
        ones = np.full_like(codes, 1)
        factor = quantized.dequantize(ones, factors, np.float32, block=block, origin=origin)
        return values, np.abs(values) * _HALF_STEP + np.abs(factor) * _HALF_SMALLEST

    def carried(
        self,
        reader: Any,
        tensors: Sequence[TensorInfo],
        other_reader: Any,
        others: Sequence[TensorInfo],
        progress: Progress,
    ) -> None:
        """Compares the tensors that fill no leaf: the same ones, of the same bytes."""
        theirs = {info.name: info for info in others}
        for info in tensors:
            other = theirs.pop(info.name, None)
            if other is None:
                self.note(info.name, "is not there")
            elif (other.dtype, other.shape) != (info.dtype, info.shape):
                self.note(info.name, f"is {other}, expected {info}")
            else:
                progress.at(info.name)
                same = True
                for start in range(0, info.num_bytes, _PIECE_BYTES):
                    ours = np.empty(min(_PIECE_BYTES, info.num_bytes - start), np.uint8)
                    found = np.empty_like(ours)
                    reader.read_bytes(info, start, ours)
                    other_reader.read_bytes(other, start, found)
                    same = same and np.array_equal(ours, found)
                    progress.update(ours.nbytes)
                if not same:
                    self.note(info.name, "has other bytes")
        for name in theirs:
            self.note(name, "is not in the source")

    def small_files(self, first: Source, second: Source) -> None:
        """Compares the configurations, and the files that are copied."""
        ours, theirs = (without_paths(each.config.to_hf()) for each in (first, second))
        for config in (ours, theirs):
            config.pop("quantization_config", None)
        fields = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        if fields:
            self.note("config.json", f"other values of {', '.join(fields)}")
        names = set(first.small_files()) - {"config.json"}
        for name in sorted(names):
            path = second.path / name
            if not path.exists():
                self.note(name, "is not there")
            elif files.crc32_of(path) != files.crc32_of(first.path / name):
                self.note(name, "has other bytes")


def _same(ours: Mapping[str, Any], theirs: Mapping[str, Any], leaf: str) -> bool:
    return leaf in ours and ours[leaf].shape == theirs[leaf].shape


def _pieces(spec: Any) -> Iterator[Index]:
    return indices(tuple(spec.shape), np.dtype(spec.dtype).itemsize)


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}")
