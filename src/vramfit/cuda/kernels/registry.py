"""Every kernel description, found by operator name."""

from vramfit.cuda.kernels import attention, convolution, elementwise, embedding_backward, reductions
from vramfit.cuda.kernels.script import KERNELS

FAMILIES = (attention, convolution, elementwise, embedding_backward, reductions)

__all__ = ["FAMILIES", "KERNELS"]
