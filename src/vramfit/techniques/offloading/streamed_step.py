"""`StreamedStep`: Adam's step for state that waits in host memory, computed on the device piece by piece.

A piece of masters, gradients and moments comes to a slot, is stepped there by the same kernel as on the device, and
goes back, while the next one is on its way into the other slot. So the host computes nothing, and a step takes as long
as its bytes take on the link. The slots are those by which gradients leave: they are idle then.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vramfit.techniques.offloading.gradient_slots import Copies, flat

WIDE = torch.float32
SLOT_BYTES_A_WEIGHT = 18
"""Master, gradient and two moments in fp32, and a place for what comes or goes in 16 bits."""
ALIGNED_WEIGHTS = 256
MAX_KEPT = 64
"""Sets of pieces that are kept for the next step; more are those of parameters that come and go."""
MOMENTS = ("exp_avg", "exp_avg_sq")
DECOUPLED = "decoupled_weight_decay"


@dataclass(eq=False, slots=True)
class Stepped:
    """What a step reads and writes of one parameter, in host memory."""

    master: torch.Tensor
    gradient: torch.Tensor
    """Its sum in fp32, or the only one, in the type of the weight."""
    moments: tuple[torch.Tensor, torch.Tensor]
    weight: torch.Tensor | None
    """Where the weight goes, if it is not the master: on the device, or on the host in few bits."""

    def places(self) -> Iterator[int]:
        """Where in memory all this is."""
        for tensor in (self.master, self.gradient, *self.moments):
            yield tensor.data_ptr()
        yield 0 if self.weight is None else self.weight.data_ptr()


@dataclass(slots=True)
class Piece:
    """As much as one slot holds."""

    inwards: Copies = field(default_factory=lambda: Copies(num_kinds=4))
    """From the host into the slot."""
    widened: Copies = field(default_factory=Copies)
    """Gradients in 16 bits, from one place in the slot to another."""
    outwards: Copies = field(default_factory=lambda: Copies(num_kinds=4))
    """From the slot to the host."""
    weights: Copies = field(default_factory=Copies)
    """Masters in the slot to weights on the device, or to their rounded copies in the slot."""
    num_weights: int = 0


def is_streamable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is Adam or AdamW, with nothing that the kernel does not know."""
    plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return plain and not hooked and not any(g["amsgrad"] or g.get("differentiable") for g in optimizer.param_groups)


class StreamedStep:
    """The slots, and the streams that fill and empty them.

    Args:
        slots: of bytes, on the device; idle while a step is taken.
    """

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self.device = slots[0].device
        self._slots = [_stretches(slot) for slot in slots]
        self._count = torch.zeros((), dtype=WIDE, device=self.device)
        self._made: dict[tuple[int, ...], list[Piece]] = {}
        on_gpu = self.device.type == "cuda"
        self._ways: Any = [torch.cuda.Stream(self.device) for _ in range(2)] if on_gpu else None  # type: ignore[no-untyped-call]
        self._events: Any = [[torch.cuda.Event() for _ in range(3)] for _ in slots] if on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def piece_weights(self) -> int:
        """How many weights a slot holds with all that belongs to them."""
        return self._slots[0][0].numel()

    def take(self, groups: Sequence[tuple[dict[str, Any], int, Sequence[Stepped]]], factor: float | None) -> None:
        """One step; when it returns everything is where it belongs.

        Args:
            groups: settings, the number of the step, and the parameters that take it.
            factor: what gradients are multiplied by first; None where nothing is clipped.
        """
        number = 0
        for settings, count, parameters in groups:
            self._count.fill_(count)
            for piece in self._pieces(parameters, number):
                self._send(number % len(self._slots), piece, settings, factor)
                number += 1
        if len(self._made) > MAX_KEPT:
            self._made.clear()
        if self._ways is not None:
            self._ways[1].synchronize()
            torch.cuda.current_stream(self.device).synchronize()

    def _pieces(self, parameters: Sequence[Stepped], number: int) -> Iterator[Piece]:
        """Those of the last step, where its tensors are the same."""
        key = (number % len(self._slots), *(place for parameter in parameters for place in parameter.places()))
        if key in self._made:
            yield from self._made[key]
            return
        made = []
        for piece in self._make_pieces(parameters, number):
            made.append(piece)
            yield piece
        self._made[key] = made

    def _make_pieces(self, parameters: Sequence[Stepped], number: int) -> Iterator[Piece]:
        piece = Piece()
        for parameter in parameters:
            done, size = 0, parameter.master.numel()
            while done < size:
                if piece.num_weights == self.piece_weights:
                    yield piece
                    piece, number = Piece(), number + 1
                num = min(size - done, self.piece_weights - piece.num_weights)
                _put(piece, self._slots[number % len(self._slots)], parameter, done, num)
                done += num
        if piece.num_weights:
            yield piece

    def _send(self, slot: int, piece: Piece, settings: dict[str, Any], factor: float | None) -> None:
        if self._ways is None:
            piece.inwards.send()
            self._compute(slot, piece, settings, factor)
            piece.outwards.send()
            return
        there, ready, free = self._events[slot]
        here = torch.cuda.current_stream(self.device)
        inwards, outwards = self._ways
        with torch.cuda.stream(inwards):
            inwards.wait_event(free)
            piece.inwards.send()
            there.record(inwards)
        here.wait_event(there)
        self._compute(slot, piece, settings, factor)
        ready.record(here)
        with torch.cuda.stream(outwards):
            outwards.wait_event(ready)
            piece.outwards.send()
            free.record(outwards)

    def _compute(self, slot: int, piece: Piece, settings: dict[str, Any], factor: float | None) -> None:
        piece.widened.send()
        master, gradient, first, second, _ = (part[: piece.num_weights] for part in self._slots[slot])
        if factor is not None:
            gradient.mul_(factor)
        step = torch._fused_adamw_ if settings[DECOUPLED] else torch._fused_adam_
        step(
            [master], [gradient], [first], [second], [], [self._count],
            lr=float(settings["lr"]), beta1=settings["betas"][0], beta2=settings["betas"][1],
            weight_decay=settings["weight_decay"], eps=settings["eps"], amsgrad=False, maximize=settings["maximize"],
        )  # fmt: skip
        piece.weights.send()


def _stretches(slot: torch.Tensor) -> list[torch.Tensor]:
    """Four stretches of a slot in fp32 and one in 16 bits, each aligned, for as many weights as go in."""
    num = slot.numel() // SLOT_BYTES_A_WEIGHT
    num = num // ALIGNED_WEIGHTS * ALIGNED_WEIGHTS or num // 2 * 2
    wide = [slot[i * num * 4 : (i + 1) * num * 4].view(WIDE) for i in range(4)]
    return [*wide, slot[16 * num : 18 * num].view(torch.bfloat16)]


def _put(piece: Piece, slot: list[torch.Tensor], parameter: Stepped, begin: int, num: int) -> None:
    """A stretch of a parameter into the next place of a piece."""
    at = piece.num_weights
    master, gradient, first, second, narrow = (part[at : at + num] for part in slot)
    kept = [flat(t)[begin : begin + num] for t in (parameter.master, *parameter.moments)]
    for in_slot, on_host in zip((master, first, second), kept, strict=True):
        piece.inwards.add(in_slot, on_host)
        piece.outwards.add(on_host, in_slot)
    given = flat(parameter.gradient)[begin : begin + num]
    if given.dtype == WIDE:
        piece.inwards.add(gradient, given)
    else:
        piece.inwards.add(narrow.view(given.dtype), given)
        piece.widened.add(gradient, narrow.view(given.dtype))
    if parameter.weight is not None:
        weight = flat(parameter.weight)[begin : begin + num]
        if weight.device == master.device:
            piece.weights.add(weight, master)
        else:
            piece.weights.add(narrow.view(weight.dtype), master)
            piece.outwards.add(weight, narrow.view(weight.dtype))
    piece.num_weights += num
