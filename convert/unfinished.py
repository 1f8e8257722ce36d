"""What a conversion or an export that was stopped has left behind."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from etils import epath

from convert.inspection import Report, Unfinished
from glm5next_jax.checkpoint import CheckpointError, native
from glm5next_jax.checkpoint.report import human_bytes
from glm5next_jax.errors import Failure
from glm5next_jax.files import file_names, read_bytes, read_json_object

# A unit is a file of at most some 64 MiB, and a line about it has some hundred bytes: a segment of
# a few seconds is far smaller than this.
_MAX_SEGMENT_BYTES = 64 << 20
_SIZE = re.compile(r"([0-9]+) bytes")


def read(directory: epath.Path) -> Report | None:
    """A report of what is unfinished, or None of a directory that is not."""
    try:
        native.refuse_unfinished(directory)
    except CheckpointError:
        return _report(directory)
    return None


def _report(directory: epath.Path) -> Report:
    folder = directory / native.UNFINISHED_NAME
    failures: list[Failure] = []
    identity: dict[str, Any] = {}
    names = file_names(folder)
    if native.IDENTITY_NAME in names:
        try:
            identity = read_json_object(folder / native.IDENTITY_NAME)
        except CheckpointError as error:
            failures.append(_failure(native.IDENTITY_NAME, error))
    units: dict[str, int] = {}
    for name in names:
        if name.startswith("done-") and name.endswith(".jsonl"):
            try:
                units |= _units(folder / name)
            except (CheckpointError, KeyError, TypeError, ValueError) as error:
                failures.append(_failure(name, error))
    is_export = identity.get("format") == "released"
    dtype = identity.get("dtype", "keep")
    sizes = _sizes(identity.get("source"))
    command = ["glm5next-convert", *(["export"] if is_export else []), "SRC", os.fspath(directory)]
    command += ["--dtype", str(dtype)]
    if identity.get("check_finite") is False and not is_export:
        command.append("--allow-non-finite")
    if failures:  # the journal is refused as it is
        command.append("--overwrite")
    weights = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    weights = weights or sizes
    largest = max(weights, key=lambda name: weights[name], default="")
    known = f"SRC is the directory whose {largest} has {human_bytes(sizes.get(largest, 0))}"
    version = identity.get("written by")
    begun = f", begun by version {version}" if version else ""
    return Report(
        path=os.fspath(directory),
        kind="unfinished",
        format=f"unfinished {'export' if is_export else 'conversion'}{begun}",
        num_tensors=0,
        failures=tuple(failures),
        unfinished=Unfinished(
            num_units=len(units),
            num_bytes=sum(units.values()),
            source_bytes=sum(weights.values()),
            finish=" ".join(command),
            source_file=known if largest else "SRC is what the command was given that began this",
        ),
    )


def _units(path: epath.Path) -> dict[str, int]:
    """Bytes of the finished units of one segment of the journal.

    Raises:
      CheckpointError, KeyError, TypeError, ValueError: it is damaged.
    """
    lines = read_bytes(path, _MAX_SEGMENT_BYTES).decode().splitlines()
    units = {}
    for line in lines:
        unit = json.loads(line)
        units[str(unit["unit"])] = int(unit["bytes"])
    return units


def _sizes(source: Any) -> dict[str, int]:
    """Bytes of the source's files, as the identity has them."""
    if not isinstance(source, dict):
        return {}
    matches = {name: _SIZE.match(str(state)) for name, state in source.items()}
    return {name: int(match[1]) for name, match in matches.items() if match}


def _failure(name: str, error: Exception) -> Failure:
    place = f"{native.UNFINISHED_NAME}/{name}"
    return Failure("file", place, "", f"damaged ({error!r:.200})", "what a conversion records")
