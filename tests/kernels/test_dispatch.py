"""The rules of choosing a backend, and the messages of the shared argument checks."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch as dispatch_module
from pallas_kernels.dispatch import check_array, count_valid, dispatch, zero_padding


def refuses(reason):
    def run(x):
        raise NotImplementedError(reason)

    return run


@pytest.fixture
def on_tpu(monkeypatch):
    """The automatic choice as it is made on a TPU, with nothing logged before."""
    monkeypatch.setattr(dispatch_module, "platform", lambda: "tpu")
    monkeypatch.setattr(dispatch_module, "_logged", set())


def test_unknown_backend_is_a_value_error():
    with pytest.raises(
        ValueError, match=r"some_op: unknown backend='cuda'.*reference, xla, pallas"
    ):
        dispatch("some_op", {"xla": lambda x: x}, "cuda", 1)


def test_named_backend_that_the_op_lacks_never_falls_back():
    with pytest.raises(
        NotImplementedError, match="some_op has no backend pallas_mosaic_tpu; it has"
    ):
        dispatch("some_op", {"xla": lambda x: x}, "pallas_mosaic_tpu", 1)


def test_named_backend_that_refuses_never_falls_back(on_tpu):
    backends = {"pallas_mosaic_tpu": refuses("V must be 128"), "xla": lambda x: x}
    with pytest.raises(NotImplementedError, match="V must be 128"):
        dispatch("some_op", backends, "pallas_mosaic_tpu", 1)


def test_arguments_reach_the_named_backend():
    backends = {"reference": lambda x, *, y: ("reference", x, y), "xla": lambda x, *, y: "xla"}
    assert dispatch("some_op", backends, "reference", 1, y=2) == ("reference", 1, 2)


def test_automatic_choice_prefers_the_platforms_kernel(on_tpu):
    backends = {
        "reference": lambda x: "r",
        "xla": lambda x: "x",
        "pallas_mosaic_tpu": lambda x: "p",
    }
    assert dispatch("some_op", backends, None, 1) == "p"


def test_automatic_choice_on_cpu_is_xla(monkeypatch):
    monkeypatch.setattr(dispatch_module, "platform", lambda: "cpu")
    backends = {
        "reference": lambda x: "r",
        "pallas_mosaic_tpu": lambda x: "p",
        "xla": lambda x: "x",
    }
    assert dispatch("some_op", backends, None, 1) == "x"


def test_fall_back_warns_once_per_reason(on_tpu, caplog):
    reasons = iter(["too wide", "too wide", "too long"])
    backends = {"pallas_mosaic_tpu": lambda x: refuses(next(reasons))(x), "xla": lambda x: x + 1}
    with caplog.at_level(logging.WARNING):
        assert [dispatch("some_op", backends, None, 1) for _ in range(3)] == [2, 2, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "some_op: backend pallas_mosaic_tpu is skipped: too wide",
        "some_op: backend pallas_mosaic_tpu is skipped: too long",
    ]


def test_a_kernel_that_was_never_written_is_passed_over_silently(on_tpu, caplog):
    with caplog.at_level(logging.WARNING):
        assert dispatch("some_op", {"xla": lambda x: "x"}, None, 1) == "x"
    assert not caplog.records


def test_reference_is_never_chosen_automatically(on_tpu):
    backends = {"reference": lambda x: x, "pallas_mosaic_tpu": refuses("too wide")}
    with pytest.raises(NotImplementedError, match=r"no automatic backend on tpu.*too wide"):
        dispatch("some_op", backends, None, 1)
    with pytest.raises(NotImplementedError, match=r"no automatic backend on tpu.*it has reference"):
        dispatch("some_op", {"reference": lambda x: x}, None, 1)


def test_an_error_that_is_not_a_refusal_passes_through(on_tpu):
    def broken(x):
        raise TypeError("broken")

    with pytest.raises(TypeError, match="broken"):
        dispatch("some_op", {"pallas_mosaic_tpu": broken, "xla": lambda x: x}, None, 1)


@pytest.mark.parametrize(
    ("array", "dims", "dtype", "message"),
    [
        (
            np.zeros((2, 3), np.float32),
            ("B",),
            "floating",
            r"op: x.shape=\(2, 3\) has rank 2.*\[B\]",
        ),
        (np.zeros((3,), np.float32), ("B",), "floating", r"op: x.shape=\(3,\).*\[B\] = \(2,\)"),
        (
            np.zeros((2, 5), np.float32),
            ("B", 4),
            "floating",
            r"\(2, 5\), expected \[B, 4\] = \(2, 4\)",
        ),
        (
            np.zeros((2,), np.int32),
            ("B",),
            "floating",
            "op: x.dtype=int32, expected a floating dtype",
        ),
        (jnp.zeros((2,), jnp.bfloat16), ("B",), jnp.float32, "x.dtype=bfloat16, expected float32"),
        ([1.0, 2.0], ("B",), "floating", "op: x is a list, expected an array"),
    ],
)
def test_check_array_says_what_it_found_and_expected(array, dims, dtype, message):
    with pytest.raises(ValueError, match=message):
        check_array("op", "x", array, dims, {"B": 2}, dtype)


def test_check_array_binds_new_letters():
    sizes = {"B": 2}
    check_array("op", "x", jnp.zeros((2, 3, 4), jnp.bfloat16), ("B", "T", 4), sizes)
    assert sizes == {"B": 2, "T": 3}


def test_zero_padding_keeps_nan_out_of_values_and_gradients():
    x = np.arange(1.0, 13.0, dtype=np.float32).reshape(2, 3, 2)
    x[0, 1:], x[1, 2:] = np.nan, np.inf
    num_valid = jnp.array([1, 2], jnp.int32)
    want = np.array([[[1, 2], [0, 0], [0, 0]], [[7, 8], [9, 10], [0, 0]]], np.float32)
    np.testing.assert_array_equal(zero_padding(jnp.asarray(x), num_valid), want)
    gradient = jax.grad(lambda x: jnp.sum(zero_padding(x, num_valid) ** 2))(jnp.asarray(x))
    np.testing.assert_array_equal(gradient, 2 * want)


def test_num_valid_none_means_all_and_counts_are_clipped():
    x = jnp.full((2, 3), jnp.nan)
    assert zero_padding(x, None) is x
    np.testing.assert_array_equal(count_valid(None, 2, 5), [5, 5])
    np.testing.assert_array_equal(count_valid(jnp.array([-1, 9], jnp.int32), 2, 5), [0, 5])
