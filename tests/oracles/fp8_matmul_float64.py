"""FP8 weights in full, and the matmul with one, in NumPy float64."""

import numpy as np


def weight_in_full(codes, scale, dtype):
    """codes [..., F, D] times the factor of their 128 x 128 block, rounded once to dtype."""
    full, factors = np.empty(codes.shape, np.float64), np.asarray(scale, np.float64)
    F, D = codes.shape[-2:]
    for i in range(0, F, 128):
        for j in range(0, D, 128):
            factor = factors[..., i // 128, j // 128][..., None, None]
            block = codes[..., i : i + 128, j : j + 128]
            full[..., i : i + 128, j : j + 128] = block.astype(np.float64) * factor
    return full.astype(np.float32).astype(dtype)


def fp8_matmul(x, weight, scale):
    """[..., F] of x [..., D] and weight [F, D]."""
    full = weight_in_full(weight, scale, x.dtype).astype(np.float64)
    return np.asarray(x, np.float64) @ full.T


def gradient(x, weight, scale, out_gradient):
    """The gradient of sum(out * out_gradient) with respect to x."""
    full = weight_in_full(weight, scale, x.dtype).astype(np.float64)
    return np.asarray(out_gradient, np.float64) @ full
