"""Shapes that tests and benchmarks share, and the one table of tolerances.

A tolerance is a bound on the relative L2 error against the NumPy float64 oracle, ||got - want|| /
||want||, over outputs and final states. The comment beside each gives the largest error measured
when it was set (CPU, jax 0.10.2). Widening one needs a reason in the commit message.
"""

import ml_dtypes
import numpy as np

TOLERANCES: dict[tuple[str, str], float] = {
    # kda: "states" is the float32 state, whatever the inputs' dtype; "hard" is 8192 tokens with
    # nearly or exactly the same key, slow decay and beta 0.95, outputs and states; "gradients" is
    # against autodiff of the reference in float32.
    ("chunk_kda", "float32"): 1e-6,  # 3.8e-7
    ("chunk_kda", "bfloat16"): 2.5e-3,  # 1.7e-3
    ("chunk_kda.states", "float32"): 1e-6,  # 2.3e-7
    ("chunk_kda.hard", "float32"): 1e-5,  # 2.6e-6
    ("chunk_kda.gradients", "float32"): 2e-6,  # 7.1e-7
    # The TPU kernel, outputs and states, in interpret mode with the operands' rounding.
    ("chunk_kda.tpu", "float32"): 1e-5,  # 1.7e-6, slow gates
    ("chunk_kda.tpu", "bfloat16"): 6e-3,  # 5.2e-3, all gates at the bound
    ("chunk_kda.tpu.hard", "bfloat16"): 2e-2,  # 1.3e-2
    ("recurrent_kda", "float32"): 1e-6,  # 2.5e-7
    ("recurrent_kda", "bfloat16"): 2.5e-3,  # 1.7e-3
    ("recurrent_kda.states", "float32"): 1e-6,  # 2.6e-7
    ("recurrent_kda.hard", "float32"): 4e-4,  # 1.4e-4
    ("recurrent_kda.gradients", "float32"): 1e-6,  # 3.1e-7
    # short_conv
    ("short_conv", "float32"): 5e-7,  # 8.2e-8
    ("short_conv", "bfloat16"): 3e-3,  # 2.3e-3
    ("short_conv.gradients", "float32"): 5e-7,  # 1.0e-7
    # kpool_indexer: the pool keys; its scores, relative to the query's largest one
    ("kpool_indexer", "float32"): 1e-6,  # 9.5e-8
    ("kpool_indexer", "bfloat16"): 4e-3,  # 2.1e-3
    ("kpool_indexer.scores", "float32"): 1e-5,  # 3.0e-6, with one head; 4.8e-7 with 32 heads
    # sparse_mla
    ("sparse_mla", "float32"): 1e-6,  # 1.0e-7
    ("sparse_mla", "bfloat16"): 5e-3,  # 2.3e-3
    # grouped_matmul: outputs and both gradients
    ("grouped_matmul", "float32"): 1e-6,  # 6.9e-8 outputs, 1.4e-7 gradients
    ("grouped_matmul", "bfloat16"): 5e-3,  # 2.1e-3 outputs, 2.7e-3 gradients
    ("grouped_matmul.fp8", "float32"): 1e-6,  # 3.6e-7 outputs, 2.5e-7 gradient of x
    ("grouped_matmul.fp8", "bfloat16"): 4e-3,  # 2.3e-3
    # fp8_matmul: outputs and the gradient of x
    ("fp8_matmul", "float32"): 2e-6,  # 3.6e-7; 1.2e-6 on an H200, whose matmul cuts long sums
    ("fp8_matmul", "bfloat16"): 4e-3,  # 1.7e-3
    # modules of the model in bfloat16, against the reference implementation in bfloat16
    ("kda_layer", "bfloat16"): 5e-3,  # 3.6e-3
    ("kda_layer.state", "bfloat16"): 3e-3,  # 1.5e-3
    ("dsa_layer", "bfloat16"): 7e-3,  # 5.0e-3
    ("moe", "bfloat16"): 6e-3,  # 4.3e-3
    ("router", "bfloat16"): 1e-6,  # 7.4e-8, weights from bfloat16 inputs
    ("swiglu", "bfloat16"): 5e-3,  # 3.7e-3
    ("hc_pre", "bfloat16"): 5e-4,  # 0
    ("hc_pre.post", "bfloat16"): 1e-6,  # 1.5e-7
    ("hc_pre.comb", "bfloat16"): 1e-6,  # 2.2e-7
    ("hc_post", "bfloat16"): 4e-3,  # 2.8e-3
    ("rms_norm", "bfloat16"): 5e-4,  # 0
    ("gated_rms_norm", "bfloat16"): 5e-4,  # 7.7e-6, one rounding in thousands
    ("layer_norm", "bfloat16"): 5e-4,  # 0
    # the whole model: logits of a prompt in pieces against the prompt at once
    ("cut_invariance", "bfloat16"): 3e-2,  # 2.2e-2
}

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def relative_l2(got, want) -> float:
    """||got - want|| / ||want|| in float64; 0 where both are zero."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    norm, error = np.linalg.norm(want), np.linalg.norm(got - want)
    return float(error if norm == 0 else error / norm)


# Around every edge of the 16-row blocks and 64-token chunks, and the shortest ones.
KDA_LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 130)

# What a gate logit is made of, (mean, spread between channels, spread between tokens), and the
# bound. "trained": most channels keep their memory for long, a few forget within tokens.
# "unbounded_huge" makes one gate in ten huge.
KDA_REGIMES: dict[str, tuple[float, float, float, float | None]] = {
    "strong": (2.0, 0.0, 1.0, -5.0),
    "trained": (-3.0, 2.5, 1.0, -5.0),
    "slow": (-9.0, 0.0, 0.5, -5.0),
    "at_bound": (60.0, 0.0, 1.0, -5.0),
    "unbounded": (3.0, 0.0, 3.0, None),
    "unbounded_huge": (-5.0, 0.0, 1.0, None),
}


def kda_inputs(B, T, H, K, V, regime="trained", *, dtype="float32", seed=0):
    """The positional arguments of `chunk_kda` as NumPy arrays, and the lower bound."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    mean, between_channels, between_tokens, lower_bound = KDA_REGIMES[regime]
    gates = mean + between_channels * normal(H, K) + between_tokens * normal(B, T, H, K)
    if regime == "unbounded_huge":
        gates = np.where(rng.random(gates.shape) < 0.1, 1e5 * np.abs(gates), gates)
    raw = [normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V), gates, normal(B, T, H)]
    raw = [x.astype(_DTYPES[dtype]) for x in raw]
    return [*raw, 0.5 * normal(H), 0.3 * normal(H * K), normal(B, H, K, V)], lower_bound


SHORT_CONV_LENGTHS = (1, 2, 3, 4, 17, 40)


def short_conv_inputs(B, T, C, W, *, dtype="float32", seed=0):
    """The positional arguments of `short_conv` as NumPy arrays."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, C), (C, W), (B, W - 1, C)
    x, weight, state = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return [x.astype(_DTYPES[dtype]), weight, state.astype(_DTYPES[dtype])]
