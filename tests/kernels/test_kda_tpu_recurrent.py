"""The recurrent KDA kernel for TPU: interpreted on the CPU against float64, and compiled.

Interpret mode with its race detector simulates the copies and semaphores of the kernel, which move
all of its arrays.
"""

import functools
import importlib.util

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the detector only prints
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from pallas_kernels.dispatch import compile_for
from pallas_kernels.kda import pallas_mosaic_tpu_recurrent as kernel
from tests.cases import KDA_REGIMES, TOLERANCES, kda_inputs, relative_l2
from tests.oracles import kda_float64

H, D = 2, 128


def call(arguments, num_valid=None, **options):
    return kernel.recurrent_kda(*arguments, num_valid=num_valid, **options)


STATIC = ("lower_bound", "scale", "return_states", "interpret")
run = jax.jit(call, static_argnames=STATIC)


def side_by_side(arguments):
    return [x.reshape(*x.shape[:2], -1) for x in arguments[:4]] + list(arguments[4:])


def with_nan(arguments, num_valid):
    """NaN in padding, and in the states of rows without tokens."""
    for row, n in enumerate(num_valid):
        for x in arguments[:5]:
            x[row, n:] = np.nan
    arguments[-1][num_valid == 0] = np.nan
    arguments[-1][num_valid == 0, ..., 0] = -0.0
    return arguments


def ragged(T, dtype):
    """More busy rows than there are slots, and idle ones everywhere among them."""
    num_valid = np.array([0, T, 0, 0, 1, min(T, 2), 1, 0, min(T, 3), 0], np.int32)
    arguments, lower_bound = kda_inputs(len(num_valid), T, H, D, D, dtype=dtype)
    return with_nan(arguments, num_valid), lower_bound, num_valid


def races_found():
    races = interpret_pallas_call.races
    assert races is not None
    return races.races_found


@pytest.fixture(params=["on_wait"])
def simulated(request, capsys):
    """The interpreter with its race detector. Params: when copies take place."""
    yield pltpu.InterpretParams(detect_races=True, dma_execution_mode=request.param)
    assert not races_found()
    assert "non-zero count" not in capsys.readouterr().out  # of a semaphore, at the end


AT_ONCE = pytest.mark.parametrize("simulated", ["eager"], indirect=True)


def check(arguments, lower_bound, num_valid=None, *, flat=False, run=run, **options):
    """Outputs and states against float64; what the call must leave alone, bit for bit."""
    inputs = side_by_side(arguments) if flat else arguments
    o, state = run(inputs, num_valid, lower_bound=lower_bound, **options)
    o, state = np.asarray(o), np.asarray(state)
    assert o.dtype == arguments[2].dtype and state.dtype == np.float32
    assert o.shape == inputs[2].shape
    options.pop("interpret", None)
    return_states = options.pop("return_states", False)
    with np.errstate(invalid="ignore"):
        want, states = kda_float64.kda(
            *arguments, lower_bound=lower_bound, num_valid=num_valid, **options
        )
    counts = np.full(len(o), o.shape[1]) if num_valid is None else num_valid
    busy = counts > 0
    if not return_states:
        states = states[:, -1]
    o = o.reshape(want.shape)
    assert relative_l2(o, want) < TOLERANCES["recurrent_kda", arguments[0].dtype.name]
    error = relative_l2(state[busy], states[busy])
    assert error < TOLERANCES["recurrent_kda.states", "float32"]
    for row, n in enumerate(counts):
        assert not np.any(o[row, n:])
        if n == 0:
            before = np.broadcast_to(arguments[-1][row], state[row].shape)
            assert state[row].tobytes() == before.tobytes()
        elif return_states:
            assert np.all(state[row, n:] == state[row, n - 1])
    return o, state


@pytest.mark.parametrize("regime", KDA_REGIMES)
def test_gate_regimes_match_float64(regime):
    """In the interpreter that runs where there is no TPU."""
    check(*kda_inputs(2, 3, H, D, D, regime))


@pytest.mark.parametrize(
    ("T", "dtype", "flat"),
    [
        (1, "bfloat16", True),
        (1, "float32", False),
        (3, "bfloat16", False),
        (3, "float32", True),
        (16, "bfloat16", True),
        (16, "float32", False),
    ],
)
def test_ragged_rows_with_nan_in_padding(T, dtype, flat, simulated):
    arguments, lower_bound, num_valid = ragged(T, dtype)
    check(arguments, lower_bound, num_valid, flat=flat, interpret=simulated)


@AT_ONCE
@pytest.mark.parametrize(("B", "busy"), [(20, ()), (20, (19,)), (20, (3,)), (1, ())])
def test_mostly_idle_rows(B, busy, simulated):
    """Some of them more than copies of zeros may be under way."""
    num_valid = np.zeros(B, np.int32)
    num_valid[list(busy)] = 1
    arguments, lower_bound = kda_inputs(B, 1, H, D, D)
    with_nan(arguments, num_valid)
    check(arguments, lower_bound, num_valid, interpret=simulated)


@pytest.fixture
def fresh(monkeypatch):
    """`run` traced anew, with two heads in a step."""
    monkeypatch.setattr(kernel, "_HEADS", 2)
    return jax.jit(call, static_argnames=STATIC)


def test_groups_of_heads(simulated, fresh):
    num_valid = np.array([2, 0, 1], np.int32)
    arguments, lower_bound = kda_inputs(3, 2, 8, D, D, "unbounded")
    with_nan(arguments, num_valid)
    check(arguments, lower_bound, num_valid, run=fresh, scale=0.5, interpret=simulated)


def test_states_after_every_token(simulated):
    arguments, lower_bound, num_valid = ragged(3, "float32")
    options = {"lower_bound": lower_bound, "interpret": simulated}
    o, states = check(arguments, num_valid=num_valid, flat=True, return_states=True, **options)
    same_o, final_state = run(side_by_side(arguments), num_valid, **options)
    np.testing.assert_array_equal(o.reshape(same_o.shape), same_o)
    np.testing.assert_array_equal(states[:, -1], final_state)


def test_any_cut_gives_the_same():
    arguments, lower_bound = kda_inputs(2, 6, H, D, D)

    def in_calls_of(n):
        state, outputs = arguments[-1], []
        for start in range(0, 6, n):
            part = [x[:, start : start + n] for x in arguments[:5]]
            o, state = run([*part, *arguments[5:7], state], None, lower_bound=lower_bound)
            outputs.append(o)
        return np.concatenate(outputs, axis=1), state

    for got, want in zip(in_calls_of(1), in_calls_of(3), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("B", "heads"), [(4, 2), (1, 8)], ids=["rows", "heads"])
def test_two_cores_share(B, heads, fresh, monkeypatch):
    monkeypatch.setattr(kernel, "num_cores", lambda: 2)
    arguments, lower_bound = kda_inputs(B, 1, heads, D, D, dtype="bfloat16")
    num_valid = np.array([1, 0, 0, 1][:B], np.int32)
    interpret = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    with_nan(arguments, num_valid)
    check(arguments, lower_bound, num_valid, run=fresh, interpret=interpret)
    assert not races_found()


@pytest.mark.parametrize(
    ("B", "heads", "cores", "want"),
    [
        (4, 16, 1, (1, 4, 1, 16)),
        (4, 64, 2, (2, 2, 4, 16)),
        (1, 16, 2, (2, 1, 1, 8)),
        (3, 64, 2, (2, 3, 2, 16)),
        (3, 24, 2, (1, 3, 3, 8)),
        (1, 4, 2, (1, 1, 1, 4)),
    ],
)
def test_the_plan(B, heads, cores, want):
    """Cores, rows of each, groups of heads of each, heads in a group."""
    options = {"heads_apart": True, "lower_bound": -5.0, "scale": 1.0, "return_states": False}
    p = kernel.plan(B, 1, heads, [np.dtype("float32")] * 5, cores, **options)
    assert (p.cores, p.rows, p.groups, p.heads) == want


def test_a_planted_race_is_found(monkeypatch):
    """A step that does not wait until what it works on has arrived."""

    class NeverWaitedFor:
        def __init__(self, copy):
            self.start, self.wait = copy.start, lambda: None

    read = kernel._Copies.read

    def careless(self, *place):
        return [NeverWaitedFor(copy) for copy in read(self, *place)]

    monkeypatch.setattr(kernel._Copies, "read", careless)
    arguments, lower_bound = kda_inputs(2, 1, H, D, D)
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    try:
        call(arguments, lower_bound=lower_bound, interpret=interpret)[1].block_until_ready()
    except jax.errors.JaxRuntimeError as error:  # newer versions do not only print
        assert "RACE DETECTED" in str(error)
    else:
        assert races_found()


@pytest.mark.parametrize(
    ("B", "T", "heads", "sizes", "dtype", "reason"),
    [
        (1, 17, 2, (128, 128), "float32", "T=17 tokens per row, at most 16"),
        (1, 1, 2, (64, 128), "float32", "K=64 and V=128, only 128"),
        (1, 1, 2, (128, 256), "float32", "K=128 and V=256, only 128"),
        (1, 1, 20, (128, 128), "float32", "H=20, only up to 16 or a multiple of 8"),
        (1, 1, 136, (128, 128), "float32", "H=136, only up to 16 or a multiple of 8"),
        (1, 1, 2, (128, 128), "float16", "inputs in float16"),
    ],
)
def test_what_it_cannot_do_is_said(B, T, heads, sizes, dtype, reason):
    arguments, lower_bound = kda_inputs(B, T, heads, *sizes)
    arguments[:5] = [x.astype(dtype) for x in arguments[:5]]
    with pytest.raises(NotImplementedError, match=reason):
        kernel.recurrent_kda(*arguments, lower_bound=lower_bound)


def test_compiles_for_v6e(monkeypatch):
    """With the state updated in place, and without copies beside the kernel."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which has the compiler, is not installed")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-4")
    device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[0]
    arguments, lower_bound = kda_inputs(4, 2, 16, D, D, dtype="bfloat16")
    specs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
        for x in side_by_side(arguments)
    ]
    call = functools.partial(kernel.recurrent_kda, lower_bound=lower_bound)
    with compile_for("tpu"):
        program = jax.jit(call, donate_argnums=7).lower(*specs).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert memory.alias_size_in_bytes == arguments[-1].nbytes
    assert memory.temp_size_in_bytes < 2**14
