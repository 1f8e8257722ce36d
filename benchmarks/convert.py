"""A dress rehearsal of conversion: a checkpoint of real names, dtypes and widths, there and back.

Writes a released checkpoint of a few layers and the MTP layer, copies it with `cp; sync`, converts
it, compares, reads a layer back, exports it to the released format, and compares every tensor's
bytes with the original's; each command in a process of its own. The table gives seconds, rates and
the most memory. Every stage's files are removed once they are compared.

    python -m benchmarks.convert                    # 18.7 GB, FP8 kept: 4 layers and MTP
    python -m benchmarks.convert --dtype bfloat16   # FP8 decoded on the way
    python -m benchmarks.convert --experts 8        # 3.3 GB
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

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

_ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Run:
    """One command: its seconds, and the most memory that it held, in bytes."""

    seconds: float
    peak_bytes: int


class Place(NamedTuple):
    """Where a tensor's bytes are."""

    path: pathlib.Path
    start: int
    num_bytes: int


def run(*arguments: str | pathlib.Path) -> Run:
    """Runs `glm5next-convert` in a process of its own.

    Raises:
      SystemExit: it failed; its message stands above.
    """
    start = time.perf_counter()
    # What the process says itself: the system's count for a child begins with its parent's.
    code = (
        "import pathlib, sys\n"
        "from convert.__main__ import main\n"
        "status = main(sys.argv[1:])\n"
        "print()\n"
        "print(pathlib.Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"glm5next-convert {' '.join(map(str, arguments))}: {done.returncode}")
    return Run(time.perf_counter() - start, int(done.stdout.splitlines()[-1]) * 1024)


def tensors_in(directory: pathlib.Path) -> dict[str, tuple[Any, Place]]:
    """Header entry and place of every tensor, read without the package."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry.pop("data_offsets")
            found[name] = (entry, Place(path, 8 + length + begin, end - begin))
    return found


def pieces(place: Place) -> Iterator[bytes]:
    size = place.num_bytes
    with place.path.open("rb") as file:
        file.seek(place.start)
        while size:
            piece = file.read(min(size, 16 << 20))
            size -= len(piece)
            yield piece


def require_same_tensors(first: pathlib.Path, second: pathlib.Path) -> int:
    """Compares two released directories tensor by tensor; returns how many there are."""
    ours, theirs = tensors_in(first), tensors_in(second)
    assert ours.keys() == theirs.keys(), set(ours) ^ set(theirs)
    for name, (entry, place) in ours.items():
        other, other_place = theirs[name]
        assert entry == other, (name, entry, other)
        for a, b in zip(pieces(place), pieces(other_place), strict=True):
            assert a == b, name
    return len(ours)


def read_layer(directory: pathlib.Path, released: pathlib.Path, layer: int) -> float:
    """Reads one layer's leaves and compares its last expert with the released tensor.

    Returns:
      Seconds of the reading.
    """
    from glm5next_jax.checkpoint.source import open_source

    start = time.perf_counter()
    with open_source(directory) as source:
        specs = source.specs("keep")
        with source.leaves(specs) as leaves:
            arrays = {
                leaf: leaves.read(leaf, [tuple((0, n) for n in spec.shape)])[0]
                for leaf, spec in specs.items()
                if leaf.startswith(f"layers.{layer}.")
            }
    seconds = time.perf_counter() - start
    experts = arrays[f"layers.{layer}.mlp.experts.down_proj"]
    name = f"layers.{layer}.mlp.experts.{len(experts) - 1}.down_proj.weight"
    entry, place = tensors_in(released)[f"model.language_model.{name}"]
    if entry["dtype"] == {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16"}[experts.dtype.name]:
        expected = b"".join(pieces(place))
        assert experts[-1].view(np.uint8).tobytes() == expected, name
    return seconds


def _config(args: argparse.Namespace) -> Glm5NextConfig:
    full, layers = Glm5NextConfig.glm53_flash(), args.layers
    return full.replace(
        num_hidden_layers=layers,
        n_routed_experts=args.experts,
        layer_types=full.layer_types[:layers],
        mlp_layer_types=full.mlp_layer_types[:layers],
        indexer_types=full.indexer_types[:layers],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, help="the first layers; from 4 on with experts (4)")
    add("--experts", type=int, default=288, help="per MoE layer, 25 MB each in FP8 (288)")
    add("--source", choices=("fp8", "bf16"), default="fp8", help="the checkpoint's format (fp8)")
    add("--dtype", choices=("keep", "bfloat16", "float32"), default="keep", help="of DST (keep)")
    add_options(parser)
    return parser


def main() -> int:
    args = _parser().parse_args()
    config = _config(args)
    with workplace("convert", args.directory, args.keep) as work:
        released, converted, exported = work / "released", work / "converted", work / "exported"
        size = write_checkpoint(released, config, fp8=args.source == "fp8")
        print(f"wrote {size / 1e9:.2f} GB", flush=True)
        copy_seconds = seconds_of_copy(released, args.cache)
        base = run(released, converted, "--dry-run")

        prepare(released, args.cache)
        start = time.perf_counter()
        convert = run(released, converted, "--dtype", args.dtype)
        subprocess.run(["sync"], check=True)
        convert_seconds = time.perf_counter() - start
        largest = max(path.stat().st_size for path in files_in(converted / "weights"))

        verify = run("verify", released, converted)
        prepare(converted, args.cache)
        export = run("export", converted, exported)
        layer_seconds = read_layer(converted, released, args.layers - 1)
        shutil.rmtree(converted)
        if args.dtype == "keep":
            count = require_same_tensors(released, exported)
            compared = f"{count} tensors equal to the original's, byte for byte"
        else:
            run("verify", released, exported)
            compared = "every weight equal to the original's after rounding"
        figures = {
            "checkpoint_bytes": size,
            "copy_seconds": copy_seconds,
            "convert_seconds": convert_seconds,
            "convert_peak_bytes": convert.peak_bytes,
            "dry_run_peak_bytes": base.peak_bytes,
            "largest_file_bytes": largest,
            "verify": dataclasses.asdict(verify),
            "layer_seconds": layer_seconds,
            "export": dataclasses.asdict(export),
        }
    beyond = convert.peak_bytes - base.peak_bytes
    rate = copy_seconds / convert_seconds
    rows = [
        ("checkpoint", f"{size / 1e9:.2f} GB, {args.source}, --dtype {args.dtype}"),
        ("cp; sync", f"{copy_seconds:.1f} s, {size / copy_seconds / 1e6:.0f} MB/s"),
        ("convert; sync", f"{convert_seconds:.1f} s, {rate:.0%} of the rate of cp"),
        ("largest file", f"{largest / 1e6:.1f} MB"),
        ("memory", f"{convert.peak_bytes / 1e6:.0f} MB, of which {base.peak_bytes / 1e6:.0f} MB"),
        ("", f"with --dry-run; {beyond / largest:.2f} of the largest file beyond that"),
        ("verify", f"{verify.seconds:.1f} s, {verify.peak_bytes / 1e6:.0f} MB"),
        ("read one layer", f"{layer_seconds:.1f} s"),
        ("export", f"{export.seconds:.1f} s, {export.peak_bytes / 1e6:.0f} MB"),
        ("compared", compared),
    ]
    for name, value in rows:
        print(f"{name:16}{value}")
    if args.json:
        figures |= {"arguments": vars(args) | {"directory": None, "json": None}}
        figures |= {"python": platform.python_version(), "machine": platform.machine()}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
