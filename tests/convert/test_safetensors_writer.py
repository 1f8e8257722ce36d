"""Files as the safetensors package reads them, and what of them ends up where."""

import json
import zlib

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from etils import epath

from convert import safetensors_writer as writer
from convert.safetensors_writer import OutFile, OutTensor
from glm5next_jax.checkpoint.safetensors_reader import SafetensorsDirectory
from tests.checkpoint import released


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "b": rng.normal(size=(5, 3)).astype(np.float32),
        "a": rng.integers(0, 255, (7,), np.uint8),
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "half": rng.normal(size=(3, 1, 2)).astype(np.float16),
    }


NAMES = {"float32": "F32", "uint8": "U8", "float16": "F16", "bfloat16": "BF16"}


def described(tensors) -> list[OutTensor]:
    return [OutTensor(n, NAMES[x.dtype.name], x.shape) for n, x in tensors.items()]


def test_the_safetensors_package_reads_what_is_written(tmp_path):
    tensors, seen = arrays(), []
    (file,) = writer.plan_files(described(tensors), 10**6, "model")
    assert file.name == "model-00001-of-00001.safetensors"

    def chunks_of(tensor):
        octets = tensors[tensor.name].tobytes()
        for start in range(0, len(octets), 7):
            yield octets[start : start + 7]

    record = writer.write_file(epath.Path(tmp_path / "new"), file, chunks_of, seen.append)
    path = tmp_path / "new" / file.name
    data = path.read_bytes()
    assert record.num_bytes == len(data) == file.num_bytes
    assert record.crc32 == zlib.crc32(data)
    assert sum(seen) == sum(x.nbytes for x in tensors.values())
    got = safetensors.numpy.load_file(path)
    assert got.keys() == tensors.keys()
    for name, x in tensors.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape)
        np.testing.assert_array_equal(got[name], x)
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt"}
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert list(header) == ["__metadata__", *tensors]  # the order of the data
    assert [p.name for p in path.parent.iterdir()] == [file.name]


def test_arrays_of_dtypes_that_numpy_does_not_know(tmp_path):
    x = np.arange(12, dtype=np.float32).astype(released.BF16).reshape(3, 4)
    file = OutFile("f.safetensors", (OutTensor("x", "BF16", (4, 3)),))
    writer.write_file(epath.Path(tmp_path), file, lambda _: iter([x.T]))
    with SafetensorsDirectory(tmp_path) as reader:
        assert reader.read(reader.tensors[0]).tobytes() == np.ascontiguousarray(x.T).tobytes()


def sizes(files) -> list[list[str]]:
    return [[tensor.name for tensor in file.tensors] for file in files]


def test_no_file_is_larger_than_it_may_be(tmp_path):
    tensors = [OutTensor(f"tensor.{i}", "U8", (300 + i,)) for i in range(40)]
    for limit in (1000, 1024, 1777, 5000):
        files = writer.plan_files(tensors, limit, "model")
        assert [t for file in files for t in file.tensors] == tensors
        for number, file in enumerate(files, 1):
            assert file.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
            record = writer.write_file(
                epath.Path(tmp_path), file, lambda t: [np.zeros(t.shape, np.uint8)]
            )
            assert record.num_bytes == file.num_bytes <= limit
            assert (tmp_path / file.name).stat().st_size == file.num_bytes
        # None of them could have taken the next one's first tensor, but for padding.
        for file, following in zip(files, files[1:], strict=False):
            more = OutFile("", (*file.tensors, following.tensors[0]))
            assert more.num_bytes > limit - 16


def test_what_is_too_large_goes_alone():
    lengths = {"a": 10, "b": 5000, "c": 10, "d": 10}
    tensors = [OutTensor(name, "U8", (length,)) for name, length in lengths.items()]
    assert sizes(writer.plan_files(tensors, 1000, "m")) == [["a"], ["b"], ["c", "d"]]
    assert sizes(writer.plan_files(tensors, 1, "m")) == [["a"], ["b"], ["c"], ["d"]]
    assert writer.plan_files([], 1000, "m") == []


def test_factors_stay_with_their_codes():
    tensors = [
        OutTensor(name, "U8", (300,))
        for name in ("x.weight", "y.weight", "y.weight_scale_inv", "z.weight_scale_inv")
    ]
    assert sizes(writer.plan_files(tensors, 900, "m")) == [
        ["x.weight"],
        ["y.weight", "y.weight_scale_inv"],
        ["z.weight_scale_inv"],
    ]


@pytest.mark.parametrize("given", [2, 4])
def test_more_or_fewer_bytes_than_announced_leave_no_file(given, tmp_path):
    file = OutFile("f.safetensors", (OutTensor("x", "U8", (3,)),))
    with pytest.raises(ValueError, match=f"x: found {given} bytes"):
        writer.write_file(epath.Path(tmp_path), file, lambda _: [bytes(given)])
    assert list(tmp_path.iterdir()) == []


def test_what_goes_wrong_on_the_way_leaves_no_file(tmp_path):
    file = OutFile("f.safetensors", (OutTensor("x", "U8", (3,)),))

    def chunks_of(_):
        yield b"12"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write_file(epath.Path(tmp_path), file, chunks_of)
    assert list(tmp_path.iterdir()) == []


def test_copies_of_stored_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_PIECE_BYTES", 5)
    tensors = arrays()
    released.write_file(tmp_path / "source.safetensors", tensors)
    with SafetensorsDirectory(tmp_path) as reader:
        files = writer.plan_files(reader.tensors, 300, "unused")
        assert len(files) > 1
        for file in files:
            writer.write_file(epath.Path(tmp_path / "out"), file, writer.copied_from(reader))
    got = {}
    for file in files:
        got |= safetensors.numpy.load_file(tmp_path / "out" / file.name)
    assert {n: x.tobytes() for n, x in got.items()} == {n: x.tobytes() for n, x in tensors.items()}
