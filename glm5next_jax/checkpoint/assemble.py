"""Filling leaves from stored tensors: each byte into its place, codes decoded on the way."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from glm5next_jax.checkpoint import leaves
from glm5next_jax.checkpoint.encodings import PLAIN, TensorReader
from glm5next_jax.checkpoint.leaves import Faults, LeafReader, Part, Tile
from glm5next_jax.checkpoint.planning import TIED_REASON, Entry, Piece, Plan
from glm5next_jax.checkpoint.safetensors_header import DTYPES, TensorInfo
from glm5next_jax.errors import Failure


class StoredLeaves(LeafReader):
    """Leaves filled from stored tensors as a plan says.

    Args:
      reader: of the checkpoint that the plan was made for.
      plan: what fills what.
      dtypes: of each leaf: bfloat16, float32, or float8_e4m3fn where the plan keeps codes.
      check_finite: whether `finish` refuses NaN and infinity.
      progress: called with the number of stored bytes just read.
    """

    def __init__(
        self,
        reader: TensorReader,
        plan: Plan,
        dtypes: Mapping[str, np.dtype],
        *,
        check_finite: bool = True,
        progress: Callable[[int], object] = lambda num_bytes: None,
    ):
        self._reader, self._plan = reader, plan
        files = sorted({entry.source.file for entry in plan.entries})
        self._rank = {file: rank for rank, file in enumerate(files)}
        self._pieces: dict[str, list[tuple[Piece, Entry]]] = {leaf: [] for leaf in plan.specs}
        for entry in plan.entries:
            for piece in entry.pieces:
                self._pieces[piece.leaf].append((piece, entry))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda item: item[0].target_start)
        first = {
            leaf: min(self._place(entry.source) for _, entry in pieces)
            for leaf, pieces in self._pieces.items()
        }
        super().__init__(
            {leaf: tuple(spec.shape) for leaf, spec in plan.specs.items()},
            dtypes,
            sorted(first, key=lambda leaf: first[leaf]),
            check_finite=check_finite,
            progress=progress,
        )

    def _place(self, source: TensorInfo) -> tuple[int, int]:
        return self._rank[source.file], source.offset

    @property
    def _origin(self) -> str:
        return str(self._reader.path)

    def _overlapping(
        self, leaf: str, start: int, stop: int
    ) -> Iterator[tuple[Entry, int, int, int]]:
        """What fills rows [start, stop): (entry, its rows first to last, where in the leaf)."""
        pieces = self._pieces[leaf]
        at = bisect.bisect_right(pieces, start, key=lambda item: item[0].target_start) - 1
        while at < len(pieces) and pieces[at][0].target_start < stop:
            piece, entry = pieces[at]
            low = max(start, piece.target_start)
            high = min(stop, piece.target_start + piece.size)
            shift = piece.source_start - piece.target_start
            yield entry, low + shift, high + shift, low
            at += 1

    def _source_bytes(self, leaf: str, start: int, stop: int, columns: int) -> int:
        return sum(
            (entry.encoding or PLAIN).stored_bytes(entry.source, first, last, columns)
            for entry, first, last, _ in self._overlapping(leaf, start, stop)
        )

    def _tiles(self, leaf: str, start: int, stop: int, parts: Sequence[Part]) -> Iterator[Tile]:
        columns = sum(part.out.shape[1] for part in parts)
        for entry, first, last, row in self._overlapping(leaf, start, stop):
            source, encoding = entry.source, entry.encoding or PLAIN
            shift = row - start - first  # from a stored row to a row of the parts
            row_bytes = columns * DTYPES[source.dtype].itemsize
            step = max(1, leaves.TILE_BYTES // max(row_bytes, 1))
            matrix, block = encoding.alignment(source)
            height, chunk = self._reader.granularity(source)
            height, align = min(height, matrix), math.lcm(block, chunk)
            for low, high in leaves.cuts(first, last, height, step, align):
                cut = [Part(p.column, p.out[low + shift : high + shift]) for p in parts]
                yield Tile(
                    sum(part.out.nbytes for part in cut),
                    encoding.stored_bytes(source, low, high, columns),
                    lambda entry=entry, low=low, cut=cut: self._fill(entry, low, cut),
                )

    def _fill(self, entry: Entry, start: int, parts: Sequence[Part]) -> Faults | None:
        """Puts rows of one stored weight, and some of its columns, into their parts.

        Runs in a thread.
        """
        encoding = entry.encoding or PLAIN
        found = encoding.fill(self._reader, entry.source, start, parts, self.check_finite)
        if isinstance(found, Failure):
            return Faults(found, 1)
        num_values, num_codes = found
        return Faults(entry, num_values, num_codes) if num_values else None

    def _failure(self, source: Entry | Failure, counts: Sequence[int]) -> Failure:
        if isinstance(source, Failure):
            return source
        found = (source.encoding or PLAIN).describe(*counts)
        return Failure("value", source.source.file, source.source.name, found, "finite weights")

    def _last_checks(self) -> list[Failure]:
        return _compare_tied(self._reader, self._plan)


def _compare_tied(reader: TensorReader, plan: Plan) -> list[Failure]:
    """A stored head that is said to be tied must be the embedding, or the config is wrong."""
    tied = [kept.source for kept in plan.kept if kept.reason == TIED_REASON]
    if not tied:
        return []
    embedding = next(
        entry for entry in plan.entries if entry.pieces[0].leaf == "embed_tokens.weight"
    )
    by_suffix = {_suffix(info): info for info in embedding.tensors}
    failures = []
    for head in tied:
        twin = by_suffix.get(_suffix(head))
        if twin is None or not _same(reader, head, twin):
            failures.append(
                Failure(
                    "value",
                    head.file,
                    head.name,
                    f"{head}, other values than {(twin or embedding.source).name}",
                    "the same, or a config without tie_word_embeddings",
                )
            )
    return failures


def _suffix(info: TensorInfo) -> str:
    return info.name.rpartition(".")[2]


def _same(reader: TensorReader, one: TensorInfo, other: TensorInfo) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    rows, columns = leaves.as_matrix(one.shape)
    step = max(1, leaves.TILE_BYTES * rows // max(one.num_bytes, 1))
    for start in range(0, rows, step):
        extent = (min(step, rows - start), columns)
        ours, theirs = (np.empty(extent, DTYPES[one.dtype]) for _ in range(2))
        reader.read_rectangle(one, columns, start, 0, ours)
        reader.read_rectangle(other, columns, start, 0, theirs)
        if ours.tobytes() != theirs.tobytes():
            return False
    return True
