"""Released checkpoint in, converted checkpoint out."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from typing import Literal

import ml_dtypes
import numpy as np
from etils import epath

from glm5next_jax import checkpoint
from glm5next_jax.checkpoint import CheckpointError, assemble, mapping, memory, native, report
from glm5next_jax.checkpoint.safetensors_reader import SafetensorsDirectory, existing_directory
from glm5next_jax.model import param_specs

DtypeChoice = Literal["bfloat16", "float32", "keep"]


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a conversion did, or would do.

    Attributes:
      table: every leaf with its sources, and every tensor set aside with its reason.
      num_leaves, num_parameters, leaf_bytes: what is written as weights.
      num_unused, unused_bytes: stored tensors carried along untouched.
    """

    table: str
    num_leaves: int
    num_parameters: int
    leaf_bytes: int
    num_unused: int
    unused_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.num_leaves} leaves, {self.num_parameters:,} parameters, "
            f"{report.human_bytes(self.leaf_bytes)}; {self.num_unused} unused tensors carried "
            f"along, {report.human_bytes(self.unused_bytes)}"
        )


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: DtypeChoice = "keep",
    dry_run: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> Summary:
    """Converts a released checkpoint directory.

    The destination appears complete or not at all. What `glm5next_jax.load` gives for it is, bit
    for bit, what it gives for the source at the same dtype.

    Args:
      source: directory with config.json and safetensors files.
      destination: directory to make; absent, empty, or (with `overwrite`) converted before.
      dtype: of the weights at rest. "keep" takes the widest dtype among the stored tensors of each
        leaf: bfloat16 for FP8, float32 for float16. Leaves that must be float32 always are.
      dry_run: read headers only, and write nothing.
      overwrite: replace a destination that is a converted checkpoint.
      quiet: no progress bar.

    Raises:
      CheckpointError: the source is damaged, or does not fit the model; see `glm5next_jax.load`.
      ValueError: an unsupported config, or a destination that would be lost.
      MemoryError: the converted weights do not fit into memory.
    """
    directory = existing_directory(source)
    target = native.absolute(destination)
    if native.is_converted(directory):
        raise CheckpointError(f"{directory}: is a converted checkpoint already")
    config = checkpoint.config_of(directory)
    if not dry_run:
        _refuse_overlap(directory, target)
        native.check_destination(target, overwrite=overwrite)

    # Leaves that are float32 even in a bfloat16 model show which must be.
    specs = param_specs(config, param_dtype="bfloat16")
    with SafetensorsDirectory(directory) as reader:
        plan = checkpoint.plan_of(reader, config, specs)
        dtypes = _dtypes(plan, dtype)
        summary = _summarize(plan, dtypes)
        if dry_run:
            return summary
        memory.require_free(
            summary.leaf_bytes,
            f"{directory}: its converted form",
            memory.free_host_bytes(),
            "in host memory",
        )
        unused = [kept.source for kept in plan.kept if kept.is_carried]
        total = sum(checkpoint.plan_bytes(plan)) + summary.unused_bytes
        with (
            native.replacing(target, overwrite=overwrite) as work,
            checkpoint.progress_bar(total, "converting", quiet=quiet) as bar,
        ):
            leaves = dict(assemble.assemble(reader, plan, dtypes, progress=bar.update))
            native.write(work, config, leaves, reader, unused, progress=bar.update)
    return summary


def _dtypes(plan: mapping.Plan, choice: DtypeChoice) -> dict[str, np.dtype]:
    """Dtype at rest of every leaf."""
    float32, bfloat16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
    wide = {leaf for leaf, spec in plan.specs.items() if spec.dtype == float32}
    if choice == "float32":
        wide = set(plan.specs)
    elif choice == "keep":
        wide |= {
            piece.leaf
            for entry in plan.entries
            for piece in entry.pieces
            if entry.source.dtype in ("F32", "F16")
        }
    return {leaf: float32 if leaf in wide else bfloat16 for leaf in plan.specs}


def _summarize(plan: mapping.Plan, dtypes: dict[str, np.dtype]) -> Summary:
    sizes = {leaf: math.prod(spec.shape) for leaf, spec in plan.specs.items()}
    unused = [kept.source for kept in plan.kept if kept.is_carried]
    return Summary(
        table=report.table(plan, dtypes),
        num_leaves=len(sizes),
        num_parameters=sum(sizes.values()),
        leaf_bytes=sum(size * dtypes[leaf].itemsize for leaf, size in sizes.items()),
        num_unused=len(unused),
        unused_bytes=sum(info.num_bytes for info in unused),
    )


def _refuse_overlap(source: epath.Path, destination: epath.Path) -> None:
    """Replacing the source, or writing into it, would destroy what is read."""
    if "://" in os.fspath(source) or "://" in os.fspath(destination):
        return
    ours, theirs = pathlib.Path(destination).resolve(), pathlib.Path(source).resolve()
    if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
        raise ValueError(f"{destination}: overlaps the source {source}; give another directory")
