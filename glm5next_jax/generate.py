"""Generation: chunked prefill (`lax.scan`) and decoding (`lax.while_loop`), both on the device.

Two programs serve a whole batch. Their shapes come from buckets, so prompt lengths and token counts
inside a bucket share one compilation (`compilations()` lists them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from glm5next_jax import sharding
from glm5next_jax.cache import Cache, init_cache
from glm5next_jax.checks import is_int
from glm5next_jax.compilation import record_compilation
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.forward import last_valid
from glm5next_jax.model import Glm5NextForCausalLM
from glm5next_jax.sampling import Array, SamplerState, SamplingParams, chosen_logprobs, sample
from glm5next_jax.tokenizer import TextStream

_DEFAULT_CHUNK = 512
_SMALLEST_BUCKET = 16
_NO_TOKEN = -1

Prompt = str | Sequence[int]
FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One request's answer.

    Attributes:
      token_ids: the new tokens, with the end-of-sequence token that stopped it, if one did.
      text: the decoded answer without special tokens; None when the model has no tokenizer.
      logprobs: log probability of each new token, if the request asked for them.
      finish_reason: "stop" (an end-of-sequence token) or "length" (max_new_tokens reached).
      num_prompt_tokens: length of the prompt in tokens.
    """

    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason
    num_prompt_tokens: int


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """One token of a stream; the last event carries the finish_reason."""

    token_id: int
    text: str | None
    logprob: float | None
    finish_reason: FinishReason | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """What a batch was asked for, constant while it runs."""

    sampler: SamplerState
    max_new_tokens: Array  # [B] int32
    eos_token_ids: Array  # [bucket] int32, -1 where there is none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch between two tokens."""

    cache: Cache
    logits: jax.Array  # [B, vocab] float32 for the next token
    token_ids: jax.Array  # [B, bucket of new tokens] int32
    logprobs: jax.Array  # [B, bucket of new tokens] float32
    num_new: jax.Array  # [B] int32 tokens generated
    is_done: jax.Array  # [B] bool


def generate(
    model: Glm5NextForCausalLM,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    eos_token_ids: Sequence[int] | None = None,
    chunk_size: int | None = None,
) -> list[Completion]:
    """Completes a batch of prompts of any lengths.

    Args:
      model: the model.
      prompts: one per request: token ids, or text where the model has a tokenizer.
      max_new_tokens: most new tokens, for all or one per request.
      sampling: parameters for all or one per request; greedy by default.
      eos_token_ids: tokens that end a request. None takes those of the checkpoint's
        generation_config, else of its config; an empty list ends on length alone.
      chunk_size: tokens per prefill step; None picks min(512, the prompt's bucket). Results do not
        depend on it.

    Returns:
      One Completion per prompt, in order.

    Raises:
      ValueError: an empty prompt, a token outside the vocabulary, a prompt with its new tokens
        longer than config.max_position_embeddings, or arguments that do not fit together.
    """
    batch = _prepare(model, prompts, max_new_tokens, sampling, eos_token_ids, chunk_size)
    if not batch.prompts:
        return []
    leaves, treedef = jax.tree.flatten(model)
    inputs, requests = sharding.replicate(batch.arguments(), model.mesh)
    state = _prefill(leaves, *inputs, treedef=treedef, **batch.buckets())
    state = _decode(leaves, state, requests, np.int32(np.iinfo(np.int32).max), treedef=treedef)
    token_ids, logprobs, num_new = jax.device_get((state.token_ids, state.logprobs, state.num_new))
    return [
        _completion(model, batch, row, token_ids[row, :n], logprobs[row, :n])
        for row, n in enumerate(num_new[: len(batch.prompts)])
    ]


def stream(
    model: Glm5NextForCausalLM,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    sampling: SamplingParams | None = None,
    eos_token_ids: Sequence[int] | None = None,
    chunk_size: int | None = None,
) -> Iterator[StreamEvent]:
    """Completes one prompt, yielding each token as it comes; the tokens are those of `generate`.

    Args and errors are those of `generate`. Text arrives in whole characters: a token that ends
    inside one has text "".
    """
    batch = _prepare(model, [prompt], max_new_tokens, sampling, eos_token_ids, chunk_size)
    detokenizer = None if model.tokenizer is None else model.tokenizer.stream()
    return _stream(model, batch, detokenizer)


def _stream(
    model: Glm5NextForCausalLM, batch: _Batch, detokenizer: TextStream | None
) -> Iterator[StreamEvent]:
    leaves, treedef = jax.tree.flatten(model)
    inputs, requests = sharding.replicate(batch.arguments(), model.mesh)
    state = _prefill(leaves, *inputs, treedef=treedef, **batch.buckets())
    for i in range(batch.max_new_tokens[0]):
        state = _decode(leaves, state, requests, np.int32(1), treedef=treedef)
        token, logprob, is_done = jax.device_get(
            (state.token_ids[0, i], state.logprobs[0, i], state.is_done[0])
        )
        text = None
        if detokenizer is not None:
            text = detokenizer.push(int(token)) + (detokenizer.finish() if is_done else "")
        yield StreamEvent(
            token_id=int(token),
            text=text,
            logprob=float(logprob) if batch.sampling[0].logprobs else None,
            finish_reason=batch.finish_reason(int(token)) if is_done else None,
        )
        if is_done:
            return


@partial(jax.jit, static_argnames=("treedef", "chunk_size", "capacity", "new_bucket"))
def _prefill(
    leaves,
    token_ids: jax.Array,
    num_tokens: jax.Array,
    *,
    treedef,
    chunk_size: int,
    capacity: int,
    new_bucket: int,
) -> DecodeState:
    """token_ids [B, N·chunk_size] padded, num_tokens [B] -> the state before the first new token.

    The cache is the carry of a scan over N chunks. Row b takes part in chunk n with as many of its
    tokens as fall into it, so prompts of all lengths share the scan.
    """
    B, padded = token_ids.shape
    record_compilation("prefill", B=B, T=padded, chunk_size=chunk_size, capacity=capacity)
    model: Glm5NextForCausalLM = jax.tree.unflatten(treedef, leaves)
    c = model.config
    chunks = token_ids.reshape(B, padded // chunk_size, chunk_size).swapaxes(0, 1)
    starts = jnp.arange(0, padded, chunk_size, dtype=jnp.int32)

    def step(carry, chunk):
        start, ids = chunk
        num_valid = jnp.clip(num_tokens - start, 0, chunk_size)

        def run(cache, last):
            hidden, cache = model(ids, cache, num_valid)
            last = jnp.where(num_valid[:, None] > 0, last_valid(hidden, num_valid), last)
            return cache, last

        # The bucket may hold whole chunks of nothing but padding.
        return jax.lax.cond(jnp.any(num_valid > 0), run, lambda *kept: kept, *carry), None

    start_state = (
        init_cache(c, B, capacity, mesh=model.mesh),
        jnp.zeros((B, c.hidden_size), jnp.dtype(c.dtype)),
    )
    (cache, last), _ = jax.lax.scan(step, start_state, (starts, chunks))
    return DecodeState(
        cache=cache,
        logits=_next_logits(model, last),
        token_ids=jnp.zeros((B, new_bucket), jnp.int32),
        logprobs=jnp.zeros((B, new_bucket), jnp.float32),
        num_new=jnp.zeros((B,), jnp.int32),
        is_done=num_tokens == 0,
    )


def _next_logits(model: Glm5NextForCausalLM, hidden: jax.Array) -> jax.Array:
    """hidden [B, D] -> [B, vocab], whole rows on each device: sampling sorts the vocabulary."""
    return sharding.constrain(model.logits(hidden), model.mesh, "batch", None)


@partial(jax.jit, static_argnames=("treedef",), donate_argnames=("state",))
def _decode(
    leaves, state: DecodeState, requests: Requests, max_steps: jax.Array, *, treedef
) -> DecodeState:
    """Decodes until every row is done, or for max_steps tokens. Rows that are done stay idle."""
    B, new_bucket = state.token_ids.shape
    record_compilation("decode", B=B, new_tokens=new_bucket, capacity=state.cache.capacity)
    model: Glm5NextForCausalLM = jax.tree.unflatten(treedef, leaves)
    row = jnp.arange(B, dtype=jnp.int32)

    def step(loop):
        steps, s = loop
        token = sample(s.logits, requests.sampler, s.num_new)
        # Out of range drops the write of a row that is done.
        slot = jnp.where(s.is_done, new_bucket, s.num_new)
        token_ids = s.token_ids.at[row, slot].set(token, mode="drop")
        logprobs = s.logprobs.at[row, slot].set(chosen_logprobs(s.logits, token), mode="drop")
        num_new = s.num_new + (~s.is_done).astype(jnp.int32)
        is_eos = jnp.any(token[:, None] == requests.eos_token_ids[None], axis=-1)
        is_done = s.is_done | is_eos | (num_new >= requests.max_new_tokens)
        hidden, cache = model(token[:, None], s.cache, (~is_done).astype(jnp.int32))
        logits = _next_logits(model, hidden[:, 0])
        return steps + 1, DecodeState(cache, logits, token_ids, logprobs, num_new, is_done)

    def is_running(loop):
        steps, s = loop
        return (steps < max_steps) & ~jnp.all(s.is_done)

    state = jax.lax.while_loop(is_running, step, (jnp.zeros((), jnp.int32), state))[1]
    # What the host reads is whole on every device, and so in every process.
    whole = [
        sharding.constrain(x, model.mesh)
        for x in (state.token_ids, state.logprobs, state.num_new, state.is_done)
    ]
    return DecodeState(state.cache, state.logits, *whole)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Checked requests, ready for the device."""

    prompts: list[list[int]]
    max_new_tokens: list[int]
    sampling: list[SamplingParams]
    eos_token_ids: tuple[int, ...]
    chunk_size: int
    num_rows: int  # of the device's batch; rows past the prompts are idle

    def arguments(self) -> tuple[tuple[np.ndarray, np.ndarray], Requests]:
        """((token_ids, lengths), what was asked for), on the host."""
        idle = self.num_rows - len(self.prompts)
        lengths = np.asarray([len(p) for p in self.prompts] + [0] * idle, np.int32)
        padded = np.zeros((self.num_rows, self._padded_length()), np.int32)
        for row, prompt in enumerate(self.prompts):
            padded[row, : len(prompt)] = prompt
        requests = Requests(
            sampler=SamplerState.from_params(self.sampling + [SamplingParams()] * idle),
            max_new_tokens=np.asarray(self.max_new_tokens + [0] * idle, np.int32),
            eos_token_ids=_padded_eos(self.eos_token_ids),
        )
        return (padded, lengths), requests

    def buckets(self) -> dict[str, int]:
        new_bucket = _bucket(max(self.max_new_tokens))
        return dict(
            chunk_size=self.chunk_size,
            capacity=self._padded_length() + new_bucket,
            new_bucket=new_bucket,
        )

    def _padded_length(self) -> int:
        num_chunks = -(-max(map(len, self.prompts)) // self.chunk_size)
        return self.chunk_size * _bucket(num_chunks, smallest=1)

    def finish_reason(self, last_token: int) -> FinishReason:
        return "stop" if last_token in self.eos_token_ids else "length"


def _bucket(n: int, smallest: int = _SMALLEST_BUCKET) -> int:
    """The next power of two, at least `smallest`."""
    return max(smallest, 1 << max(n - 1, 0).bit_length())


def _prepare(
    model: Glm5NextForCausalLM,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    eos_token_ids: Sequence[int] | None,
    chunk_size: int | None,
) -> _Batch:
    if isinstance(prompts, str) or any(isinstance(p, Integral) for p in prompts):
        raise ValueError("expected a list of prompts, got a single one; wrap it in a list")
    config = model.config
    n = len(prompts)
    token_prompts = [_token_ids(model, prompt, i) for i, prompt in enumerate(prompts)]
    limits = [_limit(m, i) for i, m in enumerate(_per_request(max_new_tokens, n, "max_new_tokens"))]
    for i, (prompt, limit) in enumerate(zip(token_prompts, limits, strict=True)):
        total = len(prompt) + limit
        if total > config.max_position_embeddings:
            raise ValueError(
                f"prompts[{i}]: {len(prompt)} prompt tokens + {limit} new ones = {total} exceed "
                f"the model's {config.max_position_embeddings=}"
            )
    params = _per_request(SamplingParams() if sampling is None else sampling, n, "sampling")
    for p in params:
        if not isinstance(p, SamplingParams):
            raise ValueError(f"expected sampling to hold SamplingParams, got {p!r}")
    eos = _checked_eos(model.eos_token_ids if eos_token_ids is None else eos_token_ids, config)
    longest = max(map(len, token_prompts), default=1)
    if chunk_size is None:
        chunk_size = min(_DEFAULT_CHUNK, _bucket(longest))
    elif not is_int(chunk_size) or chunk_size < 1:
        raise ValueError(f"expected chunk_size to be at least 1, got {chunk_size=}")
    data_shards = 1 if model.mesh is None else model.mesh.shape[sharding.DATA]
    return _Batch(
        prompts=token_prompts,
        max_new_tokens=limits,
        sampling=params,
        eos_token_ids=eos,
        chunk_size=chunk_size,
        num_rows=-(-n // data_shards) * data_shards,
    )


def _checked_eos(eos_token_ids, config: Glm5NextConfig) -> tuple[int, ...]:
    if not isinstance(eos_token_ids, Sequence) or isinstance(eos_token_ids, str):
        raise ValueError(f"expected eos_token_ids to be a list of token ids, got {eos_token_ids!r}")
    for token in eos_token_ids:
        if not is_int(token) or not 0 <= token < config.vocab_size:
            raise ValueError(
                f"eos_token_ids holds {token!r}, outside the vocabulary 0..{config.vocab_size - 1}"
            )
    return tuple(int(token) for token in eos_token_ids)


def _padded_eos(eos_token_ids: Sequence[int]) -> np.ndarray:
    """Filled up to a bucket with an id that no token has: the number of ids is a shape."""
    padded = np.full(_bucket(len(eos_token_ids), smallest=4), _NO_TOKEN, np.int32)
    padded[: len(eos_token_ids)] = eos_token_ids
    return padded


def _per_request(value, n: int, name: str) -> list:
    """One value for all requests, or one each."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, Sequence):
        if len(value) != n:
            raise ValueError(f"expected one {name} per prompt ({n}), got {len(value)}")
        return list(value)
    return [value] * n


def _limit(value, index: int) -> int:
    if not is_int(value) or value < 1:
        raise ValueError(f"prompts[{index}]: max_new_tokens must be at least 1, got {value!r}")
    return int(value)


def _token_ids(model: Glm5NextForCausalLM, prompt: Prompt, index: int) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(
                f"prompts[{index}] is text, but the model has no tokenizer: pass token ids, or "
                "load a checkpoint directory that holds a tokenizer.json"
            )
        prompt = model.tokenizer.encode(prompt)
    ids = list(prompt)
    if not ids:
        raise ValueError(f"prompts[{index}] is empty; expected at least one token")
    vocab_size = model.config.vocab_size
    for position, token in enumerate(ids):
        if not is_int(token):
            raise ValueError(f"prompts[{index}]: {token!r} at position {position} is no token id")
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"prompts[{index}]: token {token} at position {position} is outside the "
                f"vocabulary 0..{vocab_size - 1}"
            )
    return [int(token) for token in ids]


def _completion(
    model: Glm5NextForCausalLM, batch: _Batch, row: int, token_ids: np.ndarray, logprobs: np.ndarray
) -> Completion:
    ids = tuple(int(token) for token in token_ids)
    return Completion(
        token_ids=ids,
        text=None if model.tokenizer is None else model.tokenizer.decode(ids),
        logprobs=tuple(map(float, logprobs)) if batch.sampling[row].logprobs else None,
        finish_reason=batch.finish_reason(ids[-1]),
        num_prompt_tokens=len(batch.prompts[row]),
    )
