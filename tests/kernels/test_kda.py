"""KDA: the oracle ladder float64 -> reference -> xla, and the laws that every backend must keep."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import chunk_kda, recurrent_kda
from pallas_kernels.kda import xla
from tests.cases import KDA_LENGTHS, KDA_REGIMES, TOLERANCES, kda_inputs, relative_l2
from tests.oracles import kda_float64

OPS = {"chunk_kda": chunk_kda, "recurrent_kda": recurrent_kda}
PAIRS = [("chunk_kda", "xla"), ("recurrent_kda", "xla"), ("recurrent_kda", "reference")]
NAMES = "q k v gate_logits beta_logits A_log dt_bias initial_state".split()
STATIC = ("op", "backend", "lower_bound", "scale", "return_states")
B, H, K, V = 2, 2, 32, 16


def call(arguments, num_valid=None, *, op="chunk_kda", lower_bound=-5.0, backend="xla", **static):
    options = {"lower_bound": lower_bound, "backend": backend, **static}
    return OPS[op](*arguments, num_valid=num_valid, **options)


# Nearly all the time here is compiling, which takes a third of it without LLVM's optimisations;
# the formulas stay as they are. The hard case, the released head size and bfloat16 run optimised.
QUICK = {"xla_backend_optimization_level": 0}
run = jax.jit(call, static_argnames=STATIC, compiler_options=QUICK)
run_optimized = jax.jit(call, static_argnames=STATIC)


def errors(arguments, lower_bound, op, backend, num_valid=None, *, run=run, **static):
    """Relative errors of the outputs and of the final state against float64."""
    static["lower_bound"] = lower_bound
    o, state = run(arguments, num_valid, op=op, backend=backend, **static)
    want, states = kda_float64.kda(*arguments, num_valid=num_valid, **static)
    assert o.dtype == arguments[2].dtype and state.dtype == jnp.float32
    return relative_l2(o, want), relative_l2(state, states[:, -1])


def check(arguments, lower_bound, op, backend, num_valid=None, **static):
    output, state = errors(arguments, lower_bound, op, backend, num_valid, **static)
    assert output < TOLERANCES[op, arguments[0].dtype.name]
    assert state < TOLERANCES[f"{op}.states", "float32"]


def with_nan_padding(arguments, num_valid):
    for array, (row, n) in itertools.product(arguments[:5], enumerate(num_valid)):
        array[row, n:] = np.nan
    return arguments


@pytest.mark.parametrize(("op", "backend"), PAIRS)
@pytest.mark.parametrize("length", KDA_LENGTHS)
def test_lengths_match_float64(length, op, backend):
    check(*kda_inputs(B, length, H, K, V), op, backend)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
@pytest.mark.parametrize("regime", KDA_REGIMES)
def test_gate_regimes_match_float64(regime, op, backend):
    check(*kda_inputs(B, 130, H, K, V, regime), op, backend)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_released_head_size_and_another_scale_match_float64(op, backend, optimized):
    check(*kda_inputs(1, 70, 1, 128, 128), op, backend, run=run_optimized, scale=0.5)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_bfloat16_inputs_match_float64(op, backend, optimized):
    check(*kda_inputs(B, 70, H, 16, 32, dtype="bfloat16"), op, backend, run=run_optimized)


@pytest.mark.parametrize("noise", [0.0, 0.1], ids=["identical keys", "common plus noise"])
def test_hard_case_of_repeated_keys(noise, optimized):
    """The triangular system is far from the identity here: an inexact inverse is off by orders."""
    arguments, lower_bound = kda_inputs(1, 8192, 1, 32, 32, "slow")
    arguments[1] = (arguments[1][:, :1] + noise * arguments[1]).astype(np.float32)
    arguments[3][:] = -9.0
    arguments[4][:] = np.log(0.95 / 0.05)
    for op, backend in PAIRS:
        error = max(errors(arguments, lower_bound, op, backend, run=run_optimized))
        assert error < TOLERANCES[f"{op}.hard", "float32"]


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_padding_may_hold_nan_and_changes_nothing(op, backend):
    num_valid = np.array([70, 0, 1, 64, 33], np.int32)
    arguments, lower_bound = kda_inputs(5, 70, H, K, V)
    arguments[-1][1, 0, 0, 0] = -0.0  # a zero whose sign arithmetic would lose
    with_nan_padding(arguments, num_valid)
    with np.errstate(invalid="ignore"):
        check(arguments, lower_bound, op, backend, num_valid)
    o, state = run(arguments, num_valid, lower_bound=lower_bound, op=op, backend=backend)
    assert np.asarray(state[1]).tobytes() == arguments[-1][1].tobytes()
    for row, n in enumerate(num_valid):
        assert not np.any(np.asarray(o[row, n:]))


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_states_after_every_token(backend):
    num_valid = np.array([17, 9], np.int32)
    arguments, lower_bound = kda_inputs(B, 17, H, K, V)
    with_nan_padding(arguments, num_valid)
    options = {"lower_bound": lower_bound, "op": "recurrent_kda", "backend": backend}
    o, states = run(arguments, num_valid, return_states=True, **options)
    with np.errstate(invalid="ignore"):
        want, want_states = kda_float64.kda(
            *arguments, lower_bound=lower_bound, num_valid=num_valid
        )
    assert relative_l2(o, want) < TOLERANCES["recurrent_kda", "float32"]
    for t in range(17):
        error = relative_l2(states[:, t], want_states[:, t])
        assert error < TOLERANCES["recurrent_kda.states", "float32"]
    _, final_state = run(arguments, num_valid, **options)
    np.testing.assert_array_equal(states[:, -1], final_state)
    # Rows stop exactly at their last valid token.
    np.testing.assert_array_equal(states[1, 8:], np.broadcast_to(states[1, 8], states[1, 8:].shape))


@functools.cache
def whole_call():
    """One call over 130 tokens, and the state after each of them."""
    arguments, _ = kda_inputs(B, 130, H, K, V)
    o, final_state = run(arguments)
    _, states = run(arguments, op="recurrent_kda", return_states=True)
    assert relative_l2(states[:, -1], final_state) < TOLERANCES["chunk_kda.states", "float32"]
    return arguments, np.asarray(o), np.asarray(states)


PIECES = st.one_of(  # of lengths that are compiled already
    st.tuples(st.just("recurrent_kda"), st.sampled_from([1, 2, 15])),
    st.tuples(st.just("chunk_kda"), st.sampled_from([1, 2, 15, 17, 63])),
)


@given(st.lists(PIECES, min_size=1, max_size=10))
def test_any_cut_gives_the_same(pieces):
    arguments, whole, states = whole_call()
    state, start = arguments[-1], 0
    for op, n in pieces:
        if start + n > whole.shape[1]:
            break
        tokens = [x[:, start : start + n] for x in arguments[:5]]
        o, state = run([*tokens, *arguments[5:7], state], op=op)
        assert relative_l2(o, whole[:, start : start + n]) < TOLERANCES["chunk_kda", "float32"]
        start += n
    assert relative_l2(state, states[:, start - 1]) < TOLERANCES["chunk_kda.states", "float32"]


@given(
    st.lists(
        st.tuples(st.sampled_from(list(OPS)), st.integers(0, 17), st.integers(0, 17)), max_size=7
    )
)
def test_rows_may_be_cut_differently(calls):
    arguments, whole, states = whole_call()
    state, starts = arguments[-1], np.zeros(B, int)
    for op, *counts in calls:
        padded = [np.full((B, 17, *x.shape[2:]), np.nan, np.float32) for x in arguments[:5]]
        for row, (start, n) in enumerate(zip(starts, counts, strict=True)):
            for array, x in zip(padded, arguments, strict=False):
                array[row, :n] = x[row, start : start + n]
        o, state = run([*padded, *arguments[5:7], state], np.array(counts, np.int32), op=op)
        for row, (start, n) in enumerate(zip(starts, counts, strict=True)):
            error = relative_l2(o[row, :n], whole[row, start : start + n])
            assert error < TOLERANCES["chunk_kda", "float32"]
        starts += counts
    for row, start in enumerate(starts):
        want = states[row, start - 1] if start else arguments[-1][row]
        assert relative_l2(state[row], want) < TOLERANCES["chunk_kda.states", "float32"]


@pytest.mark.parametrize("regime", ["trained", "unbounded_huge"])
@pytest.mark.parametrize("first_changed", [1, 16, 40, 129])
def test_later_tokens_never_change_earlier_outputs(first_changed, regime):
    """Bit for bit: anchors that looked at later gates would change the rounding."""
    arguments, lower_bound = kda_inputs(B, 130, H, K, V, regime)
    other, _ = kda_inputs(B, 130, H, K, V, regime, seed=1)
    for x, y in zip(arguments[:5], other, strict=False):
        y[:, :first_changed] = x[:, :first_changed]
    o, _ = run(arguments, lower_bound=lower_bound)
    changed, _ = run([*other[:5], *arguments[5:]], lower_bound=lower_bound)
    np.testing.assert_array_equal(o[:, :first_changed], changed[:, :first_changed])
    assert not np.array_equal(o[:, first_changed:], changed[:, first_changed:])


@functools.partial(
    jax.jit, static_argnames=("op", "backend", "lower_bound"), compiler_options=QUICK
)
def gradients(arguments, mix, num_valid, *, op, backend, lower_bound):
    def loss(arguments):
        o, state = OPS[op](
            *arguments, lower_bound=lower_bound, num_valid=num_valid, backend=backend
        )
        return jnp.sum(o * mix[0]) + jnp.sum(state * mix[1])

    return jax.grad(loss)(arguments)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("regime", ["trained", "strong", "at_bound", "unbounded", "unbounded_huge"])
def test_gradients_are_those_of_the_reference(regime, op):
    num_valid = np.array([40, 0, 23], np.int32)
    arguments, lower_bound = kda_inputs(3, 40, H, 16, 32, regime)
    with_nan_padding(arguments, num_valid)
    arguments[0][0, 3], arguments[1][0, 5] = 0.0, 0.0  # a zero q and a zero k
    rng = np.random.default_rng(1)
    mix = [rng.standard_normal(arguments[i].shape).astype(np.float32) for i in (2, 7)]
    got, want = (
        gradients(arguments, mix, num_valid, op=name, backend=backend, lower_bound=lower_bound)
        for name, backend in [(op, "xla"), ("chunk_kda", "reference")]
    )
    for name, g, w in zip(NAMES, got, want, strict=True):
        assert np.all(np.isfinite(g)), name
        assert relative_l2(g, w) < TOLERANCES[f"{op}.gradients", "float32"], name
    for g in got[:5]:
        for row, n in enumerate(num_valid):
            assert not np.any(np.asarray(g[row, n:]))


def test_backward_keeps_one_state_per_chunk():
    arguments, lower_bound = kda_inputs(1, 256, 2, 32, 32)

    def residuals(*arguments):
        return jax.vjp(functools.partial(chunk_kda, lower_bound=lower_bound), *arguments)[1]

    kept = sum(x.size for x in jax.tree.leaves(jax.eval_shape(residuals, *arguments)))
    inputs = sum(x.size for x in arguments)
    states = 256 // xla.CHUNK * arguments[-1].size
    assert states < kept < 1.1 * (inputs + states)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_heads_may_come_side_by_side(op, backend):
    arguments, lower_bound = kda_inputs(B, 5, H, K, V)
    o, state = run(arguments, lower_bound=lower_bound, op=op, backend=backend)
    arguments[:4] = [x.reshape(B, 5, -1) for x in arguments[:4]]
    side_by_side, same_state = run(arguments, lower_bound=lower_bound, op=op, backend=backend)
    assert np.array_equal(side_by_side, np.reshape(o, (B, 5, H * V)))
    assert np.array_equal(state, same_state)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((2, 0, 2, 32), np.float32)}, r"k.shape=.*expected \[B, T, H, K\] = \(2, 0"),
        (
            {"q": np.zeros((2, 5, 32), np.float32)},
            r"q.shape=.*\[B, T, H \* K\] = \(2, 5, 64",
        ),
        (
            {"q": np.zeros((2, 5, 64), np.float32)},
            r"k.shape=.*has rank 4, .*\[B, T, H \* K\]",
        ),
        ({"q": np.zeros((2, 5), np.float32)}, r"q.shape=\(2, 5\) has rank 2, expected"),
        ({"q": np.zeros((2, 5, 2, 32), np.int32)}, "q.dtype=int32, expected a floating dtype"),
        ({"v": np.zeros((2, 5, 3, 16), np.float32)}, r"v.shape=\(2, 5, 3, 16\), expected"),
        (
            {"gate_logits": np.zeros((2, 5, 2, 16), np.float32)},
            r"gate_logits.shape=\(2, 5, 2, 16\)",
        ),
        ({"beta_logits": np.zeros((2, 5, 1), np.float32)}, r"beta_logits.shape=\(2, 5, 1\)"),
        ({"A_log": np.zeros((2,), np.float16)}, "A_log.dtype=float16, expected float32"),
        ({"dt_bias": np.zeros((2, 32), np.float32)}, r"dt_bias.shape=\(2, 32\) has rank 2"),
        ({"dt_bias": np.zeros((32,), np.float32)}, r"dt_bias.shape=\(32,\), expected \[64\]"),
        ({"initial_state": np.zeros((2, 2, 16, 32), np.float32)}, r"expected \[B, H, K, V\] = \(2"),
        ({"initial_state": np.zeros((2, 2, 32, 16), np.float16)}, "initial_state.dtype=float16"),
        ({"num_valid": np.zeros((2,), np.float32)}, "num_valid.dtype=float32, expected int32"),
        (
            {"num_valid": np.zeros((3,), np.int32)},
            r"num_valid.shape=\(3,\), expected \[B\] = \(2,\)",
        ),
        ({"lower_bound": 0.0}, "lower_bound=0.0, expected a negative number or None"),
        ({"lower_bound": float("nan")}, "lower_bound=nan, expected a negative number or None"),
        ({"backend": "triton"}, "unknown backend='triton'"),
    ],
)
def test_wrong_arguments(change, message, op):
    arguments, lower_bound = kda_inputs(2, 5, 2, 32, 16)
    named = dict(zip(NAMES, arguments, strict=True)) | {"lower_bound": lower_bound} | change
    with pytest.raises(ValueError, match=f"^{op}: .*{message}"):
        OPS[op](**named)


@pytest.mark.parametrize("op", OPS)
def test_no_tokens_is_an_error(op):
    arguments, lower_bound = kda_inputs(2, 0, 2, 32, 16)
    with pytest.raises(ValueError, match=rf"{op}: q.shape=\(2, 0, 2, 32\) has no tokens"):
        OPS[op](*arguments, lower_bound=lower_bound)


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("pallas_mosaic_tpu", "K=32 and V=16"),
        (
            "pallas_mosaic_gpu",
            "has no backend pallas_mosaic_gpu; it has reference, xla",
        ),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_a_kernel_that_cannot_run_is_refused_and_never_replaced(op, backend, reason):
    arguments, lower_bound = kda_inputs(2, 5, 2, 32, 16)
    with pytest.raises(NotImplementedError, match=reason):
        OPS[op](*arguments, lower_bound=lower_bound, backend=backend)
