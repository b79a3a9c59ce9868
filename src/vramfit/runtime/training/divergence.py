"""Whether a run still learns: losses that are no numbers, and fp16 steps that are skipped again and again."""

import math
from collections.abc import Sequence

import torch

from vramfit.errors import VramfitError

MAX_SKIPPED = 20
"""fp16 windows without a step, one after another: the scale halves at each, and would be 2⁻⁴ of one by then."""


class Diverged(VramfitError):
    """Training has left the numbers; the last checkpoint is from before."""


class Watch:
    """Counts what is not finite, and ends a run that does not come back.

    Args:
        scales: whether a GradScaler skips steps that overflow; elsewhere a loss that is no number has reached the
            weights already.
    """

    def __init__(self, *, scales: bool) -> None:
        self.num_nonfinite = 0
        """Batches whose loss was infinite or no number."""
        self.num_skipped_in_a_row = 0
        self._scales = scales

    def see(self, step: int, loss: float, *, skipped: bool) -> Diverged | None:
        """One batch went through; gives the error to end with, where the run does not come back."""
        self.num_nonfinite += not math.isfinite(loss)
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        if not self._scales and not math.isfinite(loss):
            return Diverged(f"the loss of step {step:,} is {loss}: training has diverged", hint=ADVICE)
        if self.num_skipped_in_a_row >= MAX_SKIPPED:
            return Diverged(
                f"{MAX_SKIPPED} steps in a row, up to step {step:,}, overflowed in fp16 and were skipped",
                hint=f"take precision amp-bf16 or fp32; {ADVICE}",
            )
        return None

    def check_weights(self, step: int, parameters: Sequence[torch.Tensor]) -> None:
        """Before a checkpoint is written.

        Raises:
            Diverged: weights that are not finite, which no checkpoint should have.
        """
        # sums need no memory of their own, and what is not finite stays so in them
        sums = [p.detach().sum(dtype=torch.float32) for p in parameters]
        if not torch.stack(sums).isfinite().all():
            raise Diverged(f"weights are no longer finite after step {step:,}: training has diverged", hint=ADVICE)

    def state_dict(self) -> dict[str, int]:
        """For a resumed run."""
        return {"num_nonfinite": self.num_nonfinite, "num_skipped_in_a_row": self.num_skipped_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a `state_dict` was taken."""
        self.num_nonfinite, self.num_skipped_in_a_row = state["num_nonfinite"], state["num_skipped_in_a_row"]


ADVICE = (
    "start anew with a lower learning rate (a third), a longer warm-up or max_grad_norm 1; the checkpoints that are "
    "there are from before"
)
