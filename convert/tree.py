"""Writing the arrays of a converted checkpoint, a file of chunks at a time, as an Orbax tree."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore
from etils import epath

from convert import files
from glm5next_jax.checkpoint import native
from glm5next_jax.checkpoint.leaves import Index
from glm5next_jax.files import is_url

FILE_BYTES = 64 << 20  # the largest of a file, of all but vectors; memory is a few times this
_CHUNK_SHAPE = (128, 1024)  # rows divide into FP8 blocks, columns into the shards of a wide mesh
_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_CHECKED = [_LITTLE, {"name": "crc32c"}]


def grid(shape: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of what one file holds of an array, and of the chunks in it.

    A file holds one matrix of stacked ones, such as an expert, or some of its rows.
    """
    if len(shape) < 2:
        return shape, shape
    *lead, rows, columns = shape
    chunk = (min(_CHUNK_SHAPE[0], rows), min(_CHUNK_SHAPE[1], columns))
    whole = math.ceil(columns / chunk[1]) * chunk[1]
    high = math.ceil(rows / chunk[0])  # in chunks
    num_files = math.ceil(high * chunk[0] * whole * itemsize / FILE_BYTES)
    ones = (1,) * len(lead)
    return (*ones, math.ceil(high / num_files) * chunk[0], whole), (*ones, *chunk)


def indices(shape: tuple[int, ...], itemsize: int) -> Iterator[Index]:
    """The slices of an array that are one file each."""
    file, _ = grid(shape, itemsize)
    ranges = [
        [(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(shape, file, strict=True)
    ]
    return itertools.product(*ranges)


class TreeWriter:
    """Arrays below one folder, written slice by slice from several threads.

    Args:
      weights: the folder.
      specs: shape and dtype of every leaf.
    """

    def __init__(self, weights: epath.Path, specs: Mapping[str, Any]):
        self._weights, self._specs = weights, specs
        self._context = native.context()
        self._arrays: dict[str, tensorstore.TensorStore] = {}

    def prepare(self, leaf: str) -> None:
        """Makes or finds the array of a leaf.

        Raises:
          OSError: it cannot be made.
        """
        if leaf in self._arrays:
            return
        spec = self._specs[leaf]
        dtype = np.dtype(spec.dtype)
        file, chunk = grid(tuple(spec.shape), dtype.itemsize)
        index_codecs = {"index_codecs": _CHECKED, "chunk_shape": list(chunk), "codecs": _CHECKED}
        metadata = {
            "shape": list(spec.shape),
            "data_type": dtype.name,
            # What is lost must not read as zeros, by whatever it is read.
            "fill_value": "NaN",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(file)}},
            "codecs": [{"name": "sharding_indexed", "configuration": index_codecs}],
        }
        described = native.array_spec(self._weights, leaf) | {
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
        }
        with _as_os_error(self._weights):
            self._arrays[leaf] = tensorstore.open(
                described, open=True, create=True, context=self._context
            ).result()

    def write(self, leaf: str, index: Index, values: np.ndarray) -> None:
        """Writes one file; its bytes have reached the disk when this returns.

        `values` are let go of as soon as tensorstore has its copy.

        Raises:
          OSError: they could not be written.
        """
        with _as_os_error(self._weights):
            written = self._slice(leaf, index).write(values)
            written.copy.result()
            del values
            written.result()

    def read(self, leaf: str, index: Index) -> np.ndarray | None:
        """What one file holds; None where it is missing or damaged."""
        try:
            return self._slice(leaf, index).read().result()
        except (ValueError, OSError, KeyError):
            return None

    def finish(self) -> None:
        """Makes the arrays a tree that Orbax restores, its commit marker last.

        Orbax itself says what a tree of these leaves is like: it saves one of scalars, of which the
        notes are taken.
        """
        import orbax.checkpoint as ocp  # late: it takes a second, and a tenth of a GB

        files.remove_partial(self._weights, ("__lock",))
        beside = None if is_url(self._weights) else self._weights.parent / native.UNFINISHED_NAME
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
        with tempfile.TemporaryDirectory(dir=beside) as folder, ocp.Checkpointer(handler) as saver:
            like = pathlib.Path(folder, "tree")
            scalars = {leaf: np.zeros((), np.float32) for leaf in self._specs}
            with _without_warnings("absl"):  # that it finds no database to merge: there is none
                saver.save(like, args=ocp.args.PyTreeSave(scalars))
            for name in ("_METADATA", "_CHECKPOINT_METADATA"):
                files.write_atomic(self._weights / name, (like / name).read_bytes())
        files.write_atomic(self._weights / "commit_success.txt", b"committed\n")

    def _slice(self, leaf: str, index: Index) -> tensorstore.TensorStore:
        return self._arrays[leaf][tuple(slice(*bounds) for bounds in index)]


@contextlib.contextmanager
def _without_warnings(logger: str) -> Iterator[None]:
    level = logging.getLogger(logger).level
    logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.getLogger(logger).setLevel(level)


class _as_os_error:
    """tensorstore says ValueError of a full disk; to callers it is an OSError."""

    def __init__(self, weights: epath.Path):
        self._weights = weights

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, ValueError):
            text = str(error).partition(" [tensorstore_spec=")[0].partition(" [source locations")[0]
            raise OSError(f"{self._weights}: cannot be written: {text}") from None
