"""Filling leaves from stored tensors: each byte straight into its place, FP8 decoded on the way."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from glm5next_jax.checkpoint import leaves, quantized
from glm5next_jax.checkpoint.errors import Failure
from glm5next_jax.checkpoint.leaves import Faults, LeafReader, Part, Tile
from glm5next_jax.checkpoint.mapping import TIED_REASON, Entry, Piece, Plan
from glm5next_jax.checkpoint.safetensors_reader import DTYPES, SafetensorsDirectory


def assemble(
    reader: SafetensorsDirectory,
    plan: Plan,
    dtypes: Mapping[str, np.dtype],
    *,
    check_finite: bool = True,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every leaf of `plan` whole, as (path, array); for the arguments see `StoredLeaves`.

    Raises:
      CheckpointError: after the last leaf, if any stored tensor gives a value that is not finite;
        all such tensors are named.
    """
    with StoredLeaves(reader, plan, dtypes, check_finite=check_finite, progress=progress) as source:
        for leaf in source.order:
            everything = tuple((0, n) for n in plan.specs[leaf].shape)
            yield leaf, source.read(leaf, [everything])[0]
        source.finish()


class StoredLeaves(LeafReader):
    """Leaves of a released directory.

    Args:
      reader: the directory that the plan was made for.
      plan: what fills what.
      dtypes: of each leaf: bfloat16, float32, or float8_e4m3fn where the plan keeps codes.
      check_finite: whether `finish` refuses NaN and infinity.
      progress: called with the number of stored bytes just read.
    """

    def __init__(
        self,
        reader: SafetensorsDirectory,
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

    def _place(self, source) -> tuple[int, int]:
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
            _stored_bytes(entry, first, last, columns)
            for entry, first, last, _ in self._overlapping(leaf, start, stop)
        )

    def _tiles(self, leaf: str, start: int, stop: int, parts: Sequence[Part]) -> Iterator[Tile]:
        width = leaves.as_matrix(self._shapes[leaf])[1]
        column = parts[0].column
        columns = sum(part.out.shape[1] for part in parts)
        for entry, first, last, row in self._overlapping(leaf, start, stop):
            shift = row - start - first  # from a stored row to a row of the parts
            row_bytes = columns * DTYPES[entry.source.dtype].itemsize
            step = max(1, leaves.TILE_BYTES // max(row_bytes, 1))
            height, align = max(last, 1), 1
            if entry.block is not None:
                height, align = entry.source.shape[-2], entry.block[0]
            for low, high in leaves.cuts(first, last, height, step, align):
                cut = [Part(p.column, p.out[low + shift : high + shift]) for p in parts]
                yield Tile(
                    sum(part.out.nbytes for part in cut),
                    _stored_bytes(entry, low, high, columns),
                    lambda entry=entry, low=low, high=high, cut=cut: self._fill(
                        entry, low, high, width, column, columns, cut
                    ),
                )

    def _fill(
        self,
        entry: Entry,
        start: int,
        stop: int,
        width: int,
        column: int,
        columns: int,
        parts: Sequence[Part],
    ) -> Faults | None:
        """Puts rows [start, stop) of one stored tensor, and some of its columns, into their parts.

        Runs in a thread. FP8 rows lie in one row of matrices.
        """
        source = entry.source
        dtype = DTYPES[source.dtype]
        only = parts[0].out
        as_stored = entry.scale is None and only.dtype == dtype
        if as_stored and len(parts) == 1:
            self._reader.read_rectangle(source, width, start, column, only)
            num_bad = leaves.non_finite_count(only) if self.check_finite else 0
            return self._faults_of(entry, num_bad, num_bad if dtype.itemsize == 1 else 0)
        stored = np.empty((stop - start, columns), dtype)
        self._reader.read_rectangle(source, width, start, column, stored)
        factors = None if entry.scale is None else self._factors(entry, start, stop)
        num_bad = num_codes = 0
        for part in parts:
            first = part.column - column
            values = stored[:, first : first + part.out.shape[1]]
            if factors is None:
                with np.errstate(over="ignore", invalid="ignore"):  # counted, and reported by name
                    np.copyto(part.out, values, casting="unsafe")
                count = leaves.non_finite_count(part.out) if self.check_finite else 0
                num_codes += count if dtype.itemsize == 1 else 0
            else:
                count, codes = self._decode(entry, start, values, factors, part)
                num_codes += codes
            num_bad += count
        return self._faults_of(entry, num_bad, num_codes)

    def _factors(self, entry: Entry, start: int, stop: int) -> np.ndarray:
        """The rows of factors that belong to rows [start, stop) of FP8 codes."""
        assert entry.scale is not None
        first, last = _factor_rows(entry, start, stop)
        factors = np.empty((last - first, entry.scale.shape[-1]), np.float32)
        self._reader.read_rectangle(entry.scale, factors.shape[1], first, 0, factors)
        return factors

    def _decode(
        self, entry: Entry, start: int, codes: np.ndarray, factors: np.ndarray, part: Part
    ) -> tuple[int, int]:
        """Writes the numbers that codes mean; returns how many of each are not finite."""
        assert entry.block is not None
        rows, columns = entry.block
        first, last = part.column // columns, -(-(part.column + codes.shape[1]) // columns)
        own = factors[:, first:last]
        quantized.dequantize(
            codes,
            own,
            part.out.dtype,
            block=entry.block,
            origin=(start % entry.source.shape[-2] % rows, part.column % columns),
            out=part.out,
        )
        if not self.check_finite:
            return 0, 0
        num_codes = quantized.count_nan_codes(codes)
        with np.errstate(over="ignore", invalid="ignore"):
            largest = (np.abs(own).max(initial=0) * quantized.MAX_VALUE).astype(part.out.dtype)
        if num_codes == 0 and np.isfinite(largest):  # then so is every product
            return 0, 0
        return leaves.non_finite_count(part.out), num_codes

    def _faults_of(self, entry: Entry, num_values: int, num_codes: int) -> Faults | None:
        return Faults(entry, num_values, num_codes) if num_values else None

    def _failure(self, source: Entry, counts: Sequence[int]) -> Failure:
        values, codes = counts
        found = f"{values} values that are NaN or infinite"
        if source.scale is not None:
            found += f" after scaling ({codes} NaN codes)"
        elif codes:
            found = f"{codes} NaN codes"
        return Failure("value", source.source.file, source.source.name, found, "finite weights")

    def _last_checks(self) -> list[Failure]:
        return _compare_tied(self._reader, self._plan)


def _factor_rows(entry: Entry, start: int, stop: int) -> tuple[int, int]:
    """Rows of the factors, as one matrix, of rows [start, stop) within one matrix of codes."""
    assert entry.block is not None and entry.scale is not None
    matrix, row = divmod(start, entry.source.shape[-2])
    first = matrix * entry.scale.shape[-2]
    rows = entry.block[0]
    return first + row // rows, first - (-(row + stop - start) // rows)


def _stored_bytes(entry: Entry, start: int, stop: int, columns: int) -> int:
    """What rows [start, stop) of some columns take in the file, whole rows of factors included."""
    num_bytes = (stop - start) * columns * DTYPES[entry.source.dtype].itemsize
    if entry.scale is None or entry.block is None:
        return num_bytes
    height = entry.source.shape[-2]
    num_rows = 0
    for low, high in leaves.cuts(start, stop, height, height, entry.block[0]):
        first, last = _factor_rows(entry, low, high)
        num_rows += last - first
    return num_bytes + num_rows * entry.scale.shape[-1] * 4


def _compare_tied(reader: SafetensorsDirectory, plan: Plan) -> list[Failure]:
    """A stored head that is said to be tied must be the embedding, or the config is wrong."""
    tied = [kept.source for kept in plan.kept if kept.reason == TIED_REASON]
    embedding = next(
        entry.source for entry in plan.entries if entry.pieces[0].leaf == "embed_tokens.weight"
    )
    failures = []
    for head in tied:
        same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
        rows = head.shape[0] if head.shape else 0
        step = max(1, leaves.TILE_BYTES * rows // max(head.num_bytes, 1))
        for start in range(0, rows if same else 0, step):
            stop = min(start + step, rows)
            ours, theirs = reader.read(head, start, stop), reader.read(embedding, start, stop)
            same = same and ours.tobytes() == theirs.tobytes()
        if not same:
            failures.append(
                Failure(
                    "value",
                    head.file,
                    head.name,
                    f"{head}, other values than {embedding.name}",
                    "the same, or a config without tie_word_embeddings",
                )
            )
    return failures
