"""Offloading of weights: layers wait in host memory and come to the device for their turn, the next one ahead of it.

Two slots on the device, each as large as the largest layer, take turns: while one layer computes, the next is
copied into the other slot on a stream of its own. So the device never holds more than the resident layers and two
others, and nothing is allocated while the model runs. In training a layer comes twice, the second time from the last
to the first, when checkpointing computes it again; its input waits on the host meanwhile (`layer_inputs`), and what
becomes of its gradients is `host_step`'s.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vramfit.errors import NoPlanFits, WorkloadError
from vramfit.models.anatomy import encoder_layers
from vramfit.techniques.offloading import layer_inputs
from vramfit.techniques.offloading.gradient_slots import held_bytes, out_of_sight
from vramfit.techniques.quantization import inner_tensors, with_inner_tensors
from vramfit.units import format_bytes

BLOCK_BYTES = 512
"""What CUDA's caching allocator rounds every request up to."""
NUM_SLOTS = 2
ATTRIBUTE = "_vramfit_slots"
"""Where an offloaded layer keeps its `LayerSlots`."""


def device_bytes(tensors: "Iterator[torch.Tensor] | Sequence[torch.Tensor]") -> int:
    """What tensors take on a device, block by block, each once."""
    unique = {id(t): t for t in tensors}.values()
    return sum(_rounded(part) for tensor in unique for _, part in inner_tensors(tensor))


def model_bytes(model: torch.nn.Module) -> int:
    """What a whole model takes on a device."""
    return device_bytes([*model.parameters(), *model.buffers()])


def num_resident_layers(model: torch.nn.Module, budget_bytes: int) -> int:
    """How many layers stay on the device, lowest first; all of them where the model fits.

    Args:
        model: in its final types, on the meta device or a real one.
        budget_bytes: what its weights may take on the device.

    Raises:
        NoPlanFits: not even without any resident layer.
    """
    sizes = [device_bytes([*layer.parameters()]) for layer in encoder_layers(model)]
    return choose_resident(model_bytes(model), sizes, budget_bytes)


def choose_resident(total_bytes: int, layer_bytes: Sequence[int], budget_bytes: int) -> int:
    """`num_resident_layers` for sizes that are known: of the whole model and of each layer."""
    if total_bytes <= budget_bytes:
        return len(layer_bytes)
    largest = max(layer_bytes, default=0)
    least = total_bytes - sum(layer_bytes) + min(NUM_SLOTS, len(layer_bytes)) * largest
    if least > budget_bytes:
        raise NoPlanFits(
            f"{format_bytes(least)} is the least the device must hold (all but the layers, and two layers at a time), "
            f"and the budget is {format_bytes(budget_bytes)}",
            shortfall_bytes=least - budget_bytes,
            hint="take precision bf16, quantize int8, or a smaller model",
        )
    num_resident, taken = 0, least
    while num_resident < len(layer_bytes) - NUM_SLOTS and taken + layer_bytes[num_resident] <= budget_bytes:
        taken += layer_bytes[num_resident]
        num_resident += 1
    return num_resident


def apply(
    model: torch.nn.Module, num_resident: int, device: torch.device | str, *, trains: bool = False
) -> "LayerSlots | None":
    """Offload all layers but the lowest `num_resident`, in place; None where there is nothing to offload.

    Args:
        model: on the meta device (a prediction), or with the layers to offload on the host and the rest on `device`;
            in training the rest is brought there.
        num_resident: layers left alone.
        device: where the model computes; `cpu` copies too, so that results can be compared anywhere.
        trains: the layers learn; all of them must be checkpointed. Their parameters stay the objects that they are.
    """
    layers = encoder_layers(model)[num_resident:]
    made = LayerSlots(layers, _whole(torch.device(device)), trains=trains) if layers else None
    if made is None or not trains:
        return made
    if any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        layer_inputs.apply(model)
    if made.device.type != "meta":
        _bring_others(model, made)
    return made


def _whole(device: torch.device) -> torch.device:
    """With its number: streams ask for it."""
    number: int | None = device.index
    if device.type != "cuda" or number is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _bring_others(model: torch.nn.Module, layers: "LayerSlots") -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in layers.computed:
            tensor.data = tensor.data.to(layers.device)


def layer_slots_of(model: torch.nn.Module) -> "LayerSlots | None":
    """What brings a model's offloaded layers; None where none is offloaded."""
    found = (module.__dict__.get(ATTRIBUTE) for module in model.modules())
    return next((s for s in found if s is not None), None)


def slots_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """What the offloaded layers of a model share on the device; nothing where none is offloaded."""
    slots = layer_slots_of(model)
    return [] if slots is None else slots.slots


class LayerSlots:
    """The slots of a model's offloaded layers, and the hooks that fill them."""

    def __init__(self, layers: list[torch.nn.Module], device: torch.device, *, trains: bool = False) -> None:
        self.device = device
        self.trains = trains
        self._layers = layers
        self._on_host = [_pack(layer, device) for layer in layers]
        size = max(buffer.numel() for buffer in self._on_host)
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(NUM_SLOTS, len(layers)))]
        """What the offloaded layers take on the device, all of them together."""
        self._held: list[int | None] = [None] * len(self.slots)
        self._copies: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._copies is not None:
            for slot in self.slots:  # a copy may still be on its way when the model goes
                slot.record_stream(self._copies)
        self._filled: list[Any] = [self._event() for _ in self.slots]
        self._free: list[Any] = [self._event() for _ in self.slots]
        views = _learning_views if trains else _views
        self._swaps = [
            (views(layer, buffer, keep=True), views(layer, self.slots[i % len(self.slots)], keep=False))
            for i, (layer, buffer) in enumerate(zip(layers, self._on_host, strict=True))
        ]
        self.computed = {
            id(waiting): computed
            for at_rest, at_work in self._swaps
            for (_, _, waiting), (_, _, computed) in zip(at_rest, at_work, strict=True)
        }
        """A parameter as the model has it → the one that computes in its place."""
        for index, layer in enumerate(layers):
            _put(self._swaps[index][0])
            layer.__dict__[ATTRIBUTE] = self
            layer.register_forward_pre_hook(lambda *_, index=index: self._bring(index))
            layer.register_forward_hook(lambda *_, index=index: self._release(index), always_call=True)

    @property
    def host_bytes(self) -> int:
        """What the layers take in host memory."""
        return sum(held_bytes(buffer.numel(), self.device) for buffer in self._on_host)

    def forget(self) -> None:
        """The weights on the host have changed: what the slots hold is old."""
        self._held = [None] * len(self.slots)

    def _event(self) -> Any:
        return torch.cuda.Event() if self._copies is not None else None  # type: ignore[no-untyped-call]

    def _bring(self, index: int) -> None:
        """Before a layer computes: its weights are there, and the next one's are on their way.

        Raises:
            WorkloadError: a layer that would keep its weights for backward, when other ones are in their place.
        """
        if self._learns() and not _is_checkpointed(self._layers[index]):
            raise WorkloadError(
                ["layers that wait in host memory keep nothing for backward, and this one is not checkpointed"],
                hint="checkpoint all layers and call model.train(), or compute under torch.no_grad()",
            )
        self._fill(index)
        slot = index % len(self.slots)
        if self._copies is not None:
            torch.cuda.current_stream(self.device).wait_event(self._filled[slot])
        _put(self._swaps[index][1])
        following = self._following(index)
        if following is not None and following % len(self.slots) != slot:
            self._fill(following)

    def _release(self, index: int) -> None:
        """After it has computed; in training its slot stays as it is, since its backward may be next."""
        _put(self._swaps[index][0])
        following = self._following(index)
        if not self._learns() and following is not None and following % len(self.slots) == index % len(self.slots):
            self._fill(following)

    def _learns(self) -> bool:
        return self.trains and torch.is_grad_enabled()

    def _following(self, index: int) -> int | None:
        """The layer that comes next: downwards in backward; after the last, the first of the next pass."""
        if not self._learns():
            return (index + 1) % len(self._on_host)
        following = index - 1 if _in_backward() else index + 1
        return following if 0 <= following < len(self._on_host) else None

    def _fill(self, index: int) -> None:
        """Copy a layer into its slot, once the device is through with all that has been asked of it until now."""
        slot = index % len(self.slots)
        if self._held[slot] == index:
            return
        source = self._on_host[index]
        target = self.slots[slot].data[: source.numel()]  # autograd need not know that the slot is written
        if self._copies is None:
            with out_of_sight(self.device):
                target.copy_(source)
        else:
            self._free[slot].record(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(self._free[slot])
                target.copy_(source, non_blocking=True)
                self._filled[slot].record(self._copies)
        self._held[slot] = index


def _is_checkpointed(layer: torch.nn.Module) -> bool:
    return layer.training and bool(getattr(layer, "gradient_checkpointing", False))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


Swap = list[tuple[torch.nn.Module, str, torch.nn.Parameter]]


def _put(swap: Swap) -> None:
    for module, name, parameter in swap:
        module._parameters[name] = parameter


def _own_parameters(layer: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def _rounded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // BLOCK_BYTES) * BLOCK_BYTES


def _pack(layer: torch.nn.Module, device: torch.device) -> torch.Tensor:
    """A layer's weights one after another in one host buffer, pinned where a GPU is to read it."""
    parts = [part for _, _, parameter in _own_parameters(layer) for _, part in inner_tensors(parameter)]
    buffer = torch.empty(sum(map(_rounded, parts)), dtype=torch.uint8, pin_memory=device.type == "cuda")
    begin = 0
    for part in parts:
        num_bytes = part.numel() * part.element_size()
        if part.device.type != "meta":
            flat = part.detach().contiguous().view(-1).view(torch.uint8)
            buffer[begin : begin + num_bytes].copy_(flat)
        begin += _rounded(part)
    return buffer


def _views(layer: torch.nn.Module, buffer: torch.Tensor, *, keep: bool) -> Swap:
    """A layer's parameters as views of a buffer that is laid out as `_pack` does; for inference."""
    swap: Swap = []
    begin = 0
    for module, name, parameter in _own_parameters(layer):
        parts = {}
        for key, part in inner_tensors(parameter):
            num_bytes = part.numel() * part.element_size()
            parts[key] = buffer[begin : begin + num_bytes].view(part.dtype).view(part.shape)
            begin += _rounded(part)
        made = with_inner_tensors(parameter, parts)
        made.requires_grad_(False)
        swap.append((module, name, made))
    return swap


def _learning_views(layer: torch.nn.Module, buffer: torch.Tensor, *, keep: bool) -> Swap:
    """The same for parameters that learn; `keep` puts the views into the parameters that are there."""
    swap: Swap = []
    begin = 0
    for module, name, parameter in _own_parameters(layer):
        data = buffer[begin : begin + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        begin += _rounded(parameter)
        if keep and not parameter.is_meta:
            parameter.data = data
            swap.append((module, name, parameter))
        else:
            swap.append((module, name, torch.nn.Parameter(data, requires_grad=parameter.requires_grad)))
    return swap
