"""The project's first law: however a prompt is cut into calls, nothing but rounding changes.

One property covers it all: rows of different lengths advance by different amounts per call, some of
them idle, with padding of arbitrary ids, and end where one full forward of each row ends. What the
indexer selected and which token is most likely must be the same wherever the margin that decided it
exceeds the rounding.
"""

import dataclasses
import unittest.mock
from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import glm5next_jax.model
from glm5next_jax import Glm5NextConfig, forward, init_cache
from tests.cases import TOLERANCES, relative_l2
from tests.model.models import random_model

LOGITS = 1e-4  # absolute, logits of standard deviation 1; measured 2e-5
LENGTH, CAPACITY, BATCH = 44, 48, 3
CALL_SIZES = (1, 2, 9, 16)  # tokens per call; fewer are valid, so any other chunk occurs too

CONFIG = Glm5NextConfig.tiny(
    smear=True,
    num_hidden_layers=4,
    layer_types=("linear_attention", "indexed_attention", "linear_attention", "indexed_attention"),
    mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
)
NO_TAIL = dataclasses.replace(CONFIG, index_kpool_always_select_tail=False)


@partial(jax.jit, static_argnames=("treedef",))
def run(leaves, ids, cache, num_valid, *, treedef):
    """One call; returns logits, the selection of each sparse layer, and the cache."""
    selections = []
    run_layer = glm5next_jax.model._run_layer

    def spy(*args, **kwargs):
        streams, state, pool_ids = run_layer(*args, **kwargs)
        selections.extend([] if pool_ids is None else [pool_ids])
        return streams, state, pool_ids

    with unittest.mock.patch.object(glm5next_jax.model, "_run_layer", spy):
        model = jax.tree.unflatten(treedef, leaves)
        hidden, cache = model(ids, cache, num_valid)

    return model.logits(hidden), jnp.stack(selections), cache


class Case:
    """A model, three rows of tokens, and what one full forward gives for them."""

    def __init__(self, config: Glm5NextConfig):
        self.config = config
        self.leaves, self.treedef = jax.tree.flatten(random_model(config))
        self.ids = np.random.default_rng(1).integers(0, config.vocab_size, (BATCH, LENGTH))
        self.ids = self.ids.astype(np.int32)
        self.logits, self.selections, self.cache = self.call(
            self.ids, init_cache(config, BATCH, CAPACITY), np.full(BATCH, LENGTH)
        )

    def call(self, ids, cache, num_valid):
        logits, selections, cache = run(
            self.leaves,
            jnp.asarray(ids),
            cache,
            jnp.asarray(num_valid, jnp.int32),
            treedef=self.treedef,
        )
        return np.asarray(logits), np.asarray(selections), cache

    def run_in_pieces(self, cuts):
        """cuts: per call, (tokens in the call, how many of them each row takes, a padding id)."""
        cache = init_cache(self.config, BATCH, CAPACITY)
        done = np.zeros(BATCH, np.int64)
        logits = np.zeros_like(self.logits)
        selections = np.full_like(self.selections, -1)
        finish = (9, (9,) * BATCH, 0)
        for size, wanted, padding in [*cuts, *[finish] * (LENGTH // 9 + 1)]:
            take = np.minimum(np.minimum(wanted, size), LENGTH - done)
            ids = np.full((BATCH, size), padding, np.int32)
            for row, n in enumerate(take):
                ids[row, :n] = self.ids[row, done[row] : done[row] + n]
            before = cache
            got, chosen, cache = self.call(ids, cache, take)
            for row, n in enumerate(take):
                where = slice(done[row], done[row] + n)
                logits[row, where] = got[row, :n]
                selections[:, row, where] = chosen[:, row, :n]
                if n == 0:
                    jax.tree.map(
                        lambda a, b, row=row: np.testing.assert_array_equal(a[row], b[row]),
                        before,
                        cache,
                    )
            done += take
        assert (done == LENGTH).all()
        return logits, selections, cache

    def check(self, cuts):
        logits, selections, cache = self.run_in_pieces(cuts)
        assert np.abs(logits - self.logits).max() < LOGITS
        # The weights have no ties and margins above rounding, so selections are the same sets.
        np.testing.assert_array_equal(np.sort(selections, -1), np.sort(self.selections, -1))
        ranked = np.sort(self.logits, -1)
        is_decided = ranked[..., -1] - ranked[..., -2] > 2 * LOGITS
        same = logits.argmax(-1) == self.logits.argmax(-1)
        assert same[is_decided].all()
        for got, want in zip(jax.tree.leaves(cache), jax.tree.leaves(self.cache), strict=True):
            np.testing.assert_allclose(got, want, atol=LOGITS)


def calls(sizes):
    """Up to a dozen calls: slots, how many of them each row fills, and what pads the rest."""
    filled = st.tuples(*[st.integers(0, max(sizes))] * BATCH)
    padding = st.sampled_from([0, 5, -1, 2**31 - 1])
    return st.lists(st.tuples(st.sampled_from(sizes), filled, padding), max_size=12)


@pytest.fixture(scope="module")
def case():
    return Case(CONFIG)


@pytest.fixture(scope="module")
def case_without_tail():
    return Case(NO_TAIL)


@hypothesis.given(calls(CALL_SIZES))
@hypothesis.example([(1, (1, 1, 1), 0)] * LENGTH)  # token by token
@hypothesis.example([(2, (2, 1, 0), -1)] * 9)
@hypothesis.example([(9, (3, 0, 9), 5), (1, (1, 1, 0), 0), (16, (0, 16, 2), -1)])
def test_any_cut(case, cuts):
    case.check(cuts)


@hypothesis.settings(max_examples=5)
@hypothesis.given(calls((2, 9)))
def test_any_cut_without_tail(case_without_tail, cuts):
    case_without_tail.check(cuts)


def test_bfloat16():
    """Without discontinuities (dense MLPs, everything selected) bfloat16 agrees to its rounding."""
    case = Case(
        dataclasses.replace(CONFIG, dtype="bfloat16", mlp_layer_types=("dense",) * 4, index_topk=64)
    )
    by_one, ragged = [(1, (1, 1, 1), 0)] * LENGTH, [(9, (3, 0, 9), 5), (1, (1, 1, 0), -1)] * 4
    for cuts in (by_one, ragged, []):
        logits, _, _ = case.run_in_pieces(cuts)
        assert relative_l2(logits, case.logits) < TOLERANCES["cut_invariance", "bfloat16"]


def test_batch_mates_do_not_matter(case):
    """A row alone, in a batch of one, gives what it gave among others."""
    model = jax.tree.unflatten(case.treedef, case.leaves)
    alone, _ = forward(model, case.ids[1:2])
    assert np.abs(np.asarray(alone)[0] - case.logits[1]).max() < LOGITS


def test_later_tokens_do_not_reach_back(case):
    changed = case.ids.copy()
    changed[:, 30:] = (changed[:, 30:] + 1) % CONFIG.vocab_size
    logits, _, _ = case.call(changed, init_cache(CONFIG, BATCH, CAPACITY), np.full(BATCH, LENGTH))
    assert np.abs(logits[:, :30] - case.logits[:, :30]).max() < LOGITS
    assert np.abs(logits[:, 30:] - case.logits[:, 30:]).max() > 0.1


def test_a_cache_can_be_branched(case):
    """`forward` donates nothing: two continuations of one cache do not disturb each other."""
    model = jax.tree.unflatten(case.treedef, case.leaves)
    nine = slice(9, 18)
    _, cache = forward(model, case.ids[:, :9], init_cache(CONFIG, BATCH, CAPACITY))
    first, _ = forward(model, case.ids[:, nine], cache)
    forward(model, case.ids[:, 1:10], cache)
    again, _ = forward(model, case.ids[:, nine], cache)
    np.testing.assert_array_equal(first, again)
    assert np.abs(np.asarray(first) - case.logits[:, nine]).max() < LOGITS
