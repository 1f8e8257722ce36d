"""Any checkpoint in, a released one out: the names, shapes and files that everybody reads.

Reads and writes tile by tile, so memory is some tiles whatever the size of a tensor. A file is the
unit that is finished or not; the index is written last and makes the directory complete.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from convert import files, safetensors_writer
from convert.converter import copy_small_files, identity_of, refuse_overlap
from convert.export_content import BF16, F32, Content, ExportDtype, Weight
from convert.journal import Journal
from convert.progress import Mode, Progress
from convert.quantize import quantize
from convert.safetensors_writer import SCALE_SUFFIX, OutFile, OutTensor
from glm5next_jax import __version__
from glm5next_jax.checkpoint import CheckpointError, Failure, leaves, native, report
from glm5next_jax.checkpoint.encodings import PLAIN, Fp8Blocks
from glm5next_jax.checkpoint.leaves import Part
from glm5next_jax.checkpoint.safetensors_header import DTYPES, TensorInfo
from glm5next_jax.checkpoint.safetensors_reader import INDEX_NAME
from glm5next_jax.checkpoint.source import Source, open_source
from glm5next_jax.files import require_driver

MAX_FILE_BYTES = 5_000_000_000

_DTYPES = ("keep", "bfloat16", "fp8")
_STEM = "model"
_DIGEST = "glm5next_jax_digest"
_TILE_BYTES = 8 << 20  # of the widest form that a tile has
_NUM_THREADS = 4
_TILES_AHEAD = 8


@dataclasses.dataclass(frozen=True)
class Summary:
    """What an export wrote.

    Attributes:
      num_tensors, num_files, num_bytes: all of it, factors and carried tensors included.
      num_quantized: weights that were rounded to FP8.
      num_carried, carried_bytes: of these, tensors of the vision tower and of MTP, as they were.
      kept_bytes: bytes of files that an earlier run had written already.
      is_new: whether anything was left to do.
    """

    num_tensors: int
    num_files: int
    num_bytes: int
    num_quantized: int
    num_carried: int
    carried_bytes: int
    kept_bytes: int = 0
    is_new: bool = True

    def __str__(self) -> str:
        text = (
            f"{self.num_tensors} tensors, {report.human_bytes(self.num_bytes)}, in "
            f"{self.num_files} files"
        )
        if self.num_quantized:
            text += f"; {self.num_quantized} weights rounded to FP8"
        text += (
            f"; {self.num_carried} tensors of vision and MTP as they were, "
            f"{report.human_bytes(self.carried_bytes)}"
        )
        if not self.is_new:
            return f"{text}; complete already, nothing to do"
        if self.kept_bytes:
            text += f"; {report.human_bytes(self.kept_bytes)} were there from an earlier run"
        return text


def export(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: ExportDtype = "keep",
    overwrite: bool = False,
    mode: Mode = "auto",
    max_file_bytes: float = MAX_FILE_BYTES,
    check_finite: bool = True,
) -> Summary:
    """Writes a checkpoint in the released format, which serving engines and transformers read.

    Memory is some tiles of 8 MiB, whatever the size of the checkpoint. After any kind of end, the
    same call continues: files that are finished are verified by their checksums and kept.

    Args:
      source: a directory that `glm5next_jax.load` reads, converted or not, with any of its names.
      destination: directory to make; absent, empty, begun by the same call, or (with `overwrite`)
        another export. It is complete when `model.safetensors.index.json` is there.
      dtype: "keep" writes each tensor in the dtype in which it is stored, FP8 as codes and factors;
        what the format has no form for (NVFP4, FP8 whose blocks a tensor would part) becomes
        bfloat16. "bfloat16" is the released BF16 checkpoint: all but decays, correction biases and
        hyper-connection bases and scales, which are float32. "fp8" is the released FP8 checkpoint:
        that, with experts, dense feed-forwards and the latent projections of sparse attention as
        FP8 (`quantize.quantize`), and with what is FP8 already as it is. Tensors of the vision
        tower and of MTP are written as they are, always.
      overwrite: start over where another export is, which is deleted first.
      mode: how progress is shown.
      max_file_bytes: of a file; a tensor that is larger has one of its own.
      check_finite: refuse NaN and infinite weights, by name. The file that would hold them is not
        written.

    Raises:
      CheckpointError: the source is damaged, or does not fit the model; see `glm5next_jax.load`.
      ValueError: an unsupported config or argument; a model with smear, which has no released form;
        a destination that would be lost, that another process is writing, or that another command
        has begun.
      OSError: the destination cannot be written. What was finished is kept.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"{dtype=}; expected one of {_DTYPES}")
    if not max_file_bytes >= 1:
        raise ValueError(f"{max_file_bytes=}; expected at least 1")
    with open_source(source) as opened, opened.carried() as (reader, carried):
        target = native.absolute(require_driver(destination))
        refuse_overlap(opened.path, target)
        content = Content(opened, dtype, carried)
        planned = safetensors_writer.plan_files(content.tensors, int(max_file_bytes), _STEM)
        summary = _summary(content, len(planned))
        identity = {
            "format": "released",
            "version": 1,
            "written by": __version__,
            "dtype": dtype,
            "max_file_bytes": int(max_file_bytes),
            "check_finite": check_finite,
            **identity_of(opened),
        }
        with Journal.open(
            target, identity, marker=INDEX_NAME, digest_of=_digest_of, overwrite=overwrite
        ) as journal:
            if journal.is_complete:
                return dataclasses.replace(summary, is_new=False)
            export_ = _Export(opened, content, planned, reader, journal, check_finite, mode)
            return dataclasses.replace(summary, kept_bytes=export_.run())


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Some of the bytes of a tensor, with the factors that came up on the way.

    `faults` says how many values are not finite, and how many codes are NaN; or it is the failure.
    """

    values: np.ndarray
    factors: np.ndarray | None = None
    faults: tuple[int, int] | Failure = (0, 0)


class _Export:
    """One run over the files that are not finished yet."""

    def __init__(
        self,
        source: Source,
        content: Content,
        planned: list[OutFile[OutTensor]],
        carried_reader: Any,
        journal: Journal,
        check_finite: bool,
        mode: Mode,
    ):
        self.source, self.content, self.planned = source, content, planned
        self.carried_reader, self.journal = carried_reader, journal
        self.check_finite = check_finite
        self.mode: Mode = mode
        self.target = journal.destination

    def run(self) -> int:
        """Makes the destination complete; returns how many bytes of it were there before."""
        files.remove_partial(self.target, (files.PARTIAL,))
        kept = self._verify()
        missing = [file for file in self.planned if file.name not in self.journal.finished]
        total = sum(file.num_bytes for file in self.planned)
        files.require_space(self.target, sum(file.num_bytes for file in missing))
        pool = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "tiles")
        try:
            with Progress(total, "exporting", self.mode, done=kept) as progress:
                for file in missing:
                    chunks = _Chunks(self, file, pool, progress)
                    record = safetensors_writer.write_file(
                        self.target, file, chunks.of, progress.update
                    )
                    self.journal.add(file.name, record.num_bytes, record.crc32)
        finally:
            pool.shutdown(cancel_futures=True)
        copy_small_files(self.source, self.target)
        files.write_atomic(self.target / "config.json", _json(self.content.hf_config()))
        self.journal.commit(_json(self._index()))
        return kept

    def _verify(self) -> int:
        """Keeps of an earlier run the files that still have the bytes that were written."""
        finished = dict(self.journal.finished)
        total = sum(record.num_bytes for record in finished.values())
        with Progress(total, "verifying what is there", self.mode) as progress:
            for name, record in finished.items():
                progress.at(name)
                path = self.target / name
                if not path.exists() or files.crc32_of(path, progress.update) != record.crc32:
                    self.journal.forget(name)
        return sum(record.num_bytes for record in self.journal.finished.values())

    def _index(self) -> dict[str, Any]:
        return {
            "metadata": {"total_size": self.content.num_bytes, _DIGEST: self.journal.digest},
            "weight_map": {
                tensor.name: file.name for file in self.planned for tensor in file.tensors
            },
        }

    def tiles_of(self, tensor: OutTensor) -> Iterator[Callable[[], _Tile]]:
        """The work for one tensor, in the order of its bytes; none for factors that are computed
        with their codes."""
        info = self.content.carried.get(tensor.name)
        if info is not None:
            for start in range(0, info.num_bytes, _TILE_BYTES):
                yield functools.partial(self._carried, info, start)
            return
        weight = self.content.weights.get(tensor.name)
        if weight is None:
            weight = self.content.weights[tensor.name.removesuffix(SCALE_SUFFIX)]
            if weight.copied is not None:
                yield functools.partial(self._copied_factors, weight)
            return
        num_rows, num_columns = weight.matrix
        _, chunk = self.source.reader.granularity(weight.entry.source)
        # Blocks are not cut, and what the reader decodes as one is decoded once.
        align = math.lcm(chunk, 1 if weight.block is None else weight.block[0])
        step = max(_TILE_BYTES // (4 * max(num_columns, 1)) // align, 1) * align
        for start in range(0, num_rows, step):
            yield functools.partial(self._tile, weight, start, min(start + step, num_rows))

    def _carried(self, info: TensorInfo, start: int) -> _Tile:
        values = np.empty(min(_TILE_BYTES, info.num_bytes - start), np.uint8)
        self.carried_reader.read_bytes(info, start, values)
        return _Tile(values)

    def _tile(self, weight: Weight, start: int, stop: int) -> _Tile:
        """Rows [start, stop) of a weight. Runs in a thread."""
        entry, columns = weight.entry, weight.matrix[1]
        stored = DTYPES[entry.source.dtype]
        as_codes = weight.copied is not None
        encoding = PLAIN if as_codes else entry.encoding or PLAIN
        dtype = DTYPES[weight.tensor.dtype]
        if weight.block is not None and not as_codes:
            # bfloat16 is quantised as it is; anything else from the exact product.
            dtype = DTYPES[BF16 if entry.source.dtype == BF16 else F32]
        out = np.empty((stop - start, columns), dtype)
        is_half = dtype == np.float16  # kept as it is, and unknown to what counts
        faults = encoding.fill(
            self.source.reader,
            entry.source,
            weight.row + start,
            [Part(0, out)],
            self.check_finite and not is_half,
        )
        if is_half and self.check_finite:
            assert stored == dtype
            faults = (int(np.count_nonzero(~np.isfinite(out))), 0)
        if weight.block is None or as_codes:
            return _Tile(out, faults=faults)
        codes, factors = quantize(out, weight.block)
        return _Tile(codes, factors, faults)

    def _copied_factors(self, weight: Weight) -> _Tile:
        """The factors of FP8 that stays as it is. Runs in a thread."""
        encoding = weight.entry.encoding
        assert isinstance(encoding, Fp8Blocks) and weight.copied is not None
        scale, (rows, columns) = encoding.scale, weight.copied
        first, last = rows[0], rows[-1] + 1
        stored = np.empty((last - first, scale.shape[-1]), DTYPES[scale.dtype])
        self.source.reader.read_rectangle(scale, scale.shape[-1], first, 0, stored)
        factors = stored.astype(np.float32)[np.ix_([row - first for row in rows], columns)]
        count = leaves.non_finite_count(factors) if self.check_finite else 0
        if not count:
            return _Tile(factors)
        found = PLAIN.describe(count, 0)
        return _Tile(
            factors, faults=Failure("value", scale.file, scale.name, found, "finite factors")
        )

    def failure(self, tensor: OutTensor, counts: tuple[int, int]) -> Failure:
        weight = self.content.weights[tensor.name]
        entry = weight.entry
        encoding = PLAIN if weight.copied is not None else entry.encoding or PLAIN
        found = encoding.describe(*counts)
        return Failure("value", entry.source.file, entry.source.name, found, "finite weights")


class _Chunks:
    """The bytes of one file's tensors, some tiles ahead of who takes them."""

    def __init__(
        self,
        export_: _Export,
        file: OutFile[OutTensor],
        pool: concurrent.futures.Executor,
        progress: Progress,
    ):
        self._export, self._pool, self._progress = export_, pool, progress
        self._last = file.tensors[-1]
        self._jobs = ((t.name, job) for t in file.tensors for job in export_.tiles_of(t))
        self._ahead: collections.deque[tuple[str, concurrent.futures.Future[_Tile]]]
        self._ahead = collections.deque()
        self._factors: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        self._failures: list[Failure] = []
        self._refill()

    def _refill(self) -> None:
        while len(self._ahead) < _TILES_AHEAD:
            name, job = next(self._jobs, ("", None))
            if job is None:
                return
            self._ahead.append((name, self._pool.submit(job)))

    def of(self, tensor: OutTensor) -> Iterator[np.ndarray]:
        """`chunks_of` of `safetensors_writer.write_file`.

        Raises:
          CheckpointError: behind the last tensor, where any held a value that is not finite, so
            that the file is not kept and all are named.
        """
        self._progress.at(tensor.name)
        yield from self._factors.pop(tensor.name, ())
        counts = [0, 0]
        while self._ahead and self._ahead[0][0] == tensor.name:
            tile = self._ahead.popleft()[1].result()
            self._refill()
            if tile.factors is not None:
                self._factors[tensor.name + SCALE_SUFFIX].append(tile.factors)
            if isinstance(tile.faults, Failure):
                self._failures.append(tile.faults)
            else:
                counts = [count + more for count, more in zip(counts, tile.faults, strict=True)]
            yield tile.values
        if counts[0]:
            self._failures.append(self._export.failure(tensor, (counts[0], counts[1])))
        if tensor is self._last and self._failures:
            failures = tuple(dict.fromkeys(self._failures))
            raise CheckpointError(f"{self._export.source.path}: unusable weights", failures)


def _summary(content: Content, num_files: int) -> Summary:
    quantized = [w for w in content.weights.values() if w.block is not None and w.copied is None]
    return Summary(
        num_tensors=len(content.tensors),
        num_files=num_files,
        num_bytes=content.num_bytes,
        num_quantized=len(quantized),
        num_carried=len(content.carried),
        carried_bytes=sum(info.num_bytes for info in content.carried.values()),
    )


def _digest_of(marker: epath.Path) -> str | None:
    """The digest in the index of a directory that `export` wrote; None in any other's."""
    try:
        index = json.loads(marker.read_text())
    except ValueError:
        return None
    metadata = index.get("metadata") if isinstance(index, Mapping) else None
    digest = metadata.get(_DIGEST) if isinstance(metadata, Mapping) else None
    return digest if isinstance(digest, str) else None


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
