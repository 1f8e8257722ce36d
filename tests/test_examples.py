"""The example checkpoint is what its generator writes, and is laid out as the released one."""

import collections
import filecmp
import importlib.util
import json
import lzma
import re
import struct

import numpy as np
import pytest

from glm5next_jax.batch import jobs
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.tokenizer import Tokenizer
from tests.source_tree import ROOT

EXAMPLES = ROOT / "examples"
EXAMPLE = EXAMPLES / "tiny-glm53-flash"
MANIFEST = ROOT / "tests" / "data" / "manifest" / "manifest_fp8.tsv.xz"
MAX_BYTES = 5_000_000
LAYERS = 5


def generator():
    spec = importlib.util.spec_from_file_location(
        "make_example_checkpoint", EXAMPLES / "make_example_checkpoint.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def headers() -> dict[str, dict[str, tuple[str, list[int], int]]]:
    """File to tensor to (dtype, shape, bytes), read from the headers with nothing but struct."""
    found = {}
    for path in sorted(EXAMPLE.glob("*.safetensors")):
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        assert header.pop("__metadata__") == {"format": "pt"}
        found[path.name] = {
            name: (entry["dtype"], entry["shape"], -int(np.subtract(*entry["data_offsets"])))
            for name, entry in header.items()
        }
    return found


def all_tensors() -> dict[str, tuple[str, list[int], int]]:
    return {name: entry for tensors in headers().values() for name, entry in tensors.items()}


def kind_of(name: str, mtp_layer: int) -> str:
    """A tensor's name without its numbers; the MTP layer stays apart."""
    name = re.sub(rf"layers\.{mtp_layer}\.", "mtp.", name)
    return re.sub(r"\.\d+\.", ".N.", name)


def test_a_run_of_the_generator_gives_the_same_bytes(tmp_path):
    generator().write(tmp_path)
    names = sorted(path.name for path in EXAMPLE.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert filecmp.cmpfiles(EXAMPLE, tmp_path, names, shallow=False) == (names, [], [])


def test_the_example_is_small():
    assert sum(path.stat().st_size for path in EXAMPLE.iterdir()) < MAX_BYTES


def test_the_index_agrees_with_the_shards():
    index = json.loads((EXAMPLE / "model.safetensors.index.json").read_text())
    found = {name: file for file, tensors in headers().items() for name in tensors}
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(size for _, _, size in all_tensors().values())
    assert len(headers()) >= 3


def test_a_weight_and_its_scales_lie_in_different_shards():
    index = json.loads((EXAMPLE / "model.safetensors.index.json").read_text())["weight_map"]
    parted = [n for n in index if n + "_scale_inv" in index and index[n] != index[n + "_scale_inv"]]
    assert len(parted) == 3


def test_every_kind_of_tensor_has_the_dtype_of_the_released_one():
    """Names and dtypes against the table of all 76,108 released tensors."""
    released = collections.defaultdict(set)
    for row in lzma.decompress(MANIFEST.read_bytes()).decode().splitlines():
        name, dtype, _ = row.split("\t")
        released[kind_of(name, 45)].add(dtype)
    ours = collections.defaultdict(set)
    for name, (dtype, _, _) in all_tensors().items():
        ours[kind_of(name, LAYERS)].add(dtype)
    assert dict(ours) == dict(released)


def test_fp8_tensors_have_one_scale_a_block_and_use_its_range():
    tensors = all_tensors()
    weights = [name for name, (dtype, _, _) in tensors.items() if dtype == "F8_E4M3"]
    # 4 in each of 2 DSA layers, 3 dense MLPs of 3, 3 MoE layers of 8 + 1 experts of 3.
    assert len(weights) == 4 * 2 + 3 * 3 + 3 * 9 * 3
    assert any(max(tensors[name][1]) > 128 for name in weights)
    for name in weights:
        rows, cols = tensors[name][1]
        assert tensors[name + "_scale_inv"][:2] == ("F32", [rows // 128, cols // 128])
    everything = generator().tensors()
    for name in weights:
        blocks = np.abs(everything[name].astype(np.float32)).reshape(
            everything[name].shape[0] // 128, 128, -1, 128
        )
        assert np.all(blocks.max(axis=(1, 3)) == 448)


def test_quantisation_keeps_a_weight_to_its_precision():
    make = generator()
    want = make.Draw("w").normal(256, 128, std=0.1)
    values, scale = make.quantise(want)
    got = values.astype(np.float64) * np.repeat(np.repeat(scale, 128, 0), 128, 1)
    # Three mantissa bits: half a step is 1/16 of a value, or of the smallest normal number, 2^-6.
    bound = np.maximum(np.abs(want) / 16, scale.max() * 2.0**-6 / 16)
    assert np.all(np.abs(got - want) <= bound * (1 + 1e-6))


def test_random_numbers_are_what_they_say():
    make = generator()
    normal = make.Draw("n").normal(200, 500, std=2.0, mean=1.0)
    assert abs(normal.mean() - 1) < 0.03 and abs(normal.std() - 2) < 0.03
    uniform = make.Draw("u").uniform(-3.0, 1.0, 100_000)
    assert uniform.min() >= -3 and uniform.max() <= 1 and abs(uniform.mean() + 1) < 0.02
    assert not np.array_equal(make.Draw("n").normal(4), make.Draw("m").normal(4))


def test_the_config_says_what_the_tensors_are():
    text = json.loads((EXAMPLE / "config.json").read_text())
    assert text["text_config"]["layer_types"].count("deepseek_sparse_attention") == 1
    assert "linear_num_heads" not in text["text_config"]  # stands in linear_attn_config only
    config = Glm5NextConfig.from_hf(EXAMPLE)
    assert [config.is_kda(i) for i in range(LAYERS)] == [i % 4 != 3 for i in range(LAYERS)]
    assert [config.is_moe(i) for i in range(LAYERS)] == [i >= 3 for i in range(LAYERS)]
    assert (config.num_nextn_predict_layers, config.dtype) == (1, "bfloat16")
    assert (config.linear_num_heads, config.linear_head_dim, config.linear_lower_bound) == (
        2, 32, -5.0,
    )  # fmt: skip
    quantised = {
        name.removesuffix(".weight") for name, (d, _, _) in all_tensors().items() if d == "F8_E4M3"
    }
    kept = set(text["quantization_config"]["modules_to_not_convert"])
    assert not quantised & kept
    assert {"lm_head", "model.language_model.layers.3.self_attn.kv_b_proj"} <= kept


def test_special_token_ids_agree_between_the_files():
    config = json.loads((EXAMPLE / "config.json").read_text())
    tokenizer = Tokenizer.from_directory(EXAMPLE)
    assert tokenizer is not None
    for field, token in (
        ("image_token_id", "<|image|>"),
        ("video_token_id", "<|video|>"),
        ("image_start_token_id", "<|begin_of_image|>"),
        ("video_end_token_id", "<|end_of_video|>"),
    ):
        assert tokenizer.encode(token) == [config[field]]
    eos = tokenizer.encode("<|endoftext|><|user|><|observation|>")
    assert tuple(eos) == tokenizer.generation.eos_token_ids
    assert tuple(eos) == Glm5NextConfig.from_hf(EXAMPLE).eos_token_id
    # The same place as in the released vocabulary.
    assert config["video_token_id"] - eos[0] == 154855 - 154820


def test_the_example_requests_are_well_formed_and_of_every_kind():
    tokenizer, config = Tokenizer.from_directory(EXAMPLE), Glm5NextConfig.from_hf(EXAMPLE)
    requests = jobs.parse((EXAMPLES / "prompts.jsonl").read_bytes())
    kinds = set()
    for request in requests:
        assert isinstance(request, jobs.Request), request
        kinds.add(request.kind)
        job = jobs.prepare(
            request,
            tokenizer=tokenizer,
            vocab_size=config.vocab_size,
            max_length=config.max_position_embeddings,
            defaults={"max_new_tokens": 8},
        )
        assert isinstance(job, jobs.Job), job
    assert kinds == {"prompt", "messages", "token_ids"}


@pytest.mark.parametrize("library", ["torch", "transformers", "jax"])
def test_the_generator_needs_no_framework(library):
    source = (EXAMPLES / "make_example_checkpoint.py").read_text()
    assert not re.search(rf"^\s*(import|from) {library}\b", source, flags=re.MULTILINE)
