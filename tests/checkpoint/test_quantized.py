"""Block FP8 against a decoder written from the bit definition of e4m3."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from glm5next_jax.checkpoint import quantized
from tests.checkpoint.released import BF16, FP8


def decode(code: int) -> float:
    """e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; only all ones are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


TABLE = np.array([decode(code) for code in range(256)])


def round_once(x, bits: int):
    """Float64 to the nearest value with `bits` bits of significand, ties to even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)


def oracle(codes: np.ndarray, scale: np.ndarray, block) -> np.ndarray:
    """The float32 product, as float64; one element at a time."""
    out = np.empty(codes.shape)
    for index in np.ndindex(codes.shape):
        place = (*index[:-2], index[-2] // block[0], index[-1] // block[1])
        out[index] = TABLE[codes[index]] * np.float64(scale[place])
    return round_once(out, 24)  # exact in float64: 4 bits times 24


def test_every_code():
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for given in (codes, codes.view(FP8)):
        got = quantized.dequantize(given, np.ones((1, 1), np.float32), np.float32)
        np.testing.assert_array_equal(got, TABLE.reshape(16, 16).astype(np.float32))
        assert np.signbit(got[8, 0]) and got[8, 0] == 0  # -0.0
    assert quantized.count_nan_codes(codes) == 2
    assert quantized.count_nan_codes(np.array([0x7F, 0xFF, 0x7E, 0xFE, 0, 0x7F], np.uint8)) == 3
    assert np.nanmax(TABLE) == 448


@hypothesis.given(
    lead=st.sampled_from([(), (1,), (3,)]),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    block=st.tuples(st.sampled_from([1, 4, 7, 16, 128]), st.sampled_from([1, 3, 16, 128])),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes_and_partial_blocks(lead, rows, columns, block, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (*lead, rows, columns), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1
    grid = (*lead, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    scale = np.exp(rng.normal(-6, 3, grid)).astype(np.float32)
    want = oracle(codes, scale, block)

    got = quantized.dequantize(codes, scale, np.float32, block=block)
    np.testing.assert_array_equal(got.astype(np.float64), want)

    out = np.empty(codes.shape, BF16)
    assert quantized.dequantize(codes, scale, BF16, block=block, out=out) is out
    np.testing.assert_array_equal(out.astype(np.float64), round_once(want, 8))

    assert quantized.block_shape(codes.shape, grid, block) == block


def test_float32_never_passes_through_bfloat16():
    scale = np.full((1, 1), 1 + 2**-23, np.float32)
    got = quantized.dequantize(np.full((1, 1), 0x38, np.uint8), scale, np.float32)
    assert got.item() == 1 + 2**-23  # a bfloat16 on the way would give 1


@pytest.mark.parametrize(
    "code, scale, wanted, by_rounding_twice",
    [
        # 1.125 x (1 + 2^-8 + 2^-20): just above the midpoint that a bfloat16 factor falls below.
        (0x39, 1 + 2.0**-8, 1.125 * (1 + 2.0**-8), 1.125),
        # 1.875 x 1.00390625 = 1.88232421875 -> 1.8828125; with the factor rounded first, 1.875.
        (0x3F, 1.00390625, 1.8828125, 1.875),
        # The factor 1.01171875 lies between two bfloat16 numbers, 1.0078125 and 1.015625.
        (0x38, 1.01171875 + 2.0**-20, 1.015625, 1.015625),
    ],
)
def test_bfloat16_is_rounded_once(code, scale, wanted, by_rounding_twice):
    product = decode(code) * np.float32(scale)
    once = round_once(np.float64(product), 8)
    twice = round_once(decode(code) * round_once(np.float64(scale), 8), 8)
    assert (once, twice) == (round_once(np.float64(wanted), 8), by_rounding_twice)
    got = quantized.dequantize(
        np.full((2, 2), code, np.uint8), np.full((1, 1), scale, np.float32), BF16
    )
    np.testing.assert_array_equal(got.astype(np.float64), np.full((2, 2), once))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_stay_nan(code):
    codes = np.full((3, 3), 0x38, np.uint8)
    codes[1, 2] = code
    for dtype in (np.float32, BF16):
        got = quantized.dequantize(codes, np.ones((1, 1), np.float32), dtype)
        want = np.zeros((3, 3), bool)
        want[1, 2] = True
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), want)


@pytest.mark.parametrize(
    "shape, grid, configured, wanted",
    [
        ((4096, 2048), (32, 16), (128, 128), (128, 128)),
        ((200, 130), (2, 2), (128, 128), (128, 128)),  # partial blocks at both edges
        ((1, 1), (1, 1), (128, 128), (128, 128)),
        ((64, 32), (4, 2), (128, 128), (16, 16)),  # the grid decides
        ((64, 32), (4, 2), (16, 16), (16, 16)),
        ((4096, 2048), (1, 1), (128, 128), (4096, 2048)),  # one factor for the whole
        ((3, 256, 128), (3, 2, 1), (128, 128), (128, 128)),
        ((2048, 4096), (32, 16), (128, 128), None),  # transposed
        ((4096, 2048), (32, 17), (128, 128), None),
        ((4096, 2048), (512,), (128, 128), None),
        ((4096,), (32,), (128, 128), None),
        ((4096, 2048), (0, 16), (128, 128), None),
        ((3, 256, 128), (2, 2, 1), (128, 128), None),
    ],
)
def test_block_shape(shape, grid, configured, wanted):
    assert quantized.block_shape(shape, grid, configured) == wanted


def test_a_grid_that_does_not_fit_is_refused():
    codes = np.zeros((200, 100), np.uint8)
    with pytest.raises(ValueError, match=r"scale.shape=\(1, 1\).*codes.shape=\(200, 100\)"):
        quantized.dequantize(codes, np.ones((1, 1), np.float32), np.float32)
