"""Lazy reading of a directory of safetensors files: headers first, then tensors or rows of them.

Tensors are read at positions, by any number of threads at once, into memory that the caller owns.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath

from glm5next_jax import files as files_
from glm5next_jax.checkpoint.safetensors_header import DTYPES, TensorInfo, read_header
from glm5next_jax.errors import CheckpointError, Failure, printable
from glm5next_jax.files import contained_file, existing_directory, read_json_object

__all__ = [
    "DTYPES",
    "INDEX_NAME",
    "SafetensorsDirectory",
    "TensorInfo",
    "existing_directory",
    "read_config",
    "read_header",
    "read_json_object",
]

INDEX_NAME = "model.safetensors.index.json"
# Five times what the released model has. It bounds what a directory of many files can take.
MAX_TENSORS = 400_000
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# Between the parts of two rows that are wanted. Shorter gaps are read: disks give whole pages.
_MAX_GAP_BYTES = 4 << 10


class SafetensorsDirectory:
    """The tensors of a directory: headers read at once, data on demand.

    Takes `model.safetensors.index.json` with its shards, or, without an index, every
    `*.safetensors` file. Nothing is unpickled, ever. Use as a context manager: files stay open for
    as long as tensors are read.

    Attributes:
      path: the directory.
      tensors: every stored tensor, in the order of files and of positions in them. Where two files
        hold a tensor of one name, both are listed.

    Raises:
      CheckpointError: no such directory, no safetensors in it, an index that disagrees with its
        shards, a truncated or damaged file. All files are looked at before it is raised.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = existing_directory(path)
        self.tensors: tuple[TensorInfo, ...]
        self._stack = contextlib.ExitStack()
        self._files: dict[str, _LocalFile | _RemoteFile] = {}
        self._lock = threading.Lock()

        failures: list[Failure] = []
        files, weight_map = _list_files(self.path, failures)
        tensors: list[TensorInfo] = []
        for file in files:
            try:
                tensors += read_header(self.path / file)
            except CheckpointError as error:
                failures += error.failures or [Failure("file", file, "", str(error), "a file")]
            if len(tensors) > MAX_TENSORS:
                raise CheckpointError(f"{self.path}: more than {MAX_TENSORS} tensors; not read")
        if weight_map is not None:
            readable = set(files) - {failure.file for failure in failures}
            failures += _compare_with_index(weight_map, tensors, readable)
        if failures:
            raise CheckpointError(f"{self.path}: cannot read this checkpoint", failures)
        self.tensors = tuple(tensors)

    def __enter__(self) -> SafetensorsDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) of a tensor's first dimension; the whole tensor by default.

        Returns:
          A fresh array in the stored dtype, shape [stop - start, ...].

        Raises:
          CheckpointError: the file ends early (it changed after its header was read).
        """
        rows = info.shape[0] if info.shape else 1
        stop = rows if stop is None else stop
        shape = (stop - start, *info.shape[1:]) if info.shape else ()
        array = np.empty(shape, DTYPES[info.dtype])
        row_bytes = info.num_bytes // rows if rows else 0
        self.read_bytes(info, start * row_bytes, array)
        return array

    def granularity(self, info: TensorInfo) -> tuple[int, int]:
        """(rows of one matrix, rows at whose multiples it is best cut): any row is as good."""
        return max(math.prod(info.shape[:-1] or info.shape), 1), 1

    def read_rectangle(
        self, info: TensorInfo, width: int, start: int, column: int, out: np.ndarray
    ) -> None:
        """Part of a tensor whose elements are taken as a matrix `width` columns wide.

        Fills out [rows, columns], C-contiguous and of the stored dtype, from row `start` and column
        `column` on. Whole rows are one read. Of rows cut by columns, each part is read by itself
        where the gaps are long enough to be worth skipping.

        Raises:
          CheckpointError: the file ends early (it changed after its header was read).
        """
        rows, columns = out.shape
        size = out.dtype.itemsize
        if columns == width:
            self.read_bytes(info, start * width * size, out)
        elif (width - columns) * size > _MAX_GAP_BYTES:
            for row in range(rows):
                self.read_bytes(info, ((start + row) * width + column) * size, out[row])
        else:
            whole = np.empty((rows, width), out.dtype)
            self.read_bytes(info, start * width * size, whole)
            np.copyto(out, whole[:, column : column + columns])

    def read_bytes(self, info: TensorInfo, begin: int, out: np.ndarray) -> None:
        """Fills the C-contiguous `out` with a tensor's bytes from its byte `begin` on.

        Raises:
          CheckpointError: the file ends early (it changed after its header was read).
        """
        octets, got = out.reshape(-1).view(np.uint8), 0
        file = self._files.get(info.file) or self._open(info.file)
        while got < octets.size:
            try:
                count = file.read_into(octets[got:], info.offset + begin + got)
            except OSError as error:
                failure = Failure("file", info.file, info.name, error.strerror or str(error))
                raise CheckpointError(f"{self.path}: cannot be read", [failure]) from error
            if not count:
                failure = Failure(
                    "file", info.file, info.name, f"{begin + got} bytes", f"{info.num_bytes} bytes"
                )
                raise CheckpointError(f"{self.path}: a file ended early", [failure])
            got += count

    def _open(self, name: str) -> _LocalFile | _RemoteFile:
        with self._lock:
            if name not in self._files:
                opener = _RemoteFile if files_.is_url(self.path) else _LocalFile
                with files_.clean_errors(self.path / name):
                    file = opener(self.path / name)
                self._stack.callback(file.close)
                self._files[name] = file
            return self._files[name]


class _LocalFile:
    """Reads that say where share one descriptor: there is no position to fight over."""

    def __init__(self, path: epath.Path):
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, octets: np.ndarray, position: int) -> int:
        return os.preadv(self._descriptor, [octets.data], position)

    def close(self) -> None:
        os.close(self._descriptor)


class _RemoteFile:
    """A URL's handle has one position, so threads take turns."""

    def __init__(self, path: epath.Path):
        # One of etils' backends gives a context manager and no file, and a file without `readinto`.
        self._stack = contextlib.ExitStack()
        self._handle: Any = self._stack.enter_context(path.open("rb"))
        self._lock = threading.Lock()

    def read_into(self, octets: np.ndarray, position: int) -> int:
        with self._lock:
            self._handle.seek(position)
            if hasattr(self._handle, "readinto"):
                return self._handle.readinto(octets)
            data = self._handle.read(octets.size)
            octets[: len(data)] = np.frombuffer(data, np.uint8)
            return len(data)

    def close(self) -> None:
        self._stack.close()


def read_config(directory: epath.Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint directory.

    Raises:
      CheckpointError: it is missing, not to be opened, or not a JSON object.
    """
    path = contained_file(directory, "config.json")
    if not path.exists():
        raise CheckpointError(
            f"{directory}: no config.json; expected a checkpoint directory (config.json beside "
            "*.safetensors)"
        )
    return read_json_object(path)


def _list_files(
    directory: epath.Path, failures: list[Failure]
) -> tuple[list[str], Mapping[str, str] | None]:
    """Names of the files to read, and the index's tensor -> file map where there is an index."""
    present = files_.file_names(directory)
    files = [name for name in present if name.endswith(".safetensors")]
    if INDEX_NAME not in present:
        if not files:
            raise _no_safetensors(directory, present)
        return _without_refused(directory, files, failures), None

    index = contained_file(directory, INDEX_NAME)
    content = read_json_object(index, files_.INDEX, objects="unique")
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: expected an object 'weight_map' of tensor name to file")
    counts = Counter(weight_map.values())
    known = set(present)
    usable = []
    for name in sorted(counts):
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            failures.append(
                Failure("file", INDEX_NAME, "", f"the file name {name!r}", "a name without a path")
            )
        elif name not in known:
            expected = f"it, with {counts[name]} tensors"
            failures.append(Failure("file", INDEX_NAME, "", f"no file {printable(name)}", expected))
        else:
            usable.append(name)
    for name in files:
        if name not in counts:
            failures.append(Failure("file", name, "", "a file that the index does not name"))
    return _without_refused(directory, usable, failures), weight_map


def _without_refused(directory: epath.Path, names: list[str], failures: list[Failure]) -> list[str]:
    """Drops, and reports, links to files elsewhere and what is no file."""
    kept = []
    for name in names:
        try:
            contained_file(directory, name)
            kept.append(name)
        except CheckpointError as error:
            failures += error.failures
    return kept


def _no_safetensors(directory: epath.Path, present: list[str]) -> CheckpointError:
    pickles = [name for name in present if name.endswith(_PICKLES)]
    if pickles:
        more = ", …" if len(pickles) > 3 else ""
        return CheckpointError(
            f"{directory}: only pickled weights ({', '.join(pickles[:3])}{more}). They are never "
            "unpickled here: loading one runs whatever code it holds. Ask for, or convert to, "
            "safetensors."
        )
    return CheckpointError(f"{directory}: no *.safetensors file in it")


def _compare_with_index(
    weight_map: Mapping[str, str], tensors: Iterable[TensorInfo], readable: set[str]
) -> list[Failure]:
    """Both ways: what the index promises and a shard lacks, and what it does not know of."""
    failures = []
    held: dict[str, set[str]] = {}
    for info in tensors:
        held.setdefault(info.name, set()).add(info.file)
        if info.name not in weight_map:
            failures.append(
                Failure("file", info.file, info.name, "a tensor that the index does not name")
            )
    for name, file in weight_map.items():
        if file in readable and file not in held.get(name, ()):
            elsewhere = ", ".join(sorted(held.get(name, ())))
            found = f"no such tensor (it is in {elsewhere})" if elsewhere else "no such tensor"
            failures.append(Failure("file", file, name, found, "it, as the index says"))
    return failures
