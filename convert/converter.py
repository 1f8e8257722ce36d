"""Released checkpoint in, converted checkpoint out: piece by piece, continued where it ended."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from convert import files, safetensors_writer
from convert.journal import Journal
from convert.progress import Mode, Progress
from convert.released_format import without_paths
from convert.tree import FILE_BYTES, TreeWriter, indices
from glm5next_jax import __version__
from glm5next_jax.checkpoint import CheckpointError, native, report
from glm5next_jax.checkpoint.assemble import StoredLeaves
from glm5next_jax.checkpoint.leaves import Index, non_finite_count
from glm5next_jax.checkpoint.safetensors_reader import DTYPES
from glm5next_jax.checkpoint.source import DtypeChoice, Source, open_source
from glm5next_jax.files import is_url, require_driver
from glm5next_jax.model import param_specs

_UNUSED_FILE_BYTES = 256 << 20  # what a kill can cost
_NUM_WRITERS = 4
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a conversion did, or would do.

    Attributes:
      table: every leaf with its sources, and every tensor set aside with its reason.
      num_leaves, num_parameters, leaf_bytes: what is written as weights.
      num_unused, unused_bytes: stored tensors carried along untouched.
      kept_bytes: of these, what an earlier run had written already.
      is_new: whether anything was left to do.
    """

    table: str
    num_leaves: int
    num_parameters: int
    leaf_bytes: int
    num_unused: int
    unused_bytes: int
    kept_bytes: int = 0
    is_new: bool = True

    def __str__(self) -> str:
        text = (
            f"{self.num_leaves} leaves, {self.num_parameters:,} parameters, "
            f"{report.human_bytes(self.leaf_bytes)}; {self.num_unused} unused tensors carried "
            f"along, {report.human_bytes(self.unused_bytes)}"
        )
        if not self.is_new:
            return f"{text}; complete already, nothing to do"
        if self.kept_bytes:
            text += f"; {report.human_bytes(self.kept_bytes)} were there from an earlier run"
        return text


@dataclasses.dataclass(frozen=True)
class _Unit:
    """What is written as one, and recorded in the journal: a file of an array."""

    leaf: str
    index: Index

    @property
    def name(self) -> str:
        return (
            f"{native.WEIGHTS_NAME}/{self.leaf}/{'.'.join(str(start) for start, _ in self.index)}"
        )


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: DtypeChoice = "keep",
    dry_run: bool = False,
    overwrite: bool = False,
    check_finite: bool = True,
    mode: Mode = "auto",
) -> Summary:
    """Converts a released checkpoint directory.

    Memory is a few times the largest file that is written, whatever the size of the checkpoint.
    After any kind of end, the same call continues. What `glm5next_jax.load` gives for the result
    is, bit for bit, what it gives for the source.

    Args:
      source: directory with config.json and safetensors files.
      destination: directory to make; absent, empty, begun by the same call, or (with `overwrite`)
        another conversion. Until it is complete it holds `UNFINISHED`, and is refused by `load`.
      dtype: of the weights at rest. "keep" leaves each in the dtype in which it is stored, FP8 as
        codes and factors; NVFP4 becomes bfloat16 and float16 float32. Otherwise all weights have
        this dtype, FP8 multiplied by its factors; what must be float32 always is.
      dry_run: read headers only, and write nothing.
      overwrite: start over where another conversion is, which is deleted first.
      check_finite: refuse NaN and infinite weights, by name.
      mode: how progress is shown.

    Raises:
      CheckpointError: the source is damaged, or does not fit the model; see `glm5next_jax.load`.
      ValueError: an unsupported config; a destination that would be lost, that another process is
        writing, or that another conversion has begun.
      OSError: the destination cannot be written. What was finished is kept.
    """
    with open_source(source) as opened:
        if opened.is_converted:
            raise CheckpointError(f"{opened.path}: is a converted checkpoint already")
        target = native.absolute(require_driver(destination))
        if not dry_run:
            refuse_overlap(opened.path, target)
        specs = opened.specs(dtype)
        summary = _summarize(opened, specs)
        if dry_run:
            return summary
        # What `load` would refuse later is refused before hours of work.
        opened.tokenizer()
        opened.eos_token_ids()
        identity = {
            "format": native.FORMAT,
            "version": native.VERSION,
            "written by": __version__,
            "dtype": dtype,
            **identity_of(opened),
        }
        with Journal.open(
            target, identity, marker=native.HEADER_NAME, digest_of=_digest_of, overwrite=overwrite
        ) as journal:
            if journal.is_complete:
                return dataclasses.replace(summary, is_new=False)
            kept = _Conversion(opened, specs, journal, check_finite, mode).run()
    return dataclasses.replace(summary, kept_bytes=kept)


class _Conversion:
    """One run over what is not finished yet."""

    def __init__(
        self,
        source: Source,
        specs: Mapping[str, Any],
        journal: Journal,
        check_finite: bool,
        mode: Mode,
    ):
        self.source, self.specs, self.journal = source, specs, journal
        self.check_finite = check_finite
        self.mode: Mode = mode
        self.target = journal.destination
        self.tree = TreeWriter(self.target / native.WEIGHTS_NAME, specs)

    def run(self) -> int:
        """Makes the destination complete; returns how many bytes of it were there before."""
        files.remove_partial(self.target, (files.PARTIAL, "__lock"))
        with (
            self.source.carried() as (reader, carried),
            self.source.leaves(self.specs, check_finite=self.check_finite) as leaves,
        ):
            units = {unit.name: unit for leaf in leaves.order for unit in self._units(leaf)}
            unused = {
                f"{native.UNUSED_NAME}/{file.name}": file
                for file in safetensors_writer.plan_files(carried, _UNUSED_FILE_BYTES, "unused")
            }
            kept = self._verify(units, unused)
            cost = {
                name: leaves.source_bytes(unit.leaf, [unit.index]) for name, unit in units.items()
            }
            cost |= {
                name: sum(info.num_bytes for info in file.tensors) for name, file in unused.items()
            }
            done = sum(cost[name] for name in self.journal.finished)
            sizes = {name: self._num_bytes(unit) for name, unit in units.items()}
            sizes |= {name: file.num_bytes for name, file in unused.items()}
            left = sum(size for name, size in sizes.items() if name not in self.journal.finished)
            files.require_space(self.target, left)
            with Progress(sum(cost.values()), "converting", self.mode, done=done) as progress:
                leaves.progress = progress.update
                missing = [
                    unit for unit in units.values() if unit.name not in self.journal.finished
                ]
                self._write_leaves(leaves, missing, progress)
                for name, file in unused.items():
                    if name not in self.journal.finished:
                        progress.at(name)
                        record = safetensors_writer.write_file(
                            self.target / native.UNUSED_NAME,
                            file,
                            safetensors_writer.copied_from(reader),
                            progress.update,
                        )
                        self.journal.add(name, record.num_bytes, record.crc32)
            leaves.finish()
        self.tree.finish()
        copy_small_files(self.source, self.target)
        self._write_config()
        header = {
            "format": native.FORMAT,
            "version": native.VERSION,
            "digest": self.journal.digest,
            "leaves": {
                leaf: {"dtype": _DTYPE_NAMES[np.dtype(spec.dtype)], "shape": list(spec.shape)}
                for leaf, spec in self.specs.items()
            },
        }
        self.journal.commit(json.dumps(header).encode())
        return kept

    def _units(self, leaf: str) -> Iterator[_Unit]:
        spec = self.specs[leaf]
        for index in indices(tuple(spec.shape), np.dtype(spec.dtype).itemsize):
            yield _Unit(leaf, index)

    def _verify(self, units: Mapping[str, _Unit], unused: Mapping[str, Any]) -> int:
        """Keeps of an earlier run what still has the bytes that were written."""
        finished = dict(self.journal.finished)
        total = sum(record.num_bytes for record in finished.values())
        with (
            Progress(total, "verifying what is there", self.mode) as progress,
            concurrent.futures.ThreadPoolExecutor(_NUM_WRITERS, "verify") as pool,
        ):
            for name in finished:
                if name in units:
                    self.tree.prepare(units[name].leaf)
            for name, crc in zip(
                finished, pool.map(self._crc32_for(units, unused), finished), strict=True
            ):
                progress.at(name)
                progress.update(finished[name].num_bytes)
                if crc != finished[name].crc32:
                    self.journal.forget(name)
        return sum(record.num_bytes for record in self.journal.finished.values())

    def _crc32_for(
        self, units: Mapping[str, _Unit], unused: Mapping[str, Any]
    ) -> Callable[[str], int | None]:
        budget = _Budget(self._memory())

        def crc32(name: str) -> int | None:
            if name not in units:
                path = self.target / name
                return files.crc32_of(path) if name in unused and path.exists() else None
            held = 2 * self._num_bytes(units[name])
            budget.take(held)
            try:
                values = self.tree.read(units[name].leaf, units[name].index)
                # An earlier run may have been allowed what this one is not.
                if values is None or (self.check_finite and non_finite_count(values)):
                    return None
                return _crc32(values)
            finally:
                budget.give(held)

        return crc32

    def _num_bytes(self, unit: _Unit) -> int:
        size = math.prod(stop - start for start, stop in unit.index)
        return size * np.dtype(self.specs[unit.leaf].dtype).itemsize

    def _write_leaves(
        self, leaves: StoredLeaves, units: Iterable[_Unit], progress: Progress
    ) -> None:
        """Reads units one after the other, each by several threads, while others are written."""
        budget = _Budget(self._memory() - leaves.scratch_bytes)
        waiting: collections.deque[concurrent.futures.Future] = collections.deque()

        def take() -> None:
            self.journal.add(*waiting.popleft().result())

        pool = concurrent.futures.ThreadPoolExecutor(_NUM_WRITERS, "write")
        try:
            leaf = ""
            for unit in units:
                if unit.leaf != leaf and leaves.has_faults:
                    break
                leaf = unit.leaf
                while waiting and waiting[0].done():
                    take()
                # tensorstore holds what it was given, and that once more as it is stored.
                held = 2 * self._num_bytes(unit)
                budget.take(held)
                progress.at(leaf)
                self.tree.prepare(leaf)
                values = leaves.read(leaf, [unit.index])
                if leaves.has_faults:  # not to be kept: another run must find it again
                    budget.give(held)
                    continue
                waiting.append(pool.submit(self._write, unit, values, budget, held))
                del values
            while waiting:
                take()
        finally:
            pool.shutdown(cancel_futures=True)
            for future in waiting:  # after a failure: what was written all the same
                if not future.cancelled() and future.exception() is None:
                    self.journal.add(*future.result())
        if leaves.has_faults:
            leaves.finish()

    def _memory(self) -> int:
        """Bytes that units under way may take: with the reader's, three times the largest."""
        largest = max(self._num_bytes(unit) for leaf in self.specs for unit in self._units(leaf))
        return 3 * max(largest, FILE_BYTES // 4)

    def _write(
        self, unit: _Unit, values: list[np.ndarray], budget: _Budget, held: int
    ) -> tuple[str, int, int]:
        """Writes what is in the list, and lets go of it. Runs in a thread."""
        try:
            crc, num_bytes = _crc32(values[0]), values[0].nbytes
            self.tree.write(unit.leaf, unit.index, values.pop())
            return unit.name, num_bytes, crc
        finally:
            budget.give(held)

    def _write_config(self) -> None:
        config = without_paths(self.source.config.to_hf())
        stated = config.pop("quantization_config", None)
        if any(np.dtype(spec.dtype) == DTYPES["F8_E4M3"] for spec in self.specs.values()):
            quantization = self.source.quantization
            config["quantization_config"] = {
                **(stated if stated and quantization.method == "fp8" else {"quant_method": "fp8"}),
                "weight_block_size": list(quantization.weight_block_size),
            }
        files.write_atomic(self.target / "config.json", _json(config))


class _Budget:
    """Bytes that several threads share; who asks for more than is left waits."""

    def __init__(self, limit: int):
        self._left = self._limit = limit
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> None:
        with self._changed:
            # What is larger than all of it goes alone.
            self._changed.wait_for(lambda: num_bytes <= self._left or self._left == self._limit)
            self._left -= num_bytes

    def give(self, num_bytes: int) -> None:
        with self._changed:
            self._left += num_bytes
            self._changed.notify_all()


def identity_of(source: Source) -> dict[str, Any]:
    """What of a source decides what is made of it: its tensors, and the state of its files."""
    names = sorted({info.file for info in source.reader.tensors})
    names += [name for name in source.small_files() if name not in names]
    stats = {}
    for name in names:
        path = source.path / name
        if path.is_dir():  # the arrays of a converted directory; its header tells them apart
            path = source.path / native.HEADER_NAME
        stat = path.stat()
        stats[name] = f"{stat.length} bytes of time {stat.mtime}"
    tensors = [
        [info.name, info.dtype, list(info.shape), info.file, info.offset]
        for info in source.reader.tensors
    ]
    digest = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
    return {"source": stats, "tensors": digest}


def copy_small_files(source: Source, target: epath.Path) -> None:
    """Copies tokenizer and the like as they are."""
    for name in source.small_files():
        if name != "config.json":
            files.write_atomic(target / name, (source.path / name).read_bytes())


def refuse_overlap(source: epath.Path, destination: epath.Path) -> None:
    """Replacing the source, or writing into it, would destroy what is read."""
    if is_url(source) or is_url(destination):
        return
    ours, theirs = pathlib.Path(destination).resolve(), pathlib.Path(source).resolve()
    if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
        raise ValueError(f"{destination}: overlaps the source {source}; give another directory")


def _digest_of(marker: epath.Path) -> str | None:
    """The digest in the header of a converted directory, also of an earlier version's."""
    try:
        header = json.loads(marker.read_text())
    except ValueError:
        return None
    if not isinstance(header, dict) or header.get("format") != native.FORMAT:
        return None
    return str(header.get("digest", ""))


def _summarize(source: Source, specs: Mapping[str, Any]) -> Summary:
    plan = source.plan(specs)
    dtypes = {leaf: np.dtype(spec.dtype) for leaf, spec in specs.items()}
    sizes = {leaf: math.prod(spec.shape) for leaf, spec in specs.items()}
    unused = [kept.source for kept in plan.kept if kept.is_carried]
    return Summary(
        table=report.table(plan, dtypes),
        num_leaves=len(sizes),
        num_parameters=sum(sizes[leaf] for leaf in param_specs(source.config)),
        leaf_bytes=sum(size * dtypes[leaf].itemsize for leaf, size in sizes.items()),
        num_unused=len(unused),
        unused_bytes=sum(info.num_bytes for info in unused),
    )


def _crc32(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
