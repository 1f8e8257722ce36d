"""Slices of leaves and their way onto devices: the same bits as the whole, each byte read once."""

import collections
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from convert import tree
from glm5next_jax import make_mesh
from glm5next_jax.checkpoint import assemble, leaves, load, memory, placement, planning
from glm5next_jax.checkpoint import safetensors_reader as reading
from glm5next_jax.checkpoint.quantization_config import QuantizationConfig
from glm5next_jax.checkpoint.safetensors_reader import SafetensorsDirectory, existing_directory
from glm5next_jax.checkpoint.source import open_source
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.model import param_specs
from tests.checkpoint import released
from tests.checkpoint.test_load import assert_same, leaves_of, write_native

TEXT = released.TEXT


@pytest.fixture(scope="module")
def tensors():
    return released.released(released.in_memory())


@st.composite
def boxes(draw):
    """A shape and a slice of it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return tuple(shape), tuple((start, stop) for start, stop in ends)


@hypothesis.given(boxes())
def test_ranges_of_a_matrix_are_what_a_slice_takes(box):
    shape, index = box
    x = np.arange(math.prod(shape)).reshape(shape)
    want = x[tuple(slice(*bounds) for bounds in index)]
    runs, (first, last) = leaves.as_ranges(shape, index)
    matrix = x.reshape(leaves.as_matrix(shape))
    got = np.concatenate([matrix[start:stop, first:last] for start, stop in runs] or [matrix[:0]])
    np.testing.assert_array_equal(got.ravel(), want.ravel())
    if want.size:  # runs that adjoin are one
        assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))


@hypothesis.given(
    start=st.integers(0, 60),
    length=st.integers(0, 60),
    height=st.integers(1, 30),
    step=st.integers(1, 40),
    align=st.integers(1, 12),
)
def test_cuts_respect_matrices_and_blocks(start, length, height, step, align):
    pieces = list(leaves.cuts(start, start + length, height, step, align))
    rows = [row for low, high in pieces for row in range(low, high)]
    assert rows == list(range(start, start + length))
    for low, high in pieces:
        assert low < high and low // height == (high - 1) // height
        assert high in (start + length, -(-high // height) * height) or high % height % align == 0
        assert high - low <= max(step, align)


def test_slices_that_share_rows_are_read_together():
    shape = (4, 6)
    columns = [((0, 4), (start, start + 2)) for start in (4, 0, 2)]
    (group,) = leaves.groups(shape, columns, itemsize=1, max_bytes=24)
    assert group == [columns[1], columns[2], columns[0]]
    assert len(list(leaves.groups(shape, columns, itemsize=1, max_bytes=23))) == 2
    apart = [columns[0], columns[1]]  # what lies between belongs to another process
    assert len(list(leaves.groups(shape, apart, itemsize=1, max_bytes=24))) == 2
    rows = [((0, 2), (0, 6)), ((2, 4), (0, 6))]
    assert len(list(leaves.groups(shape, rows, itemsize=1, max_bytes=24))) == 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, released.BF16])
def test_non_finite_values_are_counted(value, dtype):
    x = np.array([[1, -2, 0], [np.finfo(np.float32).tiny, -0.0, 3e38]]).astype(dtype)
    assert leaves.non_finite_count(x) == 0
    x[0, 1] = x[1, 2] = value
    assert leaves.non_finite_count(x) == 2


def form_of(form: str, tensors) -> tuple[dict, tuple[int, int]]:
    """The golden weights in one of their forms, with the FP8 block."""
    block = (12, 20)
    match form:
        case "in_memory":
            return released.in_memory(), block
        case "fused":
            return released.fused(tensors), block
        case "fp8":
            return released.with_fp8(tensors, block)[0], block
        case "stacked fp8":
            names = dict(released.in_memory())
            for name in [n for n in names if ".experts." in n]:
                pairs = [released.quantize(x, block) for x in names[name]]
                names[name] = np.stack([codes for codes, _ in pairs])
                names[f"{name}_scale_inv"] = np.stack([scale for _, scale in pairs])
            return names, block
    return tensors, block


def opened(path, specs=None, block=(12, 20), **arguments) -> assemble.StoredLeaves:
    """A reader of a released directory; `specs` as its config says by default."""
    config = Glm5NextConfig.from_hf(existing_directory(path))
    specs = specs or param_specs(config)
    reader = SafetensorsDirectory(path)
    quantization = QuantizationConfig("fp8", block)
    plan = planning.plan(reader.tensors, config, specs, quantization=quantization)
    dtypes = {leaf: np.dtype(spec.dtype) for leaf, spec in specs.items()}
    return assemble.StoredLeaves(reader, plan, dtypes, **arguments)


def of_each_kind(names):
    """The leaves outside the layers, and those of one layer of each kind."""
    return [n for n in names if n.startswith(("layers.0.", "layers.3.")) or "layers." not in n]


def odd_slices(shape, rng) -> list[leaves.Index]:
    """Some slices, none of them at a boundary of anything."""
    ends = [[sorted(rng.integers(0, n + 1, 2).tolist()) for n in shape] for _ in range(4)]
    indices = [tuple((start, stop) for start, stop in each) for each in ends]
    indices.append(tuple((0, n) for n in shape))
    indices.append((*((0, n) for n in shape[:-1]), (shape[-1] // 3, shape[-1])))
    return indices


@pytest.mark.parametrize("dtype", [np.float32, released.BF16])
@pytest.mark.parametrize("form", ["released", "in_memory", "fused", "fp8", "stacked fp8"])
def test_odd_slices_are_cut_from_the_whole(form, dtype, tensors, tmp_path, monkeypatch):
    monkeypatch.setattr(leaves, "TILE_BYTES", 500)
    stored, block = form_of(form, tensors)
    hf = released.config() | {"quantization_config": {"weight_block_size": list(block)}}
    released.write(tmp_path, stored, num_shards=2, hf_config=hf)
    whole = leaves_of(load(tmp_path, weights="float32" if dtype == np.float32 else "bf16"))
    specs = {leaf: jax.ShapeDtypeStruct(x.shape, x.dtype) for leaf, x in whole.items()}
    rng = np.random.default_rng(0)
    with opened(tmp_path, specs) as source:
        for leaf in of_each_kind(whole):
            x = whole[leaf]
            for index in odd_slices(x.shape, rng):
                want = x[tuple(slice(*bounds) for bounds in index)]
                (got,) = source.read(leaf, [index])
                assert (got.dtype, got.shape) == (want.dtype, want.shape), (leaf, index)
                assert got.tobytes() == want.tobytes(), (leaf, index)
            # Columns of several devices at once.
            if x.ndim > 1:
                ends = sorted({0, x.shape[-1], *rng.integers(0, x.shape[-1] + 1, 2).tolist()})
                rows = tuple((n // 3, n) for n in x.shape[:-1])
                group = [(*rows, columns) for columns in itertools.pairwise(ends)]
                got = np.concatenate(source.read(leaf, group), axis=-1)
                want = x[tuple(slice(*bounds) for bounds in rows)]
                assert got.tobytes() == want.tobytes(), leaf


def test_odd_slices_of_converted_leaves(tensors, tmp_path, monkeypatch):
    monkeypatch.setattr(leaves, "TILE_BYTES", 500)
    monkeypatch.setattr(tree, "_CHUNK_SHAPE", (6, 10))  # many, and cut at the edges
    monkeypatch.setattr(tree, "FILE_BYTES", 3000)
    converted = write_native(tmp_path / "dst", tensors, tmp_path / "src")
    whole = released.leaves(tensors)
    for dtype in (np.float32, released.BF16):
        specs = {leaf: jax.ShapeDtypeStruct(x.shape, dtype) for leaf, x in whole.items()}
        rng = np.random.default_rng(1)
        with open_source(converted) as opened, opened.leaves(specs) as source:
            for leaf in of_each_kind(specs):
                x = whole[leaf].astype(dtype)
                for index in odd_slices(x.shape, rng)[:3]:
                    want = x[tuple(slice(*bounds) for bounds in index)]
                    (got,) = source.read(leaf, [index])
                    assert (got.shape, got.tobytes()) == (want.shape, want.tobytes()), leaf


def by_hand(whole: dict[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """Every leaf cut over 8 devices along one axis or another, or two, or none."""
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh = Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    entries = itertools.cycle(["a", "b", ("a", "b"), None])
    specs = {}
    for leaf, x in whole.items():
        names: list = [None] * x.ndim
        for axis in range(x.ndim):
            entry = next(entries)
            free = not any(names) or (axis > 0 and {names[axis - 1], entry} == {"a", "b"})
            size = {"a": 2, "b": 4, None: 1}.get(entry, 8)  # type: ignore[arg-type]
            if free and x.shape[axis] % size == 0:
                names[axis] = entry
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        specs[leaf] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return specs


class Counted:
    """Every read of stored bytes, as (tensor, first byte, number)."""

    def __init__(self, monkeypatch):
        self.reads: list[tuple[str, int, int]] = []
        read = SafetensorsDirectory.read_bytes

        def counting(reader, info, begin, out):
            self.reads.append((info.name, begin, out.nbytes))
            read(reader, info, begin, out)

        monkeypatch.setattr(SafetensorsDirectory, "read_bytes", counting)

    @property
    def by_tensor(self) -> dict[str, int]:
        totals = collections.Counter()
        for name, _, size in self.reads:
            totals[name] += size
        return dict(totals)


@pytest.mark.parametrize("form", ["released", "fused", "fp8"])
def test_placed_by_hand_each_byte_read_once(form, tensors, tmp_path, monkeypatch):
    stored, block = form_of(form, tensors)
    hf = released.config() | {"quantization_config": {"weight_block_size": list(block)}}
    released.write(tmp_path, stored, hf_config=hf)
    whole = leaves_of(load(tmp_path))
    specs = by_hand(whole)
    kinds = {spec.sharding.spec for spec in specs.values()}
    assert len(kinds) > 8 and PartitionSpec(None, "a") in kinds, kinds
    counted, seen = Counted(monkeypatch), []

    with opened(tmp_path, specs, progress=seen.append) as source:
        expected = placement.source_bytes(source, specs)
        placed = dict(placement.place(source, specs))

    assert sum(seen) == expected
    for leaf, spec in specs.items():
        assert placed[leaf].sharding == spec.sharding
        for shard in placed[leaf].addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole[leaf][shard.index].tobytes(), leaf
    if form != "fp8":  # a shard may begin inside a block of 12 rows, whose factors serve two
        used = {n: x.nbytes for n, x in stored.items() if not n.startswith("model.visual")}
        assert counted.by_tensor == used


@pytest.mark.parametrize("data, model", [(8, 1), (4, 2), (1, 2)])
def test_load_onto_a_mesh(data, model, tensors, tmp_path, monkeypatch):
    released.write(tmp_path, tensors, num_shards=2)
    mesh = make_mesh(data=data, model=model)
    specs = param_specs(Glm5NextConfig.from_hf(tmp_path), mesh=mesh)
    counted = Counted(monkeypatch)
    loaded = load(tmp_path, mesh=mesh)
    assert loaded.mesh == mesh
    assert_same(leaves_of(loaded), released.leaves(tensors))
    for path, variable in placement_of(loaded).items():
        assert variable.sharding == specs[path].sharding, path
    assert counted.by_tensor == {
        n: x.nbytes for n, x in tensors.items() if not n.startswith("model.visual")
    }


def placement_of(model) -> dict[str, jax.Array]:
    from flax import nnx

    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in state}


def test_converted_onto_a_mesh(tensors, tmp_path):
    converted = write_native(tmp_path / "dst", tensors, tmp_path / "src")
    mesh = make_mesh(data=4, model=2)
    ours, theirs = load(converted, mesh=mesh), load(tmp_path / "src", mesh=mesh)
    assert_same(leaves_of(ours), leaves_of(theirs))
    shardings = {path: array.sharding for path, array in placement_of(theirs).items()}
    assert {path: array.sharding for path, array in placement_of(ours).items()} == shardings


def test_a_shard_reads_only_its_own_bytes(tensors, tmp_path, monkeypatch):
    """What another process would read: some experts, some rows, some columns."""
    released.write(tmp_path, tensors)
    counted = Counted(monkeypatch)
    experts, embedding = "layers.3.mlp.experts.up_proj", "embed_tokens.weight"
    with opened(tmp_path) as source:
        source.read(experts, [((2, 5), (0, 16), (0, 64))])
        stem = f"{TEXT}layers.3.mlp.experts."
        assert counted.by_tensor == {f"{stem}{e}.up_proj.weight": 16 * 64 * 4 for e in (2, 3, 4)}

        counted.reads.clear()
        source.read(experts, [((2, 3), (4, 8), (0, 64))])
        assert counted.reads == [(f"{stem}2.up_proj.weight", 4 * 64 * 4, 4 * 64 * 4)]

        monkeypatch.setattr(reading, "_MAX_GAP_BYTES", 191)
        counted.reads.clear()
        source.read(embedding, [((0, 3), (16, 32))])
        name = f"{TEXT}embed_tokens.weight"
        assert counted.reads == [(name, row * 256 + 64, 64) for row in range(3)]
        counted.reads.clear()  # gaps of 128 bytes are read over
        source.read(embedding, [((0, 3), (16, 48))])
        assert counted.reads == [(name, 0, 3 * 256)]


def test_transfers_are_waited_for_before_memory_is_filled(tensors, tmp_path, monkeypatch):
    """Never more than the limit is under way, unless one slice alone is."""
    monkeypatch.setattr(leaves, "TILE_BYTES", 1000)
    monkeypatch.setattr(placement, "_MIN_BYTES", 0)
    released.write(tmp_path, tensors)
    specs = by_hand(released.leaves(tensors))
    largest = max(map(placement.shard_bytes, specs.values()))
    most = 0
    admit = placement._Transfers.admit

    def watched(transfers, num_bytes):
        nonlocal most
        admit(transfers, num_bytes)
        most = max(most, transfers._held)

    monkeypatch.setattr(placement._Transfers, "admit", watched)
    monkeypatch.setattr(leaves.LeafReader, "scratch_bytes", largest // 4)
    with opened(tmp_path, specs) as source:
        list(placement.place(source, specs))
    assert largest < most < 2 * largest


def test_a_failed_read_stops_and_names_its_file(tensors, tmp_path):
    released.write(tmp_path, tensors)
    specs = by_hand(released.leaves(tensors))
    with opened(tmp_path, specs) as source:
        (file,) = [p for p in tmp_path.iterdir() if p.suffix == ".safetensors"]
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size // 2)
        with pytest.raises(ValueError, match="a file ended early.*\n.*model.safetensors"):
            list(placement.place(source, specs))


def test_memory_of_a_mesh_is_asked_for_before_anything_is_read(tensors, tmp_path, monkeypatch):
    released.write(tmp_path, tensors)
    mesh = make_mesh(data=4, model=2)
    specs = param_specs(Glm5NextConfig.from_hf(tmp_path), mesh=mesh)
    needed = 8 * sum(map(placement.shard_bytes, specs.values()))
    whole = sum(x.nbytes for x in released.leaves(tensors).values())
    assert whole < needed < 8 * whole  # cut where the mesh cuts, and else held by every device
    monkeypatch.setattr(memory, "free_host_bytes", lambda: needed - 1)
    monkeypatch.setattr(placement, "place", None)  # reading would fail in another way
    with pytest.raises(MemoryError) as caught:
        load(tmp_path, mesh=mesh)
    assert f"({needed} bytes)" in str(caught.value)
    assert f"({needed - 1} bytes) are free in host memory, which 8 CPU dev" in str(caught.value)


class Device(NamedTuple):
    id: int
    memory_stats: Callable
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"


def test_memory_of_each_accelerator_is_asked_for():
    def device(number, free):
        stats = None if free is None else {"bytes_limit": 1000, "bytes_in_use": 1000 - free}
        return Device(number, lambda: stats)

    devices = [device(0, 500), device(1, 99), device(2, None)]
    memory.require_free_on_devices({devices[0]: 500, devices[1]: 99, devices[2]: 10**9}, "x")
    with pytest.raises(MemoryError) as caught:
        memory.require_free_on_devices({devices[0]: 100, devices[1]: 100}, "the model")
    assert str(caught.value) == (
        "the model needs 100 B (100 bytes), but only 99 B (99 bytes) are free on device 1 "
        "(TPU v6 lite)"
    )
