"""A checkpoint directory, released or converted, as one thing: its config and its leaves."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from etils import epath

from glm5next_jax.checkpoint import native, planning
from glm5next_jax.checkpoint.assemble import StoredLeaves
from glm5next_jax.checkpoint.quantization_config import QuantizationConfig
from glm5next_jax.checkpoint.safetensors_header import TensorInfo
from glm5next_jax.checkpoint.safetensors_reader import SafetensorsDirectory, read_config
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.errors import CheckpointError
from glm5next_jax.files import contained_file, existing_directory, read_json_object
from glm5next_jax.model import param_specs
from glm5next_jax.tokenizer import GenerationConfig, Tokenizer

DtypeChoice = Literal["bfloat16", "float32", "keep"]

_BF16 = np.dtype(ml_dtypes.bfloat16)
_F32 = np.dtype(np.float32)
_F8 = np.dtype(ml_dtypes.float8_e4m3fn)


class Source:
    """An open checkpoint directory. Made by `open_source`.

    Attributes:
      path: the directory.
      config: the model's configuration.
      is_converted: whether `glm5next-convert` wrote it.
      reader: its tensors; of a converted directory, its arrays.
      quantization: what it says about its quantisation.
    """

    def __init__(
        self,
        path: epath.Path,
        config: Glm5NextConfig,
        reader: SafetensorsDirectory | native.ConvertedDirectory,
    ):
        self.path, self.config, self.reader = path, config, reader
        self.is_converted = isinstance(reader, native.ConvertedDirectory)
        self.quantization = _quantization_of(path)

    def plan(self, specs: Mapping[str, Any]) -> planning.Plan:
        """What fills the leaves of `specs`.

        Raises:
          CheckpointError: the tensors do not fit, exactly and both ways; one report has them all.
        """
        tensors, origin = self.reader.tensors, str(self.path)
        if self.is_converted:
            block = self.quantization.weight_block_size
            return planning.identity_plan(tensors, specs, weight_block_size=block, origin=origin)
        return planning.plan(
            tensors, self.config, specs, quantization=self.quantization, origin=origin
        )

    def specs(self, choice: DtypeChoice) -> dict[str, jax.ShapeDtypeStruct]:
        """Every leaf at rest, in the dtype that `choice` means.

        "keep" is the dtype in which the source stores a leaf: FP8 codes stay codes, with their
        factors as a leaf beside them, where every part of the leaf is in blocks of one shape; the
        widest dtype where its parts differ; bfloat16 for NVFP4, float32 for float16. "bfloat16"
        and "float32" are all weights' dtype, but what must be float32 always is.

        Raises:
          CheckpointError: as `plan` does.
        """
        if choice == "keep":
            return as_stored(self._plain_plan)
        specs = param_specs(self.config, param_dtype="bfloat16")
        if choice == "bfloat16":
            return specs
        return {leaf: jax.ShapeDtypeStruct(spec.shape, _F32) for leaf, spec in specs.items()}

    @functools.cached_property
    def _plain_plan(self) -> planning.Plan:
        """The plan of leaves without FP8; matching 76,108 names takes seconds."""
        return self.plan(param_specs(self.config, param_dtype="bfloat16"))

    def leaves(
        self,
        specs: Mapping[str, Any],
        *,
        check_finite: bool = True,
        progress: Callable[[int], object] = lambda num_bytes: None,
    ) -> StoredLeaves:
        """A reader of these leaves; to be used as a context manager.

        Raises:
          CheckpointError: as `plan` does.
        """
        dtypes = {leaf: np.dtype(spec.dtype) for leaf, spec in specs.items()}
        return StoredLeaves(
            self.reader, self.plan(specs), dtypes, check_finite=check_finite, progress=progress
        )

    @contextlib.contextmanager
    def carried(self) -> Iterator[tuple[Any, list[TensorInfo]]]:
        """(a reader, the tensors in it that fill no leaf and are carried along as they are)."""
        if not self.is_converted:
            kept = self._plain_plan.kept
            yield self.reader, [each.source for each in kept if each.is_carried]
        elif (self.path / native.UNUSED_NAME).is_dir():
            with SafetensorsDirectory(self.path / native.UNUSED_NAME) as reader:
                yield reader, list(reader.tensors)
        else:
            yield None, []

    def small_files(self) -> list[str]:
        """Names of the files beside the weights that a checkpoint travels with, those that exist.

        Raises:
          CheckpointError: one is a link to elsewhere, or no file.
        """
        names = ("config.json", *native.COPIED_NAMES)
        return [name for name in names if contained_file(self.path, name).exists()]

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None where there is none.

        Raises:
          ValueError: it cannot be read.
        """
        return Tokenizer.from_directory(self.path)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: those of `generation_config.json`, else of the config.

        Raises:
          ValueError: one is outside the vocabulary.
        """
        stated = GenerationConfig.from_directory(self.path).eos_token_ids
        for token in stated:
            if token >= self.config.vocab_size:
                raise ValueError(
                    f"{self.path / 'generation_config.json'}: eos_token_id holds {token}, outside "
                    f"the vocabulary 0..{self.config.vocab_size - 1} of config.json"
                )
        return stated or self.config.eos_token_id


@contextlib.contextmanager
def open_source(path: str | os.PathLike[str]) -> Iterator[Source]:
    """Opens a checkpoint directory, released or converted.

    Raises:
      CheckpointError: no such directory, damaged files, or a conversion that is not finished.
      ValueError: an unsupported config.
    """
    directory = existing_directory(path)
    native.refuse_unfinished(directory)
    read_config(directory)
    config = Glm5NextConfig.from_hf(directory)  # a fault in it is said before one in the weights
    is_converted = native.is_converted(directory)
    with (native.ConvertedDirectory if is_converted else SafetensorsDirectory)(directory) as reader:
        yield Source(directory, config, reader)


def as_stored(plan: planning.Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves of a plan in the dtype in which they are stored; see `Source.specs`.

    Args:
      plan: of leaves that are not FP8 at rest.
    """
    blocks = planning.fp8_leaves(plan)
    is_wide = {
        piece.leaf
        for entry in plan.entries
        if entry.encoding is None and entry.source.dtype in ("F32", "F16")
        for piece in entry.pieces
    }
    kept = {}
    for leaf, spec in plan.specs.items():
        if leaf in blocks:
            kept[leaf] = jax.ShapeDtypeStruct(spec.shape, _F8)
            *lead, rows, columns = spec.shape
            grid = (math.ceil(rows / blocks[leaf][0]), math.ceil(columns / blocks[leaf][1]))
            kept[planning.scale_leaf(leaf)] = jax.ShapeDtypeStruct((*lead, *grid), _F32)
        else:
            kept[leaf] = jax.ShapeDtypeStruct(spec.shape, _F32 if leaf in is_wide else _BF16)
    return kept


def _quantization_of(directory: epath.Path) -> QuantizationConfig:
    other = contained_file(directory, "hf_quant_config.json")
    try:
        return QuantizationConfig.from_hf(
            read_config(directory).get("quantization_config"),
            read_json_object(other) if other.exists() else None,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}") from None
