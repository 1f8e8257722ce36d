"""Sparse MLA against the float64 oracle: both forms on the same inputs, and what stays unseen."""

import functools
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import xla
from pallas_kernels.sparse_mla.api import sparse_mla
from tests.cases import TOLERANCES, relative_l2
from tests.kernels import jaxpr_cost
from tests.oracles import sparse_mla_float64 as oracle

# `masked` and `gathered` are the two forms of `xla`, whichever of them the shapes would choose.
FORMS = ("reference", "masked", "gathered")
SCALE = 0.4
BLOCK_BYTES = xla.ATTENTION_BLOCK_BYTES


class Case(NamedTuple):
    P: int
    T: int
    capacity: int  # tokens
    selected: int
    tail: bool = True
    dtype: str = "float32"
    heads: int = 3
    width: int = 5


CASES = (
    Case(P=1, T=5, capacity=12, selected=4),
    Case(P=2, T=1, capacity=21, selected=3),
    Case(P=3, T=5, capacity=25, selected=2, tail=False),
    Case(P=3, T=2, capacity=25, selected=20),
    Case(P=4, T=17, capacity=40, selected=3),
    Case(P=4, T=17, capacity=43, selected=3, dtype="bfloat16"),
    Case(P=4, T=5, capacity=27, selected=2, tail=False, dtype="bfloat16"),
    Case(P=16, T=17, capacity=70, selected=1),
)


class Inputs(NamedTuple):
    q: np.ndarray  # [B, T, H, R]
    latent: np.ndarray  # [B, S, R]
    pool_ids: np.ndarray  # [B, T, Z]
    length: np.ndarray  # [B]
    num_valid: np.ndarray  # [B]


def make_inputs(seed, case, lengths, num_valid):
    """Random selections of finished pools; NaN in padding queries and in unwritten slots."""
    rng = np.random.default_rng(seed)
    batch, dtype = len(lengths), jnp.dtype(case.dtype)
    q = rng.normal(size=(batch, case.T, case.heads, case.width)).astype(dtype)
    latent = rng.normal(size=(batch, case.capacity, case.width)).astype(dtype)
    pool_ids = np.full((batch, case.T, case.selected), -1, np.int32)
    for b, (length, count) in enumerate(zip(lengths, num_valid, strict=True)):
        q[b, count:] = np.nan
        latent[b, length + count :] = np.nan
        for t in range(count):
            chosen = rng.permutation((length + t + 1) // case.P)[: case.selected]
            pool_ids[b, t, : len(chosen)] = chosen
    return Inputs(q, latent, pool_ids, np.array(lengths, np.int32), np.array(num_valid, np.int32))


def ragged(case):
    """Rows at every residue of the length modulo P, an idle row, an empty cache, a full one."""
    last = case.capacity - case.T
    lengths = [case.P * (r % 2) + r for r in range(case.P)] + [0, 2 * case.P, last]
    num_valid = np.random.default_rng(7).integers(0, case.T + 1, len(lengths))
    num_valid[0], num_valid[-3:] = case.T, (case.T, 0, case.T)
    return lengths, num_valid


@functools.partial(jax.jit, static_argnames=("case", "form", "block_bytes"))
def run(q, latent, pool_ids, length, num_valid, *, case, form, block_bytes=BLOCK_BYTES):
    with pytest.MonkeyPatch.context() as patch:  # while tracing, which is when it is decided
        patch.setattr(xla, "ATTENTION_BLOCK_BYTES", block_bytes)
        if form != "reference":
            for name in ("attend_masked", "attend_gathered"):
                patch.setattr(xla, name, getattr(xla, f"attend_{form}"))
        return sparse_mla(
            q,
            latent,
            pool_ids,
            length,
            pool_size=case.P,
            scale=SCALE,
            always_select_tail=case.tail,
            num_valid=num_valid,
            backend="reference" if form == "reference" else "xla",
        )


def call(inputs, case, form, block_bytes=BLOCK_BYTES):
    arrays = map(jnp.asarray, inputs)
    return np.array(run(*arrays, case=case, form=form, block_bytes=block_bytes))


def truth(inputs, case):
    return oracle.sparse_mla(
        *inputs[:4],
        pool_size=case.P,
        scale=SCALE,
        always_select_tail=case.tail,
        num_valid=inputs.num_valid,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sparse_mla_against_float64(case, form):
    inputs = make_inputs(1, case, *ragged(case))
    o = call(inputs, case, form)
    assert o.shape == inputs.q.shape and o.dtype == inputs.q.dtype
    for b, count in enumerate(inputs.num_valid):
        assert (o[b, count:] == 0).all()
    assert relative_l2(o, truth(inputs, case)) <= TOLERANCES["sparse_mla", case.dtype]


def test_shapes_choose_the_form(monkeypatch):
    """The mask where a query may see all, and where copying latents for each query costs more."""
    used = []
    for form in ("attend_masked", "attend_gathered"):
        original = getattr(xla, form)

        def spy(*args, form=form, original=original, **kwargs):
            used.append(form)
            return original(*args, **kwargs)

        monkeypatch.setattr(xla, form, spy)

    def choose(B, T, S, *, H=64, R=512, Z=512):
        shapes = ((B, T, H, R), "bfloat16"), ((B, S, R), "bfloat16"), ((B, T, Z), "int32")
        arrays = [jax.ShapeDtypeStruct(*shape) for shape in (*shapes, ((B,), "int32"))]
        jax.eval_shape(functools.partial(sparse_mla, pool_size=4, scale=1.0), *arrays)
        return used.pop()

    assert choose(1, 1, 2048) == "attend_masked"
    assert choose(1, 2048, 8192) == "attend_masked"
    assert choose(1, 2048, 32768) == "attend_gathered"
    assert choose(64, 1, 8192) == "attend_gathered"
    assert not used


@pytest.mark.parametrize("form", FORMS)
def test_all_pools_selected_is_dense_causal_attention(form):
    case = Case(P=4, T=17, capacity=24, selected=6)
    inputs = make_inputs(3, case, [6], [17])
    dense = np.zeros(inputs.q.shape)
    for t in range(17):
        past = np.asarray(inputs.latent[0, : 6 + t + 1], np.float64)
        scores = np.asarray(inputs.q[0, t], np.float64) @ past.T * SCALE
        weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        dense[0, t] = weights @ past
    assert relative_l2(call(inputs, case, form), dense) <= TOLERANCES["sparse_mla", "float32"]


@pytest.mark.parametrize("form", FORMS)
def test_wrong_ids_show_nothing_new(form):
    """Ids past the query, past the cache or below -1 show nothing; repeated ones and the tail's
    own pool count once."""
    case = Case(P=4, T=5, capacity=39, selected=6)
    inputs = make_inputs(4, case, [14], [5])
    inputs.pool_ids[0] = [
        [1, 1, 1, 0, -1, -1],  # repeated
        [2, 3, 4, 9, 8, 7],  # from the tail's own pool on
        [10, 2**31 - 1, 2**30, -7, -(2**31), 0],  # outside the cache; products overflow
        [4, 4, 3, 3, 0, 0],  # position 17 is in pool 4
        [-1, -1, -1, -1, -1, -1],  # nothing but the tail
    ]
    inputs.latent[0, 19:] = np.nan
    o = call(inputs, case, form)
    right = inputs.pool_ids.copy()
    right[0, :4] = [
        [0, 1, -1, -1, -1, -1],
        [2, 3, -1, -1, -1, -1],
        [0, -1, -1, -1, -1, -1],
        [0, 3, -1, -1, -1, -1],
    ]
    want = truth(inputs._replace(pool_ids=right), case)
    assert relative_l2(o, want) <= TOLERANCES["sparse_mla", "float32"]


@pytest.mark.parametrize("form", FORMS)
def test_without_the_tail_an_unfinished_pool_shows_its_past_alone(form):
    """The indexer never selects such a pool; a wrong id of one must still stay causal."""
    case = Case(P=4, T=3, capacity=16, selected=1, tail=False)
    inputs = make_inputs(5, case, [4], [3])
    inputs.pool_ids[0, :, 0] = 1
    inputs.latent[0, 7:] = np.nan
    o = call(inputs, case, form)
    assert relative_l2(o, truth(inputs, case)) <= TOLERANCES["sparse_mla", "float32"]


@pytest.mark.parametrize("form", FORMS)
def test_a_query_that_sees_nothing_gives_zeros(form):
    """Without the tail the first P - 1 queries see nothing; so does a query whose own token
    finished a pool, if no pool is selected."""
    case = Case(P=4, T=4, capacity=16, selected=2)
    inputs = make_inputs(6, case, [0], [4])
    inputs.pool_ids[:] = -1
    o = call(inputs, case, form)
    assert (o[0, 3] == 0).all() and (o[0, :3] != 0).all()
    assert (call(inputs, case._replace(tail=False), form) == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_later_latents_change_nothing(form):
    case = Case(P=4, T=9, capacity=30, selected=2)
    inputs = make_inputs(7, case, [10], [9])
    o = call(inputs, case, form)
    for t in (0, 4, 7):
        latent = inputs.latent.copy()
        latent[0, 10 + t + 1 :] = 1e4
        other = call(inputs._replace(latent=latent), case, form)
        np.testing.assert_array_equal(other[0, : t + 1], o[0, : t + 1])


@pytest.mark.parametrize("form", FORMS)
def test_rows_equal_the_row_alone(form):
    case = Case(P=4, T=6, capacity=40, selected=3)
    lengths, num_valid = [0, 3, 13, 22, 30], [6, 1, 4, 0, 6]
    inputs = make_inputs(8, case, lengths, num_valid)
    together = call(inputs, case, form)
    for b in range(5):
        alone = call(Inputs(*(a[b : b + 1] for a in inputs)), case, form)
        np.testing.assert_allclose(alone[0], together[b], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ("masked", "gathered"))
@hypothesis.settings(max_examples=5)
@hypothesis.given(cuts=st.sets(st.integers(1, 16), max_size=4))
def test_cuts_change_nothing(form, cuts):
    """17 tokens over a cache of 9, in calls of any sizes."""
    case = Case(P=4, T=17, capacity=30, selected=3)
    inputs = make_inputs(9, case, [9], [17])
    whole = call(inputs, case, form)
    edges = [0, *sorted(cuts), 17]
    pieces = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        n = stop - start
        # One shape for all calls; the rest of each is padding.
        q, pool_ids = np.full_like(inputs.q, np.nan), np.full_like(inputs.pool_ids, -1)
        q[:, :n], pool_ids[:, :n] = inputs.q[:, start:stop], inputs.pool_ids[:, start:stop]
        latent = inputs.latent.copy()
        latent[:, 9 + stop :] = np.nan
        piece = Inputs(
            q, latent, pool_ids, inputs.length + np.int32(start), np.array([n], np.int32)
        )
        pieces.append(call(piece, case, form)[:, :n])
    tolerance = TOLERANCES["sparse_mla", "float32"]
    assert relative_l2(np.concatenate(pieces, axis=1), whole) <= tolerance


def number_of_steps(inputs, case, form, block_bytes):
    traced = functools.partial(run, case=case, form=form, block_bytes=block_bytes)
    jaxpr = jax.make_jaxpr(traced)(*inputs).jaxpr
    (steps,) = jaxpr_cost.scan_lengths(jaxpr)
    return steps


@pytest.mark.parametrize("form", ("masked", "gathered"))
def test_blocks_of_tokens_change_nothing(form):
    """17 tokens in blocks of 9 and 3, the last of which is part padding."""
    case = Case(P=4, T=17, capacity=40, selected=3)
    inputs = make_inputs(10, case, [22, 5], [17, 9])
    whole = call(inputs, case, form)
    gathered = 4 * case.P  # the tail's pool included
    bytes_per_token = {
        "masked": 2 * case.capacity * 2 * case.heads * 4,
        "gathered": 2 * gathered * (4 * case.width + 2 * case.heads * 4),
    }[form]
    for tokens, blocks in ((9, 2), (3, 6)):
        cut = call(inputs, case, form, block_bytes=tokens * bytes_per_token)
        assert relative_l2(cut, whole) <= TOLERANCES["sparse_mla", "float32"]
        assert number_of_steps(inputs, case, form, tokens * bytes_per_token) == blocks


@pytest.mark.parametrize(
    ("capacity", "per_token"),
    [(131072, 513 * 4 * (512 * 2 + 2 * 64 * 4)), (2048, 2048 * 2 * 64 * 4)],
    ids=("gathered", "masked"),
)
def test_intermediates_of_all_tokens_are_never_held_at_once(capacity, per_token):
    """The released sizes, a chunk of 4096 tokens."""
    T, H, R, Z = 4096, 64, 512, min(512, capacity // 4)
    arguments = (
        jax.ShapeDtypeStruct((1, T, H, R), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, capacity, R), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, T, Z), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    attend = functools.partial(sparse_mla, pool_size=4, scale=0.0625, backend="xla")
    jaxpr = jax.make_jaxpr(attend)(*arguments).jaxpr
    block = xla.attention_block(T, per_token)
    seen = min(capacity, 4 * (Z + 1))
    queries = -(-T // block) * block * H * R
    assert block < T // 8
    # Queries and outputs, which are bound to be there, or one block.
    assert jaxpr_cost.largest(jaxpr) <= max(queries, block * seen * R)
    assert jaxpr_cost.largest(jaxpr, jnp.float32) <= block * H * max(seen, R)
    assert jaxpr_cost.dot_flops(jaxpr) == 4 * queries * seen


@pytest.mark.parametrize("form", ("masked", "gathered"))
def test_gradients_are_the_references(form):
    """And finite, with NaN in padding and unwritten slots, and with a query that sees nothing."""
    case = Case(P=4, T=5, capacity=24, selected=2)
    inputs = make_inputs(11, case, [0, 9], [5, 3])
    inputs.pool_ids[0, 3] = -1
    weights = np.random.default_rng(0).normal(size=inputs.q.shape).astype(np.float32)

    def gradients(form):
        def loss(q, latent):
            rest = map(jnp.asarray, inputs[2:])
            return jnp.sum(run(q, latent, *rest, case=case, form=form) * weights)

        found = jax.jit(jax.grad(loss, argnums=(0, 1)))(inputs.q, inputs.latent)
        return [np.array(g) for g in found]

    got, want = gradients(form), gradients("reference")
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(a).all() and np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_num_valid_defaults_to_all():
    case = Case(P=4, T=5, capacity=30, selected=2)
    inputs = make_inputs(12, case, [3, 9], [5, 5])
    o = jax.jit(functools.partial(sparse_mla, pool_size=4, scale=SCALE))(*inputs[:4])
    np.testing.assert_allclose(o, call(inputs, case, "reference"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": ((2, 5, 3), "float32")}, "q.shape=(2, 5, 3) has rank 3"),
        ({"latent": ((2, 9, 7), "float32")}, "latent.shape=(2, 9, 7), expected [B, S, R]"),
        ({"latent": ((2, 9, 8), "bfloat16")}, "latent.dtype=bfloat16, expected float32"),
        ({"pool_ids": ((2, 4, 3), "int32")}, "pool_ids.shape=(2, 4, 3), expected [B, T, Z]"),
        ({"pool_ids": ((2, 5, 0), "int32")}, "Z=0, expected at least 1"),
        ({"length": ((2,), "uint32")}, "length.dtype=uint32, expected int32"),
        ({"pool_size": 0}, "pool_size=0, expected at least 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "q": ((2, 5, 3, 8), "float32"),
        "latent": ((2, 9, 8), "float32"),
        "pool_ids": ((2, 5, 3), "int32"),
        "length": ((2,), "int32"),
        "pool_size": 4,
    }
    arguments.update(change)
    pool_size = arguments.pop("pool_size")
    arrays: dict[str, Any] = {
        name: jnp.zeros(*shape_and_dtype) for name, shape_and_dtype in arguments.items()
    }
    with pytest.raises(ValueError) as error:
        sparse_mla(**arrays, pool_size=pool_size, scale=1.0)
    assert message in str(error.value)
