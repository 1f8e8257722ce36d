"""The count of cycles in libtpu's schedules, on schedules and kernels whose counts are known."""

import functools
import importlib.metadata
import importlib.util
import json
import pathlib
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks import tpu_static
from benchmarks.tpu_schedule import Program, ScheduleError, read_bundles, read_hlo, read_kernel
from benchmarks.tpu_static import Case, compare, measure


def counts(*bundles: str, **run) -> list[float]:
    """How often each bundle of a schedule runs that has these at its beginning, and eight more."""
    texts = [*bundles, *[""] * 8]
    text = "\n".join(f" {i:#x} LB: > {{ {text} }}" for i, text in enumerate(texts))
    return Program(text).run(**run)[0].tolist()


EMPTY = [""] * 4  # a branch leads away five bundles later


def test_a_loop_runs_its_bundles_and_those_behind_its_branch():
    found = counts(
        "%s1_s0 = smov.u32 0 /* copy for cssa */",
        "%s3_s0 = sadd.s32 2, %s2_s0  ;;  %s2_s0 = sphi %s1_s0, %s3_s0 /* phi copy */",
        "%p4_p0 = scmp.ge.s32.totalorder %s3_s0, 14 /* loop exit test */",
        "%5 = sbr.rel (!%p4_p0) target bundleno = 1 (0x1), region = 3",
        *EMPTY,
    )
    assert found == [1] + [7] * 7 + [1] * 8


def test_a_block_on_the_iteration_runs_as_often_as_its_condition_holds():
    """A pipeline's stage, its counter spilled to scalar memory."""
    found = counts(
        "%s1_s0 = smov.u32 0",
        "%s2_s0 = sphi %s1_s0, %s9_s0  ;;  %3 = sst [smem:[#allocation7_spill]] %s2_s0",
        "%p4_p0 = scmp.ge.s32.totalorder %s2_s0, 1  ;;  %p5_p1 = scmp.lt.s32.totalorder %s2_s0, 5",
        "%p6_p2 = pnand %p5_p1, %p4_p0",
        "%7 = sbr.rel (%p6_p2) target bundleno = 12 (0xc), region = 28",
        *EMPTY,
        *[""] * 3,  # the block
        "%s8_s1 = sld [smem:[#allocation7_spill]]",
        "%s9_s0 = sadd.s32 1, %s8_s1",
        "%p10_p0 = scmp.ge.s32.totalorder %s9_s0, 6",
        "%11 = sbr.rel (!%p10_p0) target bundleno = 1 (0x1), region = 105",
        *EMPTY,
    )
    assert found == [1] + [6] * 8 + [4] * 3 + [6] * 8 + [1] * 8


ON_DATA = (
    "%s1_s0 = inlined_call_operand.smem [shape: s32[6], index: 2, kind: input, shape index: {}]",
    "%s2_s1 = sld [smem:[%s1_s0 + $0x3]]",
    "%p3_p0 = scmp.le.s32.totalorder %s2_s1, 4",
    "%4 = sbr.rel (%p3_p0) target bundleno = 60 (0x3c), region = 28",
    *EMPTY,
    *[""] * 52,
)


@pytest.mark.parametrize("value", (4, 5))
def test_a_block_on_prefetched_scalars_follows_their_values(value):
    found = counts(*ON_DATA, scalars={2: np.array([9, 9, 9, value, 9, 9])})
    assert found == [1] * 8 + [float(value > 4)] * 52 + [1] * 8


def test_a_block_on_data_is_reported_and_may_be_decided():
    text = "\n".join(f" {i:#x} : {{ {text} }}" for i, text in enumerate([*ON_DATA, "", ""]))
    _, (block,) = Program(text).run()
    assert (block.cycles, block.branch.span) == (52, (8, 60))
    assert counts(*ON_DATA, decided={3: 0.25}) == [1] * 8 + [0.25] * 52 + [1] * 8


def test_each_core_has_its_own_part():
    lines = (
        "%s1_s0 = sld [smem:[#allocation0]] /* megacore core id :: core id */",
        "%p2_p0 = scmp.ne.s32.totalorder %s1_s0, 0",
        "%3 = sbr.rel (%p2_p0) target bundleno = 10 (0xa), region = 4",
        *EMPTY,
    )
    assert sum(counts(*lines, core=0)) == 15 and sum(counts(*lines, core=1)) == 12


def test_comments_of_several_lines_belong_to_their_bundle():
    text = "== header\n  0x0 : > { %1 = dma /*\nbounds: (1, 2)\n */ }\n 0x1 PF: >> {} /* End */"
    assert [x.startswith(" %1 = dma") for x in read_bundles(text)] == [True, False]
    with pytest.raises(ScheduleError, match="no bundles"):
        Program("HloModule jit_f")


def test_what_runs_around_a_kernel_and_the_bytes_that_it_moves():
    hlo = """HloModule jit_f

%fused (p: f32[8,128]) -> f32[8,128] {
  ROOT %add.9 = f32[8,128]{1,0} add(%p, %p)
}

ENTRY %main (x: f32[8,128], y: bf16[4]) -> (f32[8,128], s32[]) {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %y = bf16[4]{0:T(256)} parameter(1)
  %fusion = f32[8,128]{1,0:T(8,128)S(1)} fusion(%x), kind=kLoop, calls=%fused
  %k.1 = (f32[8,128]{1,0:T(8,128)}, f8e4m3fn[16]{0}) custom-call(%fusion, %y, %x), """ + (
        """custom_call_target="tpu_custom_call", backend_config={}
  ROOT %tuple = (f32[8,128]{1,0}) tuple(%k.1)
}
"""
    )
    assert read_hlo(hlo) == [("fusion", False, 4096), ("k.1", True, 4096 + 16 + 8 + 4096)]


def entry(**changes) -> dict:
    call = {"name": "k.1", "cycles": 1000.0, "spill_stores": 0.0, "spill_fills": 10.0}
    call |= {key: value for key, value in changes.items() if key in call}
    whole = {"jax": "1", "libtpu": "2", "temporaries": 100, "kernels": [call]}
    return whole | {key: value for key, value in changes.items() if key in whole}


def test_only_changes_above_a_twentieth_are_reported():
    assert compare(entry(cycles=1049.0, spill_fills=9.9), entry()) == ([], [])
    rose, fell = compare(entry(cycles=900.0, spill_stores=0.5, temporaries=200), entry())
    assert rose == ["temporaries rose from 100 to 200", "k.1 spill_stores rose from 0.0 to 0.5"]
    assert fell == ["k.1 cycles fell from 1,000.0 to 900.0"]


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (None, "not in the record"),
        (entry(libtpu="3"), "do not compare: the record has libtpu 3, here is 2"),
        (entry(name="other.1"), r"kernels \['other.1'\], here are \['k.1'\]"),
    ],
)
def test_what_does_not_compare_is_refused(old, message):
    with pytest.raises(ValueError, match=message):
        compare(entry(), old)


def test_a_record_of_another_compiler_is_refused_before_anything_is_compiled(
    tmp_path, monkeypatch, capsys
):
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"chunk_kda/B1/v6e": entry(jax="0.1", libtpu="0.0")}))
    monkeypatch.setattr(tpu_static, "RECORD", record)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.0")
    monkeypatch.setattr("sys.argv", ["tpu_static", "--check", "--quick"])
    with pytest.raises(SystemExit, match="1"):
        tpu_static.main()
    assert "the record has jax 0.1, here is 1.0" in capsys.readouterr().err


Axis = Literal["parallel", "arbitrary"]

# Kernels that are compiled, each so small that its cycles can be told by hand.


def _matmul(x, weight, out):
    out[...] = jnp.dot(x[...], weight[...], preferred_element_type=jnp.float32)


def _loops(times, x, out, *, outer: int, inner: int):
    def body(_, value):
        return jnp.exp(value) + 1.0

    def bodies(_, value):
        return lax.fori_loop(0, inner, body, value) if inner > 1 else body(0, value)

    out[...] = lax.fori_loop(0, outer or times[0], bodies, x[...])


def _when(times, x, out):
    out[...] = x[...]

    @pl.when(times[pl.program_id(0)] > 2)
    def _():
        out[...] = jnp.sin(x[...])


def _call(kernel, name: str, *, steps: int = 1, axis: Axis = "arbitrary"):
    """kernel over blocks [64, 128]."""

    def call(times, x):
        block = pl.BlockSpec((64, 128), lambda i, _: (i, 0))
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=(steps,), in_specs=[block], out_specs=block
            ),
            out_shape=jax.ShapeDtypeStruct((steps * 64, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=(axis,)),
            name=name,
        )(times, x[: steps * 64])

    return call


def _multiply(name: str, steps: int):
    def call(x, weight):
        rows = pl.BlockSpec((512, 1024), lambda i: (i, 0))
        return pl.pallas_call(
            _matmul,
            grid=(steps,),
            in_specs=[rows, pl.BlockSpec((1024, 1024), lambda i: (0, 0))],
            out_specs=rows,
            out_shape=jax.ShapeDtypeStruct((steps * 512, 1024), jnp.float32),
            name=name,
        )(x[: steps * 512], weight)

    return call


TIMES = np.array([3, 1, 4, 1], np.int32)
LOOPS = {
    "l10": (10, 1),
    "l40": (40, 1),
    "n5": (5, 7),
    "n10": (10, 7),
    "n5w": (5, 14),
    "data": (0, 1),
}


def _known():
    def run(x, weight, small, times):
        loops = [
            _call(functools.partial(_loops, outer=a, inner=b), name)(times, small)
            for name, (a, b) in LOOPS.items()
        ]
        return (
            _multiply("mm4", 4)(x, weight),
            _multiply("mm8", 8)(x, weight),
            _call(_when, "when", steps=4)(times, small),
            *loops,
        )

    return run, {
        "x": jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16),
        "weight": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16),
        "small": jax.ShapeDtypeStruct((256, 128), jnp.float32),
        "times": TIMES,
    }


def _cores(steps: int, axis: Axis):
    kernel = functools.partial(_loops, outer=10, inner=1)
    arguments = {
        "times": TIMES,
        "x": jax.ShapeDtypeStruct((steps * 64, 128), jnp.float32),
    }
    return _call(kernel, "cores", steps=steps, axis=axis), arguments


def _large():
    def kernel(x, out, scratch):
        scratch[:8] = x[...]
        out[...] = scratch[:8]

    def run(x):
        scratch = [pltpu.VMEM((2**20, 128), jnp.float32)]
        return pl.pallas_call(kernel, out_shape=x, scratch_shapes=scratch, name="large")(x)

    return run, {"x": jax.ShapeDtypeStruct((8, 128), jnp.float32)}


def _refused():
    def run(x):
        raise NotImplementedError(f"no {x.dtype}")

    return run, {"x": jax.ShapeDtypeStruct((8,), jnp.float32)}


def _case(name: str, build) -> Case:
    return Case("test", name, build, {"call": 1}, table="tests.test_tpu_static:CASES")


CASES = {
    case.name: case
    for case in (
        _case("known", _known),
        _case("parallel", functools.partial(_cores, 4, "parallel")),
        _case("arbitrary", functools.partial(_cores, 4, "arbitrary")),
        _case("large", _large),
        _case("refused", _refused),
    )
}


@pytest.fixture(scope="module")
def libtpu():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which has the compiler, is not installed")


@pytest.fixture(scope="module")
def known(libtpu, tmp_path_factory):
    """(measured kernels by name, the folder of dumps)."""
    dump = tmp_path_factory.mktemp("dump")
    result = measure(CASES["test/known"], "v6e", dump)
    return {name.partition(".")[0]: kernel for name, kernel in result.kernels.items()}, dump


def test_a_matmul_takes_what_its_matrix_units_need(known):
    """512 rows times 4 x 4 tiles of 256 x 256, two units that take two rows of bfloat16 a cycle."""
    needed = 512 * 4 * 4 // (2 * 2)
    few, many = known[0]["mm4"], known[0]["mm8"]
    assert [k.use["MATMUL"] for k in (few, many)] == [2 * needed * 4, 2 * needed * 8]
    step = (many.cycles[0] - few.cycles[0]) / 4
    assert needed < step < 1.25 * needed  # the first result comes after some 200 cycles
    assert few.share("MATMUL") == pytest.approx(needed * 4 / few.cycles[0])
    windows = many.phases(5)
    assert sum(cycles for cycles, _ in windows) == pytest.approx(
        sum(many.counts[slice(*many.loop)])
    )


def test_loops_are_multiplied_out(known):
    cycles = {name: known[0][name].cycles[0] for name in LOOPS}
    body, rest = divmod(cycles["l40"] - cycles["l10"], 30)
    assert rest == 0 and 10 * body < cycles["l10"] < 10 * body + 300
    # p + outer (q + inner r)
    assert cycles["n5w"] - cycles["n5"] == 5 * 7 * body
    outer, rest = divmod(cycles["n10"] - cycles["n5"], 5)
    assert rest == 0 and 7 * body <= outer < 7 * body + 50
    assert cycles["data"] - cycles["l10"] == pytest.approx(-7 * body, abs=20)  # TIMES[0] is 3


def test_what_depends_on_data_is_an_error_until_it_is_told(known):
    kernels, dump = known
    with pytest.raises(
        ScheduleError, match="0 blocks and 1 loops depend on data, expected 0 and 0"
    ):
        read_kernel(dump, "data.1")
    assert read_kernel(dump, "data.1", trips=(3,)).cycles == kernels["data"].cycles

    with pytest.raises(ScheduleError, match="1 blocks and 0 loops .*: block of [0-9]+ cycles at"):
        read_kernel(dump, "when.1")
    # Two of TIMES are above 2.
    assert read_kernel(dump, "when.1", shares=(0.5,)).cycles == kernels["when"].cycles
    with pytest.raises(ScheduleError, match="0 dumps of packed-bundles-post-ra for nothing.1"):
        read_kernel(dump, "nothing.1")


def test_a_parallel_axis_is_cut_over_the_cores_and_no_other(libtpu, tmp_path):
    found = []
    for name in ("parallel", "arbitrary"):
        (tmp_path / name).mkdir()
        result = measure(CASES[f"test/{name}"], "v5p", tmp_path / name)
        (kernel,) = result.kernels.values()
        found.append((kernel.cycles, result.entry["kernels"][0]["idle_cores"]))
        assert ("1 of 2 cores idle" in "".join(tpu_static.rows(result))) == (found[-1][1] > 0)
    ((first, second), none), ((whole, rest), one) = found
    assert (none, one) == (0, 1)
    assert first == second and rest < 50 and 0.5 < first / whole < 0.8


def test_a_failed_compilation_says_why(libtpu, tmp_path):
    with pytest.raises(ScheduleError, match="(?is)does not compile.*vmem"):
        measure(CASES["test/large"], "v6e", tmp_path, timeout=60)


def test_an_op_without_the_backend_is_reported(libtpu, tmp_path):
    result = measure(CASES["test/refused"], "v6e", tmp_path)
    assert result.refused == "no float32" and not result.kernels
    assert "not there: no float32" in "".join(tpu_static.rows(result))


@pytest.mark.parametrize(
    "name", [case.name for case in tpu_static.CASES.values() if case.quick], ids=str
)
def test_no_kernel_costs_more_than_the_record_says(libtpu, tmp_path, name):
    """`python -m benchmarks.tpu_static --quick --check`; `--update` where a change is meant."""
    old = tpu_static.read_record()[f"{name}/v6e"]
    here = {package: importlib.metadata.version(package) for package in ("jax", "libtpu")}
    try:
        tpu_static.require_same_versions(here, old)
    except ValueError as error:
        pytest.skip(str(error))
    rose, _ = compare(measure(tpu_static.CASES[name], "v6e", tmp_path).entry, old)
    assert rose == []


def test_the_record_has_cases_only():
    keys = {f"{case.name}/{chip}" for case in tpu_static.CASES.values() for chip in case.chips}
    assert tpu_static.read_record().keys() <= keys
    assert pathlib.Path(tpu_static.RECORD).name == "tpu_static.json"
