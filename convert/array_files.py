"""Whether the files of converted arrays are there, and as long as they must be: no data is read."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from glm5next_jax.checkpoint import CheckpointError, native
from glm5next_jax.checkpoint.safetensors_header import DTYPES, TensorInfo
from glm5next_jax.errors import Failure
from glm5next_jax.files import read_json_object

_CHECKSUM_BYTES = 4
_INDEX_ENTRY_BYTES = 16  # where a chunk begins, and its length


def sizes(directory: epath.Path) -> dict[str, int]:
    """Bytes of every file below a local directory, by its path within that."""
    found: dict[str, int] = {}
    folders = [("", os.fspath(directory))]
    while folders:
        prefix, folder = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append((f"{name}/", entry.path))
                else:
                    found[name] = entry.stat().st_size
    return found


def faults(
    directory: epath.Path, present: Mapping[str, int], tensors: Iterable[TensorInfo]
) -> list[Failure]:
    """What is wrong with the arrays of a converted directory, by their metadata and file sizes.

    Args:
      directory: the converted directory, on this machine.
      present: `sizes` of it.
      tensors: its arrays, as its header describes them.
    """
    failures = []
    for info in tensors:
        folder = f"{native.WEIGHTS_NAME}/{info.name}"
        if f"{folder}/zarr.json" not in present:
            failures.append(_failure(info, "no such array", str(info)))
            continue
        try:
            metadata = read_json_object(directory / folder / "zarr.json")
            expected = dict(_files(metadata, info))
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            failures.append(_failure(info, f"a damaged zarr.json ({error!r:.200})", str(info)))
            continue
        missing = [name for name in expected if f"{folder}/{name}" not in present]
        if missing:
            found = f"{len(missing)} of {len(expected)} files missing, such as {missing[0]}"
            failures.append(_failure(info, found, "all of them"))
        for name, size in expected.items():
            found = present.get(f"{folder}/{name}", size)
            if size is not None and found != size:
                failures.append(_failure(info, f"{found} bytes in {name}", f"{size} bytes"))
    return failures


def _files(metadata: Mapping[str, Any], info: TensorInfo) -> Iterator[tuple[str, int | None]]:
    """Files of an array, and how long each is, None where that cannot be told.

    Raises:
      KeyError, TypeError, ValueError: it is not the array that the header describes.
    """
    shape, dtype = tuple(metadata["shape"]), np.dtype(DTYPES[info.dtype])
    if shape != info.shape or metadata["data_type"] != dtype.name:
        raise ValueError(f"{metadata['data_type']} {list(shape)}")
    file = _shape(metadata["chunk_grid"]["configuration"]["chunk_shape"], shape)
    (codec,) = metadata["codecs"]
    chunk = _shape(codec["configuration"]["chunk_shape"], shape)
    inner = [each["name"] for each in codec["configuration"]["codecs"]]
    is_plain = codec["name"] == "sharding_indexed" and inner == ["bytes", "crc32c"]
    chunk_bytes = math.prod(chunk) * dtype.itemsize + _CHECKSUM_BYTES
    num_entries = math.prod(f // c for f, c in zip(file, chunk, strict=True))
    index_bytes = num_entries * _INDEX_ENTRY_BYTES + _CHECKSUM_BYTES
    counts = [range(math.ceil(n / f)) for n, f in zip(shape, file, strict=True)]
    for place in itertools.product(*counts):
        # Chunks that lie beyond the array's edge are not stored.
        num_chunks = math.prod(
            math.ceil(min(n - i * f, f) / c)
            for i, n, f, c in zip(place, shape, file, chunk, strict=True)
        )
        size = num_chunks * chunk_bytes + index_bytes if is_plain else None
        yield "/".join(["c", *map(str, place)]), size


def _shape(value: Sequence[Any], like: tuple[int, ...]) -> tuple[int, ...]:
    if len(value) != len(like) or not all(type(n) is int and n > 0 for n in value):
        raise ValueError(f"the chunk shape {value}")
    return tuple(value)


def _failure(info: TensorInfo, found: str, expected: str) -> Failure:
    return Failure("file", native.WEIGHTS_NAME, info.name, found, expected)
