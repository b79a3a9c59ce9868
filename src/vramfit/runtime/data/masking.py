"""Masked language modelling: which tokens are hidden, from the seed, the epoch and the sample alone."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.techniques.packing import IGNORED

REPLACED = 0.8
"""Of the chosen tokens, this part becomes the mask token, half of the rest another token, and the rest stays (Devlin
et al. 2019)."""
OTHER = 0.9


@dataclass(frozen=True, slots=True)
class Masking:
    """How tokens are hidden."""

    seed: int
    probability: float
    mask_id: int
    special_ids: torch.Tensor
    num_ids: int

    @staticmethod
    def of(tokenizer: Any, seed: int, probability: float) -> "Masking":
        """For a tokenizer.

        Raises:
            WorkloadError: it has no mask token, or the probability is none.
        """
        problems = []
        if tokenizer.mask_token_id is None:
            problems.append("the tokenizer has no mask token, so there is no masked language modelling with it")
        if not 0 < probability <= 1:
            problems.append(f"mask_probability {probability} is not above 0 and at most 1")
        if problems:
            raise WorkloadError(problems)
        special = torch.tensor(sorted(tokenizer.all_special_ids), dtype=torch.long)
        return Masking(seed, probability, int(tokenizer.mask_token_id), special, len(tokenizer))

    def hide(self, ids: torch.Tensor, epoch: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A sample with tokens hidden, and its labels; at least one is hidden where any may be."""
        key = f"{self.seed}/{epoch}/{index}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
        draws = torch.rand(3, len(ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        choice = torch.where(torch.isin(ids, self.special_ids), 2.0, draws[0])
        chosen = choice < self.probability
        if not chosen.any() and bool((choice < 1).any()):
            chosen[choice.argmin()] = True
        labels = torch.where(chosen, ids, IGNORED)
        others = (draws[2] * self.num_ids).long()
        hidden = torch.where(chosen & (draws[1] < REPLACED), self.mask_id, ids)
        return torch.where(chosen & (draws[1] >= REPLACED) & (draws[1] < OTHER), others, hidden), labels
