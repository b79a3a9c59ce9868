"""The tensors of a checkpoint, one at a time: views of the mapped file, so that nothing is read before it is needed."""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from vramfit.checkpoints.entry import TensorEntry
from vramfit.checkpoints.inspection import Inspection
from vramfit.errors import CheckpointError
from vramfit.loader.host import ran_out


class CheckpointTensors(Mapping[str, torch.Tensor]):
    """Model name → tensor on the host, in the type it was saved in; open within a `with`. None gives none."""

    def __init__(self, inspection: Inspection | None) -> None:
        self._entries: dict[str, TensorEntry] = {}
        if inspection is not None:
            entries = {entry.name: entry for entry in inspection.entries}
            self._entries = {target: entries[name] for name, target in inspection.targets.items()}
        self._is_pickle = inspection is not None and inspection.files.kind == "bin"
        self._opened: dict[Path, Any] = {}
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
        file = self._opened.get(entry.file)
        if file is None:
            file = self._opened[entry.file] = self._open(entry.file)
        tensor: torch.Tensor = file[entry.name] if self._is_pickle else file.get_tensor(entry.name)
        return tensor.detach()

    def _open(self, path: Path) -> Any:
        if self._is_pickle:
            # Files older than torch 1.6 are no zip archives and cannot be mapped; no code runs either way.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        from safetensors import safe_open

        return self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))


def _changed(entry: TensorEntry, what: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.file.name}: tensor {entry.name!r} {what}",
        file=str(entry.file),
        tensor=entry.name,
        hint="something else may be writing the file; copy it again and retry",
    )
