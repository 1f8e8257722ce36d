"""What the TPU kernels cost, counted in the schedules that libtpu makes for them; no TPU is needed.

Each case of a kernel, a shape and a chip is compiled ahead of time (`pip install libtpu`), and
`benchmarks.tpu_schedule` counts the cycles of its schedule, stalls among them, and what the units
do in them. "HBM us" is the time to move operands and results once; a call takes at least the larger
of both. Hardware took 1.33 times the static time where that is known, for two kernels of others.
Two versions of one kernel compare better than that.

    python -m benchmarks.tpu_static                               # all; compared with the record
    python -m benchmarks.tpu_static --kernels chunk_kda --chips v6e --phases 12  # where it is bound
    python -m benchmarks.tpu_static --quick --check               # fails where a cost rose by 5 %
    python -m benchmarks.tpu_static --update                      # rewrites the record
    python -m benchmarks.tpu_static --peer tokamax --python VENV/bin/python --chips v6e

Columns: cycles of a call, of the busiest core where a chip's cores share a kernel; the same per
unit of work; shares of the cycles in which matrix units multiply or take weights, and of slots in
use; registers spilled and filled per grid step; VMEM; HBM that the compiled call needs beside
arguments and results; time in HLOs around the kernel. The record, tpu_static.json, has them with
the versions of jax and libtpu; schedules of other versions are not compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.tpu_schedule import PASSES, Kernel, ScheduleError, read_hlo, read_kernel

_ROOT = pathlib.Path(__file__).parents[1]
RECORD = pathlib.Path(__file__).with_suffix(".json")
_TOLERANCE = 1.05
_COUNTED = ("cycles", "spill_stores", "spill_fills")


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip as libtpu names it.

    Attributes:
        clock: Hz. Not published for all: the published bfloat16 peak over what the matrix units do
            in a cycle, which gives the published 1.5 GHz for v5e.
        bandwidth: of HBM, in bytes per second, of the part of a chip that one kernel runs on.
        cores: that share a kernel whose grid has a parallel axis.
    """

    topology: str
    accelerator: str
    clock: float
    bandwidth: float
    cores: int = 1


CHIPS = {
    "v5e": Chip("v5e:2x2", "v5litepod-4", 1.50e9, 819e9),
    "v5p": Chip("v5p:2x2x1", "v5p-8", 1.75e9, 2765e9, cores=2),
    "v6e": Chip("v6e:2x2", "v6e-4", 1.75e9, 1640e9),
    "tpu7x": Chip("tpu7x:2x2x1", "tpu7x-8", 2.20e9, 3690e9),  # one of the chip's two cores
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call to compile.

    Attributes:
        build: () -> (function, arguments by name). Arguments are shapes, or NumPy arrays where the
            schedule depends on the values: integers that a kernel prefetches.
        units: what work is counted in, and how much of it a call does.
        donate: arguments whose memory the results may take.
        shares, trips: by kernel, as in `tpu_schedule.read_kernel`: for what depends on other data.
        chips: that the kernel is for.
        quick: in --quick, which runs with every change.
        table: where a process that compiles it finds it.
    """

    kernel: str
    shape: str
    build: Callable[[], tuple[Callable, dict[str, Any]]]
    units: dict[str, int]
    donate: tuple[str, ...] = ()
    shares: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    trips: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    chips: tuple[str, ...] = tuple(CHIPS)
    quick: bool = False
    table: str = "benchmarks.tpu_static:CASES"

    @property
    def name(self) -> str:
        return f"{self.kernel}/{self.shape}"


def _kda(op: str, B: int, T: int, H: int, *, apart: bool):
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct as Spec

    import pallas_kernels

    K = 128
    x = Spec((B, T, H, K) if apart else (B, T, H * K), jnp.bfloat16)
    arguments: dict[str, Any] = dict.fromkeys(("q", "k", "v", "gate_logits"), x)
    arguments["beta_logits"] = Spec((B, T, H), jnp.bfloat16)
    arguments["A_log"] = Spec((H,), jnp.float32)
    arguments["dt_bias"] = Spec((H * K,), jnp.float32)
    arguments["initial_state"] = Spec((B, H, K, K), jnp.float32)
    function = getattr(pallas_kernels, op)
    return functools.partial(function, lower_bound=-5.0, backend=_BACKEND), arguments


def _short_conv(B: int, T: int, C: int, splits: int):
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct as Spec

    from pallas_kernels import short_conv

    W = 4
    arguments = {
        "x": Spec((B, T, C), jnp.bfloat16),
        "weight": Spec((C, W), jnp.float32),
        "conv_state": Spec((B, W - 1, C), jnp.bfloat16),
    }
    return functools.partial(short_conv, splits=splits, backend=_BACKEND), arguments


def _matmul(N: int, E: int | None, F: int, D: int, *, fp8: bool):
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct as Spec

    from pallas_kernels import fp8_matmul, grouped_matmul

    lead = () if E is None else (E,)
    arguments: dict[str, Any] = {
        "x": Spec((N, D), jnp.bfloat16),
        "weight" if E is None else "weights": Spec(
            (*lead, F, D), jnp.float8_e4m3fn if fp8 else jnp.bfloat16
        ),
    }
    if fp8:
        arguments["scale"] = Spec((*lead, F // 128, D // 128), jnp.float32)
    if E is not None:  # equal, as far as possible
        arguments["group_sizes"] = (N // E + (np.arange(E) < N % E)).astype(np.int32)
    return functools.partial(fp8_matmul if E is None else grouped_matmul, backend=_BACKEND), (
        arguments
    )


_BACKEND = "pallas_mosaic_tpu"


def _cases() -> Iterator[Case]:
    for B, T, H in ((1, 8192, 16), (1, 8192, 64), (4, 2048, 8)):
        for apart in (False, True):
            yield Case(
                "chunk_kda",
                f"B{B}_T{T}_H{H}" + ("_apart" if apart else ""),
                functools.partial(_kda, "chunk_kda", B, T, H, apart=apart),
                {"head-token": B * T * H, "head-chunk": B * T * H // 64},
                donate=("initial_state",),
                quick=(H, apart) == (16, False),
                # The reader does not find what one tpu7x schedule's branches depend on.
                chips=tuple(c for c in CHIPS if (c, H, apart) != ("tpu7x", 64, True)),
            )
    for B, apart in ((1, False), (8, False), (64, False), (64, True), (256, False)):
        H = 16
        yield Case(
            "recurrent_kda",
            f"B{B}_T1_H{H}" + ("_apart" if apart else ""),
            functools.partial(_kda, "recurrent_kda", B, 1, H, apart=apart),
            {"head-token": B * H},
            donate=("initial_state",),
            quick=(B, apart) == (64, False),
        )
    for B, T in ((1, 8192), (64, 1)):
        C = 3 * 16 * 128
        yield Case(
            "short_conv",
            f"B{B}_T{T}_C{C}",
            functools.partial(_short_conv, B, T, C, splits=3),
            {"token": B * T},
            donate=("conv_state",),
        )
    for fp8 in (False, True):
        N, E, F, D = 512, 9, 2048, 4096  # of 36 experts over four chips, 8 for each of 64 rows
        yield Case(
            "grouped_matmul",
            f"N{N}_E{E}_F{F}_D{D}_{'fp8' if fp8 else 'bf16'}",
            functools.partial(_matmul, N, E, F, D, fp8=fp8),
            {"row": N},
        )
    yield Case(
        "fp8_matmul",
        "N64_F1536_D4096",
        functools.partial(_matmul, 64, None, 1536, 4096, fp8=True),
        {"row": 64},
    )


def _tokamax_kda(B: int, T: int, H: int):
    import jax
    import jax.numpy as jnp
    import tokamax  # type: ignore[reportMissingImports]
    from jax import ShapeDtypeStruct as Spec

    K = 128
    x = Spec((H, B, T, K), jnp.bfloat16)
    arguments: dict[str, Any] = dict.fromkeys(("query", "key", "value", "gate"), x)
    arguments["beta"] = Spec((H, B, T), jnp.bfloat16)
    arguments["a_log"] = Spec((H,), jnp.float32)
    arguments["delta_time_bias"] = Spec((H * K,), jnp.float32)
    arguments["initial_state"] = Spec((B, 1, H, K, K), jnp.float32)

    def function(beta, **rest):
        with tokamax.config.cross_compile(True):
            return tokamax.ops.kimi_delta_attention(
                beta=jax.nn.sigmoid(beta),
                output_final_state=True,
                use_qk_l2norm=True,
                use_gate_in_kernel=True,
                lower_bound=-5.0,
                implementation="mosaic",
                **rest,
            )

    return function, arguments


def _peers() -> Iterator[Case]:
    for B, T, H in ((1, 8192, 16), (1, 8192, 64)):
        yield Case(
            "tokamax",
            f"B{B}_T{T}_H{H}",
            functools.partial(_tokamax_kda, B, T, H),
            {"head-token": B * T * H, "head-chunk": B * T * H // 64},
            table="benchmarks.tpu_static:PEERS",
        )


CASES = {case.name: case for case in _cases()}
PEERS = {case.name: case for case in _peers()}


def compile_case(table: str, name: str, chip: str, dump: str) -> None:
    """Compiles a case in this process, whose environment names chip and dump.

    Writes program.json, about the compiled program, and program.txt, its HLO, into `dump`.
    """
    import jax
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from pallas_kernels.dispatch import compile_for

    module, _, attribute = table.partition(":")
    case: Case = getattr(importlib.import_module(module), attribute)[name]
    function, arguments = case.build()
    device = topologies.get_topology_desc(CHIPS[chip].topology, "tpu").devices[0]
    mesh = Mesh(np.array([device]), ("device",))
    place = NamedSharding(mesh, PartitionSpec())
    specs = {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for key, x in arguments.items()
    }
    report: dict[str, Any] = {
        "jax": jax.__version__,
        "libtpu": importlib.metadata.version("libtpu"),
    }
    with compile_for("tpu"), jax.set_mesh(mesh):
        try:
            traced = jax.jit(function, donate_argnames=case.donate).trace(**specs)
        except NotImplementedError as error:
            report["refused"] = str(error)
        else:
            start = time.perf_counter()
            program = traced.lower().compile()
            report["compile_s"] = time.perf_counter() - start
    if "refused" not in report:
        memory, text = program.memory_analysis(), program.as_text()
        assert memory is not None and text is not None  # libtpu always has them
        report["temporaries"] = memory.temp_size_in_bytes
        pathlib.Path(dump, "program.txt").write_text(text)
        leaves = jax.tree.leaves(((), arguments))  # positional ones and keywords, as jit has them
        known = [x if isinstance(x, np.ndarray) else None for x in leaves]
        report["kernels"] = list(_kernels(traced.jaxpr, known)[1])
    pathlib.Path(dump, "program.json").write_text(json.dumps(report))


def _kernels(closed, arguments: list) -> tuple[list, list[dict]]:
    """Follows a jaxpr as far as values are known (None: not): (results, its Pallas calls).

    A call has its name, grid, and per prefetched scalar operand the values or None.
    """
    from jax.extend.core import Literal

    jaxpr = getattr(closed, "jaxpr", closed)
    values = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)
    kernels: list[dict] = []

    def read(x):
        return x.val if isinstance(x, Literal) else values.get(x)

    for equation in jaxpr.eqns:
        inputs, params = [read(x) for x in equation.invars], equation.params
        jaxprs = (x for x in params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr"))
        inner = next(jaxprs, None)
        results: list = [None] * len(equation.outvars)
        if equation.primitive.name == "pallas_call":
            kernels.append(_kernel(params, inputs))
        elif inner is not None and equation.primitive.name not in ("scan", "while"):  # a call
            results, more = _kernels(inner, inputs)
            kernels += more
        elif all(x is not None for x in inputs):
            results = equation.primitive.bind(*inputs, **params)
            results = results if equation.primitive.multiple_results else [results]
        values |= zip(equation.outvars, results, strict=True)
    return [read(x) for x in jaxpr.outvars], kernels


def _kernel(params: dict, inputs: list) -> dict:
    mapping = params["grid_mapping"]
    first = mapping.num_dynamic_grid_bounds
    scalars = inputs[first : first + mapping.num_index_operands]
    return {
        "name": params.get("name") or params["jaxpr"].debug_info.func_name,
        "grid": [n if isinstance(n, int) else None for n in mapping.grid],
        "scalars": [None if x is None else np.asarray(x).tolist() for x in scalars],
    }


@dataclasses.dataclass
class Result:
    """A measured case.

    Attributes:
        refused: why there is none, or None.
        entry: what the record keeps.
        kernels: schedules by name.
    """

    case: Case
    chip: str
    refused: str | None = None
    compile_s: float = 0.0
    entry: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernels: dict[str, Kernel] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.case.name}/{self.chip}"


def measure(
    case: Case, chip: str, dump: pathlib.Path, *, python: str = sys.executable, timeout: float = 600
) -> Result:
    """Compiles a case in a process of its own, leaving libtpu's dumps in `dump`, and counts.

    Raises:
        ValueError: `dump` has blanks in its path, at which libtpu would divide its flags.
        ScheduleError: it does not compile, or its schedule cannot be read; says why.
    """
    if re.search(r"\s", str(dump)):
        raise ValueError(f"{dump=} has blanks in its path, at which libtpu divides its flags")
    where = CHIPS[chip]
    flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is not compiled is not dumped
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": where.accelerator,
        "PYTHONPATH": str(_ROOT),
        "LIBTPU_INIT_ARGS": f"{flags} --xla_jf_dump_llo_pass_label_regex={PASSES}",
    }
    code = (
        "from benchmarks.tpu_static import compile_case\n"
        f"compile_case({case.table!r}, {case.name!r}, {chip!r}, {str(dump)!r})"
    )
    try:
        done = subprocess.run(
            [python, "-c", code], env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        raise ScheduleError(f"no program after {timeout:g} s") from error
    if done.returncode:
        raise ScheduleError(f"does not compile:\n{done.stderr.strip()[-3000:]}")
    program = json.loads((dump / "program.json").read_text())
    result = Result(case, chip, program.get("refused"), program.get("compile_s", 0.0))
    if result.refused is None:
        _count(result, program, dump)
    return result


def _count(result: Result, program: dict, dump: pathlib.Path) -> None:
    case, chip = result.case, CHIPS[result.chip]
    around, calls, waiting = 0.0, [], list(program["kernels"])
    for name, is_kernel, moved in read_hlo((dump / "program.txt").read_text()):
        hbm_us = 1e6 * moved / chip.bandwidth
        if not is_kernel:
            around += max(hbm_us, _other_us(dump, name, chip))
            continue
        stem = name.partition(".")[0]
        call = next((x for x in waiting if x["name"] == stem), waiting[0] if waiting else None)
        if call is None:
            raise ScheduleError(f"{name}: more kernels in the program than in its jaxpr")
        waiting.remove(call)
        scalars = {i: np.array(x) for i, x in enumerate(call["scalars"]) if x is not None}
        kernel = read_kernel(
            dump,
            name,
            cores=chip.cores,
            scalars=scalars,
            shares=case.shares.get(stem, ()),
            trips=case.trips.get(stem, ()),
        )
        result.kernels[name] = kernel
        busy = sum(cycles > 0.05 * max(kernel.cycles) for cycles in kernel.cycles)
        steps = math.prod(n or 1 for n in call["grid"]) / busy
        calls.append(
            {
                "name": name,
                "grid": call["grid"],
                "idle_cores": chip.cores - busy,
                "cycles": round(max(kernel.cycles), 1),
                "us": round(1e6 * max(kernel.cycles) / chip.clock, 2),
                "hbm_us": round(hbm_us, 2),
                "shares": {column.lower(): round(kernel.share(column), 3) for column in _COLUMNS},
                "spill_stores": round(kernel.use["VSTORE:SPILL"] / steps, 1),
                "spill_fills": round(kernel.use["VLOAD:FILL"] / steps, 1),
                "vmem": kernel.vmem,
            }
        )
    if waiting or not calls:
        raise ScheduleError(f"{len(calls)} kernels in the program, not there: {waiting}")
    result.entry = {
        "jax": program["jax"],
        "libtpu": program["libtpu"],
        "temporaries": program["temporaries"],
        "around_us": round(around, 2),
        "kernels": calls,
    }


_COLUMNS = ("MATMUL", "MATPUSH", "VALU", "XLU", "EUP", "VLOAD", "VSTORE")


def _other_us(dump: pathlib.Path, name: str, chip: Chip) -> float:
    """Microseconds in the schedule of an HLO that is no kernel; 0 if it has none to read."""
    try:
        kernel = read_kernel(dump, name, cores=chip.cores)
    except ScheduleError:
        return 0.0
    return 1e6 * max(kernel.cycles) / chip.clock


_TITLES = {  # and widths
    "case": -48,
    "cycles": 9,
    "us": 8,
    "HBM us": 8,
    "cycles per unit": 36,
    "matmul": 7,
    "push": 5,
    "VALU": 5,
    "XLU": 5,
    "EUP": 5,
    "load": 5,
    "store": 6,
    "spills": 7,
    "fills": 6,
    "VMEM MiB": 9,
    "temp MiB": 9,
    "other us": 9,
    "compile s": 10,
}


def _row(cells: list[str]) -> str:
    """Cells under the titles, and remarks."""
    widths = list(_TITLES.values())
    remarks = "".join(f"  {remark}" for remark in cells[len(widths) :])
    fitted = [f"{x:<{-n}}" if n < 0 else f"{x:>{n}}" for x, n in zip(cells, widths, strict=False)]
    return "".join(fitted).rstrip() + remarks


def rows(result: Result) -> Iterator[str]:
    """A line of the table for each kernel of a case."""
    if result.refused is not None:
        yield _row([result.key, f"  not there: {result.refused}"])
        return
    for number, call in enumerate(result.entry["kernels"]):
        per_unit = [f"{call['cycles'] / n:.4g}/{unit}" for unit, n in result.case.units.items()]
        of_program = [
            f"{result.entry['temporaries'] / 2**20:.1f}",
            f"{result.entry['around_us']:.1f}",
            f"{result.compile_s:.1f}",
        ]
        idle = call["idle_cores"]
        yield _row(
            [
                result.key if not number else f"  and {call['name']}",
                f"{call['cycles']:.0f}",
                f"{call['us']:.1f}",
                f"{call['hbm_us']:.1f}",
                " ".join(per_unit),
                *(f"{100 * share:.0f}%" for share in call["shares"].values()),
                f"{call['spill_stores']:.0f}",
                f"{call['spill_fills']:.0f}",
                f"{call['vmem'] / 2**20:.1f}",
                *([""] * 3 if number else of_program),
                *([f"{idle} of {CHIPS[result.chip].cores} cores idle"] if idle else []),
            ]
        )


def phases(kernel: Kernel, windows: int) -> str:
    """Where a kernel's main loop is bound: use of the units in windows of equal time."""
    low, high = kernel.loop
    lines = [f"main loop, bundles {low:#x}-{high:#x}, in {windows} windows"]
    columns = (*_COLUMNS, "SALU", "VLOAD:FILL", "VSTORE:SPILL")
    lines.append("   cycles " + "".join(f"{column:>13}" for column in columns))
    for cycles, shares in kernel.phases(windows):
        lines.append(f"{cycles:9.0f} " + "".join(f"{100 * shares[x]:12.0f}%" for x in columns))
    return "\n".join(lines)


def compare(new: dict[str, Any], old: dict[str, Any] | None) -> tuple[list[str], list[str]]:
    """What rose by more than 5 % against the record's entry, and what fell.

    Raises:
        ValueError: the two do not compare: there is no old one, or versions or kernels differ.
    """
    if old is None:
        raise ValueError("not in the record; --update adds it")
    require_same_versions(new, old)
    names = [[call["name"] for call in entry["kernels"]] for entry in (old, new)]
    if names[0] != names[1]:
        raise ValueError(f"the record has kernels {names[0]}, here are {names[1]}; --update it")
    pairs = [("temporaries", old["temporaries"], new["temporaries"])]
    for before, after in zip(old["kernels"], new["kernels"], strict=True):
        pairs += [(f"{before['name']} {x}", before[x], after[x]) for x in _COUNTED]
    rose = [f"{what} rose from {a:,} to {b:,}" for what, a, b in pairs if b > a * _TOLERANCE]
    fell = [f"{what} fell from {a:,} to {b:,}" for what, a, b in pairs if a > b * _TOLERANCE]
    return rose, fell


def require_same_versions(new: dict[str, Any], old: dict[str, Any]) -> None:
    """Raises ValueError where the compilers of two entries differ."""
    for package in ("jax", "libtpu"):
        if new[package] != old[package]:
            raise ValueError(
                f"schedules do not compare: the record has {package} {old[package]}, "
                f"here is {new[package]}; install that one, or --update the record"
            )


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def update_record(result: Result) -> None:
    """Puts a result into the record, in the order of the cases; what has no case any more goes."""
    record = read_record() | {result.key: result.entry}
    if result.refused is not None:
        del record[result.key]
    order = [f"{case.name}/{chip}" for case in CASES.values() for chip in case.chips]
    record = {key: record[key] for key in order if key in record}
    new = RECORD.with_suffix(".json.new")
    new.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(new, RECORD)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tpu_static",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kernels", nargs="+", metavar="NAME", help="only these (chunk_kda, short_conv, …)")
    add("--chips", nargs="+", choices=CHIPS, default=list(CHIPS), help="only these (all)")
    add("--shapes", nargs="+", metavar="TEXT", help="only shapes with one of these in their names")
    add("--quick", action="store_true", help="v6e only, and the two shapes that tests compare")
    add("--check", action="store_true", help="fail where a counted figure rose by more than 5 %%")
    add("--update", action="store_true", help=f"put what is measured into {RECORD.name}")
    add("--phases", type=int, metavar="N", help="use of the units along the main loop, N windows")
    add("--dump", metavar="DIR", help="keep libtpu's dumps there, a folder per case")
    add("--peer", choices=("tokamax",), help="measure another library's KDA instead")
    add("--python", default=sys.executable, metavar="FILE", help="interpreter that has it")
    add("--timeout", type=float, default=600, metavar="S", help="seconds per compilation (600)")
    add("--list", action="store_true", help="name the cases and stop")
    return parser


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.peer and (args.check or args.update):
        parser.error("the record has no peers")
    chosen = []
    for case in (PEERS if args.peer else CASES).values():
        chips = [chip for chip in case.chips if chip in args.chips]
        if args.quick:
            chips = ["v6e"] if case.quick else []
        if args.kernels and case.kernel not in args.kernels:
            continue
        if args.shapes and not any(text in case.shape for text in args.shapes):
            continue
        chosen += [(case, chip) for chip in chips]
    if not chosen:
        parser.error(f"no such case; there are {', '.join(CASES | PEERS)}")
    if args.list:
        print("\n".join(f"{case.name}/{chip}" for case, chip in chosen))
        return 0

    record, failed, remarks = read_record(), [], []
    if args.check:
        here = {package: importlib.metadata.version(package) for package in ("jax", "libtpu")}
        for entry in record.values():
            try:
                require_same_versions(here, entry)
            except ValueError as error:
                parser.exit(1, f"{error}\n")
    print(_row(list(_TITLES)), flush=True)
    for case, chip in chosen:
        key = f"{case.name}/{chip}"
        with tempfile.TemporaryDirectory() as scratch:
            dump = pathlib.Path(args.dump or scratch) / key.replace("/", "-")
            dump.mkdir(parents=True, exist_ok=True)
            for old in dump.iterdir():
                old.unlink()
            try:
                result = measure(case, chip, dump, python=args.python, timeout=args.timeout)
            except ScheduleError as error:
                failed.append(f"{key}: {error}")
                print(_row([key, "  failed, see below"]), flush=True)
                continue
        print("\n".join(rows(result)), flush=True)
        if args.phases:
            for name, kernel in result.kernels.items():
                print(f"{name}: {phases(kernel, args.phases)}", flush=True)
        if args.update:
            update_record(result)
        if args.peer or args.update:
            continue
        if result.refused is not None:
            remarks += [f"{key}: is in the record"] if key in record else []
            continue
        try:
            rose, fell = compare(result.entry, record.get(key))
        except ValueError as error:
            remarks.append(f"{key}: {error}")
        else:
            remarks += [f"{key}: {line}" for line in rose]
            if fell:
                print(f"{key}: {'; '.join(fell)}: update the record (--update)")
    for line in remarks + failed:
        print(line)
    return 1 if failed or (args.check and remarks) else 0


if __name__ == "__main__":
    sys.exit(main())
