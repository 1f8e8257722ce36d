"""The k-pool indexer against the float64 oracle, and the state laws it must keep."""

import functools
import itertools
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kpool_indexer import xla
from pallas_kernels.kpool_indexer.api import kpool_indexer
from tests.cases import TOLERANCES, relative_l2
from tests.kernels import jaxpr_cost
from tests.oracles import kpool_indexer_float64 as oracle

BACKENDS = ("reference", "xla")


# Sizes of the calls that a row of 23 tokens comes in; what is missing follows, 8 at a time.
PIECES = st.lists(st.integers(0, 8), max_size=16).map(lambda pieces: [*pieces, 8, 8, 8])


class Case(NamedTuple):
    P: int
    T: int
    heads: int
    width: int
    capacity: int  # pools
    selected: int
    dtype: str = "float32"


CASES = (
    Case(P=1, T=5, heads=3, width=8, capacity=12, selected=4),
    Case(P=2, T=1, heads=3, width=7, capacity=20, selected=3),
    Case(P=3, T=5, heads=3, width=8, capacity=12, selected=50),
    Case(P=3, T=1, heads=2, width=5, capacity=9, selected=1, dtype="bfloat16"),
    Case(P=4, T=17, heads=3, width=8, capacity=14, selected=5),
    Case(P=4, T=17, heads=3, width=8, capacity=14, selected=5, dtype="bfloat16"),
    Case(P=4, T=2, heads=1, width=8, capacity=10, selected=2),
    Case(P=16, T=2, heads=3, width=5, capacity=5, selected=2),
    Case(P=16, T=17, heads=3, width=5, capacity=5, selected=64, dtype="bfloat16"),
)


class History(NamedTuple):
    """Whole sequences, of which calls take parts."""

    q: np.ndarray  # [B, S, I, dI]
    head_weights: np.ndarray  # [B, S, I]
    k: np.ndarray  # [B, S, dI]
    gate: np.ndarray  # [B, S, dI]
    ape: np.ndarray  # [P, dI]


def make_history(seed, batch, tokens, case):
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    return History(
        q=draw(batch, tokens, case.heads, case.width),
        head_weights=rng.normal(size=(batch, tokens, case.heads)).astype(np.float32),
        k=draw(batch, tokens, case.width),
        gate=2 * draw(batch, tokens, case.width),
        ape=draw(case.P, case.width),
    )


def state_at(history, lengths, case):
    """The state after `lengths` tokens, NaN in whatever no one has written yet."""
    pools = np.full((len(lengths), case.capacity, case.width), np.nan, jnp.dtype(case.dtype))
    tail = np.full((len(lengths), case.P - 1, 2, case.width), np.nan, jnp.dtype(case.dtype))
    for b, n in enumerate(lengths):
        keys = oracle.pool_keys(history.k[b, :n], history.gate[b, :n], history.ape)
        pools[b, : len(keys)] = keys[: case.capacity]
        held = n % case.P
        tail[b, :held] = oracle.unfinished(history.k[b, :n], history.gate[b, :n], case.P)[:held]
    return pools, tail


def part(array, lengths, num_valid, T):
    """[B, T, ...] with row b's tokens from lengths[b] on, and NaN after num_valid[b] of them."""
    out = np.full((len(array), T, *array.shape[2:]), np.nan, array.dtype)
    for b, (start, count) in enumerate(zip(lengths, num_valid, strict=True)):
        out[b, :count] = array[b, start : start + count]
    return out


@functools.partial(jax.jit, static_argnames=("num_selected", "backend"))
def jitted(*args, num_selected, num_valid, backend):
    return kpool_indexer(*args, num_selected=num_selected, num_valid=num_valid, backend=backend)


def call(history, pools, tail, lengths, num_valid, T, case, backend="xla", run=jitted):
    arrays = [
        part(a, lengths, num_valid, T)
        for a in (history.q, history.head_weights, history.k, history.gate)
    ]
    out = run(
        *map(jnp.asarray, (*arrays, history.ape, pools, tail)),
        jnp.asarray(lengths, jnp.int32),
        num_selected=case.selected,
        num_valid=jnp.asarray(num_valid, jnp.int32),
        backend=backend,
    )
    return [np.array(x) for x in out]


def same_bits(got, want):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def check_selection(ids, row_scores, position, case):
    """Whether ids [Z] is a right answer, up to the rounding of scores; True where it is unique."""
    candidates = min((position + 1) // case.P, case.capacity)
    count = min(len(ids), candidates)
    assert (ids[count:] == -1).all()
    chosen = ids[:count]
    assert len(set(chosen)) == count and ((chosen >= 0) & (chosen < candidates)).all()
    if count == 0:
        return True
    margin = TOLERANCES["kpool_indexer.scores", "float32"] * max(np.abs(row_scores).max(), 1e-30)
    rest = np.setdiff1d(np.arange(candidates), chosen)
    assert (np.diff(row_scores[chosen]) <= margin).all()
    assert rest.size == 0 or row_scores[rest].max() <= row_scores[chosen].min() + margin
    unique = (np.diff(np.sort(row_scores)) > margin).all()
    if unique:
        np.testing.assert_array_equal(ids, oracle.select(row_scores, position, case.P, len(ids)))
    return unique


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kpool_indexer_against_float64(case, backend):
    """Every residue of length modulo P in one batch, ragged, with NaN in all that is unwritten."""
    lengths = [case.P * (r % 3) + r for r in range(case.P)] + [0, case.P + 1, 2 * case.P]
    batch, T = len(lengths), case.T
    rng = np.random.default_rng(7)
    num_valid = rng.integers(0, T + 1, batch)
    num_valid[:2], num_valid[-2:] = T, (0, T)
    history = make_history(1, batch, max(lengths) + T, case)
    before = state_at(history, lengths, case)
    ids, pools, tail = call(history, *before, lengths, num_valid, T, case, backend)

    assert ids.shape == (batch, T, min(case.selected, case.capacity)) and ids.dtype == np.int32
    errors, unique = [], []
    for b, (length, count) in enumerate(zip(lengths, num_valid, strict=True)):
        k, gate = history.k[b, : length + count], history.gate[b, : length + count]
        old, new = length // case.P, (length + count) // case.P
        same_bits(pools[b, :old], before[0][b, :old])
        same_bits(pools[b, new:], before[0][b, new:])
        keys = oracle.pool_keys(k, gate, history.ape)
        errors.append(relative_l2(pools[b, old:new], keys[old:new]))
        same_bits(tail[b], oracle.unfinished(k, gate, case.P) if count else before[1][b])
        assert (ids[b, count:] == -1).all()
        for t in range(count):
            candidates = (length + t + 1) // case.P
            row_scores = oracle.scores(
                history.q[b, length + t], history.head_weights[b, length + t], pools[b, :candidates]
            )
            unique.append(check_selection(ids[b, t], row_scores, length + t, case))
    assert max(errors) <= TOLERANCES["kpool_indexer", case.dtype]
    assert np.mean(unique) > 0.5  # else the exact comparison above would hardly ever have run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight", (1.0, -1.0, 0.0))
@pytest.mark.parametrize("heads", (1, 3))
def test_ties_take_the_lowest_pools(heads, weight, backend):
    """relu zeroes all heads of all pools but number 6, which a positive weight puts first."""
    case = Case(P=2, T=2, heads=heads, width=4, capacity=11, selected=5)
    history = make_history(2, 1, 24, case)
    history = history._replace(
        q=-np.abs(history.q),
        k=np.abs(history.k),
        head_weights=np.full_like(history.head_weights, weight),
    )
    history.k[0, 12:14] *= -1
    pools, tail = state_at(history, [20], case)
    ids, *_ = call(history, pools, tail, [20], [2], 2, case, backend)
    first = [6, 0, 1, 2, 3] if weight > 0 else [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(ids[0], [first, first])


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_keys_tie_to_the_lowest_pools(backend):
    case = Case(P=2, T=1, heads=3, width=4, capacity=40, selected=7)
    history = make_history(3, 1, 80, case)
    history.k[:], history.gate[:] = history.k[:, :1], history.gate[:, :1]
    pools, tail = state_at(history, [78], case)
    ids, *_ = call(history, pools, tail, [78], [1], 1, case, backend)
    np.testing.assert_array_equal(ids[0, 0], np.arange(7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_selects_pools_that_the_same_call_finishes(backend):
    """The newest pool is a candidate from its last token on, and from no earlier one."""
    case = Case(P=4, T=17, heads=3, width=8, capacity=14, selected=14)
    history = make_history(4, 1, 20, case)
    pools, tail = state_at(history, [3], case)
    ids, *_ = call(history, pools, tail, [3], [17], 17, case, backend)
    for t in range(17):
        assert sorted(i for i in ids[0, t] if i >= 0) == list(range((3 + t + 1) // 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_read_rounded_pool_keys(backend):
    """The ranking of pools finished in this call follows their bfloat16 keys, not what was before
    rounding: with P = 1 and keys closer than bfloat16 can tell, all pools tie."""
    case = Case(P=1, T=5, heads=1, width=4, capacity=8, selected=5)
    history = make_history(5, 1, 5, case)
    ramp = 1 + 1e-4 * np.arange(5, dtype=np.float32)
    history = history._replace(
        q=np.ones_like(history.q),
        head_weights=np.ones_like(history.head_weights),
        k=np.broadcast_to(ramp[None, :, None], history.k.shape).copy(),
    )
    pools, tail = np.zeros((1, 8, 4), jnp.bfloat16), np.zeros((1, 0, 2, 4), np.float32)
    ids, pools, _ = call(history, pools, tail, [0], [5], 5, case, backend)
    assert pools.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ids[0, 4], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pools_past_the_capacity_are_dropped(backend):
    """A clamped write would land on the last pools that are valid."""
    case = Case(P=4, T=17, heads=3, width=8, capacity=3, selected=3)
    history = make_history(6, 2, 34, case)
    lengths = [9, 17]
    pools, tail = state_at(history, lengths, case)
    ids, new_pools, new_tail = call(history, pools, tail, lengths, [17, 17], 17, case, backend)
    same_bits(new_pools[0, :2], pools[0, :2])
    same_bits(new_pools[1], pools[1])
    third = oracle.pool_keys(history.k[0, :12], history.gate[0, :12], history.ape)[2]
    assert relative_l2(new_pools[0, 2], third) <= TOLERANCES["kpool_indexer", "float32"]
    assert ids.max() == 2 and (np.sort(ids[1], axis=1) == [0, 1, 2]).all()
    for b, length in enumerate(lengths):
        n = length + 17
        same_bits(new_tail[b], oracle.unfinished(history.k[b, :n], history.gate[b, :n], 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_idle_rows_keep_every_bit(backend):
    case = Case(P=4, T=5, heads=3, width=8, capacity=6, selected=3)
    history = make_history(7, 3, 20, case)
    lengths = [0, 7, 8]
    pools, tail = state_at(history, lengths, case)
    ids, new_pools, new_tail = call(history, pools, tail, lengths, [0, 0, 0], 5, case, backend)
    assert (ids == -1).all()
    same_bits(new_pools, pools)
    same_bits(new_tail, tail)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_equal_the_row_alone(backend):
    """Each row reads its own tail and its own length, whatever its batch mates are doing."""
    case = Case(P=4, T=6, heads=3, width=8, capacity=10, selected=4)
    history = make_history(8, 5, 36, case)
    lengths, num_valid = [0, 3, 13, 22, 30], [6, 1, 4, 0, 6]
    pools, tail = state_at(history, lengths, case)
    together = call(history, pools, tail, lengths, num_valid, 6, case, backend)
    for b in range(5):
        row = History(*(a[b : b + 1] for a in history[:4]), ape=history.ape)
        alone = call(
            row,
            pools[b : b + 1],
            tail[b : b + 1],
            lengths[b : b + 1],
            num_valid[b : b + 1],
            6,
            case,
            backend,
        )
        np.testing.assert_array_equal(alone[0][0], together[0][b])
        np.testing.assert_allclose(alone[1][0], together[1][b], rtol=1e-6, atol=1e-6)
        same_bits(alone[2][0], together[2][b])


@pytest.mark.parametrize("backend", BACKENDS)
def test_later_tokens_change_nothing_before_them(backend):
    case = Case(P=3, T=9, heads=3, width=8, capacity=8, selected=4)
    history = make_history(9, 1, 14, case)
    pools, tail = state_at(history, [5], case)
    ids = call(history, pools, tail, [5], [9], 9, case, backend)[0]
    for t in (0, 3, 6):
        changed = History(*(a.copy() for a in history))
        for array in changed[:4]:
            array[:, 5 + t + 1 :] = 50
        other = call(changed, pools, tail, [5], [9], 9, case, backend)[0]
        np.testing.assert_array_equal(other[0, : t + 1], ids[0, : t + 1])


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@hypothesis.given(first=PIECES, second=PIECES)
def test_cuts_change_nothing(dtype, first, second):
    """However a sequence is cut into calls, each row in its own way, pools, tails and ids agree."""
    case = Case(P=4, T=8, heads=3, width=8, capacity=6, selected=3, dtype=dtype)
    total = 23
    history = make_history(10, 2, total, case)
    empty = state_at(history, [0, 0], case)
    whole = call(history, *empty, [0, 0], [total, total], total, case)

    pools, tail = empty
    lengths, ids = [0, 0], [[], []]
    for pieces in itertools.zip_longest(first, second, fillvalue=8):
        num_valid = [min(n, total - length) for n, length in zip(pieces, lengths, strict=True)]
        T = 1 if max(num_valid) <= 1 else case.T
        part_ids, pools, tail = call(history, pools, tail, lengths, num_valid, T, case)
        for b in range(2):
            ids[b].extend(part_ids[b, : num_valid[b]])
            lengths[b] += num_valid[b]
    assert lengths == [total, total]
    # Channels sum in another order only if the compiler chooses so; measured: not even a bit.
    tolerance = TOLERANCES["kpool_indexer", dtype]
    assert relative_l2(pools[:, : total // 4], whole[1][:, : total // 4]) <= tolerance
    same_bits(tail, whole[2])
    for b in range(2):
        np.testing.assert_array_equal(np.stack(ids[b]), whole[0][b])


def test_blocks_of_tokens_change_no_selection(monkeypatch):
    """17 tokens in 1, 2, 6 and 17 blocks, the last of which may be part padding."""
    case = Case(P=4, T=17, heads=3, width=8, capacity=14, selected=5)
    history = make_history(11, 2, 40, case)
    lengths, num_valid = [22, 5], [17, 9]
    state = state_at(history, lengths, case)
    whole = call(history, *state, lengths, num_valid, 17, case)
    bytes_per_token = 4 * 2 * case.heads * case.capacity
    for tokens, blocks in ((9, 2), (3, 6), (1, 17)):
        monkeypatch.setattr(xla, "SCORE_BLOCK_BYTES", tokens * bytes_per_token)
        block = xla.score_block(2, 17, case.heads, case.capacity)
        assert block <= tokens and -(-17 // block) == blocks
        run = jax.jit(kpool_indexer, static_argnames=("num_selected", "backend"))  # traced anew
        cut = call(history, *state, lengths, num_valid, 17, case, run=run)
        for got, want in zip(cut, whole, strict=True):
            same_bits(got, want)


def abstract_arguments(B, T, I, dI, P, NP, dtype):
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype)
    return (
        shape(dtype, B, T, I, dI),
        shape(jnp.float32, B, T, I),
        shape(dtype, B, T, dI),
        shape(dtype, B, T, dI),
        shape(dtype, P, dI),
        shape(dtype, B, NP, dI),
        shape(dtype, B, P - 1, 2, dI),
        shape(jnp.int32, B),
    )


def test_scores_of_all_tokens_are_never_held_at_once():
    """The released sizes at 128k tokens of context, a chunk of 4096."""
    B, T, I, NP = 1, 4096, 32, 32768
    arguments = abstract_arguments(B, T, I, 128, 4, NP, jnp.bfloat16)
    run = functools.partial(kpool_indexer, num_selected=512, backend="xla")
    jaxpr = jax.make_jaxpr(run)(*arguments).jaxpr
    limit = xla.SCORE_BLOCK_BYTES // 4
    assert limit < B * T * I * NP // 50
    assert limit // 2 < jaxpr_cost.largest(jaxpr, jnp.float32) <= limit
    # No pass is repeated either: the scores' dots are all that there are.
    assert jaxpr_cost.dot_flops(jaxpr) == 2 * B * T * I * NP * 128


def test_compiled_memory_follows_the_block(monkeypatch):
    B, T, I, NP = 2, 256, 4, 512
    monkeypatch.setattr(xla, "SCORE_BLOCK_BYTES", 4 * 4 * B * I * NP)
    arguments = abstract_arguments(B, T, I, 8, 4, NP, jnp.float32)
    run = functools.partial(kpool_indexer, num_selected=8, backend="xla")
    memory = jax.jit(run).lower(*arguments).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * B * T * I * NP // 8


def test_far_more_pools_than_a_128k_context_has():
    """An index reduction that fails on large arrays would pick wrong or last positions."""
    case = Case(P=2, T=1, heads=2, width=2, capacity=150_000, selected=6)
    rng = np.random.default_rng(12)
    pools = rng.normal(size=(1, case.capacity, 2)).astype(np.float32)
    length = 2 * 149_000 + 1
    history = make_history(12, 1, 1, case)
    arrays = history.q, np.abs(history.head_weights), history.k, history.gate, history.ape
    ids, pools, _ = jitted(
        *map(jnp.asarray, (*arrays, pools, np.zeros((1, 1, 2, 2), np.float32))),
        jnp.asarray([length], jnp.int32),
        num_selected=case.selected,
        num_valid=jnp.asarray([1], jnp.int32),
        backend="xla",
    )
    row_scores = oracle.scores(arrays[0][0, 0], arrays[1][0, 0], np.array(pools[0, :149_001]))
    np.testing.assert_array_equal(
        np.array(ids[0, 0]), oracle.select(row_scores, length, case.P, case.selected)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_thousands_of_pools_are_ranked_to_float32_precision(backend):
    """Neighbours in the ranking are so close that queries rounded to bfloat16 or TF32 swap some."""
    case = Case(P=2, T=1, heads=4, width=8, capacity=3000, selected=3000)
    pools = np.random.default_rng(14).normal(size=(1, 3000, 8)).astype(np.float32)
    history = make_history(14, 1, 6000, case)
    tail = np.zeros((1, 1, 2, 8), np.float32)
    ids, pools, _ = call(history, pools, tail, [5999], [1], 1, case, backend)
    row_scores = oracle.scores(history.q[0, 5999], history.head_weights[0, 5999], pools[0])
    check_selection(ids[0, 0], row_scores, 5999, case)


def test_num_valid_defaults_to_all_and_num_selected_is_cut_at_the_capacity():
    case = Case(P=4, T=2, heads=1, width=8, capacity=3, selected=2048)
    history = make_history(13, 2, 12, case)
    lengths = [5, 10]
    state = state_at(history, lengths, case)
    arrays = [part(a, lengths, [2, 2], 2) for a in history[:4]]
    arguments = *map(jnp.asarray, (*arrays, history.ape, *state)), jnp.asarray(lengths, jnp.int32)
    got = jax.jit(functools.partial(kpool_indexer, num_selected=2048))(*arguments)
    want = call(history, *state, lengths, [2, 2], 2, case)
    assert got[0].shape == (2, 2, 3)
    for a, b in zip(got, want, strict=True):
        same_bits(np.array(a), b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_of_some_tokens_select_what_they_select_among_all(backend):
    """Also where they start or end in the padding, and where pools are finished in between."""
    case = Case(P=4, T=6, heads=3, width=8, capacity=6, selected=2)
    history = make_history(15, 3, 20, case)
    lengths, num_valid = [5, 10, 0], [6, 3, 0]
    state = state_at(history, lengths, case)
    q, head_weights, *rest = (part(a, lengths, num_valid, 6) for a in history[:4])
    arrays = [jnp.asarray(x) for x in (*rest, history.ape, *state)]
    arrays.append(jnp.asarray(lengths, jnp.int32))
    options = dict(num_selected=2, num_valid=jnp.asarray(num_valid, jnp.int32), backend=backend)
    whole = kpool_indexer(jnp.asarray(q), jnp.asarray(head_weights), *arrays, **options)
    for first in (0, 2, 4):
        some = [jnp.asarray(x[:, first : first + 2]) for x in (q, head_weights)]
        ids, *after = kpool_indexer(*some, *arrays, first_query=first, **options)
        np.testing.assert_array_equal(ids, whole[0][:, first : first + 2])
        for got, want in zip(after, whole[1:], strict=True):
            same_bits(np.array(got), np.array(want))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 5, 3)}, "q.shape=(2, 5, 3) has rank 3"),
        ({"head_weights": (2, 5, 4)}, "head_weights.shape=(2, 5, 4), expected [B, Tq, I]"),
        ({"k": (2, 4, 8)}, "gate.shape=(2, 5, 8), expected [B, T, dI]"),
        ({"k": (2, 4, 8), "gate": (2, 4, 8)}, "queries of Tq=5 tokens, of which T=4"),
        ({"index_tail": (2, 4, 2, 8)}, "index_tail.shape=(2, 4, 2, 8), expected"),
        ({"index_pools": (2, 6, 7)}, "index_pools.shape=(2, 6, 7), expected [B, NP, dI]"),
        ({"index_pools": (2, 0, 8)}, "NP=0, expected at least 1"),
        ({"length": (3,)}, "length.shape=(3,), expected [B]"),
        ({"num_selected": 0}, "num_selected=0, expected at least 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments_are_named(change, message):
    shapes = {
        "q": (2, 5, 3, 8),
        "head_weights": (2, 5, 3),
        "k": (2, 5, 8),
        "gate": (2, 5, 8),
        "ape": (4, 8),
        "index_pools": (2, 6, 8),
        "index_tail": (2, 3, 2, 8),
        "length": (2,),
        "num_selected": 2,
    }
    shapes.update(change)
    num_selected = shapes.pop("num_selected")
    arrays: dict[str, Any] = {
        name: jnp.zeros(shape, jnp.int32 if name == "length" else jnp.float32)
        for name, shape in shapes.items()
    }
    with pytest.raises(ValueError) as error:
        kpool_indexer(**arrays, num_selected=num_selected)
    assert message in str(error.value)


def test_wrong_dtypes_are_named():
    arguments = [
        jnp.zeros(a.shape, a.dtype) for a in abstract_arguments(1, 2, 3, 8, 4, 6, "float32")
    ]
    arguments[1] = arguments[1].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="head_weights.dtype=bfloat16, expected float32"):
        kpool_indexer(*arguments, num_selected=2)
    arguments[1] = arguments[1].astype(jnp.float32)
    with pytest.raises(NotImplementedError, match="pallas_mosaic_gpu"):
        kpool_indexer(*arguments, num_selected=2, backend="pallas_mosaic_gpu")
