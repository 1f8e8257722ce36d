"""Lazy reading of a directory of safetensors files: headers first, then tensors or rows of them.

Tensors are read at positions, by any number of threads at once, into memory that the caller owns.
Headers are parsed here rather than by the safetensors package because its NumPy side knows neither
bfloat16 nor FP8 in every version, and because a damaged download should be named by file and byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from glm5next_jax.checkpoint.errors import CheckpointError, Failure

INDEX_NAME = "model.safetensors.index.json"
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
_MAX_HEADER = 100_000_000  # the limit of the format
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# Between the parts of two rows that are wanted. Shorter gaps are read: disks give whole pages.
_MAX_GAP_BYTES = 4 << 10
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


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
                failures += error.failures
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
            count = file.read_into(octets[got:], info.offset + begin + got)
            if not count:
                failure = Failure(
                    "file", info.file, info.name, f"{begin + got} bytes", f"{info.num_bytes} bytes"
                )
                raise CheckpointError(f"{self.path}: a file ended early", [failure])
            got += count

    def _open(self, name: str) -> _LocalFile | _RemoteFile:
        with self._lock:
            if name not in self._files:
                is_local = "://" not in os.fspath(self.path)
                file = (_LocalFile if is_local else _RemoteFile)(self.path / name)
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
        self._handle: Any = path.open("rb")
        self._lock = threading.Lock()

    def read_into(self, octets: np.ndarray, position: int) -> int:
        with self._lock:
            self._handle.seek(position)
            return self._handle.readinto(octets)

    def close(self) -> None:
        self._handle.close()


def existing_directory(path: str | os.PathLike[str]) -> epath.Path:
    """The directory at `path`.

    Raises:
      CheckpointError: there is none. For what looks like a name on the hub, the message holds the
        command that downloads it.
    """
    text = os.fspath(path)
    directory = epath.Path(os.path.expanduser(text))
    if directory.is_dir():
        return directory
    if directory.exists():
        raise CheckpointError(
            f"{text}: is a file, expected the directory that holds config.json and the weights"
        )
    if _HUB_NAME.fullmatch(text) and not text.startswith("."):
        local = text.split("/")[1]
        raise CheckpointError(
            f"{text}: no such directory. If this is a repository on the Hugging Face Hub, download "
            f"it first:\n  hf download {text} --local-dir {local}\nand give {local} instead."
        )
    raise CheckpointError(f"{text}: no such directory")


def read_config(directory: epath.Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint directory.

    Raises:
      CheckpointError: it is missing, or not a JSON object.
    """
    path = directory / "config.json"
    if not path.exists():
        raise CheckpointError(
            f"{directory}: no config.json; expected a checkpoint directory (config.json beside "
            "*.safetensors)"
        )
    return read_json_object(path)


def read_header(path: epath.Path) -> list[TensorInfo]:
    """The tensors of one safetensors file, by position.

    Raises:
      CheckpointError: the file is truncated, or its header contradicts itself or the file's size.
    """
    size = path.stat().length
    with path.open("rb") as handle:
        prefix = handle.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
            expected = f"a header of {length} bytes" if len(prefix) == 8 else "at least 8 bytes"
            raise _damaged(path, f"{size} bytes", f"{expected} (truncated or not safetensors)")
        try:
            pairs = json.loads(handle.read(length), object_pairs_hook=list)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise _damaged(path, f"a header that is no JSON ({error})", "safetensors") from None
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise _damaged(path, "a header that is no JSON object", "safetensors")

    failures: list[Failure] = []
    tensors: dict[str, TensorInfo] = {}
    for name, fields in pairs:
        if name == "__metadata__":
            continue
        parsed = _parse_entry(name, fields, path.name, 8 + length)
        if isinstance(parsed, Failure):
            failures.append(parsed)
        elif name in tensors:
            failures.append(
                Failure("duplicate", path.name, name, "two entries in one header", "one")
            )
        else:
            tensors[name] = parsed
    ordered = sorted(tensors.values(), key=lambda info: (info.offset, info.num_bytes))
    end = 8 + length
    for info in ordered:
        if info.offset != end and not failures:
            what = "an overlap with" if info.offset < end else "a gap before"
            failures.append(
                Failure(
                    "file",
                    path.name,
                    info.name,
                    f"{what} the bytes of this tensor (it starts at byte {info.offset})",
                    f"a start at byte {end}",
                )
            )
        end = max(end, info.offset + info.num_bytes)
    if end != size and not failures:
        what = "truncated" if size < end else "bytes that belong to no tensor at its end"
        failures.append(Failure("file", path.name, "", f"{size} bytes", f"{end} bytes ({what})"))
    if failures:
        raise CheckpointError(f"{path}: damaged", failures)
    return ordered


def _parse_entry(name: str, fields: Any, file: str, data_start: int) -> TensorInfo | Failure:
    """One entry of a header, its nested objects given as lists of pairs."""
    try:
        fields = dict(fields)
        dtype, shape = fields["dtype"], tuple(fields["shape"])
        begin, end = fields["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        return Failure(
            "file", file, name, "a malformed entry", "dtype, shape and data_offsets in the header"
        )
    if dtype not in DTYPES:
        return Failure("dtype", file, name, f"dtype {dtype}", "a dtype known here")
    info = TensorInfo(name, dtype, shape, file, data_start + begin)
    if end - begin != info.num_bytes:
        return Failure(
            "file", file, name, f"{end - begin} bytes", f"{info.num_bytes} bytes for {info}"
        )
    return info


def _damaged(path: epath.Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged", [Failure("file", path.name, "", found, expected)])


def read_json_object(path: epath.Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _list_files(
    directory: epath.Path, failures: list[Failure]
) -> tuple[list[str], Mapping[str, str] | None]:
    """Names of the files to read, and the index's tensor -> file map where there is an index."""
    present = sorted(entry.name for entry in directory.iterdir())
    files = [name for name in present if name.endswith(".safetensors")]
    index = directory / INDEX_NAME
    if not index.exists():
        if not files:
            raise _no_safetensors(directory, present)
        _refuse_outside(directory, files, failures)
        return files, None

    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: expected an object 'weight_map' of tensor name to file")
    named = sorted(set(weight_map.values()))
    usable = []
    for name in named:
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            failures.append(
                Failure("file", INDEX_NAME, "", f"the file name {name!r}", "a name without a path")
            )
        elif name not in present:
            count = sum(file == name for file in weight_map.values())
            failures.append(
                Failure("file", INDEX_NAME, "", f"no file {name}", f"it, with {count} tensors")
            )
        else:
            usable.append(name)
    for name in sorted(set(files) - set(named)):
        failures.append(Failure("file", name, "", "a file that the index does not name"))
    return _refuse_outside(directory, usable, failures), weight_map


def _refuse_outside(directory: epath.Path, names: list[str], failures: list[Failure]) -> list[str]:
    """Drops, and reports, links to files elsewhere: a checkpoint must not read what it chooses.

    The hub's cache keeps `snapshots/<revision>` full of links to `blobs` beside it; those are read.
    """
    if "://" in os.fspath(directory):
        return names
    home = pathlib.Path(directory).resolve()
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    kept = []
    for name in names:
        target = pathlib.Path(directory, name).resolve()
        if any(target.is_relative_to(home) for home in homes):
            kept.append(name)
        else:
            failures.append(
                Failure("file", name, "", f"a link to {target}", "a file within the directory")
            )
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
