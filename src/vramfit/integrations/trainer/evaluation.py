"""What the batches of an evaluation gave, kept as it came and put together once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def put_together_once() -> Iterator[None]:
    """Evaluations inside keep their batches as they come, and give the arrays that they would have given."""
    from transformers import trainer
    from transformers.trainer_pt_utils import EvalLoopContainer

    class KeptOutputs(EvalLoopContainer):  # type: ignore[misc]
        """Batches as they came: on the GPU, then on the host."""

        tensors: Any
        arrays: Any

        def add(self, tensors: Any) -> None:
            self.tensors = self.tensors or []
            self.tensors.append(whole(tensors))

        def to_cpu_and_numpy(self) -> None:
            if self.tensors is not None:
                self.arrays = self.arrays or []
                self.arrays += [on_host(batch) for batch in self.tensors]
                self.tensors = None

        def get_arrays(self) -> Any:
            self.to_cpu_and_numpy()
            joins = self.arrays is not None and self.do_nested_concat
            return put_together(self.arrays, self.padding_index) if joins else self.arrays

    before = getattr(trainer, "EvalLoopContainer", None)
    if before is not EvalLoopContainer:  # another version of transformers, or somebody's own
        yield
        return
    trainer.EvalLoopContainer = KeptOutputs
    try:
        yield
    finally:
        trainer.EvalLoopContainer = before


def whole(value: Any) -> Any:
    """The same tensors, copied where they are a part of something larger: it need not be kept for them."""
    return _each(value, lambda x: x.clone() if x.untyped_storage().nbytes() > x.nbytes else x)


def on_host(value: Any) -> Any:
    """The same tensors as arrays that keep none of their memory."""
    return _each(value, _array)


def _each(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A tensor changed, or the tensors of lists, tuples and mappings."""
    kind: Any = type(value)
    if isinstance(value, list | tuple):
        return kind(_each(part, change) for part in value)
    if isinstance(value, Mapping):
        return kind({name: _each(part, change) for name, part in value.items()})
    return change(value)


def _array(tensor: torch.Tensor) -> Any:
    moved = tensor.detach().cpu()
    array = (moved.float() if moved.dtype == torch.bfloat16 else moved).numpy()
    return array.copy() if tensor.device.type == "cpu" else array


def put_together(parts: Sequence[Any], filler: float) -> Any:
    """Arrays, or lists, tuples and mappings of them, one after another; rows of different widths are filled up."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, list | tuple):
        return type(first)(put_together(column, filler) for column in zip(*parts, strict=False))
    if isinstance(first, Mapping):
        kind: Any = type(first)
        return kind({name: put_together([part[name] for part in parts], filler) for name in first})
    arrays = [np.atleast_1d(part) for part in parts]
    if arrays[0].ndim == 1 or len({array.shape[1] for array in arrays}) == 1:
        return np.concatenate(arrays)
    shape = (sum(map(len, arrays)), max(array.shape[1] for array in arrays), *arrays[0].shape[2:])
    made = np.full(shape, filler, dtype=np.result_type(*arrays))
    begin = 0
    for array in arrays:
        made[begin : begin + len(array), : array.shape[1]] = array
        begin += len(array)
    return made
