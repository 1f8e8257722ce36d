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
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from glm5next_jax.config import Glm5NextConfig

_PREFIX = "model.language_model."
_FILE_BYTES = 4_000_000_000
_PATTERN_BYTES = 32 << 20
_BLOCK = 128
_SIZES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def released_tensors(c: Glm5NextConfig, *, fp8: bool = True) -> Tensors:
    """Names, dtypes and shapes of the text model of a released checkpoint, FP8 or its BF16 twin."""
    D, W = c.hidden_size, c.linear_conv_kernel_dim
    tensors: Tensors = {}

    def add(name: str, *shape: int, dtype: str = "BF16") -> None:
        tensors[name] = (dtype, shape)

    def add_quantized(name: str, rows: int, columns: int) -> None:
        if not fp8:
            return add(name, rows, columns)
        add(name, rows, columns, dtype="F8_E4M3")
        grid = (math.ceil(rows / _BLOCK), math.ceil(columns / _BLOCK))
        add(f"{name}_scale_inv", *grid, dtype="F32")

    def add_mlp(stem: str, width: int) -> None:
        add_quantized(f"{stem}gate_proj.weight", width, D)
        add_quantized(f"{stem}up_proj.weight", width, D)
        add_quantized(f"{stem}down_proj.weight", D, width)

    def add_kda(stem: str) -> None:
        H, K = c.linear_num_heads, c.linear_head_dim
        for part in "qkv":
            add(f"{stem}{part}_proj.weight", H * K, D)
            add(f"{stem}{part}_conv1d.weight", H * K, 1, W)
        add(f"{stem}b_proj.weight", H, D)
        for part in ("f_a", "g_a"):
            add(f"{stem}{part}_proj.weight", K, D)
        for part in ("f_b", "g_b"):
            add(f"{stem}{part}_proj.weight", H * K, K)
        add(f"{stem}A_log", H, dtype="F32")
        add(f"{stem}dt_bias", H * K, dtype="F32")
        add(f"{stem}o_norm.weight", K)
        add(f"{stem}o_proj.weight", D, H * K)

    def add_sparse_attention(stem: str) -> None:
        H, Q, R = c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank
        K, V, width = c.qk_nope_head_dim, c.v_head_dim, c.index_head_dim
        add_quantized(f"{stem}q_a_proj.weight", Q, D)
        add(f"{stem}q_a_layernorm.weight", Q)
        add_quantized(f"{stem}q_b_proj.weight", H * K, Q)
        add_quantized(f"{stem}kv_a_proj_with_mqa.weight", R, D)
        add(f"{stem}kv_a_layernorm.weight", R)
        add(f"{stem}kv_b_proj.weight", H * (K + V), R)
        add_quantized(f"{stem}o_proj.weight", D, H * V)
        add(f"{stem}indexer.wq_b.weight", c.index_n_heads * width, Q)
        add(f"{stem}indexer.wk.weight", width, D)
        add(f"{stem}indexer.k_norm.weight", width)
        add(f"{stem}indexer.k_norm.bias", width)
        add(f"{stem}indexer.weights_proj.weight", c.index_n_heads, D)
        add(f"{stem}indexer.index_kpool_compress_ape", c.index_kpool, width)
        add(f"{stem}indexer.index_kpool_compress_gate", width, D)

    add(f"{_PREFIX}embed_tokens.weight", c.vocab_size, D)
    for layer in range(c.num_hidden_layers):
        stem = f"{_PREFIX}layers.{layer}."
        add(f"{stem}input_layernorm.weight", D)
        add(f"{stem}post_attention_layernorm.weight", D)
        mixings = (2 + c.hc_mult) * c.hc_mult
        for part in ("attn", "ffn"):
            add(f"{stem}hc_{part}_fn", mixings, c.hc_mult * D)
            add(f"{stem}hc_{part}_base", mixings, dtype="F32")
            add(f"{stem}hc_{part}_scale", 3, dtype="F32")
        (add_kda if c.is_kda(layer) else add_sparse_attention)(f"{stem}self_attn.")
        if c.is_moe(layer):
            E, F = c.n_routed_experts, c.moe_intermediate_size
            add(f"{stem}mlp.gate.weight", E, D)
            add(f"{stem}mlp.gate.e_score_correction_bias", E, dtype="F32")
            for expert in range(E):
                add_mlp(f"{stem}mlp.experts.{expert}.", F)
            add_mlp(f"{stem}mlp.shared_experts.", F * c.n_shared_experts)
        else:
            add_mlp(f"{stem}mlp.", c.intermediate_size)
    add(f"{_PREFIX}norm.weight", D)
    add("lm_head.weight", c.vocab_size, D)
    return tensors


def write_checkpoint(
    directory: pathlib.Path,
    config: Glm5NextConfig,
    *,
    fp8: bool = True,
    file_bytes: int = _FILE_BYTES,
    seed: int = 0,
) -> int:
    """Writes a released directory of pseudo-random, finite weights; returns its size."""
    directory.mkdir(parents=True, exist_ok=True)
    hf = config.to_hf()
    if fp8:
        hf["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
    (directory / "config.json").write_text(json.dumps(hf, indent=1))
    tensors = released_tensors(config, fp8=fp8)
    files: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if files[-1] and _num_bytes(files[-1]) + _num_bytes({name: tensor}) > file_bytes:
            files.append({})
        files[-1][name] = tensor
    patterns = _patterns(np.random.default_rng(seed))
    weight_map = {}
    for number, content in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(directory / name, content, patterns)
        weight_map |= dict.fromkeys(content, name)
    total = _num_bytes(tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _num_bytes(tensors: Tensors) -> int:
    return sum(math.prod(shape) * _SIZES[dtype] for dtype, shape in tensors.values())


def _patterns(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Bytes that the tensors of a dtype are cut from: no NaN, no infinity, no run of zeros."""
    codes = rng.integers(0, 256, _PATTERN_BYTES, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    normal = rng.standard_normal(_PATTERN_BYTES // 4, dtype=np.float32) * np.float32(0.02)
    factors = rng.uniform(1e-5, 1e-4, _PATTERN_BYTES // 4).astype(np.float32)
    half = np.concatenate([normal, normal[::-1]]).astype(ml_dtypes.bfloat16)
    return {
        "F8_E4M3": codes,
        "BF16": half.view(np.uint8),
        "F32": normal.view(np.uint8),
        "scale": factors.view(np.uint8),
    }


def _write_file(path: pathlib.Path, tensors: Tensors, patterns: Mapping[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        offsets = [end, end := end + _num_bytes({name: (dtype, shape)})]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = 0
        for name, tensor in tensors.items():
            pattern = patterns["scale" if name.endswith("_scale_inv") else tensor[0]]
            left = _num_bytes({name: tensor})
            start = (start + 4096 * 17) % (pattern.size // 2)  # other bytes for every tensor
            at = start
            while left:
                count = min(left, pattern.size - at)
                file.write(pattern[at : at + count].data)
                left, at = left - count, 0


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


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _prepare(directory: pathlib.Path, cache: str) -> None:
    """Leaves the files all out of the page cache, or as far in it as it holds them."""
    subprocess.run(["sync"], check=True)
    for path in _files(directory):
        with path.open("rb") as file:
            if cache == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(16 << 20):
                    pass


def _seconds_of_copy(directory: pathlib.Path, cache: str) -> float:
    copy = directory.with_name(f"{directory.name}.copy")
    _prepare(directory, cache)
    start = time.perf_counter()
    subprocess.run(f'cp -r "{directory}" "{copy}"; sync', shell=True, check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(copy)
    return seconds


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
    add("--converted", action="store_true", help="load the converted form, bfloat16")
    add(
        "--cache",
        choices=("cold", "warm"),
        default="cold",
        help="page cache before the copy and before the load: the files dropped from it, or read "
        "once (cold)",
    )
    add(
        "--copies",
        action="store_true",
        help="make the CPU devices copy what they are sent, as accelerators do; else they take the "
        "memory over",
    )
    add("--directory", type=pathlib.Path, help="where to write (a fresh temporary directory)")
    add("--keep", action="store_true", help="leave what was written there")
    add("--json", type=pathlib.Path, help="write the figures to this file, too")
    return parser


@contextlib.contextmanager
def _workplace(args: argparse.Namespace) -> Iterator[pathlib.Path]:
    parent = args.directory
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix="load-", dir=parent))
    try:
        yield work
    finally:
        if args.keep:
            print(f"kept: {work}")
        else:
            shutil.rmtree(work)


def main() -> int:
    args = _parser().parse_args()
    if args.converted and args.weights == "fp8":
        args.weights = "bf16"
    config = _config(args)
    with _workplace(args) as work:
        directory = work / "released"
        start = time.perf_counter()
        written = write_checkpoint(directory, config)
        print(f"wrote {written / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s", flush=True)
        if args.converted:
            from convert.converter import convert

            convert(directory, work / "converted", quiet=True)
            directory = work / "converted"
        size = sum(path.stat().st_size for path in _files(directory))
        copy_seconds = _seconds_of_copy(directory, args.cache)
        _prepare(directory, args.cache)
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
