"""How fast a released checkpoint loads onto a mesh, and in how much host memory.

Writes a checkpoint in the released FP8 format, with the released names and widths but few layers
and experts, copies it with `cp; sync`, and loads it in a process of its own onto simulated CPU
devices. The table gives both rates and the peak of host memory beyond the arrays.

    python -m benchmarks.load                              # 8 GB, FP8 kept at rest, 8 devices
    python -m benchmarks.load --weights bf16 --experts 64  # FP8 decoded on the way
    python -m benchmarks.load --weights bf16 --experts 64 --converted --cache warm
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.checkpoints import (
    add_options,
    files_in,
    prepare,
    seconds_of_copy,
    workplace,
    write_checkpoint,
)
from glm5next_jax.config import Glm5NextConfig


@dataclasses.dataclass(frozen=True)
class Result:
    """One load, as the process that did it measured it. Sizes are in bytes.

    Attributes:
      seconds: of `load`, until every array is there.
      arrays: memory of the arrays; what CPU devices share counts once.
      largest_shard: of any weight on any device.
      peak_beyond_arrays: the most host memory, above what the process had before and the arrays
        that were complete.
    """

    seconds: float
    arrays: int
    largest_shard: int
    peak_beyond_arrays: int


def measured_load(
    directory: str, *, data: int, model: int, weights: str | None, copies: bool = False
) -> Result:
    """Loads in this process; `copies` makes CPU devices copy, as an accelerator would."""
    import jax

    from glm5next_jax import sharding
    from glm5next_jax.checkpoint import leaves, load, placement

    mesh = sharding.make_mesh(data=data, model=model) if data * model > 1 else None
    if copies:
        aligned = leaves._aligned

        def misaligned(shape, dtype):
            memory = aligned((math.prod(shape) + 1, 1), dtype)
            return memory.reshape(-1)[1:].reshape(shape)

        leaves._aligned = misaligned
    # What a process needs once, for any load: threads, the mesh, the modules of the reader.
    jax.block_until_ready([jax.device_put(np.ones(1 << 16, np.float32), d) for d in jax.devices()])
    base, peak, largest = _memory("VmRSS"), 0, 0
    seen: dict[int, int] = {}

    def watched(reader, specs, place=placement.place):
        nonlocal peak, largest
        for path, array in place(reader, specs):
            for shard in array.addressable_shards:
                seen[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
                largest = max(largest, shard.data.nbytes)
            peak = max(peak, _memory("VmHWM") - base - sum(seen.values()))
            _reset_peak()
            yield path, array

    placement.place = watched
    _reset_peak()
    start = time.perf_counter()
    loaded = load(directory, mesh=mesh, weights=weights)  # type: ignore[arg-type]
    jax.block_until_ready(jax.tree.leaves(loaded))
    seconds = time.perf_counter() - start
    peak = max(peak, _memory("VmHWM") - base - sum(seen.values()))
    return Result(seconds, sum(seen.values()), largest, peak)


def _memory(field: str) -> int:
    """VmRSS, resident now, or VmHWM, the most since `_reset_peak`."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def _reset_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def run_measured_load(directory: pathlib.Path, **arguments: Any) -> Result:
    """`measured_load` in a fresh process with as many CPU devices as the mesh has."""
    devices = arguments["data"] * arguments["model"]
    flags = f"--xla_force_host_platform_device_count={devices}"
    root = pathlib.Path(__file__).parents[1]
    code = (
        "import json, dataclasses\n"
        "from benchmarks.load import measured_load\n"
        f"result = measured_load({str(directory)!r}, **{arguments!r})\n"
        "print(json.dumps(dataclasses.asdict(result)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def _config(args: argparse.Namespace) -> Glm5NextConfig:
    layers = args.dense_layers + args.sparse_layers
    return Glm5NextConfig.glm53_flash().replace(
        num_hidden_layers=layers,
        num_nextn_predict_layers=0,
        n_routed_experts=args.experts,
        layer_types=("linear_attention",) * args.dense_layers
        + ("indexed_attention",) * args.sparse_layers,
        mlp_layer_types=("dense",) * args.dense_layers + ("sparse",) * args.sparse_layers,
        indexer_types=("full",) * layers,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--experts", type=int, default=200, help="per sparse layer, 25 MB each (200; released 288)")
    add("--dense-layers", type=int, default=1, help="linear attention and a dense MLP, 0.4 GB (1)")
    add("--sparse-layers", type=int, default=1, help="sparse attention and experts (1)")
    add("--data", type=int, default=1, help="devices of the mesh axis data (1)")
    add("--model", type=int, default=8, help="devices of the mesh axis model (8)")
    add("--weights", choices=("fp8", "bf16"), default="fp8", help="at rest (fp8)")
    add("--converted", action="store_true", help="load the converted form")
    add(
        "--copies",
        action="store_true",
        help="make the CPU devices copy what they are sent, as accelerators do; else they take the "
        "memory over",
    )
    add_options(parser)
    return parser


def main() -> int:
    args = _parser().parse_args()
    config = _config(args)
    with workplace("load", args.directory, args.keep) as work:
        directory = work / "released"
        start = time.perf_counter()
        written = write_checkpoint(directory, config)
        print(f"wrote {written / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s", flush=True)
        if args.converted:
            from convert.converter import convert

            dtype = "keep" if args.weights == "fp8" else "bfloat16"
            convert(directory, work / "converted", dtype=dtype, mode="quiet")
            directory = work / "converted"
        size = sum(path.stat().st_size for path in files_in(directory))
        copy_seconds = seconds_of_copy(directory, args.cache)
        prepare(directory, args.cache)
        result = run_measured_load(
            directory, data=args.data, model=args.model, weights=args.weights, copies=args.copies
        )
    copy_rate, rate = size / copy_seconds, size / result.seconds
    rows = [
        ("checkpoint", f"{size / 1e9:.2f} GB{', converted' if args.converted else ', FP8'}"),
        ("devices", f"data {args.data} x model {args.model}, weights {args.weights}"),
        ("page cache", args.cache),
        ("devices copy", "yes" if args.copies else "no"),
        ("cp; sync", f"{copy_seconds:.1f} s, {copy_rate / 1e6:.0f} MB/s"),
        ("load", f"{result.seconds:.1f} s, {rate / 1e6:.0f} MB/s, {rate / copy_rate:.0%} of cp"),
        ("arrays", f"{result.arrays / 1e9:.2f} GB"),
        ("largest shard", f"{result.largest_shard / 1e6:.0f} MB"),
        (
            "peak beyond arrays",
            f"{result.peak_beyond_arrays / 1e6:.0f} MB, "
            f"{result.peak_beyond_arrays / result.largest_shard:.2f} of the largest shard",
        ),
    ]
    for name, value in rows:
        print(f"{name:20}{value}")
    if args.json:
        args.json.write_text(json.dumps(_record(args, size, copy_seconds, result), indent=1) + "\n")
    return 0


def _record(
    args: argparse.Namespace, size: int, copy_seconds: float, result: Result
) -> dict[str, Any]:
    import jax
    import jaxlib.version

    return {
        "command": " ".join(["python -m benchmarks.load", *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "numpy": np.__version__,
        },
        "cpus": len(os.sched_getaffinity(0)),
        "mesh": {"data": args.data, "model": args.model},
        "weights": args.weights,
        "converted": args.converted,
        "page_cache": args.cache,
        "copies": args.copies,
        "checkpoint_bytes": size,
        "cp_sync_seconds": copy_seconds,
        "load": dataclasses.asdict(result),
        "load_rate_over_cp": copy_seconds / result.seconds,
        "peak_beyond_arrays_over_largest_shard": result.peak_beyond_arrays / result.largest_shard,
    }


if __name__ == "__main__":
    sys.exit(main())
