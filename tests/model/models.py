"""Small models with weights at which every part of the architecture matters."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm5next_jax import Glm5NextConfig
from glm5next_jax.model import Glm5NextForCausalLM


def with_config(model: Glm5NextForCausalLM, **changes) -> Glm5NextForCausalLM:
    """The same weights under a changed configuration of the same shapes."""
    changed = Glm5NextForCausalLM.abstract(model.config.replace(**changes))
    graphdef, wanted = nnx.split(changed)
    weights = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    cast = [
        (path, leaf.replace(weights[path][...].astype(leaf.get_value().dtype)))
        for path, leaf in nnx.to_flat_state(wanted)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(cast))


def random_model(
    config: Glm5NextConfig, seed: int = 0, *, fp8: bool = False
) -> Glm5NextForCausalLM:
    """A model whose every weight matters.

    The reference's initialisation leaves biases, gates and mixing at neutral values and logits
    nearly flat; here matrices have unit gain and the rest is moved off its neutral value.
    """
    rng = np.random.default_rng(seed)

    def fresh(path, spec) -> jax.Array:
        name = path[-1] if path[-1] != "weight" else ".".join(map(str, path[-2:]))
        value = rng.normal(size=spec.shape)
        if spec.dtype == jnp.float8_e4m3fn:  # unit gain is in the factors
            return jnp.asarray(np.clip(value, -4, 4), spec.dtype)
        if str(path[-1]).endswith("_scale_inv"):
            columns = dict(shapes)[(*path[:-1], path[-1].removesuffix("_scale_inv"))][-1]
            return jnp.asarray(columns**-0.5 * rng.uniform(0.5, 1.5, spec.shape), spec.dtype)
        if name in ("embed_tokens.weight", "qkv_conv1d.weight"):
            pass
        elif len(spec.shape) >= 2 and name != "index_kpool_compress_ape":
            value *= spec.shape[-1] ** -0.5
        else:
            is_norm_weight = len(path) > 1 and "norm" in str(path[-2]) and path[-1] == "weight"
            value = float(is_norm_weight or name == "scale") + 0.3 * value
        return jnp.asarray(value, spec.dtype)

    graphdef, specs = nnx.split(Glm5NextForCausalLM.abstract(config, fp8=fp8))
    shapes = [(path, leaf.get_value().shape) for path, leaf in nnx.to_flat_state(specs)]
    leaves = [
        (path, leaf.replace(fresh(path, leaf.get_value())))
        for path, leaf in nnx.to_flat_state(specs)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))
