"""`forward`: one call of the model over new tokens, with or without a cache."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from glm5next_jax import sharding
from glm5next_jax.cache import Cache, abstract_cache, init_cache
from glm5next_jax.compilation import record_compilation
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.model import Glm5NextForCausalLM

CacheT = TypeVar("CacheT", Cache, None)
LogitsMode = Literal["all", "last", "none"]
_LOGITS_MODES = ("all", "last", "none")


@overload
def forward(
    model: Glm5NextForCausalLM,
    token_ids: Any,
    cache: CacheT = None,
    num_valid: Any = None,
    logits: Literal["all", "last"] = "all",
) -> tuple[jax.Array, CacheT]: ...
@overload
def forward(
    model: Glm5NextForCausalLM,
    token_ids: Any,
    cache: CacheT = None,
    num_valid: Any = None,
    *,
    logits: Literal["none"],
) -> tuple[None, CacheT]: ...
def forward(model, token_ids, cache=None, num_valid=None, logits="all"):
    """Runs new tokens through the model: a whole prompt, a chunk, one token, or a mix of these.

    For any way of cutting a prompt into calls, logits and states agree to rounding. Compiled once
    per shape; never donates its arguments, so a cache may be used again (for instance to branch).

    Args:
      model: the model; its leaves cross `jax.jit`, nothing is mutated.
      token_ids: [B, T] integers. Entries at or past num_valid[b] are padding: any value will do.
      cache: state before these tokens, from `init_cache` or an earlier call; None runs the tokens
        as whole sequences and returns no cache.
      num_valid: [B] int32, how many of row b's T tokens are real, 0..T; None means all. A row with
        0 leaves its state bit for bit as it was.
      logits: "all" [B, T, vocab]; "last" [B, vocab], at each row's last valid token, zeros for a
        row with none; "none".

    Returns:
      (logits float32 or None, the new cache or None).

    Each call flattens the model and waits for the cache's lengths, to check them: some milliseconds
    for a deep one. `generate` and `stream` keep whole loops on the device.

    Raises:
      ValueError: wrong shapes, a token outside the vocabulary, or a row longer than the cache's
        capacity. Values are checked when they are concrete; inside a caller's own `jit` only
        shapes can be.
    """
    token_ids, num_valid = check_tokens(model.config, token_ids, num_valid)
    if logits not in _LOGITS_MODES:
        raise ValueError(f"expected logits to be one of {_LOGITS_MODES}, got {logits=}")
    if cache is not None:
        _check_cache(model.config, cache, num_valid)
    sharding.check_batch(num_valid.shape[0], model.mesh)
    leaves, treedef = jax.tree.flatten(model)
    out, new_cache = _forward(leaves, token_ids, cache, num_valid, treedef=treedef, logits=logits)
    return out, new_cache


@partial(jax.jit, static_argnames=("treedef", "logits"))
def _forward(leaves, token_ids, cache, num_valid, *, treedef, logits: LogitsMode):
    B, T = token_ids.shape
    record_compilation("forward", B=B, T=T, cached=cache is not None, logits=logits)
    model: Glm5NextForCausalLM = jax.tree.unflatten(treedef, leaves)
    # Without a cache the call works on a throw-away one: one mechanism for both.
    state = init_cache(model.config, B, T, mesh=model.mesh) if cache is None else cache
    hidden, state = model(token_ids, state, num_valid)
    out = None
    if logits == "all":
        out = model.logits(hidden)
    elif logits == "last":
        out = model.logits(last_valid(hidden, num_valid))
        out = jnp.where(num_valid[:, None] > 0, out, 0)
    return out, None if cache is None else state


def last_valid(hidden: jax.Array, num_valid: jax.Array) -> jax.Array:
    """hidden [B, T, D] -> [B, D] at each row's last valid token (row 0 where there is none)."""
    index = jnp.maximum(num_valid - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden, index, axis=1)[:, 0]


def is_concrete(x: Any) -> bool:
    """False for values that only exist inside a caller's trace."""
    return not isinstance(x, core.Tracer)


def check_tokens(
    config: Glm5NextConfig, token_ids: Any, num_valid: Any
) -> tuple[jax.Array, jax.Array]:
    """token_ids [B, T] and num_valid [B] as int32, or ValueError."""
    if not isinstance(token_ids, jax.Array | np.ndarray):
        token_ids = np.asarray(token_ids)
    if token_ids.ndim != 2 or 0 in token_ids.shape:
        raise ValueError(f"expected token_ids [B, T] with B, T >= 1, got {token_ids.shape=}")
    if not np.issubdtype(token_ids.dtype, np.integer):
        raise ValueError(f"expected integer token_ids, got {token_ids.dtype=}")
    B, T = token_ids.shape
    if num_valid is None:
        num_valid = np.full((B,), T, np.int32)
    elif not isinstance(num_valid, jax.Array | np.ndarray):
        num_valid = np.asarray(num_valid)
    if num_valid.shape != (B,) or not np.issubdtype(num_valid.dtype, np.integer):
        raise ValueError(
            f"expected num_valid [B={B}] integers, got {num_valid.shape=}, {num_valid.dtype=}"
        )
    if is_concrete(num_valid):
        counts = np.asarray(num_valid)
        if counts.min() < 0 or counts.max() > T:
            raise ValueError(f"expected num_valid in 0..{T}, got {counts.tolist()}")
        if is_concrete(token_ids):
            ids = np.asarray(token_ids)
            bad = (ids < 0) | (ids >= config.vocab_size)
            bad &= np.arange(T)[None] < counts[:, None]
            if bad.any():
                row, t = map(int, np.argwhere(bad)[0])
                raise ValueError(
                    f"token_ids[{row}, {t}]={int(ids[row, t])} is outside the vocabulary "
                    f"0..{config.vocab_size - 1}"
                )
    return jnp.asarray(token_ids).astype(jnp.int32), jnp.asarray(num_valid).astype(jnp.int32)


def _layout(cache: Cache) -> dict[str, str]:
    """Shape and dtype of every leaf, by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(cache)
    return {
        jax.tree_util.keystr(path).lstrip("."): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }


@lru_cache
def _cache_layout(config: Glm5NextConfig, batch_size: int, capacity: int) -> dict[str, str]:
    return _layout(abstract_cache(config, batch_size, capacity))


def _check_cache(config: Glm5NextConfig, cache: Cache, num_valid: jax.Array) -> None:
    capacity = cache.capacity
    wanted = _cache_layout(config, cache.batch_size, capacity or 1)
    found = _layout(cache)
    if found != wanted:
        wrong = sorted(wanted.items() ^ found.items(), key=str)[0]
        raise ValueError(
            "the cache was not made for this model by init_cache(model.config, ...): "
            f"{wrong[0]} is {found.get(wrong[0], 'absent')}, expected "
            f"{wanted.get(wrong[0], 'nothing')}"
        )
    if cache.batch_size != num_valid.shape[0]:
        raise ValueError(f"expected a cache of {num_valid.shape[0]} rows, got {cache.batch_size=}")
    if capacity is not None and is_concrete(num_valid) and is_concrete(cache.length):
        after = np.asarray(cache.length) + np.asarray(num_valid)
        if after.max() > capacity:
            row = int(after.argmax())
            raise ValueError(
                f"row {row} would hold {int(after[row])} tokens, beyond the cache's {capacity=}"
            )
