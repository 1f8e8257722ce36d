"""Leaves onto devices: each device receives its shards, and the host holds few at a time."""

from __future__ import annotations

import collections
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from glm5next_jax.checkpoint import leaves
from glm5next_jax.checkpoint.leaves import Index, LeafReader
from glm5next_jax.sharding import shard_bytes

_MIN_BYTES = 8 << 20  # where shards are smaller, memory is not worth reading rows twice

Spec = jax.ShapeDtypeStruct
Device = Any  # of jax, or None for the default device


def place(reader: LeafReader, specs: Mapping[str, Spec]) -> Iterator[tuple[str, jax.Array]]:
    """Yields every leaf as (path, array on its devices), and at last what `reader.finish` raises.

    A shard is read once and sent to every device of this process that holds it, while the next one
    is read. On the host, beside the arrays, there is less than twice the largest shard: where that
    would be exceeded, reading waits for transfers. CPU devices take the memory over as it is.

    Args:
      reader: reads slices of the leaves.
      specs: shape, dtype and sharding of each; no sharding puts it on the default device.
    """
    largest = _largest_shard(specs)
    transfers = _Transfers(max(largest, 2 * largest - reader.scratch_bytes))
    for leaf in reader.order:
        spec = specs[leaf]
        devices = _devices_of(spec)
        arrays = {}
        for group in leaves.groups(spec.shape, devices, spec.dtype.itemsize, largest):
            slices = reader.read(leaf, group, transfers.admit)
            sent = []
            for index, host in zip(group, slices, strict=True):
                for device in devices[index]:
                    arrays[device] = jax.device_put(host, device)
                    sent.append(arrays[device])
            transfers.add(sent, sum(host.nbytes for host in slices))
            del host, slices
        if spec.sharding is None:
            yield leaf, arrays[None]
        else:
            order = spec.sharding.addressable_devices_indices_map(spec.shape)
            shards = [arrays[device] for device in order]
            yield (
                leaf,
                jax.make_array_from_single_device_arrays(
                    spec.shape, spec.sharding, shards, dtype=spec.dtype
                ),
            )
    reader.finish()


def bytes_per_device(specs: Mapping[str, Spec]) -> dict[Device, int]:
    """What all leaves take on each device of this process; None is the default device."""
    totals: collections.Counter[Device] = collections.Counter()
    for spec in specs.values():
        devices = [None] if spec.sharding is None else spec.sharding.addressable_devices
        totals.update(dict.fromkeys(devices, shard_bytes(spec)))
    return dict(totals)


def source_bytes(reader: LeafReader, specs: Mapping[str, Spec]) -> int:
    """How many stored bytes `place` reads: all that this process needs, once."""
    largest = _largest_shard(specs)
    return sum(
        reader.source_bytes(leaf, group)
        for leaf, spec in specs.items()
        for group in leaves.groups(spec.shape, _devices_of(spec), spec.dtype.itemsize, largest)
    )


def _largest_shard(specs: Mapping[str, Spec]) -> int:
    return max(_MIN_BYTES, *(shard_bytes(spec) for spec in specs.values()))


def _devices_of(spec: Spec) -> dict[Index, list[Device]]:
    """The distinct slices of a leaf that this process holds, and who holds each."""
    if spec.sharding is None:
        return {tuple((0, n) for n in spec.shape): [None]}
    devices: dict[Index, list[Device]] = {}
    for device, index in spec.sharding.addressable_devices_indices_map(spec.shape).items():
        assert index is not None
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    return devices


class _Transfers:
    """Host memory that is being filled or sent, kept below a limit."""

    def __init__(self, limit: int):
        self._limit, self._held = limit, 0
        self._under_way: collections.deque[tuple[Sequence[jax.Array], int]] = collections.deque()

    def admit(self, num_bytes: int) -> None:
        """Accounts for memory about to be filled, and waits for older transfers to free it."""
        while self._under_way and self._held + num_bytes > self._limit:
            arrays, sent = self._under_way.popleft()
            jax.block_until_ready(arrays)
            # JAX lets go of host memory when it next runs Python code, or on a collection.
            gc.collect(0)
            self._held -= sent
        self._held += num_bytes

    def add(self, arrays: Sequence[jax.Array], num_bytes: int) -> None:
        """Memory that has been filled, and is free once `arrays` are there."""
        self._under_way.append((arrays, num_bytes))
