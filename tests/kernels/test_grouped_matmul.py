"""The grouped matmul against the float64 oracle, its gradients, and the work it does."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.api import grouped_matmul
from tests.cases import TOLERANCES, relative_l2
from tests.kernels import jaxpr_cost
from tests.oracles import grouped_matmul_float64 as oracle

BACKENDS = ("reference", "xla")
GROUP_SIZES = {
    "ragged": (40, [3, 0, 17, 1, 0, 11]),
    "full": (40, [8, 8, 8, 8, 8, 0]),
    "one group has all": (37, [0, 0, 37, 0]),
    "all empty": (9, [0, 0, 0]),
    "fewer rows than groups": (3, [0] * 20 + [1] + [0] * 7 + [1, 0]),
    "a single row": (1, [0, 1]),
    "a single group": (21, [20]),
    "blocks of 32": (150, [70, 1, 32, 33, 0, 5]),
}


def make_inputs(
    seed, rows, group_sizes, dtype, weights_dtype=None, D=7, F=5
) -> tuple[Any, Any, Any]:
    """NaN in the rows that belong to no group."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, D)).astype(jnp.dtype(dtype))
    x[sum(group_sizes) :] = np.nan
    weights = rng.normal(size=(len(group_sizes), F, D)).astype(jnp.dtype(weights_dtype or dtype))
    return x, weights, np.array(group_sizes, np.int32)


@functools.partial(jax.jit, static_argnames="backend")
def jitted(x, weights, group_sizes, backend="xla"):
    return grouped_matmul(x, weights, group_sizes, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("name", GROUP_SIZES)
def test_grouped_matmul_against_float64(name, dtype, backend):
    x, weights, group_sizes = make_inputs(1, *GROUP_SIZES[name], dtype)
    out = np.array(jitted(x, weights, group_sizes, backend=backend))
    want = oracle.grouped_matmul(x, weights, group_sizes)
    assert out.shape == want.shape and out.dtype == x.dtype
    assert (out[group_sizes.sum() :] == 0).all()
    assert relative_l2(out, want) <= TOLERANCES["grouped_matmul", dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "weights_dtype"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float8_e4m3fn")],
)
def test_weights_of_another_dtype(dtype, weights_dtype, backend):
    x, weights, group_sizes = make_inputs(2, 30, [9, 0, 20], dtype, weights_dtype)
    out = np.array(jitted(x, weights, group_sizes, backend=backend))
    want = oracle.grouped_matmul(x, weights.astype(x.dtype), group_sizes)
    assert out.dtype == x.dtype
    assert relative_l2(out, want) <= TOLERANCES["grouped_matmul", dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ("ragged", "one group has all", "all empty", "blocks of 32"))
def test_gradients_against_float64(name, backend):
    """NaN in the rows of no group reaches neither gradient."""
    x, weights, group_sizes = make_inputs(3, *GROUP_SIZES[name], "float32")
    out_gradient = np.random.default_rng(0).normal(size=(len(x), 5)).astype(np.float32)

    def loss(x, weights):
        return jnp.sum(grouped_matmul(x, weights, group_sizes, backend=backend) * out_gradient)

    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weights)
    want = oracle.gradients(x, weights, group_sizes, out_gradient)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.float32
        assert relative_l2(a, b) <= TOLERANCES["grouped_matmul", "float32"]


def test_gradients_keep_the_dtypes_of_their_arguments():
    x, weights, group_sizes = make_inputs(4, 30, [9, 0, 20], "bfloat16", "float32")
    loss = lambda x, w: jnp.sum(grouped_matmul(x, w, group_sizes).astype(jnp.float32))
    for got, want in zip(
        jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weights),
        oracle.gradients(x, weights, group_sizes, np.ones((30, 5))),
        strict=True,
    ):
        assert relative_l2(got, want) <= TOLERANCES["grouped_matmul", "bfloat16"]
    assert jax.eval_shape(jax.grad(loss, argnums=1), x, weights).dtype == jnp.float32


@hypothesis.given(
    group_sizes=st.lists(st.integers(0, 19), min_size=6, max_size=6).filter(lambda g: sum(g) <= 45)
)
def test_any_group_sizes(group_sizes):
    x, weights, group_sizes = make_inputs(5, 45, group_sizes, "float32")
    want = oracle.grouped_matmul(x, weights, group_sizes)
    assert (
        relative_l2(jitted(x, weights, group_sizes), want)
        <= TOLERANCES["grouped_matmul", "float32"]
    )


@hypothesis.given(
    group_sizes=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    spare=st.integers(0, 50),
)
def test_the_number_of_blocks_suffices(group_sizes, spare):
    rows = sum(group_sizes) + spare
    block = xla.block_rows(max(rows, 1), len(group_sizes))
    needed = sum(-(-size // block) for size in group_sizes)
    found = xla.num_blocks(rows, len(group_sizes), block)
    assert needed <= found <= -(-rows // block) + min(len(group_sizes), rows)


def test_blocks_have_about_the_rows_of_an_average_group():
    sizes = [xla.block_rows(rows, 288) for rows in (1, 8, 288 * 9, 288 * 64, 10**6)]
    assert sizes == [8, 8, 16, 64, 128]


@pytest.mark.parametrize("rows", (8, 512, 32768), ids=lambda n: f"{n} rows")
def test_work_and_memory_do_not_grow_with_the_experts(rows):
    """288 experts as released, narrower, with weights of another dtype at rest."""
    E, F, D = 288, 32, 48
    arguments = (
        jax.ShapeDtypeStruct((rows, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((E, F, D), jnp.float32),
        jax.ShapeDtypeStruct((E,), jnp.int32),
    )
    run = functools.partial(grouped_matmul, backend="xla")
    block = xla.block_rows(rows, E)
    most_rows = rows + min(E, rows) * block  # each group fills its last block up
    jaxpr = jax.make_jaxpr(run)(*arguments).jaxpr
    assert jaxpr_cost.dot_flops(jaxpr) <= 2 * most_rows * F * D
    assert jaxpr_cost.largest(jaxpr) <= most_rows * max(F, D)
    assert jaxpr_cost.largest(jaxpr, jnp.bfloat16) <= most_rows * D
    if rows < E:
        assert jaxpr_cost.largest(jaxpr) < E * F * D // 8  # never the weights as a whole

    loss = lambda x, w, g: jnp.sum(run(x, w, g).astype(jnp.float32))
    backward = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*arguments).jaxpr
    assert jaxpr_cost.dot_flops(backward) <= 3 * 2 * most_rows * F * D
    # The gradient of the weights itself, once; no copy of weights per block.
    assert jaxpr_cost.largest(backward) <= max(E * F * D, most_rows * max(F, D))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sum_past_the_rows_is_cut_inside_jit(backend):
    """The rows that are there get their group's weight; nothing is read past the end."""
    x, weights, _ = make_inputs(6, 20, [20, 0, 0], "float32")
    out = jitted(x, weights, np.array([11, 14, 9], np.int32), backend=backend)
    want = oracle.grouped_matmul(x, weights, [11, 9, 0])
    assert relative_l2(out, want) <= TOLERANCES["grouped_matmul", "float32"]


@pytest.mark.parametrize(
    ("shapes", "group_sizes", "message"),
    [
        (((6, 4), (2, 3, 5)), [3, 3], "weights.shape=(2, 3, 5), expected [E, F, D] = (2, 3, 4)"),
        (((6, 4), (2, 3, 4)), [3, 3, 0], "group_sizes.shape=(3,), expected [E] = (2,)"),
        (((6, 4), (2, 3, 4)), [4, 3], "sum(group_sizes)=7, expected at most N=6"),
        (((6, 4), (2, 3, 4)), [-1, 3], "min(group_sizes)=-1, expected at least 0"),
        (((0, 4), (2, 3, 4)), [0, 0], "N=0, expected at least 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments_are_named(shapes, group_sizes, message):
    x, weights = (jnp.zeros(shape, jnp.float32) for shape in shapes)
    with pytest.raises(ValueError) as error:
        grouped_matmul(x, weights, jnp.asarray(group_sizes, jnp.int32))
    assert message in str(error.value)
