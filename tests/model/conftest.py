"""The golden model: a tiny checkpoint with the reference's activations."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from glm5next_jax import Glm5NextConfig, load
from glm5next_jax.model import Glm5NextForCausalLM

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="session")
def golden_config() -> Glm5NextConfig:
    return Glm5NextConfig.from_hf(GOLDEN / "tiny_config.json")


@pytest.fixture(scope="session")
def golden_model(tmp_path_factory) -> Glm5NextForCausalLM:
    """Loaded as a user would load it; its tensors carry transformers' in-memory names."""
    directory = tmp_path_factory.mktemp("golden")
    shutil.copy(GOLDEN / "tiny_config.json", directory / "config.json")
    shutil.copy(GOLDEN / "tiny_weights.safetensors", directory / "model.safetensors")
    return load(directory)


@pytest.fixture(scope="session")
def shared_indexer_model(tmp_path_factory) -> Glm5NextForCausalLM:
    """Four layers, the third of which reuses the selection of the second."""
    change = json.loads((GOLDEN / "golden_meta.json").read_text())["E.shared_indexer"]
    config = json.loads((GOLDEN / "tiny_config.json").read_text())
    text = config["text_config"]
    for name in ("num_hidden_layers", "layer_types", "indexer_types"):
        text[name] = change[name]
    text["mlp_layer_types"] = text["mlp_layer_types"][:4]
    tensors = load_file(GOLDEN / "tiny_weights.safetensors")
    for name in list(tensors):
        layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else 0
        # Layers 1 to 3 change their mixer; the extra file holds it.
        if layer >= 4 or (layer > 0 and ".self_attn." in name):
            del tensors[name]
    tensors |= load_file(GOLDEN / "tiny_weights_shared_extra.safetensors")
    directory = tmp_path_factory.mktemp("shared")
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return load(directory)
