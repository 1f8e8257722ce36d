"""Model configuration: one frozen dataclass, read from and written to a released `config.json`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeGuard, cast

from glm5next_jax import files
from glm5next_jax.errors import printable

_LAYER_TYPES = {
    "linear_attention": "linear_attention",
    "indexed_attention": "indexed_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "full_attention": "indexed_attention",  # as transformers reads it
}
_MLP_TYPES = ("dense", "sparse")
_INDEXER_TYPES = ("full", "shared")
_DTYPES = ("bfloat16", "float32")
_MAX_LAYERS = 10_000
SMEAR_CHANNELS = 24
_LINEAR_ATTN_KEYS = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
_ARCHITECTURES = ["Glm5NextForConditionalGeneration"]

# Read by `from_hf` in a form of their own, and written back by `to_hf`: never part of `hf_extra`.
_INTERPRETED = {
    "layer_types", "mlp_layer_types", "indexer_types", "eos_token_id", "pad_token_id", "dtype",
    "torch_dtype", "tie_word_embeddings", "smear", "num_local_experts", "index_topk_pattern",
    "index_topk_freq", "index_skip_topk_offset", "linear_attn_config", "num_key_value_heads",
    "qk_rope_head_dim", "model_type",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Glm5NextConfig:
    """Architecture of a GLM-5.3-Flash text model (model spec, section 2).

    Field names are those of the released `config.json`. Defaults are transformers' class defaults,
    which a released file overrides: `index_kpool` is 16 here and 4 in the released model. The
    released model itself is `Glm5NextConfig.glm53_flash()`.

    Attributes:
      layer_types: per layer, "linear_attention" (KDA) or "indexed_attention" (sparse MLA). Empty
        gives the default pattern, as it does for the next two.
      mlp_layer_types: per layer, "dense" or "sparse" (MoE).
      indexer_types: per layer, "full" (has an indexer) or "shared" (reuses the selection of the
        layer before it); only read on sparse-attention layers.
      linear_lower_bound: lower bound of the log decay of KDA; None selects the softplus gate.
      num_nextn_predict_layers: MTP layers stored behind the last layer of a checkpoint.
      eos_token_id: tokens that end a generation; empty when the checkpoint names none.
      smear: mix the embedding of a token with that of its predecessor (not in released models).
      dtype: compute dtype, "bfloat16" or "float32".
      hf_extra: JSON of everything in the source file that the text model does not interpret (vision
        part, special token ids, ...), kept so that `to_hf` returns it.

    Raises:
      ValueError: a field is out of range or contradicts another; the message names the field.
    """

    vocab_size: int = 154880
    hidden_size: int = 4096
    num_hidden_layers: int = 45
    intermediate_size: int = 12288
    moe_intermediate_size: int = 2048
    layer_types: tuple[str, ...] = ()
    mlp_layer_types: tuple[str, ...] = ()
    indexer_types: tuple[str, ...] = ()
    num_attention_heads: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 256
    v_head_dim: int = 256
    attention_bias: bool = False
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 2048
    index_kpool: int = 16
    index_kpool_always_select_tail: bool = True
    linear_num_heads: int = 64
    linear_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    linear_lower_bound: float | None = -5.0
    n_routed_experts: int = 288
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_eps: float = 1e-6
    hc_sinkhorn_iters: int = 20
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576
    pad_token_id: int | None = 154820
    eos_token_id: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    smear: bool = False
    dtype: str = "bfloat16"
    hf_extra: str = "{}"

    def __post_init__(self):
        L = self.num_hidden_layers
        _require_layers(L)
        for name in ("layer_types", "mlp_layer_types", "indexer_types", "eos_token_id"):
            value = getattr(self, name)
            _require(isinstance(value, list | tuple), f"{name} must be a list, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        if not self.layer_types:
            pattern = ("indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(L))
            object.__setattr__(self, "layer_types", tuple(pattern))
        if not self.mlp_layer_types:
            pattern = ("dense" if i < 3 else "sparse" for i in range(L))
            object.__setattr__(self, "mlp_layer_types", tuple(pattern))
        if not self.indexer_types:
            object.__setattr__(self, "indexer_types", ("full",) * L)
        _validate(self)

    @property
    def linear_dim(self) -> int:
        """H·K of the KDA layers."""
        return self.linear_num_heads * self.linear_head_dim

    @property
    def num_selected_pools(self) -> int:
        """Pools that a query may select: index_topk tokens' worth."""
        return self.index_topk // self.index_kpool

    def is_kda(self, layer: int) -> bool:
        return self.layer_types[layer] == "linear_attention"

    def is_moe(self, layer: int) -> bool:
        return self.mlp_layer_types[layer] == "sparse"

    def has_indexer(self, layer: int) -> bool:
        return not self.is_kda(layer) and self.indexer_types[layer] == "full"

    def replace(self, **changes: Any) -> Glm5NextConfig:
        """A copy with fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def glm53_flash(cls) -> Glm5NextConfig:
        """The released GLM-5.3-Flash: 45 layers, 321 B parameters with its MTP layer and vision."""
        return cls(
            index_kpool=4,
            eos_token_id=(154820, 154827, 154829),
            num_nextn_predict_layers=1,
        )

    @classmethod
    def tiny(cls, **changes: Any) -> Glm5NextConfig:
        """A few thousand parameters with every part of the architecture, for tests and demos."""
        fields: dict[str, Any] = dict(
            vocab_size=128,
            hidden_size=64,
            num_hidden_layers=5,
            intermediate_size=96,
            moe_intermediate_size=16,
            num_attention_heads=4,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            index_n_heads=8,
            index_head_dim=16,
            index_topk=16,
            index_kpool=4,
            linear_num_heads=2,
            linear_head_dim=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=4096,
            pad_token_id=0,
            dtype="float32",
        )
        return cls(**(fields | changes))

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> Glm5NextConfig:
        """Reads a released `config.json`: the file, its directory, or its parsed dict.

        Takes the whole model's file (`glm5_next`, with `text_config`) or the text part alone
        (`glm5_next_text`). A field that is missing gets transformers' class default.

        Raises:
          ValueError: not a glm5_next config, an unsupported value, or a contradiction.
        """
        origin = "config"
        if not isinstance(source, Mapping):
            path = files.require_driver(source)
            path = files.contained_file(path, "config.json") if path.is_dir() else path
            origin = str(path)
            if not path.exists():
                raise ValueError(f"{origin}: no such file; expected a config.json")
            source = files.read_json_object(path)
        if not isinstance(source, Mapping):
            raise ValueError(f"{origin}: expected a JSON object, found {type(source).__name__}")
        try:
            return cls(**_fields_from_hf(dict(source)))
        except ValueError as error:
            # A wrong value is part of the message, and may be megabytes long.
            raise ValueError(f"{origin}: {printable(str(error), 500)}") from None

    def to_hf(self) -> dict[str, Any]:
        """The released form of this configuration; `from_hf(config.to_hf()) == config`."""
        extra = json.loads(self.hf_extra)
        text = dict(extra.pop("text_config", {}))
        text |= {"model_type": "glm5_next_text"}
        for field in dataclasses.fields(self):
            if field.name not in ("hf_extra", "smear", "tie_word_embeddings"):
                value = getattr(self, field.name)
                text[field.name] = list(value) if isinstance(value, tuple) else value
        text["layer_types"] = [
            "deepseek_sparse_attention" if kind == "indexed_attention" else kind
            for kind in self.layer_types
        ]
        text["num_key_value_heads"] = self.num_attention_heads
        text["qk_rope_head_dim"] = 0
        text["linear_attn_config"] = dict(text.get("linear_attn_config", {})) | {
            **{key: getattr(self, name) for key, name in _LINEAR_ATTN_KEYS.items()},
            # A missing bound with safe_gate means -5: the flag must say that None is meant.
            "safe_gate": self.linear_lower_bound is not None,
        }
        if self.smear:
            text["smear"] = True
        return {
            "architectures": _ARCHITECTURES,
            **extra,
            "model_type": "glm5_next",
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": text,
        }


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_layers(count: object) -> None:
    # Lists of this length are made before anything else is checked.
    _require(_is_int(count), f"num_hidden_layers must be an integer, got {count!r}")
    ok = 1 <= cast(int, count) <= _MAX_LAYERS
    _require(ok, f"num_hidden_layers must be at least 1 and at most {_MAX_LAYERS}, got {count!r}")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _object(value: object, name: str) -> dict[str, Any]:
    _require(isinstance(value, Mapping), f"{name} must be an object, got {value!r}")
    return dict(cast(Mapping[str, Any], value))


def _list(value: object, name: str) -> list[Any]:
    _require(isinstance(value, list | tuple), f"{name} must be a list, got {value!r}")
    return list(cast("list[Any]", value))


def _validate(c: Glm5NextConfig) -> None:
    positive = (
        "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
        "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
        "index_n_heads", "index_head_dim", "index_topk", "index_kpool", "linear_num_heads",
        "linear_head_dim", "linear_conv_kernel_dim", "n_routed_experts", "n_shared_experts",
        "num_experts_per_tok", "n_group", "topk_group", "hc_mult", "hc_sinkhorn_iters",
        "max_position_embeddings",
    )  # fmt: skip
    for name in positive:
        value = getattr(c, name)
        ok = _is_int(value) and value >= 1
        _require(ok, f"{name} must be a positive integer, got {value!r}")
        # So that the product of two is a size that arrays have.
        _require(value < 2**31, f"{name} must be less than 2**31, got {value!r}")
    for name in ("hc_eps", "rms_norm_eps", "swiglu_limit", "routed_scaling_factor"):
        value = getattr(c, name)
        _require(_is_real(value) and value > 0, f"{name} must be a positive number, got {value!r}")
    _require(
        _is_real(c.initializer_range) and c.initializer_range >= 0,
        f"initializer_range must be a number >= 0, got {c.initializer_range!r}",
    )
    _require(
        _is_int(c.num_nextn_predict_layers) and c.num_nextn_predict_layers >= 0,
        f"num_nextn_predict_layers must be an integer >= 0, got {c.num_nextn_predict_layers!r}",
    )
    for name in (
        "attention_bias", "norm_topk_prob", "index_kpool_always_select_tail",
        "tie_word_embeddings", "smear",
    ):  # fmt: skip
        value = getattr(c, name)
        _require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
    _require(
        not c.smear or c.hidden_size >= SMEAR_CHANNELS,
        f"smear reads {SMEAR_CHANNELS} channels, more than hidden_size={c.hidden_size}",
    )
    for name, legal in (
        ("layer_types", ("linear_attention", "indexed_attention")),
        ("mlp_layer_types", _MLP_TYPES),
        ("indexer_types", _INDEXER_TYPES),
    ):
        value = getattr(c, name)
        _require(
            len(value) == c.num_hidden_layers,
            f"{name} must have num_hidden_layers={c.num_hidden_layers} entries, got {len(value)}",
        )
        for i, kind in enumerate(value):
            _require(kind in legal, f"{name}[{i}] must be one of {legal}, got {kind!r}")
    _require(
        c.index_topk % c.index_kpool == 0,
        f"index_topk={c.index_topk} must be divisible by index_kpool={c.index_kpool}",
    )
    _require(
        c.linear_lower_bound is None
        or (_is_real(c.linear_lower_bound) and c.linear_lower_bound < 0),
        f"linear_lower_bound must be negative or None, got {c.linear_lower_bound!r}",
    )
    _require(
        c.num_experts_per_tok <= c.n_routed_experts,
        f"num_experts_per_tok={c.num_experts_per_tok} exceeds {c.n_routed_experts=}",
    )
    _require(
        c.n_routed_experts % c.n_group == 0,
        f"n_routed_experts={c.n_routed_experts} must be divisible by n_group={c.n_group}",
    )
    _require(c.topk_group <= c.n_group, f"topk_group={c.topk_group} exceeds n_group={c.n_group}")
    per_group = c.n_routed_experts // c.n_group
    _require(
        c.n_group == 1 or per_group >= 2,
        f"n_group={c.n_group} leaves {per_group} expert per group; a group's score needs 2",
    )
    _require(
        c.num_experts_per_tok <= per_group * c.topk_group,
        f"num_experts_per_tok={c.num_experts_per_tok} exceeds the {per_group * c.topk_group} "
        f"experts of topk_group={c.topk_group} groups",
    )
    _require(c.dtype in _DTYPES, f"dtype must be one of {_DTYPES}, got {c.dtype!r}")
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(c, name)
        for token in () if value is None else value if isinstance(value, tuple) else (value,):
            _require(
                _is_int(token) and 0 <= token < c.vocab_size,
                f"{name} holds {token!r}, outside the vocabulary of {c.vocab_size}",
            )
    for layer in range(c.num_hidden_layers):
        if not c.is_kda(layer) and c.indexer_types[layer] == "shared":
            _require(
                layer > 0 and c.has_indexer(layer - 1),
                f"indexer_types[{layer}] is 'shared', but layer {layer - 1} is not a sparse "
                "attention layer with its own ('full') indexer",
            )


def _fields_from_hf(top: dict[str, Any]) -> dict[str, Any]:
    """Config fields, as keyword arguments, of a parsed released config."""
    model_type = top.get("model_type")
    if model_type == "glm5_next_text":
        top = {"model_type": "glm5_next", "text_config": top}
    elif model_type != "glm5_next":
        raise ValueError(f"{model_type=}; expected 'glm5_next' or 'glm5_next_text'")
    top = dict(top)
    text = top.pop("text_config", None)
    if text is None:  # a flat, text-only file keeps the text fields at the top
        text, top = top, {"model_type": "glm5_next"}
    text = _object(text, "text_config")

    for name, wanted in (("qk_rope_head_dim", 0), ("hidden_act", "silu")):
        found = text.get(name, wanted)
        _require(found == wanted, f"{name}={found!r} is not supported; expected {wanted!r}")
    heads = text.get("num_attention_heads", 64)
    kv_heads = text.get("num_key_value_heads") or heads
    _require(kv_heads == heads, f"num_key_value_heads={kv_heads} must equal {heads} heads")
    if "num_local_experts" in text:
        text.setdefault("n_routed_experts", text["num_local_experts"])

    fields: dict[str, Any] = {}
    names = {f.name for f in dataclasses.fields(Glm5NextConfig)} - {"hf_extra"} - _INTERPRETED
    for name in names & text.keys():
        fields[name] = text[name]

    L = fields.get("num_hidden_layers", 45)
    if text.get("layer_types") is not None:
        kinds = _list(text["layer_types"], "layer_types")
        for i, kind in enumerate(kinds):
            _require(
                isinstance(kind, str) and kind in _LAYER_TYPES,
                f"layer_types[{i}] must be one of {tuple(_LAYER_TYPES)}, got {kind!r}",
            )
        fields["layer_types"] = tuple(_LAYER_TYPES[kind] for kind in kinds)
    if text.get("mlp_layer_types") is not None:
        fields["mlp_layer_types"] = tuple(_list(text["mlp_layer_types"], "mlp_layer_types"))
    _require_layers(L)
    fields["indexer_types"] = _indexer_types(text, L)

    linear = text.get("linear_attn_config")
    if linear is not None:
        linear = _object(linear, "linear_attn_config")
        for key, name in _LINEAR_ATTN_KEYS.items():
            if key in linear:
                fields[name] = linear[key]
        if fields.get("linear_lower_bound", -5.0) is None and linear.get("safe_gate", True):
            fields["linear_lower_bound"] = -5.0

    eos = text.get("eos_token_id")
    eos = top.get("eos_token_id") if eos is None else eos
    fields["eos_token_id"] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    for part in (top, text):
        if "pad_token_id" in part:
            fields["pad_token_id"] = part["pad_token_id"]
    # The top-level flag decides; a bare text config has only its own.
    fields["tie_word_embeddings"] = top.get(
        "tie_word_embeddings", text.get("tie_word_embeddings", False)
    )
    fields["smear"] = text.get("smear", False)
    dtype = text.get("dtype") or text.get("torch_dtype") or top.get("dtype")
    fields["dtype"] = dtype or top.get("torch_dtype") or "bfloat16"

    extra = {k: v for k, v in top.items() if k not in _INTERPRETED}
    if extra.get("architectures") in (None, _ARCHITECTURES):
        extra.pop("architectures", None)
    unread = {k: v for k, v in text.items() if k not in names | _INTERPRETED}
    unread_linear = (linear or {}).keys() - _LINEAR_ATTN_KEYS.keys() - {"safe_gate"}
    if unread_linear:
        unread["linear_attn_config"] = {k: linear[k] for k in unread_linear}  # type: ignore[index]
    if unread:
        extra["text_config"] = unread
    fields["hf_extra"] = json.dumps(extra, sort_keys=True)
    return fields


def _indexer_types(text: dict[str, Any], num_layers: int) -> tuple[str, ...]:
    """Explicit list, else a pattern string ("FSSF"), else a period with an offset."""
    if text.get("indexer_types") is not None:
        return tuple(_list(text["indexer_types"], "indexer_types"))
    pattern = text.get("index_topk_pattern")
    if pattern is not None:
        _require(
            isinstance(pattern, str | list), f"index_topk_pattern must be letters, got {pattern!r}"
        )
        letters = {"F": "full", "S": "shared"}
        return tuple(letters.get(str(kind), str(kind)) for kind in pattern)
    period, offset = text.get("index_topk_freq"), text.get("index_skip_topk_offset")
    for name, value in (("index_topk_freq", period), ("index_skip_topk_offset", offset)):
        _require(value is None or _is_int(value), f"{name} must be an integer, got {value!r}")
    period = max(period or 1, 1)
    offset = 2 if offset is None else offset
    return tuple(
        "full" if max(i - offset + 1, 0) % period == 0 else "shared" for i in range(num_layers)
    )
