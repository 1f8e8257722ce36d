"""Reading slices of leaves: what a device needs, cut into tiles that threads read.

A leaf is a matrix here: all of its dimensions but the last are rows (a vector is a column). What a
device holds of it is runs of those rows, and one range of columns.
"""

from __future__ import annotations

import abc
import collections
import concurrent.futures
import dataclasses
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from glm5next_jax.errors import CheckpointError, Failure

Index = tuple[tuple[int, int], ...]  # from where to where, of each dimension
TILE_BYTES = 2 << 20  # read, and held beside the result, by one thread at a time
_MAPPED_BYTES = 1 << 20
_ALIGNMENT = 64  # from which on XLA's CPU devices take host memory over without a copy


@dataclasses.dataclass(frozen=True)
class Faults:
    """What a tile found in one stored tensor: values and FP8 codes that are not finite."""

    source: Any
    num_values: int
    num_codes: int = 0


@dataclasses.dataclass(frozen=True)
class Tile:
    """A piece of work for one thread.

    Attributes:
      filled_bytes: of the result, that this fills.
      source_bytes: that this reads.
      run: does it, and returns what is wrong with the values.
    """

    filled_bytes: int
    source_bytes: int
    run: Callable[[], Faults | None]


@dataclasses.dataclass(frozen=True)
class Part:
    """A range of a leaf's columns and where it goes: out [rows, columns]."""

    column: int
    out: np.ndarray


class LeafReader(abc.ABC):
    """Slices of leaves, read by a pool of threads. A context manager.

    Attributes:
      order: paths of the leaves, in the order in which they are best read.
      progress: called, in the caller's thread, with the number of bytes just read.

    Args:
      shapes, dtypes: of every leaf.
      order: see above.
      check_finite: whether `finish` refuses NaN and infinity.
      progress: see above.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, np.dtype],
        order: Sequence[str],
        *,
        check_finite: bool,
        progress: Callable[[int], object],
    ):
        self.order = tuple(order)
        self.check_finite = check_finite
        self._shapes, self._dtypes = shapes, dtypes
        self.progress = progress
        self._faults: dict[Any, list[int]] = {}
        # Some wait for the disk while others convert.
        self._num_threads = min(32, max(4, 2 * len(os.sched_getaffinity(0))))
        self._pool = concurrent.futures.ThreadPoolExecutor(self._num_threads, "weights")

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def scratch_bytes(self) -> int:
        """About how much memory the threads take beside the results."""
        return 2 * TILE_BYTES * self._num_threads

    def shape(self, leaf: str) -> tuple[int, ...]:
        """Of a leaf."""
        return self._shapes[leaf]

    def source_bytes(self, leaf: str, indices: Sequence[Index]) -> int:
        """Bytes that `read` of the same will read."""
        ranges = [as_ranges(self._shapes[leaf], index) for index in indices]
        columns = sum(stop - start for _, (start, stop) in ranges)
        return sum(self._source_bytes(leaf, start, stop, columns) for start, stop in ranges[0][0])

    def read(
        self,
        leaf: str,
        indices: Sequence[Index],
        admit: Callable[[int], object] = lambda num_bytes: None,
    ) -> list[np.ndarray]:
        """Several slices of a leaf of the same rows, each byte of which is read once.

        Args:
          leaf: its path.
          indices: the slices; see `groups`.
          admit: called before that many more bytes are filled; it may wait for memory.

        Returns:
          The slices, in the leaf's dtype; a fresh array each.

        Raises:
          CheckpointError: a file ended early.
        """
        shape, dtype = self._shapes[leaf], self._dtypes[leaf]
        ranges = [as_ranges(shape, index) for index in indices]
        rows = ranges[0][0]
        num_rows = sum(stop - start for start, stop in rows)
        slices = [_aligned((num_rows, stop - start), dtype) for _, (start, stop) in ranges]
        waiting: collections.deque[tuple[Tile, concurrent.futures.Future]] = collections.deque()
        done = 0
        try:
            for start, stop in rows:
                parts = [
                    Part(columns[0], out[done : done + stop - start])
                    for (_, columns), out in zip(ranges, slices, strict=True)
                ]
                done += stop - start
                for tile in self._tiles(leaf, start, stop, parts):
                    admit(tile.filled_bytes)
                    waiting.append((tile, self._pool.submit(tile.run)))
                    if len(waiting) > 2 * self._num_threads:
                        self._take(*waiting.popleft())
            while waiting:
                self._take(*waiting.popleft())
        finally:
            # After a failure: no thread may still write into what is about to be let go.
            for _, future in waiting:
                future.cancel()
            concurrent.futures.wait([future for _, future in waiting])
        return [
            out.reshape([stop - start for start, stop in index])
            for out, index in zip(slices, indices, strict=True)
        ]

    @property
    def has_faults(self) -> bool:
        """Whether what was read so far holds anything that `finish` will refuse."""
        return bool(self._faults)

    def finish(self) -> None:
        """Reports, once everything is read, what was found on the way.

        Raises:
          CheckpointError: weights that cannot be used; all of them are named.
        """
        failures = [self._failure(*item) for item in self._faults.items()]
        failures += self._last_checks()
        if failures:
            raise CheckpointError(f"{self._origin}: unusable weights", failures)

    def _take(self, tile: Tile, future: concurrent.futures.Future) -> None:
        faults = future.result()
        if faults is not None:
            counts = self._faults.setdefault(faults.source, [0, 0])
            counts[0] += faults.num_values
            counts[1] += faults.num_codes
        self.progress(tile.source_bytes)

    @property
    @abc.abstractmethod
    def _origin(self) -> str:
        """What to call the checkpoint in an error."""

    @abc.abstractmethod
    def _source_bytes(self, leaf: str, start: int, stop: int, columns: int) -> int:
        """Bytes that rows [start, stop) of so many columns are read from."""

    @abc.abstractmethod
    def _tiles(self, leaf: str, start: int, stop: int, parts: Sequence[Part]) -> Iterator[Tile]:
        """The work for rows [start, stop) of adjoining ranges of columns."""

    @abc.abstractmethod
    def _failure(self, source: Any, counts: Sequence[int]) -> Failure:
        """`counts` values, and FP8 codes, of one source as a failure."""

    def _last_checks(self) -> list[Failure]:
        return []


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a shape: all but the last dimension are rows, a vector is a column."""
    if len(shape) < 2:
        return math.prod(shape), 1
    return math.prod(shape[:-1]), shape[-1]


def as_ranges(
    shape: Sequence[int], index: Index
) -> tuple[tuple[tuple[int, int], ...], tuple[int, int]]:
    """The runs of rows, and the range of columns, that `index` takes of a matrix (`as_matrix`)."""
    ranges = list(index)
    columns = ranges.pop() if len(shape) > 1 else (0, 1)
    heights = shape[: len(ranges)]
    runs = [(0, 1)]
    for (start, stop), size in zip(ranges, heights, strict=True):
        if (start, stop) == (0, size):  # whole, so that what adjoins still does
            runs = [(first * size, last * size) for first, last in runs]
        else:
            runs = [
                (row * size + start, row * size + stop)
                for first, last in runs
                for row in range(first, last)
            ]
    return tuple(runs), columns


def groups(
    shape: Sequence[int], indices: Iterable[Index], itemsize: int, max_bytes: int
) -> Iterator[list[Index]]:
    """Distinct slices in groups for `LeafReader.read`: the same rows, adjoining columns.

    A group holds at most `max_bytes`, or one slice.
    """
    by_rows: dict[Any, list[tuple[tuple[int, int], Index]]] = {}
    for index in indices:
        rows, columns = as_ranges(shape, index)
        by_rows.setdefault(rows, []).append((columns, index))
    for rows, members in by_rows.items():
        members.sort(key=lambda member: member[0])
        num_rows = sum(stop - start for start, stop in rows)
        group: list[Index] = []
        begin = end = 0
        for (start, stop), index in members:
            if group and (start != end or num_rows * (stop - begin) * itemsize > max_bytes):
                yield group
                group = []
            if not group:
                begin = start
            group.append(index)
            end = stop
        yield group


def cuts(start: int, stop: int, height: int, step: int, align: int) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) of stacked matrices, `height` rows each, in pieces of about `step` rows.

    No piece goes beyond one matrix, and cuts within one are at multiples of `align`.
    """
    while start < stop:
        within = start % height
        end = max(within + step, within // align * align + align) // align * align
        end = min(stop, start - within + min(end, height))
        yield start, end
        start = end


def non_finite_count(array: np.ndarray) -> int:
    """How many elements of a bfloat16, float32 or float8_e4m3fn array are NaN or infinite."""
    integer, largest = {
        np.dtype(ml_dtypes.bfloat16): (np.int16, 0x7F7F),
        np.dtype(np.float32): (np.int32, 0x7F7FFFFF),
        np.dtype(ml_dtypes.float8_e4m3fn): (np.int8, 0x7E),
    }[array.dtype]
    # Without its sign bit, a number that is not finite is an integer beyond the largest finite one.
    magnitude = array.view(integer) & integer(2 ** (8 * array.dtype.itemsize - 1) - 1)
    if magnitude.max(initial=0) <= largest:
        return 0
    return int(np.count_nonzero(magnitude > largest))


def _aligned(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    if size > _MAPPED_BYTES:
        # Pages that go back to the system when they are let go. malloc takes the size of what is
        # freed for the size of what to keep, in every thread.
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, dtype).reshape(shape)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
