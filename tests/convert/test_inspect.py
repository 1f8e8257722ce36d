"""What `glm5next-convert inspect` says, held against counts that were made without it."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from convert import converter, exporter, inspector, journal, tree
from convert.__main__ import main
from glm5next_jax.checkpoint import CheckpointError, native, planning
from glm5next_jax.checkpoint.source import open_source
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.model import param_specs
from tests.checkpoint import released
from tests.checkpoint.test_mapping import MANIFEST, manifest
from tests.checkpoint.test_nvfp4 import EXPERTS, with_nvfp4
from tests.source_tree import ROOT

COUNTS = (MANIFEST / "param_counts.txt").read_text()
ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
KINDS = {"fp8": (62, 328_326_771_576), "bf16": (120, 642_646_653_816)}
MAX_SECONDS = 20.0  # of processor time; some 4 on an idle machine


def counted(what: str) -> int:
    """A number of the file of counts."""
    match = re.search(rf"^ *{re.escape(what)}: ([\d,]+)$", COUNTS, flags=re.MULTILINE)
    assert match is not None, what
    return int(match[1].replace(",", ""))


def write_full(directory, kind, num_files):
    """A released directory of full size: real headers, and files of zeros that take no disk."""
    tensors = manifest(kind)
    per_file = math.ceil(len(tensors) / num_files)
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        header, end = {}, 0
        for info in tensors[number * per_file : (number + 1) * per_file]:
            size = math.prod(info.shape) * ITEM_BYTES[info.dtype]
            offsets = [end, end := end + size]
            header[info.name] = {
                "dtype": info.dtype, "shape": info.shape, "data_offsets": offsets,
            }  # fmt: skip
            weight_map[info.name] = file
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as handle:
            handle.write(len(text).to_bytes(8, "little") + text)
            handle.truncate(8 + len(text) + end)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(MANIFEST / "full_config.json", directory / "config.json")


@pytest.fixture(scope="module", params=list(KINDS))
def full(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    write_full(directory, request.param, KINDS[request.param][0])
    yield request.param, directory
    shutil.rmtree(directory)


def test_the_released_checkpoints(full):
    kind, directory = full
    report = inspector.inspect(directory)
    num_files, num_bytes = KINDS[kind]
    assert report.is_complete and report.num_files == num_files
    assert report.tensor_bytes == num_bytes
    assert report.num_tensors == {"fp8": 76_108, "bf16": 38_770}[kind]
    assert sum(report.parameters.values()) == counted("total incl MTP") == 321_323_031_390
    if kind == "fp8":
        assert report.format == "released names, block FP8 (128 x 128)"
        assert report.parameters == {
            "F8_E4M3": 314_396_639_232, "BF16": 6_926_096_640, "F32": 295_518,
        }  # fmt: skip
        assert report.num_factors == 19_189_248
    else:
        assert report.format == "released names, BF16"
        assert report.parameters == {"BF16": 321_323_031_390 - 295_518, "F32": 295_518}

    sparse, kda, dense, moe = 11, 34, 3, 42
    indexer = counted("indexer")
    hc, norms = counted("mHC per layer (2 modules)"), counted("2 layer norms")
    assert {each.name: sum(each.parameters.values()) for each in report.components} == {
        "embedding": counted("embed_tokens"),
        "lm_head": counted("lm_head"),
        "KDA": kda * counted("KDA self_attn (layer 0)"),
        "sparse MLA": sparse * (counted("DSA self_attn (layer 3)") - indexer),
        "indexer": sparse * indexer,
        "dense MLP": dense * counted("dense mlp (layer 0)"),
        "routed experts": moe * counted("routed experts"),
        "shared experts": moe * counted("shared expert"),
        "router": moe * counted("router"),
        "norms": (kda + sparse) * norms + 4096,
        "hyper-connections": (kda + sparse) * hc,
        "MTP": counted("MTP layer 45 on disk (not in HF), no mHC"),
        "vision": counted("visual"),
    }
    layers = report.as_json()["layers"]
    assert layers == {
        "total": 45, "kda": kda, "sparse_attention": sparse, "indexers": 11, "dense": dense,
        "moe": moe, "experts": 288, "experts_per_token": 8, "shared_experts": 1, "mtp": 1,
        "vision_blocks": 24,
    }  # fmt: skip
    assert [(each.reason, each.num_tensors, each.is_carried) for each in report.set_aside] == [
        (planning.MTP_REASON, 1760 if kind == "fp8" else 889, True),
        (planning.VISION_REASON, 347, True),
    ]
    assert len(report.text().splitlines()) < 40
    assert max(map(len, report.text().splitlines())) < 130


def test_what_conversions_take(full):
    report = inspector.inspect(full[1])
    with open_source(full[1]) as source:
        for dtype in ("keep", "bfloat16"):
            specs = source.specs(dtype)
            num_bytes = sum(math.prod(s.shape) * s.dtype.itemsize for s in specs.values())
            assert report.conversions[dtype].weight_bytes == num_bytes
            carried = sum(each.num_bytes for each in report.set_aside)
            assert report.conversions[dtype].disk_bytes == num_bytes + carried


def test_seconds_and_memory(full):
    code = (
        "import pathlib, resource, sys, convert.__main__\n"
        "status = convert.__main__.main(['inspect', sys.argv[1]])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        # ru_maxrss of a child begins with its parent's.
        "peak = pathlib.Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]\n"
        "print(used.ru_utime + used.ru_stime, peak, file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, os.fspath(full[1])], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    seconds, kilobytes = map(float, done.stderr.split()[-2:])
    assert seconds < MAX_SECONDS
    assert kilobytes < 500e3


@pytest.mark.parametrize("kinds", [("linear_attention",) * 3, ("linear_attention",) * 2 + ("x",)])
def test_specs_of_layers_that_are_alike(kinds):
    config = Glm5NextConfig.tiny()
    if "x" in kinds:  # layers that share the selection of the one before them
        config = config.replace(
            layer_types=("linear_attention",) * 3 + ("indexed_attention",) * 2,
            indexer_types=("full",) * 4 + ("shared",),
        )
    for each in (config, Glm5NextConfig.glm53_flash()):
        assert inspector.specs_of(each) == param_specs(each, param_dtype="bfloat16")


def stored(kind: str) -> dict:
    plain = released.as_stored(released.released(released.in_memory()))
    match kind:
        case "fp8":
            return released.with_fp8(plain, (16, 16))[0]
        case "modelopt" | "compressed-tensors":
            return with_nvfp4(plain, kind, EXPERTS)[0]
        case "fused":
            return released.fused(plain)
        case "in memory":
            return released.as_stored(released.in_memory())
        case "mixed":
            mixed = released.fused(plain)
            own = {n: x for n, x in plain.items() if "layers.0." in n}
            return {n: x for n, x in mixed.items() if "layers.0." not in n} | own
    return plain


def write(directory, kind="bf16", **options):
    config = released.config()
    if kind == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    return released.write(directory, stored(kind), hf_config=config, **options)


FORMATS = {
    "bf16": "released names, BF16",
    "fp8": "released names, block FP8 (16 x 16)",
    "modelopt": "released names, NVFP4, ModelOpt layout",
    "compressed-tensors": "released names, NVFP4, compressed-tensors layout",
    "fused": "fused names of serving engines, BF16",
    "in memory": "in-memory names of transformers, BF16",
    "mixed": "mixed names (released, fused), BF16",
}


@pytest.mark.parametrize("kind", list(FORMATS))
def test_formats(kind, tmp_path, capsys):
    path = write(tmp_path / "src", kind, num_shards=2)
    report = inspector.inspect(path)
    assert report.format == FORMATS[kind] and report.is_complete
    plain = inspector.inspect(write(tmp_path / "plain"))
    per_part = [
        {each.name: sum(each.parameters.values()) for each in one.components}
        for one in (report, plain)
    ]
    assert per_part[0] == per_part[1]  # numbers, however they are stored
    assert report.tensor_bytes == sum(x.nbytes for x in stored(kind).values())
    assert sum(each.total_bytes for each in report.components) == report.tensor_bytes
    with open_source(path) as source:
        kept = source.specs("keep").values()
    assert report.conversions["keep"].weight_bytes == sum(
        math.prod(spec.shape) * spec.dtype.itemsize for spec in kept
    )

    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report.as_json()
    assert main(["inspect", str(path)]) == 0
    assert capsys.readouterr().out == report.text() + "\n"


def test_the_files_beside_the_weights(tmp_path):
    path = write(tmp_path)
    expected = {
        "vision_config": True, "tokenizer": False, "generation_config": False,
        "chat_template": False,
    }  # fmt: skip
    assert inspector.inspect(path).beside == expected
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (path / "generation_config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    assert inspector.inspect(path).beside == dict.fromkeys(expected, True)
    (path / "tokenizer_config.json").write_text("{")
    assert [f.file for f in inspector.inspect(path).failures] == ["tokenizer_config.json"]
    (path / "chat_template.jinja").write_text("{{ messages }}")
    assert inspector.inspect(path).is_complete


def test_a_tied_head_and_activation_scales_are_ignored(tmp_path):
    config, tensors = released.config(), stored("modelopt")
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    num_scales = sum(name.endswith(".input_scale") for name in tensors)
    report = inspector.inspect(released.write(tmp_path, tensors, hf_config=config))
    reasons = {each.reason: (each.num_tensors, each.is_carried) for each in report.set_aside}
    assert reasons[planning.TIED_REASON] == (1, False)
    assert reasons[planning.ACTIVATION_REASON] == (num_scales, False) != (0, False)
    assert report.is_complete


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_what_is_set_aside_is_what_planning_sets_aside(kind):
    """On the names of the released checkpoints, in the order in which they are stored."""
    config = Glm5NextConfig.glm53_flash()
    plan = planning.plan(manifest(kind), config, inspector.specs_of(config))
    names = {kept.source.name for kept in plan.kept}
    for info in manifest(kind):
        is_visual = info.name.startswith("model.visual.")
        assert (info.name in names) == (is_visual or ".layers.45." in info.name)


class TestDamaged:
    def test_every_failure_and_what_is_there(self, tmp_path, capsys):
        path = write(tmp_path, num_shards=4)
        whole = inspector.inspect(path)
        shards = sorted(path.glob("*.safetensors"))
        shards[0].unlink()
        with shards[1].open("r+b") as handle:
            handle.truncate(shards[1].stat().st_size - 1)
        index = json.loads((path / "model.safetensors.index.json").read_text())
        index["weight_map"]["model.no_such.weight"] = shards[2].name
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

        report = inspector.inspect(path)
        assert not report.is_complete
        told = "\n".join(map(str, report.failures))
        assert f"no file {shards[0].name}" in told
        assert f"{shards[1].name}: found" in told and "truncated" in told
        assert "model.no_such.weight: found no such tensor" in told
        assert any(failure.kind == "missing" for failure in report.failures)
        assert 0 < report.num_tensors < whole.num_tensors
        assert report.layers == whole.layers and report.components
        assert report.conversions == {}

        assert main(["inspect", str(path)]) == 1
        text = capsys.readouterr().out
        assert f"complete    no: {len(report.failures)} failure(s)" in text
        assert len(text.splitlines()) < 90
        assert main(["inspect", str(path), "--json"]) == 1
        assert len(json.loads(capsys.readouterr().out)["failures"]) == len(report.failures)

    def test_names_that_no_rule_knows(self, tmp_path):
        extra = {f"model.other.{i}.weight": np.ones((2, 3), released.BF16) for i in range(60)}
        report = inspector.inspect(released.write(tmp_path, stored("bf16") | extra))
        assert {f.kind for f in report.failures} == {"unknown"} and len(report.failures) == 60
        assert sum(line.startswith("  model") for line in report.text().splitlines()) == 40
        assert "… and 20 more" in report.text()
        (unknown,) = [each for each in report.components if each.name == "unknown"]
        assert (unknown.num_tensors, unknown.parameters) == (60, {"BF16": 360})

    def test_a_damaged_index(self, tmp_path):
        path = write(tmp_path, num_shards=2)
        (path / "model.safetensors.index.json").write_text("{")
        report = inspector.inspect(path)
        assert [failure.file for failure in report.failures] == ["model.safetensors.index.json"]
        assert report.num_tensors == len(stored("bf16"))

    def test_no_checkpoint_at_all(self, tmp_path, capsys):
        assert main(["inspect", str(tmp_path / "none")]) == 2
        assert "no such directory" in capsys.readouterr().err
        (tmp_path / "config.json").write_text(json.dumps(released.config()))
        with pytest.raises(CheckpointError, match=r"no \*.safetensors file"):
            inspector.inspect(tmp_path)

    def test_another_model(self, tmp_path, capsys):
        write(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        assert main(["inspect", str(tmp_path), "--json"]) == 2
        assert "model_type='llama'; expected 'glm5_next'" in capsys.readouterr().err

    def test_another_model_under_this_config(self, tmp_path):
        tensors = {"model.layers.0.self_attn.rotary.weight": np.ones((4, 4), released.BF16)}
        report = inspector.inspect(released.write(tmp_path, tensors))
        assert report.format == "no names of this model"
        assert {failure.kind for failure in report.failures} == {"unknown", "missing"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint and a conversion of it."""
    directory = tmp_path_factory.mktemp("converted")
    write(directory / "src", "fp8", num_shards=2)
    converter.convert(directory / "src", directory / "dst", mode="quiet")
    return directory


class TestConverted:
    def test_the_same_numbers_as_its_source(self, whole):
        report = inspector.inspect(whole / "dst")
        source = inspector.inspect(whole / "src")
        assert report.format == f"converted, version {native.VERSION}, block FP8 (16 x 16)"
        assert report.is_complete and report.kind == "converted"
        assert report.parameters == source.parameters
        assert report.layers == source.layers
        for ours, theirs in zip(report.components, source.components, strict=True):
            assert ours.name == theirs.name and ours.num_bytes == theirs.num_bytes
        present = [path for path in (whole / "dst").rglob("*") if path.is_file()]
        assert report.num_files == len(present)
        assert report.disk_bytes == sum(path.stat().st_size for path in present)
        predicted = source.conversions["keep"]
        assert report.tensor_bytes == predicted.disk_bytes

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_other_dtypes(self, dtype, whole, tmp_path):
        converter.convert(whole / "src", tmp_path / "dst", dtype=dtype, mode="quiet")
        report = inspector.inspect(tmp_path / "dst")
        assert report.is_complete
        assert report.format.endswith({"bfloat16": "BF16", "float32": "F32"}[dtype])

    def test_arrays_of_several_files_and_chunks(self, whole, tmp_path, monkeypatch):
        monkeypatch.setattr(tree, "FILE_BYTES", 4096)
        monkeypatch.setattr(tree, "_CHUNK_SHAPE", (24, 40))  # divides nothing
        converter.convert(whole / "src", tmp_path / "dst", dtype="float32", mode="quiet")
        assert inspector.inspect(tmp_path / "dst").is_complete

    @pytest.mark.parametrize("fault", ["missing", "short", "no array", "metadata", "unused"])
    def test_faults(self, fault, whole, tmp_path):
        shutil.copytree(whole / "dst", tmp_path / "dst")
        array = tmp_path / "dst" / "weights" / "layers.4.mlp.experts.gate_proj"
        file = array / "c" / "3" / "0" / "0"
        match fault:
            case "missing":
                file.unlink()
                expected = "1 of 8 files missing, such as c/3/0/0"
            case "short":
                file.write_bytes(file.read_bytes()[:-1])
                expected = "bytes in c/3/0/0"
            case "no array":
                shutil.rmtree(array)
                expected = "no such array"
            case "metadata":
                (array / "zarr.json").write_text("[]")
                expected = "damaged zarr.json"
            case _:
                (unused,) = (tmp_path / "dst" / "unused").iterdir()
                unused.write_bytes(unused.read_bytes()[:-1])
                expected = "truncated"
        report = inspector.inspect(tmp_path / "dst")
        assert not report.is_complete and len(report.failures) == 1
        assert expected in str(report.failures[0])
        assert report.components

    def test_a_leaf_that_its_header_lacks(self, whole, tmp_path):
        shutil.copytree(whole / "dst", tmp_path / "dst")
        path = tmp_path / "dst" / native.HEADER_NAME
        header = json.loads(path.read_text())
        del header["leaves"]["norm.weight"]
        path.write_text(json.dumps(header))
        (failure,) = inspector.inspect(tmp_path / "dst").failures
        assert (failure.kind, failure.tensor) == ("missing", "norm.weight")

    def test_an_earlier_version(self, whole, tmp_path):
        shutil.copytree(whole / "dst", tmp_path / "dst")
        path = tmp_path / "dst" / native.HEADER_NAME
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
        with pytest.raises(CheckpointError, match="convert the released checkpoint again"):
            inspector.inspect(tmp_path / "dst")


class TestUnfinished:
    @pytest.fixture
    def stopped(self, tmp_path, monkeypatch):
        """A conversion whose disk was full after some files."""
        source = write(tmp_path / "src", "fp8", num_shards=2)
        monkeypatch.setattr(journal, "FLUSH_SECONDS", 0.0)
        written, original = [], tree.TreeWriter.write

        def write_some(self, leaf, index, values):
            if len(written) == 20:
                raise OSError("No space left on device")
            written.append(values.nbytes)
            original(self, leaf, index, values)

        with monkeypatch.context() as patch:
            patch.setattr(tree.TreeWriter, "write", write_some)
            with pytest.raises(OSError, match="No space left"):
                converter.convert(source, tmp_path / "dst", dtype="bfloat16", mode="quiet")
        return source, tmp_path / "dst", sum(written)

    def test_how_far_it_came_and_how_to_go_on(self, stopped, capsys):
        source, destination, num_bytes = stopped
        report = inspector.inspect(destination)
        assert report.kind == "unfinished" and not report.is_complete
        assert report.format.startswith("unfinished conversion, begun by version ")
        assert report.unfinished is not None
        assert (report.unfinished.num_units, report.unfinished.num_bytes) == (20, num_bytes)
        files = list(source.glob("*.safetensors"))
        assert report.unfinished.source_bytes == sum(path.stat().st_size for path in files)
        assert max(files, key=lambda path: path.stat().st_size).name in report.text()

        assert main(["inspect", str(destination)]) == 1
        assert capsys.readouterr().out == report.text() + "\n"
        command = report.unfinished.finish.replace("SRC", str(source)).split()
        assert command[0] == "glm5next-convert" and main([*command[1:], "--quiet"]) == 0
        assert inspector.inspect(destination).is_complete

    def test_a_damaged_journal(self, stopped):
        _, destination, _ = stopped
        next((destination / native.UNFINISHED_NAME).glob("done-*")).write_text("{")
        report = inspector.inspect(destination)
        assert len(report.failures) == 1 and report.unfinished is not None
        assert report.unfinished.finish.endswith("--overwrite")

    def test_one_that_had_hardly_begun(self, tmp_path):
        (tmp_path / native.UNFINISHED_NAME).mkdir()
        report = inspector.inspect(tmp_path)
        assert report.unfinished is not None and report.unfinished.num_bytes == 0
        assert "SRC is what the command was given" in report.text()
        json.dumps(report.as_json())

    def test_an_export(self, tmp_path, monkeypatch):
        source = write(tmp_path / "src")
        original = journal.Journal.commit

        def stop(self, content):
            self.flush()
            raise KeyboardInterrupt

        monkeypatch.setattr(journal.Journal, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            exporter.export(source, tmp_path / "dst", dtype="bfloat16", mode="quiet")
        monkeypatch.setattr(journal.Journal, "commit", original)
        report = inspector.inspect(tmp_path / "dst")
        assert report.format.startswith("unfinished export")
        assert report.unfinished is not None
        command = report.unfinished.finish.replace("SRC", str(source)).split()
        assert command[:2] == ["glm5next-convert", "export"]
        assert main([*command[1:], "--quiet"]) == 0
        assert inspector.inspect(tmp_path / "dst").is_complete
