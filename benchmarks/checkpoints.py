"""Checkpoints to measure with: released names and widths, pseudo-random weights."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import shutil
import subprocess
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

    def add_moe(stem: str) -> None:
        E, F = c.n_routed_experts, c.moe_intermediate_size
        add(f"{stem}gate.weight", E, D)
        add(f"{stem}gate.e_score_correction_bias", E, dtype="F32")
        for expert in range(E):
            add_mlp(f"{stem}experts.{expert}.", F)
        add_mlp(f"{stem}shared_experts.", F * c.n_shared_experts)

    def add_norms(stem: str, *names: str) -> None:
        for name in ("input_layernorm", "post_attention_layernorm", *names):
            add(f"{stem}{name}.weight", D)

    add(f"{_PREFIX}embed_tokens.weight", c.vocab_size, D)
    for layer in range(c.num_hidden_layers):
        stem = f"{_PREFIX}layers.{layer}."
        add_norms(stem)
        mixings = (2 + c.hc_mult) * c.hc_mult
        for part in ("attn", "ffn"):
            add(f"{stem}hc_{part}_fn", mixings, c.hc_mult * D)
            add(f"{stem}hc_{part}_base", mixings, dtype="F32")
            add(f"{stem}hc_{part}_scale", 3, dtype="F32")
        (add_kda if c.is_kda(layer) else add_sparse_attention)(f"{stem}self_attn.")
        if c.is_moe(layer):
            add_moe(f"{stem}mlp.")
        else:
            add_mlp(f"{stem}mlp.", c.intermediate_size)
    for layer in range(c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers):
        stem = f"{_PREFIX}layers.{layer}."
        add_norms(stem, "enorm", "hnorm", "shared_head.norm")
        add(f"{stem}eh_proj.weight", D, 2 * D)
        add_sparse_attention(f"{stem}self_attn.")
        add_moe(f"{stem}mlp.")
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


def files_in(directory: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def prepare(directory: pathlib.Path, cache: str) -> None:
    """Leaves the files all out of the page cache, or as far in it as it holds them."""
    subprocess.run(["sync"], check=True)
    for path in files_in(directory):
        with path.open("rb") as file:
            if cache == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(16 << 20):
                    pass


def seconds_of_copy(directory: pathlib.Path, cache: str) -> float:
    """How long `cp -r; sync` of a directory takes."""
    copy = directory.with_name(f"{directory.name}.copy")
    prepare(directory, cache)
    start = time.perf_counter()
    subprocess.run(f'cp -r "{directory}" "{copy}"; sync', shell=True, check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(copy)
    return seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of every benchmark that writes checkpoints."""
    add = parser.add_argument
    add(
        "--cache",
        choices=("cold", "warm"),
        default="cold",
        help="page cache before everything that is timed: the files dropped from it, or read once "
        "(cold)",
    )
    add("--directory", type=pathlib.Path, help="where to write (a fresh temporary directory)")
    add("--keep", action="store_true", help="leave what was written there")
    add("--json", type=pathlib.Path, help="write the figures to this file, too")


@contextlib.contextmanager
def workplace(stem: str, parent: pathlib.Path | None, keep: bool) -> Iterator[pathlib.Path]:
    """A fresh directory below `parent`, removed at the end unless `keep`."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix=f"{stem}-", dir=parent))
    try:
        yield work
    finally:
        if keep:
            print(f"kept: {work}")
        else:
            shutil.rmtree(work)
