"""The matmul with one FP8 weight."""

from pallas_kernels.fp8_matmul.api import fp8_matmul

__all__ = ["fp8_matmul"]
