"""Pooled index keys, their scores, and the pools that each query selects."""

from pallas_kernels.kpool_indexer.api import kpool_indexer

__all__ = ["kpool_indexer"]
