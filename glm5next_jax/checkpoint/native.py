"""Converted checkpoints: our leaves as one Orbax tree, beside everything else of the source.

config.json          the configuration, in the released form
glm5next_jax.json    what marks the directory as converted: format, version, dtypes
weights/             Orbax PyTree {leaf path: array}
unused/              safetensors files with the tensors that no leaf takes, bytes as they were
tokenizer.json, …    copied
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from glm5next_jax.checkpoint.assemble import non_finite_count
from glm5next_jax.checkpoint.errors import CheckpointError, Failure
from glm5next_jax.checkpoint.safetensors_reader import (
    SafetensorsDirectory,
    TensorInfo,
    read_json_object,
)
from glm5next_jax.config import Glm5NextConfig

FORMAT = "glm5next-jax"
VERSION = 1
HEADER_NAME = "glm5next_jax.json"
WEIGHTS_NAME = "weights"
UNUSED_NAME = "unused"
COPIED_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip
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
    with _checkpointer() as checkpointer:
        checkpointer.save(directory / WEIGHTS_NAME, args=ocp.args.PyTreeSave(dict(leaves)))
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


def read(
    directory: epath.Path, specs: Mapping[str, Any], *, check_finite: bool = True
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, array) for every leaf, in the dtype it was written in.

    Raises:
      CheckpointError: leaves are missing, unknown, or of a wrong shape; or a value is not finite.
    """
    weights = absolute(directory) / WEIGHTS_NAME
    with _checkpointer() as checkpointer:
        stored = checkpointer.metadata(weights).item_metadata.tree
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
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        leaves = checkpointer.restore(
            weights, args=ocp.args.PyTreeRestore(restore_args=dict.fromkeys(stored, as_numpy))
        )
    for path in specs:
        leaf = leaves.pop(path)
        if check_finite and (bad := non_finite_count(leaf)):
            found = f"{bad} values that are NaN or infinite"
            failures.append(Failure("value", WEIGHTS_NAME, path, found, "finite weights"))
        yield path, leaf
    if failures:
        raise CheckpointError(f"{directory}: unusable weights", failures)


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
