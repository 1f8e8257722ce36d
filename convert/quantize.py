"""Rounding weights to the released FP8 form: e4m3 codes, one float32 factor per block.

For a block with largest magnitude a:

    factor = max(float32(a / 448), 2^-126), and 1 where every weight is zero
    code   = float32(weight / factor) rounded to e4m3, ties to even

The lower bound is the smallest normal float32: devices take smaller factors for zero. It only
matters for blocks below 448 * 2^-126 = 5e-36, whose codes are then small or zero. A block that
holds a NaN or an infinity has a factor and codes that are NaN throughout.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from glm5next_jax.checkpoint import quantized

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)

_SMALLEST_FACTOR = np.float32(2.0**-126)
# Few enough elements that a step stays in a core's cache.
_STEP_ELEMENTS = 1 << 17

_SMALLEST_NORMAL = np.float32(2.0**-6)  # of e4m3
# Added to a float32 below 2^-6, it leaves no digits below 2^-9, the step of subnormal codes.
_SUBNORMAL_SHIFT = np.float32(2.0**14)
_DROPPED_BITS = 20  # float32 has 23 bits of mantissa, e4m3 has 3
_EXPONENT_OFFSET = np.uint32((127 - 7) << 3)
_NAN_CODE = np.uint8(0x7F)


def quantize(
    values: np.ndarray, block: tuple[int, int] = quantized.BLOCK_SHAPE
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and factors of a matrix; `quantized.dequantize` is the way back.

    Beside the result it holds one row of blocks in float32, and a step of some hundred kB.

    Args:
      values: [rows, columns], float32 or bfloat16.
      block: rows and columns of one block; the last blocks may be partial.

    Returns:
      (codes [rows, columns] float8_e4m3fn,
      factors [ceil(rows / block rows), ceil(columns / block columns)] float32).

    Raises:
      ValueError: not a matrix of these dtypes, or a block without elements.
    """
    is_bfloat16 = values.dtype == ml_dtypes.bfloat16
    if values.ndim != 2 or not (is_bfloat16 or values.dtype == np.float32):
        raise ValueError(f"{values.shape=} {values.dtype=}; expected a float32 or bfloat16 matrix")
    if min(block) < 1:
        raise ValueError(f"{block=}; expected two sizes of at least 1")
    num_rows, num_columns = values.shape
    rows, columns = block
    grid = math.ceil(num_rows / rows), math.ceil(num_columns / columns)
    codes, factors = np.empty(values.shape, FP8), np.empty(grid, np.float32)
    octets = codes.view(np.uint8)
    starts = np.arange(0, num_columns, columns)
    step = max(1, _STEP_ELEMENTS // max(num_columns, 1))
    for index in range(grid[0] if num_columns else 0):
        first, last = index * rows, min((index + 1) * rows, num_rows)
        strip = values[first:last]
        strip = _widened(strip) if is_bfloat16 else strip
        largest = np.maximum(strip.max(axis=0), -strip.min(axis=0))  # NaN where one is
        factors[index] = _factors(np.maximum.reduceat(largest, starts))
        spread = np.repeat(factors[index], columns)[:num_columns]
        for start in range(0, last - first, step):
            stop = min(start + step, last - first)
            quotients = strip[start:stop] / spread
            octets[first + start : first + stop] = _codes(quotients)
        bad = np.isnan(spread)
        if bad.any():
            octets[first:last, bad] = _NAN_CODE
    return codes, factors


def _widened(values: np.ndarray) -> np.ndarray:
    """float32 of bfloat16, by their bits."""
    bits = values.view(np.uint16).astype(np.uint32)
    np.left_shift(bits, np.uint32(16), out=bits)
    return bits.view(np.float32)


def _factors(largest: np.ndarray) -> np.ndarray:
    """Factors of blocks with these largest magnitudes."""
    finite = np.isfinite(largest)
    with np.errstate(under="ignore", invalid="ignore"):
        factors = np.maximum(largest / quantized.MAX_VALUE, _SMALLEST_FACTOR)
    factors[largest == 0] = 1
    factors[~finite] = np.nan
    return factors


def _codes(quotients: np.ndarray) -> np.ndarray:
    """e4m3 codes of float32 numbers up to 448 in magnitude, as uint8.

    ml_dtypes rounds the same way, in several times as long.
    """
    bits = quotients.view(np.uint32)
    signs = (bits >> np.uint32(24)).astype(np.uint8)
    signs &= np.uint8(0x80)
    magnitudes = np.abs(quotients)
    bits = magnitudes.view(np.uint32)
    # Half of what is dropped, less one where what stays is even: only then a tie rounds down.
    rounded = bits >> np.uint32(_DROPPED_BITS)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32((1 << (_DROPPED_BITS - 1)) - 1)
    rounded >>= np.uint32(_DROPPED_BITS)
    rounded -= _EXPONENT_OFFSET
    codes = rounded.astype(np.uint8)
    small = np.flatnonzero(magnitudes < _SMALLEST_NORMAL)  # few: 1/28672 of the largest, or less
    shifted = magnitudes.reshape(-1)[small] + _SUBNORMAL_SHIFT  # rounds as any addition does
    codes.reshape(-1)[small] = shifted.view(np.uint32) - _SUBNORMAL_SHIFT.view(np.uint32)
    codes |= signs
    return codes
