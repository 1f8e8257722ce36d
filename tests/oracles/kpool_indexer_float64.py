"""The k-pool indexer in NumPy float64, from whole histories; it knows no states and no cuts."""

import numpy as np


def _wide(x):
    return np.asarray(x, np.float64)


def pool_keys(k, gate, ape):
    """Keys [n // P, dI] of the finished pools of one row's history k, gate [n, dI]."""
    P = len(ape)
    keys = []
    for p in range(len(k) // P):
        members = slice(p * P, (p + 1) * P)
        logits = _wide(gate[members]) + _wide(ape)
        mass = np.exp(logits - logits.max(0))
        keys.append((mass / mass.sum(0) * _wide(k[members])).sum(0))
    return np.array(keys).reshape(-1, k.shape[1])


def unfinished(k, gate, P):
    """The k and gate rows [P-1, 2, dI] of the unfinished pool of a history, then zeros."""
    tail = np.zeros((P - 1, 2, k.shape[1]), k.dtype)
    first = len(k) // P * P
    for slot, s in enumerate(range(first, len(k))):
        tail[slot, 0], tail[slot, 1] = k[s], gate[s]
    return tail


def scores(q, head_weights, keys):
    """[n] scores of one query q [I, dI], head_weights [I] for keys [n, dI]."""
    q, keys = _wide(q), _wide(keys)
    heads = np.maximum(q @ keys.T / np.sqrt(q.shape[1]), 0.0)  # [I, n]
    return _wide(head_weights) @ heads


def select(row_scores, position, P, count):
    """[count] ids for the query at `position`, best first, lowest id among equals, then -1."""
    candidates = [p for p in range(len(row_scores)) if P * (p + 1) - 1 <= position]
    best = sorted(candidates, key=lambda p: (-row_scores[p], p))[:count]
    return np.array(best + [-1] * (count - len(best)))
