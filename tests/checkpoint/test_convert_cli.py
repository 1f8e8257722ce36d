"""`glm5next-convert` as users run it: exit statuses, messages, and a destination that is complete
or absent."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import convert.__main__ as command
from convert import converter, progress, safetensors_writer, tree
from glm5next_jax import __version__, make_mesh
from glm5next_jax.checkpoint import load, native
from glm5next_jax.checkpoint.safetensors_reader import (
    INDEX_NAME,
    SafetensorsDirectory,
)
from tests.checkpoint import released

TEXT = released.TEXT
NORM = f"{TEXT}norm.weight"
Q_A = f"{TEXT}layers.3.self_attn.q_a_proj.weight"
COPIED = {
    "tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
    "tokenizer_config.json": '{"bos_token": null}',
    "chat_template.jinja": "{{ messages }}\n",
    "generation_config.json": '{"eos_token_id": [3, 4]}',
    "preprocessor_config.json": '{"size": 28}',
}


@pytest.fixture(scope="module")
def stored():
    """FP8, BF16 and float32 tensors, a vision tower and a layer of multi-token prediction."""
    tensors = released.as_stored(released.released(released.in_memory()))
    codes, _ = released.with_fp8(released.released(released.in_memory()), (16, 16))
    fp8 = {n for n in codes if n.endswith("_scale_inv")}
    fp8 |= {n.removesuffix("_scale_inv") for n in fp8}
    tensors |= {n: codes[n] for n in codes if n in fp8}
    tensors |= {
        name.replace("layers.7.", "layers.8."): x
        for name, x in tensors.items()
        if "layers.7." in name and "hc_" not in name
    }
    tensors[f"{TEXT}layers.8.eh_proj.weight"] = np.ones((64, 128), released.BF16)
    return tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory, stored):
    config = released.config()
    config["text_config"] |= {"num_nextn_predict_layers": 1, "dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    directory = tmp_path_factory.mktemp("cli") / "src"
    released.write(directory, stored, hf_config=config, num_shards=3)
    for name, text in COPIED.items():
        (directory / name).write_text(text)
    return directory


def run(*args, cwd=None) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "PYTHONPATH": os.getcwd(),
        "PYTHONWARNINGS": "error",
    }
    line = [sys.executable, "-m", "convert", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, env=environment, cwd=cwd)


def main(*args) -> int:
    """The command in this process, for cases that need no process of their own."""
    return command.main([str(arg) for arg in args])


def leaves_of(model) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in state}


def bits(leaves) -> dict[str, tuple]:
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in leaves.items()}


def test_round_trip_in_a_process(source, stored, tmp_path):
    result = run(source, "dst", cwd=tmp_path)

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("dst: ") and "unused tensors carried along" in result.stdout
    destination = tmp_path / "dst"
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]
    model, again = load(source), load(destination)
    assert bits(leaves_of(again)) == bits(leaves_of(model))
    assert again.config == model.config and again.eos_token_ids == (3, 4)
    assert again.tokenizer is not None
    for name, text in COPIED.items():
        assert (destination / name).read_text() == text
    carried = {n: x for n, x in stored.items() if "visual" in n or "layers.8." in n}
    with SafetensorsDirectory(destination / "unused") as reader:
        assert {info.name for info in reader.tensors} == carried.keys()
        for info in reader.tensors:
            x, want = reader.read(info), carried[info.name]
            assert (x.dtype, x.shape, x.tobytes()) == (want.dtype, want.shape, want.tobytes())


def orbax_tree(directory) -> dict[str, np.ndarray]:
    """What Orbax itself restores of a converted directory."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(directory / native.WEIGHTS_NAME)


def kinds_of(leaves) -> dict[str, str]:
    return {leaf: x.dtype.name for leaf, x in leaves.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes(dtype, source, tmp_path):
    assert main(source, tmp_path / "dst", "--dtype", dtype, "--quiet") == 0
    tree = orbax_tree(tmp_path / "dst")
    loaded = leaves_of(load(source, dtype=dtype))
    assert bits(leaves_of(load(tmp_path / "dst", dtype=dtype))) == bits(loaded)
    if dtype == "float32":
        assert set(kinds_of(tree).values()) == {"float32"}
    else:  # what is float32 here must be, in any model
        assert kinds_of(tree) == kinds_of(loaded)
    assert bits({leaf: np.asarray(x) for leaf, x in tree.items()}) == bits(loaded)


def test_keep_is_what_is_stored(source, stored, tmp_path):
    """FP8 codes beside their factors, convolutions in bfloat16: what Orbax restores, and every
    other reader, is what the released files hold."""
    assert main(source, tmp_path / "dst", "--quiet") == 0
    tree = orbax_tree(tmp_path / "dst")
    text = {n: x for n, x in stored.items() if "layers.8." not in n and "scale_inv" not in n}
    factors = {
        n.removesuffix("_scale_inv"): x for n, x in stored.items() if n.endswith("_scale_inv")
    }
    expected = released.leaves(text)
    expected |= {
        f"{leaf}_scale_inv": x
        for leaf, x in released.leaves({n: factors.get(n, x) for n, x in text.items()}).items()
        if expected[leaf].dtype == released.FP8
    }
    assert bits({leaf: np.asarray(x) for leaf, x in tree.items()}) == bits(expected)
    assert tree["layers.0.self_attn.qkv_conv1d.weight"].dtype == released.BF16
    for dtype in ("bfloat16", "float32"):
        again = leaves_of(load(tmp_path / "dst", dtype=dtype))
        assert bits(again) == bits(leaves_of(load(source, dtype=dtype)))


def test_orbax_restores_onto_a_mesh(source, tmp_path):
    """Each device its part, from the same arrays: for those who bring their own model."""
    assert main(source, tmp_path / "dst", "--quiet") == 0
    mesh = make_mesh(data=2, model=4)
    cut = NamedSharding(mesh, PartitionSpec("model"))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        weights = tmp_path / "dst" / native.WEIGHTS_NAME
        stored = checkpointer.metadata(weights).item_metadata.tree
        how = {
            leaf: ocp.ArrayRestoreArgs(
                sharding=cut if meta.shape[0] % 4 == 0 else NamedSharding(mesh, PartitionSpec())
            )
            for leaf, meta in stored.items()
        }
        tree = checkpointer.restore(weights, args=ocp.args.PyTreeRestore(restore_args=how))
    whole = orbax_tree(tmp_path / "dst")
    assert tree["embed_tokens.weight"].sharding == cut
    for leaf, x in tree.items():
        assert np.asarray(x).tobytes() == np.asarray(whole[leaf]).tobytes(), leaf


def test_keep_takes_the_widest_dtype_of_a_leaf(tmp_path):
    tensors = released.as_stored(released.released(released.in_memory()))
    name = f"{TEXT}layers.1.self_attn.v_proj.weight"
    tensors[name] = released.released(released.in_memory())[name]
    released.write(tmp_path / "src", tensors)
    converter.convert(tmp_path / "src", tmp_path / "dst", mode="quiet")
    got = leaves_of(load(tmp_path / "dst"))["layers.1.self_attn.qkv_proj.weight"]
    assert got[2].tobytes() == tensors[name].tobytes()


def test_large_unused_tensors_are_copied_in_parts_and_shards(source, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(converter, "_UNUSED_FILE_BYTES", 20_000)
    monkeypatch.setattr(safetensors_writer, "_PIECE_BYTES", 100)
    converter.convert(source, tmp_path / "dst", mode="quiet")
    with SafetensorsDirectory(tmp_path / "dst" / native.UNUSED_NAME) as reader:
        assert len({info.file for info in reader.tensors}) > 3
        for info in reader.tensors:
            assert reader.read(info).tobytes() == stored[info.name].tobytes()


def test_dry_run_writes_nothing_and_reads_no_weights(source, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SafetensorsDirectory, "read", refuse)
    assert main(source, tmp_path / "dst", "--dry-run", "--dtype", "bfloat16") == 0
    output = capsys.readouterr()
    assert not (tmp_path / "dst").exists() and output.err == ""
    lines = output.out.splitlines()
    for leaf, x in leaves_of(load_without_check(source, monkeypatch)).items():
        (line,) = [line for line in lines if line.startswith(f"{leaf} ")]
        assert str(x.dtype) in line and str(list(x.shape)) in line
    assert any("vision tower: kept verbatim" in line for line in lines)
    assert any("multi-token prediction layer: kept verbatim" in line for line in lines)
    assert "parameters" in lines[-1]


def load_without_check(source, monkeypatch):
    monkeypatch.undo()
    return load(source)


def test_help_teaches_and_answers_at_once():
    result = run("--help")
    assert (result.returncode, result.stderr) == (0, "")
    for part in ("examples:", "--dry-run", "--overwrite", "hf download", "exit status", "load("):
        assert part in result.stdout
    version = run("--version")
    assert (version.returncode, version.stdout) == (0, f"glm5next-convert {__version__}\n")


def test_a_user_error_in_a_process(tmp_path):
    result = run("zai-org/GLM-5.3-Flash", "dst", cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert "hf download zai-org/GLM-5.3-Flash" in result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) <= 5
    assert list(tmp_path.iterdir()) == []


def refused(source, destination, capsys) -> str:
    """What the command says of a source that it must refuse, leaving nothing behind."""
    beside = set(source.parent.iterdir())
    assert main(source, destination, "--quiet") == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("glm5next-convert: ")
    assert "Traceback" not in output.err
    assert set(source.parent.iterdir()) == beside
    return output.err


@pytest.mark.parametrize(
    "fault, message",
    [
        ("absent", "no such directory"),
        ("pickles", "never unpickled"),
        ("no config", "no config.json"),
        ("other model", "config.json: model_type='llama'"),
        ("truncated", "model.safetensors: found 100000 bytes"),
    ],
)
def test_user_errors_in_files(fault, message, tmp_path, capsys):
    source = tmp_path / "src"
    if fault != "absent":
        released.write(source, released.released(released.in_memory()))
    if fault == "pickles":
        os.rename(source / "model.safetensors", source / "pytorch_model.bin")
    if fault == "no config":
        os.remove(source / "config.json")
    if fault == "other model":
        (source / "config.json").write_text('{"model_type": "llama"}')
    if fault == "truncated":
        os.truncate(source / "model.safetensors", 100_000)
    assert message in refused(source, tmp_path / "dst", capsys)


@pytest.mark.parametrize(
    "fault, messages",
    [
        ("truncated", ["model-00002-of-00003.safetensors: found", "(truncated)"]),
        ("absent", ["no file model-00002-of-00003.safetensors"]),
        ("index", ["no file model-00009-of-00009.safetensors", INDEX_NAME]),
        ("duplicate", ["1 duplicate", NORM, "model-00002-of-00003.safetensors"]),
    ],
)
def test_user_errors_in_shards(fault, messages, tmp_path, capsys):
    tensors = released.released(released.in_memory())
    source = released.write(tmp_path / "src", tensors, num_shards=3)
    index, shard = source / INDEX_NAME, source / "model-00002-of-00003.safetensors"
    content = json.loads(index.read_text())
    if fault == "truncated":
        os.truncate(shard, shard.stat().st_size - 1)
    if fault == "absent":
        os.remove(shard)
    if fault == "index":
        content["weight_map"][NORM] = "model-00009-of-00009.safetensors"
        index.write_text(json.dumps(content))
    if fault == "duplicate":
        names = [name for name, file in content["weight_map"].items() if file == shard.name]
        assert NORM not in names
        released.write_file(shard, {name: tensors[name] for name in [*names, NORM]})
        messages = [*messages, content["weight_map"][NORM]]
    message = refused(source, tmp_path / "dst", capsys)
    for part in messages:
        assert part in message


@pytest.mark.parametrize(
    "fault, name, messages",
    [
        ("strange", "strange", ["strange: found"]),
        ("missing", NORM, ["1 missing"]),
        ("transposed", Q_A, ["found", "[64, 32]", "[32, 64]"]),
        ("no scale", Q_A, ["1 scale", "weight_scale_inv"]),
    ],
)
def test_user_errors_in_tensors(fault, name, messages, tmp_path, capsys):
    tensors = released.released(released.in_memory())
    config = released.config()
    if fault == "strange":
        tensors[name] = np.zeros((1,), np.float32)
    if fault == "missing":
        del tensors[name]
    if fault == "transposed":
        tensors[name] = tensors[name].T.copy()
    if fault == "no scale":
        tensors, _ = released.with_fp8(tensors, (16, 16))
        del tensors[f"{name}_scale_inv"]
        config["quantization_config"] = {"weight_block_size": [16, 16]}
    source = released.write(tmp_path / "src", tensors, hf_config=config)
    message = refused(source, tmp_path / "dst", capsys)
    assert "1 failure(s)" in message
    for part in [name, *messages]:
        assert part in message


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("qk_rope_head_dim", 64, "qk_rope_head_dim=64"),
        ("index_topk", 2047, "index_topk=2047 must be divisible by"),
        ("initializer_range", None, "initializer_range must be a number >= 0, got None"),
        ("hidden_size", "64", "hidden_size must be a positive integer, got '64'"),
    ],
)
def test_user_errors_in_the_config(field, value, message, tmp_path, capsys):
    config = released.config()
    config["text_config"][field] = value
    tensors = released.released(released.in_memory())
    source = released.write(tmp_path / "src", tensors, hf_config=config)
    printed = refused(source, tmp_path / "dst", capsys)
    assert str(source / "config.json") in printed and message in printed


def test_destinations_that_would_be_lost(source, tmp_path, capsys):
    destination = tmp_path / "dst"
    destination.mkdir()
    (destination / "diary.txt").write_text("dear diary")
    assert main(source, destination) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert main(source, destination, "--overwrite") == 2
    assert "holds something else than a checkpoint that this command" in capsys.readouterr().err
    assert (destination / "diary.txt").read_text() == "dear diary"
    assert main(source, destination / "diary.txt") == 2
    assert "not a directory" in capsys.readouterr().err
    for inside in (source, source / "dst", source.parent):
        assert main(source, inside, "--overwrite") == 2
        assert "overlaps the source" in capsys.readouterr().err


def test_overwrite_replaces_an_earlier_conversion(source, tmp_path, capsys):
    destination = tmp_path / "dst"
    destination.mkdir()  # an empty directory is no loss
    assert main(source, destination, "--quiet", "--dtype", "float32") == 0
    (destination / "note.txt").write_text("of the earlier one")
    assert main(source, destination) == 2
    assert main(source, destination, "--overwrite", "--quiet") == 0
    capsys.readouterr()
    assert not (destination / "note.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]
    assert bits(leaves_of(load(destination))) == bits(leaves_of(load(source)))


def test_a_converted_source_is_refused(source, tmp_path, capsys):
    assert main(source, tmp_path / "dst", "--quiet") == 0
    assert main(tmp_path / "dst", tmp_path / "again") == 2
    assert "is a converted checkpoint already" in capsys.readouterr().err


def test_an_interrupt_says_how_to_go_on(source, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(safetensors_writer, "write_file", interrupted)  # after the weights
        assert main(source, tmp_path / "dst") == 130
    assert "interrupted; what was written is kept: the same command continues" in (
        capsys.readouterr().err
    )
    assert main(source, tmp_path / "dst") == 0
    assert "were there from an earlier run" in capsys.readouterr().out
    assert bits(leaves_of(load(tmp_path / "dst"))) == bits(leaves_of(load(source)))


def test_weights_that_are_not_finite_can_be_allowed(tmp_path, capsys):
    """Also after the refusal: what was written meanwhile counts."""
    tensors = released.released(released.in_memory())
    tensors[NORM] = np.full_like(tensors[NORM], np.nan)
    source = released.write(tmp_path / "src", tensors)
    assert main(source, tmp_path / "dst", "--quiet") == 2
    assert f"{NORM}: found 64 values" in capsys.readouterr().err
    assert not (tmp_path / "dst" / native.HEADER_NAME).exists()
    assert main(source, tmp_path / "dst", "--allow-non-finite") == 0
    got = leaves_of(load(tmp_path / "dst", check_finite=False))
    assert np.isnan(got["norm.weight"]).all()


def test_what_an_allowed_run_wrote_is_looked_at_again(tmp_path, monkeypatch, capsys):
    tensors = released.released(released.in_memory())
    tensors[NORM] = np.full_like(tensors[NORM], np.nan)
    source = released.write(tmp_path / "src", tensors)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(tree.TreeWriter, "finish", interrupted)  # all leaves are written
        assert main(source, tmp_path / "dst", "--allow-non-finite", "--quiet") == 130
    capsys.readouterr()
    assert main(source, tmp_path / "dst", "--quiet") == 2
    assert f"{NORM}: found 64 values" in capsys.readouterr().err


def test_json_lines(source, tmp_path, capsys):
    assert main(source, tmp_path / "dst", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    event = json.loads(line)
    assert event["event"] == "done" and event["is_new"] and event["num_unused"] > 0
    assert main(source, tmp_path / "dst", "--json", "--dtype", "float32") == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["event"] == "error" and "--overwrite" in json.loads(line)["message"]


@pytest.mark.parametrize("mode, stream", [("auto", "err"), ("json", "out")])
def test_progress_without_a_terminal(mode, stream, source, tmp_path, monkeypatch, capsys):
    """Lines of their own, with bytes, rate, time left and the current tensor; none are redrawn."""
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    converter.convert(source, tmp_path / "dst", mode=mode)
    lines = getattr(capsys.readouterr(), stream).splitlines()
    if mode == "json":
        events = [event for event in map(json.loads, lines) if event["event"] == "converting"]
        assert events[-1]["bytes"] == events[-1]["total"] > 100_000
        assert {"bytes_per_second", "seconds_left", "tensor"} <= events[0].keys()
        assert any(event["tensor"] == "embed_tokens.weight" for event in events)
        assert [event["bytes"] for event in events] == sorted(event["bytes"] for event in events)
    else:
        assert re.fullmatch(
            r"converting: 100% of [0-9.]+ KiB, [0-9.]+ [KMG]iB/s, 0:00 left; .*", lines[-1]
        )
        assert any("; embed_tokens.weight" in line for line in lines)
        assert not any("\r" in line for line in lines)


def test_nothing_of_this_machine_is_written(source, tmp_path, monkeypatch):
    """No path, no name of user or host: a checkpoint is passed on."""
    config = json.loads((source / "config.json").read_text())
    config["_name_or_path"] = config["text_config"]["_name_or_path"] = "/home/somebody/model"
    config["cache_dir"] = "/home/somebody/cache"
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "config.json").write_text(json.dumps(config))
    converter.convert(copy, tmp_path / "dst", mode="quiet")
    secrets = [str(tmp_path), "/home/somebody", str(os.getcwd())]
    for path in (tmp_path / "dst").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not [secret for secret in secrets if secret.encode() in data], path
            if path.suffix == ".json":
                assert f'"{socket.gethostname()}"'.encode() not in data


def test_a_link_to_a_private_file_is_not_copied(source, tmp_path, capsys):
    copy, private = tmp_path / "copy", tmp_path / "private"
    shutil.copytree(source, copy)
    private.write_text("secret")
    os.remove(copy / "chat_template.jinja")
    (copy / "chat_template.jinja").symlink_to(private)
    assert main(copy, tmp_path / "dst") == 2
    assert "chat_template.jinja: found a link to" in capsys.readouterr().err
    assert not (tmp_path / "dst").exists()


def test_what_load_would_refuse_is_refused_first(source, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "generation_config.json").write_text('{"eos_token_id": 100000}')
    assert main(copy, tmp_path / "dst") == 2
    assert "eos_token_id holds 100000, outside the vocabulary" in capsys.readouterr().err
    assert not (tmp_path / "dst").exists()
