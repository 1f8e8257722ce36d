"""The short convolution in NumPy float64, written from the equation alone."""

import numpy as np


def short_conv(x, weight, conv_state, num_valid=None):
    """Outputs [B, T, C] in float64, and the new state [B, W - 1, C] in the inputs' dtype."""
    B, T, _ = x.shape
    W = weight.shape[1]
    y, new_state = np.zeros(x.shape), np.zeros_like(conv_state)
    for b in range(B):
        n = T if num_valid is None else int(num_valid[b])
        history = list(conv_state[b])
        for t in range(n):
            history.append(x[b, t])
            window = np.stack(history[-W:]).astype(np.float64)  # [W, C], oldest first
            mixed = sum(weight[:, j].astype(np.float64) * window[j] for j in range(W))
            y[b, t] = mixed / (1.0 + np.exp(-mixed))
        for i in range(W - 1):
            new_state[b, i] = history[len(history) - (W - 1) + i]
    return y, new_state
