"""NVFP4: two 4-bit codes (e2m1) per byte, one float8_e4m3 factor per group of 16 weights of a row.

A second factor, float32, belongs to the whole tensor. ModelOpt stores it as a factor
(`weight_scale_2`), compressed-tensors its reciprocal (`weight_global_scale`). The low half of a
byte holds the even column.
"""

from __future__ import annotations

import numpy as np

GROUP = 16  # weights of a row that share one factor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([sign * x for sign in (1.0, -1.0) for x in _MAGNITUDES], np.float32)
# The two numbers of every byte: [256, 2].
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1)

# Elements that are worked on at once: few enough that they stay in a core's cache.
_STEP_ELEMENTS = 1 << 18


def dequantize(
    packed: np.ndarray,
    scale: np.ndarray,
    global_scale: float | np.float32,
    dtype: np.dtype | type,
    *,
    is_reciprocal: bool = False,
    first: int = 0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Weights of NVFP4 codes: code x (factor x tensor's factor), float32, rounded once to `dtype`.

    Args:
      packed: [rows, groups * 8], uint8: the codes of whole groups.
      scale: [rows, groups], float8_e4m3fn.
      global_scale: the tensor's factor, taken as float32.
      dtype: bfloat16 (round to nearest even) or float32.
      is_reciprocal: whether factors are divided by `global_scale` instead.
      first: the column of the first group with which the result begins.
      out: array [rows, columns] of `dtype` to write into; by default all columns from `first` on.

    Returns:
      [rows, columns] in `dtype`; NaN where a factor is NaN.

    Raises:
      ValueError: shapes do not belong together.
    """
    rows, groups = scale.shape
    if packed.shape != (rows, groups * GROUP // 2):
        raise ValueError(
            f"{packed.shape=} does not give {GROUP} codes per factor of {scale.shape=}"
        )
    if out is None:
        out = np.empty((rows, groups * GROUP - first), dtype)
    columns = slice(first, first + out.shape[1])
    if len(out) != rows or columns.stop > groups * GROUP:
        raise ValueError(f"{out.shape=} from column {first=} on is not within {scale.shape=}")
    step = max(1, _STEP_ELEMENTS // max(groups * GROUP, 1))
    with np.errstate(all="ignore"):  # what is not finite is for the caller to report
        for start in range(0, rows, step):
            part = slice(start, start + step)
            factors = scale[part].astype(np.float32)
            if is_reciprocal:
                factors /= np.float32(global_scale)
            else:
                factors *= np.float32(global_scale)
            values = np.take(_PAIRS, packed[part], axis=0).reshape(*factors.shape, GROUP)
            values *= factors[..., None]
            values = values.reshape(len(factors), groups * GROUP)
            np.copyto(out[part], values[:, columns], casting="unsafe")
    return out
