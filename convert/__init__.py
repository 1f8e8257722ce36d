"""Conversion of released PyTorch checkpoints to JAX arrays: `glm5next-convert SRC DST`."""
