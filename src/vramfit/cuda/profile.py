"""`CudaProfile`: what a (torch version, GPU) pair decides: workspaces, kernel choice, whether it was measured."""

import json
from dataclasses import dataclass
from pathlib import Path

from vramfit.units import MIB

VERIFIED = {
    (tuple(entry["torch"]), tuple(entry["compute_capability"]))
    for entry in json.loads(Path(__file__).with_name("verified.json").read_text(encoding="utf-8"))
}
"""(torch, compute capability) pairs on which predictions were compared with measurement: by this project, or by
receipts. A test holds the file to the folder `receipts` of the repository."""

HOPPER_WORKSPACE_BYTES = 4096 * 8 * 1024
DEFAULT_WORKSPACE_BYTES = 4096 * 2 * 1024 + 16 * 8 * 1024
"""aten/src/ATen/cuda/CublasHandlePool.cpp (2.11), parseChosenWorkspaceSize: 32 MiB on sm_90, else :4096:2:16:8."""
LT_WORKSPACE_BYTES = 1 * MIB
"""aten/src/ATen/cuda/CUDABlas.cpp (2.11), CUBLASLT_WORKSPACE_SIZE's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaProfile:
    """A GPU and a torch release, as far as memory depends on them."""

    compute_capability: tuple[int, int]
    num_multiprocessors: int
    max_threads_per_multiprocessor: int
    torch_version: tuple[int, int]

    @property
    def verified(self) -> bool:
        """Whether this very pair has been measured."""
        return (self.torch_version, self.compute_capability) in VERIFIED

    @property
    def cublas_workspace_bytes(self) -> int:
        """Kept by each thread from its first matrix product on."""
        return HOPPER_WORKSPACE_BYTES if self.compute_capability[0] >= 9 else DEFAULT_WORKSPACE_BYTES

    @property
    def cublaslt_workspace_bytes(self) -> int:
        """Kept by each thread from its first product with a bias on."""
        return LT_WORKSPACE_BYTES

    @property
    def prefers_cudnn_attention(self) -> bool:
        """sdp_utils.cpp (2.11), check_prefer_cudnn_attention: Hopper and data-centre Blackwell."""
        return self.compute_capability in ((9, 0), (10, 0))

    @property
    def has_flash_attention(self) -> bool:
        """sdp_utils.cpp (2.11), check_flash_attention_hardware_support: sm_80 and newer."""
        return self.compute_capability >= (8, 0)

    @property
    def has_efficient_attention(self) -> bool:
        """sdp_utils.cpp (2.11), check_mem_efficient_hardware_support: sm_50 and newer."""
        return self.compute_capability >= (5, 0)

    @property
    def has_bf16(self) -> bool:
        """Native bfloat16 arithmetic."""
        return self.compute_capability >= (8, 0)
