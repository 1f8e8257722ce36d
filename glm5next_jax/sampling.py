"""From logits to tokens: pure functions of (logits, a request's parameters, its step)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from glm5next_jax.checks import is_finite, is_int

Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens.

    The distribution is softmax(logits / temperature), cut to the `top_k` most likely tokens, then
    to the smallest set of them that reaches probability `top_p`, then to tokens at least `min_p`
    times as likely as the best. A request's tokens depend on its own seed and step alone, never on
    its batch mates.

    Attributes:
      temperature: 0 takes the most likely token (the lowest id on a tie).
      top_k: 0 keeps all.
      top_p: in (0, 1]; 1 keeps all.
      min_p: in [0, 1); 0 keeps all.
      seed: of this request's random stream, 0..2**32 - 1.
      logprobs: return each chosen token's log probability under softmax(logits).

    Raises:
      ValueError: a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: bool = False

    def __post_init__(self):
        for name, ok, legal in (
            ("temperature", is_finite(self.temperature) and self.temperature >= 0, "finite, >= 0"),
            ("top_k", is_int(self.top_k) and 0 <= self.top_k < 2**31, "an integer in 0..2**31-1"),
            ("top_p", is_finite(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", is_finite(self.min_p) and 0 <= self.min_p < 1, "in [0, 1)"),
            ("seed", is_int(self.seed) and 0 <= self.seed < 2**32, "an integer in 0..2**32-1"),
            ("logprobs", isinstance(self.logprobs, bool), "a bool"),
        ):
            if not ok:
                raise ValueError(f"{name} must be {legal}, got {getattr(self, name)!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """The parameters of a batch of requests, one array each."""

    temperature: Array  # [B] float32
    top_k: Array  # [B] int32, 0 = all
    top_p: Array  # [B] float32
    min_p: Array  # [B] float32
    seed: Array  # [B] uint32

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams]) -> SamplerState:
        def column(name, dtype):
            return np.asarray([getattr(p, name) for p in params], dtype)

        return cls(
            temperature=column("temperature", np.float32),
            top_k=column("top_k", np.int32),
            top_p=column("top_p", np.float32),
            min_p=column("min_p", np.float32),
            seed=column("seed", np.uint32),
        )


def sample(logits: jax.Array, sampler: SamplerState, step: jax.Array) -> jax.Array:
    """Next token of each row.

    Args:
      logits: [B, vocab] float32.
      sampler: the rows' parameters.
      step: [B] int32, how many tokens each row has sampled so far; with the seed it fixes the
        random numbers.

    Returns:
      [B] int32.
    """
    sampler = jax.tree.map(jnp.asarray, sampler)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        is_greedy = sampler.temperature == 0
        # From the largest down, so that no temperature, however small, overflows.
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = below / jnp.where(is_greedy, 1, sampler.temperature)[:, None]
        keys = jax.vmap(lambda seed, n: jax.random.fold_in(jax.random.key(seed), n))(
            sampler.seed, step
        )
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
        drawn = jnp.argmax(jnp.where(_kept(scaled, sampler), scaled + noise, -jnp.inf), axis=-1)
        return jnp.where(is_greedy, greedy, drawn.astype(jnp.int32))

    # A batch of greedy rows pays for no sort over the vocabulary.
    return jax.lax.cond(jnp.any(sampler.temperature > 0), draw, lambda: greedy)


def _kept(scaled: jax.Array, sampler: SamplerState) -> jax.Array:
    """[B, vocab] bool: the tokens that top_k, top_p and min_p leave, in that order."""
    B, V = scaled.shape
    order = jnp.argsort(scaled, axis=-1, stable=True, descending=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(V, dtype=jnp.int32)[None]
    in_top_k = (sampler.top_k[:, None] == 0) | (rank < sampler.top_k[:, None])
    probs = jax.nn.softmax(jnp.where(in_top_k, ranked, -jnp.inf), axis=-1)
    # A token stays while the mass before it is short of top_p. Over a large vocabulary the float32
    # sum reaches 1 before its end, so 1 is taken at its word.
    before = jnp.cumsum(probs, axis=-1) - probs
    top_p = sampler.top_p[:, None]
    in_top_p = (before < top_p) | (top_p >= 1)
    in_min_p = probs >= sampler.min_p[:, None] * probs[:, :1]
    kept = (in_top_k & in_top_p & in_min_p) | (rank == 0)
    row = jnp.arange(B, dtype=jnp.int32)[:, None]
    return jnp.zeros_like(kept).at[row, order].set(kept)


def chosen_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """log softmax(logits)[token]: logits [B, vocab], tokens [B] -> [B] float32."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
