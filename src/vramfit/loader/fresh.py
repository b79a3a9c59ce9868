"""What no checkpoint holds: a new head, and buffers that are computed, not learned; the same for the same seed."""

from typing import Any

import torch

from vramfit.loader.walk import Slot, tensor_slots


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
    settled = {id(module) for module in model.modules()} - _touched(model, wanted)
    for slot in slots:
        key = id(slot.tensor)
        if key not in wanted:
            slot.tensor._is_hf_initialized = True  # type: ignore[attr-defined]
            continue
        if key not in made:
            made[key] = _on_host(slot)
        slot.put(made[key])
    for module in model.modules():
        if id(module) in settled:
            module._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model.initialize_weights()


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
