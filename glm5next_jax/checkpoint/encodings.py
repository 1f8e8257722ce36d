"""How the numbers of a weight are stored, and everything about reading them that depends on it.

What is stored decides the encoding, never a config: `recognition.encoding_of`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from etils import epath

from glm5next_jax.checkpoint import leaves, nvfp4, quantized
from glm5next_jax.checkpoint.leaves import Part
from glm5next_jax.checkpoint.safetensors_header import DTYPES, TensorInfo
from glm5next_jax.errors import Failure


class TensorReader(Protocol):
    """What leaves are read from."""

    @property
    def path(self) -> epath.Path: ...

    def granularity(self, info: TensorInfo) -> tuple[int, int]:
        """Rows of one matrix, and rows at whose multiples within it a cut reads nothing twice."""
        ...

    def read_rectangle(
        self, info: TensorInfo, width: int, start: int, column: int, out: np.ndarray
    ) -> None:
        """Fills out [rows, columns], of the stored dtype, with a part of a tensor that is taken as
        a matrix `width` columns wide."""
        ...


class Encoding(abc.ABC):
    """An encoding, with the further tensors that it takes. Immutable and hashable.

    `source` is the tensor of the codes. Rows and columns are those of the weight, as a matrix
    (`leaves.as_matrix`).

    Attributes:
      title: what to call it.
    """

    title: ClassVar[str]

    @property
    def companions(self) -> tuple[TensorInfo, ...]:
        """The stored tensors beside `source`."""
        return ()

    def shape(self, source: TensorInfo) -> tuple[int, ...]:
        """The shape of the weight."""
        return source.shape

    def alignment(self, source: TensorInfo) -> tuple[int, int]:
        """Rows of one matrix, and rows at whose multiples within it a cut costs nothing.

        `fill` is called with rows of one matrix.
        """
        return max(leaves.as_matrix(self.shape(source))[0], 1), 1

    @abc.abstractmethod
    def stored_bytes(self, source: TensorInfo, start: int, stop: int, columns: int) -> int:
        """What some columns of rows [start, stop) take in the file, factors included.

        The columns are taken to begin where codes and groups do, and the one factor of a whole
        tensor is not counted.
        """

    @abc.abstractmethod
    def fill(
        self,
        reader: TensorReader,
        source: TensorInfo,
        start: int,
        parts: Sequence[Part],
        check_finite: bool,
    ) -> tuple[int, int] | Failure:
        """Reads rows from `start` on, as many as the parts have, into adjoining ranges of columns.

        Returns:
          How many values are not finite, and how many codes among their causes are NaN; or what
          makes the whole tensor unusable. (0, 0) unless `check_finite`.
        """

    @abc.abstractmethod
    def describe(self, num_values: int, num_codes: int) -> str:
        """The counts of `fill` in words."""


@dataclasses.dataclass(frozen=True)
class Plain(Encoding):
    """Each element is a number, or an FP8 code that stays one."""

    title = "plain"

    def stored_bytes(self, source, start, stop, columns):
        return (stop - start) * columns * DTYPES[source.dtype].itemsize

    def fill(self, reader, source, start, parts, check_finite):
        dtype, width = DTYPES[source.dtype], leaves.as_matrix(source.shape)[1]
        if len(parts) == 1 and parts[0].out.dtype == dtype:
            reader.read_rectangle(source, width, start, parts[0].column, parts[0].out)
        else:
            stored = np.empty(_extent(parts), dtype)
            reader.read_rectangle(source, width, start, parts[0].column, stored)
            for part, values in _split(parts, stored):
                with np.errstate(over="ignore", invalid="ignore"):  # counted, and reported by name
                    np.copyto(part.out, values, casting="unsafe")
        if not check_finite:
            return 0, 0
        count = sum(leaves.non_finite_count(part.out) for part in parts)
        return count, count if dtype.itemsize == 1 else 0

    def describe(self, num_values, num_codes):
        return f"{num_codes} NaN codes" if num_codes else _not_finite(num_values)


PLAIN = Plain()


@dataclasses.dataclass(frozen=True)
class Fp8Blocks(Encoding):
    """float8_e4m3 codes [..., rows, columns] times one factor per block; see `quantized`.

    Attributes:
      scale: the factors, [..., row blocks, column blocks].
      block: rows and columns of one block.
    """

    scale: TensorInfo
    block: tuple[int, int]

    title = "F8_E4M3"

    @property
    def companions(self):
        return (self.scale,)

    def alignment(self, source):
        return source.shape[-2], self.block[0]

    def stored_bytes(self, source, start, stop, columns):
        height, num_rows = source.shape[-2], 0
        for low, high in leaves.cuts(start, stop, height, height, self.block[0]):
            first, last = self._factor_rows(source, low, high)
            num_rows += last - first
        width = self.scale.shape[-1] * DTYPES[self.scale.dtype].itemsize
        return (stop - start) * columns + num_rows * width

    def fill(self, reader, source, start, parts, check_finite):
        rows, columns = _extent(parts)
        codes = np.empty((rows, columns), DTYPES[source.dtype])
        reader.read_rectangle(source, source.shape[-1], start, parts[0].column, codes)
        first, last = self._factor_rows(source, start, start + rows)
        width = self.scale.shape[-1]
        factors = np.empty((last - first, width), DTYPES[self.scale.dtype])
        reader.read_rectangle(self.scale, width, first, 0, factors)
        factors = factors.astype(np.float32, copy=False)
        row = start % source.shape[-2] % self.block[0]
        num_values = num_codes = 0
        for part, own in _split(parts, codes):
            values, nans = self._decode(own, factors, row, part, check_finite)
            num_values += values
            num_codes += nans
        return num_values, num_codes

    def _decode(
        self, codes: np.ndarray, factors: np.ndarray, row: int, part: Part, check_finite: bool
    ) -> tuple[int, int]:
        """Writes the numbers that codes mean, which begin in this row of a block."""
        columns = self.block[1]
        first, last = part.column // columns, -(-(part.column + codes.shape[1]) // columns)
        own = factors[:, first:last]
        quantized.dequantize(
            codes,
            own,
            part.out.dtype,
            block=self.block,
            origin=(row, part.column % columns),
            out=part.out,
        )
        if not check_finite:
            return 0, 0
        num_codes = quantized.count_nan_codes(codes)
        with np.errstate(over="ignore", invalid="ignore"):
            largest = (np.abs(own).max(initial=0) * quantized.MAX_VALUE).astype(part.out.dtype)
        if num_codes == 0 and np.isfinite(largest):  # then so is every product
            return 0, 0
        return leaves.non_finite_count(part.out), num_codes

    def _factor_rows(self, source: TensorInfo, start: int, stop: int) -> tuple[int, int]:
        """Rows of the factors, as one matrix, of rows [start, stop) within one matrix of codes."""
        matrix, row = divmod(start, source.shape[-2])
        first, rows = matrix * self.scale.shape[-2], self.block[0]
        return first + row // rows, first - (-(row + stop - start) // rows)

    def describe(self, num_values, num_codes):
        return f"{_not_finite(num_values)} after scaling ({num_codes} NaN codes)"


@dataclasses.dataclass(frozen=True)
class Nvfp4(Encoding):
    """Two codes per byte [..., rows, columns / 2], a factor per group, one for all; see `nvfp4`.

    Attributes:
      scale: the factors of groups, [..., rows, columns / 16].
      global_scale: the factor of the tensor, [] or [1].
      is_reciprocal: whether that divides.
    """

    scale: TensorInfo
    global_scale: TensorInfo
    is_reciprocal: bool

    title = "NVFP4"

    @property
    def companions(self):
        return self.scale, self.global_scale

    def shape(self, source):
        return (*source.shape[:-1], 2 * source.shape[-1])

    def stored_bytes(self, source, start, stop, columns):
        return (stop - start) * (math.ceil(columns / 2) + math.ceil(columns / nvfp4.GROUP))

    def fill(self, reader, source, start, parts, check_finite):
        rows, columns = _extent(parts)
        column, group, width = parts[0].column, nvfp4.GROUP, 2 * source.shape[-1]
        first, last = column // group, -(-(column + columns) // group)
        half = group // 2
        packed = np.empty((rows, (last - first) * half), DTYPES[source.dtype])
        reader.read_rectangle(source, width // 2, start, first * half, packed)
        scale = np.empty((rows, last - first), DTYPES[self.scale.dtype])
        reader.read_rectangle(self.scale, width // group, start, first, scale)
        whole = np.empty((1, 1), DTYPES[self.global_scale.dtype])
        reader.read_rectangle(self.global_scale, 1, 0, 0, whole)
        factor = whole.item()
        for part in parts:
            low = part.column // group - first
            high = -(-(part.column + part.out.shape[1]) // group) - first
            nvfp4.dequantize(
                packed[:, low * half : high * half],
                scale[:, low:high],
                factor,
                part.out.dtype,
                is_reciprocal=self.is_reciprocal,
                first=part.column % group,
                out=part.out,
            )
        if not check_finite:
            return 0, 0
        if not (0 < factor < math.inf):
            info = self.global_scale
            return Failure("value", info.file, info.name, f"the factor {factor}", "a positive one")
        num_values = sum(leaves.non_finite_count(part.out) for part in parts)
        return num_values, quantized.count_nan_codes(scale) if num_values else 0

    def describe(self, num_values, num_codes):
        return f"{_not_finite(num_values)} after scaling ({num_codes} NaN factors)"


def _not_finite(count: int) -> str:
    return f"{count} values that are NaN or infinite"


def _extent(parts: Sequence[Part]) -> tuple[int, int]:
    """Rows and columns of adjoining parts together."""
    return len(parts[0].out), sum(part.out.shape[1] for part in parts)


def _split(parts: Sequence[Part], array: np.ndarray):
    """Each part with its columns of an array that begins with the first part's."""
    for part in parts:
        first = part.column - parts[0].column
        yield part, array[:, first : first + part.out.shape[1]]
