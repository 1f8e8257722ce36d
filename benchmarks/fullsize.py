"""Compiles the released model for TPU slices that are not here, and says whether it fits.

The prefill and decode programs of all 45 layers go through libtpu's ahead-of-time compiler
(`pip install libtpu`; no TPU is needed). Per slice the table gives what one device holds against
its memory, what the devices exchange, and how long the compiler took.

    python -m benchmarks.fullsize                        # the three slices of docs/deploying.md
    python -m benchmarks.fullsize --slice v6e:4x8 --data 4 --model 8 --program decode
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import sys
import tempfile
import time
from typing import Any

# Before JAX starts: no TPU is looked for, and several compilations may run side by side.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks.gpus import first_layers
from glm5next_jax import Glm5NextConfig, sharding
from glm5next_jax.cache import abstract_cache
from glm5next_jax.capacity import DEVICE_BYTES, footprint
from glm5next_jax.forward import last_valid
from glm5next_jax.model import Glm5NextForCausalLM
from pallas_kernels.dispatch import compile_for

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice with the mesh that suits it."""

    topology: str
    data: int
    model: int

    @property
    def chip(self) -> str:
        return self.topology.split(":")[0]


SLICES = (Slice("v5p:2x2x2", 1, 8), Slice("v6e:4x8", 4, 8), Slice("tpu7x:2x2x1", 1, 8))


def abstract_model(config: Glm5NextConfig, mesh: Mesh, *, fp8: bool) -> Glm5NextForCausalLM:
    """The model on a mesh, with shapes in the place of weights."""
    sharding.check_mesh(config, mesh, fp8=fp8)
    model = Glm5NextForCausalLM.abstract(config, fp8=fp8)
    model.mesh = mesh

    def placed(variable: nnx.Variable) -> nnx.Variable:
        where = sharding.variable_sharding(variable, mesh)
        return variable.replace(variable.get_value().update(sharding=where))

    return jax.tree.map(placed, model, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def lower(config: Glm5NextConfig, mesh: Mesh, *, fp8: bool, batch: int, tokens: int, length: int):
    """One call of the model on `tokens` tokens of every row, as generation makes it: the cache is
    donated, and the likeliest next token comes out."""
    leaves, treedef = jax.tree.flatten(abstract_model(config, mesh, fp8=fp8))

    def step(leaves, token_ids, cache, num_valid):
        model: Glm5NextForCausalLM = jax.tree.unflatten(treedef, leaves)
        hidden, cache = model(token_ids, cache, num_valid)
        logits = model.logits(last_valid(hidden, num_valid))
        return jnp.argmax(logits, axis=-1), cache

    rows = sharding.named_sharding(mesh, ("batch",))
    token_ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32, sharding=rows)
    num_valid = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=rows)
    cache = abstract_cache(config, batch, length, mesh=mesh)
    with compile_for("tpu"):
        return jax.jit(step, donate_argnums=2).lower(leaves, token_ids, cache, num_valid)


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    batch: int  # rows over the whole mesh
    tokens: int  # per row


def programs(data: int) -> tuple[Program, Program]:
    return Program("prefill", data, 2048), Program("decode", 64, 1)


def measure(config: Glm5NextConfig, where: Slice, program: Program, *, length: int) -> dict:
    """Compiles one program and reads the compiler's own account of it."""
    devices = topologies.get_topology_desc(where.topology, "tpu").devices
    mesh = sharding.make_mesh(data=where.data, model=where.model, devices=devices)
    start = time.perf_counter()
    lowered = lower(
        config, mesh, fp8=True, batch=program.batch, tokens=program.tokens, length=length
    )
    lowering = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as dump:
        start = time.perf_counter()
        compiled = lowered.compile(
            compiler_options={"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
        )
        compiling = time.perf_counter() - start
        (text,) = pathlib.Path(dump).glob("**/*after_optimizations.txt")
        exchanged = collectives(text.read_text())
    memory = compiled.memory_analysis()
    assert memory is not None  # libtpu always has one
    estimate = footprint(
        config,
        data=where.data,
        model=where.model,
        weights="fp8",
        batch_size=program.batch,
        capacity=length,
        chunk_size=program.tokens,
    )
    total = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return {
        "slice": where.topology,
        "mesh": {"data": where.data, "model": where.model},
        "program": dataclasses.asdict(program) | {"capacity": length},
        "bytes_per_device": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "total": total,
            "memory": DEVICE_BYTES[where.chip],
        },
        "estimate": dataclasses.asdict(estimate),
        "collectives": exchanged,
        "seconds": {"lowering": round(lowering, 1), "compiling": round(compiling, 1)},
    }


# Start of a collective in HLO text; the end of an asynchronous one ("-done") is not counted again.
_COLLECTIVE = re.compile(
    r" = (?P<shape>\(?[a-z0-9]+\[.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|"
    r"collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>pred|[a-z]+[0-9]+[a-z0-9]*)\[(?P<dims>[0-9,]*)\]")
_BITS = re.compile(r"[0-9]+")


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """How many exchanges of each kind a program has, and the bytes of their results on a device."""
    found: dict[str, dict[str, int]] = {}
    for match in _COLLECTIVE.finditer(hlo):
        arrays = list(_ARRAY.finditer(match["shape"]))
        entry = found.setdefault(match["kind"], {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += max(map(_num_bytes, arrays), default=0)
    return found


def _num_bytes(array: re.Match[str]) -> int:
    bits = _BITS.search(array["dtype"])
    size = math.prod(int(n) for n in array["dims"].split(",") if n)
    return size * (int(bits[0]) if bits else 8) // 8


def table(results: list[dict]) -> str:
    """The results as the table of docs/deploying.md."""
    rows = [
        "| slice | mesh | program | arguments | temporaries | of memory | exchanged | compiled |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        held, program = r["bytes_per_device"], r["program"]
        exchanged = ", ".join(
            f"{v['count']} {kind} {v['bytes'] / 2**20:.1f} MiB"
            for kind, v in sorted(r["collectives"].items())
        )
        shape = f"{program['name']} {program['batch']} x {program['tokens']}"
        rows.append(
            f"| {r['slice']} | {r['mesh']['data']} x {r['mesh']['model']} | {shape} | "
            f"{held['arguments'] / _GIB:.1f} GiB | {held['temporaries'] / _GIB:.2f} GiB | "
            f"{held['total'] / held['memory']:.0%} of {held['memory'] / _GIB:.0f} GiB | "
            f"{exchanged or 'nothing'} | {r['seconds']['compiling']:.0f} s |"
        )
    return "\n".join(rows)


# Devices of a slice or a host, and the meshes that suit them.
_PLACES = (
    ("v5p", "v5p:2x2x2", 1, 8),
    ("v5p", "v5p:2x2x4", 2, 8),
    ("v6e", "v6e:4x4", 2, 8),
    ("v6e", "v6e:4x8", 4, 8),
    ("tpu7x", "tpu7x:2x2x1", 1, 8),
    ("h200", "4 H200", 1, 4),
    ("h200", "8 H200", 1, 8),
)
_CONTEXTS = (8192, 32768, 131072)
_CHUNK_TOKENS = 2048  # per device and prefill step


def fits_table(config: Glm5NextConfig) -> str:
    """The largest batch (a power of two per data shard) that fits, by weights and context."""
    header = "| devices | mesh | weights | of memory |"
    rows = [
        header + "".join(f" batch at {n // 1024}k |" for n in _CONTEXTS),
        "| --- " * (4 + len(_CONTEXTS)) + "|",
    ]
    for device, name, data, model in _PLACES:
        for weights in ("fp8", "bf16"):
            batches = [largest_batch(config, device, data, model, weights, n) for n in _CONTEXTS]
            held = footprint(
                config, data=data, model=model, weights=weights, batch_size=data, capacity=4
            )
            share = f"{held.weights / 2**30:.1f} of {DEVICE_BYTES[device] / 2**30:.0f} GiB"
            cells = "".join(f" {batch or '–'} |" for batch in batches)
            rows.append(f"| {name} | {data} x {model} | {weights} | {share} |{cells}")
    return "\n".join(rows)


def largest_batch(
    config: Glm5NextConfig, device: str, data: int, model: int, weights: Any, length: int
) -> int:
    """Rows over the whole mesh; 0 if not even one per data shard fits."""
    best, rows = 0, 1
    while rows <= _CHUNK_TOKENS:
        held = footprint(
            config,
            data=data,
            model=model,
            weights=weights,
            batch_size=rows * data,
            capacity=length,
            chunk_size=_CHUNK_TOKENS // rows,
        )
        if not held.fits(device):
            break
        best, rows = rows * data, 2 * rows
    return best


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fullsize",
        description=(__doc__ or "").split("\n\n    python")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--slice", metavar="CHIP:SHAPE", help="one slice, as libtpu names it (v5p:2x2x2)")
    add("--data", type=int, default=1, metavar="N", help="mesh of --slice (1)")
    add("--model", type=int, default=8, metavar="M", help="mesh of --slice (8)")
    add("--program", choices=("prefill", "decode"), help="one program (both)")
    add("--layers", type=int, metavar="N", help="only the first N layers, for a quick look")
    add("--capacity", type=int, default=32768, metavar="N", help="tokens per row (32768)")
    add("--fits", action="store_true", help="what fits where, computed; compiles nothing")
    add("--output", metavar="FILE.json", help="results with versions")
    args = parser.parse_args()

    config = first_layers(args.layers) if args.layers else Glm5NextConfig.glm53_flash()
    if args.fits:
        print(fits_table(config))
        return 0
    slices = (Slice(args.slice, args.data, args.model),) if args.slice else SLICES
    results = []
    for where in slices:
        for program in programs(where.data):
            if args.program in (None, program.name):
                print(f"compiling {program.name} for {where.topology} …", file=sys.stderr)
                results.append(measure(config, where, program, length=args.capacity))
                print(table(results[-1:]).splitlines()[-1], file=sys.stderr)
    print(table(results))
    if args.output:
        versions = {
            "jax": jax.__version__,
            "libtpu": importlib.metadata.version("libtpu"),
            "python": platform.python_version(),
        }
        report = {"versions": versions, "results": results}
        pathlib.Path(args.output).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
