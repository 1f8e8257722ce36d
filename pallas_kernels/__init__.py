"""Kernels of GLM-5.3-Flash: arrays in, arrays out, with no config, mesh or module library."""

from pallas_kernels.fp8_matmul.api import fp8_matmul
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.kda.api import chunk_kda, recurrent_kda
from pallas_kernels.kpool_indexer.api import kpool_indexer
from pallas_kernels.short_conv.api import short_conv
from pallas_kernels.sparse_mla.api import sparse_mla

__all__ = [
    "chunk_kda",
    "fp8_matmul",
    "grouped_matmul",
    "kpool_indexer",
    "recurrent_kda",
    "short_conv",
    "sparse_mla",
]
