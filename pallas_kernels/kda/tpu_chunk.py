"""What one grid step of the TPU's chunked KDA computes. README.md derives it.

Heads go in pairs, since a 256 x 256 matrix unit holds two of them. Wherever a matrix of a pair has
tokens along its lanes, they are ordered by (block of 16 tokens, head, token within the block);
`_paired` stacks rows in that order.

Stages are generators. They yield where what follows waits for a result, and `_interleave` puts the
work of others there: the compiler keeps the order of matrix products and looks only so far ahead.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.inputs import L2_NORM_EPS

HEAD_DIM = 128  # lanes of a register
CHUNK = 64
BLOCK = 16  # rows around one anchor
NUM_BLOCKS = CHUNK // BLOCK
_BLOCK_BITS = BLOCK.bit_length() - 1
LAG = 2  # steps from the preparation of tokens to their outputs
_PAIR = 2 * HEAD_DIM

_LOG2E = math.log2(math.e)
# exp2 of the sum over a block of this many, and of its negative, is in float32's and bfloat16's
# range, with room for the smallest components of a key.
_MOST_IN_BLOCK = 116.0
_F32 = jnp.float32


class _Item(NamedTuple):
    """What is kept between the stages of a pair of heads in a chunk.

    The first axis holds slots: stages of one grid step work on different tokens. The last slot is
    neutral: a step that has nothing but padding changes no state.
    """

    reads: Any  # [4, 2C, 2K] keys, then queries, decayed since the chunk's start
    writes: Any  # [4, halves, 2, C, K] keys per head, decayed until the chunk's end
    decay: Any  # [4, 8, 2K] over the chunk, in every row
    qk: Any  # [4, C, 2C] decayed products of queries and keys
    kk: Any  # [2, C, 2C] decayed products of keys times beta, below the diagonal
    solve: Any  # [3, C, halves * 2C] the inverse of I + kk, times beta


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static side of a launch."""

    heads: int  # in a step, even
    chunks: int  # in a step
    heads_apart: bool  # inputs are [B, T, H, K], not [B, T, H*K]
    dtype: Any
    lower_bound: float | None
    scale: float
    interpreted: bool

    @property
    def pairs(self) -> int:
        return self.heads // 2

    @property
    def items(self) -> int:
        return self.pairs * self.chunks

    @property
    def exact(self) -> bool:
        """Products in float32, because the inputs are."""
        return self.dtype == jnp.float32

    @property
    def words(self) -> bool:
        """Pairs of heads are loaded as words. Interpret mode has no such view of a block."""
        return self.heads_apart and not self.exact and not self.interpreted

    @property
    def operand(self) -> Any:
        return _F32 if self.exact else jnp.bfloat16

    @property
    def shift(self) -> float | None:
        """log2 of the constant anchor of a block's factors; None: they must be formed in pairs."""
        if self.lower_bound is None:
            return None
        most = -self.lower_bound * _LOG2E * BLOCK
        if most > 2 * _MOST_IN_BLOCK:
            return None
        # The low halves of float32 products need the room that the middle has.
        return most / 2 if self.exact or most > _MOST_IN_BLOCK else 0.0

    def scratch(self) -> list:
        """VMEM for `kernel`, in the order of its arguments."""
        C, D = CHUNK, HEAD_DIM
        halves = 1 if self.exact else 2

        def item():
            return _Item(
                reads=pltpu.VMEM((4, 2 * C, _PAIR), self.operand),
                writes=pltpu.VMEM((4, halves, 2, C, D), self.operand),
                decay=pltpu.VMEM((4, 8, _PAIR), _F32),
                qk=pltpu.VMEM((4, C, 2 * C), self.operand),
                kk=pltpu.VMEM((2, C, 2 * C), self.operand),
                solve=pltpu.VMEM((3, C, halves * 2 * C), self.operand),
            )

        return [
            [item() for _ in range(self.items)],
            [pltpu.VMEM((D, _PAIR), _F32) for _ in range(self.pairs)],  # states, transposed
            pltpu.VMEM((2, self.items * BLOCK, 2 * C), _F32),  # diagonal blocks of kk
            pltpu.VMEM((self.items * BLOCK, 2 * C), _F32),  # inverses of I + those
            [pltpu.VMEM((C, D), _F32) for _ in range(self.chunks)],  # beta, heads along lanes
            [pltpu.VMEM((D, C), _F32) for _ in range(self.chunks)],  # beta, heads along sublanes
            pltpu.VMEM((2, self.items, 2 * C), _F32),  # beta, pairs along sublanes
        ]


def _iota(shape, axis):
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _paired_lane(lane):
    """The head and the token of a lane. In shifts: to divide, Pallas asks for the chip at hand."""
    block = lane >> (_BLOCK_BITS + 1)
    return lane >> _BLOCK_BITS & 1, (block << _BLOCK_BITS) + (lane & (BLOCK - 1))


def _rows(x, row):
    """x [R, N] times row [8, N], whose rows are equal."""
    return (x.reshape(-1, *row.shape) * row).reshape(x.shape)


def _every_row(x, i):
    """Row i of x [R, N] in all of [8, N]."""
    return jnp.broadcast_to(x[i : i + 1], (8, x.shape[1]))


def _cat(arrays, axis=0):
    return jnp.concatenate(arrays, axis) if len(arrays) > 1 else arrays[0]


def _blocks(x):
    return [x[i : i + BLOCK] for i in range(0, x.shape[0], BLOCK)]


def _paired(first, second):
    """Rows of two heads, [n, K] each, as one block-diagonal matrix [2n, 2K]: block by block."""
    zero = jnp.zeros((BLOCK, first.shape[1]), first.dtype)
    rows = _alternate(first, second)
    return _cat([_cat([zero, x] if n % 2 else [x, zero], 1) for n, x in enumerate(rows)])


def _alternate(first, second):
    """Blocks of rows of two heads in turn."""
    return [x for pair in zip(_blocks(first), _blocks(second), strict=True) for x in pair]


def _words(ref, plan):
    """A block of bfloat16 tokens [1, C, H, K] as uint32 rows, [C * H/2, K].

    A word holds the same channel of two heads, the even one in its low half, so a load with a
    stride brings a pair of heads in the registers' layout.
    """
    words = ref.bitcast(jnp.uint32)
    return words.reshape(words.shape[1] * plan.pairs, HEAD_DIM)


class _Step:
    """One grid step. Constants are made once, here."""

    def __init__(self, plan: Plan, refs, counts, finished, slots, scratch):
        self.plan = plan
        self.q, self.k, self.gate, self.beta, self.v, self.constants, self.o = refs
        self.counts, self.finished = counts, finished  # valid tokens per chunk, first and last
        (
            self.items,
            self.states,
            self.diagonals,
            self.inverses,
            self.betas,
            self.beta_rows,
            self.paired_betas,
        ) = scratch
        self.now, self.now_of_two, self.last_of_two, self.read_slot, self.solve_slot = slots
        C = CHUNK
        self.row, lane = _iota((C, 2 * C), 0), _iota((C, 2 * C), 1)
        self.head, self.column = _paired_lane(lane)
        lane = lane[:BLOCK]
        self.first_head = self.head[:BLOCK] == 0
        self.lane_block = lane >> (_BLOCK_BITS + 1)

        token, source = _iota((C, C), 0), _iota((C, C), 1)
        same = token >> _BLOCK_BITS == source >> _BLOCK_BITS
        sums = [same & (token >= source)]  # up to the token; and for pairs, what follows it
        if plan.shift is None:
            sums.append(same & (token < source))
        sums = _cat([x.astype(_F32) for x in sums])
        self.sums = (sums if plan.exact else _cat([sums, sums], 1)).astype(plan.operand)

    def dot(self, a, b, transposed=False):
        """a @ b, or a @ b.T, accumulated in float32; operands are rounded to `plan.operand`."""
        return lax.dot_general(
            a.astype(self.plan.operand),
            b.astype(self.plan.operand),
            (((1,), (1 if transposed else 0,)), ((), ())),
            preferred_element_type=_F32,
            precision=lax.Precision.HIGHEST if self.plan.exact else None,
        )

    def parts(self, x) -> list:
        """x as an operand, where bfloat16 ones need it as a high and a low half."""
        high = x.astype(self.plan.operand)
        return [high] if self.plan.exact else [high, self.operand(x - high.astype(_F32))]

    def operand(self, x):
        return x.astype(self.plan.operand)

    def load(self, ref, chunk, pair, count=None) -> list:
        """A pair of heads in a chunk, [C, K] float32 each; given the count, zero in padding."""
        C, K = CHUNK, HEAD_DIM
        valid = None if count is None else _iota((C, K), 0) < count
        if self.plan.words:
            words = _words(ref, self.plan)[self.rows_of(chunk, pair)]
            if valid is not None:
                words = jnp.where(valid, words, jnp.uint32(0))
            return [pltpu.bitcast(x, _F32) for x in (words << 16, words & jnp.uint32(0xFFFF0000))]
        values = []
        for head in (2 * pair, 2 * pair + 1):
            x = ref[self.rows_of(chunk, head)].astype(_F32)
            values.append(x if valid is None else jnp.where(valid, x, 0.0))
        return values

    def store(self, ref, chunk, pair, values, count) -> None:
        """The inverse of `load`, in ref's dtype."""
        valid = _iota((CHUNK, HEAD_DIM), 0) < count
        if self.plan.words:
            words = pltpu.pack_elementwise(values, packed_dtype=jnp.bfloat16)
            words = jnp.where(valid, pltpu.bitcast(words, jnp.uint32), jnp.uint32(0))
            _words(ref, self.plan)[self.rows_of(chunk, pair)] = words
            return
        for head, value in zip((2 * pair, 2 * pair + 1), values, strict=True):
            ref[self.rows_of(chunk, head)] = jnp.where(valid, value, 0.0).astype(ref.dtype)

    def rows_of(self, chunk, index):
        """Where a head of a chunk, or a pair of heads, is in a block of tokens."""
        C, K = CHUNK, HEAD_DIM
        if self.plan.words:
            pairs = self.plan.pairs
            return pl.ds(chunk * C * pairs + index, C, stride=pairs), slice(None)
        rows = pl.ds(chunk * C, C)
        if self.plan.heads_apart:
            return 0, rows, index, slice(None)
        return 0, rows, pl.ds(index * K, K)

    def log2_decay(self, gate, head, valid):
        """[C, K] <= 0, and 0 for padding."""
        bound = self.plan.lower_bound
        rate, bias = (self.constants[head, pl.ds(i, 1), :] for i in (0, 1))  # [1, K]
        x = gate + bias
        if bound is not None:
            # Not by way of a hyperbolic tangent, which would lose the digits of slow gates.
            log = bound * _LOG2E * jax.nn.sigmoid(rate * x)
        else:
            softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
            # 2**-10000 is zero; and it is not infinite, which times zero is no number.
            log = jnp.maximum(-_LOG2E * rate * softplus, -10000.0)
        return jnp.where(valid, log, 0.0)

    def normalized(self, x, factor=1.0):
        norm = lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + L2_NORM_EPS)
        return x * (norm * factor)

    def prepare_beta(self, first_head) -> None:
        """sigmoid of the logits of all heads, by heads and by pairs; first_head None: 0."""
        p, C, K = self.plan, CHUNK, HEAD_DIM
        for chunk in range(p.chunks):
            x = jax.nn.sigmoid(self.beta[0, :, pl.ds(chunk * C, C)].astype(_F32))  # [H, C]
            x = jnp.where(_iota(x.shape, 1) < self.counts[chunk], x, 0.0)
            by_token = self.beta_rows[chunk]
            by_token[: x.shape[0]] = x
            if first_head is not None:
                by_token[...] = pltpu.roll(by_token[...], K - first_head, 0)
            self.betas[chunk][...] = by_token[...].T
            both = [by_token[pl.ds(h, p.pairs, stride=2), :] for h in (0, 1)]
            head, token = _paired_lane(_iota((p.pairs, 2 * C), 1))
            source = head * C + token
            pairs = pl.ds(chunk * p.pairs, p.pairs)
            self.paired_betas[self.now_of_two, pairs, :] = jnp.take_along_axis(
                _cat(both, 1), source, axis=1
            )

    def prepare(self, chunk: int, pair: int) -> Iterator[None]:
        """What a chunk needs that does not depend on the state; the triangular system unsolved."""
        p, C, K, shift = self.plan, CHUNK, HEAD_DIM, self.plan.shift
        index = chunk * p.pairs + pair
        item = self.items[index]
        count = self.counts[chunk]
        valid = _iota((C, K), 0) < count
        gates = self.load(self.gate, chunk, pair)
        logs = [self.log2_decay(gates[h], 2 * pair + h, valid) for h in (0, 1)]
        sums = self.dot(self.sums, _cat([_cat(self.parts(x)) for x in logs], 1))
        yield
        queries = [self.normalized(x, p.scale) for x in self.load(self.q, chunk, pair)]
        keys = [self.normalized(x) for x in self.load(self.k, chunk, pair, count)]
        yield

        since, columns, decays = [], [], []
        for h in (0, 1):
            log = sums[:C, h * K : h * K + K]  # from the block's start up to and with the token
            factor = jnp.exp2(log + shift if shift else log)
            since.append((keys[h] * factor, queries[h] * factor))
            # Not the anchored factor, whose exponent has lost digits of small gates.
            decay = jnp.exp2(log) if shift else factor
            decays.append([_every_row(decay, last) for last in range(BLOCK - 1, C, BLOCK)])
            if shift is None:
                columns.append(keys[h] * jnp.exp2(sums[C:, h * K : h * K + K]))
            else:
                columns.append(keys[h] * jnp.exp2(-log - shift if shift else -log))
            yield

        products = []  # per block [2 * BLOCK, 2C]: keys, then queries, with the keys so far
        reads, start = [[], []], [None, None]
        past: list[list] = [[], []]  # keys of earlier blocks, decayed until the block starts
        for block in range(NUM_BLOCKS):
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            left = [_cat([x[rows] for x in since[h]]) for h in (0, 1)]
            own = [columns[h][rows] for h in (0, 1)]
            right = past if shift is None else [[*past[h], own[h]] for h in (0, 1)]
            parts = []
            if right[0]:
                paired = _paired(*(self.operand(_cat(x)) for x in right))
                parts.append(self.dot(_cat(left, 1), paired, transposed=True))
            missing = 2 * C - 2 * BLOCK * len(right[0])
            if missing:
                parts.append(jnp.zeros((2 * BLOCK, missing), _F32))
            products.append(_cat(parts, 1))
            for h in (0, 1):
                decay = decays[h][block]
                past[h] = [_rows(x, decay) for x in past[h]]
                past[h].append(own[h] if shift is None else _rows(own[h], decay))
                x = left[h] * 2.0**-shift if shift else left[h]
                reads[h].append(x if block == 0 else _rows(x, start[h]))
                start[h] = decay if block == 0 else start[h] * decay
            yield
        if shift is None:
            for block in range(NUM_BLOCKS):
                for h in (0, 1):
                    rows = slice(block * BLOCK, (block + 1) * BLOCK)
                    first = block * 2 * BLOCK + h * BLOCK
                    inputs = [x[rows] for x in (keys[h], queries[h], logs[h])]
                    products[block] = self.pairwise(inputs, first, products[block])
                    yield

        for h in (0, 1):
            lanes = pl.ds(h * K, K)
            keys_first = [x[part] for part in (slice(BLOCK), slice(BLOCK, None)) for x in reads[h]]
            item.reads[self.now, :, lanes] = self.operand(_cat(keys_first))
            item.decay[self.now, :, lanes] = start[h]
            until_end = _cat(past[h])
            for n, part in enumerate(self.parts(until_end * 2.0**shift if shift else until_end)):
                item.writes[self.now, n, h] = part
        yield

        beta = jnp.take_along_axis(self.betas[chunk][...], 2 * pair + self.head, axis=1)
        kk = jnp.where(self.row > self.column, _cat([x[:BLOCK] for x in products]) * beta, 0.0)
        qk = jnp.where(self.row >= self.column, _cat([x[BLOCK:] for x in products]), 0.0)
        item.qk[self.now] = self.operand(qk)
        item.kk[self.now_of_two] = self.operand(kk)
        diagonal = kk[:BLOCK]
        for block, rows in enumerate(_blocks(kk)):
            diagonal = jnp.where(self.lane_block == block, rows, diagonal)
        self.diagonals[self.now_of_two, pl.ds(index * BLOCK, BLOCK), :] = diagonal

    def pairwise(self, tokens, first_lane, product):
        """A diagonal block whose decays are formed pair by pair, put into [2 * BLOCK, 2C].

        Each is a sum of gates, not a difference of sums, which would lose what follows a huge one.
        """
        k, q, log = tokens
        row, lane = _iota((BLOCK, HEAD_DIM), 0), _iota(product.shape, 1)
        after = jnp.zeros_like(log)  # from the token j up to the row's, where the row is later
        for j in reversed(range(BLOCK)):
            decayed = jnp.exp2(after) * k[j : j + 1]
            pair = [jnp.sum(x * decayed, axis=1, keepdims=True) for x in (k, q)]
            product = jnp.where(lane == first_lane + j, _cat(pair), product)
            after = jnp.where(row >= j, after + log[j : j + 1], 0.0)
        return product

    def substitute(self) -> Iterator[None]:
        """Inverts the diagonal blocks by forward substitution, in float32, all of them at once.

        Row i of every block is one register: blocks of a pair side by side, pairs below each other.
        """
        n = self.plan.items
        lane = _iota((n, 2 * CHUNK), 1)
        inverse = []
        for i in range(BLOCK):
            lower = self.diagonals[self.last_of_two, pl.ds(i, n, stride=BLOCK), :]
            row = jnp.where(lane & (BLOCK - 1) == i, 1.0, 0.0)
            for j in range(i):
                row -= jnp.take_along_axis(lower, (lane & -BLOCK) + j, axis=1) * inverse[j]
            inverse.append(row)
            self.inverses[pl.ds(i, n, stride=BLOCK), :] = row
            if i % 4 == 3:
                yield

    def solve(self, index: int) -> Iterator[None]:
        """From inverses of blocks of 16 rows to those of 32, then of 64, for a pair of heads.

        [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]
        """
        item = self.items[index]
        inverse = self.inverses[pl.ds(index * BLOCK, BLOCK), :]
        zero = jnp.zeros_like(inverse)
        x = [jnp.where(self.lane_block == block, inverse, 0.0) for block in range(NUM_BLOCKS)]
        kk = _blocks(item.kk[self.last_of_two])

        def by_head(rows):  # [BLOCK, 2C] each -> block-diagonal over heads, [2C, 2C]
            rows = [self.operand(r) for r in rows]
            zeros = jnp.zeros_like(rows[0])
            pairs = [((r, zeros), (zeros, r)) for r in rows]
            return _cat([jnp.where(self.first_head, *x) for pair in pairs for x in pair])

        def below(rows, lanes):
            keep = [(self.lane_block >= lo) & (self.lane_block < hi) for lo, hi in lanes]
            rows = zip(rows, keep, strict=True)
            return _cat([jnp.where(m, r, jnp.zeros_like(r)) for r, m in rows])

        def first(rows, lanes, x):  # B A^-1
            halves = [by_head(part) for part in zip(*(self.parts(r) for r in x), strict=True)]
            return _blocks(self.dot(_cat([below(rows, lanes)] * len(halves), 1), _cat(halves)))

        def second(x, y):  # D^-1 times that
            halves = self.parts(_cat(x))
            return _blocks(self.dot(_cat(halves, 1), _cat([by_head(y)] * len(halves))))

        y = first([kk[1], kk[3]], [(0, 1), (2, 3)], x)
        yield
        y = second([x[1], x[3]], [zero, y[0], zero, y[1]])
        yield
        x[1], x[3] = x[1] - y[0], x[3] - y[1]
        y = first(kk[2:], [(0, 2), (0, 2)], [x[0], x[1], zero, zero])
        yield
        y = second(x[2:], [zero, zero, *y])
        yield
        x[2], x[3] = x[2] - y[0], x[3] - y[1]
        beta = self.paired_betas[self.last_of_two, pl.ds(index, 1), :]
        for n, part in enumerate(self.parts(_cat(x) * beta)):
            item.solve[self.last_of_two, :, pl.ds(n * 2 * CHUNK, 2 * CHUNK)] = part

    def carry(self, pair: int) -> Iterator[None]:
        """The outputs of a pair of heads, and its state over the chunks of a step."""
        p, C, K = self.plan, CHUNK, HEAD_DIM
        for chunk in range(p.chunks):
            item = self.items[chunk * p.pairs + pair]
            slot = self.read_slot
            state = self.states[pair]
            both = [self.operand(state[:, pl.ds(h * K, K)]) for h in (0, 1)]
            zero = jnp.zeros_like(both[0])
            both = _cat([_cat([both[0], zero], 1), _cat([zero, both[1]], 1)])
            read = self.dot(item.reads[slot], both, transposed=True)  # [2C, 2V]
            yield
            v = self.load(self.v, chunk, pair, self.finished[chunk])
            wanted = _paired(*(self.operand(v[h] - read[:C, h * K : h * K + K]) for h in (0, 1)))
            solve = item.solve[self.solve_slot]
            delta = self.dot(solve, _cat([wanted] * (solve.shape[1] // (2 * C))))
            yield
            delta = self.parts(delta)
            heads = [[x[:, h * K : h * K + K] for h in (0, 1)] for x in delta]
            o = read[C:] + self.dot(item.qk[slot], _paired(*heads[0]))
            turned = [_cat(_alternate(*x)).T for x in heads]  # [V, 2C]
            yield
            writes = [
                _paired(*(item.writes[slot, n, h] for h in (0, 1))) for n in range(len(delta))
            ]
            # (high + low) (high + low), without the product of the low halves.
            terms = [(0, 0), (1, 0), (0, 1)] if len(delta) > 1 else [(0, 0)]
            written = self.dot(
                _cat([turned[i] for i, _ in terms], 1), _cat([writes[j] for _, j in terms])
            )  # [V, 2K]
            yield
            state[...] = _rows(state[...], item.decay[slot]) + written
            self.store(self.o, chunk, pair, [o[:, :K], o[:, K:]], self.finished[chunk])


def _interleave(tasks: list[Iterator]) -> None:
    """Runs generators side by side, a stage of each in turn.

    What a generator yields, if anything, says whether it may go on.
    """
    active: list = [(stages, None) for stages in tasks]
    while active:
        remaining = []
        for stages, ready in active:
            if ready is None or ready():
                try:
                    ready = next(stages)
                except StopIteration:
                    continue
            remaining.append((stages, ready))
        active = remaining


def _after(wait_for: list, stages: Iterator) -> Iterator:
    yield lambda: bool(wait_for)
    yield from stages


def _then(stages: Iterator, done: list) -> Iterator:
    yield from stages
    done.append(True)


def _tasks(this: _Step) -> list[Iterator]:
    """All stages of a step, in the order whose static schedules were the shortest."""
    plan, inverted = this.plan, []
    tasks = [_then(this.substitute(), inverted)]
    tasks += [this.carry(pair) for pair in range(plan.pairs)]
    for index in range(plan.items):
        tasks.append(this.prepare(*divmod(index, plan.pairs)))
        tasks.append(_after(inverted, this.solve(index)))
    return tasks


def kernel(
    num_valid,
    _last_read,
    q,
    k,
    gate,
    beta,
    v,
    gate_constants,
    initial_state,
    o,
    final_state,
    *scratch,
    plan: Plan,
    work: Callable,
    steps: int,
    groups: int,
):
    core, step = pl.program_id(0), pl.program_id(1)
    items, states = scratch[:2]

    def counts(lag):
        row, _, n = work(core, step, lag)
        first = n * plan.chunks * CHUNK
        chunks = range(plan.chunks)
        return [jnp.clip(num_valid[row] - first - c * CHUNK, 0, CHUNK) for c in chunks]

    prepared, solved, finished = (counts(lag) for lag in range(LAG + 1))
    row, _, n = work(core, step, LAG)
    first_group = work(core, step, 0)[1]
    K = HEAD_DIM

    @pl.when(step == 0)
    def neutral_slots():
        for item in items:
            for ref in (item.reads, item.writes, item.qk, item.solve):
                ref[ref.shape[0] - 1] = jnp.zeros(ref.shape[1:], ref.dtype)
            item.decay[3] = jnp.ones(item.decay.shape[1:], _F32)

    @pl.when(n == 0)
    def first_of_a_row():
        for pair, state in enumerate(states):
            for h in (0, 1):
                state[:, pl.ds(h * K, K)] = initial_state[0, 2 * pair + h].T

    active = (prepared[0] > 0) | (solved[0] > 0) | (finished[0] > 0)

    @pl.when(active)
    def compute():
        any_finished = finished[0] > 0
        slots = (
            lax.rem(step, 3),
            lax.rem(step, 2),
            lax.rem(step + 1, 2),
            jnp.where(any_finished, lax.rem(step + 1, 3), 3),
            jnp.where(any_finished, lax.rem(step, 2), 2),
        )
        refs = (q, k, gate, beta, v, gate_constants, o)
        this = _Step(plan, refs, prepared, finished, slots, scratch)
        this.prepare_beta(None if groups == 1 else first_group * plan.heads)
        _interleave(_tasks(this))

    @pl.when(jnp.logical_not(active))
    def only_padding():
        o[...] = jnp.zeros(o.shape, o.dtype)

    @pl.when(n == steps - 1)
    def last_of_a_row():
        for pair, state in enumerate(states):
            for h in (0, 1):
                head = 2 * pair + h
                new = state[:, pl.ds(h * K, K)].T
                final_state[0, head] = jnp.where(num_valid[row] > 0, new, initial_state[0, head])
