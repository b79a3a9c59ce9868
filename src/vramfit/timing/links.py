"""How long GPUs talk: gradients that are added up, layers that are gathered, inside a machine and between machines.

None of it was measured: NVIDIA's published rates, and a share of them that collectives usually reach.
"""

from dataclasses import dataclass

from vramfit.devices.catalogue import GPU
from vramfit.timing.speed import link_bytes_per_s

NVLINK_BYTES_PER_S = {
    "v100-16gb": 150e9,
    "v100-32gb": 150e9,
    "a100-40gb": 300e9,
    "a100-80gb": 300e9,
    "h100-sxm": 450e9,
    "h200": 450e9,
    "b200": 900e9,
}
"""One direction, all links of a GPU, as NVIDIA publishes them; other GPUs are taken to talk over PCIe."""
REACHED = 0.7
"""What collectives reach of it."""
NETWORK_BYTES_PER_S = 12.5e9
"""Between machines: 100 Gbit/s for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """GPUs of one kind, and how they are joined."""

    num_gpus: int
    num_nodes: int
    inside_bytes_per_s: float
    between_bytes_per_s: float = NETWORK_BYTES_PER_S * REACHED

    @staticmethod
    def of(gpu: GPU, num_gpus: int, num_nodes: int) -> "Links":
        """The links of a catalogue GPU."""
        nvlink = NVLINK_BYTES_PER_S.get(gpu.name)
        inside = link_bytes_per_s(gpu) if nvlink is None else nvlink * REACHED
        return Links(num_gpus=num_gpus, num_nodes=num_nodes, inside_bytes_per_s=inside)

    def gather_s(self, num_bytes: int) -> float:
        """Every GPU gets what the others have of so many bytes; to scatter sums takes as long."""
        each = self.num_gpus / self.num_nodes
        inside = (each - 1) / each * num_bytes / self.inside_bytes_per_s
        between = (self.num_nodes - 1) / self.num_nodes * num_bytes / self.between_bytes_per_s
        return max(inside, 0.0) + between

    def add_up_s(self, num_bytes: int) -> float:
        """Every GPU gets the sum: scattered, then gathered."""
        return 2 * self.gather_s(num_bytes)

    def in_words(self) -> str:
        """What is assumed."""
        inside = f"{self.inside_bytes_per_s / 1e9:.0f} GB/s between GPUs of a machine"
        nodes = f", {self.between_bytes_per_s / 1e9:.1f} GB/s between {self.num_nodes} machines"
        return f"talk between GPUs is timed with {inside}{nodes if self.num_nodes > 1 else ''}; not measured"
