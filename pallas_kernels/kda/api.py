"""The public KDA ops: what they compute, what they accept, and which backends have them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import check_array, dispatch
from pallas_kernels.gradients import with_gradients_of
from pallas_kernels.kda import (
    pallas_mosaic_tpu,
    pallas_mosaic_tpu_recurrent,
    reference,
    xla,
)


def _heads_apart(backend: Callable) -> Callable:
    """A backend that takes [B, T, H, K], for callers with [B, T, H * K] too."""

    @functools.wraps(backend)
    def run(q, k, v, gate_logits, beta_logits, *rest, **options):
        heads = beta_logits.shape
        o, state = backend(
            *(x.reshape(*heads, -1) for x in (q, k, v, gate_logits)), beta_logits, *rest, **options
        )
        return o.reshape(v.shape), state

    return run


_chunk_in_xla = _heads_apart(xla.chunk_kda)
_recurrent_in_xla = _heads_apart(xla.recurrent_kda)

CHUNK_BACKENDS = {
    "reference": _heads_apart(reference.chunk_kda),
    "xla": _chunk_in_xla,
    "pallas_mosaic_tpu": with_gradients_of(_chunk_in_xla, pallas_mosaic_tpu.chunk_kda),
}
RECURRENT_BACKENDS = {
    "reference": _heads_apart(reference.recurrent_kda),
    "xla": _recurrent_in_xla,
    "pallas_mosaic_tpu": with_gradients_of(
        _recurrent_in_xla, pallas_mosaic_tpu_recurrent.recurrent_kda
    ),
}


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
            q, k, v and gate_logits may all come with heads side by side, [B, T, H * K] as
            projections give them, and o is then [B, T, H * V]: where the two forms have different
            layouts, as on a TPU, neither is copied into the other.
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
        o [B, T, H, V], or [B, T, H * V], in v.dtype, and the state after the last valid token,
        [B, H, K, V] float32.

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
    tokens, values = ("B", "T", "H", "K"), ("B", "T", "H", "V")
    state = (op, "initial_state", initial_state, ("B", "H", "K", "V"), sizes, jnp.float32)
    if getattr(q, "ndim", None) == 3:
        check_array(op, "beta_logits", beta_logits, tokens[:3], sizes)
        check_array(*state)
        tokens, values = ("B", "T", "H * K"), ("B", "T", "H * V")
        sizes |= {f"H * {d}": sizes["H"] * sizes[d] for d in ("K", "V")}
    check_array(op, "q", q, tokens, sizes)
    check_array(op, "k", k, tokens, sizes)
    check_array(op, "v", v, values, sizes)
    check_array(op, "gate_logits", gate_logits, tokens, sizes)
    check_array(op, "beta_logits", beta_logits, ("B", "T", "H"), sizes)
    check_array(op, "A_log", A_log, ("H",), sizes, jnp.float32)
    check_array(op, "dt_bias", dt_bias, (sizes["H"] * sizes["K"],), sizes, jnp.float32)
    check_array(*state)
    if num_valid is not None:
        check_array(op, "num_valid", num_valid, ("B",), sizes, jnp.int32)
    if sizes["T"] < 1:
        raise ValueError(f"{op}: {q.shape=} has no tokens, expected T >= 1")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"{op}: {lower_bound=}, expected a negative number or None")
