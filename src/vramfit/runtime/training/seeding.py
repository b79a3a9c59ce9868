"""Every generator a run draws from, begun at one number."""

import random
import sys

import torch


def seed_everything(seed: int) -> None:
    """Seed Python, torch on every device, and numpy where it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
