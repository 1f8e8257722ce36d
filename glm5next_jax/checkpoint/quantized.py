"""Block-scaled FP8: one float8_e4m3 code per weight and one float32 factor per block of weights.

The released FP8 checkpoint stores `X.weight` with `X.weight_scale_inv` of shape
[ceil(rows / 128), ceil(columns / 128)]; despite its name the factor multiplies (model spec,
section 14).
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

BLOCK_SHAPE = (128, 128)

# Every code's value, NaN for 0x7f and 0xff: a look-up is several times faster than astype.
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def block_shape(
    shape: tuple[int, ...], grid: tuple[int, ...], configured: tuple[int, int] = BLOCK_SHAPE
) -> tuple[int, int] | None:
    """Rows and columns of one block of a weight of `shape` whose factors have shape `grid`.

    The configured block applies wherever it gives this grid, its last blocks cut off at the edge.
    Otherwise the grid itself decides, if it divides the weight into equal squares, or is a single
    block. Other divisions are refused: a transposed grid would pass as one.

    Args:
      shape: shape of the weight, [..., rows, columns].
      grid: shape of its factors, [..., row blocks, column blocks].
      configured: `quantization_config.weight_block_size` of the checkpoint.

    Returns:
      Rows and columns per block, or None if the grid does not belong to the weight.
    """
    if len(shape) < 2 or len(grid) != len(shape) or grid[:-2] != shape[:-2]:
        return None
    matrix, blocks = shape[-2:], grid[-2:]
    if blocks == tuple(math.ceil(n / b) for n, b in zip(matrix, configured, strict=True)):
        return configured
    if min(blocks) < 1 or any(n % b for n, b in zip(matrix, blocks, strict=True)):
        return None
    rows, columns = (n // b for n, b in zip(matrix, blocks, strict=True))
    return (rows, columns) if rows == columns or blocks == (1, 1) else None


def dequantize(
    codes: np.ndarray,
    scale: np.ndarray,
    dtype: np.dtype | type,
    *,
    block: tuple[int, int] = BLOCK_SHAPE,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Weights of FP8 codes: the float32 product of code and factor, rounded once to `dtype`.

    Args:
      codes: [..., rows, columns], uint8 or float8_e4m3fn.
      scale: [..., row blocks, column blocks]; used in float32.
      dtype: bfloat16 (round to nearest even) or float32 (the product itself).
      block: rows and columns of one block; the last blocks may be partial.
      out: array of codes' shape and of `dtype` to write into.

    Returns:
      [..., rows, columns] in `dtype`; NaN where a code is NaN.

    Raises:
      ValueError: `scale` does not have one factor per block.
    """
    codes = codes.view(np.uint8)
    grid = tuple(math.ceil(n / b) for n, b in zip(codes.shape[-2:], block, strict=True))
    if codes.shape[:-2] + grid != scale.shape:
        raise ValueError(f"{scale.shape=} does not give one factor per {block=} of {codes.shape=}")
    if out is None:
        out = np.empty(codes.shape, dtype)
    scale = scale.astype(np.float32)
    rows, columns = block
    with np.errstate(over="ignore", invalid="ignore"):  # infinities are for the caller to report
        for lead in np.ndindex(codes.shape[:-2]):
            # One factor per column; repeat() ends in a whole block, which the edge may cut.
            factors = np.repeat(scale[lead], columns, axis=-1)[:, : codes.shape[-1]]
            for index, start in enumerate(range(0, codes.shape[-2], rows)):
                stop = start + rows
                out[lead][start:stop] = _VALUES[codes[lead][start:stop]] * factors[index]
    return out


def count_nan_codes(codes: np.ndarray) -> int:
    """How many e4m3 codes are NaN (0x7f and 0xff); the format has no infinities."""
    return int(np.count_nonzero((codes.view(np.uint8) & 0x7F) == 0x7F))
