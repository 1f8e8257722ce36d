"""The grouped matmul and its gradients in NumPy float64, one group at a time."""

import numpy as np


def _wide(x):
    return np.asarray(x, np.float64)


def _groups(group_sizes):
    first = 0
    for e, size in enumerate(group_sizes):
        yield e, slice(first, first + int(size))
        first += int(size)


def grouped_matmul(x, weights, group_sizes):
    """[N, F]; zeros past the last group."""
    out = np.zeros((len(x), weights.shape[1]))
    for e, rows in _groups(group_sizes):
        out[rows] = _wide(x[rows]) @ _wide(weights[e]).T
    return out


def gradients(x, weights, group_sizes, out_gradient):
    """Gradients of sum(out * out_gradient) with respect to x and weights."""
    x_gradient, weight_gradient = np.zeros(x.shape), np.zeros(weights.shape)
    for e, rows in _groups(group_sizes):
        x_gradient[rows] = _wide(out_gradient[rows]) @ _wide(weights[e])
        weight_gradient[e] = _wide(out_gradient[rows]).T @ _wide(x[rows])
    return x_gradient, weight_gradient
