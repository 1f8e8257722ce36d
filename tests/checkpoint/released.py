"""Checkpoint directories for tests, written without the code under test.

The tiny golden weights carry the names that transformers uses in memory. From those this file
makes the released names, the fused names of serving engines, and the leaves that a model must end
up with.
"""

import json
import pathlib
import re

import ml_dtypes
import numpy as np
import safetensors.numpy

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden"
TEXT = "model.language_model."
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def config() -> dict:
    return json.loads((GOLDEN / "tiny_config.json").read_text())


def in_memory() -> dict[str, np.ndarray]:
    """The golden weights, float32, by transformers' names."""
    return safetensors.numpy.load_file(GOLDEN / "tiny_weights.safetensors")


def released(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """transformers' names to released names."""
    out = {}
    for name, x in tensors.items():
        name = name.replace("forget_gate.", "")
        name = re.sub(r"(attn|ffn)_hc\.(fn|base|scale)$", r"hc_\1_\2", name)
        stem = name.rpartition(".")[0]
        if name.endswith("self_attn.conv1d.weight"):
            for piece, part in zip("qkv", np.split(x, 3), strict=True):
                out[name.replace("conv1d", f"{piece}_conv1d")] = part
        elif name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(x):
                gate, up = np.split(both, 2)
                out[f"{stem}.{e}.gate_proj.weight"] = gate
                out[f"{stem}.{e}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(x):
                out[f"{stem}.{e}.down_proj.weight"] = down
        else:
            out[name] = x
    return out


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Released names to the fused names and shapes of serving engines."""
    out = dict(tensors)
    take = lambda stem, *names: [out.pop(f"{stem}{name}") for name in names]
    for name in tensors:
        stem = re.match(r".*self_attn\.", name)
        stem = stem[0] if stem else ""
        if name.endswith("self_attn.q_proj.weight"):
            parts = take(stem, *(f"{p}_proj.weight" for p in ("q", "k", "v", "b", "f_a", "g_a")))
            out[f"{stem}fused_qkvbfg_a_proj.weight"] = np.concatenate(parts)
            parts = take(stem, *(f"{p}_conv1d.weight" for p in "qkv"))
            out[f"{stem}qkv_conv1d.weight"] = np.concatenate(parts)[:, 0]
            out[f"{stem}fused_fg_b_proj.weight"] = np.stack(
                take(stem, "f_b_proj.weight", "g_b_proj.weight")
            )
            out[f"{stem}A_log"] = out[f"{stem}A_log"].reshape(1, 1, -1, 1)
        elif name.endswith("self_attn.q_a_proj.weight"):
            parts = take(stem, "q_a_proj.weight", "kv_a_proj_with_mqa.weight")
            out[f"{stem}fused_qkv_a_proj_with_mqa.weight"] = np.concatenate(parts)
            parts = take(f"{stem}indexer.", "wk.weight", "weights_proj.weight")
            out[f"{stem}indexer.wk_weights_proj.weight"] = np.concatenate(parts)
    return out


def leaves(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's leaves, of tensors by released names; the vision tower left out."""
    out = {}
    for name, x in tensors.items():
        name = name.removeprefix(TEXT)
        stem = name.rpartition(".")[0]
        if name.startswith("model.visual"):
            continue
        if name.endswith("self_attn.q_proj.weight"):
            stem = name.removesuffix("q_proj.weight")
            pieces = [tensors[f"{TEXT}{stem}{p}_proj.weight"] for p in "q k v b f_a g_a".split()]
            out[f"{stem}qkv_proj.weight"] = np.stack(pieces[:3])
            out[f"{stem}fused_bfg_a_proj.weight"] = np.concatenate(pieces[3:])
        elif name.endswith("q_conv1d.weight"):
            stem = name.removesuffix("q_conv1d.weight")
            pieces = [tensors[f"{TEXT}{stem}{p}_conv1d.weight"] for p in "qkv"]
            out[f"{stem}qkv_conv1d.weight"] = np.stack(pieces)[:, :, 0, :]
        elif ".experts.0." in name:
            kind = name.split(".")[-2]
            stem = name.partition(".experts.")[0] + ".experts."
            experts = [
                tensors[f"{TEXT}{stem}{e}.{kind}.weight"]
                for e in range(sum(f"{TEXT}{stem}" in k and f".{kind}." in k for k in tensors))
            ]
            out[f"{stem}{kind}"] = np.stack(experts)
        elif re.search(r"\.(k|v|b|f_a|g_a)_proj\.weight$|_conv1d\.|\.experts\.", name):
            continue
        else:
            out[re.sub(r"hc_(attn|ffn)_(fn|base|scale)$", r"\1_hc.\2", name)] = x
    return out


def quantize(x: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """FP8 codes and the float32 factor of each block, the largest magnitude going to 448."""
    rows, columns = block
    grid = tuple(-(-n // b) for n, b in zip(x.shape, block, strict=True))
    scale = np.empty(grid, np.float32)
    codes = np.empty(x.shape, FP8)
    for i, j in np.ndindex(grid):
        part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scale[i, j] = np.abs(x[part]).max() / 448
        codes[part] = (x[part] / scale[i, j]).astype(FP8)
    return codes, scale


def with_fp8(
    tensors: dict[str, np.ndarray], block: tuple[int, int]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Those matrices that the released FP8 checkpoint quantises, quantised.

    Returns:
      (the tensors with codes and scales, the tensors with the float32 values that those mean).
    """
    stored, meant = {}, {}
    for name, x in tensors.items():
        stored[name] = meant[name] = x
        is_mla = re.search(r"self_attn\.(q_a|q_b|kv_a_proj_with_mqa|o)(_proj)?\.weight$", name)
        is_kda = f"{name.rpartition('self_attn.')[0]}self_attn.A_log" in tensors
        is_mlp = re.search(r"mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj", name)
        if "visual" not in name and (is_mlp or (is_mla and not is_kda)):
            codes, scale = quantize(x, block)
            stored[name] = codes
            stored[f"{name}_scale_inv"] = scale
            spread = np.kron(scale, np.ones(block, np.float32))[: x.shape[0], : x.shape[1]]
            meant[name] = codes.astype(np.float32) * spread.astype(np.float32)
    return stored, meant


# The package's own writer takes other arguments in every other version, and not every dtype.
_NAMES = {
    "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint8": "U8", "int8": "I8",
    "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip


def write_file(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, x in tensors.items():
        offsets = [end, end := end + x.nbytes]
        header[name] = {"dtype": _NAMES[x.dtype.name], "shape": x.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    data = b"".join(x.tobytes() for x in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write(
    directory: pathlib.Path,
    tensors: dict[str, np.ndarray],
    *,
    hf_config: dict | None = None,
    num_shards: int = 1,
    index: bool | None = None,
) -> pathlib.Path:
    """A released directory. Tensors go to the shards in turn, so that neighbours are apart."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config() if hf_config is None else hf_config))
    names = (
        ["model.safetensors"]
        if num_shards == 1
        else [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    )
    weight_map = {name: names[i % num_shards] for i, name in enumerate(tensors)}
    for file in names:
        write_file(directory / file, {n: x for n, x in tensors.items() if weight_map[n] == file})
    if num_shards > 1 if index is None else index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(text)
    return directory


def as_stored(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """bfloat16 where the released BF16 checkpoint has it, float32 where it has that."""
    keep = re.compile(r"(A_log|dt_bias|e_score_correction_bias|_(base|scale))$")
    return {n: x if keep.search(n) else x.astype(BF16) for n, x in tensors.items()}
