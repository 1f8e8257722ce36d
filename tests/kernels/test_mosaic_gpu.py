"""The Hopper kernels: their schedule anywhere, the kernel itself in interpret mode and lowered for
CUDA where JAX is new enough, and their numbers on a Hopper GPU."""

import functools
import logging
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, fp8_matmul, grouped_matmul
from pallas_kernels.fp8_matmul import pallas_mosaic_gpu as dense_gpu
from pallas_kernels.grouped_matmul import pallas_mosaic_gpu as gpu
from tests.cases import TOLERANCES, relative_l2
from tests.oracles import fp8_matmul_float64
from tests.oracles import grouped_matmul_float64 as oracle

NEW_JAX = tuple(int(n) for n in jax.__version__.split(".")[:3] if n.isdigit()) >= (0, 11, 1)
needs_new_jax = pytest.mark.skipif(not NEW_JAX, reason="Mosaic GPU kernels need jax >= 0.11.1")


@pytest.fixture
def hopper():
    if not NEW_JAX or jax.default_backend() != "gpu":
        pytest.skip("needs jax >= 0.11.1 and a Hopper GPU")
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("the GPU is no Hopper GPU")


def make_inputs(seed, rows, group_sizes, fp8, D=512, F=384) -> tuple[Any, Any, Any, Any]:
    """x with NaN in the rows of no group, weights as they are at rest and in full, scale."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, D)).astype(jnp.bfloat16)
    x[sum(group_sizes) :] = np.nan
    shape = (len(group_sizes), F, D)
    if not fp8:
        weights = rng.normal(size=shape).astype(jnp.bfloat16)
        return x, weights, weights, None
    codes = (100 * rng.normal(size=shape)).clip(-448, 448).astype(jnp.float8_e4m3fn)
    scale = 10 ** rng.uniform(-4, -2, (shape[0], -(-F // 128), -(-D // 128)))
    scale = scale.astype(np.float32)
    return x, codes, fp8_matmul_float64.weight_in_full(codes, scale, x.dtype), scale


def sizes_of(group_sizes) -> Any:
    return np.array(group_sizes, np.int32)


def scheduled(x, weights, group_sizes, scale, tiling, **options):
    bounds, groups = gpu.schedule(group_sizes, len(x), tiling.rows)
    return gpu.multiply(x, weights, scale, bounds, groups, tiling, **options)


@hypothesis.given(
    group_sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    spare=st.integers(0, 40),
    rows=st.sampled_from((8, 16, 32)),
)
def test_tiles_cover_every_row_once(group_sizes, spare, rows):
    """A tile begins at a multiple of 8 and keeps the rows of its group."""
    num_rows = -(-max(1, sum(group_sizes) + spare) // 8) * 8
    bounds, groups = map(np.asarray, gpu.schedule(sizes_of(group_sizes), num_rows, rows))
    E, ends = len(group_sizes), np.cumsum(group_sizes)
    found = np.full(num_rows, -1)
    for tile, group in enumerate(groups):
        start, end = sum(group_sizes), num_rows
        if group < E:
            start, end = int(ends[group]) - group_sizes[group], int(ends[group])
        assert bounds[0, group] == start
        first = start // 8 * 8 + (tile - bounds[1, group]) * rows
        mine = np.arange(max(first, start), min(first + rows, end))
        assert (found[mine] == -1).all()
        found[mine] = group
    want = np.repeat(np.arange(E + 1), [*group_sizes, num_rows - sum(group_sizes)])
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("at_rest", (jnp.bfloat16, jnp.float8_e4m3fn), ids=("bf16", "fp8"))
@pytest.mark.parametrize("columns", (128, 256, 2048))
def test_a_tiling_fits_into_shared_memory(columns, at_rest):
    weights = jax.ShapeDtypeStruct((4, columns, 1024), at_rest)
    for rows in (8, 16, 32, 64, 128):
        for parts in (1, 4):
            t = gpu.fit(rows, weights, parts)
            held = t.stages * t.depth * (2 * t.width * weights.dtype.itemsize + 2 * rows)
            out = 2 * t.out_rows * t.width * (2 if parts == 1 else 4)
            assert columns % (2 * t.width) == 0 and t.stages >= 3
            assert held + out <= 227 * 1024 - 1024


def test_tiles_are_as_high_as_groups_are():
    found = [gpu.tile_rows(rows, 288) for rows in (8, 16, 256, 2048, 8192, 65536)]
    assert found == [8, 8, 16, 32, 64, 128]


def test_the_sum_of_a_small_weight_is_cut():
    tilings = [
        dense_gpu.tiling_for(rows, jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), 2)
        for rows, shape in ((8, (12288, 4096)), (8, (1536, 4096)), (1024, (4096, 16384)))
    ]
    assert [t.parts for t in tilings] == [1, 8, 1]


@needs_new_jax
@pytest.mark.parametrize(
    ("rows", "group_sizes", "tiling"),
    [
        (40, [3, 0, 18, 9, 2], gpu.Tiling(16, 64, 128, 2)),
        (40, [0, 0, 33, 0, 7], gpu.Tiling(8, 64, 64, 3)),
        (24, [0, 0], gpu.Tiling(8, 64, 128, 2)),
        (24, [24], gpu.Tiling(16, 64, 64, 2, parts=2)),
    ],
)
def test_interpreted(rows, group_sizes, tiling):
    """On the CPU, with three blocks; codes in registers are beyond interpret mode."""
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu

    x, weights, full, _ = make_inputs(1, rows, group_sizes, False, D=256, F=256)
    interpret = plgpu.InterpretGPUParams()
    out = scheduled(x, weights, sizes_of(group_sizes), None, tiling, blocks=3, interpret=interpret)
    out = np.asarray(out).astype(np.float64)
    out = out.sum(axis=0) if tiling.parts > 1 else out
    assert (out[sum(group_sizes) :] == 0).all()
    want = oracle.grouped_matmul(x, full, group_sizes)
    assert relative_l2(out, want) <= TOLERANCES["grouped_matmul", "bfloat16"]


@needs_new_jax
@pytest.mark.parametrize("fp8", (False, True), ids=("bf16", "fp8"))
@pytest.mark.parametrize("rows", (8, 13, 2048, 65536))
@pytest.mark.parametrize(("D", "F"), ((4096, 2048), (2048, 4096)))
def test_lowered_for_cuda(D, F, rows, fp8):
    """At the released sizes: layouts are found, and shared memory suffices."""
    spec, E = jax.ShapeDtypeStruct, 288
    arguments = [spec((rows, D), jnp.bfloat16), spec((E, F, D), jnp.bfloat16)]
    options = {}
    if fp8:
        arguments[1] = spec((E, F, D), jnp.float8_e4m3fn)
        options["scale"] = spec((E, F // 128, D // 128), jnp.float32)
    arguments.append(spec((E,), jnp.int32))
    with dispatch.compile_for("gpu"):
        traced = jax.jit(grouped_matmul).trace(*arguments, **options)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_new_jax
@pytest.mark.parametrize(
    ("rows", "out_dtype"), ((1, "bfloat16"), (100, "float32"), (1024, "bfloat16"))
)
@pytest.mark.parametrize(
    ("D", "F"), ((4096, 12288), (1536, 16384), (4096, 512), (16384, 4096), (2048, 4096))
)
def test_fp8_matmul_lowered_for_cuda(D, F, rows, out_dtype):
    spec = jax.ShapeDtypeStruct
    arguments = (
        spec((rows, D), jnp.bfloat16),
        spec((F, D), jnp.float8_e4m3fn),
        spec((F // 128, D // 128), jnp.float32),
    )
    with dispatch.compile_for("gpu"):
        traced = jax.jit(functools.partial(fp8_matmul, out_dtype=out_dtype)).trace(*arguments)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_it_cannot_do_is_said_and_falls_back_once(monkeypatch, caplog):
    x, weights, _, scale = make_inputs(2, 8, [3, 2], True, D=128, F=128)
    arguments = (x, weights, sizes_of([3, 2]))
    reason = "needs a GPU, the default backend is cpu" if NEW_JAX else r"needs jax >= 0\.11\.1"
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match=reason):
            grouped_matmul(*arguments, scale=scale, backend="pallas_mosaic_gpu")
        with pytest.raises(NotImplementedError, match=reason):
            fp8_matmul(x, weights[0], scale[0], backend="pallas_mosaic_gpu")
    monkeypatch.setattr(gpu.jax, "__version__", "0.10.2")
    with dispatch.compile_for("gpu"), caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = grouped_matmul(*arguments, scale=scale)
    skipped = [r for r in caplog.records if "pallas_mosaic_gpu is skipped" in r.getMessage()]
    assert len(skipped) <= 1  # none where an earlier test has had it
    assert out.shape == (8, 128)


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("float32", (2, 128, 128), "not float32 with float32"),
        ("bfloat16", (2, 160, 128), "multiples of 128, not weights of 160 x 128"),
    ],
)
def test_arguments_that_it_refuses(dtype, shape, message, monkeypatch):
    monkeypatch.setattr(gpu.jax, "__version__", "0.11.1")
    x = jax.ShapeDtypeStruct((8, shape[-1]), dtype)
    with dispatch.compile_for("gpu"), pytest.raises(NotImplementedError, match=message):
        gpu.require(x, jax.ShapeDtypeStruct(shape, dtype))


@pytest.mark.parametrize("fp8", (False, True), ids=("bf16", "fp8"))
@pytest.mark.parametrize(
    ("rows", "group_sizes"),
    [
        (8, [1, 0, 1, 1, 3, 0, 2]),
        (13, [3, 0, 7, 1]),
        (1000, [3, 0, 450, 261, 1, 200]),
        (300, [0, 0, 300, 0]),
        (40, [0, 0]),
    ],
)
def test_on_hopper_against_float64(rows, group_sizes, fp8, hopper):
    x, weights, full, scale = make_inputs(3, rows, group_sizes, fp8)
    want = oracle.grouped_matmul(x, full, group_sizes)
    for high in (8, 16, 32, 64, 128):  # whatever the automatic choice would be
        if high <= rows and rows % 8 == 0:
            tiling = gpu.fit(high, weights)
            run = jax.jit(functools.partial(scheduled, tiling=tiling))
            out = np.array(run(x, weights, sizes_of(group_sizes), scale))
            assert (out[sum(group_sizes) :] == 0).all()
            assert relative_l2(out, want) <= TOLERANCES["grouped_matmul.fp8", "bfloat16"]
    run = jax.jit(functools.partial(grouped_matmul, backend="pallas_mosaic_gpu"))
    out = np.array(run(x, weights, sizes_of(group_sizes), scale=scale))
    assert relative_l2(out, want) <= TOLERANCES["grouped_matmul.fp8", "bfloat16"]


@pytest.mark.parametrize("out_dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("lead", ((1,), (2, 13), (64,), (1000,), (2100,)))
def test_fp8_matmul_on_hopper_against_float64(lead, out_dtype, hopper):
    x, codes, _, scale = make_inputs(4, np.prod(lead), [np.prod(lead)], True, D=2048)
    x = x.reshape(*lead, -1)
    run = jax.jit(functools.partial(fp8_matmul, out_dtype=out_dtype, backend="pallas_mosaic_gpu"))
    out = run(x, codes[0], scale[0])
    assert out.dtype == jnp.dtype(out_dtype)
    want = fp8_matmul_float64.fp8_matmul(x, codes[0], scale[0])
    assert relative_l2(out, want) <= TOLERANCES["fp8_matmul", out_dtype]


@pytest.mark.parametrize("fp8", (False, True), ids=("bf16", "fp8"))
def test_gradients_on_hopper(fp8, hopper):
    sizes = [3, 0, 20, 30]
    x, weights, full, scale = make_inputs(5, 64, sizes, fp8)
    out_gradient = np.random.default_rng(0).normal(size=(64, 384)).astype(np.float32)

    def loss(x):
        run = functools.partial(grouped_matmul, scale=scale, backend="pallas_mosaic_gpu")
        return jnp.sum(run(x, weights, sizes_of(sizes)).astype(jnp.float32) * out_gradient)

    want, _ = oracle.gradients(x, full, sizes_of(sizes), out_gradient)
    got = jax.jit(jax.grad(loss))(x)
    assert relative_l2(got, want) <= TOLERANCES["grouped_matmul", "bfloat16"]
