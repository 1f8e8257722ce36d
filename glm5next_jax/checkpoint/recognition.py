"""Which stored tensors make up one weight, and in which encoding: by names, dtypes and shapes.

    X.weight BF16, F16, F32                                          plain
    X.weight F8_E4M3, X.weight_scale_inv or X.weight_scale           FP8 blocks
    X.weight U8, X.weight_scale, X.weight_scale_2                    NVFP4 of ModelOpt
    X.weight_packed U8, X.weight_scale, X.weight_global_scale        NVFP4 of compressed-tensors

The companions may lie in other files than the codes. A factor for activations (X.input_scale,
X.input_global_scale) may stand beside codes, and means nothing here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from glm5next_jax.checkpoint import nvfp4, quantized
from glm5next_jax.checkpoint.encodings import Encoding, Fp8Blocks, Nvfp4
from glm5next_jax.checkpoint.safetensors_header import TensorInfo
from glm5next_jax.errors import Failure

SCALE_SUFFIX = "_scale_inv"
FLOATS = ("BF16", "F16", "F32")
FP8 = "F8_E4M3"
_CODES_4BIT = "U8"
_PACKED = "weight_packed"
_COMPANION = re.compile(
    r"\.(weight_packed|weight_scale|weight_scale_2|weight_global_scale|input_scale|"
    r"input_global_scale)$"
)
_ACTIVATION_SCALES = ("input_scale", "input_global_scale")
# Power-of-two factors of 32 weights, as bytes or as what they mean.
_MXFP4_SCALES = ("U8", "F8_E8M0")

_FOREIGN_NAMES = (
    ".qweight", ".qzeros", ".scales", ".g_idx", ".weight_shape", ".weight_zero_point", "_blocks",
    "_scales",
)  # fmt: skip
_FOREIGN_DTYPES = (f".{_PACKED}", ".weight_scale")
_FOREIGN_HINT = (
    "These look like MXFP4, GPTQ or AWQ weights: only BF16, F16, F32, block FP8 (weight with "
    "weight_scale_inv) and NVFP4 are read."
)


@dataclasses.dataclass
class StoredWeight:
    """The stored tensors of one weight.

    Attributes:
      name: by which rules know it: X.weight also where the codes are X.weight_packed.
      weight: the tensor of that name.
      companions: the others, by the last part of their name.
    """

    name: str
    weight: TensorInfo | None = None
    companions: dict[str, TensorInfo] = dataclasses.field(default_factory=dict)

    @property
    def source(self) -> TensorInfo | None:
        """The tensor of the numbers, or of their codes."""
        return self.weight or self.companions.get(_PACKED)

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def tensors(self) -> list[TensorInfo]:
        first = [] if self.weight is None else [self.weight]
        return first + list(self.companions.values())

    @property
    def activation_scales(self) -> list[TensorInfo]:
        return [info for last, info in self.companions.items() if last in _ACTIVATION_SCALES]

    def orphans(self) -> list[Failure]:
        """Companions of codes that are not there."""
        failures = []
        for last, info in self.companions.items():
            packed = last.endswith("_global_scale")
            wanted = f"{self.module}.{_PACKED}" if packed else self.name
            failures.append(
                _failure("scale", info, "a scale without its weight", f"{wanted} beside it")
            )
        return failures


def grouped(tensors: Iterable[TensorInfo], failures: list[Failure]) -> dict[str, StoredWeight]:
    """Weights by name, in the order of their first tensors; names that repeat are failures."""
    weights: dict[str, StoredWeight] = {}
    for info in tensors:
        name, last = _parted(info.name)
        stored = weights.setdefault(name, StoredWeight(name))
        earlier = stored.companions.get(last) if last else stored.weight
        if earlier is not None:
            found = f"a second copy of it (also in {earlier.file})"
            failures.append(_failure("duplicate", info, found))
        elif last:
            stored.companions[last] = info
        else:
            stored.weight = info
    return weights


def _parted(name: str) -> tuple[str, str]:
    """The weight that a tensor belongs to, and which companion of it the tensor is, if one."""
    if name.endswith(SCALE_SUFFIX):
        return name.removesuffix(SCALE_SUFFIX), SCALE_SUFFIX
    match = _COMPANION.search(name)
    return (name, "") if match is None else (f"{name[: match.start()]}.weight", match[1])


@dataclasses.dataclass(frozen=True)
class Recognised:
    """How a weight is stored.

    Attributes:
      shape: of the weight; None where the codes say none.
      title: "plain", or of the encoding.
      encoding: None if plain, or faulty.
    """

    shape: tuple[int, ...] | None
    title: str
    encoding: Encoding | None = None


def encoding_of(
    stored: StoredWeight, block: tuple[int, int], failures: list[Failure]
) -> Recognised:
    """Recognises the encoding of a weight, whose `source` is there.

    Args:
      stored: its tensors.
      block: FP8 block that the config states.
      failures: takes what is wrong with companions, or with codes as such.
    """
    source, companions = stored.source, stored.companions
    assert source is not None
    if source.dtype == FP8 and _PACKED not in companions:
        return _fp8(stored, source, block, failures)
    is_packed = stored.weight is None
    if not is_packed and _PACKED in companions:
        found = f"a second form of the weight, beside {stored.name} ({source})"
        failures.append(_failure("duplicate", companions[_PACKED], found, "one of the two"))
        return Recognised(None, Nvfp4.title)
    if is_packed and source.dtype != _CODES_4BIT:
        expected = f"{_CODES_4BIT}: two NVFP4 codes per byte"
        failures.append(_failure("dtype", source, f"dtype {source.dtype}", expected))
        return Recognised(None, Nvfp4.title)
    if is_packed or (source.dtype == _CODES_4BIT and stored.name.endswith(".weight")):
        return _nvfp4(stored, source, is_packed, failures)
    for info in companions.values():
        found = f"a scale for a weight of {source.dtype}"
        failures.append(_failure("scale", info, found, f"{FP8} or NVFP4 codes"))
    return Recognised(source.shape, "plain")


def fp8_blocks(
    codes: TensorInfo, scale: TensorInfo, block: tuple[int, int], failures: list[Failure]
) -> Fp8Blocks | None:
    """The encoding of FP8 codes with these factors, if they are a grid of blocks.

    Args:
      codes, scale: the two tensors.
      block: see `quantized.block_shape`.
      failures: takes what is wrong with the factors.
    """
    if scale.dtype not in ("F32", "BF16"):  # bfloat16 factors are exact in float32
        failures.append(_failure("dtype", scale, f"dtype {scale.dtype}", "F32 or BF16"))
    found = quantized.block_shape(codes.shape, scale.shape, block)
    if found is None:
        failures.append(
            _failure(
                "scale",
                scale,
                f"a grid of {list(scale.shape)} for a weight of {list(codes.shape)}",
                f"one factor per block of {block[0]} x {block[1]}",
            )
        )
        return None
    return Fp8Blocks(scale, found)


def _fp8(
    stored: StoredWeight, codes: TensorInfo, block: tuple[int, int], failures: list[Failure]
) -> Recognised:
    scales = [
        info for last, info in stored.companions.items() if last in (SCALE_SUFFIX, "weight_scale")
    ]
    for last, info in stored.companions.items():
        if info not in scales and last != "input_scale":
            found = f"a scale of NVFP4 codes beside a weight of {codes.dtype}"
            failures.append(_failure("scale", info, found))
    for info in scales[1:]:
        found = f"a second scale beside {scales[0].name}"
        failures.append(_failure("duplicate", info, found, "one of the two"))
    if not scales:
        expected = f"{stored.name}{SCALE_SUFFIX} beside it"
        failures.append(_failure("scale", codes, "FP8 codes without a scale", expected))
        return Recognised(codes.shape, Fp8Blocks.title)
    encoding = fp8_blocks(codes, scales[0], block, failures)
    return Recognised(codes.shape, Fp8Blocks.title, encoding)


def _nvfp4(
    stored: StoredWeight, codes: TensorInfo, is_packed: bool, failures: list[Failure]
) -> Recognised:
    companions = {last: info for last, info in stored.companions.items() if last != _PACKED}
    scale = companions.pop("weight_scale", None)
    if scale is not None and scale.dtype in _MXFP4_SCALES:
        found = f"dtype {scale.dtype}, as of MXFP4"
        failures.append(_failure("dtype", scale, found, f"{FP8} factors of NVFP4"))
        return Recognised(None, Nvfp4.title)
    last = "weight_global_scale" if is_packed else "weight_scale_2"
    whole = companions.pop(last, None)
    activation = companions.pop(_ACTIVATION_SCALES[is_packed], None)
    for info in companions.values():
        found = f"a scale of another form of weight, beside {codes.name} ({codes})"
        failures.append(_failure("scale", info, found))
    missing = [f"{stored.module}.weight_scale"] if scale is None else []
    missing += [f"{stored.module}.{last}"] if whole is None else []
    if missing:
        found, expected = "NVFP4 codes without their scales", f"{' and '.join(missing)} beside it"
        failures.append(_failure("scale", codes, found, expected))
    for info in (whole, activation):
        if info is None:
            continue
        if info.dtype != "F32":
            failures.append(_failure("dtype", info, f"dtype {info.dtype}", "F32"))
        if info.shape not in ((), (1,)):
            found = f"shape {list(info.shape)}"
            failures.append(_failure("scale", info, found, "one factor for the whole tensor"))
    if len(codes.shape) < 2 or codes.shape[-1] % (nvfp4.GROUP // 2):
        failures.append(
            _failure(
                "shape",
                codes,
                f"shape {list(codes.shape)} of two codes per byte",
                f"[rows, columns / 2] with columns in groups of {nvfp4.GROUP}",
            )
        )
        return Recognised(None, Nvfp4.title)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    if scale is None or whole is None:
        return Recognised(shape, Nvfp4.title)
    if scale.dtype != FP8:
        failures.append(_failure("dtype", scale, f"dtype {scale.dtype}", FP8))
    grid = (*shape[:-1], shape[-1] // nvfp4.GROUP)
    if scale.shape != grid:
        found = f"shape {list(scale.shape)} for a weight of {list(shape)}"
        expected = f"{list(grid)}: one factor per {nvfp4.GROUP} weights of a row"
        failures.append(_failure("scale", scale, found, expected))
    return Recognised(shape, Nvfp4.title, Nvfp4(scale, whole, is_reciprocal=is_packed))


def foreign_hint(failures: Iterable[Failure]) -> str:
    """What to say beside failures that quantised weights of another kind give, else ""."""
    for failure in failures:
        if failure.kind == "unknown" and failure.tensor.endswith(_FOREIGN_NAMES):
            return _FOREIGN_HINT
        if failure.kind == "dtype" and failure.tensor.endswith(_FOREIGN_DTYPES):
            return _FOREIGN_HINT
    return ""


def _failure(kind: str, info: TensorInfo, found: str, expected: str = "") -> Failure:
    return Failure(kind, info.file, info.name, found, expected)
