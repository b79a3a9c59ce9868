"""What each kernel asks of the allocator besides its outputs, and in which order: one file a family."""

from vramfit.cuda.kernels import attention, elementwise, reductions
from vramfit.cuda.kernels.script import KERNELS

FAMILIES = (attention, elementwise, reductions)

__all__ = ["FAMILIES", "KERNELS"]
