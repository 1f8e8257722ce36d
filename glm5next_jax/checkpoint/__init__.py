"""Checkpoints: released safetensors directories, and our converted form of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from glm5next_jax import sharding
from glm5next_jax.checkpoint import memory, placement
from glm5next_jax.checkpoint.source import open_source
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.errors import CheckpointError, Failure
from glm5next_jax.model import Glm5NextForCausalLM

__all__ = ["CheckpointError", "Failure", "load"]

_WEIGHTS = {"bf16": "bfloat16", "float32": "float32"}
_FP8 = "fp8"


def load(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    weights: Literal["bf16", "float32", "fp8"] | None = None,
    check_finite: bool = True,
) -> Glm5NextForCausalLM:
    """Builds the model of a checkpoint directory, released or converted, and fills every weight.

    Each process reads what its devices hold, once, and little of it is on the host at a time: less
    than twice the largest part of a weight that one device holds. A progress bar in bytes is shown
    by the first process, where stderr is a terminal.

    Args:
      path: the directory, local or any URL that etils opens.
      mesh: the devices to spread the model over (`glm5next_jax.make_mesh`); by default the whole
        model goes to the default device.
      dtype: compute dtype, bfloat16 or float32, instead of the one in the checkpoint's config;
        `model.config.dtype` is it.
      weights: dtype at rest; by default the compute dtype. Codes are multiplied by their factors in
        float32 and rounded once to it. What must be float32 (router, convolution, decay and
        hyper-connection base and scale) is float32 whatever this says. "fp8" keeps FP8 blocks as
        they are stored, codes and factors, half the size of bfloat16; other weights take the
        compute dtype.
      check_finite: refuse NaN and infinite weights.

    Returns:
      The model, with its tokenizer where the directory has one, and with the tokens that end a
      generation: those of `generation_config.json`, else of the config.

    Raises:
      CheckpointError: (a ValueError) no such directory, damaged files, or tensors that do not fit
        the model, exactly and both ways: also weights that are not stored as 128 x 128 blocks of
        FP8 where "fp8" needs them. One report lists every failure.
      ValueError: an unsupported config or argument, a mesh that the model does not divide over, a
        tokenizer that cannot be read, or an end-of-generation token outside the vocabulary.
      MemoryError: a device needs more for the weights than is free; the message has both numbers.
    """
    if weights is not None and weights not in (*_WEIGHTS, _FP8):
        raise ValueError(f"{weights=}; expected one of {(*_WEIGHTS, _FP8)} or None")
    fp8 = weights == _FP8
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_source(path))
        config = source.config
        if dtype is not None:
            config = config.replace(dtype=_dtype_name(dtype))
        # The small files first: a fault in them should not be found after minutes of reading.
        tokenizer, eos_token_ids = source.tokenizer(), source.eos_token_ids()
        param_dtype = config.dtype if weights is None or fp8 else _WEIGHTS[weights]
        sharding.check_mesh(config, mesh, fp8=fp8)
        skeleton = _skeleton(config, param_dtype, fp8)
        specs = skeleton.specs(mesh)
        bar = stack.enter_context(_progress_bar())
        leaves = source.leaves(specs, check_finite=check_finite, progress=bar.update)
        stack.enter_context(leaves)
        needed = placement.bytes_per_device(specs)
        memory.require_free_on_devices(needed, f"{source.path}: the model")
        bar.total = placement.source_bytes(leaves, specs)
        model = skeleton.filled(placement.place(leaves, specs))

    model.mesh = mesh
    model.tokenizer = tokenizer
    model.eos_token_ids = eos_token_ids
    return model


def _progress_bar() -> tqdm:
    """A bar counting bytes, with their rate and the time left, on the first process's stderr.

    It is shown only where that is a terminal.
    """
    hidden = not sys.stderr.isatty() or jax.process_index() != 0
    return tqdm(total=0, desc="loading", unit="B", unit_scale=True, disable=hidden)


def _dtype_name(dtype: Any) -> str:
    try:
        return jnp.dtype(_WEIGHTS.get(dtype, dtype) if isinstance(dtype, str) else dtype).name
    except TypeError:
        raise ValueError(f"{dtype=}; expected bfloat16 or float32") from None


@dataclasses.dataclass(frozen=True)
class _Skeleton:
    """A module without its weights: structure, and a variable to fill per dotted path."""

    graphdef: nnx.GraphDef[Glm5NextForCausalLM]
    variables: dict[str, tuple[tuple[Any, ...], nnx.Variable]]

    def specs(self, mesh: Mesh | None) -> dict[str, jax.ShapeDtypeStruct]:
        """What `glm5next_jax.model.param_specs` gives, without tracing the module again."""
        specs = {name: variable.get_value() for name, (_, variable) in self.variables.items()}
        if mesh is None:
            return specs
        return {
            name: spec.update(sharding=sharding.variable_sharding(self.variables[name][1], mesh))
            for name, spec in specs.items()
        }

    def filled(self, leaves: Iterable[tuple[str, jax.Array]]) -> Glm5NextForCausalLM:
        """The module with these arrays."""
        filled = []
        for name, array in leaves:
            path, variable = self.variables[name]
            filled.append((path, variable.replace(array)))
        return nnx.merge(self.graphdef, nnx.from_flat_state(filled))


# Tracing the module takes longer than reading a small checkpoint.
@functools.lru_cache(maxsize=4)
def _skeleton(config: Glm5NextConfig, param_dtype: str, fp8: bool) -> _Skeleton:
    model = Glm5NextForCausalLM.abstract(config, param_dtype=param_dtype, fp8=fp8)
    graphdef, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    variables = {".".join(map(str, path)): (path, variable) for path, variable in flat}
    return _Skeleton(graphdef, variables)
