"""Attention of absorbed MLA queries over the latents of selected pools."""

from pallas_kernels.sparse_mla.api import sparse_mla

__all__ = ["sparse_mla"]
