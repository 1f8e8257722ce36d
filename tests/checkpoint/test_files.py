"""Which files of a directory may be opened, how much of them is read, and URLs."""

import json
import os
import socket
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from etils import epath

from glm5next_jax import bounded_json, files
from glm5next_jax.checkpoint import CheckpointError, Failure
from glm5next_jax.checkpoint.safetensors_header import LIMITS
from glm5next_jax.checkpoint.safetensors_reader import SafetensorsDirectory, read_config
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.tokenizer import GenerationConfig, Tokenizer
from tests.checkpoint import released, remote

SMALL = bounded_json.Limits(1000, 50)
READERS = {
    "config.json": [lambda path: read_config(epath.Path(path)), Glm5NextConfig.from_hf],
    "generation_config.json": [GenerationConfig.from_directory],
    "tokenizer.json": [Tokenizer.from_directory],
    "model.safetensors": [SafetensorsDirectory],
    "model.safetensors.index.json": [SafetensorsDirectory],
}  # fmt: skip
EACH = [(name, read) for name, readers in READERS.items() for read in readers]


def small():
    return {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), ml_dtypes.bfloat16)}


def parse(text: str | bytes, limits=SMALL, objects: Any = "dict"):
    data = text if isinstance(text, bytes) else text.encode()
    return bounded_json.parse(data, limits, objects=objects)


def test_a_directorys_own_files(tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "..data").write_text("x")
    outer = tmp_path.parent / "another name of it"
    outer.symlink_to(tmp_path)
    for directory in (tmp_path, outer):
        for name in ("real", "link", "absolute", "dangling", "missing", "..data"):
            found = files.contained_file(epath.Path(directory), name)
            assert os.fspath(found) == str(directory / name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", "/etc/passwd", "a\\b", "a\0b", "~/x"]
)
def test_paths_are_no_names(name, tmp_path):
    with pytest.raises(CheckpointError, match="expected a name without a path"):
        files.contained_file(epath.Path(tmp_path), name)


@pytest.mark.parametrize("target", ["file", "directory", "missing", "loop", "neighbour"])
def test_links_that_lead_elsewhere(target, tmp_path):
    """Also to a directory whose name begins like that of this one."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "home2").mkdir()
    (tmp_path / "home2" / "secret").write_text("x")
    target = {
        "file": "../home2/secret", "directory": tmp_path, "missing": "/nowhere/at/all",
        "loop": "x", "neighbour": "../home2/../home2/secret",
    }[target]  # fmt: skip
    (home / "x").symlink_to(target)
    with pytest.raises(CheckpointError, match="home: a file that is not read") as caught:
        files.contained_file(epath.Path(home), "x")
    assert [failure.file for failure in caught.value.failures] == ["x"]


def test_the_hubs_cache_and_no_more(tmp_path):
    snapshot, blobs = tmp_path / "repo" / "snapshots" / "0f", tmp_path / "repo" / "blobs"
    for directory in (snapshot, blobs, tmp_path / "repo" / "refs"):
        directory.mkdir(parents=True)
    for directory in ("blobs", "refs"):
        (tmp_path / "repo" / directory / "x").write_text("x")
        (snapshot / directory).symlink_to(f"../../{directory}/x")
    assert files.contained_file(epath.Path(snapshot), "blobs").read_text() == "x"
    with pytest.raises(CheckpointError, match="a link to"):
        files.contained_file(epath.Path(snapshot), "refs")
    # blobs may not be a door to somewhere else.
    (blobs / "x").unlink()
    (blobs / "x").symlink_to(tmp_path / "repo" / "refs" / "x")
    with pytest.raises(CheckpointError, match="a link to"):
        files.contained_file(epath.Path(snapshot), "blobs")


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a directory", "a link"])
@pytest.mark.parametrize(("name", "read"), EACH, ids=[f"{n}-{i}" for i, (n, _) in enumerate(EACH)])
def test_no_reader_opens_what_is_no_file(name, read, kind, tmp_path, monkeypatch):
    """A pipe blocks whoever opens it."""
    directory = tmp_path / "src"
    released.write(directory, small())
    (directory / name).unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(directory / name)
    elif kind == "a socket":
        monkeypatch.chdir(directory)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
    elif kind == "a directory":
        (directory / name).mkdir()
    else:
        (tmp_path / "secret").write_text("hunter2")
        (directory / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError) as caught:
        read(directory)
    assert f"{name}: found {kind}" in str(caught.value) and "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_no_link_becomes_a_prompt(name, tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (source / "tokenizer.json").write_text(json.dumps({"model": model}))
    assert Tokenizer.from_directory(source) is not None
    (tmp_path / "secret").write_text("{}")
    (source / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=f"{name}: found a link"):
        Tokenizer.from_directory(source)


def test_a_config_given_by_its_own_path(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="found a pipe, expected a file"):
        Glm5NextConfig.from_hf(tmp_path / "config.json")


def test_files_over_the_limit_are_not_read(tmp_path):
    path = epath.Path(tmp_path / "x")
    path.write_bytes(b"0123")
    assert files.read_bytes(path, 4) == b"0123" and files.read_text(path, 4) == "0123"
    with pytest.raises(CheckpointError, match="x: found 4 bytes, expected 3 at most"):
        files.read_bytes(path, 3)
    os.truncate(path, 1 << 40)  # sparse: reading it all would end badly
    for read in (files.read_bytes, files.read_text):
        with pytest.raises(CheckpointError, match="expected 1000 at most"):
            read(path, 1000)
    with pytest.raises(CheckpointError, match="found 1099511627776 bytes, expected 16777216"):
        files.read_json_object(path)
    path.write_bytes(b"a\r\nb\rc\xff")
    with pytest.raises(CheckpointError, match="x: not UTF-8"):
        files.read_text(path, 10)
    path.write_bytes(b"a\r\nb\rc\n")
    assert files.read_text(path, 10) == "a\nb\nc\n"
    with pytest.raises(CheckpointError, match="gone: cannot be read: No such file"):
        files.read_bytes(epath.Path(tmp_path / "gone"), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        (" " * 10, "Expecting value"),
        ("\ufeff{}", "Unexpected UTF-8 BOM"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ('{}{"a": 1}', "Extra data"),
        (b'{"a": "\xff"}', "invalid start byte"),
        ('{"a": 1}'.encode("utf-16"), "invalid start byte"),
        ('{"a": 1}'.encode("utf-16-le"), "Expecting property name"),
        ("[" * 60, "60 values, where 50 are allowed"),
        ('"' + "," * 60 + '"', "60 values, where 50 are allowed"),
        ('"' + "x" * 999 + '"', "1001 bytes of text, 1 in memory for each, where 1000 bytes"),
        ('"' + "\u00e9" * 250 + '"', "502 bytes of text, 2 in memory"),
        ('"' + "\U0001f600" * 63 + '"', "254 bytes of text, 4 in memory"),
    ],
)
def test_what_is_no_bounded_json(text, message):
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert message in str(caught.value) and len(str(caught.value)) < 300


def test_json_of_every_kind():
    text = '{"a": [1, -2.5e3, true, null], "b": {"é\\ud83d\\ude00": "\\n"}, "a2": 1e400}'
    want = {"a": [1, -2500.0, True, None], "b": {"é😀": "\n"}, "a2": float("inf")}
    assert parse(text) == want == parse(text, objects="unique")
    assert parse('{"a": {}, "b": [[]], "a": 1}', objects="pairs") == (
        ("a", ()), ("b", [[]]), ("a", 1),
    )  # fmt: skip
    assert parse('{"a": 1, "a": 2}') == {"a": 2}


def test_keys_that_come_twice():
    with pytest.raises(ValueError, match=r"two values for the key 'x\\n'"):
        parse('[{"x\\n": {"y": 1}, "z": 3, "x\\n": 2}]', objects="unique")


@pytest.mark.parametrize("objects", ["dict", "unique", "pairs"])
def test_depth_and_digits(objects):
    wide = bounded_json.Limits(1 << 20, 1 << 20)
    for text in ("[" * 100_000, "[" * 50_000 + "]" * 50_000, '{"a":' * 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse(text, wide, objects)
    with pytest.raises(ValueError, match="value has 5000 digits$"):
        parse("1" * 5000, wide, objects)
    if objects != "pairs":
        assert parse("[" * 64 + "]" * 64, wide, objects)
        with pytest.raises(ValueError, match="more than 64 levels"):
            parse("[" * 65 + "]" * 65, wide, objects)


def test_a_real_index_and_header_are_well_within_the_limits():
    """The released model's 76,108 tensors."""
    names = [
        f"model.language_model.layers.{i}.mlp.experts.0.gate_proj.weight" for i in range(76_108)
    ]
    index = json.dumps({"weight_map": {name: "model-00001-of-00064.safetensors" for name in names}})
    entry = {"dtype": "F8_E4M3", "shape": [4096, 2048], "data_offsets": [10**11, 10**11 + 2**23]}
    header = json.dumps({name: entry for name in names})
    for text, limits, factor in ((index, files.INDEX, 3), (header, LIMITS, 2)):
        smaller = bounded_json.Limits(limits.num_bytes // factor, limits.num_values // factor)
        assert len(parse(text, smaller)) in (1, 76_108)


def test_messages_hold_no_terminal_codes():
    hostile = "a\x1b[2J\n\u202eb\ud800" + "x" * 100_000
    failure = Failure("file", hostile, hostile, f"no file {hostile}", hostile)
    error = CheckpointError(
        f"/a/b\x1b[0m: {hostile}\nwith a second line", [failure], hint="hint\x07"
    )
    for text in (str(failure), *str(error).split("\n")):
        assert text.isprintable() and len(text) < 4500
    assert len(str(failure)) < 1600 and "\\x1b[2J\\n\\u202eb\\ud800xx" in str(failure)
    assert len(str(error).split("\n")) == 5 and failure.tensor == hostile
    assert str(Failure("file", "é b.safetensors", "ü", "ö")) == "é b.safetensors: ü: found ö"


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("s3", "s3fs"), ("az", "adlfs")])
def test_urls_without_their_driver(scheme, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # not to be imported, where it is installed
    for read in (
        files.require_driver, files.existing_directory, SafetensorsDirectory,
        Glm5NextConfig.from_hf, Tokenizer.from_directory, GenerationConfig.from_directory,
    ):  # fmt: skip
        with pytest.raises(CheckpointError) as caught:
            read(f"{scheme}://bucket/model")
        message = str(caught.value)
        assert message.startswith(f"{scheme}://bucket/model: nothing installed here opens")
        assert message.endswith(f"\n  pip install {package}")


@pytest.mark.parametrize("url", ["http://h/x", "file:///tmp", "://x", "GS://bucket/x"])
def test_urls_that_nothing_opens(url):
    for read in (files.require_driver, files.existing_directory, Glm5NextConfig.from_hf):
        with pytest.raises(CheckpointError, match="expected a local path or gs://, s3://"):
            read(url)


def test_local_paths_need_no_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert os.fspath(files.require_driver("~/not/there")) == f"{tmp_path}/not/there"
    assert not files.is_url(tmp_path) and files.is_url(epath.Path("gs://b/x"))


class Unreachable(remote.Storage):
    def exists(self, path, **kwargs):
        raise LookupError("no credentials")


def test_storage_that_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "Storage", Unreachable)
    with remote.bucket(tmp_path) as url:
        with pytest.raises(CheckpointError, match="cannot be reached: LookupError: no credentials"):
            files.existing_directory(f"{url}/model")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("directories", [False, True])
def test_a_checkpoint_in_a_bucket(scheme, directories, tmp_path):
    want = small() | {"c": np.arange(600, dtype=np.int16).reshape(20, 30)}
    released.write(tmp_path / "bucket" / "model", want, num_shards=2)
    with remote.bucket(tmp_path, scheme=scheme, directories=directories) as url:
        assert read_config(files.existing_directory(f"{url}/model")) == released.config()
        assert Glm5NextConfig.from_hf(f"{url}/model") == Glm5NextConfig.from_hf(released.config())
        assert Tokenizer.from_directory(f"{url}/model") is None
        with SafetensorsDirectory(f"{url}/model") as reader:
            assert {info.name for info in reader.tensors} == set("abc")
            for info in reader.tensors:
                assert reader.read(info).tobytes() == want[info.name].tobytes()
                if info.name == "c":
                    part = np.empty((4, 5), np.int16)
                    reader.read_rectangle(info, 30, 3, 7, part)
                    np.testing.assert_array_equal(part, want["c"][3:7, 7:12])
        with pytest.raises(CheckpointError, match="no such directory"):
            files.existing_directory(f"{url}/nothing")
        with pytest.raises(CheckpointError, match="is a file, expected"):
            files.existing_directory(f"{url}/model/config.json")
        os.truncate(tmp_path / "bucket/model/model-00001-of-00002.safetensors", 30)
        with pytest.raises(
            CheckpointError, match="model-00001-of-00002.safetensors: found 30 bytes"
        ):
            SafetensorsDirectory(f"{url}/model")


@pytest.mark.parametrize("directories", [False, True])
def test_the_bucket_does_as_buckets_do(directories, tmp_path):
    with remote.bucket(tmp_path, directories=directories) as url:
        root = epath.Path(url)
        assert root.is_dir() and not (root / "x").exists()
        (root / "x" / "y").mkdir(parents=True)
        assert (root / "x" / "y").is_dir() == directories
        (root / "x" / "y" / "z").write_bytes(b"123")
        assert (root / "x" / "y").is_dir() and [p.name for p in (root / "x").iterdir()] == ["y"]
        assert (root / "x" / "y" / "z").stat().length == 3
        (root / "x" / "y" / "z").replace(root / "x" / "w")
        assert (root / "x" / "w").read_bytes() == b"123" and not (root / "x" / "y" / "z").exists()
        (root / "x").rename(root / "v")
        assert (root / "v" / "w").read_text() == "123" and not (root / "x").exists()
        (root / "v" / "u").write_text("1")
        (root / "v" / "u").unlink()
        assert not (root / "v" / "u").exists() and (root / "v").is_dir()
        (root / "v").rmtree()
        assert not (root / "v").exists()


@pytest.mark.parametrize(
    "template",
    ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% for x in y %}" * 60 + "{% endfor %}" * 60],
)
def test_a_chat_template_beyond_pythons_parser(template, tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    with pytest.raises(ValueError, match="the chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_a_tokenizer_on_which_its_library_panics(tmp_path, capfd):
    model = {
        "type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"],
        "continuing_subword_prefix": "much longer than b",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    with pytest.raises(ValueError, match="tokenizer.json: not a tokenizer that can be read"):
        Tokenizer.from_directory(tmp_path)
    assert "panicked" in capfd.readouterr().err
