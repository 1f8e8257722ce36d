"""Converted checkpoints: our leaves as one Orbax tree, beside everything else of the source.

config.json          the configuration, in the released form
glm5next_jax.json    what marks the directory as converted: format, version, dtypes
weights/             Orbax PyTree {leaf path: array}, in chunks of a few MB for shards to read
unused/              safetensors files with the tensors that no leaf takes, bytes as they were
tokenizer.json, …    copied
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from glm5next_jax.checkpoint import leaves as leaves_
from glm5next_jax.checkpoint.errors import CheckpointError, Failure
from glm5next_jax.checkpoint.leaves import Faults, LeafReader, Part, Tile
from glm5next_jax.checkpoint.safetensors_reader import (
    SafetensorsDirectory,
    TensorInfo,
    read_json_object,
)
from glm5next_jax.config import Glm5NextConfig

FORMAT = "glm5next-jax"
VERSION = 2  # 2: q, k and v of linear attention stacked; chunks
HEADER_NAME = "glm5next_jax.json"
WEIGHTS_NAME = "weights"
UNUSED_NAME = "unused"
COPIED_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip
_CHUNK_BYTES = 2 << 20  # compressed, and decoded, as one
_SHARD_BYTES = 5_000_000_000
_COPY_BYTES = 16 << 20


def absolute(path: str | os.PathLike[str]) -> epath.Path:
    """`path` as Orbax wants it; URLs stay as they are."""
    text = os.fspath(path)
    return epath.Path(text) if "://" in text else epath.Path(text).expanduser().resolve()


def is_converted(directory: epath.Path) -> bool:
    """Whether a directory was written by `write`."""
    return (directory / HEADER_NAME).exists()


def write(
    directory: epath.Path,
    config: Glm5NextConfig,
    leaves: Mapping[str, np.ndarray],
    source: SafetensorsDirectory,
    unused: Sequence[TensorInfo],
    *,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Writes a converted checkpoint into an empty directory.

    Args:
      directory: where; see `replacing` for how it comes into being at once.
      config: written as `config.json`.
      leaves: every weight by its dotted path.
      source: the directory that tokenizer files and unused tensors are copied from.
      unused: stored tensors to carry along.
      progress: called with the number of bytes of unused tensors just written.
    """
    chunks = {
        # An expert is a chunk, or some.
        path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if leaf.ndim > 2 else ())
        for path, leaf in leaves.items()
    }
    with _checkpointer() as checkpointer:
        args = ocp.args.PyTreeSave(dict(leaves), save_args=chunks)
        checkpointer.save(directory / WEIGHTS_NAME, args=args)
    _write_unused(directory / UNUSED_NAME, source, unused, progress)
    for name in COPIED_NAMES:
        if (source.path / name).exists():
            (directory / name).write_bytes((source.path / name).read_bytes())
    _write_json(directory / "config.json", config.to_hf())
    counts = Counter(str(array.dtype) for array in leaves.values())
    header = {"format": FORMAT, "version": VERSION, "leaves_by_dtype": dict(sorted(counts.items()))}
    _write_json(directory / HEADER_NAME, header)


def check_header(directory: epath.Path) -> None:
    """Refuses a format or version that this code does not read.

    Raises:
      CheckpointError: it is another one, or the weights are not there.
    """
    header = read_json_object(directory / HEADER_NAME)
    found = (header.get("format"), header.get("version"))
    if found != (FORMAT, VERSION):
        raise CheckpointError(
            f"{directory / HEADER_NAME}: found format and version {found}, expected "
            f"{(FORMAT, VERSION)}; convert the released checkpoint again"
        )
    if not (directory / WEIGHTS_NAME).is_dir():
        raise CheckpointError(f"{directory}: no {WEIGHTS_NAME}/ in this converted checkpoint")


class ConvertedLeaves(LeafReader):
    """Leaves of a converted directory.

    Orbax restores whole arrays, with several copies of them on the host. Here its arrays are read
    as what they are, zarr arrays in an OCDBT database, chunk by chunk into the shards' memory.

    Args:
      directory: where.
      specs: shape, and dtype to give, of every leaf.
      check_finite: whether `finish` refuses NaN and infinity.
      progress: called with the number of bytes just read.

    Raises:
      CheckpointError: leaves are missing, unknown, or of a wrong shape.
    """

    def __init__(
        self,
        directory: epath.Path,
        specs: Mapping[str, Any],
        *,
        check_finite: bool = True,
        progress: Callable[[int], object] = lambda num_bytes: None,
    ):
        self._directory = directory
        self._weights = absolute(directory) / WEIGHTS_NAME
        with _checkpointer() as checkpointer:
            metadata = checkpointer.metadata(self._weights).item_metadata
        if metadata is None:
            failure = Failure("file", WEIGHTS_NAME, "", "nothing readable", "a list of arrays")
            raise CheckpointError(f"{directory}: damaged", [failure])
        stored = metadata.tree
        failures = [
            Failure("missing", WEIGHTS_NAME, path, "no such leaf", f"shape {list(spec.shape)}")
            for path, spec in specs.items()
            if path not in stored
        ]
        for path, found in stored.items():
            if path not in specs:
                failures.append(Failure("unknown", WEIGHTS_NAME, path, "a leaf of no model part"))
            elif tuple(found.shape) != tuple(specs[path].shape):
                shapes = f"shape {list(found.shape)}", f"{list(specs[path].shape)}"
                failures.append(Failure("shape", WEIGHTS_NAME, path, *shapes))
        if failures:
            raise CheckpointError(f"{directory}: the leaves do not fit the model", failures)
        super().__init__(
            {path: tuple(spec.shape) for path, spec in specs.items()},
            {path: np.dtype(spec.dtype) for path, spec in specs.items()},
            list(specs),
            check_finite=check_finite,
            progress=progress,
        )
        self._stored = {path: np.dtype(found.dtype) for path, found in stored.items()}
        # Decoded chunks are used once; the database's own nodes again and again.
        self._context = tensorstore.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#nodes": {"total_bytes_limit": 16 << 20},
                "data_copy_concurrency": {"limit": self._num_threads},
                "file_io_concurrency": {"limit": self._num_threads},
            }
        )

    @property
    def scratch_bytes(self) -> int:
        # A chunk as it is stored, and decoded.
        return 2 * _CHUNK_BYTES * self._num_threads + super().scratch_bytes

    @property
    def _origin(self) -> str:
        return str(self._directory)

    def _source_bytes(self, leaf: str, start: int, stop: int, columns: int) -> int:
        return (stop - start) * columns * self._stored[leaf].itemsize

    def _tiles(self, leaf: str, start: int, stop: int, parts: Sequence[Part]) -> Iterator[Tile]:
        array, axis = self._open(leaf), max(len(self._shapes[leaf]) - 2, 0)
        height, chunk = self._shapes[leaf][axis], array.chunk_layout.read_chunk.shape
        assert chunk is not None  # zarr always has them
        chunk_rows, chunk_columns = chunk[axis] or 1, (*chunk, 1)[axis + 1] or 1
        width = leaves_.as_matrix(self._shapes[leaf])[1]
        # One chunk at a time: those in memory are then no more than the threads.
        for low, high in leaves_.cuts(start, stop, height, 1, chunk_rows):
            for part in parts:
                end = part.column + part.out.shape[1]
                for first, last in leaves_.cuts(part.column, end, width, 1, chunk_columns):
                    columns = slice(first - part.column, last - part.column)
                    cut = Part(first, part.out[low - start : high - start, columns])
                    yield Tile(
                        cut.out.nbytes,
                        cut.out.size * self._stored[leaf].itemsize,
                        lambda low=low, cut=cut: self._fill(leaf, array, low, cut),
                    )

    def _fill(
        self, leaf: str, array: tensorstore.TensorStore, start: int, part: Part
    ) -> Faults | None:
        """Reads some rows of one matrix, and some columns, straight into their place.

        Runs in a thread.
        """
        shape, (rows, columns) = self._shapes[leaf], part.out.shape
        if len(shape) > 1:
            matrix, row = divmod(start, shape[-2])
            lead = np.unravel_index(matrix, shape[:-2]) if len(shape) > 2 else ()
            area = (*map(int, lead), slice(row, row + rows))
            area = array[(*area, slice(part.column, part.column + columns))]
        else:
            area = array[start : start + rows]
        as_stored = part.out.dtype == self._stored[leaf]
        out = part.out if as_stored else np.empty(part.out.shape, self._stored[leaf])
        target = out if len(shape) > 1 else out.reshape(-1)
        try:
            tensorstore.array(target).write(area.translate_to[(0,) * target.ndim]).result()
        except (ValueError, OSError, KeyError) as error:
            raise self._damaged(leaf, error) from None
        if not as_stored:
            with np.errstate(over="ignore", invalid="ignore"):  # counted, and reported by name
                np.copyto(part.out, out, casting="unsafe")
        num_bad = leaves_.non_finite_count(part.out) if self.check_finite else 0
        return Faults(leaf, num_bad) if num_bad else None

    def _open(self, leaf: str) -> tensorstore.TensorStore:
        url = os.fspath(self._weights)
        spec = {
            "driver": "zarr",
            "kvstore": {
                "driver": "ocdbt",
                "base": url if "://" in url else pathlib.Path(url).as_uri(),
                "path": f"{leaf}/",
                "cache_pool": "cache_pool#nodes",
            },
        }
        try:
            return tensorstore.open(spec, open=True, read=True, context=self._context).result()
        except (ValueError, OSError, KeyError) as error:
            raise self._damaged(leaf, error) from None

    def _damaged(self, leaf: str, error: Exception) -> CheckpointError:
        found = str(error).partition(" [tensorstore_spec=")[0]
        failure = Failure("file", WEIGHTS_NAME, leaf, found, "readable chunks")
        return CheckpointError(f"{self._directory}: damaged", [failure])

    def _failure(self, source: str, counts: Sequence[int]) -> Failure:
        found = f"{counts[0]} values that are NaN or infinite"
        return Failure("value", WEIGHTS_NAME, source, found, "finite weights")


def unused_tensors(directory: epath.Path) -> SafetensorsDirectory | None:
    """A reader of the tensors carried along, or None if there are none."""
    path = directory / UNUSED_NAME
    return SafetensorsDirectory(path) if path.is_dir() else None


@contextlib.contextmanager
def replacing(destination: epath.Path, *, overwrite: bool) -> Iterator[epath.Path]:
    """Gives a directory to write into, which becomes `destination` when the block ends well.

    Until then `destination` is absent, or what it was before; a block that fails leaves no trace.

    Raises:
      ValueError: `destination` exists and is not empty, unless it is a converted checkpoint and
        `overwrite` is true. Anything else is never deleted.
    """
    check_destination(destination, overwrite=overwrite)
    mark = secrets.token_hex(4)
    work = destination.parent / f".{destination.name}.incomplete-{mark}"
    work.mkdir(parents=True)
    try:
        yield work
        old = None
        if destination.exists():
            old = destination.parent / f".{destination.name}.replaced-{mark}"
            destination.rename(old)
        work.rename(destination)
        if old is not None:
            old.rmtree()
    finally:
        if work.exists():
            work.rmtree()


def check_destination(destination: epath.Path, *, overwrite: bool) -> None:
    """Refuses a destination whose present content would be lost; see `replacing`."""
    if not destination.exists():
        return
    if not destination.is_dir():
        raise ValueError(f"{destination}: exists and is not a directory")
    if not any(destination.iterdir()):
        return
    if not overwrite:
        raise ValueError(
            f"{destination}: exists and is not empty; give another directory, or --overwrite to "
            "replace a converted checkpoint"
        )
    if not is_converted(destination):
        raise ValueError(
            f"{destination}: holds something else than a converted checkpoint (no {HEADER_NAME}); "
            "it is not overwritten"
        )


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _write_json(path: epath.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_unused(
    directory: epath.Path,
    source: SafetensorsDirectory,
    tensors: Iterable[TensorInfo],
    progress: Callable[[int], object],
) -> None:
    """Copies tensors byte for byte into safetensors files of a bounded size."""
    shards: list[list[TensorInfo]] = []
    for info in tensors:
        if not shards or sum(each.num_bytes for each in shards[-1]) + info.num_bytes > _SHARD_BYTES:
            shards.append([])
        shards[-1].append(info)
    if not shards:
        return
    directory.mkdir()
    for number, shard in enumerate(shards, 1):
        name = f"unused-{number:05d}-of-{len(shards):05d}.safetensors"
        with (directory / name).open("wb") as handle:
            handle.write(_header(shard))
            for info in shard:
                rows = info.shape[0] if info.shape else 1
                step = max(1, _COPY_BYTES * rows // max(info.num_bytes, 1))
                for start in range(0, rows, step):
                    stop = min(start + step, rows)
                    part = source.read(info, start, stop) if info.shape else source.read(info)
                    handle.write(part.tobytes())
                    progress(part.nbytes)


def _header(tensors: Iterable[TensorInfo]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for info in tensors:
        offsets = [end, end + info.num_bytes]
        end = offsets[1]
        fields = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": offsets}
        entries[info.name] = fields
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
