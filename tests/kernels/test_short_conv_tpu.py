"""The short convolution's TPU kernel in interpret mode, and through the TPU compiler."""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from pallas_kernels import short_conv
from pallas_kernels.dispatch import compile_for
from pallas_kernels.short_conv import pallas_mosaic_tpu as kernel
from tests.cases import TOLERANCES, relative_l2, short_conv_inputs
from tests.oracles import short_conv_float64


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 32 tokens, two loops' bodies each, and of 8 rows of a batch."""
    monkeypatch.setattr(kernel, "_UNROLLED", 16)
    monkeypatch.setattr(kernel, "_MOST_ELEMENTS", 32 * kernel.LANES)
    monkeypatch.setattr(kernel, "_WIDEST", kernel.LANES)
    monkeypatch.setattr(kernel, "_MOST_BATCH", 8)


def run(x, weight, state, num_valid=None, splits=1):
    """Traced anew, for `small_blocks`; the outputs as one array."""

    @jax.jit
    def traced(x, weight, state, num_valid):
        options: Any = {"splits": splits, "backend": "pallas_mosaic_tpu"}
        return short_conv(x, weight, state, num_valid=num_valid, **options)

    y, state = traced(x, weight, state, num_valid)
    if splits > 1:
        assert len(y) == splits and {part.shape for part in y} == {
            (*x.shape[:2], x.shape[2] // splits)
        }
        y = jnp.concatenate(y, axis=-1)
    return y, state


def spoil_padding(x, num_valid):
    for row, n in enumerate(num_valid):
        x[row, n:] = np.nan


@pytest.mark.parametrize(
    ("B", "T", "width", "splits", "dtype"),
    [
        (1, 1, 4, 1, "bfloat16"),
        (1, 2, 8, 1, "float32"),
        (2, 17, 4, 3, "bfloat16"),
        (3, 4, 4, 1, "bfloat16"),
        (2, 31, 2, 1, "float32"),
        (3, 70, 4, 3, "bfloat16"),
        (1, 95, 8, 2, "float32"),
        (9, 1, 4, 3, "bfloat16"),
        (8, 2, 4, 1, "bfloat16"),
        (5, 3, 3, 1, "float32"),
        (19, 7, 4, 1, "bfloat16"),
    ],
)
def test_matches_float64_with_nan_in_the_padding(small_blocks, B, T, width, splits, dtype):
    x, weight, state = short_conv_inputs(
        B, T, (2 if B == 3 else 1) * splits * 128, width, dtype=dtype
    )
    num_valid = np.array([(T, 0, 1, T // 2, T - 1)[b % 5] for b in range(B)], np.int32)
    spoil_padding(x, num_valid)
    y, new_state = run(x, weight, state, num_valid, splits)
    want, want_state = short_conv_float64.short_conv(x, weight, state, num_valid)
    assert y.dtype == new_state.dtype == x.dtype
    assert relative_l2(y, want) < TOLERANCES["short_conv", dtype]
    np.testing.assert_array_equal(new_state, want_state)  # rows are moved, never computed
    for row, n in enumerate(num_valid):
        assert not np.any(np.asarray(y[row, n:]))


@pytest.mark.parametrize("H", [4, 8, 16, 32, 64])
@pytest.mark.parametrize(("B", "T"), [(1, 8192), (4, 64), (64, 4), (64, 1), (256, 1)])
def test_blocks_of_the_released_sizes(B, T, H):
    """Both cores of a v5p have as many blocks of channels, and steps are few but fit twice."""
    p = kernel.plan(B, T, 3 * H * 128, 4, jnp.bfloat16, 3)
    assert H * 128 % (2 * p.lanes) == 0
    assert B % p.batch == 0 and (p.tokens == T or p.tokens == 8192 * 128 // p.lanes)
    assert p.batch * p.tokens * p.lanes <= 2**20 and p.vmem < 30 * 2**20
    assert p.batch_in_rows == (T < 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_with_nothing_new_keeps_every_bit(small_blocks, dtype):
    for T in (1, 40):
        x, weight, state = short_conv_inputs(3, T, 128, 4, dtype=dtype)
        state[1, 0, :2] = -0.0
        num_valid = np.array([T, 0, 0], np.int32)
        spoil_padding(x, num_valid)
        _, new_state = run(x, weight, state, num_valid)
        assert np.asarray(new_state)[1:].tobytes() == state[1:].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_give_every_bit_of_the_whole(small_blocks, dtype):
    """Through both forms of the kernel: the batch in rows for 1 and 3 tokens."""
    pieces = (1, 33, 3, 2)
    x, weight, state = short_conv_inputs(2, sum(pieces), 128, 4, dtype=dtype)
    whole, last_state = run(x, weight, state)
    start, outputs = 0, []
    for n in pieces:
        y, state = run(x[:, start : start + n], weight, state)
        outputs.append(y)
        start += n
    np.testing.assert_array_equal(jnp.concatenate(outputs, axis=1), whole)
    np.testing.assert_array_equal(state, last_state)


@pytest.mark.parametrize("splits", [1, 2])
def test_gradients_are_those_of_xla(splits):
    num_valid = np.array([0, 3, 9], np.int32)
    x, weight, state = short_conv_inputs(3, 9, 128 * splits, 4)
    spoil_padding(x, num_valid)
    num_valid = jnp.asarray(num_valid)
    mix = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)

    def loss(x, weight, state, backend):
        y, new_state = short_conv(
            x, weight, state, num_valid=num_valid, splits=splits, backend=backend
        )
        if splits > 1:
            y = jnp.concatenate(y, axis=-1)
        return jnp.sum(y * mix) + jnp.sum(new_state**2)

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    got = gradient(x, weight, state, "pallas_mosaic_tpu")
    for g, w in zip(got, gradient(x, weight, state, "xla"), strict=True):
        assert np.all(np.isfinite(g))
        assert relative_l2(g, w) < TOLERANCES["short_conv.gradients", "float32"]


def races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races: Any = interpret_pallas_call.races
    found = races.races_found
    interpret_pallas_call.reset_tpu_interpret_mode_state()
    return found


def test_cores_do_not_race(small_blocks):
    """Two cores share the blocks of channels, as on a v5p."""
    interpret = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    for B, T in ((1, 40), (16, 1)):
        x, weight, state = short_conv_inputs(B, T, 512, 4, dtype="bfloat16")
        num_valid = np.full((B,), max(T - 6, 1), np.int32)
        spoil_padding(x, num_valid)
        launch = functools.partial(kernel.launch, splits=2, interpret=interpret)
        y, new_state = jax.jit(launch)(x, weight, state, num_valid)
        want, want_state = short_conv_float64.short_conv(x, weight, state, num_valid)
        assert relative_l2(jnp.concatenate(y, -1), want) < TOLERANCES["short_conv", "bfloat16"]
        np.testing.assert_array_equal(new_state, want_state)
        assert not races_found()


def test_a_race_would_be_found():
    def both_write(x, y):
        y[...] = x[...] + pl.program_id(0).astype(jnp.float32)

    spec = pl.BlockSpec((8, 128), lambda core: (0, 0))
    y = pl.pallas_call(
        both_write,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        grid=(2,),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2),
    )(jnp.zeros((8, 128), jnp.float32))
    jax.block_until_ready(y)
    assert races_found()


@pytest.mark.parametrize(
    ("inputs", "splits", "message"),
    [
        ((1, 4, 192, 4), 1, "C=192 in splits=1, only multiples of 128"),
        ((1, 4, 384, 4), 2, "C=384 in splits=2, only multiples of 128"),
        ((1, 4, 128, 1), 1, "W=1, only 2 to 8"),
        ((1, 4, 128, 9), 1, "W=9, only 2 to 8"),
        ((40000, 8, 128, 4), 1, "the state of B=40000 rows and W=4 does not fit"),
    ],
)
def test_what_the_kernel_refuses(inputs, splits, message):
    B, T, C, W = inputs
    with pytest.raises(NotImplementedError, match=message):
        kernel.plan(B, T, C, W, jnp.bfloat16, splits)


def test_other_dtypes_are_refused():
    x, weight, state = short_conv_inputs(1, 4, 128, 4)
    x, state = x.astype(np.float16), state.astype(np.float16)
    with pytest.raises(NotImplementedError, match="x in float16, only bfloat16 and float32"):
        short_conv(x, weight, state, backend="pallas_mosaic_tpu")


@pytest.mark.parametrize(("B", "T"), [(1, 8192), (64, 1)])
def test_compiled_for_a_v6e(B, T):
    """16 heads; nothing but the kernel touches x, y or the state, which is updated in place."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which has the compiler, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # other tests may compile at this moment
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v6e-4")
        device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[0]
    C = 3 * 16 * 128
    shapes = {
        "x": ((B, T, C), jnp.bfloat16),
        "weight": ((C, 4), jnp.float32),
        "conv_state": ((B, 3, C), jnp.bfloat16),
        "num_valid": ((B,), jnp.int32),
    }
    arguments = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
        for name, (shape, dtype) in shapes.items()
    }
    run = jax.jit(functools.partial(short_conv, splits=3), donate_argnames="conv_state")
    with compile_for("tpu"):
        program = run.lower(**arguments).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert memory.temp_size_in_bytes < 2 * B * T * C // 50
    assert "transpose(" not in text
    copied = [line for line in text.splitlines() if " copy(" in line and "s32" not in line]
    assert not copied
