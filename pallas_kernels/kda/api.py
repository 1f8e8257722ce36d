"""The public KDA ops: what they compute, what they accept, and which backends have them."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import check_array, dispatch
from pallas_kernels.kda import reference, xla

CHUNK_BACKENDS = {"reference": reference.chunk_kda, "xla": xla.chunk_kda}
RECURRENT_BACKENDS = {"reference": reference.recurrent_kda, "xla": xla.recurrent_kda}


def chunk_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate_logits: jax.Array,
    beta_logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    initial_state: jax.Array,
    *,
    lower_bound: float | None,
    num_valid: jax.Array | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention over many tokens (Kimi Linear, arXiv 2510.26692; model spec, section 5).

    Everything in float32, with a = gate_logits + dt_bias:

        q_t <- scale q_t / sqrt(sum q_t^2 + 1e-6),   k_t <- k_t / sqrt(sum k_t^2 + 1e-6)
        beta_t = sigmoid(beta_logits_t)
        g_t = lower_bound sigmoid(exp(A_log) a_t),   without a bound -exp(A_log) softplus(a_t)
        S <- diag(exp(g_t)) S
        delta_t = beta_t (v_t - S^T k_t)
        S <- S + k_t delta_t^T
        o_t = S^T q_t

    Args:
        q, k: [B, T, H, K] floating, after convolution and SiLU, not normalised.
        v: [B, T, H, V] floating.
        gate_logits: [B, T, H, K] floating, the output of the gate projection before dt_bias.
        beta_logits: [B, T, H] floating.
        A_log: [H] float32.
        dt_bias: [H * K] float32.
        initial_state: [B, H, K, V] float32.
        lower_bound: bound of the log decay per token, < 0, or None for the softplus gate.
        num_valid: [B] int32 in 0..T, or None for T. Tokens at t >= num_valid[b] are padding, which
            may hold anything (NaN too): it changes no state and its outputs are zero. A row with 0
            keeps its state bit for bit.
        scale: factor on the normalised q; None means K ** -0.5.
        backend: a name in `pallas_kernels.dispatch.BACKENDS`, which never falls back, or None for
            the best that applies.

    Returns:
        o [B, T, H, V] in v.dtype, and the state after the last valid token, [B, H, K, V] float32.

    Raises:
        ValueError: an argument has a wrong rank, shape, dtype or value, or `backend` is no backend
            name.
        NotImplementedError: the named backend cannot do this.
    """
    op = "chunk_kda"
    arrays = (q, k, v, gate_logits, beta_logits, A_log, dt_bias, initial_state)
    _check(op, *arrays, lower_bound=lower_bound, num_valid=num_valid)
    options = {"lower_bound": lower_bound, "num_valid": num_valid, "scale": scale}
    return dispatch(op, CHUNK_BACKENDS, backend, *arrays, **options)


def recurrent_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate_logits: jax.Array,
    beta_logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    initial_state: jax.Array,
    *,
    lower_bound: float | None,
    num_valid: jax.Array | None = None,
    scale: float | None = None,
    return_states: bool = False,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`chunk_kda` for few tokens per row: the same equations, arguments and errors, one token after
    the other.

    With `return_states` the second result is the state after every token, [B, T, H, K, V] float32
    (after a padding token: the state after the last valid one), from which a rejected draft can be
    rolled back exactly.
    """
    op = "recurrent_kda"
    arrays = (q, k, v, gate_logits, beta_logits, A_log, dt_bias, initial_state)
    _check(op, *arrays, lower_bound=lower_bound, num_valid=num_valid)
    options = {"lower_bound": lower_bound, "num_valid": num_valid, "scale": scale}
    return dispatch(
        op, RECURRENT_BACKENDS, backend, *arrays, **options, return_states=return_states
    )


def _check(
    op: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate_logits: jax.Array,
    beta_logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    initial_state: jax.Array,
    *,
    lower_bound: float | None,
    num_valid: jax.Array | None,
) -> None:
    sizes: dict[str, int] = {}
    check_array(op, "q", q, ("B", "T", "H", "K"), sizes)
    check_array(op, "k", k, ("B", "T", "H", "K"), sizes)
    check_array(op, "v", v, ("B", "T", "H", "V"), sizes)
    check_array(op, "gate_logits", gate_logits, ("B", "T", "H", "K"), sizes)
    check_array(op, "beta_logits", beta_logits, ("B", "T", "H"), sizes)
    check_array(op, "A_log", A_log, ("H",), sizes, jnp.float32)
    check_array(op, "dt_bias", dt_bias, (sizes["H"] * sizes["K"],), sizes, jnp.float32)
    check_array(op, "initial_state", initial_state, ("B", "H", "K", "V"), sizes, jnp.float32)
    if num_valid is not None:
        check_array(op, "num_valid", num_valid, ("B",), sizes, jnp.int32)
    if sizes["T"] < 1:
        raise ValueError(f"{op}: {q.shape=} has no tokens, expected T >= 1")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"{op}: {lower_bound=}, expected a negative number or None")
