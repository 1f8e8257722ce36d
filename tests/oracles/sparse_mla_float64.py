"""Sparse MLA in NumPy float64: a Python set of visible positions per query."""

import numpy as np


def _wide(x):
    return np.asarray(x, np.float64)


def visible(pool_ids, position, pool_size, always_select_tail):
    """The positions that the query at `position` sees."""
    seen = set()
    for p in pool_ids:
        if p >= 0:
            seen |= set(range(int(p) * pool_size, (int(p) + 1) * pool_size))
    if always_select_tail:
        seen |= set(range((position + 1) // pool_size * pool_size, position + 1))
    return sorted(s for s in seen if s <= position)


def sparse_mla(q, latent, pool_ids, length, *, pool_size, scale, always_select_tail, num_valid):
    """o [B, T, H, R] in float64; zeros at padding and where nothing is visible."""
    o = np.zeros(q.shape)
    for b in range(len(q)):
        for t in range(int(num_valid[b])):
            position = int(length[b]) + t
            seen = visible(pool_ids[b, t], position, pool_size, always_select_tail)
            if not seen:
                continue
            keys = _wide(latent[b, seen])  # [n, R]
            scores = _wide(q[b, t]) @ keys.T * scale  # [H, n]
            mass = np.exp(scores - scores.max(1, keepdims=True))
            o[b, t] = mass / mass.sum(1, keepdims=True) @ keys
    return o
