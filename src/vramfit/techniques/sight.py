"""What an emulated GPU must not see: where it stands for the device, host tensors are on the CPU as its own are."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


def out_of_sight(device: torch.device) -> AbstractContextManager[Any]:
    """Where the device is the CPU, what happens inside is not counted as the device's."""
    return _disable_current_modes() if device.type == "cpu" else nullcontext()
