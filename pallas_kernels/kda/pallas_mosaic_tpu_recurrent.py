"""Recurrent KDA as one Pallas kernel for TPU: few tokens per row, the state updated where it lies.

A step of the grid has the heads of one row, or 16 of them. What bounds it is the state, which is
read and written once, by copies that the kernel starts itself: while a step computes, the state of
the next row that has tokens comes in and those of the rows before go out. Rows without tokens take
part in none of this.

A token's k, q and decay lie along lanes, but a state [K, V] has K along sublanes: each of them has
to become a matrix [K, V] of equal columns. The rows of all heads are transposed at once; what is
left is to spread one lane over 128, for which the unit that moves lanes is too slow. So it spreads
the decays only. k and q, as they came in, are spread by the matrix unit: a product with a matrix of
zeros and a single one per column is exact in bfloat16. (A float32 input goes through it in three
parts, which add up to it.) The arithmetic itself is float32 on the vector unit.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import count_valid, platform
from pallas_kernels.kda.inputs import L2_NORM_EPS

HEAD_DIM = 128  # lanes of a register
MOST_TOKENS = 16
_HEADS = 16  # the most in a step
_RING = 2  # states after a token that are leaving, where all of them are wanted
_MOST_ZEROS = 16  # copies of zeros that are under way
_VMEM_LIMIT = 56 * 2**20  # of the 64 MiB that the smallest of the supported chips has
_F32 = jnp.float32

# Scalars that a step leaves for the next.
_SLOT = 0  # the one that it takes
_ZEROS = 1  # copies of zeros under way
_AFTER_TOKENS = 2  # copies started from the ring
_LEAVING = 3  # and on: of each slot, how many copies leave it


def num_cores() -> int:
    """TensorCores that share a grid; 1 where the chip is not known."""
    return pltpu.get_tpu_info().num_cores if pltpu.is_tpu_device() else 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static side of a launch."""

    T: int
    H: int
    heads: int  # in a step
    cores: int
    rows: int  # of a core
    groups: int  # of heads, of a core in a row
    split_heads: bool  # cores share each row, else they share the rows
    heads_apart: bool  # inputs are [B, T, H, K], not [B, T, H*K]
    parts: int  # of bfloat16, that make up a q or k
    lower_bound: float | None
    scale: float
    return_states: bool

    def place(self, core, row, group):
        """The row and the first head of a step."""
        if self.heads == self.H:
            group = 0
        elif self.split_heads:
            group += core * self.groups
        if self.cores > 1 and not self.split_heads:
            row += core * self.rows
        return row, group * self.heads

    @property
    def slots(self) -> int:
        """Steps whose arrays are in VMEM: one waited for, one worked on, two leaving."""
        return min(4, self.rows * self.groups)

    def of_step(self, first_head):
        """Where a step's heads are in arrays of tokens."""
        if self.heads_apart:
            return pl.ds(first_head, self.heads), slice(None)
        return (pl.ds(first_head * HEAD_DIM, self.heads * HEAD_DIM),)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The shape of a step's q, k, v, gate_logits or o."""
        if self.heads_apart:
            return self.T, self.heads, HEAD_DIM
        return self.T, self.heads * HEAD_DIM


def plan(B: int, T: int, H: int, dtypes, cores: int, **options) -> Plan:
    """How a call is cut into steps. Raises NotImplementedError where the kernel cannot do it."""
    if T > MOST_TOKENS:
        raise NotImplementedError(f"{T=} tokens per row, at most {MOST_TOKENS}")
    if H > _HEADS and H % 8 or H > HEAD_DIM:
        raise NotImplementedError(f"{H=}, only up to {_HEADS} or a multiple of 8 up to {HEAD_DIM}")
    for dtype in dtypes:
        if dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(f"inputs in {jnp.dtype(dtype).name}")
    heads = H if H <= _HEADS else _HEADS if H % _HEADS == 0 else 8
    split_heads = cores > 1 and B % cores > 0
    if split_heads and H // heads % cores and heads == 16:
        heads = 8
    if split_heads and H // heads % cores:
        cores, split_heads = 1, False
    return Plan(
        T=T,
        H=H,
        heads=heads,
        cores=cores,
        rows=B if split_heads else B // cores,
        groups=H // heads // (cores if split_heads else 1),
        split_heads=split_heads,
        parts=1 if all(dtype == jnp.bfloat16 for dtype in dtypes[:2]) else 3,
        **options,
    )


@dataclasses.dataclass(frozen=True)
class _Tables:
    """VMEM for what a step makes of its tokens, and for constants."""

    inputs: Any  # [4, T, 16, K] q, k, v, gate_logits in float32
    beta: Any  # [T, H] beta_logits in float32
    o: Any  # [T, 16, V]
    rows: Any  # [4, 16, V] of a token, see `_prepare`
    turned: Any  # [K, 2 * parts * 16] k, then q of a token
    decay: Any  # [K, 16] of a token
    rate: Any  # [H / heads, 16, K] A_log in every lane
    bias: Any  # [H / heads, 16, K]

    @staticmethod
    def shapes(plan: Plan):
        T, K, V, groups = plan.T, HEAD_DIM, HEAD_DIM, plan.H // plan.heads
        return [
            pltpu.VMEM((4, T, _HEADS, K), _F32),
            pltpu.VMEM((T, plan.H), _F32),
            pltpu.VMEM((T, _HEADS, V), _F32),
            pltpu.VMEM((4, _HEADS, V), _F32),
            pltpu.VMEM((K, 2 * plan.parts * _HEADS), jnp.bfloat16),
            pltpu.VMEM((K, _HEADS), _F32),
            pltpu.VMEM((groups, _HEADS, K), _F32),
            pltpu.VMEM((groups, _HEADS, K), _F32),
        ]


def _iota(shape, axis):
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _repeat(n, body):
    lax.fori_loop(0, n, lambda i, _: body(i), None)


def _constants(plan: Plan, A_log, dt_bias, tables: _Tables):
    for head in range(plan.H):
        group, h = divmod(head, plan.heads)
        tables.rate[group, h : h + 1] = jnp.full((1, HEAD_DIM), A_log[head], _F32)
        tables.bias[group, h : h + 1] = dt_bias[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]
    if plan.heads < _HEADS:  # the heads that are not there must not be NaN in a product
        tables.inputs[...] = jnp.zeros(tables.inputs.shape, _F32)


def _stage(plan: Plan, copies: "_Copies", slot, tables: _Tables):
    """The tokens of a step in float32, with heads along sublanes."""
    *inputs, beta = (x.at[slot] for x in copies.input_slots)
    for i, x in enumerate(inputs):
        if plan.heads_apart:
            tables.inputs[i, :, : plan.heads] = x[...].astype(_F32)
            continue
        for h in range(plan.heads):
            head = x[:, h * HEAD_DIM : (h + 1) * HEAD_DIM]
            tables.inputs[i, :, h] = head.astype(_F32)
    tables.beta[...] = beta[...].astype(_F32)


def _bfloat16_parts(x, parts):
    """Arrays in bfloat16 whose sum is x, which is float32; one is enough if x was bfloat16."""
    found = []
    for _ in range(parts - 1):
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        high = lax.bitcast_convert_type(bits, _F32)
        found.append(high.astype(jnp.bfloat16))
        x = x - high
    return [*found, x.astype(jnp.bfloat16)]


def _prepare(plan: Plan, first_head, t, tables: _Tables):
    """What the heads of a token need.

    With P = sum_k decayed k and R = sum_k decayed q for k and q as they came in, a token is
        E = rows[0] - rows[1] P,   S <- decayed + k E,   o = rows[2] R + rows[3] E.
    """
    q, k, v, gate_logits = (tables.inputs[i, t] for i in range(4))
    turned = [*_bfloat16_parts(k, plan.parts), *_bfloat16_parts(q, plan.parts)]
    tables.turned[...] = jnp.concatenate(turned, axis=0).T

    group = lax.div(jnp.int32(first_head), jnp.int32(plan.heads))
    logits = gate_logits + tables.bias[group]
    rate = jnp.exp(tables.rate[group])
    if plan.lower_bound is None:
        log_decay = -rate * jax.nn.softplus(logits)
    else:
        log_decay = plan.lower_bound * jax.nn.sigmoid(rate * logits)
    tables.decay[...] = jnp.exp(log_decay).T

    def total(x):
        return jnp.sum(x, axis=1, keepdims=True)

    own = _iota((_HEADS, plan.H), 1) == _iota((_HEADS, plan.H), 0) + first_head
    beta = jnp.broadcast_to(tables.beta[pl.ds(t, 1)], own.shape)
    beta = jax.nn.sigmoid(total(jnp.where(own, beta, 0.0)))  # [16, 1]
    by_k = lax.rsqrt(total(k * k) + L2_NORM_EPS)
    by_q = lax.rsqrt(total(q * q) + L2_NORM_EPS) * plan.scale
    rows = (beta * by_k * v, beta * by_k * by_k, by_q, by_q * total(q * k))
    for i, row in enumerate(rows):
        tables.rows[i] = jnp.broadcast_to(row, (_HEADS, HEAD_DIM))


def _update(tables: _Tables, t, h, state):
    """One token of a head, whose state is a ref [K, V]; returns the new state."""
    turned = tables.turned[...]
    lanes = turned.shape[1]
    lane, column = (_iota((lanes, 2 * HEAD_DIM), i) for i in range(2))
    own = (lane & (_HEADS - 1) == h) & ((lane >= lanes // 2) == (column >= HEAD_DIM))
    k_and_q = lax.dot_general(
        turned,
        jnp.where(own, 1.0, 0.0).astype(jnp.bfloat16),
        (((1,), (0,)), ((), ())),
        preferred_element_type=_F32,
    )
    k, q = k_and_q[:, :HEAD_DIM], k_and_q[:, HEAD_DIM:]  # [K, V], equal columns
    decayed = state[...] * tables.decay[:, h : h + 1]
    predicted = jnp.sum(decayed * k, axis=0, keepdims=True)
    recalled = jnp.sum(decayed * q, axis=0, keepdims=True)
    rows = [tables.rows[i, h : h + 1] for i in range(4)]
    change = rows[0] - rows[1] * predicted
    tables.o[t, h : h + 1] = rows[2] * recalled + rows[3] * change
    new_state = decayed + k * change
    state[...] = new_state
    return new_state


def _write_outputs(plan: Plan, n, tables: _Tables, o):
    def valid(x):
        return jnp.where(_iota(x.shape, 0) < n, x, 0.0).astype(o.dtype)

    if plan.heads_apart:
        o[...] = valid(tables.o[:, : plan.heads])
        return
    for h in range(plan.heads):
        o[:, h * HEAD_DIM : (h + 1) * HEAD_DIM] = valid(tables.o[:, h])


class _Copies:
    """Between HBM and VMEM."""

    def __init__(self, plan: Plan, hbm, slots, semaphores):
        *self.inputs, self.states_in, self.o, self.states_out = hbm
        *self.input_slots, self.state_slots, self.o_slots, self.ring, self.zeros = slots
        self.arrived, self.left, self.left_ring, self.left_zeros = semaphores
        self.plan = plan

    def read(self, row, first_head, slot):
        own = self.plan.of_step(first_head)
        sources = [x.at[row, :, *own] for x in self.inputs[:4]]
        sources.append(self.inputs[4].at[row])
        sources.append(self.states_in.at[row, pl.ds(first_head, self.plan.heads)])
        targets = [x.at[slot] for x in (*self.input_slots, self.state_slots)]
        return [
            pltpu.make_async_copy(source, target, self.arrived.at[slot])
            for source, target in zip(sources, targets, strict=True)
        ]

    def write_o(self, row, first_head, slot):
        target = self.o.at[row, :, *self.plan.of_step(first_head)]
        return pltpu.make_async_copy(self.o_slots.at[slot], target, self.left.at[slot])

    def write_zeros(self, row, first_head):
        target = self.o.at[row, :, *self.plan.of_step(first_head)]
        return pltpu.make_async_copy(self.zeros, target, self.left_zeros)

    def write_state(self, row, first_head, slot, t=0):
        heads = pl.ds(first_head, self.plan.heads)
        at = (row, t, heads) if self.plan.return_states else (row, heads)
        target = self.states_out.at[at]
        return pltpu.make_async_copy(self.state_slots.at[slot], target, self.left.at[slot])

    def write_ring(self, row, first_head, i, t=0):
        target = self.states_out.at[row, t, pl.ds(first_head, self.plan.heads)]
        return pltpu.make_async_copy(self.ring.at[i], target, self.left_ring.at[i])


def _kernel(num_valid, A_log, dt_bias, *refs, plan: Plan):
    """One step. Without return_states, the states before and after are the same memory."""
    hbm, slots, semaphores = refs[:8], refs[8:17], refs[17:21]
    bias_arrived, bias, scalars, *tables = refs[21:]
    tables = _Tables(*tables)
    copies = _Copies(plan, hbm, slots, semaphores)
    core, r, g = (pl.program_id(i) for i in range(3))
    place = plan.place(core, r, g)
    n = num_valid[place[0]]
    last_group = g == plan.groups - 1

    def with_work(r):
        """The first row of this core from r on that has tokens, or plan.rows."""
        if plan.return_states:
            return r
        if plan.rows == 1:
            return jnp.where(n > 0, r, 1)

        def tokens(r):
            return num_valid[plan.place(core, jnp.minimum(r, plan.rows - 1), 0)[0]]

        def empty(carry):
            r, n = carry
            return (n == 0) & (r < plan.rows)

        return lax.while_loop(empty, lambda x: (x[0] + 1, tokens(x[0] + 1)), (r, tokens(r)))[0]

    def free(slot):
        """Waits until what a step wrote has left its slot."""
        leaving = scalars[_LEAVING + slot]

        @pl.when(leaving > 0)
        def wait():
            copies.write_o(*place, slot).wait()
            if plan.return_states:
                _repeat(leaving - 1, lambda _: copies.write_state(*place, slot).wait())
            else:
                copies.write_state(*place, slot).wait()
            scalars[_LEAVING + slot] = 0

    def read(r, g, slot):
        @pl.when(r < plan.rows)
        def start():
            free(slot)
            for copy in copies.read(*plan.place(core, r, g), slot):
                copy.start()

    def token(t, slot):
        _prepare(plan, place[1], t, tables)
        ring = None
        if plan.return_states:
            number = scalars[_AFTER_TOKENS]
            scalars[_AFTER_TOKENS] = number + 1
            ring = lax.rem(number, _RING)
            pl.when(number >= _RING)(copies.write_ring(*place, ring).wait)
        for h in range(plan.heads):
            new_state = _update(tables, t, h, copies.state_slots.at[slot, h])
            if plan.return_states:
                copies.ring[ring, h] = new_state
        if plan.return_states:
            copies.write_ring(*place, ring, t).start()

    @pl.when((r == 0) & (g == 0))
    def begin():
        for i in range(_LEAVING + plan.slots):
            scalars[i] = 0
        read(with_work(0), 0, 0)
        copy = pltpu.make_async_copy(dt_bias, bias, bias_arrived)
        copy.start()
        copies.zeros[...] = jnp.zeros(copies.zeros.shape, copies.zeros.dtype)
        copy.wait()
        _constants(plan, A_log, bias, tables)

    def work():
        slot = jnp.int32(0)
        if plan.slots > 1:
            slot = scalars[_SLOT]
            next_slot = jnp.where(slot == plan.slots - 1, 0, slot + 1)
            scalars[_SLOT] = next_slot
            if plan.groups > 1:
                next_row = with_work(jnp.where(last_group, r + 1, r))
                read(next_row, jnp.where(last_group, 0, g + 1), next_slot)
            else:
                read(with_work(r + 1), 0, next_slot)
        for copy in copies.read(*place, slot):
            copy.wait()
        _stage(plan, copies, slot, tables)
        if plan.T == 1 and not plan.return_states:
            token(0, slot)  # without a loop, more of it can overlap
        else:
            _repeat(n, lambda t: token(t, slot))
        _write_outputs(plan, n, tables, copies.o_slots.at[slot])
        copies.write_o(*place, slot).start()
        if plan.return_states:
            _repeat(plan.T - n, lambda i: copies.write_state(*place, slot, n + i).start())
            scalars[_LEAVING + slot] = 1 + plan.T - n
        else:
            copies.write_state(*place, slot).start()
            scalars[_LEAVING + slot] = 2

    def idle():
        copies.write_zeros(*place).start()
        scalars[_ZEROS] += 1

        @pl.when(scalars[_ZEROS] > _MOST_ZEROS)
        def wait():
            copies.write_zeros(*place).wait()
            scalars[_ZEROS] -= 1

    if plan.return_states:
        work()
    else:
        pl.when(n > 0)(work)
        pl.when(n == 0)(idle)

    @pl.when((r == plan.rows - 1) & last_group)
    def finish():
        for slot in range(plan.slots):
            free(slot)
        _repeat(scalars[_ZEROS], lambda _: copies.write_zeros(*place).wait())
        for i in range(_RING if plan.return_states else 0):
            pl.when(scalars[_AFTER_TOKENS] > i)(copies.write_ring(*place, i).wait)


def recurrent_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate_logits: jax.Array,
    beta_logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    initial_state: jax.Array,
    *,
    lower_bound: float | None,
    num_valid: jax.Array | None = None,
    scale: float | None = None,
    return_states: bool = False,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.kda.api.recurrent_kda`. interpret: as in `pl.pallas_call`; None: unless
    the program is for TPUs."""
    B, T, H = beta_logits.shape
    K, V = initial_state.shape[2:]
    if (K, V) != (HEAD_DIM, HEAD_DIM):
        raise NotImplementedError(f"{K=} and {V=}, only {HEAD_DIM}")
    inputs = (q, k, v, gate_logits, beta_logits)
    p = plan(
        B,
        T,
        H,
        [x.dtype for x in inputs],
        num_cores(),
        heads_apart=q.ndim == 4,
        lower_bound=lower_bound,
        scale=K**-0.5 if scale is None else scale,
        return_states=return_states,
    )
    if interpret is None:
        interpret = platform() != "tpu"
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    states = (B, T, H, K, V) if return_states else (B, H, K, V)
    return pl.pallas_call(
        functools.partial(_kernel, plan=p),
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(states, _F32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(p.cores, p.rows, p.groups),
            in_specs=[in_hbm] * 7,
            out_specs=[in_hbm] * 2,
            scratch_shapes=[
                *[pltpu.VMEM((p.slots, *p.tokens), x.dtype) for x in inputs[:4]],
                pltpu.VMEM((p.slots, T, H), beta_logits.dtype),
                pltpu.VMEM((p.slots, p.heads, K, V), _F32),
                pltpu.VMEM((p.slots, *p.tokens), v.dtype),
                pltpu.VMEM((_RING, p.heads if return_states else 1, K, V), _F32),
                pltpu.VMEM(p.tokens, v.dtype),
                pltpu.SemaphoreType.DMA((p.slots,)),
                pltpu.SemaphoreType.DMA((p.slots,)),
                pltpu.SemaphoreType.DMA((_RING,)),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA,
                pltpu.VMEM((1, H * K), _F32),
                pltpu.SMEM((_LEAVING + p.slots,), jnp.int32),
                *_Tables.shapes(p),
            ],
        ),
        input_output_aliases={} if return_states else {8: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_VMEM_LIMIT,
            # Of the copies. All of their places come from `Plan.place`.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="recurrent_kda",
    )(
        count_valid(num_valid, B, T),
        A_log,
        dt_bias.reshape(1, H * K),
        *inputs,
        initial_state,
    )
