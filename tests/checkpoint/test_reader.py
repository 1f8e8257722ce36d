"""The safetensors reader: every dtype and row range, and damage of every kind by name."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from glm5next_jax.checkpoint import CheckpointError
from glm5next_jax.checkpoint.safetensors_reader import (
    SafetensorsDirectory,
    existing_directory,
    read_config,
)
from tests.checkpoint import released

DTYPES = [
    np.float32, np.float16, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2, np.uint8, np.int8, np.int16, np.int32, np.int64, np.bool_,
]  # fmt: skip


def small(names="abc"):
    return {n: np.arange(6, dtype=np.float32).reshape(3, 2) + ord(n) for n in names}


def read_all(path) -> dict[str, np.ndarray]:
    with SafetensorsDirectory(path) as reader:
        return {info.name: reader.read(info) for info in reader.tensors}


def error_of(path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsDirectory(path)
    return caught.value


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_dtype_bit_for_bit(dtype, tmp_path):
    rng = np.random.default_rng(0)
    dtype = np.dtype(dtype)
    end = 2 if dtype.kind == "b" else 256
    octets = rng.integers(0, end, (5, 3, 2 * dtype.itemsize), dtype=np.uint8)
    want = octets.view(dtype)
    released.write(tmp_path, {"scalar": want[0, 0, 0].reshape(()), "x": want, "none": want[:0]})
    with SafetensorsDirectory(tmp_path) as reader:
        by_name = {info.name: info for info in reader.tensors}
        for start, stop in ((0, 5), (1, 3), (4, 5), (2, 2)):
            got = reader.read(by_name["x"], start, stop)
            assert got.dtype == dtype and got.tobytes() == want[start:stop].tobytes()
        assert reader.read(by_name["scalar"]).tobytes() == want[0, 0, 0].tobytes()
        assert reader.read(by_name["none"]).shape == (0, 3, 2)


def test_helper_writes_what_the_safetensors_package_reads(tmp_path):
    want = small() | {"s": np.full((), 3, np.float32)}
    released.write(tmp_path, want)
    got = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert got.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x)


@pytest.mark.parametrize("num_shards, index", [(1, False), (3, True), (3, False)])
def test_layouts(num_shards, index, tmp_path):
    want = small("abcdefg")
    released.write(tmp_path, want, num_shards=num_shards, index=index)
    got = read_all(tmp_path)
    assert got.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x)


def test_hub_cache_links_are_followed(tmp_path):
    """The hub's cache: snapshots/<revision>/* are links to blobs/*."""
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "04c4e9e9"
    released.write(blobs, small())
    snapshot.mkdir(parents=True)
    os.rename(blobs / "model.safetensors", blobs / "0123abcd")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")
    assert read_all(snapshot).keys() == set("abc")


def test_links_out_of_the_directory_are_refused(tmp_path):
    released.write(tmp_path / "elsewhere", small())
    released.write(tmp_path / "src", small("d"))
    (tmp_path / "src" / "more.safetensors").symlink_to(tmp_path / "elsewhere/model.safetensors")
    error = error_of(tmp_path / "src")
    assert "more.safetensors: found a link to" in str(error)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/b", ".."])
def test_paths_in_the_index_are_refused(name, tmp_path):
    released.write(tmp_path / "other", small())
    released.write(tmp_path / "src", small("d"))
    index = tmp_path / "src" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name, "d": "model.safetensors"}}))
    error = error_of(tmp_path / "src")
    assert [f.kind for f in error.failures] == ["file"] and repr(name) in str(error)


def test_truncated_shards_are_all_named(tmp_path):
    released.write(tmp_path, small("abcdef"), num_shards=3)
    sizes = {}
    for shard in ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        path = tmp_path / shard
        sizes[shard] = path.stat().st_size
        os.truncate(path, sizes[shard] - 5)
    error = error_of(tmp_path)
    assert len(error.failures) == 2
    for shard, size in sizes.items():
        assert f"{shard}: found {size - 5} bytes, expected {size} bytes (truncated)" in str(error)


def test_a_file_cut_within_its_header(tmp_path):
    released.write(tmp_path, small())
    for size in (20, 8, 5, 0):
        os.truncate(tmp_path / "model.safetensors", size)
        (failure,) = error_of(tmp_path).failures
        assert failure.file == "model.safetensors" and failure.found == f"{size} bytes"


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    released.write(tmp_path, small())
    with SafetensorsDirectory(tmp_path) as reader:
        os.truncate(tmp_path / "model.safetensors", reader.tensors[-1].offset + 3)
        with pytest.raises(CheckpointError, match="found 3 bytes, expected 24 bytes"):
            reader.read(reader.tensors[-1])


def test_index_and_shards_are_compared_both_ways(tmp_path):
    released.write(tmp_path, small("abcd"), num_shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    promised = {"a": first, "b": first, "d": second, "x": second}
    index["weight_map"] = promised | {"y": "gone.safetensors"}
    path.write_text(json.dumps(index))
    released.write_file(tmp_path / "extra.safetensors", small("e"))
    error = error_of(tmp_path)
    assert {(f.file, f.tensor) for f in error.failures} == {
        ("model.safetensors.index.json", ""),  # gone.safetensors
        ("extra.safetensors", ""),
        (first, "c"),  # not in the index
        (first, "b"),  # the index looks for it in the wrong file
        (second, "x"),
    }
    assert "no file gone.safetensors" in str(error)
    assert f"it is in {second}" in str(error)


def test_an_empty_shard_lacks_what_the_index_promises(tmp_path):
    released.write(tmp_path, small("ab"), num_shards=2)
    released.write_file(tmp_path / "model-00002-of-00002.safetensors", {})
    (failure,) = error_of(tmp_path).failures
    assert (failure.tensor, failure.found) == ("b", "no such tensor")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}']
)
def test_bad_index(text, tmp_path):
    released.write(tmp_path, small())
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in str(error_of(tmp_path))


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header, data, message",
    [
        (b"{nonsense", b"", "no JSON"),
        (b"\xff\xfe", b"", "no JSON"),
        ([1, 2], b"", "no JSON object"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"8" * 8, "a: found a malformed entry"),
        ({"a": {**F32, "shape": [-2]}}, b"8" * 8, "malformed"),
        ({"a": {**F32, "shape": [2.0]}}, b"8" * 8, "malformed"),
        ({"a": {**F32, "data_offsets": [0, 8, 9]}}, b"8" * 8, "malformed"),
        ({"a": "text"}, b"", "malformed"),
        ({"a": {**F32, "dtype": "F4"}}, b"8" * 8, "dtype F4"),
        ({"a": {**F32, "shape": [3]}}, b"8" * 8, "found 8 bytes, expected 12 bytes for F32 [3]"),
        ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, b"8" * 12, "b: found an overlap"),
        ({"a": {**F32, "data_offsets": [4, 12]}}, b"8" * 12, "a: found a gap"),
        ({"a": F32}, b"8" * 9, "bytes that belong to no tensor"),
        (b'{"a": ' + json.dumps(F32).encode() + b', "a": ' + json.dumps(F32).encode() + b"}",
         b"8" * 8, "a: found two entries"),
    ],
)  # fmt: skip
def test_damaged_headers(header, data, message, tmp_path):
    write_raw(tmp_path / "model.safetensors", header, data)
    error = error_of(tmp_path)
    assert message in str(error) and "model.safetensors" in str(error)


def test_a_header_longer_than_its_file(tmp_path):
    write_raw(tmp_path / "model.safetensors", {"a": F32}, b"8" * 8, length=2**60)
    assert "a header of 1152921504606846976 bytes" in str(error_of(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_never_read(name, tmp_path):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    message = str(error_of(tmp_path))
    assert name in message and "never unpickled" in message and "safetensors" in message


def test_a_directory_without_weights(tmp_path):
    (tmp_path / "README.md").write_text("nothing")
    assert "no *.safetensors file" in str(error_of(tmp_path))


def test_paths_that_are_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file, expected the directory"):
        existing_directory(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no such directory$"):
        existing_directory(tmp_path / "nothing")
    with pytest.raises(CheckpointError) as caught:
        existing_directory("zai-org/GLM-5.3-Flash")
    assert "hf download zai-org/GLM-5.3-Flash --local-dir GLM-5.3-Flash" in str(caught.value)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert existing_directory("org/name").is_dir()


def test_config_is_required(tmp_path):
    directory = existing_directory(tmp_path)
    with pytest.raises(CheckpointError, match="no config.json"):
        read_config(directory)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: not valid JSON"):
        read_config(directory)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        read_config(directory)
