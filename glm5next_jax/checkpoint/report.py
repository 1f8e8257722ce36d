"""A checkpoint's plan as text, for people to read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from glm5next_jax.checkpoint.planning import Plan

_COUNTED = re.compile(r"(\.experts\.|visual\.blocks\.)([0-9]+)(?=\.)")


def table(plan: Plan, dtypes: Mapping[str, Any]) -> str:
    """The plan for people: a line per leaf, then what fills no leaf, and the sums.

    Args:
      plan: from `plan`.
      dtypes: dtype at rest of each leaf.
    """
    sources: dict[str, dict[str, list[str]]] = {leaf: {} for leaf in plan.specs}
    for entry in sorted(plan.entries, key=lambda entry: entry.pieces[0].target_start):
        encoding = entry.encoding
        note = f" ({f'{encoding.title} with scale' if encoding else entry.source.dtype})"
        for leaf in dict.fromkeys(piece.leaf for piece in entry.pieces):
            sources[leaf].setdefault(note, []).append(entry.source.name)
    rows, total = [], 0
    for leaf, spec in plan.specs.items():
        size = math.prod(spec.shape) * dtypes[leaf].itemsize
        total += size
        origin = " + ".join(
            " + ".join(_shortened(names)) + note for note, names in sources[leaf].items()
        )
        rows.append((leaf, str(dtypes[leaf]), str(list(spec.shape)), human_bytes(size), origin))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:{widths[2]}}  {row[3]:>{widths[3]}}"
        f"  <- {row[4]}"
        for row in rows
    ]
    for reason in dict.fromkeys(kept.reason for kept in plan.kept):
        group = [kept.source for kept in plan.kept if kept.reason == reason]
        size = human_bytes(sum(info.num_bytes for info in group))
        lines += ["", f"{len(group)} tensors, {size}: {reason}"]
        lines += [f"  {name}" for name in _shortened([info.name for info in group], cut=False)]
    stored = sum(entry.num_bytes for entry in plan.entries)
    num_stored = sum(len(entry.tensors) for entry in plan.entries)
    num_parameters = sum(math.prod(spec.shape) for spec in plan.specs.values())
    lines += [
        "",
        f"{num_stored} stored tensors, {human_bytes(stored)} -> {len(plan.specs)} leaves, "
        f"{num_parameters:,} parameters, {human_bytes(total)}; {len(plan.kept)} stored tensors set "
        "aside",
    ]
    return "\n".join(lines)


def human_bytes(count: float) -> str:
    """ "1.50 GiB" for 1610612736."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def _shortened(names: Sequence[str], cut: bool = True) -> list[str]:
    """Names with the numbers of experts, or of blocks, as ranges; later ones without the common
    beginning when `cut`."""
    ranges: dict[str, list[int]] = {}
    for name in names:
        match = _COUNTED.search(name)
        key = name if match is None else f"{name[: match.start(2)]}{{}}{name[match.end(2) :]}"
        ranges.setdefault(key, []).extend([] if match is None else [int(match[2])])
    out: list[str] = []
    for key, numbers in ranges.items():
        if numbers:
            low, high = min(numbers), max(numbers)
            key = key.replace("{}", f"{{{low}..{high}}}" if len(numbers) > 1 else str(low))
        out.append(key)
    if cut and len(out) > 1:
        length = len(os.path.commonprefix([name.rpartition(".")[0] for name in out]))
        length = out[0].rfind(".", 0, length) + 1
        out[1:] = ["…" + name[length:] for name in out[1:]]
    return out
