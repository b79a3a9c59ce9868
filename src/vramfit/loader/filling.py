"""Tensors on their way from files into a model: read when needed, one at a time, in their final type on arrival.

What no checkpoint holds, a new head and buffers that are computed, is initialised first, the same for the same seed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from vramfit.checkpoints.files import Kind, one_line, ran_out
from vramfit.checkpoints.inspection import Inspection
from vramfit.checkpoints.reading import opened
from vramfit.checkpoints.safetensors_file import TensorEntry
from vramfit.errors import CheckpointError
from vramfit.models.anatomy import encoder_layers
from vramfit.techniques import quantization
from vramfit.workload import Workload

STAGE_BYTES = 16 * 2**20
"""Each of two pinned buffers: while one is on its way, the other is filled."""
STAGED_FROM_BYTES = 2**20
"""Smaller tensors are copied at once: the driver has a buffer of its own for them."""
USUAL_STD = 0.02
"""Of weights as transformers draws them, where a configuration does not say."""


class CheckpointTensors(Mapping[str, torch.Tensor]):
    """Model name → tensor on the host, in the type it was saved in; open within a `with`. None gives none."""

    def __init__(self, inspection: Inspection | None) -> None:
        self._entries: dict[str, TensorEntry] = {}
        if inspection is not None:
            entries = {entry.name: entry for entry in inspection.entries}
            self._entries = {target: entries[name] for name, target in inspection.targets.items()}
            self._entries |= inspection.head.entries
        several = () if inspection is None else (inspection.files, *inspection.head.files)
        self._kinds: dict[Path, Kind] = {path: files.kind for files in several for path in files.paths}
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
        except Exception as error:  # safetensors and pickle raise errors of their own
            if ran_out(error):
                raise
            raise _changed(entry, f"cannot be read: {one_line(error)}") from None
        if tuple(tensor.shape) != entry.shape:
            raise _changed(entry, f"has shape {tuple(tensor.shape)} now, {entry.shape} when it was inspected")
        return tensor

    def num_bytes(self, name: str) -> int:
        """What a tensor takes in its file."""
        return self._entries[name].num_bytes

    def _read(self, entry: TensorEntry) -> torch.Tensor:
        tensor_of = self._opened.get(entry.file)
        if tensor_of is None:
            tensor_of = self._stack.enter_context(opened(entry.file, self._kinds[entry.file]))
            self._opened[entry.file] = tensor_of
        return tensor_of(entry.name).detach()


def _changed(entry: TensorEntry, what: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.file.name}: tensor {entry.name!r} {what}",
        file=str(entry.file),
        tensor=entry.name,
        hint="something else may be writing the file; copy it again and retry",
    )


class ToHost:
    """Stays on the host: a tensor already in its type stays a view of its file, and is read when it is used."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def bring(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the device, in `dtype`."""
        return source.to(self.device, dtype)

    def finish(self) -> None:
        """Wait until everything has arrived."""


class ToCuda(ToHost):
    """Through two pinned buffers, converted on the host: fewer bytes travel, and the device holds only the result."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
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


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place for a tensor; places that share a tensor are several slots."""

    module: torch.nn.Module
    name: str
    path: str
    """The name in the model's state."""
    tensor: torch.Tensor
    """What it held when the walk came by."""

    @property
    def is_parameter(self) -> bool:
        return self.name in self.module._parameters

    @property
    def is_computed(self) -> bool:
        """A buffer that is never saved: the model works it out."""
        return self.name in self.module._non_persistent_buffers_set

    @property
    def is_cast(self) -> bool:
        """Whether it comes in the type of the weights: computed buffers keep their own, as transformers leaves them."""
        return self.tensor.is_floating_point() and not self.is_computed

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor in its place, without a copy."""
        if self.is_parameter:
            assert isinstance(tensor, torch.nn.Parameter)
            self.module._parameters[self.name] = tensor
        else:
            self.module._buffers[self.name] = tensor


def tensor_slots(module: torch.nn.Module, path: str = "") -> Iterator[Slot]:
    """Children first, then own parameters and buffers: the order of `Module.to`, and of a prediction."""
    for name, child in module.named_children():
        yield from tensor_slots(child, f"{path}.{name}" if path else name)
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            yield Slot(module, name, f"{path}.{name}" if path else name, tensor)


@torch.no_grad()
def initialise(model: Any, fresh: set[str], seed: int = 0) -> None:
    """Give fresh tensors and computed buffers of a meta model their values, on the host, in the type it was built in.

    It is done as transformers does it after a load: what is marked as loaded is left alone, and the model's own
    `_init_weights` sees to the rest. The program's random state is not touched.

    Args:
        model: on the meta device; what is initialised here is on the host afterwards.
        fresh: names of the parameters and saved buffers to be initialised.
        seed: of the host's generator meanwhile, so that every device and precision gets the same values.
    """
    slots = list(tensor_slots(model))
    wanted = {id(slot.tensor) for slot in slots if slot.path in fresh or slot.is_computed}
    made: dict[int, torch.Tensor] = {}
    unsure: list[tuple[str, torch.Tensor]] = []
    settled = {id(module) for module in model.modules()} - _touched(model, wanted)
    for slot in slots:
        key = id(slot.tensor)
        if key not in wanted:
            slot.tensor._is_hf_initialized = True  # type: ignore[attr-defined]
            continue
        if key not in made:
            made[key] = _on_host(slot)
            if slot.is_parameter and made[key].is_floating_point() and made[key].numel():
                made[key].view(-1)[0] = torch.nan
                unsure.append((slot.name, made[key]))
        slot.put(made[key])
    for module in model.modules():
        if id(module) in settled:
            module._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model.initialize_weights()
        for name, tensor in unsure:
            if tensor.view(-1)[0].isnan():
                _draw(name, tensor)


def _draw(name: str, tensor: torch.Tensor) -> None:
    """As most of transformers does, where a family draws a weight only as it makes the module (the first GPT)."""
    if tensor.dim() > 1:
        tensor.normal_(std=USUAL_STD)
    else:
        tensor.fill_(1.0 if name == "weight" else 0.0)


def _touched(model: torch.nn.Module, wanted: set[int]) -> set[int]:
    """Modules that hold a tensor to be initialised, anywhere below: a parent may draw for its children."""
    touched: set[int] = set()

    def visit(module: torch.nn.Module) -> bool:
        below = [visit(child) for child in module.children()]
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(below) or any(id(tensor) in wanted for tensor in own if tensor is not None):
            touched.add(id(module))
        return id(module) in touched

    visit(model)
    return touched


def _on_host(slot: Slot) -> torch.Tensor:
    empty = torch.empty_like(slot.tensor, device="cpu")
    if slot.is_parameter:
        return torch.nn.Parameter(empty, requires_grad=slot.tensor.requires_grad)
    return empty


class Filling:
    """How a model is filled: from where, in which types, and which of its layers stay on the host.

    Args:
        model: on the meta device, or initialised in part.
        tensors: model name → tensor on the host.
        num_resident: layers that stay on the device.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        workload: Workload,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        num_resident: int,
    ) -> None:
        self._tensors, self._workload = tensors, workload
        self.transfer = ToCuda(device) if device.type == "cuda" else ToHost(device)
        self._host = ToHost(torch.device("cpu"))
        chosen = quantization.quantizable(model, workload)
        for linear in chosen:
            quantization.give_product(linear, workload)
        self.quantized = {id(linear) for linear in chosen}
        """Modules whose weight is quantized, by identity."""
        waiting = encoder_layers(model)[num_resident:]
        self._offloaded = {id(module) for layer in waiting for module in layer.modules()}

    def fill(self, model: torch.nn.Module, on_tensor: Callable[[str], None]) -> None:
        """Put every tensor in its place; shared ones come once.

        Args:
            on_tensor: called with the name of each checkpoint tensor that has been taken.

        Raises:
            CheckpointError: a tensor that is neither in the checkpoint nor initialised.
        """
        slots = list(tensor_slots(model))
        names: dict[int, list[str]] = {}
        for slot in slots:
            names.setdefault(id(slot.tensor), []).append(slot.path)
        placed: dict[int, tuple[torch.Tensor, str | None]] = {}
        for slot in slots:
            found = placed.get(id(slot.tensor))
            if found is None or self._differs(slot.path, found[1]):
                there = [name for name in names[id(slot.tensor)] if name in self._tensors]
                source = slot.path if found is not None else next(iter(there), None)
                found = (self._bring(slot, source), source)
                if source is not None:
                    on_tensor(source)
                placed.setdefault(id(slot.tensor), found)
            slot.put(found[0])

    def _differs(self, path: str, source: str | None) -> bool:
        """Whether the checkpoint has another tensor of its own for a place that the model shares with another."""
        if source is None or path == source or path not in self._tensors:
            return False
        return not torch.equal(self._tensors[path], self._tensors[source])

    def _bring(self, slot: Slot, source: str | None) -> torch.Tensor:
        if source is None and slot.tensor.device.type == "meta":
            raise CheckpointError(f"{slot.path} is neither in the checkpoint nor initialised", tensor=slot.path)
        on_host = slot.tensor.detach() if source is None else self._tensors[source]
        stays = id(slot.module) in self._offloaded and slot.is_parameter
        transfer = self._host if stays else self.transfer
        dtype = self._workload.weight_dtype if slot.is_cast else slot.tensor.dtype
        if not slot.is_parameter:
            return transfer.bring(on_host, dtype)
        if id(slot.module) in self.quantized and slot.name == "weight":
            rows_of = partial(transfer.bring, dtype=dtype)
            return quantization.quantize_rows(on_host, self._workload, dtype, transfer.device, rows_of)
        return torch.nn.Parameter(transfer.bring(on_host, dtype), requires_grad=slot.tensor.requires_grad)


def empty(model: torch.nn.Module) -> None:
    """Take every tensor out of a model, so that whoever still holds it holds no memory."""
    for slot in tensor_slots(model):
        slot.module._parameters.pop(slot.name, None)
        slot.module._buffers.pop(slot.name, None)
