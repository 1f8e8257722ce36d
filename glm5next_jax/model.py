"""GLM-5.3-Flash from token ids to logits: the diagram of the model.

    token ids -> embed_tokens -> (smear) -> M copies of the stream
      per layer:  streams -> attn_hc.pre -> input_layernorm -> KDA | sparse MLA -> attn_hc.post
                  streams -> ffn_hc.pre -> post_attention_layernorm -> SwiGLU | MoE -> ffn_hc.post
    mean of the streams -> norm -> lm_head -> logits

Modules hold weights and the forward; all state is in the `Cache` that goes in and comes back.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from glm5next_jax import sharding
from glm5next_jax.cache import Cache, DsaCache, KdaCache
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.hyper_connections import HyperConnection
from glm5next_jax.kda import KimiDeltaAttention
from glm5next_jax.linear import Embedding, Linear, einsum
from glm5next_jax.mla import MultiHeadLatentAttention
from glm5next_jax.mlp import SwiGLU
from glm5next_jax.moe import MoE
from glm5next_jax.norms import RMSNorm
from glm5next_jax.sharding import AnyMesh
from glm5next_jax.smear import Smear

if TYPE_CHECKING:
    from glm5next_jax.tokenizer import Tokenizer


class DecoderLayer(nnx.Module):
    """A mixer and a feed-forward, each between its own pair of hyper-connection steps."""

    def __init__(self, config: Glm5NextConfig, layer: int, *, rngs, dtype, fp8: bool):
        norm = partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.attn_hc = HyperConnection(config, rngs=rngs, dtype=dtype)
        self.ffn_hc = HyperConnection(config, rngs=rngs, dtype=dtype)
        if config.is_kda(layer):
            self.self_attn = KimiDeltaAttention(config, rngs=rngs, dtype=dtype)
        else:
            has_indexer = config.has_indexer(layer)
            self.self_attn = MultiHeadLatentAttention(
                config, has_indexer=has_indexer, rngs=rngs, dtype=dtype, fp8=fp8
            )
        if config.is_moe(layer):
            self.mlp = MoE(config, rngs=rngs, dtype=dtype, fp8=fp8)
        else:
            self.mlp = SwiGLU(
                config.hidden_size,
                config.intermediate_size,
                limit=config.swiglu_limit,
                rngs=rngs,
                dtype=dtype,
                std=config.initializer_range,
                fp8=fp8,
            )

    def __call__(
        self,
        streams: jax.Array,
        cache: KdaCache | DsaCache,
        length: jax.Array,
        num_valid: jax.Array,
        pool_ids: jax.Array | None,
    ) -> tuple[jax.Array, KdaCache | DsaCache, jax.Array | None]:
        """streams [B, T, M, D] -> (streams, state, the selection a following layer may share)."""
        h, mixing = self.attn_hc.pre(streams)
        h = self.input_layernorm(h)
        if isinstance(self.self_attn, KimiDeltaAttention):
            assert isinstance(cache, KdaCache)
            y, cache = self.self_attn(h, cache, num_valid)
            pool_ids = None
        else:
            assert isinstance(cache, DsaCache)
            y, cache, pool_ids = self.self_attn(h, cache, length, num_valid, pool_ids)
        streams = self.attn_hc.post(streams, y, mixing)

        h, mixing = self.ffn_hc.pre(streams)
        h = self.post_attention_layernorm(h)
        y = self.mlp(h, num_valid) if isinstance(self.mlp, MoE) else self.mlp(h)
        return self.ffn_hc.post(streams, y, mixing), cache, pool_ids


@partial(jax.jit, static_argnames=("treedef",))
def _run_layer(leaves, streams, cache, length, num_valid, pool_ids, *, treedef):
    """A layer as a function of its leaves: layers of one kind are traced and lowered once."""
    layer: DecoderLayer = jax.tree.unflatten(treedef, leaves)
    return layer(streams, cache, length, num_valid, pool_ids)


@dataclasses.dataclass(frozen=True, eq=False)
class _Carried:
    """What a model carries for its user. All are equal: no compiled program depends on them, so a
    checkpoint loaded twice, or other end-of-sequence tokens, compile nothing again."""

    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Carried)

    def __hash__(self) -> int:
        return hash(_Carried)


class Glm5NextForCausalLM(nnx.Module):
    """The text model with its head. `Glm5NextForCausalLM(config, rngs=nnx.Rngs(0))` initialises it
    as the reference does (model spec, section 10); `load` fills it from a checkpoint.

    Attributes:
      config: its configuration; `config.dtype` is the compute dtype.
      tokenizer: the checkpoint's tokenizer, when it has one.
      eos_token_ids: tokens that end a generation: those of the checkpoint's generation_config,
        else of its config.
      mesh: the devices that its weights are spread over, None for one device (`sharding.shard`,
        `load(mesh=...)`).
      fp8: whether the weights of experts, dense feed-forwards and latent attention rest in FP8.
    """

    def __init__(self, config: Glm5NextConfig, *, rngs, param_dtype=None, fp8: bool = False):
        dtype = jnp.dtype(param_dtype or config.dtype)
        std, D = config.initializer_range, config.hidden_size
        self.embed_tokens = Embedding(
            config.vocab_size, D, rngs=rngs, dtype=dtype, std=std, pad=config.pad_token_id
        )
        self.smear = Smear(rngs=rngs, dtype=dtype, std=std) if config.smear else None
        self.layers = nnx.List(
            DecoderLayer(config, layer, rngs=rngs, dtype=dtype, fp8=fp8)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        head = partial(Linear, D, config.vocab_size, axes=("vocab", None))
        self.lm_head = None if tied else head(rngs=rngs, dtype=dtype, std=std)
        self.config = config
        self.mesh: Mesh | None = None
        self.fp8 = fp8
        self._carried = _Carried(None, ())
        # Set here, since NNX notes the name of every attribute that is ever set.
        self.tokenizer = None
        self.eos_token_ids = config.eos_token_id

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._carried.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._carried = dataclasses.replace(self._carried, tokenizer=tokenizer)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._carried.eos_token_ids

    @eos_token_ids.setter
    def eos_token_ids(self, eos_token_ids: tuple[int, ...]) -> None:
        self._carried = dataclasses.replace(self._carried, eos_token_ids=eos_token_ids)

    def __call__(
        self, token_ids: jax.Array, cache: Cache, num_valid: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Runs the first num_valid[b] of T tokens of each row behind what the cache holds.

        Args:
          token_ids: [B, T] int32; entries past num_valid are ignored, whatever they hold.
          cache: the state before these tokens.
          num_valid: [B] int32 in 0..T.

        Returns:
          (hidden [B, T, D] after the final norm, the cache after the valid tokens).
        """
        rows = sharding.partition_spec(("batch",))
        weights, state = sharding.module_specs(self, self.mesh), cache.specs()
        run = sharding.local(
            type(self)._forward, self.mesh, (weights, rows, state, rows), (rows, state)
        )
        return run(self, token_ids, cache, num_valid)

    def _forward(
        self, token_ids: jax.Array, cache: Cache, num_valid: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """`__call__` on the rows, heads, channels and experts of one device."""
        c = self.config
        T = token_ids.shape[1]
        is_valid = jnp.arange(T, dtype=jnp.int32)[None] < num_valid[:, None]
        x = self.embed_tokens(jnp.where(is_valid, token_ids, 0), jnp.dtype(c.dtype))
        smear_state = cache.smear
        if self.smear is not None:
            assert smear_state is not None
            x, smear_state = self.smear(x, smear_state, num_valid)

        streams = jnp.repeat(x[:, :, None], c.hc_mult, axis=2)  # [B, T, M, D]
        layer_caches, pool_ids = [], None
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache.layers, strict=True)):
            with jax.named_scope(f"layer_{i}"):
                leaves, treedef = jax.tree.flatten(layer)
                streams, layer_cache, pool_ids = _run_layer(
                    leaves, streams, layer_cache, cache.length, num_valid, pool_ids, treedef=treedef
                )
            layer_caches.append(layer_cache)
        hidden = self.norm(jnp.mean(streams.astype(jnp.float32), axis=2).astype(x.dtype))
        return hidden, Cache(tuple(layer_caches), smear_state, cache.length + num_valid)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [B, ..., D] -> [B, ..., vocab] float32, never rounded to the model dtype."""

        def multiply(weight, hidden):
            weight = weight.astype(hidden.dtype)
            return einsum("...d,vd->...v", hidden, weight, out_dtype=jnp.float32)

        head = self.embed_tokens if self.lm_head is None else self.lm_head
        rows = sharding.partition_spec(("batch",))
        out = sharding.partition_spec(("batch", *(None,) * (hidden.ndim - 2), "vocab"))
        weight = sharding.partition_spec(("vocab", None))
        run = sharding.local(multiply, self.mesh, (weight, rows), out)
        return run(head.weight[...], hidden)

    @classmethod
    def abstract(
        cls, config: Glm5NextConfig, *, param_dtype=None, fp8: bool = False
    ) -> Glm5NextForCausalLM:
        """The module with `jax.ShapeDtypeStruct` leaves: any size, no memory."""
        return nnx.eval_shape(lambda: cls(config, rngs=_OneKey(), param_dtype=param_dtype, fp8=fp8))


class _OneKey:
    """Stands in for `nnx.Rngs` where only shapes matter. Counting keys inside a trace of a thousand
    weights takes tens of seconds; this takes none."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


def param_specs(
    config: Glm5NextConfig, *, param_dtype=None, fp8: bool = False, mesh: AnyMesh | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Every weight of the model by its dotted path: shape, dtype at rest and, on a mesh, sharding.

    Raises:
      ValueError: the model does not divide over the mesh.
    """
    sharding.check_mesh(config, mesh, fp8=fp8)
    model = Glm5NextForCausalLM.abstract(config, param_dtype=param_dtype, fp8=fp8)
    specs = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        spec = leaf.get_value()
        if mesh is not None:
            spec = spec.update(sharding=sharding.variable_sharding(leaf, mesh))
        specs[".".join(map(str, path))] = spec
    return specs
