"""Where arrays live: logical axes on every weight and cache leaf, and one table from these to the
axes of a device mesh.

A mesh has two axes. `data` splits the batch; `model` splits heads, feed-forward channels and the
vocabulary; experts are split over both. Everything else is replicated, as serving engines do:
latents and their projections, the low-rank gates of KDA, the indexer and the hyper-connections.

Without a mesh every function here is the identity, so the model has one code path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from glm5next_jax.checks import is_int
from glm5next_jax.config import Glm5NextConfig
from pallas_kernels.dispatch import SCALE_BLOCK

DATA, MODEL = "data", "model"

# Logical axis -> mesh axes. A dimension without a name is replicated.
RULES: dict[str, tuple[str, ...]] = {
    "batch": (DATA,),
    "heads": (MODEL,),  # H, or H·K and H·V channels, head by head
    "ffn": (MODEL,),
    "shared_ffn": (MODEL,),  # replicated where a shard would hold part of an FP8 block
    "vocab": (MODEL,),
    "experts": (DATA, MODEL),
}

Axes = tuple[str | None, ...]
AnyMesh = Mesh | AbstractMesh  # abstract: sizes without devices


def make_mesh(*, data: int = 1, model: int = 1, devices: Any = None) -> Mesh:
    """A mesh of data x model devices, its axes automatic (XLA places what is not said).

    Args:
      data: shards of the batch.
      model: shards of heads, feed-forward channels and vocabulary.
      devices: the devices to use, data·model of them; None takes all of `jax.devices()`, or the
        first of them where one process needs fewer.

    Raises:
      ValueError: a size below 1, or another number of devices than there are.
    """
    for name, size in ((DATA, data), (MODEL, model)):
        if not is_int(size) or size < 1:
            raise ValueError(f"expected the mesh axis {name} to be an integer >= 1, got {size!r}")
    needed = data * model
    found = list(jax.devices() if devices is None else devices)
    if needed > len(found):
        raise ValueError(
            f"a mesh of {data=} x {model=} needs {needed} devices, but there are {len(found)} "
            f"({found[0].device_kind})"
        )
    if devices is not None and needed != len(found):
        raise ValueError(f"a mesh of {data=} x {model=} needs {needed} devices, got {len(found)}")
    if devices is None and needed < len(found) and jax.process_count() > 1:
        raise ValueError(
            f"a mesh of {data=} x {model=} leaves out some of the {len(found)} devices of "
            f"{jax.process_count()} processes; use all of them"
        )
    types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, model), (DATA, MODEL), types, devices=found[:needed])


def check_mesh(config: Glm5NextConfig, mesh: AnyMesh | None, *, fp8: bool = False) -> None:
    """Refuses a mesh over which a model does not divide.

    Args:
      config: the model.
      mesh: the mesh, or None.
      fp8: whether weights rest as blocks of FP8, which are not cut.

    Raises:
      ValueError: axes other than data and model, or a count that does not divide; the message
        lists the sizes that would.
    """
    if mesh is None:
        return
    if mesh.axis_names != (DATA, MODEL):
        raise ValueError(
            f"expected a mesh with the axes {(DATA, MODEL)} (see make_mesh), got {mesh.axis_names}"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(f"expected automatic mesh axes (see make_mesh), got {mesh.axis_types=}")
    c = config
    counts = {
        "num_attention_heads": c.num_attention_heads,
        "linear_num_heads": c.linear_num_heads,
        "vocab_size": c.vocab_size,
        "intermediate_size": c.intermediate_size,
    }
    if fp8:
        whole = {
            "intermediate_size": c.intermediate_size,
            "num_attention_heads·qk_nope_head_dim": c.num_attention_heads * c.qk_nope_head_dim,
            "num_attention_heads·v_head_dim": c.num_attention_heads * c.v_head_dim,
        }
        counts |= {f"FP8 blocks of {name}": fp8_units(size) for name, size in whole.items()}
    common = math.gcd(*counts.values())
    if "sparse" in config.mlp_layer_types:
        common = math.gcd(common, config.n_routed_experts)
    for name, count in counts.items():
        if count % mesh.shape[MODEL]:
            raise ValueError(
                f"{name} = {count} does not divide over the mesh axis model = {mesh.shape[MODEL]}; "
                f"this model divides over model = {_divisors(common)}"
            )
    if "sparse" in config.mlp_layer_types and config.n_routed_experts % mesh.size:
        raise ValueError(
            f"n_routed_experts = {config.n_routed_experts} does not divide over data·model = "
            f"{mesh.shape[DATA]}·{mesh.shape[MODEL]} = {mesh.size} devices; it divides over "
            f"{_divisors(config.n_routed_experts)}"
        )


def check_batch(batch_size: int, mesh: AnyMesh | None) -> None:
    """Refuses a batch that the mesh axis `data` does not divide."""
    if mesh is not None and batch_size % mesh.shape[DATA]:
        raise ValueError(
            f"{batch_size=} does not divide over the mesh axis data = {mesh.shape[DATA]}; give a "
            "multiple of it (a row with num_valid 0 is idle)"
        )


def fp8_units(size: int) -> int:
    """Into how many parts a dimension may be cut without cutting a block of FP8."""
    return size // SCALE_BLOCK if size % SCALE_BLOCK == 0 else 1


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def partition_spec(axes: Axes) -> PartitionSpec:
    """The mesh axes of logical ones.

    Raises:
      ValueError: a name that the table lacks, or two dimensions on one mesh axis.
    """
    entries: list[Any] = []
    used: dict[str, str] = {}
    for name in axes:
        if name is not None and name not in RULES:
            raise ValueError(f"unknown logical axis {name!r} in {axes}, expected one of {[*RULES]}")
        mesh_axes = () if name is None else RULES[name]
        for mesh_axis in mesh_axes:
            if mesh_axis in used:
                raise ValueError(
                    f"the logical axes {used[mesh_axis]!r} and {name!r} of {axes} both map to the "
                    f"mesh axis {mesh_axis!r}"
                )
            used[mesh_axis] = str(name)
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return PartitionSpec(*entries)


def named_sharding(mesh: AnyMesh, axes: Axes) -> NamedSharding:
    """Where a leaf with these logical axes lives."""
    return NamedSharding(mesh, partition_spec(axes))


def variable_sharding(variable: nnx.Variable, mesh: AnyMesh) -> NamedSharding:
    """Where a weight lives: by the logical axes in its metadata, else on every device."""
    metadata = variable.get_metadata()
    axes: Axes = metadata.get("axes") or (None,) * len(variable.get_value().shape)
    if "shared_ffn" in axes and metadata["units"] % mesh.shape[MODEL]:
        axes = tuple(None if name == "shared_ffn" else name for name in axes)
    return named_sharding(mesh, axes)


def shard_bytes(spec: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device, by its shape, dtype and sharding."""
    shape = spec.shape if spec.sharding is None else spec.sharding.shard_shape(spec.shape)
    return math.prod(shape) * spec.dtype.itemsize


def shard(model: Any, mesh: Mesh) -> Any:
    """The same model with every weight placed on the mesh; `load` reads straight onto one instead.

    Raises:
      ValueError: the model does not divide over the mesh.
    """
    check_mesh(model.config, mesh, fp8=model.fp8)

    def place(variable):
        value = jax.device_put(variable.get_value(), variable_sharding(variable, mesh))
        return variable.replace(value)

    placed = jax.tree.map(place, model, is_leaf=lambda v: isinstance(v, nnx.Variable))
    placed.mesh = mesh
    return placed


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Host arrays, the same in every process, put whole on every device of the mesh."""
    place = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, place), tree)


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """x, laid out on the mesh by its logical axes; inside `jax.jit`."""
    return x if mesh is None else lax.with_sharding_constraint(x, named_sharding(mesh, axes))


def local(function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """`function` run by every device on its own shards; what they exchange, they say.

    Args:
      function: takes and returns pytrees of arrays.
      mesh: None calls the function as it is.
      in_specs: a tuple with a pytree per argument, and
      out_specs: a pytree for the result: partition specs in the place of arrays (`partition_spec`,
        `module_specs`, `Cache.specs`).
    """
    if mesh is None:
        return function
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def module_specs(module: nnx.Module, mesh: Mesh | None) -> Any:
    """A module with partition specs in the place of its weights."""
    if mesh is None:
        return None
    return jax.tree.map(
        lambda variable: variable_sharding(variable, mesh).spec,
        module,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )


# Inside `local`. Elsewhere there is one shard, and these are identities.


def num_shards(axis: str) -> int:
    """Into how many parts a logical axis is cut."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual not in mesh.axis_types:
        return 1
    return math.prod(mesh.shape[name] for name in RULES[axis])


def shard_index(axis: str) -> jax.Array | int:
    """Which part of a logical axis this device has."""
    return lax.axis_index(RULES[axis]) if num_shards(axis) > 1 else 0


def gather_shards(x: jax.Array, axis: str, *, dim: int = 0) -> jax.Array:
    """The shards of x, one after the other along a dimension."""
    return lax.all_gather(x, RULES[axis], axis=dim, tiled=True) if num_shards(axis) > 1 else x


def scatter_sum(x: jax.Array, axis: str) -> jax.Array:
    """The sum over shards, of which each keeps its part of dimension 0."""
    if num_shards(axis) == 1:
        return x
    return lax.psum_scatter(x, RULES[axis], scatter_dimension=0, tiled=True)


def sum_shards(x: jax.Array, axis: str) -> jax.Array:
    """The sum over shards."""
    return lax.psum(x, RULES[axis]) if num_shards(axis) > 1 else x
