"""The header of a safetensors file, checked before anything that it says is used.

Headers are parsed here rather than by the safetensors package because its NumPy side knows neither
bfloat16 nor FP8 in every version, and because a damaged download should be named by file and byte.
A header may be damaged with intent: what it can make its reader allocate is bounded.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from glm5next_jax import bounded_json, files
from glm5next_jax.bounded_json import Limits
from glm5next_jax.errors import CheckpointError, Failure, printable

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
# The format allows 100 MB. In one file, all 76,108 tensors of the released model would take 15 MB
# and 0.9 million values; twice that is accepted.
LIMITS = Limits(32 << 20, 2_000_000)
MAX_RANK = 16
MAX_FAULTS = 1000  # that are looked for: a header made to have many should not take minutes
MAX_NAME = 512  # characters; names of the released model have 90 at most
_FIELDS = ("dtype", "shape", "data_offsets")
_MALFORMED = "dtype, shape and data_offsets in the header"


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One stored tensor, as its file's header describes it.

    Attributes:
      name: name in the file.
      dtype: safetensors' name of the dtype, such as "BF16" or "F8_E4M3".
      shape: dimensions.
      file: name of the file, within its directory.
      offset: position of the first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_header(path: epath.Path) -> list[TensorInfo]:
    """The tensors of one safetensors file, by position.

    Raises:
      CheckpointError: no regular file, truncated, or its header contradicts itself, the format or
        the file's size, or is larger than `LIMITS`. Up to `MAX_FAULTS` are reported.
    """
    pairs, data_start, size = _read_pairs(path)
    failures: list[Failure] = []
    tensors: dict[str, TensorInfo] = {}
    num_metadata = 0
    for name, fields in pairs:
        if len(failures) == MAX_FAULTS:
            break
        if name == "__metadata__":
            num_metadata += 1
            if num_metadata > 1 or not _is_metadata(fields):
                failures.append(
                    Failure("file", path.name, name, "a malformed entry", "one object of strings")
                )
            continue
        parsed = _parse_entry(name, fields, path.name, data_start)
        if isinstance(parsed, Failure):
            failures.append(parsed)
        elif name in tensors:
            failures.append(
                Failure("duplicate", path.name, name, "two entries in one header", "one")
            )
        else:
            tensors[name] = parsed
    ordered = sorted(tensors.values(), key=lambda info: (info.offset, info.num_bytes))
    if not failures:  # the faults of entries explain those of the places between them
        failures = _misplaced(ordered, path.name, data_start, size)
    if failures:
        raise CheckpointError(f"{path}: damaged", failures)
    return ordered


def _read_pairs(path: epath.Path) -> tuple[tuple[tuple[str, Any], ...], int, int]:
    """The header's entries, objects as tuples of pairs; where the data starts; the file's bytes."""
    size = files.size_of(path)
    prefix = files.read_range(path, 0, 8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        expected = f"a header of {length} bytes" if len(prefix) == 8 else "at least 8 bytes"
        raise _damaged(path, f"{size} bytes", f"{expected} (truncated or not safetensors)")
    if length > LIMITS.num_bytes:
        raise _damaged(path, f"a header of {length} bytes", f"at most {LIMITS.num_bytes}")
    data = files.read_range(path, 8, length)
    if len(data) < length:
        raise _damaged(path, f"{8 + len(data)} bytes", f"{size} bytes (it shrank meanwhile)")
    try:
        pairs = bounded_json.parse(data, LIMITS, objects="pairs")
    except ValueError as error:
        raise _damaged(path, f"a header that is no JSON ({error})", "safetensors") from None
    if not data.startswith(b"{"):  # the format allows no space before it
        raise _damaged(path, "a header that is no JSON object", "safetensors")
    return pairs, 8 + length, size


def _parse_entry(name: str, fields: Any, file: str, data_start: int) -> TensorInfo | Failure:
    """One entry of a header, its nested objects given as tuples of pairs."""
    if len(name) > MAX_NAME or not _is_unicode(name):
        found = f"a name of {len(name)} characters"
        return Failure("file", file, name, found, f"valid Unicode, {MAX_NAME} at most")
    malformed = Failure("file", file, name, "a malformed entry", _MALFORMED)
    if not isinstance(fields, tuple):
        return malformed
    values = dict(fields)
    if len(values) != len(fields) or not all(field in values for field in _FIELDS):
        return malformed
    dtype, shape, offsets = (values[field] for field in _FIELDS)
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        return malformed
    if len(offsets) != 2 or len(shape) > MAX_RANK:
        return malformed
    if dtype not in DTYPES:
        return Failure("dtype", file, name, f"dtype {printable(dtype)}", "a dtype known here")
    begin, end = offsets
    info = TensorInfo(name, dtype, tuple(shape), file, data_start + begin)
    # An empty tensor may still have a dimension that no array can have.
    if math.prod(max(n, 1) for n in shape) * DTYPES[dtype].itemsize >= 2**63:
        return Failure("file", file, name, f"the shape {shape}", "less than 2**63 bytes")
    if end - begin != info.num_bytes:
        return Failure(
            "file", file, name, f"{end - begin} bytes", f"{info.num_bytes} bytes for {info}"
        )
    return info


def _misplaced(ordered: list[TensorInfo], file: str, data_start: int, size: int) -> list[Failure]:
    """Overlaps, gaps, and an end that is not the file's."""
    failures, end = [], data_start
    for info in ordered:
        if info.offset != end:
            what = "an overlap with" if info.offset < end else "a gap before"
            found = f"{what} the bytes of this tensor (it starts at byte {info.offset})"
            return [Failure("file", file, info.name, found, f"a start at byte {end}")]
        end = info.offset + info.num_bytes
    if end != size:
        what = "truncated" if size < end else "bytes that belong to no tensor at its end"
        failures.append(Failure("file", file, "", f"{size} bytes", f"{end} bytes ({what})"))
    return failures


def _is_metadata(value: Any) -> bool:
    """Whether it is an object of strings, or null: not used here, but others refuse all else."""
    if value is None:
        return True
    return isinstance(value, tuple) and all(
        isinstance(text, str) and _is_unicode(key + text) for key, text in value
    )


def _are_sizes(values: Any) -> bool:
    """Whether it is a list of numbers that a position in a file may have: no bool, no 1e3."""
    if not isinstance(values, list):
        return False
    for n in values:  # a plain loop: this runs for every tensor
        if type(n) is not int or not 0 <= n < 2**63:
            return False
    return True


def _is_unicode(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which no file name or terminal takes
        return False
    return True


def _damaged(path: epath.Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged", [Failure("file", path.name, "", found, expected)])
