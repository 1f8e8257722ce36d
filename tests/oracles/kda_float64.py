"""KDA in NumPy float64, written from the equations alone: the top of the oracle ladder."""

import numpy as np


def gates(gate_logits, A_log, dt_bias, lower_bound):
    """Log decay [B, T, H, K] in float64."""
    H, K = gate_logits.shape[2:]
    a = np.asarray(gate_logits, np.float64) + np.asarray(dt_bias, np.float64).reshape(H, K)
    rate = np.exp(np.asarray(A_log, np.float64))[:, None]
    if lower_bound is None:
        return -rate * np.logaddexp(0.0, a)
    with np.errstate(
        over="ignore"
    ):  # exp overflows to inf for a very negative logit: the gate is 0
        return lower_bound / (1.0 + np.exp(-rate * a))


def kda(
    q,
    k,
    v,
    gate_logits,
    beta_logits,
    A_log,
    dt_bias,
    initial_state,
    *,
    lower_bound,
    num_valid=None,
    scale=None,
):
    """Outputs [B, T, H, V] and the states after every token [B, T, H, K, V], float64."""
    raw = (q, k, v, beta_logits, initial_state)
    q, k, v, beta_logits, state = (np.asarray(x, np.float64) for x in raw)
    B, T, H, K = q.shape
    scale = 1.0 / np.sqrt(K) if scale is None else scale
    g = gates(gate_logits, A_log, dt_bias, lower_bound)
    q = scale * q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6)
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    beta = 1.0 / (1.0 + np.exp(-beta_logits))
    num_valid = np.full(B, T) if num_valid is None else np.asarray(num_valid)
    outputs, states = np.zeros((B, T, H, v.shape[-1])), np.zeros((B, T, *state.shape[1:]))
    for b in range(B):
        S = state[b]  # [H, K, V]
        for t in range(T):
            if t < num_valid[b]:
                S = np.exp(g[b, t])[:, :, None] * S
                error = v[b, t] - (k[b, t][:, None] @ S)[:, 0]
                S = S + k[b, t][:, :, None] * (beta[b, t][:, None] * error)[:, None, :]
                outputs[b, t] = (q[b, t][:, None] @ S)[:, 0]
            states[b, t] = S
    return outputs, states
