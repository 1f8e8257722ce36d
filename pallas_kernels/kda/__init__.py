"""Kimi Delta Attention: a delta-rule recurrence with one decay per channel. See README.md."""

from pallas_kernels.kda.api import chunk_kda, recurrent_kda

__all__ = ["chunk_kda", "recurrent_kda"]
