"""Times layers of the released widths on one GPU and on several: random weights, no checkpoint.

    python -m benchmarks.gpus --layers 4 --model 2                             # one GPU and two
    python -m benchmarks.gpus --layers 8 --weights bf16 fp8 --tokens 0 --decode 1 32   # decoding

Each figure is the median of repeated calls of one compiled program, waiting for its result.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm5next_jax import Glm5NextConfig, init_cache, make_mesh, shard
from glm5next_jax.forward import last_valid
from glm5next_jax.model import Glm5NextForCausalLM

_CONTEXT = 1024  # tokens before a decode step


def first_layers(layers: int) -> Glm5NextConfig:
    """The first layers of the released model."""
    whole = Glm5NextConfig.glm53_flash()
    return whole.replace(
        num_hidden_layers=layers,
        layer_types=whole.layer_types[:layers],
        mlp_layer_types=whole.mlp_layer_types[:layers],
        indexer_types=whole.indexer_types[:layers],
    )


def random_model(config: Glm5NextConfig, *, fp8: bool) -> Glm5NextForCausalLM:
    """Matrices of unit gain, everything else off its neutral value; made leaf by leaf."""
    graphdef, specs = nnx.split(Glm5NextForCausalLM.abstract(config, fp8=fp8))
    flat = nnx.to_flat_state(specs)
    shapes = {path: leaf.get_value().shape for path, leaf in flat}
    filled = []
    for number, (path, leaf) in enumerate(flat):
        spec, name = leaf.get_value(), str(path[-1])
        if name.endswith("_scale_inv"):
            columns = shapes[(*path[:-1], name.removesuffix("_scale_inv"))][-1]
            value = jnp.full(spec.shape, columns**-0.5, spec.dtype)
        else:
            unit = spec.dtype == jnp.float8_e4m3fn or len(spec.shape) < 2
            gain = 1.0 if unit else spec.shape[-1] ** -0.5
            is_norm = len(spec.shape) == 1 and ("norm" in str(path[-2]) or name == "scale")
            gain, centre = (0.1, 1.0) if is_norm else (gain, 0.0)
            value = _random(jax.random.key(number), gain, centre, spec.shape, spec.dtype)
        filled.append((path, leaf.replace(value)))
    model = nnx.merge(graphdef, nnx.from_flat_state(filled))
    jax.block_until_ready(jax.tree.leaves(model))
    return model


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _random(key, gain, centre, shape, dtype):
    def one(key, shape):
        return (centre + gain * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    if len(shape) < 3:
        return one(key, shape)
    # One expert at a time: all of them in float32 would not fit.
    return jax.lax.map(lambda key: one(key, shape[1:]), jax.random.split(key, shape[0]))


class Stepper:
    """One call of the model: its cache donated, the logits of each row's last token out."""

    def __init__(self, model: Glm5NextForCausalLM):
        self.model = model
        self._leaves, treedef = jax.tree.flatten(model)

        @functools.partial(jax.jit, donate_argnums=2)
        def step(leaves, token_ids, cache, num_valid):
            model: Glm5NextForCausalLM = jax.tree.unflatten(treedef, leaves)
            hidden, cache = model(token_ids, cache, num_valid)
            return model.logits(last_valid(hidden, num_valid)), cache

        self._step = step

    def cache(self, batch: int, capacity: int, length: int = 0):
        cache = init_cache(self.model.config, batch, capacity, mesh=self.model.mesh)
        return dataclasses.replace(cache, length=jnp.full_like(cache.length, length))

    def __call__(self, batch: int, tokens: int, cache):
        rng = np.random.default_rng(0)
        vocab = self.model.config.vocab_size
        token_ids = rng.integers(0, vocab, (batch, tokens)).astype(np.int32)
        num_valid = np.full((batch,), tokens, np.int32)
        start = time.perf_counter()
        logits, cache = self._step(self._leaves, token_ids, cache, num_valid)
        jax.block_until_ready(logits)
        return logits, cache, 1e3 * (time.perf_counter() - start)


def prefill(model: Glm5NextForCausalLM, tokens: int, repeats: int) -> tuple[float, np.ndarray]:
    """(milliseconds, logits) of a prompt of `tokens` tokens."""
    step = Stepper(model)
    logits, _, _ = step(1, tokens, step.cache(1, tokens))
    times = [step(1, tokens, step.cache(1, tokens))[2] for _ in range(repeats)]
    return statistics.median(times), np.asarray(logits, np.float64)


def decode(model: Glm5NextForCausalLM, batch: int, repeats: int) -> float:
    """Milliseconds of a step of `batch` rows behind `_CONTEXT` tokens."""
    step = Stepper(model)
    _, cache, _ = step(batch, 1, step.cache(batch, _CONTEXT + 4 * repeats, _CONTEXT))
    times = []
    for _ in range(3 * repeats):
        _, cache, elapsed = step(batch, 1, cache)
        times.append(elapsed)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, metavar="N", help="first N layers (4)")
    add("--weights", nargs="+", choices=("bf16", "fp8"), default=["bf16"], help="at rest (bf16)")
    add("--tokens", type=int, default=8192, metavar="N", help="of the prefilled prompt; 0: none")
    add("--model", type=int, default=1, metavar="M", help="also on a mesh of M GPUs")
    add("--decode", type=int, nargs="*", default=[], metavar="B", help="decode steps of B rows")
    add("--repeats", type=int, default=8, metavar="N", help="calls that are timed (8)")
    add("--output", metavar="FILE.json", help="results with versions")
    args = parser.parse_args()

    config = first_layers(args.layers)
    device = jax.devices()[0]
    report: dict = {"jax": jax.__version__, "device": device.device_kind, "layers": args.layers}
    for weights in args.weights:
        figures = report[weights] = {}
        model = random_model(config, fp8=weights == "fp8")
        figures["weight_bytes"] = sum(x.nbytes for x in jax.tree.leaves(model))
        for batch in args.decode:
            figures[f"decode_ms_batch_{batch}"] = decode(model, batch, args.repeats)
        if args.tokens:
            figures["prefill_ms"], alone = prefill(model, args.tokens, args.repeats)
            if args.model > 1:
                model = shard(model, make_mesh(model=args.model))
                figures[f"prefill_ms_model_{args.model}"], together = prefill(
                    model, args.tokens, args.repeats
                )
                difference = np.linalg.norm(together - alone) / np.linalg.norm(alone)
                figures["logits_relative_l2"] = float(difference)
        print(json.dumps({weights: figures}), flush=True)
        del model
    if args.output:
        pathlib.Path(args.output).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
