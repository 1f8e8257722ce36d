"""The FP8 matmul against the float64 oracle, and its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp8_matmul
from pallas_kernels.grouped_matmul import pallas_mosaic_tpu
from tests.cases import TOLERANCES, relative_l2
from tests.oracles import fp8_matmul_float64 as oracle

BACKENDS = ("reference", "xla", "pallas_mosaic_tpu")


def make_inputs(seed, rows, D, F, dtype):
    """x [*rows, D], codes [F, D], factors of very different sizes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*rows, D)).astype(jnp.dtype(dtype))
    codes = (100 * rng.normal(size=(F, D))).clip(-448, 448).astype(jnp.float8_e4m3fn)
    scale = 10 ** rng.uniform(-4, -2, (-(-F // 128), -(-D // 128)))
    return x, codes, scale.astype(np.float32)


@functools.partial(jax.jit, static_argnames=("out_dtype", "backend"))
def jitted(x, weight, scale, out_dtype=None, backend=None):
    return fp8_matmul(x, weight, scale, out_dtype=out_dtype, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize(("rows", "D", "F"), [((2, 3), 256, 384), ((5,), 300, 200), ((), 7, 5)])
def test_fp8_matmul_against_float64(rows, D, F, dtype, backend):
    x, codes, scale = make_inputs(1, rows, D, F, dtype)
    out = np.array(jitted(x, codes, scale, backend=backend))
    want = oracle.fp8_matmul(x, codes, scale)
    assert out.shape == want.shape and out.dtype == x.dtype
    assert relative_l2(out, want) <= TOLERANCES["fp8_matmul", dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_result_in_another_dtype(backend):
    """float32 sums of bfloat16 products come out unrounded."""
    x, codes, scale = make_inputs(2, (9,), 300, 160, "bfloat16")
    out = jitted(x, codes, scale, out_dtype="float32", backend=backend)
    assert out.dtype == jnp.float32
    want = oracle.fp8_matmul(x, codes, scale)
    assert relative_l2(out, want) <= TOLERANCES["fp8_matmul", "float32"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)
def test_gradient_against_float64(dtype, out_dtype, backend):
    x, codes, scale = make_inputs(3, (2, 4), 300, 160, dtype)
    out_gradient = np.random.default_rng(0).normal(size=(2, 4, 160)).astype(jnp.dtype(out_dtype))

    def loss(x, scale):
        out = jitted(x, codes, scale, out_dtype=out_dtype, backend=backend)
        return jnp.sum((out * out_gradient).astype(jnp.float32))

    got, scale_gradient = jax.grad(loss, argnums=(0, 1))(x, scale)
    assert got.dtype == x.dtype
    want = oracle.gradient(x, codes, scale, out_gradient)
    assert relative_l2(got, want) <= TOLERANCES["fp8_matmul", dtype]
    assert (np.asarray(scale_gradient) == 0).all()


def test_many_tiles_of_rows(monkeypatch):
    monkeypatch.setattr(pallas_mosaic_tpu, "tiles", lambda N, E, F, *_: (16, 256, 128))
    x, codes, scale = make_inputs(4, (3, 13), 300, 600, "bfloat16")
    run = jax.jit(functools.partial(fp8_matmul, backend="pallas_mosaic_tpu"))
    want = oracle.fp8_matmul(x, codes, scale)
    assert relative_l2(run(x, codes, scale), want) <= TOLERANCES["fp8_matmul", "bfloat16"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": np.zeros((130, 9), jnp.float8_e4m3fn)}, "expected [F, D] = (130, 8)"),
        ({"weight": np.zeros((130, 8), jnp.bfloat16)}, "weight.dtype=bfloat16, expected float8"),
        ({"scale": None}, "scale=None with weights in float8_e4m3fn"),
        ({"scale": np.ones((1, 1), np.float32)}, "scale.shape=(1, 1), expected [2, 1] = (2, 1)"),
        ({"scale": np.ones((2, 1))}, "scale.dtype=float64, expected float32"),
        ({"x": np.zeros((0, 8), np.float32)}, "x.shape[0]=0, expected at least 1"),
        ({"x": np.zeros((2, 8), jnp.float8_e4m3fn)}, "x.dtype=float8_e4m3fn, expected a floating"),
        ({"x": np.float32(1)}, "x.shape=() has rank 0"),
        ({"out_dtype": "int32"}, "out_dtype=int32, expected a floating dtype"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_wrong_arguments_are_named(changes, message):
    arguments = {
        "x": np.zeros((4, 8), np.float32),
        "weight": np.zeros((130, 8), jnp.float8_e4m3fn),
        "scale": np.ones((2, 1), np.float32),
    }
    with pytest.raises(ValueError) as error:
        fp8_matmul(**{**arguments, **changes})
    assert message in str(error.value)
