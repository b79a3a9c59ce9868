"""`HostStep`: the optimizer in host memory. Gradients go there as they are produced, weights come back after its step.

Each parameter that learns has a home on the host: a master in fp32, which the optimizer steps, a place where gradients
land, and their sum over the micro-batches of a window, in fp32. The device holds weights and, of the gradients, the
one that is being made. Adam's step is computed on a GPU, to which its state comes piece by piece (`streamed_step`);
that of other optimizers on the host.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.errors import BudgetExceeded, WorkloadError
from vramfit.techniques.offloading import layer_slots_of
from vramfit.techniques.offloading.gradient_slots import Adder, GradientSlots, HostArena
from vramfit.techniques.offloading.streamed_step import DECOUPLED, MOMENTS, Stepped, StreamedStep, is_streamable
from vramfit.units import format_bytes

MASTER = torch.float32
NUM_MOMENTS = {"Adam": 2, "AdamW": 2, "SGD": 0}
"""Tensors of a parameter's size that an optimizer keeps; others are taken to keep two."""


@dataclass(eq=False, slots=True)
class Home:
    """Where a parameter lives in host memory; in a prediction it has no master and no sum."""

    weight: torch.nn.Parameter
    """As the model has it."""
    computed: torch.nn.Parameter
    """What computes: the same, or a view of the slot that a layer comes to."""
    master: torch.nn.Parameter
    landing: torch.Tensor
    """For gradients on their way in, and for weights on their way out."""
    total: torch.Tensor
    num_received: int = 0
    """Gradients of this window that have been sent."""
    waits: bool = False
    """Whether the last of them has not been added yet."""

    @property
    def has_own_master(self) -> bool:
        """Whether the master is another tensor than the weight."""
        return self.master is not self.weight


class HostStep:
    """Takes an optimizer to host memory: from now on it steps masters there.

    Args:
        model: on its device; or with layers offloaded for training (`offloading.apply`).
        optimizer: over its parameters. State that it has is taken along; what it is given as parameters changes, so
            its schedulers and its settings stay.
        host_memory: bytes that this may take of the host.
        streams: compute the step on the device; None where it is a GPU and the optimizer is Adam.

    Raises:
        BudgetExceeded: it would take more than `host_memory`.
        WorkloadError: parameters that do not lie densely, or an optimizer of 8 bits.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        host_memory: int | None = None,
        streams: bool | None = None,
    ) -> None:
        self._layers = layer_slots_of(model)
        learned = [p for group in optimizer.param_groups for p in group["params"]]
        computed = [self._computed(p) for p in learned]
        self.device = computed[0].device
        self.traces = self.device.type == "meta"
        _check(model, learned, computed, optimizer)
        streams = self.device.type != "cpu" if streams is None else streams
        self.streams = streams and is_streamable(optimizer)
        """Whether the step is computed on the device."""
        sizes = _home_sizes(learned, computed, streams=self.streams)
        self.host_bytes = HostArena.measure(sizes, self.device)
        """What it takes of the host's memory, optimizer state and offloaded layers included."""
        self.host_bytes += 0 if self.streams else sum(_state_bytes(p, optimizer) for p in learned)
        self.num_weights = sum(p.numel() for p in learned)
        """Weights that are stepped there."""
        self.host_bytes += 0 if self._layers is None else self._layers.host_bytes
        self._check_budget(host_memory)
        self._outlet = GradientSlots(self.device, max(p.nbytes for p in computed))
        self._stream = StreamedStep(self._outlet.slots) if self.streams else None
        self._arena = HostArena(sum(sizes), self.device)
        self._factor: float | None = None
        self._is_only_pass = False
        self.homes = self._make_homes(learned, computed)
        before = _of_models.get(model)
        if before is not None:
            before.end()  # gradients leave by one way only
        _of_models[model] = self
        self._hooks = [self._listen(index) for index in range(len(self.homes))]
        if not self.traces:
            _rehouse(optimizer, self.homes)
            self._make_moments(optimizer)
        self._adder = Adder() if self.device.type == "cuda" else None

    @property
    def masters(self) -> dict[int, torch.nn.Parameter]:
        """A weight of the model, by `id` → what the optimizer steps."""
        return {id(home.weight): home.master for home in self.homes}

    def end(self) -> None:
        """Gradients stay on the device again."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, *, is_only_pass: bool) -> None:
        """A window begins: the gradients of an only pass need not be added up where the device steps them."""
        self._is_only_pass = is_only_pass and self.streams and not self.traces
        self._factor = None

    def gather(self) -> None:
        """Wait until all gradients of the window have arrived; masters have their sums then, if there is a sum."""
        self._wait()
        for home in self.homes:
            has_sum = home.num_received and not self.traces and not self._stays_narrow(home)
            home.master.grad = home.total if has_sum else None

    def clip(self, max_grad_norm: float | None) -> None:
        """By the norm of all gradients, as torch does it; where the device steps, it multiplies too."""
        if max_grad_norm is None or self.traces:
            return
        if not self.streams:
            clip_grad_norm_([home.master for home in self.homes], max_grad_norm)
            return
        norms = [torch.linalg.vector_norm(self._gradient(h), dtype=MASTER) for h in self.homes if h.num_received]
        factor = max_grad_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)
        self._factor = float(torch.clamp(factor, max=1.0))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Adam's step on the device, for all that waits here; weights are what they should be when it returns."""
        assert self._stream is not None
        self._make_moments(optimizer)
        homes = {id(home.master): home for home in self.homes if home.num_received}
        groups = []
        for group in optimizer.param_groups:
            settings = {**group, DECOUPLED: group.get(DECOUPLED, isinstance(optimizer, torch.optim.AdamW))}
            by_count: dict[int, list[Stepped]] = {}
            for master in group["params"]:
                if id(master) in homes:
                    state = optimizer.state[master]
                    state["step"] += 1
                    by_count.setdefault(int(state["step"]), []).append(self._stepped(homes[id(master)], state))
            groups += [(settings, count, stepped) for count, stepped in by_count.items()]
        with torch.no_grad():
            self._stream.take(groups, self._factor)
        if self._layers is not None:
            self._layers.forget()

    def _stepped(self, home: Home, state: dict[str, torch.Tensor]) -> Stepped:
        first, second = (state[name] for name in MOMENTS)
        weight = home.weight.detach() if home.has_own_master else None
        return Stepped(home.master.detach(), self._gradient(home), (first, second), weight)

    def _gradient(self, home: Home) -> torch.Tensor:
        return home.landing if self._stays_narrow(home) else home.total

    def _stays_narrow(self, home: Home) -> bool:
        """Whether the only gradient of a window is left as it landed."""
        return self._is_only_pass and home.landing.dtype != MASTER and home.num_received == 1

    def _make_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Where the device steps: moments that it can read, made now; those that are there already move."""
        if not self.streams:
            return
        pins = self.device.type == "cuda"
        for name in MOMENTS:
            for home in self.homes:
                state = optimizer.state[home.master]
                state.setdefault("step", torch.tensor(0.0))
                there = state.get(name)
                if there is None or (pins and not there.is_pinned()):
                    made = self._arena.empty_like(home.master, MASTER)
                    state[name] = made.zero_() if there is None else made.copy_(there)

    def drop(self) -> None:
        """As if nothing had been received."""
        self._wait()
        for home in self.homes:
            home.num_received = 0
            home.master.grad = home.computed.grad = None

    def write(self, masters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Weights become what their masters are; those of layers stay on the host until their turn."""
        chosen = None if masters is None else {id(master) for master in masters}
        with torch.no_grad():
            for home in self.homes:
                if chosen is None or id(home.master) in chosen:
                    self._write(home)
        if self._layers is not None:
            self._layers.forget()

    def read(self) -> None:
        """Masters become what the weights are: these have been loaded."""
        with torch.no_grad():
            for home in self.homes:
                if home.has_own_master:
                    home.master.copy_(home.weight)
        if self._layers is not None:
            self._layers.forget()

    def _computed(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        return parameter if self._layers is None else self._layers.computed.get(id(parameter), parameter)

    def _check_budget(self, host_memory: int | None) -> None:
        if host_memory is not None and self.host_bytes > host_memory:
            raise BudgetExceeded(
                f"offloading takes {format_bytes(self.host_bytes)} of the host's memory, "
                f"and it may take {format_bytes(host_memory)}",
                predicted_bytes=self.host_bytes,
                observed_bytes=host_memory,
                phase="load",
                hint="give more host_memory, freeze a part of the model, or take less of it to the host",
            )

    def _listen(self, index: int) -> Any:
        """Weakly: a parameter that held this would hold itself, where no garbage collector sees it."""
        itself = ref(self)

        def take(computed: torch.Tensor) -> None:
            host = itself()
            if host is not None:
                host._take(host.homes[index], computed)

        register: Any = self.homes[index].computed.register_post_accumulate_grad_hook
        return register(take)

    def _make_homes(self, learned: list[torch.nn.Parameter], computed: list[torch.nn.Parameter]) -> list[Home]:
        pairs = list(zip(learned, computed, strict=True))
        try:
            with _disable_current_modes():
                landings, totals = self._rooms(learned), self._rooms(learned, MASTER)
                masters = {id(p): p for p, c in pairs if self.traces or _is_stepped_in_place(p, c)}
                others = [p for p in learned if id(p) not in masters]
                for weight, room in zip(others, self._rooms(others, MASTER), strict=True):
                    masters[id(weight)] = torch.nn.Parameter(room.copy_(weight.detach()))
                rooms = zip(pairs, landings, totals, strict=True)
                return [Home(p, c, masters[id(p)], landing, total) for (p, c), landing, total in rooms]
        except (RuntimeError, MemoryError) as error:
            raise BudgetExceeded(
                f"the host does not give the {format_bytes(self.host_bytes)} that offloading takes: "
                f"{str(error).splitlines()[0] if str(error) else 'out of memory'}",
                predicted_bytes=self.host_bytes,
                observed_bytes=0,
                phase="load",
                hint="end other programs, freeze a part of the model, or take a smaller one",
            ) from error

    def _rooms(self, weights: list[torch.nn.Parameter], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Memory on the host for each weight, in its type or another: side by side, to be copied many at a time."""
        if self.traces:
            return [torch.empty_strided(w.shape, w.stride(), dtype=w.dtype) for w in weights]
        return [self._arena.empty_like(w, dtype or w.dtype) for w in weights]

    def _take(self, home: Home, computed: torch.Tensor) -> None:
        """A gradient has been made: it goes to the host, and its memory on the device is free."""
        assert computed.grad is not None
        narrow = self._stays_narrow(home)
        if home.waits or narrow:
            self._wait()
        if narrow:  # the same weight once more
            _begin(home)
        first = home.num_received == 0
        lands_at_once = first and home.total.dtype == computed.grad.dtype
        target = home.total if lands_at_once else home.landing
        home.num_received += 1
        if lands_at_once or self.traces or (first and self._is_only_pass):
            self._outlet.send(computed.grad, target)
        else:
            home.waits = self._adder is not None
            self._outlet.send(computed.grad, target, partial(self._arrive, home, _begin if first else _add))
        computed.grad = None

    def _arrive(self, home: Home, add: Callable[[Home], None], arrived: Any) -> None:
        """A gradient is on its way, or there: it is added when it is."""
        if self._adder is None:
            with _disable_current_modes():
                add(home)
        else:
            self._adder.put(arrived, partial(_finish, home, add))

    def _wait(self) -> None:
        """Until all that was sent is there, and added."""
        self._outlet.wait()
        if self._adder is not None:
            self._adder.wait()

    def _write(self, home: Home) -> None:
        on_device = home.weight is home.computed
        if self.traces and on_device:
            home.weight.copy_(home.landing)
        elif home.has_own_master:
            rounds = on_device and home.weight.dtype != MASTER  # here, so that the device need not hold the master
            source = home.landing.copy_(home.master) if rounds else home.master
            home.weight.copy_(source, non_blocking=True)


_of_models: "WeakKeyDictionary[torch.nn.Module, HostStep]" = WeakKeyDictionary()


def _finish(home: Home, add: Callable[[Home], None]) -> None:
    """What has arrived is added, and its landing is free again."""
    try:
        add(home)
    finally:
        home.waits = False


def _begin(home: Home) -> None:
    home.total.copy_(home.landing)


def _add(home: Home) -> None:
    home.total.add_(home.landing)


def _rehouse(optimizer: torch.optim.Optimizer, homes: list[Home]) -> None:
    """The optimizer's parameters become the masters; its state, if it has any, goes along."""
    masters = {id(home.weight): home.master for home in homes}
    for group in optimizer.param_groups:
        group["params"] = [masters[id(p)] for p in group["params"]]
    for weight in [p for p in optimizer.state if id(p) in masters]:
        state = optimizer.state.pop(weight)
        optimizer.state[masters[id(weight)]] = {
            name: value.detach().to("cpu", MASTER if value.is_floating_point() else value.dtype, copy=True)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in state.items()
        }


def _is_stepped_in_place(weight: torch.nn.Parameter, computed: torch.nn.Parameter) -> bool:
    """Whether a weight is its own master: it waits on the host, in fp32."""
    return weight is not computed and weight.dtype == MASTER


def _home_sizes(learned: list[torch.nn.Parameter], computed: list[torch.nn.Parameter], *, streams: bool) -> list[int]:
    """Bytes of landings, sums and masters, and of moments that are made here, in the order in which they are made."""
    own = [p for p, c in zip(learned, computed, strict=True) if not _is_stepped_in_place(p, c)]
    wide = [learned, own, *[learned] * (len(MOMENTS) * streams)]
    return [w.nbytes for w in learned] + [MASTER.itemsize * w.numel() for ws in wide for w in ws]


def _state_bytes(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> int:
    if isinstance(optimizer, torch.optim.Adafactor):
        rows_and_columns = sum(weight.numel() // weight.shape[i] for i in (-1, -2)) if weight.dim() > 1 else 0
        return MASTER.itemsize * (rows_and_columns or weight.numel())
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    num_moments = NUM_MOMENTS.get(type(optimizer).__name__, 2) + momentum
    return MASTER.itemsize * weight.numel() * num_moments


def _check(
    model: torch.nn.Module,
    learned: list[torch.nn.Parameter],
    computed: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    problems = []
    own = {id(p) for p in model.parameters()}
    if not all(id(p) in own for p in learned):
        problems.append("the optimizer has parameters that are not the model's: was it taken to host memory before?")
    if any(p is not c and p.device.type != "cpu" for p, c in zip(learned, computed, strict=True)):
        problems.append("the offloaded layers were moved out of host memory: do not move the model after offloading")
    if getattr(optimizer, "steps_in_place", None) is not None:
        problems.append(f"{type(optimizer).__name__} rounds its state to save memory of a GPU: take AdamW on the host")
    if not all(torch.ops.aten.is_non_overlapping_and_dense.default(p) for p in learned):
        problems.append("offload: a parameter overlaps itself or has holes")
    if problems:
        raise WorkloadError(problems)
