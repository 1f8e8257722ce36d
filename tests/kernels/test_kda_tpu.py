"""The TPU's chunked KDA, in interpret mode on the CPU and through the TPU's compiler.

Operands are rounded to bfloat16 in the kernel itself, wherever the matrix units take them so; what
is measured here is therefore the arithmetic of the TPU, but for the order of its sums.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chunk_kda, recurrent_kda
from pallas_kernels.gradients import with_gradients_of
from pallas_kernels.kda import pallas_mosaic_tpu, tpu_chunk
from tests.cases import KDA_REGIMES, TOLERANCES, kda_inputs, relative_l2
from tests.oracles import kda_float64

H, K = 2, 128


@functools.partial(jax.jit, static_argnames=("lower_bound", "races"))
def launch(arguments, num_valid=None, *, lower_bound, races=False):
    interpret = pltpu.InterpretParams(detect_races=races)
    options = {"lower_bound": lower_bound, "num_valid": num_valid, "interpret": interpret}
    return pallas_mosaic_tpu.chunk_kda(*arguments, **options)


def races_found() -> bool:
    """What the last launch with a race detector says; on older jax it only prints."""
    races = interpret_pallas_call.races
    assert races is not None
    return races.races_found


def side_by_side(arguments):
    """The same with heads in one axis."""
    return [x.reshape(*x.shape[:2], -1) for x in arguments[:4]] + arguments[4:]


def errors(arguments, lower_bound, num_valid=None, *, flat=False, **options):
    want, states = kda_float64.kda(*arguments, num_valid=num_valid, lower_bound=lower_bound)
    given = side_by_side(arguments) if flat else arguments
    o, state = launch(given, num_valid, lower_bound=lower_bound, **options)
    assert o.shape == given[2].shape and o.dtype == given[2].dtype
    return relative_l2(np.reshape(o, want.shape), want), relative_l2(state, states[:, -1])


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("regime", KDA_REGIMES)
def test_gate_regimes_match_float64(regime, dtype):
    """Two steps of two chunks, the last one cut short; both forms of the inputs."""
    arguments, lower_bound = kda_inputs(1, 150, H, K, K, regime, dtype=dtype)
    output, state = errors(arguments, lower_bound, flat=dtype == "float32")
    assert output < TOLERANCES["chunk_kda.tpu", dtype]
    assert state < TOLERANCES["chunk_kda.tpu", dtype]


@pytest.mark.slow
@pytest.mark.parametrize("noise", (0.0, 0.1), ids=("identical keys", "common plus noise"))
def test_repeated_keys(noise, optimized):
    """The triangular system is far from the identity here, and 8,192 tokens carry what is lost."""
    arguments, lower_bound = kda_inputs(1, 8192, H, K, K, "slow")
    arguments[1] = (arguments[1][:, :1] + noise * arguments[1]).astype(np.float32)
    arguments[3][:] = -9.0
    arguments[4][:] = np.log(0.95 / 0.05)
    arguments[:5] = [x.astype(ml_dtypes.bfloat16) for x in arguments[:5]]
    error = max(errors(arguments, lower_bound))
    assert error < TOLERANCES["chunk_kda.tpu.hard", "bfloat16"]


def test_ragged_rows_with_nan_padding():
    """A row in the middle is idle, with a state that arithmetic would not keep bit for bit."""
    num_valid = np.array([130, 0, 1, 64], np.int32)
    arguments, lower_bound = kda_inputs(4, 200, H, K, K, dtype="bfloat16")
    arguments[-1][1, 0, 0, :2] = -0.0, np.nan
    for array in arguments[:5]:
        for row, n in enumerate(num_valid):
            array[row, n:] = np.nan
    with np.errstate(invalid="ignore"):
        want, states = kda_float64.kda(*arguments, num_valid=num_valid, lower_bound=lower_bound)
    for flat in (False, True):
        given = side_by_side(arguments) if flat else arguments
        o, state = launch(given, num_valid, lower_bound=lower_bound)
        assert np.asarray(state[1]).tobytes() == arguments[-1][1].tobytes()
        used = np.array([0, 2, 3])
        o = np.asarray(o).reshape(want.shape)
        assert relative_l2(o[used], want[used]) < TOLERANCES["chunk_kda.tpu", "bfloat16"]
        assert relative_l2(state[used], states[used, -1]) < TOLERANCES["chunk_kda.tpu", "bfloat16"]
        for row, n in enumerate(num_valid):
            assert not np.any(o[row, n:])


def test_a_state_carried_over_calls_is_that_of_one_call():
    """In float32, where what cutting changes can be told from rounding; cuts off every edge."""
    arguments, lower_bound = kda_inputs(1, 200, H, K, K, "strong")
    whole, final = launch(arguments, lower_bound=lower_bound)
    state, parts, start = arguments[-1], [], 0
    for end in (64, 75, 200):
        piece = [x[:, start:end] for x in arguments[:5]]
        o, state = launch([*piece, *arguments[5:7], state], lower_bound=lower_bound)
        parts.append(o)
        start = end
    assert relative_l2(np.concatenate(parts, 1), whole) < 5e-6
    assert relative_l2(state, final) < 5e-6


def test_several_groups_of_heads():
    """16 heads are two groups, which the grid's first axis divides."""
    arguments, lower_bound = kda_inputs(1, 64, 16, K, K, dtype="bfloat16")
    assert max(errors(arguments, lower_bound)) < TOLERANCES["chunk_kda.tpu", "bfloat16"]


def test_no_race():
    arguments, lower_bound = kda_inputs(1, 200, H, K, K, dtype="bfloat16")
    jax.block_until_ready(launch(arguments, lower_bound=lower_bound, races=True))
    assert not races_found()


def test_a_planted_race_is_found():
    """Two cores write the same block: what the test above would have seen."""

    def write(out):
        out[...] = jnp.full(out.shape, pl.program_id(0).astype(jnp.float32))

    jax.block_until_ready(
        pl.pallas_call(
            write,
            grid=(2,),
            out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
            interpret=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2),
        )()
    )
    assert races_found()


@pytest.mark.parametrize("op", (chunk_kda, recurrent_kda))
def test_gradients_are_those_of_xla(op):
    """The kernel's stand-in gives nothing, so what comes back is not its own."""
    arguments, lower_bound = kda_inputs(1, 5, H, K, K)

    def nothing(q, k, v, *arrays, **_):
        return jnp.zeros_like(v), jnp.zeros_like(arrays[-1])

    in_xla = functools.partial(op, backend="xla")

    def loss(run, *arrays):
        o, state = run(*arrays, lower_bound=lower_bound)
        return jnp.sum(o) + jnp.sum(state)

    every = tuple(range(1, 9))
    got = jax.grad(loss, every)(with_gradients_of(in_xla, nothing), *arguments)
    want = jax.grad(loss, every)(in_xla, *arguments)
    for a, b in zip(got, want, strict=True):
        assert relative_l2(a, b) < 1e-6
    kernel = functools.partial(loss, functools.partial(op, backend="pallas_mosaic_tpu"))
    shapes = jax.eval_shape(jax.grad(kernel, tuple(range(8))), *arguments)
    assert [x.shape for x in shapes] == [x.shape for x in arguments]


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((1, 64, 2, 64), "bfloat16", "K=64 and V=64, only 128"),
        ((1, 64, 3, 128), "bfloat16", "H=3, only even numbers up to 128"),
        ((1, 64, 20, 128), "bfloat16", "H=20, only multiples of 8 above 16"),
        ((1, 64, 2, 128), "float16", "inputs in float16, only bfloat16 and float32"),
    ],
)
def test_what_it_cannot_do(shape, dtype, reason):
    B, T, H, K = shape
    arguments, lower_bound = kda_inputs(B, T, H, K, K)
    arguments[:5] = [x.astype(dtype) for x in map(jnp.asarray, arguments[:5])]
    with pytest.raises(NotImplementedError, match=reason):
        chunk_kda(*arguments, lower_bound=lower_bound, backend="pallas_mosaic_tpu")


def test_words_hold_the_even_head_in_their_low_half():
    """How bfloat16 heads are loaded and stored on a TPU; this interpreter has the view of a ref."""
    plan = tpu_chunk.Plan(
        heads=4,
        chunks=1,
        heads_apart=True,
        dtype=jnp.dtype("bfloat16"),
        lower_bound=-5.0,
        scale=1.0,
        interpreted=False,
    )
    x = np.random.default_rng(0).standard_normal((1, 64, 4, K)).astype(ml_dtypes.bfloat16)

    def load(x, out):
        words = tpu_chunk._words(x, plan)[pl.ds(1, 64, stride=2), :]
        out[0] = pltpu.bitcast(words << 16, jnp.float32)
        out[1] = pltpu.bitcast(words & jnp.uint32(0xFFFF0000), jnp.float32)

    shape = jax.ShapeDtypeStruct((2, 64, K), jnp.float32)
    pair = pl.pallas_call(load, out_shape=shape, interpret=True)(x)
    assert np.array_equal(pair, np.moveaxis(x[0, :, 2:], 1, 0).astype(np.float32))
