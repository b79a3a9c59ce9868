"""`AloneOnPaper`: what a traced step asks of a GPU that has the whole model."""

import torch

from vramfit.step.window import clip


class AloneOnPaper:
    """One GPU."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.learned = [p for p in model.parameters() if p.requires_grad]

    def begin(self) -> None:
        return

    def before_pass(self, index: int, num_passes: int) -> None:
        return

    def clip(self, max_grad_norm: float | None) -> None:
        clip(self.learned, max_grad_norm)

    def size_of(self, parameter: torch.nn.Parameter) -> int:
        return parameter.nbytes
