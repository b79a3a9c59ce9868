"""Models built without drawing weights that nobody holds: half the time of a build on the meta device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

DRAWING = ("constant_", "kaiming_uniform_", "normal_", "ones_", "uniform_", "xavier_uniform_", "zeros_")
"""The functions of `torch.nn.init` that torch's own modules call as they are made."""


@contextmanager
def undrawn() -> Iterator[None]:
    """While it lasts, `torch.nn.init` leaves tensors on the meta device as they are; real ones, which another thread
    may be making, are drawn as ever."""
    import torch

    left_alone: dict[str, Any] = {name: _left_alone(getattr(torch.nn.init, name)) for name in DRAWING}
    with patch.multiple(torch.nn.init, **left_alone):
        yield


def _left_alone(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Once: threads that end in another order than they began may leave one behind, but never a pile."""
    if hasattr(draw, "leaves_meta_alone"):
        return draw

    def fill(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if tensor.is_meta else draw(tensor, *args, **kwargs)

    fill.leaves_meta_alone = True  # type: ignore[attr-defined]
    return fill
