"""The grouped matmul against the float64 oracle, its gradients, and the work it does."""

import functools
import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import compile_for
from pallas_kernels.grouped_matmul import pallas_mosaic_tpu, xla
from pallas_kernels.grouped_matmul.api import grouped_matmul
from tests.cases import TOLERANCES, relative_l2
from tests.kernels import jaxpr_cost
from tests.oracles import fp8_matmul_float64
from tests.oracles import grouped_matmul_float64 as oracle

# "xla rows" is the form of xla for few rows, which is chosen on a GPU.
BACKENDS = ("reference", "xla", "xla rows", "pallas_mosaic_tpu")
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
# The other two take a second to compile.
CASES = [
    *itertools.product(GROUP_SIZES, ("float32", "bfloat16"), ("reference", "xla")),
    *itertools.product(("ragged",), ("float32", "bfloat16"), BACKENDS[2:]),
    *itertools.product(
        ("fewer rows than groups", "a single row", "blocks of 32"), ("bfloat16",), BACKENDS[2:]
    ),
]


def make_inputs(
    seed, rows, group_sizes, dtype, weights_dtype=None, D=7, F=5
) -> tuple[Any, Any, Any]:
    """NaN in the rows that belong to no group."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, D)).astype(jnp.dtype(dtype))
    x[sum(group_sizes) :] = np.nan
    weights = rng.normal(size=(len(group_sizes), F, D)).astype(jnp.dtype(weights_dtype or dtype))
    return x, weights, np.array(group_sizes, np.int32)


def make_fp8_inputs(seed, rows, group_sizes, dtype, D=300, F=160) -> tuple[Any, Any, Any, Any]:
    """As `make_inputs`; partial blocks in both directions, and factors of very different sizes."""
    x, _, group_sizes = make_inputs(seed, rows, group_sizes, dtype, D=D, F=1)
    rng = np.random.default_rng(seed + 1)
    shape = (len(group_sizes), F, D)
    codes = (100 * rng.normal(size=shape)).clip(-448, 448).astype(jnp.float8_e4m3fn)
    scale = 10 ** rng.uniform(-4, -2, (len(group_sizes), -(-F // 128), -(-D // 128)))
    return x, codes, group_sizes, scale.astype(np.float32)


@functools.partial(jax.jit, static_argnames="backend")
def _jitted(x, weights, group_sizes, scale, backend):
    return grouped_matmul(x, weights, group_sizes, scale=scale, backend=backend)


def jitted(x, weights, group_sizes, scale=None, backend="xla"):
    if backend == "xla rows":
        with compile_for("gpu"):
            return _jitted(x, weights, group_sizes, scale, "xla")
    return _jitted(x, weights, group_sizes, scale, backend)


def fresh(*arguments):
    """The TPU kernel traced anew, with what a test has put in place of its parts."""
    run = lambda x, weights, group_sizes, scale: grouped_matmul(
        x, weights, group_sizes, scale=scale, backend="pallas_mosaic_tpu"
    )
    return jax.jit(run)(*arguments)


@pytest.fixture(params=(True, False), ids=("converts codes", "converts none"))
def converts_codes(monkeypatch, request):
    """TPUs with and without a conversion from float8_e4m3fn."""
    monkeypatch.setattr(pallas_mosaic_tpu, "converts_codes", lambda: request.param)
    return request.param


@pytest.fixture
def small_tiles(monkeypatch):
    """16 x 256 tiles, 128 columns in a dot, so that small inputs have many."""
    tiles = lambda N, E, F, *_: (16, 256, 128) if F >= 256 else (16, F, F)
    monkeypatch.setattr(pallas_mosaic_tpu, "tiles", tiles)


@pytest.mark.parametrize(("name", "dtype", "backend"), CASES)
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
    [("bfloat16", "float32"), ("float32", "bfloat16")],
)
def test_weights_of_another_dtype(dtype, weights_dtype, backend):
    x, weights, group_sizes = make_inputs(2, 30, [9, 0, 20], dtype, weights_dtype)
    out = np.array(jitted(x, weights, group_sizes, backend=backend))
    want = oracle.grouped_matmul(x, weights.astype(x.dtype), group_sizes)
    assert out.dtype == x.dtype
    assert relative_l2(out, want) <= TOLERANCES["grouped_matmul", dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("ragged", "float32"), ("ragged", "bfloat16"), ("all empty", "bfloat16")],
)
def test_fp8_weights_against_float64(name, dtype, backend):
    x, codes, group_sizes, scale = make_fp8_inputs(7, *GROUP_SIZES[name], dtype)
    out = np.array(jitted(x, codes, group_sizes, scale, backend=backend))
    full = fp8_matmul_float64.weight_in_full(codes, scale, x.dtype)
    assert out.dtype == x.dtype
    assert (out[group_sizes.sum() :] == 0).all()
    want = oracle.grouped_matmul(x, full, group_sizes)
    assert relative_l2(out, want) <= TOLERANCES["grouped_matmul.fp8", dtype]


@pytest.mark.parametrize("backend", ("reference", "xla", "pallas_mosaic_tpu"))
def test_gradient_with_fp8_weights(backend):
    """x has one; codes, factors and the rows of no group have none."""
    x, codes, group_sizes, scale = make_fp8_inputs(8, *GROUP_SIZES["ragged"], "float32")
    out_gradient = np.random.default_rng(0).normal(size=(len(x), 160)).astype(np.float32)

    def loss(x, scale):
        return jnp.sum(jitted(x, codes, group_sizes, scale, backend=backend) * out_gradient)

    got, scale_gradient = jax.grad(loss, argnums=(0, 1))(x, scale)
    full = fp8_matmul_float64.weight_in_full(codes, scale, x.dtype)
    want, _ = oracle.gradients(x, full, group_sizes, out_gradient)
    assert relative_l2(got, want) <= TOLERANCES["grouped_matmul.fp8", "float32"]
    assert (np.asarray(scale_gradient) == 0).all()


@pytest.mark.parametrize(
    ("rows", "group_sizes", "F", "fp8"),
    [
        # Groups cross tiles; the last columns are partial.
        (100, [0, 5, 0, 40, 16, 0, 20, 0], 300, False),
        (100, [0, 5, 0, 40, 16, 0, 20, 0], 300, True),
        (64, [0, 64, 0], 256, False),
        # Groups end with their tiles, and the last tile is partial.
        (61, [16, 16, 16, 13], 512, True),
        (70, [0, 0, 3], 130, False),
        (33, [0, 0], 256, False),
    ],
)
def test_many_tiles(rows, group_sizes, F, fp8, small_tiles):
    """Rows without a group hold NaN, and so do the weights that no row chose."""
    if fp8:
        x, weights, group_sizes, scale = make_fp8_inputs(9, rows, group_sizes, "bfloat16", F=F)
        full = fp8_matmul_float64.weight_in_full(weights, scale, x.dtype)
        scale[group_sizes == 0] = np.nan
    else:
        x, full, group_sizes = make_inputs(9, rows, group_sizes, "bfloat16", F=F, D=40)
        weights, scale = full.copy(), None
        weights[group_sizes == 0] = np.nan
    out = np.array(fresh(x, weights, group_sizes, scale))
    assert (out[group_sizes.sum() :] == 0).all()
    want = oracle.grouped_matmul(x, full, group_sizes)
    assert relative_l2(out, want) <= TOLERANCES["grouped_matmul.fp8", "bfloat16"]


def test_every_code_is_exact(converts_codes):
    """Each of the 254 finite codes times a power of two, -0 too, through a product with 1."""
    codes = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    codes = np.where(np.isnan(codes.astype(np.float32)), np.zeros_like(codes), codes)
    weights = np.broadcast_to(codes[None, :, None], (1, 256, 128))
    x = np.eye(3, 128, dtype=jnp.bfloat16)
    scale = np.array([[[2.0**-9], [2.0**5]]], np.float32)
    out = fresh(x, weights, np.array([3], np.int32), scale)
    want = codes.astype(np.float32) * np.repeat(scale[0, :, 0], 128)
    np.testing.assert_array_equal(np.array(out, np.float32), np.broadcast_to(want, (3, 256)))


@hypothesis.given(
    group_sizes=st.lists(st.integers(0, 40), min_size=5, max_size=5),
    spare=st.integers(0, 40),
)
def test_visits_cover_every_row_once(group_sizes, spare):
    rows, tile_rows = 90, 16
    hypothesis.assume(sum(group_sizes) <= rows)
    table = np.array(
        jax.jit(pallas_mosaic_tpu.visits, static_argnums=(1, 2))(
            np.array(group_sizes, np.int32), rows, tile_rows
        )
    )
    assert table.shape[1] == pallas_mosaic_tpu.num_visits(rows, 5, tile_rows)
    found = np.full(rows, -1)
    for group, x_tile, tile, first, end, used in table.T:
        assert used == (sum(group_sizes) > 0)
        assert group_sizes[group] > 0 or not used  # no weight that nobody chose
        if end > first:
            assert x_tile == tile
            mine = tile * tile_rows + np.arange(first, end)
            assert (found[mine] == -1).all()
            found[mine] = group
    want = np.repeat([0, 1, 2, 3, 4, -1], [*group_sizes, rows - sum(group_sizes)])
    np.testing.assert_array_equal(found, want)
    # Blocks are visited in order and without gaps: none is copied twice, no tile is left unwritten.
    assert set(np.diff(table[2])) <= {0, 1} and table[2, 0] == 0 and table[2, -1] == 5
    assert (np.diff(table[:2]) >= 0).all()


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *itertools.product(
            ("ragged", "one group has all", "all empty", "blocks of 32"), ("reference", "xla")
        ),
        *itertools.product(("ragged",), BACKENDS[2:]),
    ],
)
def test_gradients_against_float64(name, backend):
    """NaN in the rows of no group reaches neither gradient."""
    x, weights, group_sizes = make_inputs(3, *GROUP_SIZES[name], "float32")
    out_gradient = np.random.default_rng(0).normal(size=(len(x), 5)).astype(np.float32)

    def loss(x, weights):
        return jnp.sum(jitted(x, weights, group_sizes, backend=backend) * out_gradient)

    got = jax.grad(loss, argnums=(0, 1))(x, weights)
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


@pytest.mark.parametrize("at_rest", ("float32", "float8_e4m3fn"))
@pytest.mark.parametrize("rows", (8, 512, 32768), ids=lambda n: f"{n} rows")
def test_work_and_memory_do_not_grow_with_the_experts(rows, at_rest):
    """288 experts as released, narrower, with weights of another dtype at rest."""
    fp8 = at_rest == "float8_e4m3fn"
    E, F, D = (288, 128, 256) if fp8 else (288, 32, 48)
    arguments = (
        jax.ShapeDtypeStruct((rows, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((E, F, D), at_rest),
        jax.ShapeDtypeStruct((E,), jnp.int32),
    )
    scale = jnp.ones((E, F // 128, D // 128), jnp.float32) if fp8 else None
    run = functools.partial(grouped_matmul, scale=scale, backend="xla")
    block = xla.block_rows(rows, E)
    most_rows = rows + min(E, rows) * block  # each group fills its last block up
    jaxpr = jax.make_jaxpr(run)(*arguments).jaxpr
    assert jaxpr_cost.dot_flops(jaxpr) <= 2 * most_rows * F * D
    assert jaxpr_cost.largest(jaxpr) <= max(most_rows * max(F, D), F * D)  # or one weight
    assert jaxpr_cost.largest(jaxpr, jnp.bfloat16) <= max(most_rows * D, F * D)
    if rows < E:
        assert jaxpr_cost.largest(jaxpr) < E * F * D // 8  # never the weights as a whole

    loss = lambda x, w, g: jnp.sum(run(x, w, g).astype(jnp.float32))
    backward = jax.make_jaxpr(jax.grad(loss, argnums=0 if fp8 else (0, 1)))(*arguments).jaxpr
    assert jaxpr_cost.dot_flops(backward) <= (2 if fp8 else 3) * 2 * most_rows * F * D
    # The gradient of the weights itself, once; no copy of weights per block.
    weights = F * D if fp8 else E * F * D
    assert jaxpr_cost.largest(backward) <= max(weights, most_rows * max(F, D))


def test_the_form_for_few_rows_is_chosen_on_a_gpu():
    def scans(rows, E):
        x = jax.ShapeDtypeStruct((rows, 8), jnp.bfloat16)
        weights = jax.ShapeDtypeStruct((E, 16, 8), jnp.bfloat16)
        group_sizes = jax.ShapeDtypeStruct((E,), jnp.int32)
        run = jax.jit(functools.partial(grouped_matmul, backend="xla"))
        return len(jaxpr_cost.scan_lengths(jax.make_jaxpr(run)(x, weights, group_sizes).jaxpr))

    cases = ((1, 9), (256, 9), (257, 9), (2304, 288), (2305, 288))
    assert [scans(*case) for case in cases] == [1] * 5
    with compile_for("gpu"):
        assert [scans(*case) for case in cases] == [0, 0, 1, 0, 1]


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


@pytest.mark.parametrize(
    ("weights_dtype", "scale", "message"),
    [
        ("float8_e4m3fn", None, "scale=None with weights in float8_e4m3fn, expected their factors"),
        ("bfloat16", np.ones((2, 2, 1), np.float32), "scale is given with weights.dtype=bfloat16"),
        ("float8_e5m2", None, "weights.dtype=float8_e5m2, expected float8_e4m3fn or wider"),
        (
            "float8_e4m3fn",
            np.ones((2, 1, 1), np.float32),
            "scale.shape=(2, 1, 1), expected [E, 2, 1] = (2, 2, 1)",
        ),
        ("float8_e4m3fn", np.ones((2, 2, 1)), "scale.dtype=float64, expected float32"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_wrong_scales_are_named(weights_dtype, scale, message):
    x, weights = jnp.zeros((4, 8), jnp.float32), jnp.zeros((2, 130, 8), weights_dtype)
    with pytest.raises(ValueError) as error:
        grouped_matmul(x, weights, jnp.array([1, 2], jnp.int32), scale=scale)
    assert message in str(error.value)


def test_the_tpu_kernel_refuses_what_it_cannot_do():
    x, weights = jnp.zeros((4, 8), jnp.float16), jnp.zeros((2, 16, 8), jnp.float16)
    with pytest.raises(NotImplementedError, match="x in float16"):
        grouped_matmul(x, weights, jnp.array([1, 2], jnp.int32), backend="pallas_mosaic_tpu")
    x, weights = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 65536), (1, 128, 65536)))
    sizes = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(NotImplementedError, match="D=65536 and F=128 do not fit into VMEM"):
        jax.eval_shape(
            functools.partial(grouped_matmul, backend="pallas_mosaic_tpu"), x, weights, sizes
        )
