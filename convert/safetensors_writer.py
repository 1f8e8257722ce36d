"""Writing safetensors files of a bounded size, piece by piece, with a checksum of each.

A file is: 8 bytes with the length of the header, the header as JSON padded to 8 bytes, and the
tensors' bytes in the order of the header.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from etils import epath

from convert import files
from convert.journal import Record
from glm5next_jax.checkpoint.safetensors_reader import DTYPES, TensorInfo

SCALE_SUFFIX = "_scale_inv"
_PIECE_BYTES = 16 << 20
_METADATA = {"__metadata__": {"format": "pt"}}


class Tensor(Protocol):
    """What a header says of a tensor. `OutTensor` is one, and the reader's `TensorInfo`."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=Tensor)


@dataclasses.dataclass(frozen=True)
class OutTensor:
    """A tensor to be written.

    Attributes:
      name: in the file.
      dtype: safetensors' name of it, such as "BF16".
      shape: dimensions.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class OutFile(Generic[T]):
    """A file to be written: its name, and its tensors in the order of their bytes."""

    name: str
    tensors: tuple[T, ...]

    @functools.cached_property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return len(header(self.tensors)) + sum(tensor.num_bytes for tensor in self.tensors)


def header(tensors: Iterable[Tensor]) -> bytes:
    """What stands before the tensors' bytes in a file."""
    entries, end = dict(_METADATA), 0
    for tensor in tensors:
        entries[tensor.name], end = _entry(tensor, end), end + tensor.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry(tensor: Tensor, start: int) -> dict[str, Any]:
    offsets = [start, start + tensor.num_bytes]
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}


def plan_files(tensors: Iterable[T], max_bytes: int, stem: str) -> list[OutFile[T]]:
    """Distributes tensors over files STEM-00001-of-0000N.safetensors, in their order.

    Args:
      tensors: what is to be written. `X_scale_inv` right behind `X` goes into X's file: loaders
        that take a file at a time need both.
      max_bytes: of a file, with its header. A tensor (with its scale) that is larger has a file of
        its own.
      stem: how the names begin.
    """
    groups: list[list[T]] = []
    for tensor in tensors:
        if groups and tensor.name == groups[-1][0].name + SCALE_SUFFIX:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    empty = len(header(())) + 8  # with the most that padding adds
    parts: list[list[T]] = []
    data = text = 0
    for group in groups:
        size = sum(tensor.num_bytes for tensor in group)
        if parts:
            more = _entries_bytes(group, data)
            if empty + text + more + data + size <= max_bytes:
                parts[-1] += group
                data, text = data + size, text + more
                continue
        parts.append(list(group))
        data, text = size, _entries_bytes(group, 0)
    return [
        OutFile(f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors", tuple(part))
        for number, part in enumerate(parts, 1)
    ]


def _entries_bytes(tensors: Iterable[Tensor], start: int) -> int:
    """What the entries of tensors add to a header."""
    count = 0
    for tensor in tensors:
        entry = {tensor.name: _entry(tensor, start)}
        text = json.dumps(entry, separators=(",", ":"))
        count += len(text.encode()) - 1  # two braces less, a comma more
        start += tensor.num_bytes
    return count


def write_file(
    directory: epath.Path,
    file: OutFile[T],
    chunks_of: Callable[[T], Iterable[np.ndarray | bytes]],
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> Record:
    """Writes one file, which appears whole or not at all (`files.atomic_writer`).

    Args:
      directory: where; made if it is not there.
      file: from `plan_files`.
      chunks_of: gives a tensor's bytes, in pieces of any size; called once for each, in order. See
        `copied_from` for tensors that a reader holds.
      progress: called with the number of bytes of each piece once it is written.

    Returns:
      Size and checksum of the whole file.

    Raises:
      ValueError: `chunks_of` gave more or fewer bytes than the header says.
      OSError: the file cannot be written. Whatever `chunks_of` raises leaves no file, too.
    """
    files.make_directory(directory)
    start = header(file.tensors)
    crc, num_bytes = zlib.crc32(start), len(start)
    with files.atomic_writer(directory / file.name) as handle:
        handle.write(start)
        for tensor in file.tensors:
            count = 0
            for chunk in chunks_of(tensor):
                octets = _octets(chunk)
                handle.write(octets)
                crc = zlib.crc32(octets, crc)
                count += len(octets)
                progress(len(octets))
            if count != tensor.num_bytes:
                raise ValueError(f"{tensor.name}: found {count} bytes, {tensor.num_bytes=}")
            num_bytes += count
    return Record(num_bytes, crc)


def copied_from(reader: Any) -> Callable[[TensorInfo], Iterator[np.ndarray]]:
    """`chunks_of` for tensors of a `SafetensorsDirectory`, byte for byte."""

    def chunks_of(info: TensorInfo) -> Iterator[np.ndarray]:
        for start in range(0, info.num_bytes, _PIECE_BYTES):
            piece = np.empty(min(_PIECE_BYTES, info.num_bytes - start), np.uint8)
            reader.read_bytes(info, start, piece)
            yield piece

    return chunks_of


def _octets(chunk: np.ndarray | bytes) -> memoryview:
    if isinstance(chunk, np.ndarray):
        # NumPy gives no buffer of a dtype that it does not know, such as bfloat16.
        return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
    return memoryview(chunk)
