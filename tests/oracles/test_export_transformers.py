"""What `exporter.export` writes, as transformers reads it: every key, and the same logits.

Each exported directory is loaded beside the original one, with the same call. Weights that are bit
for bit the same give logits that are.
"""

import json
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from convert import converter
from convert.exporter import export
from tests.checkpoint import released
from tests.oracles import hf

pytestmark = [pytest.mark.oracle]


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loaded(directory):
    """The reference from a directory in which it finds all it looks for, and nothing else."""
    found: Any = transformers.Glm5NextForConditionalGeneration.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager"
    )
    model, report = found
    problems = {kind: list(names) for kind, names in report.items() if names}
    assert problems == {}, problems
    return model.eval()


def logits(model) -> np.ndarray:
    ids = np.random.default_rng(9).integers(0, 120, (2, 37)).astype(np.int64)
    return hf.run(model, ids)[0]


def config_of(kind: str) -> dict:
    config = released.config()
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = "float32" if kind == "float32" else "bfloat16"
    return config


def tensors_of(kind: str) -> dict[str, np.ndarray]:
    full = released.released(released.in_memory())
    return full if kind == "float32" else released.as_stored(full)


def exported(source, tmp_path, **options):
    """By way of a conversion."""
    converter.convert(source, tmp_path / "converted", mode="quiet")
    export(tmp_path / "converted", tmp_path / "exported", mode="quiet", **options)
    return tmp_path / "exported"


def assert_same_parameters(ours, theirs) -> None:
    ours, theirs = dict(ours.state_dict()), dict(theirs.state_dict())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_there_and_back(kind, tmp_path):
    source = released.write(tmp_path / "source", tensors_of(kind), hf_config=config_of(kind))
    theirs = loaded(source)
    ours = loaded(exported(source, tmp_path, max_file_bytes=400_000))
    assert ours.dtype == theirs.dtype == getattr(torch, kind)
    assert_same_parameters(ours, theirs)
    want = logits(theirs)
    assert np.isfinite(want).all() and want.std() > 0.1
    np.testing.assert_array_equal(logits(ours), want)


def test_float32_to_bfloat16(tmp_path):
    """As if the original had been rounded before it was saved."""
    source = released.write(
        tmp_path / "source", tensors_of("float32"), hf_config=config_of("float32")
    )
    tensors = tensors_of("bfloat16")
    rounded = released.write(tmp_path / "rounded", tensors, hf_config=config_of("bfloat16"))
    ours, theirs = loaded(exported(source, tmp_path, dtype="bfloat16")), loaded(rounded)
    ours.model.visual.to(torch.bfloat16)  # is written as it was
    assert_same_parameters(ours, theirs)
    np.testing.assert_array_equal(logits(ours), logits(theirs))


def test_the_names_of_a_bare_text_model_become_the_released_ones(tmp_path):
    """Fault 21: `save_pretrained` of such a model writes names of which loaders drop weights."""
    original = released.write(
        tmp_path / "original", tensors_of("float32"), hf_config=config_of("float32")
    )
    theirs = loaded(original)
    in_memory = {name: hf.array(tensor) for name, tensor in theirs.state_dict().items()}
    assert any("forget_gate" in name for name in in_memory)
    assert any("gate_up_proj" in name for name in in_memory)
    source = released.write(tmp_path / "source", in_memory, hf_config=config_of("float32"))
    out = tmp_path / "exported"
    export(source, out, mode="quiet")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of("float32").keys()
    ours = loaded(out)
    assert_same_parameters(ours, theirs)
    np.testing.assert_array_equal(logits(ours), logits(theirs))


def loaded_fp8(directory):
    """Without a GPU, transformers multiplies FP8 by its factors while it loads.

    It asks for a package that it does not need for this, and that is not there.
    """
    place = "transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available"
    with mock.patch(place, lambda: True):
        return loaded(directory)


@pytest.mark.parametrize("stored", [True, False])
def test_fp8(stored, tmp_path):
    """FP8 that was there, in blocks of 16 x 16, and FP8 that the export makes, in partial blocks of
    128 x 128: to transformers they mean what they mean to the export to bfloat16."""
    config, tensors = config_of("bfloat16"), tensors_of("bfloat16")
    if stored:
        full = tensors_of("float32")
        config["quantization_config"] = {"weight_block_size": [16, 16]}
        coded, _ = released.with_fp8(full, (16, 16))
        tensors |= {n: x for n, x in coded.items() if n not in full or x.dtype == released.FP8}
    source = released.write(tmp_path / "source", tensors, hf_config=config)
    fp8 = exported(source, tmp_path, dtype="keep" if stored else "fp8")
    export(fp8, tmp_path / "bfloat16", dtype="bfloat16", mode="quiet")

    ours, theirs = loaded_fp8(fp8), loaded(tmp_path / "bfloat16")
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.dtype != wanted[name].dtype:  # it keeps no float32 beside FP8
            assert name.endswith("conv1d.weight")
            parameter.data = parameter.data.to(wanted[name].dtype)
    assert_same_parameters(ours, theirs)
    np.testing.assert_array_equal(logits(ours), logits(theirs))
