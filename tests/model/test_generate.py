"""`generate` and `stream` against the naive loop: one uncached forward per token."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5next_jax import Glm5NextConfig, SamplingParams, forward, generate, stream
from glm5next_jax.compilation import compilations
from glm5next_jax.generate import _decode, _prefill, _prepare
from glm5next_jax.sampling import SamplerState, sample
from tests.model.models import random_model

CONFIG = Glm5NextConfig.tiny(
    num_hidden_layers=3,
    layer_types=("linear_attention", "indexed_attention", "linear_attention"),
    mlp_layer_types=("dense", "sparse", "sparse"),
)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, CONFIG.vocab_size, n).tolist() for n in (1, 5, 30, 17)]
NEW = 8
SAMPLED = [
    SamplingParams(temperature=0.9, seed=3, top_k=20, logprobs=True),
    SamplingParams(),
    SamplingParams(temperature=1.2, seed=4, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.7, seed=3),
]


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


sample_jit = jax.jit(sample)


def naive(model, prompt, params, steps, width=64):
    """Tokens and log probabilities by the definition."""
    tokens, logprobs = list(prompt), []
    sampler = SamplerState.from_params([params])
    for step in range(steps):
        ids = np.zeros((1, width), np.int32)
        ids[0, : len(tokens)] = tokens
        logits, _ = forward(model, ids, num_valid=[len(tokens)], logits="last")
        token = int(sample_jit(logits, sampler, jnp.asarray([step], jnp.int32))[0])
        logprobs.append(float(jax.nn.log_softmax(logits)[0, token]))
        tokens.append(token)
    return tokens[len(prompt) :], logprobs


@pytest.fixture(scope="module")
def want(model):
    return [naive(model, p, s, NEW) for p, s in zip(PROMPTS, SAMPLED, strict=True)]


@pytest.fixture(scope="module")
def got(model):
    return generate(model, PROMPTS, max_new_tokens=NEW, sampling=SAMPLED, eos_token_ids=[])


def test_ragged_sampled_batch_equals_the_naive_loop(got, want):
    for completion, (tokens, logprobs), prompt in zip(got, want, PROMPTS, strict=True):
        assert list(completion.token_ids) == tokens
        assert completion.num_prompt_tokens == len(prompt)
        assert completion.finish_reason == "length"
        assert completion.text is None
        if completion.logprobs is not None:
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)
    assert [c.logprobs is not None for c in got] == [True, False, False, False]


def test_chunk_size_and_batch_mates_do_not_matter(model, got):
    """Chunks of 8 put a prompt of 30 through four scan steps, three of them empty for others."""
    chunked = generate(
        model, PROMPTS[::-1], max_new_tokens=NEW, sampling=SAMPLED[::-1], eos_token_ids=[],
        chunk_size=8,
    )  # fmt: skip
    assert [c.token_ids for c in chunked[::-1]] == [c.token_ids for c in got]


def test_eos_and_limits_end_each_row_alone(model, got):
    eos = got[2].token_ids[4]
    limits = [3, NEW, NEW, 1]  # fewer than one bucket: no new compilation
    completions = generate(
        model, PROMPTS, max_new_tokens=limits, sampling=SAMPLED, eos_token_ids=[eos, 127]
    )
    for completion, full, limit in zip(completions, got, limits, strict=True):
        tokens = list(full.token_ids)
        ends = [i for i, token in enumerate(tokens) if token in (eos, 127)]
        stop = min([limit, *(i + 1 for i in ends)])
        assert list(completion.token_ids) == tokens[:stop]
        hit = tokens[stop - 1] in (eos, 127)
        assert completion.finish_reason == ("stop" if hit else "length")
    assert completions[2].finish_reason == "stop"


def test_stream_equals_generate(model, got):
    events = list(
        stream(model, PROMPTS[2], max_new_tokens=NEW, sampling=SAMPLED[2], eos_token_ids=[])
    )
    assert tuple(e.token_id for e in events) == got[2].token_ids
    assert [e.finish_reason for e in events] == [None] * (NEW - 1) + ["length"]
    eos = got[2].token_ids[4]
    first = got[2].token_ids.index(eos)
    events = list(
        stream(model, PROMPTS[2], max_new_tokens=NEW, sampling=SAMPLED[2], eos_token_ids=[eos])
    )
    assert len(events) == first + 1 and events[-1].finish_reason == "stop"


def test_lengths_inside_a_bucket_share_a_compilation():
    one_layer = dict(layer_types=("indexed_attention",), mlp_layer_types=("dense",))
    model = random_model(CONFIG.replace(num_hidden_layers=1, indexer_types=(), **one_layer))

    def run(lengths, new):
        generate(model, [[1] * n for n in lengths], max_new_tokens=new, eos_token_ids=[])

    run([20, 3], 20)
    before = len(compilations())
    run([32, 1], 32)
    run([17, 17], 17)
    assert len(compilations()) == before
    run([33, 1], 17)  # the next bucket of prompts: a prefill and a decode program
    assert len(compilations()) == before + 2
    run([64, 64], 17)
    assert len(compilations()) == before + 2


def test_checkpoints_eos_tokens_are_the_default(model, got):
    generate(model, PROMPTS[2:3], max_new_tokens=NEW, sampling=SAMPLED[2])
    before = len(compilations())
    model.eos_token_ids = (got[2].token_ids[4],)
    try:
        (completion,) = generate(model, PROMPTS[2:3], max_new_tokens=NEW, sampling=SAMPLED[2])
    finally:
        model.eos_token_ids = ()
    assert completion.finish_reason == "stop"
    assert len(compilations()) == before  # they are no part of any program


def test_stream_refuses_at_once(model):
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty"):
        stream(model, [])


def test_decoding_donates_its_state(model):
    """Or each call would hold two caches."""
    batch = _prepare(model, PROMPTS[2:3], NEW, SAMPLED[2], [], None)
    leaves, treedef = jax.tree.flatten(model)
    inputs, requests = batch.arguments()
    state = _prefill(leaves, *inputs, treedef=treedef, **batch.buckets())
    _decode(leaves, state, requests, jnp.asarray(1, jnp.int32), treedef=treedef)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache))


def test_no_prompts(model):
    assert generate(model, []) == []


REFUSED = [
    (dict(prompts=[[1], []]), "prompts[1] is empty"),
    (dict(prompts=[[1, 128]]), "prompts[0]: token 128 at position 1 is outside the vocabulary"),
    (dict(prompts=[[-1]]), "prompts[0]: token -1"),
    (dict(prompts="hello"), "wrap it in a list"),
    (dict(prompts=[1, 2]), "wrap it in a list"),
    (dict(prompts=["hello"]), "the model has no tokenizer"),
    (dict(prompts=[[1]], max_new_tokens=0), "max_new_tokens must be at least 1"),
    (dict(prompts=[[1]], max_new_tokens=[1, 2]), "expected one max_new_tokens per prompt (1)"),
    (dict(prompts=[[1]], sampling=[]), "expected one sampling per prompt"),
    (dict(prompts=[[1]], sampling=["greedy"]), "expected sampling to hold SamplingParams"),
    (dict(prompts=[[1]], chunk_size=0), "chunk_size=0"),
    (dict(prompts=[[1]], chunk_size=2.5), "chunk_size=2.5"),
    (dict(prompts=[[1, 1.9]]), "prompts[0]: 1.9 at position 1 is no token id"),
    (dict(prompts=[[True]]), "prompts[0]: True at position 0 is no token id"),
    (dict(prompts=[[1]], eos_token_ids=5), "expected eos_token_ids to be a list"),
    (dict(prompts=[[1]], eos_token_ids=[2**40]), "eos_token_ids holds 1099511627776"),
    (dict(prompts=[[1] * 4000]), "4000 prompt tokens + 128 new ones = 4128 exceed"),
]


@pytest.mark.parametrize("arguments, message", REFUSED, ids=[m for _, m in REFUSED])
def test_refused(model, arguments, message):
    with pytest.raises(ValueError) as error:
        generate(model, **arguments)
    assert message in str(error.value)


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an accelerator needs a larger model")
def test_faster_than_uncached_forward_calls(optimized):
    """256 tokens through `generate`, against one uncached forward of the same width per token, both
    compiled before; all forwards cost the same, so 32 of them are timed. Measured: 128 times."""
    model = random_model(CONFIG)
    prompt, new = [1, 2, 3, 4], 256
    generate(model, [prompt], max_new_tokens=new, eos_token_ids=[])
    naive(model, prompt, SamplingParams(), 1, width=260)
    start = time.perf_counter()
    (completion,) = generate(model, [prompt], max_new_tokens=new, eos_token_ids=[])
    cached = time.perf_counter() - start
    start = time.perf_counter()
    tokens, _ = naive(model, prompt, SamplingParams(), 32, width=260)
    uncached = (time.perf_counter() - start) * new / 32
    assert list(completion.token_ids[:32]) == tokens
    assert uncached > 20 * cached, f"{uncached=} {cached=}"
