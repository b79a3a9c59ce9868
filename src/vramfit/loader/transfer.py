"""From the files to the device: one tensor at a time, read when it is needed, in its final type when it arrives."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from vramfit.checkpoints.files import Kind, ran_out
from vramfit.checkpoints.inspection import Inspection
from vramfit.checkpoints.reading import opened
from vramfit.checkpoints.safetensors_file import TensorEntry
from vramfit.errors import CheckpointError

STAGE_BYTES = 16 * 2**20
"""Each of two pinned buffers: while one is on its way, the other is filled."""
STAGED_FROM_BYTES = 2**20
"""Smaller tensors are copied at once: the driver has a buffer of its own for them."""


class CheckpointTensors(Mapping[str, torch.Tensor]):
    """Model name → tensor on the host, in the type it was saved in; open within a `with`. None gives none."""

    def __init__(self, inspection: Inspection | None) -> None:
        self._entries: dict[str, TensorEntry] = {}
        if inspection is not None:
            entries = {entry.name: entry for entry in inspection.entries}
            self._entries = {target: entries[name] for name, target in inspection.targets.items()}
        self._kind: Kind = "safetensors" if inspection is None else inspection.files.kind
        self._opened: dict[Path, Callable[[str], torch.Tensor]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "CheckpointTensors":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.clear()
        self._stack.close()  # what has been read stays: a view keeps its mapping

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> torch.Tensor:
        """A view of the file.

        Raises:
            CheckpointError: the file has changed since it was inspected.
        """
        entry = self._entries[name]
        try:
            tensor = self._read(entry)
        except (OSError, RuntimeError, KeyError, ValueError, MemoryError) as error:
            if ran_out(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise _changed(entry, f"cannot be read: {reason}") from None
        except Exception as error:  # safetensors and pickle raise errors of their own
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise _changed(entry, f"cannot be read: {reason}") from None
        if tuple(tensor.shape) != entry.shape:
            raise _changed(entry, f"has shape {tuple(tensor.shape)} now, {entry.shape} when it was inspected")
        return tensor

    def num_bytes(self, name: str) -> int:
        """What a tensor takes in its file."""
        return self._entries[name].num_bytes

    def _read(self, entry: TensorEntry) -> torch.Tensor:
        tensor_of = self._opened.get(entry.file)
        if tensor_of is None:
            tensor_of = self._stack.enter_context(opened(entry.file, self._kind))
            self._opened[entry.file] = tensor_of
        return tensor_of(entry.name).detach()


def _changed(entry: TensorEntry, what: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.file.name}: tensor {entry.name!r} {what}",
        file=str(entry.file),
        tensor=entry.name,
        hint="something else may be writing the file; copy it again and retry",
    )


class Transfer(Protocol):
    """Brings host tensors to a device."""

    device: torch.device

    def bring(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the device, in `dtype`."""

    def finish(self) -> None:
        """Wait until everything has arrived."""


def make_transfer(device: torch.device) -> Transfer:
    """The way to a device."""
    return ToCuda(device) if device.type == "cuda" else ToHost(device)


class ToHost:
    """Stays on the host: a tensor already in its type stays a view of its file, and is read when it is used."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def bring(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return source.to(self.device, dtype)

    def finish(self) -> None:
        pass


class ToCuda:
    """Through two pinned buffers, converted on the host: fewer bytes travel, and the device holds only the result."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stages = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._stages]  # type: ignore[no-untyped-call]
        self._next = 0

    def bring(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        target = torch.empty(source.shape, dtype=dtype, device=self.device)
        if target.numel() * target.element_size() < STAGED_FROM_BYTES:
            target.copy_(source)
            return target
        from_, to = source.contiguous().view(-1), target.view(-1)
        step = STAGE_BYTES // dtype.itemsize
        for begin in range(0, to.numel(), step):
            self._send(from_[begin : begin + step], to[begin : begin + step])
        return target

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        stage, sent = self._stages[self._next], self._sent[self._next]
        self._next = 1 - self._next
        sent.synchronize()
        piece = stage.view(target.dtype)[: target.numel()]
        piece.copy_(source)
        target.copy_(piece, non_blocking=True)
        sent.record(torch.cuda.current_stream(self.device))

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)
