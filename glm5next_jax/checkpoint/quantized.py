"""Block-scaled FP8: one float8_e4m3 code per weight and one float32 factor per block of weights.

The released FP8 checkpoint stores `X.weight` with `X.weight_scale_inv` of shape
[ceil(rows / 128), ceil(columns / 128)]; despite its name the factor multiplies (model spec,
section 14).
"""

from __future__ import annotations

import math

import numpy as np

from pallas_kernels.dispatch import SCALE_BLOCK

BLOCK_SHAPE = (SCALE_BLOCK, SCALE_BLOCK)

MAX_VALUE = np.float32(448)  # the largest of a code

_SIGN_EXPONENT_MANTISSA = np.array(0x87F00000, np.uint32).view(np.int32)
_BIAS = np.float32(2.0 ** (127 - 7))

# Elements that are worked on at once: few enough that they stay in a core's cache.
_STEP_ELEMENTS = 1 << 18


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
    origin: tuple[int, int] = (0, 0),
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Weights of FP8 codes: the float32 product of code and factor, rounded once to `dtype`.

    Args:
      codes: [..., rows, columns], uint8 or float8_e4m3fn.
      scale: [..., row blocks, column blocks]; used in float32.
      dtype: bfloat16 (round to nearest even) or float32 (the product itself).
      block: rows and columns of one block; the last blocks may be partial.
      origin: row and column of the first code within its block, for codes cut out of larger ones.
      out: array of codes' shape and of `dtype` to write into.

    Returns:
      [..., rows, columns] in `dtype`; NaN where a code is NaN.

    Raises:
      ValueError: `scale` does not have one factor per block.
    """
    codes = codes.view(np.uint8)
    grid = tuple(
        math.ceil((first + n) / b)
        for first, n, b in zip(origin, codes.shape[-2:], block, strict=True)
    )
    if codes.shape[:-2] + grid != scale.shape:
        raise ValueError(f"{scale.shape=} does not give one factor per {block=} of {codes.shape=}")
    if out is None:
        out = np.empty(codes.shape, dtype)
    scale = scale.astype(np.float32)
    rows, columns = block
    num_rows, num_columns = codes.shape[-2:]
    step = max(1, _STEP_ELEMENTS // max(num_columns, 1))
    with np.errstate(over="ignore", invalid="ignore"):  # infinities are for the caller to report
        for lead in np.ndindex(codes.shape[:-2]):
            # One factor per column; the first and the last block may be cut.
            factors = np.repeat(scale[lead], columns, axis=-1)
            factors = factors[:, origin[1] : origin[1] + num_columns]
            start = 0
            while start < num_rows:
                index, row = divmod(origin[0] + start, rows)
                stop = min(start + step, start + rows - row, num_rows)
                product = _values(codes[lead][start:stop])
                product *= factors[index]
                np.copyto(out[lead][start:stop], product, casting="unsafe")
                start = stop
    return out


def _values(codes: np.ndarray) -> np.ndarray:
    """The float32 numbers of e4m3 codes [rows, columns].

    Sign, exponent and mantissa have the order that they have in float32. Put in its places they
    make the number times 2^(7 - 127), subnormal ones included, and a power of two multiplies
    exactly. This takes a third of the time of a look-up.
    """
    values = np.empty(codes.shape, np.float32)
    bits = values.view(np.int32)
    np.left_shift(codes.view(np.int8), 20, out=bits, dtype=np.int32)  # repeats the sign above
    np.bitwise_and(bits, _SIGN_EXPONENT_MANTISSA, out=bits)
    values *= _BIAS
    if count_nan_codes(codes):
        values[(codes & 0x7F) == 0x7F] = np.nan
    return values


def count_nan_codes(codes: np.ndarray) -> int:
    """How many e4m3 codes are NaN (0x7f and 0xff); the format has no infinities."""
    magnitude = codes.view(np.uint8) & 0x7F
    if magnitude.max(initial=0) < 0x7F:
        return 0
    return int(np.count_nonzero(magnitude == 0x7F))
