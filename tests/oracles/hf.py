"""The reference implementation at a small size: random models, and what they decide.

Comparing two implementations of a router or of a top-k only makes sense where no rounding error can
turn a decision, so `Decisions` records how close the closest one was.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.torch
import torch
import transformers
from transformers.models.glm5_next import modeling_glm5_next as reference

from glm5next_jax import Glm5NextConfig

# Large enough to exist, small enough not to matter: no test here sees an image.
_VISION = {
    "model_type": "glm5_next_vision",
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projection_intermediate_size": 16,
}


def random_model(config: Glm5NextConfig, seed: int, attention: str = "eager") -> Any:
    """A float32 `Glm5NextForConditionalGeneration` of `config` with weights that matter.

    Weights keep activations near 1 through any depth. Everything that the reference's own
    initialisation leaves neutral (norms, biases, decays, hyper-connections) is random too, so that
    a transposed or forgotten one shows.
    """
    released = config.to_hf()
    released["vision_config"] = _VISION | {"out_hidden_size": config.hidden_size}
    model = reference.Glm5NextForConditionalGeneration._from_config(
        transformers.Glm5NextConfig(**released),
        attn_implementation=attention,
        dtype=torch.float32,
    )
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            drawn = _draw(name, tuple(tensor.shape), rng, config)
            tensor.copy_(torch.from_numpy(np.asarray(drawn, np.float32)))
    return model.eval()


def _draw(
    name: str, shape: tuple[int, ...], rng: np.random.Generator, config: Glm5NextConfig
) -> np.ndarray:
    if name.endswith("A_log"):
        low, high = (0.4, 2.5) if config.linear_lower_bound is not None else (0.1, 4.0)
        return np.log(rng.uniform(low, high, shape))
    if name.endswith("dt_bias"):  # from nearly no decay to a strong one, channel by channel
        return rng.normal(-2.0, 2.0, shape)
    if name.endswith("e_score_correction_bias"):
        return rng.normal(0.0, 0.2, shape)
    if name.endswith("_hc.base"):
        return rng.normal(0.0, 0.7, shape)
    if name.endswith("_hc.scale"):
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith("compress_ape"):
        return rng.normal(0.0, 1.0, shape)
    if name.endswith("embed_tokens.weight"):
        return rng.normal(0.0, shape[1] ** -0.5 if config.tie_word_embeddings else 1.0, shape)
    if len(shape) == 1:  # norms, and the biases of linear maps and of the indexer's LayerNorm
        return (
            rng.normal(1.0, 0.25, shape) if name.endswith("weight") else rng.normal(0, 0.3, shape)
        )
    fan_in = shape[-1] if ".experts." in name else math.prod(shape[1:])
    return rng.normal(0.0, fan_in**-0.5, shape)


def to_bfloat16(model: Any) -> None:
    """Rounds the weights that the reference does not keep in float32 when it loads bfloat16."""
    kept = tuple(model._keep_in_fp32_modules_strict)
    for name, parameter in model.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.to(torch.bfloat16)


def save_released(model: Any, directory: pathlib.Path) -> pathlib.Path:
    """A directory as `save_pretrained` writes it: released names, transformers' own config."""
    model.save_pretrained(directory)
    return directory


def save_text_model(model: Any, config: Glm5NextConfig, directory: pathlib.Path) -> pathlib.Path:
    """A directory with the names that transformers uses in memory, and our own config."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    }
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    return directory


def array(tensor: Any) -> np.ndarray:
    """float32 (or integer, or bool) copy of a tensor; exact, since bfloat16 is part of float32."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy().copy()


def run(model: Any, ids: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
    """(logits, cache) of the reference behind what `cache` holds."""
    if cache is None:
        cache = transformers.DynamicCache(config=model.config.text_config)
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(ids).long(), cache=cache, use_cache=True)
    return array(out.logits), cache


def token_ids(config: Glm5NextConfig, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([seed, 1]).integers(0, config.vocab_size, shape).astype(np.int32)


def compare_states(cache: Any, theirs: Any, model: Any, measure) -> None:
    """Every leaf of our cache against what the reference keeps."""
    n = int(cache.length[0])
    for i, (state, kept) in enumerate(zip(cache.layers, theirs.layers, strict=True)):
        attention = model.model.language_model.layers[i].self_attn
        if isinstance(attention, reference.Glm5NextTextLinearAttention):
            measure("recurrent_state", state.recurrent_state, array(kept.recurrent_states[0]))
            # The reference keeps one input more than the next token needs.
            conv = array(kept.conv_states[0])[..., 1:].swapaxes(1, 2)
            measure("conv_state", state.conv_state.reshape(conv.shape), conv)
            continue
        measure("latent", state.latent[:, :n], array(kept.keys)[:, 0])
        indexer = attention.indexer
        if indexer is None:
            continue
        pools, _, _ = indexer.get_pooled_states(kept.indexer_keys)
        P, dI = indexer.index_kpool, indexer.head_dim
        measure("index_pools", state.index_pools[:, : n // P], array(pools))
        rows = array(kept.indexer_keys)[:, n // P * P :, : 2 * dI]
        rows = rows.reshape(*rows.shape[:2], 2, dI)
        measure("index_tail", state.index_tail[:, : n % P], rows)


def stored(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
    """A bfloat16 activation, the same for all three."""
    values = np.random.default_rng([seed, 2]).normal(0.0, scale, shape)
    return torch.from_numpy(values.astype(np.float32)).bfloat16()


def to_jax(tensor: torch.Tensor) -> jax.Array:
    values = jnp.asarray(array(tensor))
    return values.astype(jnp.bfloat16) if tensor.dtype == torch.bfloat16 else values


def visible_tokens(pool_ids: Any, config: Glm5NextConfig) -> np.ndarray:
    """pool_ids [B, T, Z] of a whole sequence -> [B, T, T], which tokens each query may see."""
    pool_ids, P = np.asarray(pool_ids), config.index_kpool
    T = pool_ids.shape[1]
    position, token = np.arange(T)[:, None], np.arange(T)[None]
    visible = (pool_ids[..., None] == token // P).any(axis=2)
    if config.index_kpool_always_select_tail:
        visible |= (token >= (position + 1) // P * P) & (token <= position)
    return visible


@dataclasses.dataclass(frozen=True)
class Trio:
    """One bfloat16 checkpoint: ours, theirs, and theirs in float32 with the same weights."""

    ours: Any
    theirs: Any
    exact: Any

    def of(self, path: str) -> tuple[Any, Any, Any]:
        """The three modules at a path that both sides share."""

        def find(module: Any) -> Any:
            for part in path.split("."):
                module = module[int(part)] if part.isdigit() else getattr(module, part)
            return module

        return find(self.ours), find(self.theirs), find(self.exact)

    @classmethod
    def read(cls, path: pathlib.Path, ours: Any) -> Trio:
        """Both of theirs from the directory that `ours` was loaded from."""
        theirs = (
            reference.Glm5NextForConditionalGeneration.from_pretrained(
                path, dtype=dtype, attn_implementation="eager"
            )
            for dtype in (torch.bfloat16, torch.float32)
        )
        return cls(ours, *(model.eval().model.language_model for model in theirs))


class Decisions:
    """Records, while it is entered, every selection of a model and its closest decision.

    The model must run with a cache, which is where the indexer's keys are read.

    Attributes:
      visible: per indexer call, which cached tokens each query may see, [B, T, S] bool.
      index_margin: closest decision of an indexer, relative to the query's largest score.
      index_margins: per indexer call, that margin of each query [B, T]; inf where nothing competes.
      router_margin: closest decision of a router, among experts and among groups.
      experts: per router call, the chosen experts [N, X].
    """

    def __init__(self, model: Any):
        self.model = model
        self.visible: list[np.ndarray] = []
        self.experts: list[np.ndarray] = []
        self.index_margins: list[np.ndarray] = []
        self.router_margin = math.inf
        self._handles: list[Any] = []

    @property
    def index_margin(self) -> float:
        return min((float(m.min()) for m in self.index_margins), default=math.inf)

    def __enter__(self) -> Decisions:
        for module in self.model.modules():
            if isinstance(module, reference.Glm5NextTextIndexer):
                hook = module.register_forward_hook(self._on_indexer, with_kwargs=True)
                self._handles.append(hook)
            if isinstance(module, reference.Glm5NextTextTopkRouter):
                self._handles.append(module.register_forward_hook(self._on_router))
        return self

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_indexer(self, module: Any, args: Any, kwargs: Any, chosen: torch.Tensor) -> None:
        cached = kwargs["cache"].layers[module.layer_idx].indexer_keys
        keys, _, _ = module.get_pooled_states(cached)
        B, T, _ = chosen.shape
        S, P = cached.shape[1], module.index_kpool
        tokens = chosen.long()
        visible = torch.zeros(B, T, S + 1, dtype=torch.bool)  # one more slot for "nothing"
        visible.scatter_(-1, torch.where(tokens < 0, S, tokens), True)
        self.visible.append(array(visible[..., :S]))

        q = module.wq_b(kwargs["q_resid"]).view(B, T, module.n_heads, module.head_dim)
        dots = torch.einsum("bthd,bpd->bthp", q.double(), keys.double())
        weights = module.weights_proj(kwargs["hidden_states"]).double()
        scores = torch.einsum("bth,bthp->btp", weights, dots.relu())
        last_token = (torch.arange(keys.shape[1]) + 1) * P - 1
        position = S - T + torch.arange(T)
        scores = scores.masked_fill(last_token > position[:, None], -torch.inf)
        count = module.index_topk // P
        margins = np.full((B, T), np.inf)
        if scores.shape[-1] > count:
            best = scores.sort(dim=-1, descending=True)[0]
            gap = best[..., count - 1] - best[..., count]
            size = scores.masked_fill(scores.isinf(), 0).abs().amax(-1)
            margins = np.where(array(best[..., count].isinf()), np.inf, array(gap / size))
        self.index_margins.append(margins)

    def _on_router(self, module: Any, args: Any, output: Any) -> None:
        logits, _, experts = output
        self.experts.append(np.sort(array(experts), axis=-1))
        choice = logits.double().sigmoid() + module.e_score_correction_bias.double()
        if module.num_group > 1:
            grouped = choice.view(len(choice), module.num_group, -1)
            group_scores = grouped.topk(2, dim=-1)[0].sum(-1)
            self._router_decision(group_scores, module.topk_group)
            kept = torch.zeros_like(group_scores, dtype=torch.bool)
            kept.scatter_(1, group_scores.topk(module.topk_group)[1], True)
            choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        self._router_decision(choice, module.top_k)

    def _router_decision(self, scores: torch.Tensor, count: int) -> None:
        if scores.shape[-1] > count:
            best = scores.sort(dim=-1, descending=True)[0]
            gap = float((best[:, count - 1] - best[:, count]).min())
            self.router_margin = min(self.router_margin, gap)
