"""What `convert.inspector` finds, as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from glm5next_jax.checkpoint import CheckpointError
from glm5next_jax.checkpoint.recognition import StoredWeight
from glm5next_jax.checkpoint.report import human_bytes
from glm5next_jax.errors import Failure, printable

# What a conversion of any checkpoint stays below.
CONVERSION_MEMORY_BYTES = 10**9
FACTORS = "factors"
_FORMS = ("F8_E4M3", "NVFP4", "BF16", "F16", "F32")  # the order of columns; others follow


@dataclasses.dataclass
class Component:
    """The weights of one part of the model.

    Attributes:
      name: one of `components.COMPONENTS`.
      num_tensors: stored tensors, factors included.
      parameters: numbers that the weights have, by the form in which they are stored: a dtype of
        safetensors, or "NVFP4".
      num_bytes: stored bytes by form, without factors.
      num_factors, factor_bytes: factors of quantised weights.
    """

    name: str
    num_tensors: int = 0
    parameters: Counter[str] = dataclasses.field(default_factory=Counter)
    num_bytes: Counter[str] = dataclasses.field(default_factory=Counter)
    num_factors: int = 0
    factor_bytes: int = 0

    def add(self, stored: StoredWeight, form: str, size: int, count: int = 1) -> None:
        """Counts `count` weights of `size` numbers in this form, or factors without a weight."""
        source, tensors = stored.source, stored.tensors
        factors = [info for info in tensors if info is not source]
        self.num_tensors += count * len(tensors)
        self.num_factors += count * sum(math.prod(info.shape) for info in factors)
        self.factor_bytes += count * sum(info.num_bytes for info in factors)
        if source is not None:
            self.parameters[form] += count * size
            self.num_bytes[form] += count * source.num_bytes

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes.values()) + self.factor_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_tensors": self.num_tensors,
            "parameters": dict(self.parameters),
            "bytes": dict(self.num_bytes),
            "num_factors": self.num_factors,
            "factor_bytes": self.factor_bytes,
        }


@dataclasses.dataclass(frozen=True)
class Layers:
    """How many layers there are of each kind: MTP and vision by what is stored, the others by the
    config."""

    total: int
    kda: int
    sparse_attention: int
    indexers: int
    dense: int
    moe: int
    experts: int
    experts_per_token: int
    shared_experts: int
    mtp: int
    vision_blocks: int

    def __str__(self) -> str:
        moe = f"{self.moe} MoE"
        if self.moe:
            moe += (
                f" ({self.experts} experts, {self.experts_per_token} per token, "
                f"{self.shared_experts} shared)"
            )
        return (
            f"{self.total}: {self.kda} KDA, {self.sparse_attention} sparse attention "
            f"({self.indexers} with an indexer); {self.dense} dense MLP, {moe}"
        )


@dataclasses.dataclass(frozen=True)
class SetAside:
    """Tensors that fill no leaf, and why; `is_carried` if a conversion carries them along."""

    reason: str
    num_tensors: int
    num_bytes: int
    is_carried: bool


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion would make: bytes of the weights, which is also what a device holds that
    takes them as they are, and of all that it writes."""

    weight_bytes: int
    disk_bytes: int


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """How far a conversion or an export came.

    Attributes:
      num_units, num_bytes: what is recorded as written.
      source_bytes: size of the safetensors files that it is made from.
      finish: the command that continues it, SRC standing for the source.
      source_file: name and size of a file by which the source is known.
    """

    num_units: int
    num_bytes: int
    source_bytes: int
    finish: str
    source_file: str

    def __str__(self) -> str:
        text = f"{human_bytes(self.num_bytes)} written, in {self.num_units} parts"
        return f"{text}, of a source of {human_bytes(self.source_bytes)}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a checkpoint directory is.

    Attributes:
      path: as it was given.
      kind: "released", "converted" or "unfinished".
      format: the same and more in words.
      num_files, disk_bytes: of the weights; of everything in a converted directory. 0 of one that
        is behind a URL, where arrays have many files.
      num_tensors, tensor_bytes: what they hold.
      layers: None of what is unfinished.
      components: what it stores, by part of the model.
      set_aside: what of it fills no leaf.
      beside: whether vision_config, tokenizer, generation_config and chat_template are there.
      conversions: what a conversion takes, by its `--dtype`; empty unless it is possible.
      failures: everything that is wrong.
      hint: what that may come from, or "".
      unfinished: how far it came, if it is that.
    """

    path: str
    kind: str
    format: str
    num_files: int = 0
    disk_bytes: int = 0
    num_tensors: int = 0
    tensor_bytes: int = 0
    layers: Layers | None = None
    components: tuple[Component, ...] = ()
    set_aside: tuple[SetAside, ...] = ()
    beside: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    conversions: Mapping[str, Conversion] = dataclasses.field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    hint: str = ""
    unfinished: Unfinished | None = None

    @property
    def is_complete(self) -> bool:
        """Whether `glm5next_jax.load` finds everything that it needs."""
        return not self.failures and self.unfinished is None

    @property
    def parameters(self) -> Counter[str]:
        """Numbers by the form in which they are stored, all components together."""
        return sum((each.parameters for each in self.components), Counter())

    @property
    def num_factors(self) -> int:
        return sum(each.num_factors for each in self.components)

    def text(self) -> str:
        """For people: one screen, and a line per failure, at most 40."""
        lines = [("path", printable(self.path, 1000)), ("format", self.format)]
        if self.unfinished is not None:
            lines += [("written", str(self.unfinished)), ("source", self.unfinished.source_file)]
            lines.append(("finish it", self.unfinished.finish))
        else:
            disk = f"{self.num_files:,} files, {human_bytes(self.disk_bytes)}"
            held = f"{self.num_tensors:,} tensors, {human_bytes(self.tensor_bytes)}"
            lines.append(("size", f"{disk}; {held}" if self.num_files else held))
        if self.layers is not None:
            lines.append(("layers", str(self.layers)))
            beside = f"{self.layers.mtp} MTP layers, {self.layers.vision_blocks} vision blocks"
            lines.append(("beside them", beside))
        if self.beside:
            words = [
                f"{name.replace('_', ' ')} {'yes' if there else 'no'}"
                for name, there in self.beside.items()
            ]
            lines.append(("other files", ", ".join(words)))
        out = [f"{label:12}{value}" for label, value in lines]
        if self.components:
            out += ["", *_aligned(self._rows())]
        if self.set_aside:
            out.append("")
        for group in self.set_aside:
            size = human_bytes(group.num_bytes)
            out.append(f"set aside   {group.num_tensors:,} tensors, {size}: {group.reason}")
        if self.conversions:
            out.append("")
        for dtype, size in self.conversions.items():
            out.append(
                f"converting  --dtype {dtype}: {human_bytes(size.weight_bytes)} of weights, "
                f"{human_bytes(size.disk_bytes)} of disk, less than 1 GB of memory"
            )
        out += ["", f"complete    {'yes' if self.is_complete else 'no'}"]
        if self.failures:
            out[-1] = str(CheckpointError("complete    no", self.failures, self.hint))
        return "\n".join(out)

    def _rows(self) -> list[list[str]]:
        stored = sum((each.num_bytes for each in self.components), Counter())
        forms = [form for form in _FORMS if form in stored]
        forms += sorted(stored.keys() - set(_FORMS))
        columns = [*forms, FACTORS] if self.num_factors else forms
        rows = [["component", "tensors", "parameters", *columns, "bytes"]]

        def row(name: str, group: Sequence[Component]) -> list[str]:
            num_bytes = sum((each.num_bytes for each in group), Counter())
            num_bytes[FACTORS] = sum(each.factor_bytes for each in group)
            return [
                name,
                f"{sum(each.num_tensors for each in group):,}",
                f"{sum(sum(each.parameters.values()) for each in group):,}",
                *(human_bytes(num_bytes[form]) if num_bytes[form] else "-" for form in columns),
                human_bytes(sum(num_bytes.values())),
            ]

        rows += [row(each.name, [each]) for each in self.components]
        rows.append(row("total", self.components))
        counts = self.parameters | {FACTORS: self.num_factors}
        total = sum(self.parameters.values())
        rows.append(["parameters", "", f"{total:,}", *(f"{counts[c]:,}" for c in columns), ""])
        return rows

    def as_json(self) -> dict[str, Any]:
        """The same with plain numbers, and with every failure."""
        value: dict[str, Any] = {
            "path": self.path,
            "kind": self.kind,
            "format": self.format,
            "is_complete": self.is_complete,
            "num_files": self.num_files,
            "disk_bytes": self.disk_bytes,
            "num_tensors": self.num_tensors,
            "tensor_bytes": self.tensor_bytes,
            "num_parameters": sum(self.parameters.values()),
            "parameters": dict(self.parameters),
            "num_factors": self.num_factors,
            "layers": None if self.layers is None else dataclasses.asdict(self.layers),
            "components": [each.as_json() for each in self.components],
            "set_aside": [dataclasses.asdict(each) for each in self.set_aside],
            "beside": dict(self.beside),
            "conversions": {
                dtype: dataclasses.asdict(size) | {"memory_bytes": CONVERSION_MEMORY_BYTES}
                for dtype, size in self.conversions.items()
            },
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "hint": self.hint,
            "unfinished": None,
        }
        if self.unfinished is not None:
            value["unfinished"] = dataclasses.asdict(self.unfinished)
        return value


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of one width, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:{widths[0]}}", *cells]).rstrip())
    return lines
