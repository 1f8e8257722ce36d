"""The short causal depthwise convolution in front of KDA, with its SiLU and its streaming state."""

from pallas_kernels.short_conv.api import short_conv

__all__ = ["short_conv"]
