"""Token smearing: each embedding takes in a gated share of its predecessor's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from glm5next_jax.config import SMEAR_CHANNELS
from glm5next_jax.linear import Linear


class Smear(nnx.Module):
    """x_t + lambda · sigmoid(gate(x_t[:24])) · x_{t-1}, over raw embeddings.

    The predecessor of a call's first token is in the state; zeros there mean that there is none, so
    one formula serves the start of a prompt, a later chunk and a decode step alike.
    Leaves: smear_gate.weight [1, 24], smear_lambda [1].
    """

    def __init__(self, *, rngs, dtype, std: float):
        self.smear_gate = Linear(SMEAR_CHANNELS, 1, rngs=rngs, dtype=dtype, std=std)
        self.smear_lambda = nnx.Param(jnp.zeros((1,), dtype))

    def __call__(
        self, x: jax.Array, state: jax.Array, num_valid: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D], state [B, D], num_valid [B] -> (smeared x, the last valid row of x)."""
        history = jnp.concatenate([state[:, None], x], axis=1)  # [B, 1 + T, D]
        gate_logits = self.smear_gate(x[..., :SMEAR_CHANNELS], out_dtype=jnp.float32)  # [B, T, 1]
        gate = self.smear_lambda[...].astype(jnp.float32) * jax.nn.sigmoid(gate_logits)
        smeared = x.astype(jnp.float32) + gate * history[:, :-1].astype(jnp.float32)
        last = jnp.take_along_axis(history, num_valid[:, None, None], axis=1)[:, 0]
        return smeared.astype(x.dtype), last
