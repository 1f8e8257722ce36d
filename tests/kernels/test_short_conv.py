"""short_conv against float64: outputs, the streaming state, padding, cuts, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import short_conv
from tests.cases import SHORT_CONV_LENGTHS, TOLERANCES, relative_l2, short_conv_inputs
from tests.oracles import short_conv_float64

BACKENDS = ("reference", "xla")


@functools.partial(jax.jit, static_argnames="backend")
def run(x, weight, conv_state, num_valid=None, *, backend="xla"):
    return short_conv(x, weight, conv_state, num_valid=num_valid, backend=backend)


def check(x, weight, state, num_valid, backend):
    y, new_state = run(x, weight, state, num_valid, backend=backend)
    want, want_state = short_conv_float64.short_conv(x, weight, state, num_valid)
    assert y.dtype == new_state.dtype == x.dtype
    assert relative_l2(y, want) < TOLERANCES["short_conv", x.dtype.name]
    np.testing.assert_array_equal(new_state, want_state)  # rows are moved, never computed
    return y, new_state


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", SHORT_CONV_LENGTHS)
def test_matches_float64(length, dtype, backend):
    x, weight, state = short_conv_inputs(2, length, 6, 4, dtype=dtype)
    check(x, weight, state, None, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 7])
def test_other_widths(width, backend):
    x, weight, state = short_conv_inputs(2, 5, 6, width)
    check(x, weight, state, None, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_may_hold_nan(dtype, backend):
    num_valid = np.array([0, 1, 2, 3, 9], np.int32)
    x, weight, state = short_conv_inputs(5, 9, 6, 4, dtype=dtype)
    for row, n in enumerate(num_valid):
        x[row, n:] = np.nan
    y, new_state = check(x, weight, state, num_valid, backend)
    for row, n in enumerate(num_valid):
        assert not np.any(np.asarray(y[row, n:]))
    np.testing.assert_array_equal(new_state[0], state[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_splits_are_parts_of_the_channels(backend):
    x, weight, state = short_conv_inputs(2, 5, 6, 4)
    y, new_state = run(x, weight, state, backend=backend)
    parts, same_state = short_conv(x, weight, state, splits=3, backend=backend)
    assert isinstance(parts, tuple) and [part.shape for part in parts] == [(2, 5, 2)] * 3
    assert relative_l2(jnp.concatenate(parts, -1), y) < TOLERANCES["short_conv", "float32"]
    np.testing.assert_array_equal(same_state, new_state)


@given(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=8), st.sampled_from(BACKENDS))
def test_any_cut_gives_the_same(pieces, backend):
    x, weight, state = short_conv_inputs(2, 40, 6, 4)
    length = sum(pieces)
    whole, _ = run(x, weight, state)  # of a fixed length, since what comes later changes nothing
    outputs, start = [], 0
    new_state = jnp.asarray(state)
    for n in pieces:
        y, new_state = run(x[:, start : start + n], weight, new_state, backend=backend)
        outputs.append(y)
        start += n
    error = relative_l2(jnp.concatenate(outputs, 1), whole[:, :length])
    assert error < TOLERANCES["short_conv", "float32"]
    history = np.concatenate([state, x[:, :length]], axis=1)
    np.testing.assert_array_equal(new_state, history[:, -3:])


def test_gradients_are_those_of_the_reference_with_nan_in_the_padding():
    num_valid = np.array([0, 3, 9], np.int32)
    x, weight, state = short_conv_inputs(3, 9, 6, 4)
    for row, n in enumerate(num_valid):
        x[row, n:] = np.nan
    mix = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)

    def loss(x, weight, state, backend):
        y, new_state = run(x, weight, state, num_valid, backend=backend)
        return jnp.sum(y * mix) + jnp.sum(new_state**2)

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    got, want = (gradient(x, weight, state, backend) for backend in ("xla", "reference"))
    for g, w in zip(got, want, strict=True):
        assert np.all(np.isfinite(g))
        assert relative_l2(g, w) < TOLERANCES["short_conv.gradients", "float32"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 0, 6), np.float32)}, r"x.shape=\(2, 0, 6\).*expected T >= 1"),
        ({"x": np.zeros((2, 5, 6), np.int32)}, "x.dtype=int32, expected a floating dtype"),
        ({"weight": np.zeros((6, 4), np.float64)}, "weight.dtype=float64, expected float32"),
        (
            {"weight": np.zeros((5, 4), np.float32)},
            r"weight.shape=\(5, 4\), expected \[C, W\] = \(6, 4\)",
        ),
        (
            {"conv_state": np.zeros((2, 4, 6), np.float32)},
            r"conv_state.shape=\(2, 4, 6\), expected \[B, 3, C\]",
        ),
        (
            {"conv_state": np.zeros((2, 3, 6), np.float16)},
            "conv_state.dtype=float16, expected float32",
        ),
        (
            {"num_valid": np.zeros((3,), np.int32)},
            r"num_valid.shape=\(3,\), expected \[B\] = \(2,\)",
        ),
        ({"num_valid": np.zeros((2,), np.int64)}, "num_valid.dtype=int64, expected int32"),
        ({"splits": 4}, r"x.shape=\(2, 5, 6\) and splits=4, expected C to be a multiple"),
        ({"splits": 0}, "splits=0, expected C to be a multiple"),
        ({"backend": "numpy"}, "unknown backend='numpy'"),
    ],
)
def test_wrong_arguments(change, message):
    x, weight, conv_state = short_conv_inputs(2, 5, 6, 4)
    arguments = {"x": x, "weight": weight, "conv_state": conv_state, **change}
    with pytest.raises(ValueError, match=message):
        short_conv(**arguments)


def test_a_kernel_that_does_not_exist_is_refused():
    with pytest.raises(
        NotImplementedError, match="short_conv has no backend pallas_mosaic_gpu; it has"
    ):
        short_conv(*short_conv_inputs(2, 5, 6, 4), backend="pallas_mosaic_gpu")
