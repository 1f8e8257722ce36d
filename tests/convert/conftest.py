"""A small checkpoint with everything in it, and what converting it makes."""

import json
import pathlib

import pytest

from convert import converter
from glm5next_jax.checkpoint import native
from tests.checkpoint import released


def two_layers() -> tuple[dict, dict]:
    """Config and tensors of a checkpoint with all that is written: KDA and sparse attention, FP8,
    a vision tower, MTP; as small as it can be, since it is converted hundreds of times."""
    config = released.config()
    text = config["text_config"]
    text |= {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "full"],
    }
    config["quantization_config"] = {"weight_block_size": [16, 16]}
    everything = released.as_stored(released.released(released.in_memory()))
    codes, _ = released.with_fp8(released.released(released.in_memory()), (16, 16))
    everything |= {n: x for n, x in codes.items() if f"{n}_scale_inv" in codes or "_scale_inv" in n}
    layers = {0: 0, 3: 1}
    tensors = {}
    num_visual = 0
    for name, x in everything.items():
        head, found, rest = name.partition("layers.")
        if "visual" in name:
            num_visual += 1
            if num_visual > 4:
                continue
        elif found:
            number, _, rest = rest.partition(".")
            if int(number) == 3 and not rest.startswith("hc_"):
                tensors[f"{head}layers.2.{rest}"] = x
            if int(number) not in layers:
                continue
            name = f"{head}layers.{layers[int(number)]}.{rest}"
        tensors[name] = x
    return config, tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    config, tensors = two_layers()
    directory = tmp_path_factory.mktemp("resume") / "src"
    released.write(directory, tensors, hf_config=config, num_shards=2)
    (directory / "chat_template.jinja").write_text("{{ messages }}\n")
    return directory


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """What a run without interruption writes."""
    destination = tmp_path_factory.mktemp("resume") / "whole"
    converter.convert(source, destination, mode="quiet")
    return content_of(destination)


def content_of(directory: pathlib.Path) -> dict[str, bytes]:
    """Every file's bytes; of Orbax's note, all but the time of day."""
    content = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            content[str(path.relative_to(directory))] = path.read_bytes()
    name = f"{native.WEIGHTS_NAME}/_CHECKPOINT_METADATA"
    if name in content:
        times = {"init_timestamp_nsecs": 0, "commit_timestamp_nsecs": 0}
        content[name] = json.dumps(json.loads(content[name]) | times).encode()
    return content
