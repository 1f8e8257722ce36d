"""Filling leaves from stored tensors: one tensor at a time, straight into its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import ml_dtypes
import numpy as np

from glm5next_jax.checkpoint import quantized
from glm5next_jax.checkpoint.errors import CheckpointError, Failure
from glm5next_jax.checkpoint.mapping import TIED_REASON, Entry, Plan
from glm5next_jax.checkpoint.safetensors_reader import SafetensorsDirectory

_BLOCK_BYTES = 16 << 20  # of a stored tensor in memory at once


def assemble(
    reader: SafetensorsDirectory,
    plan: Plan,
    dtypes: Mapping[str, np.dtype],
    *,
    check_finite: bool = True,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every leaf of `plan` as soon as it is complete, as (path, array).

    Files are read from front to back. Beside the leaves under way, one block of one stored tensor
    is in memory.

    Args:
      reader: the directory that the plan was made for.
      plan: what fills what.
      dtypes: dtype of each leaf, bfloat16 or float32.
      check_finite: whether to refuse NaN and infinity.
      progress: called with the number of bytes just read.

    Raises:
      CheckpointError: after the last leaf, if any stored tensor gives a value that is not finite;
        all such tensors are named.
    """
    failures: list[Failure] = []
    leaves: dict[str, np.ndarray] = {}
    waiting = dict.fromkeys(plan.specs, 0)
    for entry in plan.entries:
        for piece in entry.pieces:
            waiting[piece.leaf] += 1
    order = {file: rank for rank, file in enumerate(sorted({e.source.file for e in plan.entries}))}
    for entry in sorted(plan.entries, key=lambda e: (order[e.source.file], e.source.offset)):
        for piece in entry.pieces:
            if piece.leaf not in leaves:
                shape = tuple(plan.specs[piece.leaf].shape)
                leaves[piece.leaf] = np.empty(shape, dtypes[piece.leaf])
        bad = _fill(reader, entry, leaves, check_finite, progress)
        if bad:
            failures.append(_not_finite(reader, entry, bad))
        for piece in entry.pieces:
            waiting[piece.leaf] -= 1
            if waiting[piece.leaf] == 0:
                yield piece.leaf, leaves.pop(piece.leaf)
    failures += _compare_tied(reader, plan)
    if failures:
        raise CheckpointError(f"{reader.path}: unusable weights", failures)


def non_finite_count(array: np.ndarray) -> int:
    """How many elements of a bfloat16 or float32 array are NaN or infinite."""
    if array.dtype == ml_dtypes.bfloat16:
        exponent = np.uint16(0x7F80)
        return int(np.count_nonzero((array.view(np.uint16) & exponent) == exponent))
    return array.size - int(np.count_nonzero(np.isfinite(array)))


def _fill(
    reader: SafetensorsDirectory,
    entry: Entry,
    leaves: Mapping[str, np.ndarray],
    check_finite: bool,
    progress: Callable[[int], object],
) -> int:
    """Copies one stored tensor into its places; returns how many values are not finite."""
    source, bad = entry.source, 0
    scale = None if entry.scale is None else reader.read(entry.scale)
    for start, stop in _row_blocks(entry):
        stored = reader.read(source, start, stop)
        num_bytes = stored.nbytes
        if scale is not None:
            stored = _dequantize_rows(stored, scale, entry, start, stop)
        # Rows of the view that these stored rows are.
        first = start * entry.view[0] // source.shape[0]
        last = stop * entry.view[0] // source.shape[0]
        values = stored.reshape(last - first, *entry.view[1:])
        for piece in entry.pieces:
            leaf = leaves[piece.leaf]
            if piece.axis == 0:
                low = max(first, piece.source_start)
                high = min(last, piece.source_start + piece.size)
                if low >= high:
                    continue
                shift = piece.target_start - piece.source_start
                target, part = leaf[low + shift : high + shift], values[low - first : high - first]
            else:
                columns = slice(piece.source_start, piece.source_start + piece.size)
                target, part = leaf[first:last], values[:, columns]
            with np.errstate(over="ignore", invalid="ignore"):  # counted, and reported by name
                np.copyto(target, part, casting="unsafe")
            if check_finite:
                bad += non_finite_count(target)
        progress(num_bytes)
    if entry.scale is not None:
        progress(entry.scale.num_bytes)
    return bad


def _row_blocks(entry: Entry) -> Iterator[tuple[int, int]]:
    """Ranges of stored rows to read at a time: whole FP8 blocks, whole rows of the view."""
    source = entry.source
    rows = source.shape[0]
    if entry.view[0] % rows:  # one expert, or a vector under leading ones: small, so all at once
        yield 0, rows
        return
    step = max(1, _BLOCK_BYTES * rows // max(source.num_bytes, 1))
    if entry.block is not None and len(source.shape) == 2:
        step = max(1, step // entry.block[0]) * entry.block[0]
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _dequantize_rows(
    codes: np.ndarray, scale: np.ndarray, entry: Entry, start: int, stop: int
) -> np.ndarray:
    """The float32 product; its one rounding is the copy into the leaf."""
    assert entry.block is not None
    height = entry.block[0] if codes.ndim == 2 else 1
    factors = scale[start // height : -(-stop // height)]
    return quantized.dequantize(codes, factors, np.float32, block=entry.block)


def _not_finite(reader: SafetensorsDirectory, entry: Entry, count: int) -> Failure:
    found = f"{count} values that are NaN or infinite"
    if entry.scale is not None:
        codes = quantized.count_nan_codes(reader.read(entry.source))
        found += f" after scaling ({codes} NaN codes)"
    return Failure("value", entry.source.file, entry.source.name, found, "finite weights")


def _compare_tied(reader: SafetensorsDirectory, plan: Plan) -> list[Failure]:
    """A stored head that is said to be tied must be the embedding, or the config is wrong."""
    tied = [kept.source for kept in plan.kept if kept.reason == TIED_REASON]
    embedding = next(
        entry.source for entry in plan.entries if entry.pieces[0].leaf == "embed_tokens.weight"
    )
    failures = []
    for head in tied:
        same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
        step = max(1, _BLOCK_BYTES * head.shape[0] // max(head.num_bytes, 1)) if head.shape else 1
        for start in range(0, head.shape[0] if same else 0, step):
            stop = min(start + step, head.shape[0])
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
