"""What a checkpoint directory is, from file headers alone: `inspect` makes a `Report`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, cast

from etils import epath

from convert import array_files, components, unfinished
from convert.inspection import Component, Conversion, Layers, Report, SetAside
from glm5next_jax.checkpoint import CheckpointError, mapping, native, planning, recognition
from glm5next_jax.checkpoint.encodings import Fp8Blocks, Nvfp4
from glm5next_jax.checkpoint.mapping import Name, Rule
from glm5next_jax.checkpoint.recognition import FLOATS, StoredWeight
from glm5next_jax.checkpoint.safetensors_header import TensorInfo, read_header
from glm5next_jax.checkpoint.safetensors_reader import (
    INDEX_NAME,
    MAX_TENSORS,
    SafetensorsDirectory,
    read_config,
)
from glm5next_jax.checkpoint.source import Source, as_stored
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.errors import Failure
from glm5next_jax.files import (
    contained_file,
    existing_directory,
    file_names,
    is_url,
    read_json_object,
    size_of,
)
from glm5next_jax.model import param_specs
from glm5next_jax.sharding import shard_bytes

_VISION_PREFIXES = ("model.visual.", "visual.")
_VISION_BLOCK = re.compile(r"visual\.blocks\.([0-9]+)\.")


def inspect(path: str | os.PathLike[str]) -> Report:
    """Says what a checkpoint is: released, converted, or a conversion that is not finished.

    Reads headers, configs and file sizes, and no weights. Damaged files, tensors that do not fit
    the model and what is missing become `Report.failures`; of files that can be read, the report
    still says what they hold.

    Args:
      path: directory of the checkpoint, local or a URL. Behind a URL, the files of converted arrays
        are not looked at.

    Raises:
      CheckpointError: no such directory, no config.json, nothing that is a checkpoint in it, or a
        converted one of another version.
      ValueError: the config of another model.
    """
    directory = existing_directory(path)
    with _no_collection():
        begun = unfinished.read(directory)
        if begun is not None:
            return begun
        return _Inspection(directory).report()


class _Inspection:
    """One directory being looked at."""

    def __init__(self, directory: epath.Path):
        self.directory = directory
        self.config = Glm5NextConfig.from_hf(directory)
        self.is_converted = native.is_converted(directory)
        self.failures: list[Failure] = []
        self.disk: dict[str, int] = {}  # bytes of files
        self.carried: list[TensorInfo] = []  # of a converted directory, beside the arrays
        self.tensors = self._converted() if self.is_converted else self._released()
        # A reader that failed still has tensors to plan with, and needs no more than those.
        self.source = Source(directory, self.config, cast(Any, _Tensors(directory, self.tensors)))
        self.source.is_converted = self.is_converted
        self.set_aside: dict[str, list[TensorInfo]] = {}

    def report(self) -> Report:
        beside = self._beside()
        measured = self._measure()
        conversions = self._conversions()
        hint = recognition.foreign_hint(self.failures)
        all_tensors = (*self.tensors, *self.carried)
        return Report(
            path=os.fspath(self.directory),
            kind="converted" if self.is_converted else "released",
            format=self._format(),
            num_files=len(self.disk),
            disk_bytes=sum(self.disk.values()),
            num_tensors=len(all_tensors),
            tensor_bytes=sum(info.num_bytes for info in all_tensors),
            layers=self._layers(),
            components=measured,
            set_aside=tuple(
                SetAside(
                    reason,
                    len(group),
                    sum(info.num_bytes for info in group),
                    planning.Kept(group[0], reason).is_carried,
                )
                for reason, group in self.set_aside.items()
            ),
            beside=beside,
            conversions=conversions,
            failures=tuple(self.failures),
            hint=hint,
        )

    def _released(self) -> tuple[TensorInfo, ...]:
        names = [name for name in file_names(self.directory) if name.endswith(".safetensors")]
        try:
            with SafetensorsDirectory(self.directory) as reader:
                tensors = reader.tensors
                names = sorted({info.file for info in tensors}.union(names))
        except CheckpointError as error:
            if not names:
                raise
            index = Failure("file", INDEX_NAME, "", str(error), "an index of the tensors")
            self.failures += error.failures or [index]
            tensors = self._readable(names)
        for name in names:
            with contextlib.suppress(CheckpointError):  # reported with the headers
                self.disk[name] = size_of(contained_file(self.directory, name))
        return tensors

    def _readable(self, names: Iterable[str]) -> tuple[TensorInfo, ...]:
        """The tensors of those files that are not at fault as a whole."""
        at_fault = {failure.file for failure in self.failures if not failure.tensor}
        tensors: list[TensorInfo] = []
        for name in names:
            if name in at_fault:
                continue
            with contextlib.suppress(CheckpointError):  # reported already
                tensors += read_header(contained_file(self.directory, name))
            if len(tensors) > MAX_TENSORS:
                raise CheckpointError(f"{self.directory}: more than {MAX_TENSORS} tensors")
        return tuple(tensors)

    def _converted(self) -> tuple[TensorInfo, ...]:
        tensors: tuple[TensorInfo, ...] = ()
        try:
            with native.ConvertedDirectory(self.directory) as reader:
                tensors = reader.tensors
        except CheckpointError as error:
            if not error.failures:
                raise
            self.failures += error.failures
        unused = self.directory / native.UNUSED_NAME
        if unused.is_dir():
            try:
                with SafetensorsDirectory(unused) as reader:
                    self.carried += reader.tensors
            except CheckpointError as error:
                text = Failure("file", native.UNUSED_NAME, "", str(error), "safetensors files")
                self.failures += error.failures or [text]
        if not is_url(self.directory):
            self.disk = array_files.sizes(self.directory)
            self.failures += array_files.faults(self.directory, self.disk, tensors)
        return tensors

    def _measure(self) -> tuple[Component, ...]:
        """Sorts every tensor into its component; notes names, encodings, and what is set aside."""
        found: dict[str, Component] = {}
        self.rules: set[Rule] = set()
        self.encodings: set[tuple[Any, ...]] = set()
        self.plain: Counter[str] = Counter()  # bytes of the text model's plain weights
        self.mtp_layers: set[int] = set()
        self.vision_blocks: set[str] = set()
        ignored: list[Failure] = []  # planning reports what is wrong with factors
        places: dict[tuple[str, int | None], tuple[str, str]] = {}
        # Most weights are experts, which are alike: they are counted, and looked at once.
        alike: Counter[tuple[Any, ...]] = Counter()
        firsts: dict[tuple[Any, ...], StoredWeight] = {}
        for stored in recognition.grouped((*self.tensors, *self.carried), ignored).values():
            if stored.name.startswith(_VISION_PREFIXES):
                match = _VISION_BLOCK.search(stored.name)
                self.vision_blocks.update([match[1]] if match else [])
                place = (components.VISION, planning.VISION_REASON)
            else:
                name = Name.of(mapping.without_prefix(stored.name))
                key = (name.generic, name.layer)
                place = places.get(key) or places.setdefault(key, self._place(name))
            component, reason = place
            kind = (component, *_outline(stored))
            alike[kind] += 1
            firsts.setdefault(kind, stored)
            aside = stored.tensors if reason else stored.activation_scales
            if aside:
                reason = reason or planning.ACTIVATION_REASON
                self.set_aside.setdefault(reason, []).extend(aside)
        block = self.source.quantization.weight_block_size
        for kind, count in alike.items():
            component = kind[0]
            form, size = self._form(firsts[kind], count, component, block)
            found.setdefault(component, Component(component)).add(firsts[kind], form, size, count)
        return tuple(found[name] for name in components.COMPONENTS if name in found)

    def _place(self, name: Name) -> tuple[str, str]:
        """(component, why it is set aside or ""); for the text model, also notes the rule."""
        if name.layer is not None and components.is_mtp(name, self.config):
            self.mtp_layers.add(name.layer)
            return components.MTP, planning.MTP_REASON
        component = components.component_of(name, self.config)
        if not self.is_converted:
            rule = mapping.rule_of(name.generic)
            if rule is None:
                return components.UNKNOWN, ""
            if name.layer is None or name.layer < self.config.num_hidden_layers:
                self.rules.add(rule)
        is_tied = name.generic == "lm_head.weight" and self.config.tie_word_embeddings
        return component, planning.TIED_REASON if is_tied else ""

    def _form(
        self, stored: StoredWeight, count: int, component: str, block: tuple[int, int]
    ) -> tuple[str, int]:
        """(in what a weight is stored, how many numbers it has); notes it for the `count` of them
        that are alike."""
        source = stored.source
        if source is None:  # factors alone
            return "", 0
        is_text = component not in (components.MTP, components.VISION, components.UNKNOWN)
        if not stored.companions and source.dtype in FLOATS:
            if is_text:
                self.plain[source.dtype] += count * source.num_bytes
            return source.dtype, math.prod(source.shape)
        recognised = recognition.encoding_of(stored, block, [])
        if is_text:
            match recognised.encoding:
                case Fp8Blocks(block=shape):
                    self.encodings.add((Fp8Blocks.title, *shape))
                case Nvfp4(is_reciprocal=is_reciprocal):
                    self.encodings.add((Nvfp4.title, is_reciprocal))
        form = source.dtype if recognised.title == "plain" else recognised.title
        return form, math.prod(source.shape if recognised.shape is None else recognised.shape)

    def _format(self) -> str:
        fp8 = sorted(each[1:] for each in self.encodings if each[0] == Fp8Blocks.title)
        nvfp4 = sorted(each[1] for each in self.encodings if each[0] == Nvfp4.title)
        layouts = ["compressed-tensors" if is_reciprocal else "ModelOpt" for is_reciprocal in nvfp4]
        words = [f"NVFP4, {' and '.join(layouts)} layout"] if layouts else []
        if fp8:
            blocks = ", ".join(f"{rows} x {columns}" for rows, columns in fp8[:3])
            words.append(f"block FP8 ({blocks}{', …' if len(fp8) > 3 else ''})")
        if not words:
            words = [max(self.plain, key=lambda dtype: self.plain[dtype])] if self.plain else []
        names = (
            f"converted, version {native.VERSION}"
            if self.is_converted
            else components.spelling(self.rules)
            if self.rules
            else "no names of this model"
        )
        return ", ".join([names, " and ".join(words)] if words else [names])

    def _layers(self) -> Layers:
        config, depth = self.config, self.config.num_hidden_layers
        num_kda = sum(config.is_kda(layer) for layer in range(depth))
        num_moe = sum(config.is_moe(layer) for layer in range(depth))
        return Layers(
            total=depth,
            kda=num_kda,
            sparse_attention=depth - num_kda,
            indexers=sum(config.has_indexer(layer) for layer in range(depth)),
            dense=depth - num_moe,
            moe=num_moe,
            experts=config.n_routed_experts,
            experts_per_token=config.num_experts_per_tok,
            shared_experts=config.n_shared_experts,
            mtp=len(self.mtp_layers),
            vision_blocks=len(self.vision_blocks),
        )

    def _beside(self) -> dict[str, bool]:
        """Which of the parts beside the weights are there."""

        def exists(name: str) -> bool:
            try:
                return contained_file(self.directory, name).exists()
            except CheckpointError as error:
                self.failures += error.failures
                return False

        template = exists("chat_template.jinja") or exists("chat_template.json")
        if not template and exists("tokenizer_config.json"):
            try:
                stated = read_json_object(self.directory / "tokenizer_config.json")
                template = bool(stated.get("chat_template"))
            except CheckpointError as error:
                fault = Failure("file", "tokenizer_config.json", "", str(error), "a JSON object")
                self.failures.append(fault)
        return {
            "vision_config": bool(read_config(self.directory).get("vision_config")),
            "tokenizer": exists("tokenizer.json"),
            "generation_config": exists("generation_config.json"),
            "chat_template": template,
        }

    def _conversions(self) -> dict[str, Conversion]:
        """Holds the tensors against the model, and says what conversions of them take."""
        if self.is_converted and not self.tensors:
            return {}  # its header is at fault, and all leaves are missing for that
        specs = specs_of(self.config)
        try:
            plan = self.source.plan(specs)
        except CheckpointError as error:
            if not error.failures:
                raise
            self.failures += error.failures
            return {}
        if self.is_converted or self.failures:
            return {}
        carried = sum(kept.source.num_bytes for kept in plan.kept if kept.is_carried)
        conversions = {}
        for choice, leaves in (("keep", as_stored(plan)), ("bfloat16", specs)):
            size = sum(map(shard_bytes, leaves.values()))
            conversions[choice] = Conversion(size, size + carried)
        return conversions


@dataclasses.dataclass(frozen=True)
class _Tensors:
    """What is left of a reader once headers are read."""

    path: epath.Path
    tensors: tuple[TensorInfo, ...]


def _outline(stored: StoredWeight) -> tuple[Any, ...]:
    """What its form follows from; the same for weights that are alike."""
    tensors = stored.companions.items()
    companions = [part for last, info in tensors for part in (last, info.dtype, info.shape)]
    weight = stored.weight
    is_named = stored.name.endswith(".weight")  # as codes of NVFP4 must be
    own = (None, None) if weight is None else (weight.dtype, weight.shape)
    return (is_named, *own, *companions)


def specs_of(config: Glm5NextConfig) -> dict[str, Any]:
    """`param_specs(config, param_dtype="bfloat16")`, in another order and in a fraction of the
    time: of layers that are alike, one is traced."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for layer in range(config.num_hidden_layers):
        kind = (config.layer_types[layer], config.mlp_layer_types[layer])
        indexer = "" if config.is_kda(layer) else config.indexer_types[layer]
        kinds.setdefault((*kind, indexer), []).append(layer)
    if any("shared" in kind for kind in kinds):  # these need the layer before them
        return param_specs(config, param_dtype="bfloat16")
    firsts = [layers[0] for layers in kinds.values()]
    few = config.replace(
        num_hidden_layers=len(firsts),
        layer_types=tuple(config.layer_types[layer] for layer in firsts),
        mlp_layer_types=tuple(config.mlp_layer_types[layer] for layer in firsts),
        indexer_types=tuple(config.indexer_types[layer] for layer in firsts),
    )
    alike = list(kinds.values())
    specs: dict[str, Any] = {}
    for leaf, spec in param_specs(few, param_dtype="bfloat16").items():
        name = Name.of(leaf)
        if name.layer is None:
            specs[leaf] = spec
            continue
        for layer in alike[name.layer]:
            specs[name.generic.replace("{L}", str(layer))] = spec
    return specs


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without the collector of cycles, which would walk 76,108 headers again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
