"""Rounding to FP8 against one element at a time, from the definition of e4m3."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from convert import quantize as module
from convert.quantize import quantize
from glm5next_jax.checkpoint import quantized
from tests.checkpoint.released import BF16, FP8

SMALLEST = 2.0**-126


def magnitude(code: int) -> float:
    """Of a code without sign: 4 bits of exponent with bias 7, 3 of mantissa."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


TABLE = [magnitude(code) for code in range(127)]


def nearest(x: float) -> int:
    """The code nearest to x, of two equally near the even one."""
    distances = [abs(abs(x) - value) for value in TABLE]
    best = min(distances)
    code = min((i for i, d in enumerate(distances) if d == best), key=lambda i: i % 2)
    return code | (0x80 if math.copysign(1, x) < 0 else 0)


def oracle(x: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    x = x.astype(np.float32)
    rows, columns = block
    grid = tuple(math.ceil(n / b) for n, b in zip(x.shape, block, strict=True))
    codes, factors = np.empty(x.shape, np.uint8), np.empty(grid, np.float32)
    for i, j in np.ndindex(grid):
        largest = max(
            abs(float(x[r, c]))
            for r in range(i * rows, min((i + 1) * rows, x.shape[0]))
            for c in range(j * columns, min((j + 1) * columns, x.shape[1]))
        )
        # Rounding the float64 quotient once more gives the float32 quotient.
        factors[i, j] = max(np.float32(largest / 448), np.float32(SMALLEST)) if largest else 1
    for r, c in np.ndindex(x.shape):
        factor = float(factors[r // rows, c // columns])
        codes[r, c] = nearest(float(np.float32(float(x[r, c]) / factor)))
    return codes, factors


@st.composite
def matrices(draw):
    """Odd shapes; blocks of all magnitudes beside each other, some of zeros."""
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    low, high = draw(st.sampled_from([(-3, 3), (-149, -120), (-149, 120), (0, 0)]))
    scale = 2.0 ** rng.integers(low, high + 1, (rows, 1)).repeat(columns, axis=1)
    x = (rng.normal(size=(rows, columns)) * scale).astype(np.float32)
    x[:: draw(st.sampled_from([1, 3, 50]))] *= draw(st.sampled_from([0.0, -0.0, 1.0]))
    return x.astype(draw(st.sampled_from([np.float32, BF16])))


BLOCKS = st.tuples(st.sampled_from([1, 4, 7, 16, 128]), st.sampled_from([1, 3, 16, 128]))


@hypothesis.given(x=matrices(), block=BLOCKS)
def test_codes_and_factors(x, block):
    codes, factors = quantize(x, block)
    want_codes, want_factors = oracle(x, block)
    assert codes.dtype == FP8 and factors.dtype == np.float32
    np.testing.assert_array_equal(factors, want_factors)
    np.testing.assert_array_equal(codes.view(np.uint8), want_codes)


@hypothesis.given(x=matrices(), block=BLOCKS)
def test_error_is_half_a_step_at_most(x, block):
    codes, factors = quantize(x, block)
    spread = np.kron(factors.astype(np.float64), np.ones(block))[: x.shape[0], : x.shape[1]]
    exact = x.astype(np.float64)
    got = np.array([TABLE[c & 0x7F] for c in codes.view(np.uint8).flat]).reshape(x.shape)
    size = np.maximum(np.abs(exact) / spread, 2.0**-6)
    step = 2.0 ** (np.floor(np.log2(size)) - 3)
    error = np.abs(got * spread - np.abs(exact))
    # The quotient is rounded to float32 first, and the factor makes 448 of the largest to rounding.
    assert (error <= (step / 2 + size * 2.0**-23) * spread).all()


@hypothesis.given(x=matrices(), block=BLOCKS, dtype=st.sampled_from([np.float32, BF16]))
def test_a_second_time_changes_no_code(x, block, dtype):
    codes, factors = quantize(x, block)
    values = quantized.dequantize(codes, factors, dtype, block=block)
    again, factors_again = quantize(values, block)
    if dtype == np.float32 or (factors > 2.0**-110).all():  # bfloat16 has fewer small numbers
        np.testing.assert_array_equal(again.view(np.uint8), codes.view(np.uint8))
    if dtype == np.float32:
        kept = (np.abs(values).max() > 0) & (factors_again != 1)
        close = np.abs(factors_again - factors) <= np.spacing(factors)
        assert (close | ~kept).all()


def test_every_code_every_middle_and_their_neighbours():
    table = np.array(TABLE, np.float32)
    middles = (table[1:] + table[:-1]) / 2
    neighbours = [np.nextafter(middles, np.float32(end)) for end in (0, 1000)]
    x = np.concatenate([table, middles, *neighbours])
    x = np.concatenate([x, -x])[None]
    assert x.max() == 448
    codes, factors = quantize(x, (1, x.size))
    assert factors.item() == 1
    assert codes.view(np.uint8)[0].tolist() == [nearest(float(value)) for value in x[0]]


@pytest.mark.parametrize(
    "largest, factor, code",
    [
        (0.0, 1.0, 0x00),
        (-0.0, 1.0, 0x80),
        (448 * SMALLEST, SMALLEST, 0x7E),
        (64 * SMALLEST, SMALLEST, nearest(64)),  # the quotient by 448 would be subnormal
        (2.0**-149, SMALLEST, 0x00),  # 2^-23 of the smallest factor
        (3.0e38, 3.0e38 / 448, 0x7E),
        (3.4028235e38, 3.4028235e38 / 448, 0x7E),
    ],
)
def test_the_ends_of_the_range(largest, factor, code):
    x = np.zeros((3, 3), np.float32)
    x[1, 1] = largest
    codes, factors = quantize(x, (3, 3))
    assert factors.item() == np.float32(factor)
    assert codes.view(np.uint8)[1, 1] == code
    assert (np.delete(codes.view(np.uint8), 4) == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_what_is_not_finite_spoils_its_block_and_no_other(bad, dtype):
    x = np.ones((5, 9), dtype)
    want_codes, want_factors = quantize(x, (4, 4))
    x[1, 5] = bad
    codes, factors = quantize(x, (4, 4))
    inside = np.zeros(x.shape, bool)
    inside[:4, 4:8] = True
    assert (codes.view(np.uint8)[inside] == 0x7F).all() and np.isnan(factors[0, 1])
    assert (codes.view(np.uint8)[~inside] == want_codes.view(np.uint8)[~inside]).all()
    factors[0, 1] = want_factors[0, 1]
    np.testing.assert_array_equal(factors, want_factors)


def test_long_rows_are_worked_on_in_steps(monkeypatch):
    x = np.random.default_rng(3).normal(size=(130, 300)).astype(np.float32)
    want = quantize(x)
    monkeypatch.setattr(module, "_STEP_ELEMENTS", 1000)
    for a, b in zip(quantize(x), want, strict=True):
        assert a.tobytes() == b.tobytes()


def test_slices_and_empty_matrices():
    x = np.random.default_rng(4).normal(size=(20, 30)).astype(np.float32)
    for a, b in zip(quantize(x[3:, ::2], (8, 8)), quantize(x[3:, ::2].copy(), (8, 8)), strict=True):
        assert a.tobytes() == b.tobytes()
    for shape in ((0, 5), (5, 0)):
        codes, factors = quantize(np.zeros(shape, np.float32), (4, 4))
        assert codes.shape == shape and factors.size == 0


@pytest.mark.parametrize(
    "x, block, message",
    [
        (np.zeros(3, np.float32), (4, 4), "expected a float32 or bfloat16 matrix"),
        (np.zeros((3, 3), np.float64), (4, 4), "expected a float32 or bfloat16 matrix"),
        (np.zeros((3, 3), np.float32), (0, 4), "block="),
    ],
)
def test_arguments_are_checked(x, block, message):
    with pytest.raises(ValueError, match=message):
        quantize(x, block)
