"""Converted checkpoints: our leaves as zarr arrays that are also one Orbax tree.

config.json          the configuration, in the released form
glm5next_jax.json    written last, so what marks the directory as whole; format, version, all leaves
weights/             Orbax PyTree {leaf path: array}: a zarr3 array per leaf, an expert or up to 64
                     MiB per file, in small chunks with a checksum each, for shards to read
unused/              safetensors files with the tensors that no leaf takes, bytes as they were
tokenizer.json, …    copied
UNFINISHED/          while it is being made; see `convert.journal`
"""

from __future__ import annotations

import math
import os
import pathlib
import threading
from typing import Any

import numpy as np
import tensorstore
from etils import epath

from glm5next_jax.checkpoint.safetensors_header import DTYPES, TensorInfo
from glm5next_jax.errors import CheckpointError, Failure
from glm5next_jax.files import contained_file, is_url, is_within, read_json_object

FORMAT = "glm5next-jax"
VERSION = 3  # 2: q, k and v of linear attention stacked; 3: zarr3, FP8 codes
HEADER_NAME = "glm5next_jax.json"
WEIGHTS_NAME = "weights"
UNUSED_NAME = "unused"
UNFINISHED_NAME = "UNFINISHED"
IDENTITY_NAME = "identity.json"
COPIED_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip
_MAX_RANK = 4
_CONCURRENCY = 4


def absolute(path: str | os.PathLike[str]) -> epath.Path:
    """`path` as Orbax wants it; URLs stay as they are."""
    text = os.fspath(path)
    return epath.Path(text) if is_url(text) else epath.Path(text).expanduser().resolve()


def is_converted(directory: epath.Path) -> bool:
    """Whether a directory is a finished conversion."""
    return (directory / HEADER_NAME).exists()


def refuse_unfinished(directory: epath.Path) -> None:
    """Refuses a directory that a conversion or an export has not finished.

    Raises:
      CheckpointError: with how to finish it.
    """
    if (directory / UNFINISHED_NAME).exists() and not is_converted(directory):
        raise CheckpointError(
            f"{directory}: unfinished: glm5next-convert was stopped while it wrote this directory. "
            "Run the same command again: it continues where it stopped"
        )


def read_header(directory: epath.Path) -> dict[str, Any]:
    """What a converted directory says of itself.

    Raises:
      CheckpointError: a format or version that this code does not read, or a damaged header.
    """
    path = contained_file(directory, HEADER_NAME)
    header = read_json_object(path)
    found = (header.get("format"), header.get("version"))
    if found != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path}: found format and version {found}, expected {(FORMAT, VERSION)}; convert the "
            "released checkpoint again"
        )
    if not isinstance(header.get("leaves"), dict):
        raise CheckpointError(f"{path}: expected an object 'leaves': dtype and shape of each")
    return header


def context() -> tensorstore.Context:
    """How arrays are read and written: what is decoded is used once, so nothing is cached."""
    return tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": _CONCURRENCY},
            "file_io_concurrency": {"limit": _CONCURRENCY},
        }
    )


def array_spec(weights: epath.Path, leaf: str) -> dict[str, Any]:
    """tensorstore's spec of a leaf's array. A chunk that is not there is an error, not zeros."""
    return {"driver": "zarr3", "kvstore": url_of(weights / leaf), "fill_missing_data_reads": False}


def url_of(folder: epath.Path) -> str:
    """tensorstore's URL of a folder; it has drivers of its own for gs:// and s3://."""
    url = os.fspath(folder)
    return f"{url if is_url(url) else pathlib.Path(url).as_uri()}/"


class ConvertedDirectory:
    """The arrays of a converted directory, as `SafetensorsDirectory` is of a released one.

    Read as what they are, zarr arrays, chunk by chunk into the memory of those who ask, by any
    number of threads: Orbax would restore whole arrays, with several copies of them on the host.

    Attributes:
      path: the directory.
      tensors: every array; `file` is the folder that they are in.

    Raises:
      CheckpointError: another format or version, or a damaged header.
    """

    def __init__(self, path: epath.Path):
        self.path = path
        self._weights = absolute(path) / WEIGHTS_NAME
        leaves = read_header(path)["leaves"]
        failures: list[Failure] = []
        tensors = [_described(leaf, fields, failures) for leaf, fields in leaves.items()]
        if not self._weights.is_dir():
            failures.append(Failure("file", WEIGHTS_NAME, "", "no such folder", "the arrays"))
        for folder in (self._weights, self._weights.parent / UNUSED_NAME):
            if not is_within(folder, folder.parent):
                failures.append(Failure("file", folder.name, "", "a link to elsewhere", "a folder"))
        if failures:
            raise CheckpointError(f"{path}: damaged", failures)
        self.tensors = tuple(info for info in tensors if info is not None)
        self._arrays: dict[str, tensorstore.TensorStore] = {}
        self._context = context()
        self._lock = threading.Lock()

    def __enter__(self) -> ConvertedDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrays.clear()

    def granularity(self, info: TensorInfo) -> tuple[int, int]:
        """(rows of one matrix, rows of a chunk): a chunk is decoded whole or not at all."""
        chunk = self._open(info).chunk_layout.read_chunk.shape
        axis = max(len(info.shape) - 2, 0)
        rows = None if chunk is None else chunk[axis]
        assert rows is not None  # zarr always has it
        return info.shape[axis], rows

    def read_rectangle(
        self, info: TensorInfo, width: int, start: int, column: int, out: np.ndarray
    ) -> None:
        """As `SafetensorsDirectory.read_rectangle`, of an array taken as a matrix.

        Raises:
          CheckpointError: chunks are missing or damaged.
        """
        array, done = self._open(info), 0
        shape = info.shape if len(info.shape) > 1 else (*info.shape, 1)
        height = shape[-2]
        rows, columns = out.shape
        while done < rows:
            matrix, row = divmod(start + done, height)
            count = min(rows - done, height - row)
            part = out[done : done + count]
            if len(info.shape) > 1:
                lead = map(int, np.unravel_index(matrix, shape[:-2])) if len(shape) > 2 else ()
                area = array[(*lead, slice(row, row + count), slice(column, column + columns))]
            else:
                area, part = array[row : row + count], part.reshape(-1)
            try:
                target = tensorstore.array(part, context=self._context)
                target.write(area.translate_to[(0,) * part.ndim]).result()
            except (ValueError, OSError, KeyError) as error:
                raise self._damaged(info.name, error) from None
            done += count

    def _open(self, info: TensorInfo) -> tensorstore.TensorStore:
        array = self._arrays.get(info.name)
        if array is None:
            with self._lock:
                array = self._arrays.get(info.name) or self._opened(info)
                self._arrays[info.name] = array
        return array

    def _opened(self, info: TensorInfo) -> tensorstore.TensorStore:
        spec = array_spec(self._weights, info.name)
        if not is_within(self._weights / info.name, self._weights):
            failure = Failure("file", WEIGHTS_NAME, info.name, "a link to elsewhere", "a folder")
            raise CheckpointError(f"{self.path}: damaged", [failure])
        try:
            array = tensorstore.open(spec, open=True, read=True, context=self._context).result()
        except (ValueError, OSError, KeyError) as error:
            raise self._damaged(info.name, error) from None
        found = (array.dtype.numpy_dtype, tuple(array.shape))
        if found != (DTYPES[info.dtype], info.shape):
            failure = Failure(
                "file",
                WEIGHTS_NAME,
                info.name,
                f"an array {found[0]} {list(found[1])}",
                f"{info}, as {HEADER_NAME} says",
            )
            raise CheckpointError(f"{self.path}: damaged", [failure])
        return array

    def _damaged(self, leaf: str, error: Exception) -> CheckpointError:
        found = str(error).partition(" [tensorstore_spec=")[0]
        failure = Failure("file", WEIGHTS_NAME, leaf, found, "readable chunks")
        return CheckpointError(f"{self.path}: damaged", [failure])


def _described(leaf: str, fields: Any, failures: list[Failure]) -> TensorInfo | None:
    """One leaf of the header."""
    match fields:
        case {"dtype": str(dtype), "shape": list(shape)} if (
            dtype in DTYPES
            and "/" not in leaf
            and 0 < len(shape) <= _MAX_RANK
            and all(type(n) is int and 0 < n < 2**48 for n in shape)
            and math.prod(shape) < 2**48
        ):
            return TensorInfo(leaf, dtype, tuple(shape), WEIGHTS_NAME)
    failures.append(Failure("file", HEADER_NAME, leaf, repr(fields)[:200], "its dtype and shape"))
    return None
