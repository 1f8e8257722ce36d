"""The safetensors reader: every dtype and row range, and damage of every kind by name."""

import io
import json
import os
import pwd
import struct
import time

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from glm5next_jax.checkpoint import CheckpointError, safetensors_reader
from glm5next_jax.checkpoint.safetensors_reader import (
    SafetensorsDirectory,
    existing_directory,
    read_config,
)
from glm5next_jax.config import Glm5NextConfig
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


@pytest.mark.parametrize("flat", [False, True])
def test_public_fault_24_a_text_only_config(flat, tmp_path):
    """sglang#37321: a config without vision_config or swiglu_limit crashed the loader."""
    hf = released.config()
    want = Glm5NextConfig.from_hf(hf)
    for part in (hf, hf.get("text_config", {})):
        part.pop("vision_config", None)
        part.pop("swiglu_limit", None)
    if flat:
        hf = hf["text_config"] | {"model_type": "glm5_next_text"}
    released.write(tmp_path, small(), hf_config=hf)
    got = Glm5NextConfig.from_hf(tmp_path)
    assert got.swiglu_limit == 10.0  # the class default of transformers
    assert got.replace(hf_extra="", swiglu_limit=1.0) == want.replace(hf_extra="", swiglu_limit=1.0)
    assert "vision_config" not in got.to_hf()
    assert read_all(tmp_path).keys() == set("abc")


def test_an_index_of_many_missing_files_is_refused_quickly(tmp_path):
    released.write(tmp_path, small())
    weight_map = {f"t{i}": f"{i}.safetensors" for i in range(30_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    start = time.process_time()
    error = error_of(tmp_path)
    assert len(error.failures) > 30_000 and len(str(error)) < 10_000
    assert time.process_time() - start < 10  # 0.3 s; 30 s where each name looks at each other


def test_a_directory_of_too_many_tensors(tmp_path, monkeypatch):
    released.write(tmp_path, small("abcdef"), num_shards=2)
    monkeypatch.setattr(safetensors_reader, "MAX_TENSORS", 6)
    assert len(read_all(tmp_path)) == 6
    monkeypatch.setattr(safetensors_reader, "MAX_TENSORS", 5)
    assert "more than 5 tensors" in str(error_of(tmp_path))


def test_a_header_of_many_faults_lists_some(tmp_path):
    write_raw(tmp_path / "model.safetensors", {str(i): None for i in range(5000)})
    assert len(error_of(tmp_path).failures) == 1000


def test_owners_without_a_name(tmp_path, monkeypatch):
    """Files unpacked in a container belong to numbers that its /etc/passwd may not know."""

    def unknown(uid):
        raise KeyError(uid)

    released.write(tmp_path, small())
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert read_all(tmp_path).keys() == set("abc")


def test_a_file_that_vanishes_or_cannot_be_read(tmp_path, monkeypatch):
    released.write(tmp_path, small())
    with SafetensorsDirectory(tmp_path) as reader:
        (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
        with pytest.raises(
            CheckpointError, match="model.safetensors: cannot be read: No such file"
        ):
            reader.read(reader.tensors[0])
        (tmp_path / "elsewhere").rename(tmp_path / "model.safetensors")

        def broken(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CheckpointError, match="a: found Input/output error"):
            reader.read(reader.tensors[0])


def test_a_dangling_link_and_a_broken_shard_are_both_named(tmp_path):
    released.write(tmp_path, small())
    (tmp_path / "a.safetensors").symlink_to("gone.safetensors")
    (tmp_path / "b.safetensors").mkdir()
    message = str(error_of(tmp_path))
    assert "a.safetensors: cannot be read: No such file" in message
    assert "b.safetensors: found a directory, expected a file" in message


class Context:
    """A file as etils' backend for TensorFlow opens it: by `with` alone, and without `readinto`."""

    def __init__(self, data: bytes):
        file = io.BytesIO(data)
        self.seek, self.read = file.seek, file.read
        self.is_open = False

    def open(self, mode: str):
        assert mode == "rb"
        return self

    def __enter__(self):
        self.is_open = True
        return self

    def __exit__(self, *_):
        self.is_open = False


def test_a_remote_file_that_is_only_a_context():
    context = Context(b"0123456789")
    file = safetensors_reader._RemoteFile(context)  # type: ignore[arg-type]
    octets = np.zeros(4, np.uint8)
    assert context.is_open and file.read_into(octets, 3) == 4 and octets.tobytes() == b"3456"
    assert file.read_into(octets, 8) == 2 and octets.tobytes() == b"8956"
    file.close()
    assert not context.is_open
