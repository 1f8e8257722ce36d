"""The tensors of a released text model: names, shapes and dtypes, from a configuration.

Names come from the one table that reading uses, `glm5next_jax.checkpoint.mapping`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from glm5next_jax.checkpoint import mapping
from glm5next_jax.checkpoint.leaves import as_matrix
from glm5next_jax.checkpoint.mapping import EXPERTS, Name
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.model import param_specs

TEXT_PREFIX = mapping.PREFIXES[0]
VISION_PREFIX = "model.visual."
HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"

# What the released checkpoints hold in float32; all else is BF16, or FP8 in the FP8 one.
_FLOAT32 = re.compile(
    r"self_attn\.(A_log|dt_bias)$|mlp\.gate\.e_score_correction_bias$|hc_(attn|ffn)_(base|scale)$"
)
_MODULE = re.compile(r"\.(weight|bias)(_[a-z0-9_]+)?$")  # also of factors
_ABSOLUTE_PATH = re.compile(r"/|~|[A-Za-z]:[\\/]|\\\\|file:")
_FP8_FEED_FORWARD = re.compile(
    r"\.mlp\.(experts\.[0-9]+\.|shared_experts\.)?(gate|up|down)_proj\.weight$"
)
_FP8_SPARSE_ATTENTION = re.compile(
    r"\.self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)\.weight$"
)


@dataclasses.dataclass(frozen=True)
class ReleasedTensor:
    """A tensor of the released format, and where a model has it.

    Attributes:
      name: in full.
      shape: as released: convolutions are [channels, 1, width].
      leaf: path of the leaf that has it.
      start: its first row there. All but the last dimension of a leaf are rows, as in
        `leaves.as_matrix`.
      is_float32: whether released checkpoints hold it in float32.
      is_fp8: whether the released FP8 checkpoint holds it in FP8.
    """

    name: str
    shape: tuple[int, ...]
    leaf: str
    start: int
    is_float32: bool
    is_fp8: bool

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns, of the leaf and so of this tensor."""
        return as_matrix(self.shape)


def released_tensors(config: Glm5NextConfig) -> list[ReleasedTensor]:
    """Every tensor of the text model: the embedding, layer by layer, the last norm, the head.

    Raises:
      ValueError: a model with smear, for which the released format has no place.
    """
    if config.smear:
        raise ValueError(
            "smear: a model that mixes the embeddings of neighbours cannot be exported: the "
            "released format has no place for its weights"
        )
    specs = param_specs(config, param_dtype="bfloat16")
    segments = mapping.segments(config)
    tensors = [
        tensor
        for leaf, spec in specs.items()
        for tensor in _tensors_of(leaf, tuple(spec.shape), segments, config)
    ]
    rank = {rule.source: rank for rank, rule in enumerate(mapping.RULES)}

    def place(tensor: ReleasedTensor) -> tuple[int, ...]:
        bare = tensor.name.removeprefix(TEXT_PREFIX)
        name = Name.of(bare)
        if name.layer is None:
            return (-1,) if bare == _EMBEDDING else (len(config.layer_types), rank[name.generic])
        expert = -1 if name.expert is None else name.expert
        # Experts one after the other, behind the rest of their layer.
        return name.layer, expert, rank[name.generic]

    return sorted(tensors, key=place)


def _tensors_of(
    leaf: str,
    shape: tuple[int, ...],
    segments: dict[str, list[tuple[str, int]]],
    config: Glm5NextConfig,
) -> Iterator[ReleasedTensor]:
    name = Name.of(leaf)
    parts: Sequence[tuple[str, int]]
    if name.generic in segments:
        parts = segments[name.generic]
    elif name.generic.startswith(EXPERTS):
        parts = [(str(expert), shape[-2]) for expert in range(shape[0])]
    else:
        parts = [("", as_matrix(shape)[0])]
    start = 0
    for part, rows in parts:
        expert = name.generic.startswith(EXPERTS)
        target = f"{name.generic}[{'{E}' if expert else part}]" if part else name.generic
        source = mapping.released_source(target)
        rule = mapping.rule_of(source)
        assert rule is not None
        bare = source.replace("{L}", str(name.layer)).replace("{E}", part)
        columns = shape[-1:] if len(shape) > 1 else ()
        is_sparse = name.layer is not None and not config.is_kda(name.layer)
        yield ReleasedTensor(
            name=released_name(bare),
            shape=(rows, 1, *columns) if rule.also == "conv" else (rows, *columns),
            leaf=leaf,
            start=start,
            is_float32=bool(_FLOAT32.search(bare)),
            is_fp8=bool(
                _FP8_FEED_FORWARD.search(bare) or (is_sparse and _FP8_SPARSE_ATTENTION.search(bare))
            ),
        )
        start += rows


def released_name(name: str) -> str:
    """A name under any of the accepted prefixes, under the released one."""
    if name.removeprefix("model.").startswith("visual."):
        return VISION_PREFIX + name.removeprefix("model.").removeprefix("visual.")
    bare = mapping.without_prefix(name)
    return bare if bare == HEAD else TEXT_PREFIX + bare


def hf_config(
    config: Glm5NextConfig,
    dtype: str,
    tensors: Iterable[tuple[str, str, int]],
    block: tuple[int, int],
) -> dict[str, Any]:
    """`config.json` of a checkpoint with these tensors.

    Args:
      config: the model.
      dtype: compute dtype to state.
      tensors: name, safetensors' dtype and number of dimensions of each tensor.
      block: rows and columns of an FP8 block.

    Returns:
      `config.to_hf()` with `quantization_config` exactly where a tensor is FP8, and without paths
      of the machine that it was on.
    """
    hf = config.replace(dtype=dtype).to_hf()
    for part in (hf, hf["text_config"]):
        part.pop("quantization_config", None)
    hf = without_paths(hf) | {"dtype": dtype}
    modules = _unquantized_modules(list(tensors))
    if modules is not None:
        hf["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
            "modules_to_not_convert": modules,
        }
    return hf


def without_paths(value: Any) -> Any:
    """JSON without absolute paths, such as that in `_name_or_path`."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items() if not _is_path(item)}
    if isinstance(value, list):
        return [without_paths(item) for item in value if not _is_path(item)]
    return value


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(_ABSOLUTE_PATH.match(value))


def _unquantized_modules(tensors: list[tuple[str, str, int]]) -> list[str] | None:
    """`modules_to_not_convert`: every module without FP8. None if no module has FP8.

    A vector without a module of its own, such as `A_log`, is not listed: a reader would look for a
    module. Matrices of that kind are, since engines make them modules. The head always is: where it
    is tied it has no tensor, but readers have the module.
    """
    fp8 = {_MODULE.sub("", name) for name, dtype, _ in tensors if dtype == "F8_E4M3"}
    if not fp8:
        return None
    others = {HEAD.removesuffix(".weight"): None}
    for name, _, rank in tensors:
        module = _MODULE.sub("", name)
        if module not in fp8 and (module != name or rank > 1):
            others[module] = None
    return list(others)
